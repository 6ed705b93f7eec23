"""Cases: the jobs that calibrate the kernels of one model, as strings.

A job names everything that determines it, so its outcome can be kept: ``attention/LAYER/32/1/K``
checks kernel K on one row per sequence. Jobs of `check` come first, then those of `timing`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from mlx_paged import kernels
from mlx_paged.kernels import MAX_ROWS, AttentionLayer

# (layer, rows of each sequence) -> the kernel that serves them
KernelOf = Callable[[AttentionLayer, int], str]

# More rows than any tile of attention has, see `attention_pipelines` in csrc/launch_attention.cpp.
_MAX_ROWS = 80
# Rows per sequence of decodes, drafts and chunks for which alternatives are timed.
TIMED_ROWS = (1, 4, 16, 64)
# Minimum tokens of context per work item of a decode. The first is the number built in
# (csrc/attention_plan.cpp), which is preferred.
PIECE_TOKENS = (0, 192, 768, 1536)
# Rows of the whole steps that are timed.
STEP_ROWS = (1, 8, 16)
# Rows for which products outside of whole steps are timed. Each stands for those above the previous
# one, and the last also for more. Up to 16 rows they are the tiles of metal/products.h, above them
# chunks of prompts for tensor units.
PRODUCT_ROWS = (1, 4, 16, 32, 128, 512)
MLX = "mlx"  # in the place of a kernel


@dataclass(frozen=True)
class Product:
    """The shape of a linear layer. `bits` is 0 without quantization."""

    n: int
    k: int
    bits: int = 0
    group_size: int = 0
    mode: str = ""

    def __str__(self) -> str:
        return ",".join(map(str, (self.n, self.k, self.bits, self.group_size, self.mode)))

    @property
    def small(self) -> Product:
        """The same product with few columns; their length is what kernels loop over."""
        return replace(self, n=40)

    @property
    def smallest(self) -> Product:
        """A product in the same format that is equal for all layers."""
        return replace(self, n=40, k=256)

    @classmethod
    def of(cls, text: str) -> Product:
        """The inverse of `str`."""
        n, k, bits, group_size, mode = text.split(",")
        return cls(int(n), int(k), int(bits), int(group_size), mode)


@dataclass(frozen=True)
class Needs:
    """The properties of a model that determine which kernels it needs.

    Attributes:
        dtype: Dtype of its activations.
        layers: The kinds of its attention.
        block_size: Tokens of a block.
        hidden_size: Width of the residual stream.
        products: The linear layers of one decoder layer, in order.
        formats: A small product in each format of its linear layers.
        tables: The same for quantized embeddings.
        experts: The same for mixtures of experts.
        step_rows: Maximum rows of a whole step that the device supports.
        tensor_units: True if kernels for tensor units can be compiled and run (`tensor_units`).
    """

    dtype: str
    layers: tuple[AttentionLayer, ...]
    block_size: int
    hidden_size: int = 0
    products: tuple[Product, ...] = ()
    formats: tuple[Product, ...] = ()
    tables: tuple[Product, ...] = ()
    experts: tuple[Product, ...] = ()
    step_rows: int = 0
    tensor_units: bool = False


def layer_text(layer: AttentionLayer) -> str:
    """The layer in the name of a job."""
    return ",".join(
        map(
            str,
            (layer.dtype, layer.group, layer.key_dim, layer.value_dim, layer.features,
             layer.key_format, layer.value_format),
        )
    )  # fmt: skip


def layer_of(text: str) -> AttentionLayer:
    """The inverse of `layer_text`."""
    dtype, *numbers = text.split(",")
    return AttentionLayer(dtype, *map(int, numbers))


def checks(needs: Needs, kernel_of: KernelOf) -> list[str]:
    """The jobs that check kernels."""
    jobs = [*_data_checks(needs)]
    for layer in needs.layers:
        jobs += _attention_checks(layer, needs.block_size, kernel_of)
    if needs.step_rows > 0:
        jobs += _step_checks(needs)
    jobs += _tensor_product_checks(needs)
    return list(dict.fromkeys(jobs))


def _data_checks(needs: Needs) -> Iterator[str]:
    for dtype in dict.fromkeys((needs.dtype, "float32")):
        yield f"greedy/{dtype}"
        yield f"draw/{dtype}"
        yield f"thresholds/{dtype}"
        yield f"bitmask/{dtype}"
        yield f"edits/{dtype}"
        yield f"strided/{dtype}"
    yield f"lora/{needs.dtype}"
    for layer in needs.layers:
        pool = f"{layer.dtype},{layer.key_dim},{layer.value_dim}"
        formats = f"{layer.key_format},{layer.value_format}"
        yield f"pool/{pool},{formats}/{needs.block_size}"
        if layer.key_format == 0:
            yield f"blocks/{pool}/{needs.block_size}"


def _attention_checks(layer: AttentionLayer, block_size: int, kernel_of: KernelOf) -> Iterator[str]:
    if not kernel_of(layer, 1):
        return
    rows_of: dict[str, int] = {}
    for rows in range(1, _MAX_ROWS + 1):
        rows_of.setdefault(kernel_of(layer, rows), rows)
    rows_of.pop("", None)
    text = layer_text(layer)
    for kernel, rows in rows_of.items():
        yield f"attention/{text}/{block_size}/{rows}/{kernel}"
    yield f"merge/{text}/{block_size}/{merge_kernel(layer)}"
    yield f"uncovered/{text}/{block_size}/fill_zero"


def merge_kernel(layer: AttentionLayer) -> str:
    """The kernel that merges split contexts."""
    return f"paged_merge_{layer.dtype}_{layer.value_dim}"


def _step_checks(needs: Needs) -> Iterator[str]:
    dtype = needs.dtype
    yield f"norm/{dtype}/{needs.hidden_size}"
    yield f"silu/{dtype}"
    yield f"rows/{dtype}/{needs.hidden_size}"
    yield f"product/{dtype}/{Product(40, 256)}"
    for product in (*needs.formats, *needs.products):
        yield f"product/{dtype}/{product.small}"
    for table in needs.tables:
        yield f"lookup/{dtype}/{table}"
    for layer in needs.layers:
        if layer.features & ~1 == 0 and layer.key_format == 0:
            yield f"heads/{layer_text(layer)}/{needs.block_size}"
    for experts in needs.experts:
        yield f"experts/{dtype}/{experts}"


def _tensor_product_checks(needs: Needs) -> Iterator[str]:
    for products in _by_format(needs).values():
        longest = max(products, key=lambda product: product.k)
        for kernel in product_kernels(needs.dtype, longest, PRODUCT_ROWS[-1]):
            # More columns than a tile has.
            yield f"tensor-product/{needs.dtype}/{replace(longest, n=72)}/{kernel}"


def timings(needs: Needs, kernel_of: KernelOf, reject: Callable[[set[str]], None]) -> list[str]:
    """The jobs that time alternatives.

    Args:
        reject: Rejects kernels in addition to those that calibration rejected, so that `kernel_of`
            returns the next best.
    """
    jobs = []
    for layer in needs.layers:
        for rows in TIMED_ROWS:
            candidates = candidates_of(layer, rows, kernel_of, reject)
            if len(candidates) > 1:
                text = layer_text(layer)
                jobs += [
                    f"time-attention/{text}/{needs.block_size}/{rows}/{kernel}"
                    for kernel in candidates
                ]
    jobs += [
        job for layer in needs.layers for job in split_jobs(layer, needs.block_size, kernel_of)
    ]
    if needs.step_rows > 0 and needs.products:
        jobs += [
            f"time-step/{needs.dtype}/{_shapes(needs.products)}/{rows}/{way}"
            for rows in STEP_ROWS
            if rows <= needs.step_rows
            for way in ("whole", "graph")
        ]
    for job, product, rows in product_jobs(needs):
        if candidates := product_kernels(needs.dtype, product, rows):
            jobs += [f"{job}/{way}" for way in (*candidates, MLX)]
    return list(dict.fromkeys(jobs))


def split_jobs(layer: AttentionLayer, block_size: int, kernel_of: KernelOf) -> list[str]:
    """The jobs that time the pieces of long contexts, in the order of `PIECE_TOKENS`."""
    if not kernel_of(layer, 1) or merge_kernel(layer) in kernels.rejected:
        return []
    text = layer_text(layer)
    return [f"time-split/{text}/{block_size}/{tokens}" for tokens in PIECE_TOKENS]


def product_jobs(needs: Needs) -> Iterator[tuple[str, Product, int]]:
    """The jobs that time a layer's products of one format, without the way, which is a kernel or
    `MLX`; with one of the products, and the rows."""
    for products in _by_format(needs).values():
        for rows in PRODUCT_ROWS:
            yield f"time-products/{needs.dtype}/{_shapes(products)}/{rows}", products[0], rows


def product_rows(rows: int) -> tuple[int, int]:
    """The minimum and maximum rows for which a number of `PRODUCT_ROWS` stands."""
    place = PRODUCT_ROWS.index(rows)
    first = PRODUCT_ROWS[place - 1] + 1 if place else 1
    return first, rows if rows != PRODUCT_ROWS[-1] else MAX_ROWS


def product_kernels(dtype: str, product: Product, rows: int) -> list[str]:
    """The kernels that can multiply outside of whole steps, the preferred one first."""
    return kernels.product_kernels(dtype, product.mode, product.bits, rows)


def _by_format(needs: Needs) -> dict[Product, list[Product]]:
    """The products of a layer by format."""
    found: dict[Product, list[Product]] = {}
    for product in needs.products:
        found.setdefault(product.smallest, []).append(product)
    return found


def _shapes(products: Iterable[Product]) -> str:
    return json.dumps([str(product) for product in products], separators=(",", ":"))


def candidates_of(
    layer: AttentionLayer, rows: int, kernel_of: KernelOf, reject: Callable[[set[str]], None]
) -> list[str]:
    """Up to three kernels that can serve rows, the preferred one first."""
    found: list[str] = []
    while len(found) < 3 and (kernel := kernel_of(layer, rows)) and kernel not in found:
        found.append(kernel)
        reject(set(found))
    reject(set())
    return found
