"""Metal 3.1, which macOS 14 has, is C++14. What a later standard adds may be an error on a Mac, and
is none for the simulator, whose dialect is C++17. Kernels for tensor units are Metal 4: C++17."""

from __future__ import annotations

import pytest
from sim import METAL, cxx, missing

from mlx_paged.extension import ext

KERNELS = ext.kernel_names()
pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.mark.parametrize("dtype", ["float", "half", "bfloat"])
def test_every_instantiation_is_strict_cpp14(dtype) -> None:
    kernels = [
        k
        for k in KERNELS
        if (f"<{dtype}" in k[2] or k[1] == "data.h") and k[1] not in cxx.TENSOR_FILES
    ]
    assert len(kernels) > 70
    assert cxx.strict_errors(kernels, METAL) == ""


@pytest.mark.parametrize(
    "source",
    [
        "template <int N> METAL_FUNC int f() { if constexpr (N > 1) { return 1; } return 0; }",
        "template <int... N> METAL_FUNC int f() { return (N + ...); }",
        "inline int x = 1;",
        "namespace a::b { }",
        "METAL_FUNC int f() { if (int i = 1; i) { return i; } return 0; }",
    ],
)
def test_a_later_standard_is_refused(source) -> None:
    assert "C++17 extension" in cxx.strict_errors([], METAL, source)


def test_kernels_for_tensor_units_are_strict_cpp17() -> None:
    kernels = [k for k in KERNELS if k[1] in cxx.TENSOR_FILES]
    assert len(kernels) == 24 + 60
    assert cxx.strict_errors(kernels, METAL, metal_4=True) == ""


def test_kernels_for_tensor_units_are_refused_before_metal_4() -> None:
    source = '#include "tensor_prefill.h"\n'
    assert "need Metal 4" in cxx.strict_errors([], METAL, source)
    later = "template <typename T> concept C = true;"
    assert cxx.strict_errors([], METAL, later, metal_4=True)
