"""What a request asks of the sampler and when it wants to stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
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
        self._require(
            all(isinstance(s, str) and s for s in stop), "stop", "strings that are not empty"
        )
        self._require(
            all(_is_int(t) and t >= 0 for t in self.stop_token_ids),
            "stop_token_ids",
            "token ids of at least 0",
        )
        self._require(self.seed is None or _is_int(self.seed), "seed", "None or an integer")

    def _require(self, ok: bool, field: str, expected: str) -> None:
        if not ok:
            raise InvalidParameterError(field, expected, getattr(self, field))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always as a tuple."""
        return tuple(self.stop)

    def stop_policy(self, eos_token_ids: frozenset[int]) -> StopPolicy:
        """The part that the scheduler decides on."""
        return StopPolicy(
            max_tokens=self.max_tokens,
            eos_token_ids=eos_token_ids,
            stop_token_ids=frozenset(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
