"""Registers of the attention kernels. A thread of an Apple GPU can address 128 of 32 bits; what a
kernel needs beyond them goes through memory, in every iteration. `sim/cxx.py` says what is counted
and by whom. Sixteen are left for what another compiler may do otherwise."""

from __future__ import annotations

import pytest
from sim import METAL, cxx, missing

from mlx_paged.extension import ext

LIMIT = 111
OTHERS = ("data.h", "quantised_pool.h", *cxx.TENSOR_FILES)
KERNELS = [k for k in ext.kernel_names() if k[1] not in OTHERS]
pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_kernel_fits(dtype) -> None:
    """Within its loops nothing is spilled. A few values that only its end needs may be: they are
    written and read once a threadgroup."""
    counts = cxx.registers([k for k in KERNELS if f"_{dtype}_" in k[0]], METAL, LIMIT)
    assert len(counts) > 60
    print(*(f"{name}: {count}" for name, count in counts.items()), sep="\n")
    assert all(0 < count.used <= LIMIT for count in counts.values())
    assert {n: c for n, c in counts.items() if c.spilled_in_loops or c.spilled > 12} == {}


@pytest.mark.parametrize("dims", ["64_64", "128_128", "576_512"])
def test_every_kernel_fits_with_bounds(dims) -> None:
    """A row keeps one number more. Fewer registers are left for another compiler."""
    kernels = [k for k in KERNELS if f"_bfloat16_{dims}_" in k[0]]
    counts = cxx.registers(kernels, METAL, LIMIT + 4, bounds=True)
    assert len(counts) > 2
    print(*(f"{name}: {count}" for name, count in counts.items()), sep="\n")
    assert {n: c for n, c in counts.items() if c.spilled_in_loops or c.spilled > 12} == {}


@pytest.mark.parametrize("dims", ["64_64", "128_128", "576_512"])
def test_every_kernel_fits_with_alibi(dims) -> None:
    """A row keeps its slope, and `paged_decode_matrix` has several rows a lane. Seven registers
    are left."""
    kernels = [k for k in KERNELS if f"_bfloat16_{dims}_" in k[0]]
    counts = cxx.registers(kernels, METAL, LIMIT + 10, alibi=True)
    assert len(counts) > 2
    print(*(f"{name}: {count}" for name, count in counts.items()), sep="\n")
    assert {n: c for n, c in counts.items() if c.spilled_in_loops or c.spilled > 12} == {}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("paged_decode_matrix", "half, 192, 192, 64, 4"),
        ("paged_decode_matrix", "half, 128, 128, 64"),
        ("paged_decode_matrix", "half, 576, 512, 32"),
        ("paged_prefill", "half, 128, 128, 64"),
        ("paged_prefill", "half, 256, 256, 32"),
        ("paged_decode", "half, 576, 512, 3"),
    ],
)
def test_larger_tiles_do_not_fit(function, arguments) -> None:
    """Kernels that the table had: the count sees them spill."""
    kernel = ("larger", f"{function}.h", f"{function}<{arguments}>")
    count = cxx.registers([kernel], METAL, LIMIT)["larger"]
    assert count.used == LIMIT and count.spilled_in_loops > 5
    everything = cxx.registers([kernel], METAL, 256)["larger"]
    assert everything.used > 128
