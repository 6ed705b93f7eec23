"""OpenBLAS in front of MLX's own: right results, and a truthful status in every situation."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import blas, build_info, linker

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="macOS has Accelerate")

# One line a case, so that a subprocess can repeat the in-process check.
PRODUCT = """
a = np.random.default_rng(0).standard_normal((65, 130)).astype(np.float32)
product = np.array(mx.matmul(mx.array(a), mx.array(a).T, stream=mx.cpu))
np.testing.assert_allclose(product, a @ a.T, rtol=1e-4, atol=1e-4)
"""

FORWARDER_IS_LOADED = """
import pathlib
print('libmlx_paged_blas' in pathlib.Path('/proc/self/maps').read_text())
"""


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a fresh interpreter, where nothing is imported or preloaded yet."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("MLX_PAGED_")}
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", code],
        check=False,
        env={**inherited, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 1), (1, 64, 33), (7, 5, 129), (130, 65, 70), (32, 256, 512)],
)
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
def test_products_equal_numpys(rng, dtype, m, n, k, transposed) -> None:
    def operand(rows: int, columns: int, flip: bool) -> tuple[np.ndarray, mx.array]:
        values = rng.standard_normal((columns, rows) if flip else (rows, columns))
        if dtype == np.complex64:
            values = values + 1j * rng.standard_normal(values.shape)
        values = values.astype(dtype)
        with mx.stream(mx.cpu):
            # NumPy's float64 becomes float32 unless told otherwise.
            array = mx.array(values, mx.float64) if dtype == np.float64 else mx.array(values)
            return (values.T, array.T) if flip else (values, array)

    a, a_mlx = operand(m, k, transposed[0])
    b, b_mlx = operand(k, n, transposed[1])
    product = np.array(mx.matmul(a_mlx, b_mlx, stream=mx.cpu))
    assert product.dtype == dtype
    expected = a.astype(np.complex128) @ b.astype(np.complex128)
    tolerance = 1e-13 if dtype == np.float64 else 1e-5
    assert np.linalg.norm(product - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("k", [1, 15, 16, 70, 384])
@pytest.mark.parametrize("n", [3, 17, 960])
def test_a_row_of_a_product_of_few_rows_does_not_depend_on_the_others(rng, n: int, k: int) -> None:
    """As decode has them: x @ weights.T. The engine's tokens do not depend on the batch, then."""
    most = {"avx5": 64, "avx2": 16}.get(build_info()["simd"][:4])
    if "OpenBLAS" not in blas.status() or most is None:
        pytest.skip("products of few rows are OpenBLAS's, or MLX's, own here")
    x, weights = (rng.standard_normal((rows, k)).astype(np.float32) for rows in (most, n))
    with mx.stream(mx.cpu):
        x_mlx, weights_mlx = mx.array(x), mx.array(weights)
        whole = np.array(x_mlx @ weights_mlx.T)
        for rows in {*range(1, 21), most - 1} & {*range(1, most)}:
            assert np.array_equal(np.array(x_mlx[:rows] @ weights_mlx.T), whole[:rows]), rows
    expected = x.astype(np.float64) @ weights.T.astype(np.float64)
    assert np.linalg.norm(whole - expected) <= 1e-6 * np.linalg.norm(expected)


def test_batched_and_accumulating_products(rng) -> None:
    a, b, c = (rng.standard_normal(s).astype(np.float32) for s in ((4, 9, 17), (4, 17, 6), (9, 6)))
    a_mlx, b_mlx, c_mlx = map(mx.array, (a, b, c))
    np.testing.assert_allclose(np.array(a_mlx @ b_mlx), a @ b, rtol=1e-4, atol=1e-5)
    out = mx.addmm(c_mlx, a_mlx[0], b_mlx[0], alpha=0.5, beta=2.0)
    np.testing.assert_allclose(np.array(out), 2 * c + 0.5 * a[0] @ b[0], rtol=1e-4, atol=1e-5)


def test_status_is_decided_on_import_and_stays() -> None:
    assert blas.preload() == blas.status()
    assert "not decided" not in blas.status()


@linux_only
def test_importing_mlx_paged_first_puts_openblas_in_front() -> None:
    pytest.importorskip("scipy_openblas32")
    run = python(
        "import mlx_paged, mlx.core as mx, numpy as np\n"
        "from mlx_paged import blas, build_info\n"
        "assert build_info()['blas'] == blas.status()\n"
        f"{PRODUCT}\nprint(blas.status())\n{FORWARDER_IS_LOADED}"
    )
    assert run.returncode == 0, run.stderr
    status, loaded = run.stdout.splitlines()
    assert status.startswith("OpenBLAS (scipy-openblas32 ")
    assert loaded == "True"
    assert "Warning" not in run.stderr


@linux_only
def test_off_leaves_mlx_as_it_is() -> None:
    run = python(
        "import mlx_paged, mlx.core as mx, numpy as np\n"
        f"{PRODUCT}\nprint(mlx_paged.blas.status())\n"
        f"{FORWARDER_IS_LOADED}",
        MLX_PAGED_BLAS="off",
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["MLX's own (MLX_PAGED_BLAS=off)", "False"]
    assert "Warning" not in run.stderr


def test_any_other_value_is_refused() -> None:
    run = python("import mlx_paged", MLX_PAGED_BLAS="fast")
    assert run.returncode != 0
    assert "ValueError: MLX_PAGED_BLAS must be 'auto' or 'off' but got 'fast'" in run.stderr


MLX_FIRST = f"""
import mlx.core as mx, numpy as np
mx.eval(mx.ones((4, 8)) @ mx.ones((8, 3)))  # (libmlx has called its own BLAS by now)
import mlx_paged, mlx_paged.extension
from mlx_paged import blas, linker
blas.preload()
{PRODUCT}
print(blas.status())
"""

CALLED = """
import ctypes
slots = linker.import_slots(linker.loaded_libmlx(), blas._NAMES)
forwarder = {n: ctypes.cast(getattr(blas._libraries[-1], n), ctypes.c_void_p).value for n in slots}
assert {n: ctypes.c_uint64.from_address(at).value for n, at in slots.items()} == forwarder
assert len(slots) == 3
"""


@linux_only
def test_mlx_imported_first_makes_no_difference() -> None:
    pytest.importorskip("scipy_openblas32")
    run = python(f"{MLX_FIRST}{CALLED}")
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("OpenBLAS (scipy-openblas32 ")
    assert "Warning" not in run.stderr


@linux_only
def test_a_page_that_is_read_only_is_written_and_stays_so() -> None:
    page = mmap.mmap(-1, mmap.PAGESIZE)  # as a table of a library that is linked with `-z now`
    slot = ctypes.addressof(ctypes.c_char.from_buffer(page)) + 16
    libc = ctypes.CDLL(None)
    start = ctypes.c_void_p(slot - 16)
    assert linker.is_writable(slot)
    assert libc.mprotect(start, ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ) == 0
    assert not linker.is_writable(slot)
    linker.write_address(slot, 1234)
    assert not linker.is_writable(slot)
    assert ctypes.c_uint64.from_address(slot).value == 1234


@linux_only
def test_where_it_cannot_be_mended_one_warning_says_what_to_do() -> None:
    pytest.importorskip("scipy_openblas32")
    run = python(f"import mlx.core, numpy, sys\nsys.byteorder = 'big'\n{MLX_FIRST}")
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "MLX's own (mlx.core was imported before mlx_paged)"
    assert run.stderr.count("RuntimeWarning: matrix products stay") == 1
    assert "Put `import mlx_paged` above the first import of mlx or mlx_lm" in run.stderr


@linux_only
def test_a_library_that_lacks_a_name_is_left_alone() -> None:
    library = linker.loaded_libmlx()
    with pytest.raises(OSError, match="does not import no_such_name"):
        linker.import_slots(library, ["cblas_sgemm", "no_such_name"])
    with pytest.raises(OSError):
        linker.import_slots("/no/such/file", [])


@linux_only
def test_a_machine_without_openblas_is_told_what_to_install() -> None:
    run = python(
        "import sys; sys.modules['scipy_openblas32'] = None\n"
        "import mlx_paged, mlx.core as mx, numpy as np\n"
        f"{PRODUCT}\nprint(mlx_paged.blas.status())"
    )
    assert run.returncode == 0, run.stderr
    assert "pip install 'mlx-paged[cpu]'" in run.stdout


@linux_only
@pytest.mark.parametrize(
    ("machine", "version", "is_taken"),
    [
        ("aarch64", "0.3.34.0.0", True),
        ("aarch64", "0.3.34.237.2", False),
        ("aarch64", "0.3.35.0.0", False),
        ("x86_64", "0.3.35.0.0", True),
    ],
)
def test_an_openblas_that_is_wrong_on_arm_is_not_taken(machine, version, is_taken) -> None:
    pytest.importorskip("scipy_openblas32")
    run = python(
        "import platform\nfrom importlib import metadata\n"
        f"platform.machine = lambda: {machine!r}\nreal = metadata.version\n"
        f"metadata.version = lambda n: {version!r} if n == 'scipy-openblas32' else real(n)\n"
        f"import mlx_paged\nprint(mlx_paged.blas.status())\n{FORWARDER_IS_LOADED}"
    )
    status, loaded = run.stdout.splitlines()
    assert loaded == str(is_taken), run.stderr
    if is_taken:
        assert status == f"OpenBLAS (scipy-openblas32 {version})"
    else:
        assert status.startswith(f"MLX's own (scipy-openblas32 {version} computes wrong products")
        assert "pip install 'mlx-paged[cpu]'" in status


@linux_only
def test_a_blas_that_the_user_preloaded_is_kept() -> None:
    run = python(
        "import ctypes\n"
        "class Preloaded:\n    cblas_sgemm = None\n"  # that it is there is all that counts
        "real = ctypes.CDLL\n"
        "ctypes.CDLL = lambda name, *a, **k: Preloaded() if name is None else real(name, *a, **k)\n"
        "import mlx_paged\nprint(mlx_paged.blas.status())"
    )
    assert run.stdout.strip() == "preloaded by the environment", run.stderr
