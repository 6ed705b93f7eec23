"""How a request is sampled, and when it stops."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mlx_paged.core import StopPolicy
from mlx_paged.errors import InvalidParameterError

#: Most alternatives that `logprobs` and `prompt_logprobs` report for a position, as in vLLM.
MAX_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens, and when to stop. Names, defaults and meanings are vLLM's.

    `docs/sampling.md` describes each, and their order.

    Args:
        n: answers to generate for the prompt; they share its blocks.
        temperature: 0 is greedy.
        top_k: sample among the k likeliest tokens; 0 or -1: all.
        top_p: sample among the likeliest tokens that together have this probability, in (0, 1].
        min_p: leave out tokens less likely than this share of the likeliest, in [0, 1].
        repetition_penalty: above 1 discourages tokens of prompt and answer; 1: off.
        presence_penalty: taken from the logits of tokens that the answer has, in [-2, 2].
        frequency_penalty: the same for each time it has them, in [-2, 2].
        logit_bias: added to the logits of tokens, by id; each in [-100, 100].
        allowed_token_ids: nothing but these tokens is generated; None: any.
        bad_words: texts whose tokens are not generated.
        max_tokens: most tokens to generate; None: as many as the model's context allows.
        min_tokens: end tokens and stop tokens are not generated, and stop strings not looked for,
            before the answer has this many tokens.
        stop: strings that end the answer; they are not part of it.
        include_stop_str_in_output: make what ended the answer (a stop string or the text of a stop
            token) part of it.
        skip_special_tokens: leave the tokenizer's special tokens out of the text.
        stop_token_ids: tokens that end the answer, besides the model's end tokens.
        ignore_eos: generate past the model's end tokens.
        seed: makes a sampled answer repeatable in any batch; None: different every
            time.
        logprobs: report the log-probability of each token of the answer, and of this many of the
            likeliest, at most 20; None: none.
        prompt_logprobs: the same for the tokens of the prompt. It computes the whole prompt: the
            prefix cache is not read.

    Raises:
        InvalidParameterError: an invalid value; it names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # (A dict has no hash; equality counts it.)
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
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check_sequences()
        at_least_one, share = "an integer of at least 1", "a number in [0, 1]"
        check = self._check
        check("n", _is_int(self.n, 1), at_least_one)
        check("temperature", _is_number(self.temperature, 0), "a number of at least 0")
        check("top_k", _is_int(self.top_k, -1), "an integer of at least -1 (0 and -1 mean all)")
        check("top_p", _is_number(self.top_p, 0, 1) and self.top_p > 0, "a number in (0, 1]")
        check("min_p", _is_number(self.min_p, 0, 1), share)
        check(
            "repetition_penalty",
            _is_number(self.repetition_penalty, 0) and self.repetition_penalty > 0,
            "a number above 0",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            check(name, _is_number(getattr(self, name), -2, 2), "a number in [-2, 2]")
        check("max_tokens", self.max_tokens is None or _is_int(self.max_tokens, 1),
              f"None or {at_least_one}")  # fmt: skip
        check("min_tokens", _is_int(self.min_tokens, 0), "an integer of at least 0")
        if self.max_tokens is not None:
            check("min_tokens", self.min_tokens <= self.max_tokens,
                  f"at most max_tokens ({self.max_tokens})")  # fmt: skip
        for name in ("include_stop_str_in_output", "skip_special_tokens", "ignore_eos"):
            check(name, isinstance(getattr(self, name), bool), "a boolean")
        check("seed", self.seed is None or _is_int(self.seed), "None or an integer")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            check(name, value is None or _is_int(value, 0, MAX_LOGPROBS),
                  f"None or an integer in [0, {MAX_LOGPROBS}]")  # fmt: skip

    def _check_sequences(self) -> None:
        """Checks fields with several values, and copies them: callers may change their lists."""
        set_field = object.__setattr__
        if isinstance(self.stop, str):
            set_field(self, "stop", (self.stop,))
        for name in ("stop", "bad_words"):
            texts = _as_tuple(getattr(self, name))
            ok = texts is not None and all(isinstance(s, str) and s for s in texts)
            self._check(name, ok, "strings that are not empty")
            set_field(self, name, texts)
        for name in ("stop_token_ids", "allowed_token_ids"):
            given = getattr(self, name)
            ids = _as_tuple(given)
            ok = ids is not None and all(_is_int(i, 0) for i in ids)
            self._check(name, ok, "token ids of at least 0")
            if name == "allowed_token_ids" and given is None:
                continue
            set_field(self, name, ids)
        self._check("allowed_token_ids", self.allowed_token_ids != (), "None or at least one id")
        if self.logit_bias is not None:
            ok = isinstance(self.logit_bias, Mapping) and all(
                _is_int(i, 0) and _is_number(b, -100, 100) for i, b in self.logit_bias.items()
            )
            self._check("logit_bias", ok, "token ids of at least 0 to numbers in [-100, 100]")
            set_field(self, "logit_bias", dict(self.logit_bias))

    def _check(self, name: str, ok: bool, expected: str) -> None:
        if not ok:
            raise InvalidParameterError(name, expected, getattr(self, name))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always as a tuple."""
        return tuple(self.stop or ())

    @property
    def penalizes(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    def stop_policy(self, eos_token_ids: frozenset[int]) -> StopPolicy:
        """The part that the scheduler applies."""
        return StopPolicy(
            max_tokens=self.max_tokens,
            eos_token_ids=eos_token_ids,
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
        )


def _is_int(value: object, least: float = -math.inf, most: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: object, least: float, most: float = math.inf) -> bool:
    """Whether a finite number lies in [least, most]."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and least <= value <= most
    )


def _as_tuple(values: object) -> tuple[object, ...] | None:
    """None means no values, as in vLLM; the result is None where there is no sequence."""
    if values is None:
        return ()
    if isinstance(values, (str, bytes)):
        return None
    try:
        return tuple(values)  # type: ignore[arg-type]
    except TypeError:
        return None
