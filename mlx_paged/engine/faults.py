"""Faults of a device, and how to distinguish them."""

from __future__ import annotations

#: Why a sequence got no token (`ModelRunner.read`).
NOT_A_NUMBER = "its logits are not numbers (NaN)"

# MLX raises plain RuntimeErrors; its allocators and drivers use these words.
_OUT_OF_MEMORY = (
    "unable to allocate",
    "attempting to allocate",
    "out of memory",
    "outofmemory",
    "insufficient memory",
    "memory allocation failed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether MLX could not allocate memory for a computation; a smaller one may still run."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in _OUT_OF_MEMORY)


def reason_of(error: BaseException) -> str:
    """One line for the caller."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
