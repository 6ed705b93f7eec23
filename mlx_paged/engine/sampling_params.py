"""How a request is sampled, and when it stops."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import numpy as np

from mlx_paged.core import StopPolicy
from mlx_paged.engine.checks import is_text
from mlx_paged.engine.grammar import StructuredOutputs, structured_outputs_of
from mlx_paged.errors import InvalidParameterError

#: Maximum alternatives that `logprobs` and `prompt_logprobs` report for a position, as in vLLM.
MAX_LOGPROBS = 20
#: Maximum length of `logprob_token_ids`, as in vLLM.
MAX_LOGPROB_TOKEN_IDS = 128
#: Maximum answers to one prompt, as in vLLM.
MAX_N = 16384

# For whole numbers that are only compared or counted with.
_MAX_INT = (1 << 63) - 1
# The device computes with these: a number outside is infinite there, or 0.
_MIN_FLOAT, _MAX_FLOAT = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens, and when to stop. Names, defaults and meanings are vLLM's.

    `docs/sampling.md` describes each parameter and the order in which they apply.

    Args:
        n: Number of answers to the prompt, at most 16384; they share its blocks.
        temperature: 0 is greedy.
        top_k: Sample among the k most likely tokens; 0 or -1 means all.
        top_p: Sample among the most likely tokens that together have this probability, in (0, 1].
        min_p: Exclude tokens less likely than this share of the most likely one, in [0, 1].
        repetition_penalty: Above 1 discourages tokens of prompt and answer; 1 turns it off.
        presence_penalty: Subtracted from the logits of tokens in the answer, in [-2, 2].
        frequency_penalty: The same for each occurrence, in [-2, 2].
        logit_bias: Token ids to values in [-100, 100] that are added to their logits.
        allowed_token_ids: Generate only these tokens; None means any.
        bad_words: Texts whose tokens are never generated.
        max_tokens: Maximum tokens to generate; None means as many as the context allows.
        min_tokens: Before the answer has this many tokens, end tokens and stop tokens are not
            generated, and stop strings are ignored.
        stop: Strings that end the answer; they are not part of it.
        include_stop_str_in_output: Include the stop string, or the text of the stop token.
        skip_special_tokens: Omit the tokenizer's special tokens from the text.
        stop_token_ids: Tokens that end the answer, in addition to the model's end tokens.
        ignore_eos: Generate past the model's end tokens.
        seed: Makes a sampled answer repeatable in any batch: a signed 64-bit integer, all of whose
            bits count. None or, as in vLLM, -1 means different answers every time.
        logprobs: Report the log-probability of each generated token and of this many of the most
            likely tokens, at most 20; None reports nothing.
        logprob_token_ids: Report the log-probabilities of these tokens, at most 128, instead of the
            most likely ones.
        prompt_logprobs: Like `logprobs`, for the prompt. This computes the whole prompt without the
            prefix cache.
        structured_outputs: Constraint on the answer (a JSON schema, a grammar, ...): the parameters
            themselves, or a mapping of their fields. See `docs/structured-output.md`.
        thinking_token_budget: Maximum tokens of reasoning, after which its end is forced; None
            means no limit.
        prediction: A guess of the answer's text, such as a file before an edit. With speculative
            decoding, drafts come from it; the answer is the same. (OpenAI's, not vLLM's.)

    Raises:
        InvalidParameterError: An invalid value; the error names the field. NumPy's numbers and
            arrays are accepted.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # A dict has no hash, but it takes part in equality.
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    thinking_token_budget: int | None = None
    prediction: str | None = None

    def __post_init__(self) -> None:
        self._take_several_values()
        natural, share = "an integer of at least", "a number in [0, 1]"
        float32 = "that float32 can hold"
        self._take_integer("n", f"an integer in [1, {MAX_N}]", 1, MAX_N)
        self._take_number("temperature", f"a number of at least 0 {float32}", 0, _MAX_FLOAT)
        self._take_integer("top_k", f"{natural} -1 (0 and -1 mean all)", -1)
        self._take_number("top_p", "a number in (0, 1]", 0, 1)
        self._check("top_p", self.top_p > 0, "a number in (0, 1]")
        self._take_number("min_p", share, 0, 1)
        expected = f"a number above 0 {float32}"
        self._take_number("repetition_penalty", expected, _MIN_FLOAT, _MAX_FLOAT)
        for name in ("presence_penalty", "frequency_penalty"):
            self._take_number(name, "a number in [-2, 2]", -2, 2)
        if self.max_tokens is not None:
            self._take_integer("max_tokens", f"None or {natural} 1", 1)
        self._take_integer("min_tokens", f"{natural} 0", 0)
        if self.max_tokens is not None:
            expected = f"at most max_tokens ({self.max_tokens})"
            self._check("min_tokens", self.min_tokens <= self.max_tokens, expected)
        for name in ("include_stop_str_in_output", "skip_special_tokens", "ignore_eos"):
            self._check(name, isinstance(getattr(self, name), bool), "a boolean")
        is_text = self.prediction is None or isinstance(self.prediction, str)
        self._check("prediction", is_text, "None or a text")
        if self.seed is not None:
            expected = "None or an integer in [-2**63, 2**63)"
            self._take_integer("seed", expected, -_MAX_INT - 1, _MAX_INT)
            if self.seed == -1:
                object.__setattr__(self, "seed", None)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                expected = f"None or an integer in [0, {MAX_LOGPROBS}]"
                self._take_integer(name, expected, 0, MAX_LOGPROBS)
        if self.logprob_token_ids is not None:
            object.__setattr__(self, "logprobs", 0)
        if self.thinking_token_budget is not None:
            self._take_integer("thinking_token_budget", f"None or {natural} 0", 0)
        outputs = structured_outputs_of(self.structured_outputs)
        object.__setattr__(self, "structured_outputs", outputs)

    def _take_several_values(self) -> None:
        """Checks fields with several values, and copies them, because callers may change theirs."""
        set_field = object.__setattr__
        if isinstance(self.stop, str):
            set_field(self, "stop", (self.stop,))
        for name in ("stop", "bad_words"):
            texts = _as_tuple(getattr(self, name))
            ok = texts is not None and all(is_text(s) and s for s in texts)
            self._check(name, ok, "strings of Unicode characters that are not empty")
            set_field(self, name, texts)
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            given = getattr(self, name)
            ids = _as_tuple(given)
            ok = ids is not None and all(_is_integer(i, 0) for i in ids)
            self._check(name, ok, "token ids of at least 0")
            if name != "stop_token_ids" and given is None:
                continue
            set_field(self, name, tuple(int(i) for i in ids or ()))  # type: ignore[call-overload]
        self._check("allowed_token_ids", self.allowed_token_ids != (), "None or at least one id")
        if self.logprob_token_ids is not None:
            ok = 1 <= len(self.logprob_token_ids) <= MAX_LOGPROB_TOKEN_IDS
            self._check("logprob_token_ids", ok, f"None or 1 to {MAX_LOGPROB_TOKEN_IDS} ids")
        if self.logit_bias is not None:
            ok = isinstance(self.logit_bias, Mapping) and all(
                _is_integer(i, 0) and _is_number(b, -100, 100) for i, b in self.logit_bias.items()
            )
            self._check("logit_bias", ok, "token ids of at least 0 to numbers in [-100, 100]")
            set_field(self, "logit_bias", {int(i): float(b) for i, b in self.logit_bias.items()})

    def _take_integer(
        self, name: str, expected: str, minimum: int, maximum: int = _MAX_INT
    ) -> None:
        value = getattr(self, name)
        self._check(name, _is_integer(value, minimum, maximum), expected)
        object.__setattr__(self, name, int(value))

    def _take_number(self, name: str, expected: str, minimum: float, maximum: float) -> None:
        value = getattr(self, name)
        self._check(name, _is_number(value, minimum, maximum), expected)
        object.__setattr__(self, name, float(value))

    def _check(self, name: str, ok: bool, expected: str) -> None:
        if not ok:
            raise InvalidParameterError(name, expected, getattr(self, name))

    def constrained(
        self, outputs: StructuredOutputs | None, *, skip_special_tokens: bool
    ) -> SamplingParams:
        """Returns a copy with other structured outputs. The other fields are not checked again."""
        constrained = copy(self)
        object.__setattr__(constrained, "structured_outputs", outputs)
        object.__setattr__(constrained, "skip_special_tokens", skip_special_tokens)
        return constrained

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always as a tuple."""
        return tuple(self.stop or ())

    @property
    def penalizes(self) -> bool:
        """True if a token's logit depends on the tokens before it."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    def stop_policy(self, eos_token_ids: frozenset[int]) -> StopPolicy:
        """Returns the part that the scheduler applies."""
        return StopPolicy(
            max_tokens=self.max_tokens,
            eos_token_ids=eos_token_ids,
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
        )


def _is_integer(value: object, minimum: int, maximum: int = _MAX_INT) -> bool:
    """Returns True if an integer, Python's or NumPy's, is in [least, most]."""
    if type(value) is not int and (not isinstance(value, Integral) or isinstance(value, bool)):
        return False  # Checking an abstract class takes many times as long.
    return minimum <= int(value) <= maximum


def _is_number(value: object, minimum: float, maximum: float) -> bool:
    """Returns True if a number is in [least, most], which are finite."""
    is_plain = type(value) is float or type(value) is int
    if not is_plain and (not isinstance(value, Real) or isinstance(value, bool)):
        return False
    return minimum <= value <= maximum  # type: ignore[operator,no-any-return]


def _as_tuple(values: object) -> tuple[object, ...] | None:
    """Returns a tuple of the values; () for None, as in vLLM; None if there is no collection."""
    if values is None:
        return ()
    if isinstance(values, (str, bytes, bytearray, memoryview, Mapping)):
        return None
    try:
        return tuple(values) if isinstance(values, Collection) else None
    except TypeError:  # an array without dimensions
        return None
