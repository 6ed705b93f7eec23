"""Formats sizes and ages for people."""

from __future__ import annotations

import time

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
# Share of a unit from which it is used: anything more in the next smaller one would show 1024.0.
_THRESHOLD = 1 - 0.05 / 1024
_TIMES = ((86400, "days"), (3600, "hours"), (60, "minutes"))


def format_size(num_bytes: int) -> str:
    """Formats a size in bytes with a unit that fits, such as "640 bytes" or "1.5 GiB"."""
    for unit, name in _UNITS:
        if num_bytes >= unit * _THRESHOLD:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"


def format_age(then: float) -> str:
    """Formats how long ago a time was, such as "3 days ago" or "just now".

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
