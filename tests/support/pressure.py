"""A memory pressure that tests choose, in place of the system's."""

from __future__ import annotations

import pytest

from mlx_paged.engine import pressure, pressure_sources, relief
from mlx_paged.engine.pressure_sources import PressureLevel


class FakeSource:
    """A source whose level is set, or that raises."""

    name = "a test"

    def __init__(self) -> None:
        self.level = PressureLevel.NORMAL
        self.error: Exception | None = None
        self.num_reads = 0

    def read(self) -> PressureLevel:
        self.num_reads += 1
        if self.error is not None:
            raise self.error
        return self.level


def fake_source(monkeypatch: pytest.MonkeyPatch) -> FakeSource:
    """The source of the engines that a test makes from now on.

    It is read at every chance, and the level falls by one with each reading.
    """
    source = FakeSource()
    monkeypatch.setattr(pressure_sources, "system_source", lambda: source)
    monkeypatch.setattr(pressure, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(pressure, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(relief, "QUIET_SECONDS", 0.0)
    return source
