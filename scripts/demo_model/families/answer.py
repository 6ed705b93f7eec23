"""The form of a family's request-answer pair."""

from __future__ import annotations

from ..pairs import Pair


def answer(signature: str, doc: str, *body: str, imports: str = "") -> Pair:
    """Formats a function with this signature, docstring and body."""
    lines = "\n".join("    " + line for line in body)
    head = f"{imports}\n\n\n" if imports else ""
    return Pair(doc, f'{head}def {signature}:\n    """{doc}"""\n{lines}\n', "mlx_paged generated")
