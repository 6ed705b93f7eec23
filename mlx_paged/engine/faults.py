"""What goes wrong on a device, and how it is told apart."""

from __future__ import annotations

#: Why a row without a token has none (`ModelRunner.read`).
NOT_A_NUMBER = "its logits are not numbers (NaN)"

# MLX raises plain RuntimeErrors; these are the words that its allocators and drivers use.
_OUT_OF_MEMORY = (
    "unable to allocate",
    "attempting to allocate",
    "out of memory",
    "outofmemory",
    "insufficient memory",
    "memory allocation failed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether MLX could not get the memory for a computation; a smaller one may still run."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in _OUT_OF_MEMORY)


def reason_of(error: BaseException) -> str:
    """One line for whoever asked."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
