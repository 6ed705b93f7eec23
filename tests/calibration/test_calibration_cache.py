"""The cache of calibration: its key, damaged files, directories that refuse, and two processes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_paged.calibration import machine
from mlx_paged.calibration.cache import Cache, Result

MACHINE = {"chip": "Apple M5", "os": "Darwin 26.1", "mlx": "0.32.4", "mlx_paged": "0.1.0"}
RESULTS = {
    "greedy/float32": Result(("greedy_tokens_float32",)),
    "norm/float16/64": Result(("add_rms_norm_float16",), "Crash: no answer within 4 s"),
    "time-attention/a": Result(("k",), None, 0.25),
}
DEAD = 1 << 30  # no process has this number


def test_results_come_back(tmp_path: Path) -> None:
    cache = Cache(MACHINE, tmp_path / "new" / "folder")
    assert cache.load() == {}
    cache.save(RESULTS)
    assert Cache(MACHINE, cache.directory).load() == RESULTS
    assert [path.name for path in cache.path.parent.iterdir()] == [cache.path.name]


@pytest.mark.parametrize("field", list(MACHINE))
def test_every_part_of_the_key_counts(tmp_path: Path, field: str) -> None:
    Cache(MACHINE, tmp_path).save(RESULTS)
    assert Cache({**MACHINE, field: "another"}, tmp_path).load() == {}


def test_the_key_of_this_machine_names_all_that_can_change_an_outcome() -> None:
    key = machine.key()
    assert set(key) == {"chip", "os", "mlx", "mlx_paged", "kernels", "tensor_units"}
    assert all(isinstance(value, str) and value for value in key.values())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"version": 99, "results": {}}',
        '{"version": 1, "results": []}',
        '{"version": 1, "results": {"a": {}}}',
        '{"version": 1, "results": {"a": {"kernels": 3, "error": null, "seconds": null}}}',
        '{"version": 1, "results": {"a": {"kernels": [], "error": null, "seconds": "x"}}}',
        '{"version": 1, "results": {}, "running": {}}',
        "\x00\xff",
    ],
)
def test_a_damaged_file_counts_as_empty_and_is_replaced(tmp_path: Path, text: str) -> None:
    cache = Cache(MACHINE, tmp_path)
    cache.path.write_bytes(text.encode("latin-1"))
    assert cache.load() == {}
    cache.save(RESULTS)
    assert cache.load() == RESULTS


def test_a_directory_that_cannot_be_written_is_reported_once(tmp_path: Path, caplog) -> None:
    (tmp_path / "file").write_text("")
    cache = Cache(MACHINE, tmp_path / "file" / "folder")
    with cache.locked(0), caplog.at_level(logging.WARNING):
        cache.save(RESULTS)
        cache.save(RESULTS)
    assert len(caplog.records) == 1 and "cannot be kept" in caplog.text
    assert cache.load() == {}


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch) -> None:
    cache = Cache(MACHINE, tmp_path)
    cache.save(RESULTS)

    def refuse(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", refuse)
    cache.save({})
    assert cache.load() == RESULTS
    assert [path.name for path in tmp_path.iterdir()] == [cache.path.name]


# --- A job that nothing finished ------------------------------------------------------------------


def test_a_job_whose_process_ended_has_failed(tmp_path: Path, monkeypatch) -> None:
    cache = Cache(MACHINE, tmp_path)
    monkeypatch.setattr(os, "getpid", lambda: DEAD)
    cache.save({}, running=("norm/float16/64", ["add_rms_norm_float16"]))
    monkeypatch.undo()
    [(job, result)] = cache.load().items()
    assert job == "norm/float16/64" and result.kernels == ("add_rms_norm_float16",)
    assert result.error == "the process or the machine ended during it"


def test_a_job_of_a_process_that_lives_is_not_held_against_its_kernels(tmp_path: Path) -> None:
    cache = Cache(MACHINE, tmp_path)
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        cache.save({}, running=("norm/float16/64", []))
        data = json.loads(cache.path.read_text())
        data["running"]["pid"] = other.pid
        cache.path.write_text(json.dumps(data))
        assert cache.load() == {}
    finally:
        other.kill()
        other.communicate()
    assert list(cache.load()) == ["norm/float16/64"]


# --- Two processes --------------------------------------------------------------------------------


def test_a_second_process_waits_and_then_goes_on(tmp_path: Path) -> None:
    cache, times = Cache(MACHINE, tmp_path), []

    def sleep(seconds: float) -> None:
        times.append(seconds)

    first = Cache(MACHINE, tmp_path).locked(0)
    with first, cache.locked(5, clock=lambda: float(len(times)), sleep=sleep):
        assert len(times) == 5  # it waited as long as it may, and did not fail
    times.clear()
    with cache.locked(5, clock=lambda: float(len(times)), sleep=sleep):
        assert not times


def test_the_lock_ends_with_an_exception(tmp_path: Path) -> None:
    cache, times = Cache(MACHINE, tmp_path), []
    with pytest.raises(KeyboardInterrupt), cache.locked(0):
        raise KeyboardInterrupt
    with cache.locked(9, clock=lambda: float(len(times)), sleep=times.append):
        assert not times
