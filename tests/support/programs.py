"""External programs that some tests need: a skip mark, and a summary of the skips."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import pytest

_REASON = "{} is not installed: run scripts/install_apt.sh"
_SKIPPED = re.compile(r"(?:Skipped: )?" + re.escape(_REASON).replace(r"\{\}", "(.+)"))


def needs(program: str, *, found: bool, option: str = "") -> pytest.MarkDecorator:
    """Skips a test on machines that lack a program.

    Args:
        option: The option of scripts/install_apt.sh that installs it, if not installed by default.
    """
    reason = f"{_REASON.format(program)} {option}".rstrip()
    return pytest.mark.skipif(not found, reason=reason)


def summary(reasons: Iterable[str]) -> str:
    """Summarizes skipped tests by missing program.

    Args:
        reasons: Reasons of the skips, one per test.

    Returns:
        One line with the command that installs the programs; empty if none is missing.
    """
    programs = (_SKIPPED.fullmatch(reason) for reason in reasons)
    counts = Counter(found.group(1) for found in programs if found)
    if not counts:
        return ""
    skipped = ", ".join(f"{count} without {program}" for program, count in sorted(counts.items()))
    return f"Skipped tests: {skipped}. To run them: scripts/install_apt.sh"
