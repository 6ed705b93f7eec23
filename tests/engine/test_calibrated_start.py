"""An engine starts with faulty kernels on the simulated GPU: it names them, does not use them, and
answers like the CPU."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from support.interpreters import python_path
from support.planted_kernels import MLX, VARIABLE, simulated_with_faults
from support.simulated import launches, needs_simulator, sim_ext

from mlx_paged import LLM, SamplingParams, kernels
from mlx_paged.calibration import calibrate as calibration
from mlx_paged.calibration import cases, machine
from mlx_paged.calibration.cache import Cache, Result
from mlx_paged.calibration.verdicts import RejectedKernelError
from mlx_paged.engine.calibration import follow_known_verdicts
from mlx_paged.errors import InvalidParameterError
from mlx_paged.platform import Platform

TESTS = Path(__file__).resolve().parents[1]
PROMPTS = ["Return the sum of two numbers.", "Return the largest item of a list."]
DECODE, MATRIX = "paged_decode_float32_64_64_q3", "paged_decode_matrix_float32_64_64_"
PREFILL = "paged_prefill_float32_64_64_m32"
# The embedded model's products, unless a dtype dequantizes them.
PRODUCTS = tuple(f"product_rows_float32_affine_8_m{rows}" for rows in (1, 4, 16))
# The embedded model's attention has no other sizes.
EVERY_ATTENTION = (DECODE, PREFILL, *(f"{MATRIX}m{size}" for size in (8, 16, 32)))

pytestmark = needs_simulator


@pytest.fixture(autouse=True)
def _on_a_mac(monkeypatch, tmp_path) -> None:
    """The simulated GPU needs calibration, in a child process of its own and a new cache."""
    monkeypatch.setattr(machine, "is_needed", lambda platform: True)
    monkeypatch.setattr(calibration, "MODULE", "support.calibration_child")
    # Fewer rows than by default, with the same kernels.
    monkeypatch.setattr(cases, "TIMED_ROWS", (1, 16))
    monkeypatch.setattr(cases, "PIECE_TOKENS", (0, 768))
    monkeypatch.setattr(cases, "PRODUCT_ROWS", (1, 16))
    monkeypatch.setattr(calibration, "SECONDS", 300.0)
    monkeypatch.setattr(calibration, "SECONDS_PER_JOB", 60.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", python_path(TESTS.parent, TESTS))
    sim_ext.forget_attention_layers()


@pytest.fixture
def only_computing(monkeypatch) -> None:
    """Without the kernels that sample or move blocks, which another test has checked."""
    monkeypatch.setattr(cases, "_data_checks", lambda needs: ())


def plant(monkeypatch, **faults: str) -> None:
    monkeypatch.setenv(VARIABLE, json.dumps(faults))


def generate(num_tokens: int = 8, **options) -> list[tuple[int, ...]]:
    llm = LLM(num_gpu_blocks_override=16, **options)
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    return generate(calibrate="off")


@pytest.fixture(scope="module")
def expected_of_floats() -> list[tuple[int, ...]]:
    return generate(3, dtype="float32", calibrate="off")


def ran_kernels() -> set[str]:
    """The kernels that ran in this process since the last call."""
    return {launch["kernel"] for launch in launches()}


def test_right_kernels_run_and_the_second_start_runs_no_child(
    monkeypatch, caplog, expected
) -> None:
    caplog.set_level(logging.INFO, "mlx_paged.calibration")
    with simulated_with_faults():
        before = sim_ext.step_counts()["steps"]
        assert generate() == expected
        assert not kernels.rejected & {*EVERY_ATTENTION, *PRODUCTS} and DECODE in ran_kernels()
        assert sim_ext.step_counts()["steps"] == before  # the simulated graphs take no time
        [begin, end] = [record.getMessage() for record in caplog.records]
        assert begin.startswith("calibrating this machine's kernels") and "0 are not used" in end
        monkeypatch.setattr(calibration, "MODULE", "no_such_module")
        caplog.clear()
        assert generate() == expected
        assert not caplog.records


@pytest.mark.one_in(16)
@pytest.mark.usefixtures("only_computing")
@pytest.mark.parametrize("fault", ["wrong", "crash", "slow"])
def test_a_faulty_kernel_is_named_and_replaced(monkeypatch, caplog, expected, fault) -> None:
    plant(monkeypatch, **{DECODE: fault})
    with simulated_with_faults():
        assert generate() == expected
        assert DECODE in kernels.rejected
        ran = ran_kernels()
    assert DECODE not in ran and f"{MATRIX}m8" in ran
    [said] = [r.getMessage() for r in caplog.records if "rejected" in r.getMessage()]
    words = {"wrong": "WrongResult: row", "crash": "SIGABRT", "slow": f"where {MATRIX}m8 takes"}
    assert said.startswith(f"calibration rejected the kernel {DECODE}: ") and words[fault] in said


@pytest.mark.long  # tests/test_child_jobs.py has a job that hangs, test_calibrate.py its verdict
@pytest.mark.usefixtures("only_computing")
def test_a_kernel_that_hangs_is_ended_and_not_tried_again(monkeypatch, caplog, expected) -> None:
    plant(monkeypatch, **{PREFILL: "hang"})
    monkeypatch.setattr(calibration, "SECONDS_PER_JOB", 8.0)
    with simulated_with_faults():
        assert generate() == expected
        assert PREFILL not in ran_kernels()
        assert "no answer within 8 s" in caplog.text
        monkeypatch.setattr(calibration, "MODULE", "no_such_module")
        assert generate() == expected  # the cache has the hang
        assert PREFILL in kernels.rejected


@pytest.mark.long
def test_without_any_attention_kernel_mlx_computes_it(monkeypatch, expected) -> None:
    plant(monkeypatch, write_kv="wrong", **dict.fromkeys(EVERY_ATTENTION, "wrong"))
    with simulated_with_faults():
        assert generate() == expected
        assert not ran_kernels() & {"write_kv", *EVERY_ATTENTION}


@pytest.mark.long
def test_a_kernel_that_nothing_replaces_is_an_error_with_its_name(monkeypatch) -> None:
    plant(monkeypatch, fill_zero="wrong")
    with simulated_with_faults(), pytest.raises(RejectedKernelError, match=r"fill_zero .*row 0 is"):
        generate()


@pytest.mark.usefixtures("only_computing")
def test_whole_steps_run_if_they_are_right_and_faster(
    monkeypatch, caplog, expected_of_floats
) -> None:
    caplog.set_level(logging.INFO, "mlx_paged.calibration")
    plant(monkeypatch, **{MLX: "slow"})
    with simulated_with_faults():
        before = sim_ext.step_counts()["steps"]
        assert generate(3, calibrate="force", dtype="float32") == expected_of_floats
        assert sim_ext.step_counts()["steps"] > before
        assert "product_rows_float32_m4" in ran_kernels()
    assert "whole steps: up to 16 rows" in caplog.text


@pytest.mark.one_in(64)
@pytest.mark.usefixtures("only_computing")
@pytest.mark.parametrize("kernel", ["product_rows_float32_m4", "rope_write_float32"])
@pytest.mark.parametrize("fault", ["wrong", "crash"])
def test_a_faulty_kernel_of_whole_steps_does_not_run(
    monkeypatch, caplog, expected_of_floats, kernel, fault
) -> None:
    plant(monkeypatch, **{MLX: "slow", kernel: fault})
    with simulated_with_faults():
        assert generate(3, dtype="float32") == expected_of_floats
        assert kernel not in ran_kernels() and kernel in kernels.rejected
    assert f"calibration rejected the kernel {kernel}" in caplog.text


def test_a_child_that_cannot_start_leaves_kernels_as_they_are(
    monkeypatch, caplog, expected
) -> None:
    monkeypatch.setattr(calibration, "MODULE", "no_such_module")
    with simulated_with_faults():
        assert generate() == expected
        assert DECODE in ran_kernels()
        assert not Cache(machine.key()).load()
    assert "kernels could not be calibrated" in caplog.text


def test_off_and_other_devices_calibrate_nothing(monkeypatch, expected) -> None:
    monkeypatch.setattr(calibration, "MODULE", "no_such_module")
    with simulated_with_faults():
        assert generate(calibrate="off") == expected
        assert not Cache(machine.key()).path.parent.exists()
    monkeypatch.undo()
    assert not machine.is_needed(Platform.current()), "neither the CPU nor the simulated GPU"


def test_the_option_is_checked() -> None:
    with pytest.raises(InvalidParameterError, match="calibrate must be 'auto', 'off' or 'force'"):
        LLM(calibrate="maybe")


def test_the_drop_in_follows_what_an_engine_found() -> None:
    with simulated_with_faults():
        follow_known_verdicts()
        assert not kernels.rejected, "nothing is known yet"
        Cache(machine.key()).save({"a": Result((DECODE,), "wrong"), "b": Result((PREFILL,))})
        follow_known_verdicts()
        assert kernels.rejected == {DECODE}
