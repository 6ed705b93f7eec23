"""Limits and policies of the scheduler."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum

from mlx_paged.errors import InvalidParameterError


class SchedulingPolicy(StrEnum):
    """Order of service."""

    FCFS = "fcfs"  # in order of arrival
    PRIORITY = "priority"  # lower `Request.priority` first, then in order of arrival


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits and policies.

    Attributes:
        max_num_seqs: Maximum number of running sequences.
        max_num_batched_tokens: Maximum tokens per step; at least `max_num_seqs`, so that running
            decodes always leave room for a prompt.
        max_num_prompt_tokens: Maximum prompt tokens per step, besides the decodes; None leaves only
            `max_num_batched_tokens`.
        max_num_prefills: Maximum number of running sequences that are in their prompt; None sets no
            limit.
        max_model_len: Maximum tokens of prompt plus output; None leaves only the KV cache limit.
        long_prefill_token_threshold: A prompt with more tokens left than this is *long*. It gets at
            most this many tokens per step, and long prompts together leave short prompts the tokens
            they need, up to half the step. None means half of `max_num_batched_tokens`, and at most
            1376 beside decodes alone; 0 treats all prompts alike.
        enable_chunked_prefill: Splits prompts that do not fit in a step. If off, a prompt waits
            until all of it fits, and `max_num_batched_tokens` must be at least `max_model_len`.
        policy: "fcfs" or "priority".
        watermark: Fraction of the blocks that admission keeps free for running sequences to grow.
        max_num_waiting: `add` rejects a request once this many sequences wait; None never rejects.
        max_num_encoder_tokens: Maximum media rows encoded per step; a larger item is encoded alone.
            None means `max_num_batched_tokens`.
        max_encoder_items_with_decodes: Maximum media items encoded by a step that also decodes;
            None sets no limit beyond `max_num_encoder_tokens`.
        encoder_cache_bytes: Capacity of the encoder cache; a larger item is held alone.
        encoder_bytes_per_row: Estimated feature size, used until the real size is known.
        max_loras: Maximum different adapters of the running sequences; 0 allows none.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_num_prompt_tokens: int | None = None
    max_num_prefills: int | None = None
    max_model_len: int | None = None
    long_prefill_token_threshold: int | None = None
    enable_chunked_prefill: bool = True
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    watermark: float = 0.01
    max_num_waiting: int | None = None
    max_num_encoder_tokens: int | None = None
    max_encoder_items_with_decodes: int | None = None
    encoder_cache_bytes: int = 1 << 29
    encoder_bytes_per_row: int = 1 << 13
    max_loras: int = 0

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "policy", SchedulingPolicy(self.policy))
        except ValueError:
            choices = " or ".join(repr(p.value) for p in SchedulingPolicy)
            raise InvalidParameterError("policy", choices, self.policy) from None
        if self.max_num_seqs < 1:
            raise InvalidParameterError("max_num_seqs", "at least 1", self.max_num_seqs)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidParameterError(
                "max_num_batched_tokens",
                f"at least max_num_seqs ({self.max_num_seqs})",
                self.max_num_batched_tokens,
            )
        if self.max_model_len is not None and self.max_model_len < 1:
            raise InvalidParameterError("max_model_len", "at least 1", self.max_model_len)
        longest = self.max_model_len
        if not self.enable_chunked_prefill and (
            longest is None or self.max_num_batched_tokens < longest
        ):
            raise InvalidParameterError(
                "max_num_batched_tokens",
                f"at least the context length ({longest or 'which max_model_len must give'}) where "
                "chunked prefill is off",
                self.max_num_batched_tokens,
            )
        if self.max_loras < 0:
            raise InvalidParameterError("max_loras", "at least 0", self.max_loras)
        threshold = self.long_prefill_token_threshold
        if threshold is not None and threshold < 0:
            raise InvalidParameterError("long_prefill_token_threshold", "at least 0", threshold)
        if not 0 <= self.watermark < 1:
            raise InvalidParameterError("watermark", "in [0, 1)", self.watermark)
        if self.max_num_waiting is not None and self.max_num_waiting < 1:
            raise InvalidParameterError("max_num_waiting", "at least 1", self.max_num_waiting)
        for name in (
            *("max_num_prompt_tokens", "max_num_prefills", "max_num_encoder_tokens"),
            *("max_encoder_items_with_decodes", "encoder_cache_bytes", "encoder_bytes_per_row"),
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidParameterError(name, "at least 1", value)

    @property
    def long_prefill_threshold(self) -> int:
        """Length above which a prompt is long; also the most tokens per step for a long prompt."""
        if not self.enable_chunked_prefill:
            return sys.maxsize
        if self.long_prefill_token_threshold is None:
            return max(1, self.max_num_batched_tokens // 2)
        # 0 turns the distinction off.
        return self.long_prefill_token_threshold or sys.maxsize
