"""Calibration on MLX's default device, with its real kernels and planted faults, in a child.

It runs on the CPU here, and over CUDA with `python scripts/check_cuda.py --only calibration`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from support.interpreters import python_path
from support.planted_kernels import VARIABLE

from mlx_paged import kernels
from mlx_paged.calibration import calibrate as calibration
from mlx_paged.calibration import cases, check
from mlx_paged.calibration.cache import Cache
from mlx_paged.calibration.cases import Needs
from mlx_paged.calibration.verdicts import Verdicts
from mlx_paged.kernels import AttentionLayer

TESTS = Path(__file__).resolve().parents[1]
ON_GPU = os.environ.get("MLX_PAGED_TEST_DEVICE") == "gpu"
BLOCK_SIZE = 32
# A child imports for two seconds, and a test needs several.
DTYPES = ("float32", "float16") if ON_GPU else ("float32",)
LAYERS = [AttentionLayer(dtype, 2, 64, 64, 0, 0, 0) for dtype in DTYPES]


@pytest.fixture(autouse=True)
def _child(monkeypatch, tmp_path) -> Iterator[None]:
    monkeypatch.setattr(calibration, "MODULE", "support.planted_child")
    monkeypatch.setattr(cases, "TIMED_ROWS", (1, 64))
    monkeypatch.setattr(cases, "PIECE_TOKENS", (0, 768))
    monkeypatch.setattr(calibration, "SECONDS", 300.0)
    monkeypatch.setattr(calibration, "SECONDS_PER_JOB", 60.0)
    monkeypatch.setenv("PYTHONPATH", python_path(TESTS.parent, TESTS))
    yield
    Verdicts().apply()
    kernels.reject_kernels(())


def calibrated(tmp_path: Path, layer: AttentionLayer) -> Verdicts:
    cache = Cache({"chip": "test"}, tmp_path)
    return calibration.calibrate(Needs(layer.dtype, (layer,), BLOCK_SIZE), cache)


def assert_right(layer: AttentionLayer, kernel: str, rows: int) -> None:
    """Attention gives MLX's results in this process, where no fault is planted."""
    check.attention(cases.layer_text(layer), str(BLOCK_SIZE), str(rows), kernel)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.dtype)
def test_faulty_kernels_are_rejected_and_others_are_right(monkeypatch, tmp_path, layer) -> None:
    decode, drafts, chunk = (kernels.attention_kernel(layer, rows) for rows in (1, 4, 64))
    merge = cases.merge_kernel(layer)
    assert len({decode, drafts, chunk}) == 3
    faults = {decode: "wrong", chunk: "slow", "copy_blocks": "crash"}
    monkeypatch.setenv(VARIABLE, json.dumps(faults))
    verdicts = calibrated(tmp_path, layer)
    assert "WrongResult" in verdicts.rejected[decode], verdicts.rejected
    assert " ms where " in verdicts.rejected[chunk], verdicts.rejected
    assert "SIGABRT" in verdicts.rejected["copy_blocks"], verdicts.rejected
    wrong = {
        k: r for k, r in verdicts.rejected.items() if k not in faults and " ms where " not in r
    }
    assert not wrong
    assert {drafts, merge, "write_kv", f"greedy_tokens_{layer.dtype}"} <= verdicts.proven
    assert faults.keys() <= kernels.rejected
    monkeypatch.setattr(check, "announce", lambda names: None)
    for rows in (1, 64):
        other = kernels.attention_kernel(layer, rows)
        assert other not in ("", decode, chunk)
        assert_right(layer, other, rows)


@pytest.mark.skipif(not ON_GPU, reason="on the CPU all kernels are the same functions")
def test_without_faults_every_kernel_is_right(tmp_path) -> None:
    layer = AttentionLayer("bfloat16", 4, 128, 128, 0, 0, 0)
    verdicts = calibrated(tmp_path, layer)
    wrong = {k: r for k, r in verdicts.rejected.items() if " ms where " not in r}
    assert not wrong
    jobs = cases.checks(Needs("bfloat16", (layer,), BLOCK_SIZE), kernels.attention_kernel)
    results = Cache({"chip": "test"}, tmp_path).load()
    assert set(jobs) <= results.keys() and len(verdicts.proven) > 10


def test_the_device_is_the_one_that_was_asked_for() -> None:
    """So that a run over CUDA is none on the CPU."""
    assert mx.default_device() == mx.Device(mx.gpu if ON_GPU else mx.cpu)
