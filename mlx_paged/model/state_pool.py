"""One state array of a recurrent layer for all slots, written in place.

It is a KV pool to the native ops, whose write is in place whatever else holds the buffer: a slot is
a token, and its "keys" are the state's bytes cut into heads. So states cost no copy of their pool,
and need no kernels of their own.
"""

from __future__ import annotations

import math

import mlx.core as mx

from mlx_paged import ops

# Rows of a pool's blocks; only its shape needs them.
_BLOCK = 8
# Words of a head, at most; the native ops take up to 576.
_HEAD = 512
# The values beside the "keys": the ops write both, and these are the fewest.
_NO_VALUES = 8


class StatePool:
    """``[num_slots, *shape]``; slot 0 is all zeros.

    Args:
        shape: of the state of one sequence.
        dtype: any; what the native ops do not know is stored as words of the same bits.
        num_slots: slot 0 included.
    """

    def __init__(self, shape: tuple[int, ...], dtype: mx.Dtype, num_slots: int) -> None:
        self._shape, self._dtype = shape, dtype
        self._word = dtype if dtype.size == 2 else mx.float32
        self._num_words = math.prod(shape) * dtype.size // self._word.size
        if self._word.size > dtype.size:
            raise ValueError(f"[state pool] dtype must have at least 2 bytes but got {dtype}")
        self._num_heads = max(1, -(-self._num_words // _HEAD))
        self._head_dim = max(8, -(-self._num_words // self._num_heads // 8) * 8)
        blocks = -(-num_slots // _BLOCK)
        self.pool = self._allocate(blocks, self._head_dim)
        self._beside = self._allocate(blocks, _NO_VALUES)
        self.write(mx.zeros((1, *shape), dtype), mx.zeros((1,), dtype=mx.int32))

    def _allocate(self, num_blocks: int, dim: int) -> mx.array:
        return ops.allocate_pool(num_blocks, _BLOCK, self._num_heads, dim, self._word)

    def read(self, slots: mx.array) -> mx.array:
        """``[num_seqs, *shape]`` of ``[num_seqs]`` int32 slots."""
        row = self._num_heads * self._head_dim
        words = self.pool.reshape(-1, row)[slots][:, : self._num_words]
        return words.view(self._dtype).reshape(slots.shape[0], *self._shape)

    def write(self, states: mx.array, slots: mx.array) -> None:
        """Writes ``[num_seqs, *shape]`` to ``[num_seqs]`` int32 slots, in place; -1: nowhere."""
        num = slots.shape[0]
        if states.shape != (num, *self._shape):
            raise ValueError(
                f"[state pool] states must be of shape {(num, *self._shape)} but got {states.shape}"
            )
        words = states.astype(self._dtype).reshape(num, -1).view(self._word)
        missing = self._num_heads * self._head_dim - self._num_words
        if missing:
            words = mx.pad(words, [(0, 0), (0, missing)])
        self.pool, self._beside = ops.write_kv(
            self.pool,
            self._beside,
            words.reshape(num, self._num_heads, self._head_dim),
            mx.zeros((num, self._num_heads, _NO_VALUES), self._word),
            slots,
        )
