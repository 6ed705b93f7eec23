"""Compilation: describes how the steps of a model are compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Compilation:
    """How the steps of a model are compiled.

    Attributes:
        refused: The reason why they are not executables; None if they are, or none was tried.
        foreign: How often each primitive occurs in a step that MLX runs itself, because it has no
            kernel here.
    """

    refused: str | None = None
    foreign: Mapping[str, int] = field(default_factory=dict)
