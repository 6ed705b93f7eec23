"""The needs of a loaded model: its kinds of attention, read from the graph of a step, and the
shapes of its linear layers."""

from __future__ import annotations

import re

import mlx.core as mx
import mlx.nn as nn

from mlx_paged import executables, kernels
from mlx_paged.calibration import tensor_units
from mlx_paged.calibration.cases import Needs, Product
from mlx_paged.model.linear_parts import EXPERTS
from mlx_paged.model.paged_model import PagedModel
from mlx_paged.model.prepare import build_graphs

_DTYPES = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}
_FIRST_LAYER = re.compile(r"(^|\.)layers\.0\.")


def needs_of(paged: PagedModel) -> Needs:
    """Returns the needs of a model that has no pools yet; it has none afterwards.

    Builds the graph of a step in small pools, which runs no kernel.
    """
    paged.allocate(2, 2 if paged.layout.has_states else 0)
    try:
        build_graphs(paged)
    finally:
        paged.release()
    dtypes = [spec.dtype for spec in paged.layout.attention]
    products = tuple(_products(paged.model))
    return Needs(
        dtype=_DTYPES.get(dtypes[0] if dtypes else mx.float32, "float32"),
        layers=tuple(kernels.attention_layers()),  # also those of models loaded before
        block_size=paged.block_size,
        hidden_size=products[0].k if products else 0,
        products=products,
        formats=_formats(paged.model, (nn.QuantizedLinear, nn.QuantizedEmbedding)),
        tables=_formats(paged.model, (nn.QuantizedEmbedding,)),
        experts=_formats(paged.model, EXPERTS),
        step_rows=executables.supported_step_rows(),
        tensor_units=tensor_units.unavailable() is None,
    )


def _product_of(module: nn.Module) -> Product:
    n, k = module.weight.shape[-2:]
    if not hasattr(module, "bits"):
        return Product(n, k)
    return Product(n, k * 32 // module.bits, module.bits, module.group_size, module.mode)


def _formats(model: nn.Module, kinds: tuple[type, ...]) -> tuple[Product, ...]:
    """The formats of these modules' weights."""
    found = {_product_of(m).smallest for m in model.modules() if isinstance(m, kinds)}
    return tuple(sorted(found, key=str))


def _products(model: nn.Module) -> list[Product]:
    """The linear layers of the first decoder layer."""
    found = []
    for name, module in sorted(model.named_modules()):
        if not _FIRST_LAYER.search(f"{name}."):
            continue
        if isinstance(module, (nn.QuantizedLinear, nn.Linear)):
            found.append(_product_of(module))
    return found
