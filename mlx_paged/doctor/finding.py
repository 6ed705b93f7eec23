"""A finding: what was expected, what was found, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How a check went."""

    OK = "ok"
    NOTE = "note"  # worth knowing; nothing is wrong
    SKIPPED = "skipped"  # could not be looked at, because something else is wrong
    WARNING = "warning"  # works, but slower or with less than it could
    BROKEN = "broken"  # does not work


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        check: What was looked at; stable, for scripts.
        remedy: One line; empty where there is nothing to do.

    Raises:
        ValueError: a warning without a remedy, or one of several lines.
    """

    check: str
    status: Status
    expected: str
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.status in (Status.WARNING, Status.BROKEN) and not self.remedy:
            raise ValueError(f"finding {self.check!r} must have a remedy, as it is {self.status}")
        if "\n" in self.remedy:
            raise ValueError(f"the remedy of {self.check!r} must be one line but got {self.remedy}")


def verdict(findings: Iterable[Finding]) -> Status:
    """The worst of them: broken, warning or ok."""
    statuses = {finding.status for finding in findings}
    return next((s for s in (Status.BROKEN, Status.WARNING) if s in statuses), Status.OK)
