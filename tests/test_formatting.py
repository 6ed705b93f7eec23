"""Sizes and ages as people read them."""

from __future__ import annotations

import time

import pytest

from mlx_paged.formatting import format_age, format_size


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        ((1 << 20) - 52, "1023.9 KiB"),
        ((1 << 20) - 51, "1.0 MiB"),
        ((1 << 30) - 1, "1.0 GiB"),
        (5000 << 30, "5000.0 GiB"),
    ],
)
def test_sizes(num_bytes: int, expected: str) -> None:
    assert format_size(num_bytes) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (-60, "just now"),
        (119, "just now"),
        (120, "2 minutes ago"),
        (7199, "119 minutes ago"),
        (7200, "2 hours ago"),
        (3 * 86400 + 5, "3 days ago"),
    ],
)
def test_ages(monkeypatch: pytest.MonkeyPatch, seconds: int, expected: str) -> None:
    monkeypatch.setattr(time, "time", lambda: 1e9)
    assert format_age(1e9 - seconds) == expected


def test_what_was_never_used_has_no_age() -> None:
    assert format_age(0) == "never"
