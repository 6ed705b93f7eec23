"""What goes wrong on a device, and how it is told apart."""

from __future__ import annotations

import mlx.core as mx

from mlx_paged import ops

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


def nan_rows(logits: mx.array) -> mx.array:
    """``[num_rows]`` bool: which rows of ``[num_rows, vocab_size]`` logits hold a NaN.

    It is evaluated and read together with the tokens. (A sum would be one pass less, but half
    precision sums may reach both infinities and become NaN without there being one.)
    """
    if mx.default_device() == mx.cpu:  # one vectorised pass instead of two
        return ops.greedy_tokens(logits)[1]
    return mx.any(mx.isnan(logits), axis=-1)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether MLX could not get the memory for a computation; a smaller one may still run."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in _OUT_OF_MEMORY)


def reason_of(error: BaseException) -> str:
    """One line for whoever asked."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
