"""Beginnings of texts with holes, against the regular expressions themselves."""

from __future__ import annotations

import re

from mlx_paged.parsing.beginnings import Beginnings
from mlx_paged.parsing.call_syntax import Hole
from mlx_paged.parsing.headed_json import Head

UNITS = ["a", r"\s*", r"\[?", "(?P<name>[b-d]{1,9}?)", r"\s*", r"\.", r"\s", "e"]


def test_every_beginning_and_nothing_else() -> None:
    whole = re.compile("".join(UNITS))
    begun = Beginnings([UNITS])
    wholes = ["ab. e", "a [bcd \n.\te", "a\n\ndd.\ne"]
    for text in wholes:
        assert whole.fullmatch(text)
        assert all(begun.has(text[:length]) for length in range(len(text) + 1))
    for text in ("b", "a[[", "a.", "ab.e", "ab. ee", "ab. e ", " a"):
        assert not begun.has(text)


def test_one_of_several() -> None:
    begun = Beginnings([["x", "y"], ["x", "z"]])
    assert begun.has("")
    assert begun.has("x")
    assert begun.has("xz")
    assert not begun.has("xx")


def test_long_heads_take_no_deep_recursion() -> None:
    head = Head(["x" * 400, Hole.NAME, "-" * 50])
    assert head.may_begin("x" * 400 + "na")
    assert head.match("x" * 400 + "name" + "-" * 50 + '{"') is not None
    assert not head.may_begin("x" * 399 + "y")
