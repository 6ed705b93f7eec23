"""Formats sizes and ages for people."""

from __future__ import annotations

import time

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
# Share of a unit from which it is used: anything more in the next smaller one would show 1024.0.
_THRESHOLD = 1 - 0.05 / 1024
_TIMES = ((86400, "days"), (3600, "hours"), (60, "minutes"))


def format_size(num_bytes: int) -> str:
    """Formats bytes in the largest unit of which there is one: "640 bytes", "1.5 GiB"."""
    for unit, name in _UNITS:
        if num_bytes >= unit * _THRESHOLD:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"


def format_age(then: float) -> str:
    """Formats the time since then in the largest unit of which there are two: "3 days ago".

    Args:
        then: A Unix time. 0 means never.
    """
    if not then:
        return "never"
    seconds = max(0.0, time.time() - then)
    for length, unit in _TIMES:
        if seconds >= 2 * length:
            return f"{int(seconds // length)} {unit} ago"
    return "just now"
