"""Warnings: says once what is wrong with files, and how often it has happened since."""

from __future__ import annotations

import logging
from collections import Counter

logger = logging.getLogger(__name__)


class Warnings:
    """Logs the first warning of each kind.

    Attributes:
        counts: Number of warnings of each kind, logged or not.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def warn(self, kind: str, text: str, *args: object) -> None:
        """Warns, if this is the first of its kind."""
        self.counts[kind] += 1
        if self.counts[kind] == 1:
            logger.warning("[kv offload] " + text, *args)
