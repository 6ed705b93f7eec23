"""Writes the options of `mlx-paged serve` into docs/serving.md, between their marks.

python scripts/write_options_md.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from mlx_paged.cli.main import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "serving.md"
BEGIN, END = "<!-- options: generated -->", "<!-- options: end -->"


def table() -> str:
    """All options by group, in Markdown."""
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    groups: dict[str, list[str]] = {}
    for option in serve.params:
        if option.name == "help":
            continue
        group = getattr(option, "rich_help_panel", None) or "General"
        names = option.opts
        flag = " / ".join(f"`{name}`" for name in names)
        if option.secondary_opts == [f"--no-{names[0][2:]}"]:
            flag = f"`--[no-]{names[0][2:]}`"
        elif option.secondary_opts:
            flag = " / ".join(f"`{name}`" for name in (*names, *option.secondary_opts))
        if option.param_type_name == "argument":
            flag = f"`{option.name}` (positional)"
        text = option.help or ""
        if option.envvar != _variable(names[0]):
            text = f"{text} (`{option.envvar}`)"
        cells = (flag, _default(option), text)
        groups.setdefault(group, []).append("| " + " | ".join(cells) + " |")
    parts = []
    for group, rows in groups.items():
        head = ["| option | default | |", "|---|---|---|"]
        parts.append("\n".join([f"**{group}**", "", *head, *rows]))
    return "\n\n".join(parts)


def _variable(name: str) -> str:
    """The environment variable that follows from a flag."""
    plain = name.removeprefix("--").replace("-", "_").replace(".", "_")
    return f"MLX_PAGED_{plain.upper()}"


def _default(option: Any) -> str:
    shown = getattr(option, "show_default", None)
    if isinstance(shown, str):
        return shown
    value = option.default
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value in (None, "") else f"`{value}`"


def rewrite(text: str) -> str:
    """Returns the document with a new table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(rewrite(PAGE.read_text()))
