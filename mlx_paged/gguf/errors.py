"""GGUFError: the reason why a file is refused, in one line."""

from __future__ import annotations


class GGUFError(ValueError):
    """A GGUF file is damaged, incomplete, or holds something that is not supported."""
