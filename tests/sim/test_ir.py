"""What the simulator reads in LLVM's IR."""

from __future__ import annotations

from sim.ir import unescape


def test_paths_with_letters_beyond_ascii_are_decoded() -> None:
    assert unescape(r"/a b/sp\C3\A4ces/\22quoted\22/metal") == '/a b/späces/"quoted"/metal'
