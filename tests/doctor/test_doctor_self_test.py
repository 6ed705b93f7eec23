"""The self-test finds planted faults in every primitive, and a crash or hang has a name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from support.interpreters import python_path, write_site
from support.reference import ON_GPU

from mlx_paged import extension, ops
from mlx_paged.doctor import jobs, self_test
from mlx_paged.doctor.self_test import CASES, WrongResult

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "gpu" if ON_GPU else "cpu"
JOBS = self_test.jobs(DEVICE)


@pytest.mark.parametrize("job", JOBS)
def test_every_case_passes(job) -> None:
    assert jobs.run(job) < 60


NOT_PRIMITIVES = {
    *("accepts", "build_info", "kernel_names", "pool_copies", "has_transfers", "limit_threads"),
    *("activations", "pipelines_to_come", "prepare_pipeline", "token_bytes", "crc32"),
    # Several ranks' work.
    *("join_group", "all_sum", "use_peer_memory", "try_peer_memory", "forget_peer_memory"),
    *("make_peer_buffer", "peer_buffer_handle", "open_peer_buffer"),
    # Whole steps are made of primitives.
    *("CpuExecutable", "max_cpu_step_rows", "max_gpu_step_rows", "placeholders"),
    *("make_gpu_executable", "run_gpu_executable", "plan_attention"),
    *("serves_rope", "serves_silu_mul"),
    *("add_in_product", "select_rows", "wait_actively", "has_wgmma", "has_wgmma_prefill"),
    *("max_product_rows", "max_shared_rows"),
    *("ArrayContents", "allocator_function", "make_room", "outlast_interpreter"),
    *("exit_unless_extended", "GraphTemplate"),
    *("attention_layers", "attention_kernel", "reject_kernels", "rejected_kernels"),
    *("allow_tensor_kernels", "allow_products", "product_kernels", "set_piece_tokens"),
    *("allowed_step_rows", "allow_step_rows", "supported_step_rows", "gpu_executable_kernels"),
}


def test_every_primitive_has_a_case() -> None:
    primitives = {n for n in dir(extension.ext) if not n.startswith("_")} - NOT_PRIMITIVES
    assert primitives == {name.partition(":")[0] for name in CASES}


def test_every_case_runs_in_every_dtype_that_its_primitive_takes() -> None:
    on_cpu = {name: case.dtypes for name, case in CASES.items() if case.dtypes}
    assert CASES.keys() - on_cpu.keys() == {"sorted_expert_linear", "expert_glu"}
    once = {name for name, dtypes in on_cpu.items() if dtypes != self_test.DTYPES}
    assert once == {"rope_rotations", "upload", "to_host", "edit_logits", "expert_lora"}
    assert len(set(self_test.jobs("cpu"))) == len(on_cpu) * 3 - 2 * len(once)
    on_gpu = {job.split("/")[2].partition(":")[0] for job in self_test.jobs("gpu")}
    cpu_only = {"rope_rotations", "rope", "rms_norm", "silu_mul"}
    cpu_only |= {"quantized_linear", "lookup", "expert_linear"}
    cpu_only |= {"layer_norm", "gelu", "clipped_swiglu"}
    assert on_gpu == {name.partition(":")[0] for name in CASES} - cpu_only
    assert "test/gpu/linear/float32" not in self_test.jobs("gpu")


# --- Planted faults -------------------------------------------------------------------------------


def off(out, by: float = 1.02):
    """A result with one wrong number."""
    if isinstance(out, (tuple, list)):
        return type(out)((off(out[0], by), *out[1:]))
    if out.dtype == mx.int32:
        return mx.concatenate([out[:1] + 1, out[1:]])
    flat = mx.flatten(out)
    index = mx.argmax(mx.abs(mx.nan_to_num(flat.astype(mx.float32), posinf=0, neginf=0)))
    mask = mx.arange(flat.size) == index
    return mx.where(mask, flat * by + 1, flat).astype(out.dtype).reshape(out.shape)


HERE = [c for c in CASES if CASES[c].dtypes or ops.has_wgmma()]


@pytest.mark.parametrize("case", [c for c in HERE if c != "allocate_pool"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_kernel_is_found(monkeypatch, case, dtype) -> None:
    device = DEVICE if CASES[case].gpu_dtypes else "cpu"
    dtypes = CASES[case].gpu_dtypes if device == "gpu" else CASES[case].dtypes
    if dtype not in dtypes:
        dtype = dtypes[0]
    name = case.partition(":")[0]
    right = getattr(ops, name)
    monkeypatch.setattr(ops, name, lambda *a, **k: off(right(*a, **k)))
    with pytest.raises(WrongResult, match=r"expected"):
        self_test.run_case(case, device, dtype)


def test_a_pool_of_another_dtype_is_found(monkeypatch) -> None:
    monkeypatch.setattr(ops, "allocate_pool", lambda *a: mx.zeros(a[:4], mx.int8))
    with pytest.raises(WrongResult, match="int8"):
        self_test.run_case("allocate_pool", DEVICE, "float32")


def test_a_nan_is_never_close(monkeypatch) -> None:
    monkeypatch.setattr(ops, "linear", lambda x, w, b: mx.full((x.shape[0], w.shape[0]), mx.nan))
    with pytest.raises(WrongResult, match="off by inf"):
        self_test.run_case("linear", "cpu", "float32")


def test_another_shape_is_found(monkeypatch) -> None:
    monkeypatch.setattr(ops, "linear", lambda x, w, b: x)
    with pytest.raises(WrongResult, match=r"expected shape \(7, 33\) but got \(7, 96\)"):
        self_test.run_case("linear", "cpu", "float32")


def test_a_kernel_that_ignores_its_window_is_found(monkeypatch) -> None:
    right = ops.paged_attention
    monkeypatch.setattr(ops, "paged_attention", lambda *a, **k: right(*a, **{**k, "window": None}))
    # (Its plan still begins at the window's first block: a few tokens too many are seen.)
    with pytest.raises(WrongResult):
        self_test.run_case("paged_attention: window", DEVICE, "float32")


def test_a_kernel_that_raises_is_the_jobs_error(monkeypatch) -> None:
    def raises(*_, **__):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(ops, "silu_mul", raises)
    assert jobs.attempt("test/cpu/silu_mul/float32").error == "RuntimeError: no such kernel"


# --- Isolation ------------------------------------------------------------------------------------


PLANTED = """
import sys
if any("doctor.jobs" in word for word in getattr(sys, "orig_argv", [])):
    import os, time, mlx_paged, mlx_paged.ops as ops
    ops.rope = lambda *_: {}
"""


def plant(tmp_path: Path, monkeypatch, fault: str) -> None:
    """Every child's `rope` has this fault."""
    write_site(tmp_path, PLANTED.format(fault))
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path, ROOT))


def test_a_crash_is_blamed_on_its_job_and_the_rest_still_runs(tmp_path, monkeypatch) -> None:
    plant(tmp_path, monkeypatch, "os.abort()")
    names = ["mlx", "test/cpu/rope/float32", "test/cpu/rms_norm/float32", "no-such-job"]
    outcomes = jobs.run_in_child(names)
    assert list(outcomes) == names
    assert outcomes["mlx"].value["version"] == mx.__version__
    error = outcomes["test/cpu/rope/float32"].error or ""
    assert error.startswith("Crash: ") and "SIGABRT" in error
    assert outcomes["test/cpu/rms_norm/float32"].error is None
    assert outcomes["no-such-job"].error == "KeyError: 'no-such-job'"


def test_a_hang_is_ended_and_named(tmp_path, monkeypatch) -> None:
    plant(tmp_path, monkeypatch, "time.sleep(600)")
    names = ["test/cpu/rope/float32", "test/cpu/rms_norm/float32"]
    for seconds in (5, 60):  # a busy machine may need longer for the job that does not hang
        outcomes = jobs.run_in_child(names, seconds_per_job=seconds)
        assert outcomes[names[0]].error == f"Crash: no answer within {seconds} s"
        if outcomes[names[1]].error is None:
            break
    assert outcomes[names[1]].error is None


def test_a_child_that_hangs_before_its_first_job_is_ended(tmp_path, monkeypatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    [outcome] = jobs.run_in_child(["mlx"], seconds_per_job=0.5).values()
    assert outcome.error == "Crash: no answer within 0 s"


def test_a_child_that_cannot_start_is_an_outcome(monkeypatch) -> None:
    monkeypatch.setenv("MLX_PAGED_BLAS", "nonsense")
    [outcome] = jobs.run_in_child(["mlx"]).values()
    assert "Crash: " in outcome.error and "MLX_PAGED_BLAS must be" in outcome.error


def test_what_a_job_prints_does_not_disturb(tmp_path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import atexit\nprint('[\"noise\"]', flush=True)\n")
    env = {**os.environ, "PYTHONPATH": python_path(tmp_path)}
    code = "from mlx_paged.doctor import jobs; print(jobs.run_in_child(['mlx']))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert "default_device" in run.stdout, run.stderr


# --- Memory ---------------------------------------------------------------------------------------


def test_the_memory_job_answers_as_the_engine_would() -> None:
    from mlx_paged.engine import memory

    told = jobs.run("memory")
    assert told["device_bytes"] == memory.device_memory()
    assert told["on_gpu"] is ON_GPU


def test_the_process_that_reports_never_imports_mlx() -> None:
    code = (
        "import sys\nfrom mlx_paged.doctor import __main__, machine, software, terminal\n"
        "software.installed(), machine.take()\n"
        "print(*sorted({'mlx.core', 'numpy', 'mlx_lm', 'mlx_paged._ext'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == ""
