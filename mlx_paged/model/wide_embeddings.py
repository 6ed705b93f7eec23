"""Embeddings that are looked up in float32 although the checkpoint stores them in fewer bits.

On the CPU, activations are float32 and weights keep the checkpoint's dtype. A linear layer adopts
the dtype of its input, so the dtype of embeddings decides on that of the whole model.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_paged import ops
from mlx_paged.model import patches


class WideEmbedding(nn.Embedding):  # type: ignore[misc]
    """An `nn.Embedding` of 16 bits."""

    def __call__(self, x: mx.array) -> mx.array:
        """Returns the rows of token ids `x`: ``[*x.shape, dims]`` float32."""
        if patches.is_native_on_cpu():
            return ops.lookup(x, self["weight"])
        return self["weight"][x].astype(mx.float32)


class WideQuantizedEmbedding(nn.QuantizedEmbedding):  # type: ignore[misc]
    """An `nn.QuantizedEmbedding` that does not round values to the dtype of its scales."""

    def __call__(self, x: mx.array) -> mx.array:
        """Returns the rows of token ids `x`: ``[*x.shape, dims]`` float32."""
        if patches.is_native_on_cpu():
            return ops.lookup(
                x,
                self["weight"],
                self["scales"],
                self.get("biases"),
                group_size=self.group_size,
                bits=self.bits,
                mode=self.mode,
            )
        scales, biases = self["scales"][x], self.get("biases")
        if self.mode == "affine":
            scales = scales.astype(mx.float32)
        return mx.dequantize(
            self["weight"][x],
            scales,
            None if biases is None else biases[x].astype(mx.float32),
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            dtype=mx.float32,
        )
