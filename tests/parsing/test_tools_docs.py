"""The page about tools names every format."""

from __future__ import annotations

import write_tools_md
from support.tool_families import families

from mlx_paged.parsing.registry import FORMATS, names


def test_the_tables_are_those_of_today() -> None:
    page = write_tools_md.PAGE.read_text()
    assert write_tools_md.written(page) == page, "run python scripts/write_tools_md.py"


def test_every_format_has_transcripts() -> None:
    tested = {family.name for family in families()}
    assert all(tested & set(kind.names) for kind in FORMATS)
    assert tested <= set(names())
    assert all(kind.models for kind in FORMATS)
