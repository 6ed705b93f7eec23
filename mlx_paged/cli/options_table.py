"""The options of `mlx-paged serve` as a table for the documentation.

``python -m mlx_paged.cli.options_table docs/serving.md`` rewrites the table between its marks.
"""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Any

import typer

from mlx_paged.cli.main import app

BEGIN, END = "<!-- options: generated -->", "<!-- options: end -->"


def table() -> str:
    """All options by group, in Markdown."""
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    groups: dict[str, list[str]] = {}
    for option in serve.params:
        if option.name == "help":
            continue
        group = getattr(option, "rich_help_panel", None) or "General"
        names = [*option.opts, *option.secondary_opts]
        flag = " / ".join(f"`{name}`" for name in names)
        if option.param_type_name == "argument":
            flag = f"`{option.name}` (positional)"
        cells = (flag, f"`{option.envvar}`", _default(option), option.help or "")
        groups.setdefault(group, []).append("| " + " | ".join(cells) + " |")
    parts = []
    for group, rows in groups.items():
        head = ["| option | environment | default | |", "|---|---|---|---|"]
        parts.append("\n".join([f"**{group}**", "", *head, *rows]))
    return "\n\n".join(parts)


def _default(option: Any) -> str:
    shown = getattr(option, "show_default", None)
    if isinstance(shown, str):
        return shown
    value = option.default.value if isinstance(option.default, Enum) else option.default
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value in (None, "") else f"`{value}`"


def rewrite(text: str) -> str:
    """The document with its table made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(rewrite(path.read_text()))
