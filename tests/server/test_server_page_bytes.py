"""The chat page over a slow line: counts of what has to come before it can be used, not times."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, Route, expect
from support.page_helpers import Visitor, answered, fake, in_browser, send

import mlx_paged.server

WEB = Path(mlx_paged.server.__file__).parent / "web"
STATIC = re.compile(r'^(?:import|export)\b[^"\';]*?from "(\./[^"]+)"|^import "(\./[^"]+)"', re.M)
# At 400 kbit/s some 2.2 s; requests and connections take the rest of 5 s.
MAX_BYTES = 110_000
LAZY = ("markdown.js", "math.js", "vendor/markdown-it.js", "vendor/dompurify.js")


def static_imports(name: str, found: set[str]) -> set[str]:
    """The modules that `name` needs before it runs."""
    found.add(name)
    for match in STATIC.finditer((WEB / name).read_text()):
        path = (Path(name).parent / (match[1] or match[2])).as_posix()
        if path not in found:
            static_imports(path, found)
    return found


def test_modules_are_preloaded_in_one_round() -> None:
    html = (WEB / "index.html").read_text()
    preloaded = re.findall(r'<link rel="modulepreload" href="web/([^"]+)">', html)
    assert sorted(preloaded) == sorted(static_imports("page.js", set()) - {"page.js"})


def test_few_bytes_come_before_the_page_can_be_used() -> None:
    html = (WEB / "index.html").read_text()
    styles = re.findall(r'<link rel="stylesheet" href="web/([^"]+)">', html)
    names = {"index.html", "theme.js", *styles, *static_imports("page.js", set())}
    assert not names & set(LAZY)
    total = sum(len(gzip.compress((WEB / name).read_bytes(), 6)) for name in names)
    assert total < MAX_BYTES


@pytest.fixture
def held(visitor: Visitor) -> Iterator[tuple[Page, list[Route]]]:
    """The page, and requests for the module of Markdown, which wait."""
    routes: list[Route] = []
    visitor.context.route("**/web/markdown.js", lambda route: routes.append(route))
    yield visitor.open(fakes=True, is_whole=False), routes
    visitor.context.unroute_all(behavior="ignoreErrors")


@in_browser
def test_the_page_is_used_before_markdown_has_come(held) -> None:
    page, routes = held
    send(page, "Hello")
    fake(page, "answer.say('Some **bold** text')")
    expect(page.locator(".assistant .text")).to_have_text("Some **bold** text")
    fake(page, "answer.say(' and more')")
    fake(page, "answer.end()")
    answered(page)
    expect(page.locator(".assistant .text")).to_have_text("Some **bold** text and more")
    for route in routes:
        route.continue_()
    expect(page.locator(".assistant .text strong")).to_have_text("bold")
    expect(page.locator(".assistant .text .plain")).to_have_count(0)
