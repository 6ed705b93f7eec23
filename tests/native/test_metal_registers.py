"""Registers of the kernels of attention and products. A thread of an Apple GPU can address 128 of
32 bits; what a kernel needs beyond them goes through memory, in every iteration. `sim/cxx.py` says
what is counted and by whom. Sixteen are left for what another compiler may do otherwise."""

from __future__ import annotations

from itertools import groupby

import pytest
from sim import METAL, cxx, missing

from mlx_paged.extension import ext

LIMIT = 111
COUNTED = [k for k in ext.kernel_names() if cxx.is_counted(k)]
TENSOR_PREFILL = [k for k in COUNTED if k[1] == "tensor_prefill.h"]
KERNELS = [k for k in COUNTED if k not in TENSOR_PREFILL]
pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def batches() -> dict[str, list[cxx.Kernel]]:
    """Three kernels of one file each, by names like "products.h: product_rows_float16_m1"."""
    by_file = groupby(sorted(KERNELS, key=lambda k: k[1]), key=lambda k: k[1])
    kernels = [(file, list(of_file)) for file, of_file in by_file]
    return {
        f"{file}: {of_file[i][0]}": of_file[i : i + 3]
        for file, of_file in kernels
        for i in range(0, len(of_file), 3)
    }


def assert_fit(kernels: list[cxx.Kernel], limit: int, **steps: bool) -> None:
    """Within its loops nothing is spilled. A few values that only its end needs may be: they are
    written and read once a threadgroup."""
    counts = cxx.registers(kernels, METAL, limit, **steps)
    print(*(f"{name}: {count}" for name, count in counts.items()), sep="\n")
    assert list(counts) == [name for name, *_ in kernels]
    assert all(0 < count.used <= limit for count in counts.values())
    assert {n: c for n, c in counts.items() if c.spilled_in_loops or c.spilled > 12} == {}


@pytest.mark.one_in(120, by_prefix=True)
@pytest.mark.parametrize("batch", batches())
def test_every_kernel_fits(batch) -> None:
    assert_fit(batches()[batch], LIMIT)


# With bounds a row keeps one number more. With ALiBi it keeps its slope, and `paged_decode_matrix`
# has several rows a lane. Fewer registers are left for another compiler.
VARIANTS = {"bounds": (LIMIT + 4, {"bounds": True}), "alibi": (LIMIT + 10, {"alibi": True})}


@pytest.mark.one_in(5, by_prefix=True)
@pytest.mark.parametrize(
    "case",
    [f"{variant}: {dims}" for variant in VARIANTS for dims in ("576_512", "64_64", "128_128")],
)
def test_variants_of_attention_fit(case) -> None:
    variant, dims = case.split(": ")
    kernels = [k for k in KERNELS if f"_bfloat16_{dims}_" in k[0]]
    assert len(kernels) > 2
    limit, steps = VARIANTS[variant]
    assert_fit(kernels, limit, **steps)


def test_prefill_on_tensor_units_fits_narrow_heads() -> None:
    """With wider ones a SIMD-group's queries and results alone take most registers, and a tile that
    is on its way to threadgroup memory spills others (docs/metal-kernels.md#registers)."""
    assert_fit([k for k in TENSOR_PREFILL if "_32_32_" in k[0]], LIMIT)
    wide = [k for k in TENSOR_PREFILL if "float16_128_128_m64" in k[0]][:1]
    [count] = cxx.registers(wide, METAL, LIMIT).values()
    assert count.spilled_in_loops > 0, "it fits now: move it to KERNELS"


@pytest.mark.one_in(7)
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
