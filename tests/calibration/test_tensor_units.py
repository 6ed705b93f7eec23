"""Kernels for tensor units: which machines compile them, and what calibration makes of them. A fake
M5 is the simulated GPU with the Metal of macOS 26."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.planted_kernels import VARIABLE, Clock, simulated_with_faults
from support.simulated import launches, needs_simulator, tensor_library

from mlx_paged import kernels
from mlx_paged.calibration import cases, check, child, machine, tensor_units, timing
from mlx_paged.calibration.cache import Result
from mlx_paged.calibration.cases import Needs, Product, layer_text
from mlx_paged.calibration.verdicts import Verdicts
from mlx_paged.kernels import AttentionLayer

LAYER = AttentionLayer("float16", 1, 64, 64, 0, 0, 0)
FLOATS = AttentionLayer("float32", 1, 64, 64, 0, 0, 0)
NEEDS = Needs("float16", (LAYER,), 32, tensor_units=True)
LARGE, SMALL = (f"tensor_prefill_float16_64_64_m{rows}" for rows in (64, 32))
PORTABLE = "paged_prefill_float16_64_64_m64"
PRODUCTS = (Product(72, 96, 4, 32, "affine"), Product(24, 64))
WITH_PRODUCTS = Needs("float16", (), 32, 96, PRODUCTS, tensor_units=True)
TILES = [f"tensor_product_float16_affine_4_m{rows}" for rows in (128, 64, 32)]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    kernels.allow_tensor_kernels(False)
    kernels.reject_kernels(())
    kernels.allow_step_rows(0)


# --- Availability ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "macos", "reason"),
    [
        ("applegpu_g17s", "26.2", None),
        ("applegpu_g17g", "27.0", None),
        ("applegpu_g18p", "26.2.1", None),
        ("applegpu_g17p", "26.2", "applegpu_g17p; tensor units begin with generation 18"),
        ("applegpu_g16s", "26.2", "applegpu_g16s; tensor units begin with generation 17"),
        ("applegpu_g17s", "26.1", "the system is macOS 26.1; tensor units need macOS 26.2"),
        ("applegpu_g17s", "15.7.2", "the system is macOS 15.7.2"),
        ("applegpu_g17s", "", "the system is macOS unknown"),
        ("sm_90", "", "the GPU's architecture is sm_90, not one of Apple's"),
        (None, "26.2", "the GPU's architecture is unknown"),
    ],
)
def test_the_reason_why_a_machine_has_none(architecture, macos, reason) -> None:
    info = {} if architecture is None else {"architecture": architecture}
    found = tensor_units.unavailable(info, macos)
    assert found is None if reason is None else found is not None and reason in found


def test_this_machine_has_none_and_its_key_says_why() -> None:
    reason = tensor_units.unavailable()
    assert reason is not None and machine.key()["tensor_units"] == reason


# --- Jobs and verdicts ----------------------------------------------------------------------------


def jobs_of(needs: Needs) -> tuple[list[str], list[str]]:
    kernels.allow_tensor_kernels(needs.tensor_units)
    reject = kernels.reject_kernels
    return (
        cases.checks(needs, kernels.attention_kernel),
        cases.timings(needs, kernels.attention_kernel, lambda names: reject(names)),
    )


def test_candidates_are_checked_and_timed_where_there_are_tensor_units() -> None:
    checks, timings = jobs_of(NEEDS)
    text = layer_text(LAYER)
    assert (
        f"attention/{text}/32/9/{SMALL}" in checks and f"attention/{text}/32/33/{LARGE}" in checks
    )
    assert [job for job in timings if f"{text}/32/64/" in job] == [
        f"time-attention/{text}/32/64/{kernel}" for kernel in (LARGE, SMALL, PORTABLE)
    ]


def test_products_are_checked_and_timed_with_every_tile() -> None:
    checks, timings = jobs_of(WITH_PRODUCTS)
    assert [job for job in checks if job.startswith("tensor-product/")] == [
        *(f"tensor-product/float16/72,96,4,32,affine/{kernel}" for kernel in TILES),
        *(f"tensor-product/float16/72,64,0,0,/{k.replace('_affine_4', '')}" for k in TILES),
    ]
    for job, product, rows in cases.product_jobs(WITH_PRODUCTS):
        ways = [other.rpartition("/")[2] for other in timings if other.startswith(f"{job}/")]
        if rows > 16 and product.bits:
            assert ways == [*TILES, "mlx"]
        assert len(ways) == (4 if rows > 16 else 2)


def test_they_are_no_candidates_elsewhere() -> None:
    for needs in (
        replace(WITH_PRODUCTS, tensor_units=False),
        Needs("float16", (LAYER,), 32),
        Needs("float32", (FLOATS,), 32, tensor_units=True),
    ):
        checks, timings = jobs_of(needs)
        assert not any("tensor" in job for job in [*checks, *timings])


def test_they_run_where_they_are_proven_only() -> None:
    verdicts = Verdicts.of({"a": Result((SMALL,)), "b": Result((LARGE,), "wrong")}, NEEDS)
    verdicts.apply()
    assert LARGE in kernels.rejected and SMALL not in kernels.rejected
    assert kernels.attention_kernel(LAYER, 64) == SMALL and verdicts.rejected == {LARGE: "wrong"}
    Verdicts.of({"a": Result((SMALL,))}, Needs("float16", (LAYER,), 32)).apply()
    assert kernels.attention_kernel(LAYER, 64) == PORTABLE, "another machine's outcome"


# --- On a fake M5 ---------------------------------------------------------------------------------


def known(**more: object) -> str:
    outcomes = {"rejected": [], "proven": [], "tensor_units": True, **more}
    return f"{child.KNOWN}/{json.dumps(outcomes)}"


@pytest.fixture
def announced(monkeypatch) -> list[list[str]]:
    """The kernels that jobs announce."""
    lists: list[list[str]] = []
    for module in (check, timing):
        monkeypatch.setattr(module, "announce", lists.append)
    monkeypatch.setattr(child.child_jobs, "announced", lambda: lists[-1])
    for name in ("CONTEXT", "CALLS", "REPEATS"):
        monkeypatch.setattr(timing, name, {"CONTEXT": 40}.get(name, 1))
    return lists


PREFILL_JOB = f"attention/{layer_text(LAYER)}/32/9/{SMALL}"


@needs_simulator
def test_right_kernels_are_proven_and_timed(announced) -> None:
    with simulated_with_faults(clock := Clock(), tensor_library()):
        timing.clock, before = clock, timing.clock
        try:
            assert child.run(known()) == {}
            assert child.run(PREFILL_JOB) == {} and announced[-1] == [SMALL]
            assert child.run(f"time-{PREFILL_JOB}")["seconds"] > 0
        finally:
            timing.clock = before


@needs_simulator
def test_a_wrong_kernel_is_found(monkeypatch, announced) -> None:
    monkeypatch.setenv(VARIABLE, json.dumps({SMALL: "wrong"}))
    with simulated_with_faults(library_=tensor_library()):
        child.run(known())
        with pytest.raises(check.WrongResult):
            child.run(PREFILL_JOB)
        assert announced[-1] == [SMALL] and SMALL in kernels.rejected
        assert "unsupported" in child.run(PREFILL_JOB), "later jobs do not run it"


@needs_simulator
@pytest.mark.parametrize("product", PRODUCTS, ids=["quantized", "dense"])
def test_right_products_are_proven_and_timed(announced, product) -> None:
    kernel = TILES[2] if product.bits else TILES[2].replace("_affine_4", "")
    with simulated_with_faults(clock := Clock(), tensor_library()):
        timing.clock, before = clock, timing.clock
        try:
            child.run(known())
            assert child.run(f"tensor-product/float16/{product}/{kernel}") == {}
            assert announced[-1] == [kernel]
            assert [launch["kernel"] for launch in launches()] == [kernel] * 2
            timed = f"time-products/float16/{json.dumps([str(product)])}/32"
            assert child.run(f"{timed}/{kernel}")["seconds"] == 1
            assert child.run(f"{timed}/mlx")["seconds"] == 0
        finally:
            timing.clock = before


@needs_simulator
def test_a_wrong_product_is_found(monkeypatch, announced) -> None:
    monkeypatch.setenv(VARIABLE, json.dumps({TILES[1]: "wrong"}))
    job = f"tensor-product/float16/{PRODUCTS[0]}/{TILES[1]}"
    with simulated_with_faults(library_=tensor_library()):
        child.run(known())
        with pytest.raises(check.WrongResult):
            child.run(job)
        assert announced[-1] == [TILES[1]] and TILES[1] in kernels.rejected
        assert "unsupported" in child.run(job), "later jobs do not run it"


@needs_simulator
def test_a_compiler_that_refuses_them_only_disables_them(announced) -> None:
    """As on a system whose Metal lacks what the kernels use: the error names the kernel."""
    with simulated_with_faults():  # metal/ for every Mac
        child.run(known())
        with pytest.raises(RuntimeError, match=f"no kernel has the host name {SMALL}"):
            child.run(PREFILL_JOB)
        assert announced[-1] == [SMALL] and SMALL in kernels.rejected
        assert kernels.attention_kernel(LAYER, 9) == LARGE
