"""Programs that some tests need: a mark that skips the tests, and a line that sums up the skips."""

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
        option: Option of scripts/install_apt.sh that installs it, if the script alone does not.
    """
    reason = f"{_REASON.format(program)} {option}".rstrip()
    return pytest.mark.skipif(not found, reason=reason)


def summary(reasons: Iterable[str]) -> str:
    """Sums up skipped tests by missing program.

    Args:
        reasons: why tests were skipped, one for each test.

    Returns:
        One line with the command that installs the programs; empty if none is missing.
    """
    programs = (_SKIPPED.fullmatch(reason) for reason in reasons)
    counts = Counter(found.group(1) for found in programs if found)
    if not counts:
        return ""
    skipped = ", ".join(f"{count} without {program}" for program, count in sorted(counts.items()))
    return f"Skipped tests: {skipped}. To run them: scripts/install_apt.sh"
