"""AMX tiles and the products made of them.

Tiles in software stand in for the processor's: they are checked against the manual's semantics
here, and the kernels that use them against those of other instruction sets. On a processor with
AMX the same tests run its own tiles too.
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.simd_processes import instruction_sets

SOURCES = Path(__file__).parents[2] / "csrc" / "cpu"
PROGRAM = Path(__file__).parent / "amx" / "tiles.cpp"

needs_x86 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or not SOURCES.is_dir(),
    reason="AMX is an extension of x86-64, and its sources have to be here",
)
needs_emulation = pytest.mark.skipif(  # a string is evaluated when a test needs it
    "'amx_emulated' not in instruction_sets()", reason="this processor has no AVX-512 with BF16"
)


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    program = tmp_path_factory.mktemp("amx") / "tiles"
    options = ["-std=c++20", "-O1", "-mfma", "-mamx-tile", "-mamx-int8", "-mamx-bf16"]
    sources = [PROGRAM, SOURCES / "amx.cpp"]
    subprocess.run([compiler, *options, *map(str, sources), "-o", str(program)], check=True)
    return program


def run(program: Path, *arguments: object, data: bytes = b"") -> bytes:
    command = [str(program), *map(str, arguments)]
    return subprocess.run(command, input=data, check=True, capture_output=True).stdout


def kinds(program: Path) -> Iterator[str]:
    """The kinds of tiles that this processor has."""
    yield "software"
    if not run(program, "refusal").strip():
        yield "hardware"


SHAPES = [(16, 64, 16), (16, 32, 16), (5, 64, 16), (16, 4, 1), (1, 60, 9)]  # m, bytes of k, n


@needs_x86
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_products_of_bytes_are_signed_by_unsigned_and_wrap_around(rng, tiles, m, k, n) -> None:
    count = 3
    a = rng.integers(-128, 128, (count, m, k)).astype(np.int8)
    b = rng.integers(0, 256, (count, k // 4, n, 4)).astype(np.uint8)
    c = rng.integers(-(2**31), 2**31, (count, m, n)).astype(np.int32)
    data = b"".join(x.tobytes() for triple in zip(a, b, c) for x in triple)
    columns = b.transpose(0, 1, 3, 2).reshape(count, k, n).astype(np.int64)
    expected = (c + a.astype(np.int64) @ columns).astype(np.int32)  # the low bits
    for kind in kinds(tiles):
        got = np.frombuffer(run(tiles, kind, "bytes", m, k, n, count, data=data), np.int32)
        np.testing.assert_array_equal(got.reshape(count, m, n), expected, err_msg=kind)


def bfloat(x: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 below, as bits."""
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), x).astype(np.float32)


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c with one rounding: exact before it, for numbers of similar size."""
    exact = a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)
    return flushed(exact.astype(np.float32))


def product_of_pairs(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """TDPBF16PS by the manual: a [m, pairs, 2], b [pairs, n, 2], c [m, n]."""
    a, b, c = flushed(a), flushed(b), flushed(c)
    sums = np.zeros((2, *c.shape), np.float32)
    for pair in range(a.shape[1]):
        for i in range(2):
            sums[i] = fused(a[:, pair, i][:, None], b[pair, :, i][None], sums[i])
    return flushed(c + flushed(sums[0] + sums[1]))


@needs_x86
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_products_of_pairs_are_rounded_as_in_the_manual(rng, tiles, m, k, n) -> None:
    a = bfloat(rng.standard_normal((m, k // 4, 2)) * 2.0 ** rng.integers(-4, 4, (m, 1, 1)))
    b = bfloat(rng.standard_normal((k // 4, n, 2)))
    c = rng.standard_normal((m, n)).astype(np.float32)
    expected = product_of_pairs(widened(a), widened(b), c)
    for kind in kinds(tiles):
        data = a.tobytes() + b.tobytes() + c.tobytes()
        got = np.frombuffer(run(tiles, kind, "pairs", m, k, n, 1, data=data), np.float32)
        np.testing.assert_array_equal(got.reshape(m, n), expected, err_msg=kind)


@needs_x86
def test_denormals_count_as_zero_in_products_of_pairs(tiles) -> None:
    least = 2.0**-126
    cases = [  # a's pair, b's pair, c, result
        ((least / 2, 0), (2.0**100, 0), 1.0, 1.0),
        ((2.0**100, 0), (-least / 2, 0), 1.0, 1.0),
        ((0, 0), (0, 0), least / 2, 0.0),
        ((least, 0), (0.5, 0), 0.0, 0.0),
        ((least, least), (1.0, -0.5), 0.0, least),  # each sum is flushed
        ((least, 0), (1.0, 0), -1.5 * least, 0.0),
        ((least, 0), (1.0, 0), least, 2 * least),
        ((np.inf, 1.0), (1.0, 1.0), 0.0, np.inf),
        ((np.inf, -np.inf), (1.0, 1.0), 0.0, np.nan),
    ]
    data = b"".join(
        bfloat(np.array(a)).tobytes() + bfloat(np.array(b)).tobytes() + np.float32(c).tobytes()
        for a, b, c, _ in cases
    )
    for kind in kinds(tiles):
        got = np.frombuffer(run(tiles, kind, "pairs", 1, 4, 1, len(cases), data=data), np.float32)
        np.testing.assert_array_equal(got, np.array([case[3] for case in cases], np.float32))


@needs_x86
def test_a_shape_that_the_processor_refuses_ends_the_program(tiles) -> None:
    for m, k, n in ((17, 64, 16), (16, 68, 16), (0, 64, 16)):
        command = [str(tiles), "software", "bytes", *map(str, (m, k, n, 1))]
        ended = subprocess.run(command, input=bytes(8192), capture_output=True, check=False)
        assert ended.returncode < 0, (m, k, n)


# --- Dispatch -------------------------------------------------------------------------------------


@needs_x86
def test_each_reason_against_amx_has_its_words(tiles) -> None:
    def reason(*answers: int) -> str:
        return run(tiles, "refusal", *answers).decode().strip()

    assert reason(0, 0, 0) == "this processor has no AMX (amx-tile, amx-int8 and amx-bf16)"
    assert "does not save AMX's tile registers" in reason(1, 0, 0)
    refused = reason(1, 1, errno.EPERM)
    assert "the container refused" in refused and os.strerror(errno.EPERM) in refused
    assert reason(1, 1, 0) == ""


@needs_x86
def test_amx_is_chosen_where_it_may_be_used(tiles) -> None:
    refusal = run(tiles, "refusal").decode().strip()
    assert ("amx" in instruction_sets()) == (refusal == "")
    if refusal:
        code = "from mlx_paged.extension import build_info; build_info()"
        env = {**os.environ, "MLX_PAGED_SIMD": "amx"}
        command = [sys.executable, "-c", code]
        ended = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
        assert f"on this processor but got amx: {refusal}" in ended.stderr
    else:
        assert instruction_sets()[0] == "amx"


# --- Products -------------------------------------------------------------------------------------

ROWS = [*range(1, 10), *range(15, 19), *range(31, 35), 48, 65, 257, 300]
LONG = (33, 4160)  # n, and a k of several chunks
# Products of every kind whose bits do not depend on the instruction set, as one file.
CODE = """
import sys
from mlx_paged import ops
import mlx.core as mx
import numpy as np
rng = np.random.default_rng(5)
found = {}
for bits, group, activations in (
    (4, 64, "float32"), (4, 32, "float32"), (8, 64, "float32"), (8, 32, "float32"),
    (4, 32, "int8"), (8, 64, "int8"),
):
    for n, k in ((37, 1152), (70, 64 if group == 64 else 352), LONG):
        weight = mx.array(rng.standard_normal((n, k)).astype(np.float32))
        arrays = mx.quantize(weight, group_size=group, bits=bits)
        x = mx.array(rng.standard_normal((max(ROWS), k)).astype(np.float32))
        mx.eval(arrays, x)
        for rows in ROWS if k < LONG[1] else (1, 16, 37):
            for first in {0, max(ROWS) - rows}:
                got = ops.quantized_linear(
                    x[first : first + rows], *arrays, group_size=group, bits=bits,
                    activations=activations, by_rows=True,
                )
                found[f"{bits}-{activations}-{group}-{n}-{k}-{rows}-{first}"] = np.array(got)
np.savez(sys.argv[1], **found)
"""


@needs_emulation
def test_integer_products_have_the_bits_of_other_instruction_sets(tmp_path: Path) -> None:
    def products(simd: str) -> dict[str, np.ndarray]:
        path = tmp_path / f"{simd}.npz"
        env = {**os.environ, "MLX_PAGED_SIMD": simd, "MLX_PAGED_NUM_THREADS": "2"}
        code = CODE.replace("import sys", f"import sys\nROWS, LONG = {ROWS}, {LONG}", 1)
        subprocess.run([sys.executable, "-c", code, str(path)], env=env, check=True)
        with np.load(path) as found:
            return dict(found)

    expected = products("avx512vnni")
    for simd in {"amx_emulated", "avx2", instruction_sets()[0]}:
        got = products(simd)
        assert got.keys() == expected.keys()
        for name in got:
            if simd == "avx2" and name.startswith("8-float32"):
                continue  # in float32
            np.testing.assert_array_equal(got[name], expected[name], err_msg=f"{simd} {name}")
