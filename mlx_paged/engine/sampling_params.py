"""What a request asks of the sampler and when it wants to stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_paged.errors import InvalidParameterError
from mlx_paged.scheduling import StopPolicy


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, and when to stop. Names and meanings are vLLM's.

    Args:
        n: answers to generate for the prompt; they share its blocks.
        temperature: 0 is greedy.
        max_tokens: most tokens to generate; None: as many as the model's context allows.
        stop: strings that end the answer; they are not part of it.
        stop_token_ids: tokens that end the answer, besides the model's end tokens.
        ignore_eos: generate past the model's end tokens.
        seed: makes a sampled answer repeatable, whoever shares its batch; None: different every
            time.

    Raises:
        InvalidParameterError: a value that cannot be honoured; it names the field.
    """

    n: int = 1
    temperature: float = 1.0
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._take_sequence("stop", stop, str, "strings that are not empty", bool)
        self._take_sequence(
            "stop_token_ids", self.stop_token_ids, int, "token ids of at least 0", lambda t: t >= 0
        )
        self._require(_is_int(self.n) and self.n >= 1, "n", "an integer of at least 1")
        self._require(
            isinstance(self.temperature, (int, float)) and 0 <= self.temperature < float("inf"),
            "temperature",
            "a number of at least 0",
        )
        self._require(
            self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1),
            "max_tokens",
            "None or an integer of at least 1",
        )
        self._require(isinstance(self.ignore_eos, bool), "ignore_eos", "True or False")
        self._require(self.seed is None or _is_int(self.seed), "seed", "None or an integer")

    def _take_sequence(
        self,
        field: str,
        values: object,
        item: type,
        expected: str,
        valid: Callable[[Any], bool],
    ) -> None:
        """Keeps a field as a tuple; None is an empty one."""
        is_sequence = isinstance(values, Sequence) and not isinstance(values, (str, bytes))
        self._require(values is None or is_sequence, field, f"None or {expected}")
        items = tuple(values) if isinstance(values, Sequence) else ()
        ok = all(isinstance(v, item) and not isinstance(v, bool) and valid(v) for v in items)
        self._require(ok, field, expected)
        object.__setattr__(self, field, items)

    def _require(self, ok: bool, field: str, expected: str) -> None:
        if not ok:
            raise InvalidParameterError(field, expected, getattr(self, field))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always as a tuple."""
        return tuple(self.stop or ())

    def stop_policy(self, eos_token_ids: frozenset[int]) -> StopPolicy:
        """The part that the scheduler decides on."""
        return StopPolicy(
            max_tokens=self.max_tokens,
            eos_token_ids=eos_token_ids,
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
