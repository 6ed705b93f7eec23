"""Stand-ins for keys, values and scores where model code passes them on to attention.

Subclasses of ``mx.array`` of shape (0,), because ``array @ object`` raises instead of asking the
object, while the reflected operators of a subclass win. Anything that would treat a handle as dense
data fails loudly instead of computing with something else.
"""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx

from mlx_paged.model.specs import LayerSpec


class Attended(Protocol):
    """A cache that handles stand for."""

    spec: LayerSpec
    keys: KVHandle
    values: KVHandle

    @property
    def offset(self) -> mx.array:
        """``[num_rows]`` int32 positions."""
        ...

    def attend(
        self,
        queries: mx.array,
        *,
        scale: float,
        sinks: mx.array | None,
        scores: Scores | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        """Attention of the step's queries over what the cache holds."""
        ...


class _Handle(mx.array):
    def __new__(cls, *args: Any) -> Any:
        return super().__new__(cls)  # type: ignore[call-arg]

    def __init__(self, dtype: mx.Dtype = mx.float32) -> None:
        super().__init__([], dtype)

    def _refuse(self, other: object) -> Any:
        raise TypeError("a KV handle stands for a layer's keys or values and cannot be changed")

    # Anything else gives an empty array; in place, broadcasting would leave the handle as it was.
    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = _refuse
    __iand__ = __ior__ = __ixor__ = __ilshift__ = __irshift__ = __imatmul__ = _refuse


class KVHandle(_Handle):
    """Stands for a layer's keys or values."""

    def __init__(self, cache: Attended) -> None:
        # Some models cast the output of attention to the dtype of the values.
        super().__init__(cache.spec.dtype)
        self.cache = cache

    def astype(self, *args: Any, **kwargs: Any) -> KVHandle:
        """Itself: the pool keeps its dtype, and the kernels accumulate in float32."""
        return self

    def swapaxes(self, axis1: int, axis2: int, **kwargs: Any) -> Any:
        """``keys.swapaxes(-1, -2)``: the right operand of a product with queries."""
        if {axis1, axis2} == {-1, -2} and self is self.cache.values:
            return TransposedHandle(self)
        return super().swapaxes(axis1, axis2, **kwargs)


class TransposedHandle(_Handle):
    """Stands for the rotary keys of multi-head latent attention, transposed.

    mlx-lm's latent attention multiplies them with the rotary part of the queries by itself and
    passes the product on as an additive mask; `Scores` stands for that product.
    """

    def __init__(self, handle: KVHandle) -> None:
        super().__init__()
        self.handle = handle

    def __rmatmul__(self, queries: mx.array) -> Scores:
        return Scores(self.handle, queries)


class Scores(_Handle):
    """Stands for ``queries @ keys^T``, to be added to the scores of the same layer."""

    def __init__(self, handle: KVHandle, queries: mx.array) -> None:
        super().__init__()
        self.handle = handle
        self.queries = queries  # [T, num_q_heads, 1, dim], already scaled
