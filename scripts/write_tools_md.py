"""Writes docs/tools.md's tables of formats.

    python scripts/write_tools_md.py

Hand-written text in that file does not change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from mlx_paged.parsing.reasoning import REASONING_FORMATS
from mlx_paged.parsing.registry import FORMATS

PAGE = Path(__file__).resolve().parent.parent / "docs/tools.md"


def _code(texts: Iterable[str]) -> str:
    return ", ".join(f"`{text.replace('|', chr(92) + '|')}`" for text in texts)


def tools_table() -> str:
    """The tool call formats."""
    rows = ["| `--tool-call-parser` | models | a call begins with |", "|---|---|---|"]
    for kind in sorted(FORMATS, key=lambda kind: kind.names):
        markers = _code(kind.begins_call) or "a line of its own"
        rows.append(f"| {_code(kind.names)} | {kind.models} | {markers} |")
    return "\n".join(rows)


def reasoning_table() -> str:
    """The reasoning formats, with those that share markers in one row."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, format in REASONING_FORMATS.items():
        end = f"{format.end_part or ''}{format.end}"
        names.setdefault((format.start, end), []).append(name)
    rows = ["| `--reasoning-parser` | begins with | ends with |", "|---|---|---|"]
    for (start, end), of_both in sorted(names.items(), key=lambda entry: entry[1]):
        rows.append(f"| {_code(sorted(of_both))} | {_code([start])} | {_code([end])} |")
    return "\n".join(rows)


def written(page: str) -> str:
    """Returns the page with up-to-date tables."""
    for name, table in (("tools", tools_table()), ("reasoning", reasoning_table())):
        begin, end = (
            f"<!-- {name}: written by scripts/write_tools_md.py -->",
            f"<!-- {name}: end -->",
        )
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        assert pattern.search(page), f"{PAGE} lacks {begin}"
        text = f"{begin}\n{table}\n{end}"
        page = pattern.sub(lambda _, text=text: text, page)
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
