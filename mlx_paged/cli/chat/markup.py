"""The ways to draw an answer."""

from __future__ import annotations

from enum import StrEnum


class Markup(StrEnum):
    """How answers are drawn."""

    AUTO = "auto"
    MARKDOWN = "markdown"
    CODE = "code"
    PLAIN = "plain"
