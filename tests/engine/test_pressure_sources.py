"""Memory pressure: recorded texts of macOS and Linux, hysteresis, and sources that fail."""

from __future__ import annotations

import logging
import sys

import pytest
from support.pressure import FakeSource

from mlx_paged import cgroups, macos
from mlx_paged.engine import pressure_sources
from mlx_paged.engine.pressure import POLL_SECONDS, QUIET_SECONDS, MemoryPressure
from mlx_paged.engine.pressure_sources import (
    LinuxSource,
    MacSource,
    PressureLevel,
    mac_level,
    psi_file,
    psi_level,
    system_source,
)

NORMAL, WARNING, CRITICAL = PressureLevel

# Recorded on Linux 6.18: at rest; while one of two builds waited for memory; while all did.
AT_REST = """\
some avg10=0.00 avg60=0.00 avg300=0.00 total=0
full avg10=0.00 avg60=0.00 avg300=0.00 total=0
"""
SOME = """\
some avg10=23.07 avg60=10.42 avg300=2.92 total=11246810
full avg10=8.90 avg60=3.96 avg300=1.11 total=4290027
"""
FULL = """\
some avg10=71.43 avg60=39.85 avg300=12.02 total=64312087
full avg10=62.18 avg60=33.50 avg300=9.97 total=53004411
"""


@pytest.mark.parametrize(
    ("text", "level"),
    [
        (AT_REST, NORMAL),
        (SOME, WARNING),
        (FULL, CRITICAL),
        (AT_REST.replace("some avg10=0.00", "some avg10=9.99"), NORMAL),
        (AT_REST.replace("some avg10=0.00", "some avg10=10.00"), WARNING),
        (SOME.replace("full avg10=8.90", "full avg10=20.00"), CRITICAL),
    ],
)
def test_the_level_of_linux_stall_times(text, level) -> None:
    assert psi_level(text) is level


@pytest.mark.parametrize("text", ["", "some avg10=99.00\n", AT_REST.replace("avg10", "avg11")])
def test_a_file_without_stall_times_is_refused(text) -> None:
    with pytest.raises(ValueError, match="expected a line of some and a line of full"):
        psi_level(text)


def test_the_levels_of_macos() -> None:
    assert [mac_level(value) for value in (1, 2, 4)] == [NORMAL, WARNING, CRITICAL]
    for value in (0, 3, 8):
        with pytest.raises(ValueError, match=f"must be 1, 2 or 4 but is {value}"):
            mac_level(value)
    asked: list[str] = []
    source = MacSource(lambda name: asked.append(name) or 4)  # type: ignore[func-returns-value]
    assert source.read() is CRITICAL and asked == [source.name]


VERSION_2 = "0::/user.slice/app.scope\n"
BOTH = "4:memory:/docker/1234\n0::/docker/1234\n"
VERSION_1 = "4:memory:/docker/1234\n"


@pytest.mark.parametrize(
    ("own", "existing", "expected"),
    [
        (VERSION_2, "/sys/fs/cgroup/user.slice/app.scope/memory.pressure", ...),
        (VERSION_2, "/sys/fs/cgroup/user.slice/memory.pressure", ...),
        # In a container, the path is the host's, and only the root is there.
        (VERSION_2, "/sys/fs/cgroup/memory.pressure", ...),
        (BOTH, "/sys/fs/cgroup/unified/docker/1234/memory.pressure", ...),
        (VERSION_1, "/sys/fs/cgroup/docker/1234/memory.pressure", "/proc/pressure/memory"),
        ("", "", "/proc/pressure/memory"),
    ],
)
def test_the_file_is_that_of_the_nearest_control_group(own, existing, expected) -> None:
    found = psi_file(own, lambda path: path == existing)
    assert found == (existing if expected is ... else expected)


def test_the_group_itself_goes_before_its_ancestors() -> None:
    assert psi_file(VERSION_2, lambda _: True).endswith("/app.scope/memory.pressure")
    assert cgroups.unified_folders(VERSION_1) == []


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_a_missing_source_is_one_debug_line(platform, monkeypatch, tmp_path, caplog) -> None:
    def missing(_: str) -> int:
        raise AttributeError("sysctlbyname")

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(macos, "sysctl_integer", missing)
    monkeypatch.setattr(pressure_sources, "psi_file", lambda *_: str(tmp_path / "missing"))
    with caplog.at_level(logging.DEBUG):
        assert system_source() is None
    [record] = caplog.records
    assert record.levelno == logging.DEBUG and "does not tell its memory pressure" in record.message


def test_a_file_is_read_each_time(tmp_path, monkeypatch) -> None:
    path = tmp_path / "memory"
    path.write_text(SOME)
    monkeypatch.setattr(pressure_sources, "psi_file", lambda *_: str(path))
    monkeypatch.setattr(sys, "platform", "linux")
    source = system_source()
    assert isinstance(source, LinuxSource) and source.read() is WARNING
    path.write_text(FULL)
    assert source.read() is CRITICAL


# --- The level in effect --------------------------------------------------------------------------


class Follower:
    """A `MemoryPressure` with a clock of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.source = FakeSource()
        self.pressure = MemoryPressure(self.source, clock=lambda: self.now)

    def after(self, seconds: float, level: PressureLevel) -> PressureLevel:
        self.now += seconds
        self.source.level = level
        self.pressure.poll()
        return self.pressure.level


def test_it_is_read_at_most_once_a_second() -> None:
    follower = Follower()
    assert follower.pressure.is_due
    for _ in range(10):
        follower.after(POLL_SECONDS / 4, NORMAL)
    assert follower.source.num_reads == 3
    follower.after(POLL_SECONDS, NORMAL)
    assert not follower.pressure.is_due and not follower.pressure.poll()


def test_the_level_rises_at_once_and_falls_one_at_a_time() -> None:
    follower = Follower()
    assert follower.after(1, CRITICAL) is CRITICAL
    assert follower.after(QUIET_SECONDS / 2, NORMAL) is CRITICAL
    assert follower.after(1, CRITICAL) is CRITICAL  # so the quiet time begins again
    assert follower.after(QUIET_SECONDS - 1, NORMAL) is CRITICAL
    assert follower.after(1, NORMAL) is WARNING
    assert follower.pressure.stats.seconds == 0
    assert follower.after(QUIET_SECONDS - 1, NORMAL) is WARNING
    assert follower.after(1, WARNING) is WARNING
    assert follower.after(QUIET_SECONDS, NORMAL) is NORMAL
    assert follower.after(1, WARNING) is WARNING


def test_a_level_of_long_ago_does_not_last() -> None:
    """An engine that nothing called for an hour knows of no high level since."""
    follower = Follower()
    assert follower.after(1, CRITICAL) is CRITICAL
    assert follower.after(3600, NORMAL) is WARNING


def test_a_source_that_raises_is_never_read_again(caplog) -> None:
    follower = Follower()
    assert follower.after(1, CRITICAL) is CRITICAL
    follower.source.error = OSError("gone")
    with caplog.at_level(logging.DEBUG):
        assert follower.after(1, CRITICAL) is NORMAL
        num_reads = follower.source.num_reads
        assert follower.after(1, CRITICAL) is NORMAL
    [record] = caplog.records
    assert record.levelno == logging.DEBUG and "gone" in record.message
    assert follower.source.num_reads == num_reads
    assert not follower.pressure.is_on and not follower.pressure.is_due


def test_without_a_source_there_is_never_pressure() -> None:
    pressure = MemoryPressure(None)
    assert not pressure.poll() and not pressure.is_due and pressure.level is NORMAL
