"""Names of files in clang's output, as the simulator reads them."""

from __future__ import annotations

from sim import ir, lexer


def test_paths_with_letters_beyond_ascii_are_decoded() -> None:
    path = '/a b/späces/"quoted"/metal'
    assert ir.unescape(r"/a b/sp\C3\A4ces/\22quoted\22/metal") == path
    assert lexer.unescape(r"/a b/sp\303\244ces/\"quoted\"/metal") == path
