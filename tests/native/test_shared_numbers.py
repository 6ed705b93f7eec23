"""Numbers that kernels of several languages must agree on are declared once, in metal/."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import pytest
from support.quantized import row_bytes

from mlx_paged import ops
from mlx_paged.model import graph_runner
from mlx_paged.model.kv_formats import PoolFormat

ROOT = Path(__file__).parents[2]
SOURCES = [
    file
    for folder in ("csrc", "metal", "mlx_paged")
    for suffix in ("h", "cpp", "cu", "metal", "py")
    for file in sorted((ROOT / folder).rglob(f"*.{suffix}"))
    if file.relative_to(ROOT).parts[:2] != ("mlx_paged", "metal")
]


@pytest.mark.parametrize(
    "declaration",
    [
        r"(?i)0x9e3779b1|2654435761",  # the hash behind the signs of a rotation
        r"FORMAT_INT8\s*=",
        r"CODE_GROUP = \d",
        r"MAX_HEAD_DIM\s*=",
        r"int tail_bytes\(int format",
        r"bool changes_sign\(",
    ],
)
def test_pools_are_laid_out_by_one_header(declaration: str) -> None:
    files = [f for f in SOURCES if re.search(declaration, f.read_text())]
    assert files == [ROOT / "metal/pool_layout.h"]


@pytest.mark.parametrize("format_", PoolFormat)
@pytest.mark.parametrize("dim", [8, 24, 32, 40, 80, 128, 576])
def test_python_counts_the_bytes_that_pools_have(format_: PoolFormat, dim: int) -> None:
    pool = ops.allocate_pool(2, 8, 3, dim, getattr(mx, format_.value))
    assert pool.nbytes == 2 * 8 * 3 * format_.row_bytes(dim)
    assert format_.row_bytes(dim) == sum(row_bytes(pool.dtype, dim))


def test_the_largest_head_is_the_header_s() -> None:
    [number] = re.findall(r"MAX_HEAD_DIM = (\d+)", (ROOT / "metal/pool_layout.h").read_text())
    ops.allocate_pool(1, 8, 1, int(number), mx.float16)
    with pytest.raises(ValueError, match=f"a multiple of 8 up to {number} but got"):
        ops.allocate_pool(1, 8, 1, int(number) + 8, mx.float16)


def test_python_asks_the_extension_for_limits_of_its_kernels() -> None:
    header = (ROOT / "csrc/cuda/linear_shape.h").read_text()
    [rows] = re.findall(r"kLinearMaxRows = (\d+)", header)
    assert ops.max_product_rows() == graph_runner._FEW_ROWS == int(rows)
    table = (ROOT / "csrc/cuda/tensor_shape.h").read_text()
    listed = table.partition("PAGED_FOR_EACH_PREFILL_WGMMA(X, ...)")[2].partition("\n\n")[0]
    dims = {int(dim) for dim in re.findall(r"__VA_ARGS__, (\d+), 4\)", listed)}
    assert dims == {d for d in range(8, 577, 8) if ops.has_wgmma_prefill(d, d, 16)}
    assert not ops.has_wgmma_prefill(64, 128, 16)
    assert not ops.has_wgmma_prefill(64, 64, 8)
