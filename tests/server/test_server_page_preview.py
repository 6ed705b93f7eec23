"""Previews on the chat page: HTML and SVG in a frame without an origin, and Mermaid diagrams."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, FrameLocator, Locator, Page, expect
from support.page_helpers import Visitor, answered, fake, in_browser, new_chat, send, visiting
from support.server_helpers import RunningServer

HOSTILE = """<!doctype html>
<html><head><style>h1 { color: rgb(1, 2, 3) }</style>
<meta http-equiv="refresh" content="0;url=http://OTHER/refresh">
<script>parent.hit = 1; top.location = "http://OTHER/top"; for (;;);</script></head>
<body onload="for (;;);"><h1 style="font-size: 40px">Sales</h1>
<img src="http://OTHER/picture.png" onerror="for (;;);">
<img alt="red" src="data:image/gif;base64,R0lGODlhAQABAIAAAP8AAAAAACwAAAAAAQABAAACAkQBADs=">
<iframe src="http://OTHER/frame"></iframe>
<link rel="stylesheet" href="http://OTHER/style.css">
<style>@import "http://OTHER/import.css"; p { background: url(http://OTHER/b) }</style>
<p>Text</p><a href="http://OTHER/away" target="_top">Away</a><a href="#end">End</a>
<form action="http://OTHER/form"><input name="secret"><button>Send</button></form>
<svg width="10" height="10" onload="for (;;);"><a xlink:href="javascript:hit()"><circle r="4"/></a>
<script>for (;;);</script></svg></body></html>
"""
DIAGRAM = "graph TD\n  A[Rain] --> B[Umbrella]\n"


@pytest.fixture(scope="module")
def visitor(browser: Browser, page_server: RunningServer) -> Iterator[Visitor]:
    with visiting(browser, page_server) as visitor:
        # The policy of the frame refuses what the sanitizer lets pass.
        visitor.expected += ["Content Security Policy", "Content-Security-Policy"]
        yield visitor


@pytest.fixture(scope="module")
def tab(visitor: Visitor) -> Page:
    return visitor.open(fakes=True)


@pytest.fixture
def page(chat: Page) -> Page:
    return chat


def show(page: Page, language: str, code: str) -> Locator:
    """A finished answer with a block of code."""
    send(page, "Show it")
    text = f"```{language}\n{code}\n```"
    fake(page, f"answer.say({json.dumps(text)})")
    fake(page, "answer.end()")
    answered(page, page.locator("#messages .assistant").count())
    return page.locator(".assistant .code").last


def frame_of(block: Locator) -> FrameLocator:
    return block.frame_locator("iframe")


class OtherSite(ThreadingHTTPServer):
    """A server of another site, which keeps the paths it is asked for."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        paths = self.paths

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                paths.append(self.path)
                self.send_error(404)

            def log_message(self, *_: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server_port}"


@pytest.fixture
def other() -> Iterator[OtherSite]:
    with OtherSite() as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        yield site
        site.shutdown()
        thread.join()


def requested(visitor: Visitor) -> list[str]:
    urls: list[str] = []
    visitor.context.on("request", lambda request: urls.append(request.url))
    return urls


@in_browser
def test_html_is_shown_without_scripts_network_or_ways_out(
    page: Page, visitor: Visitor, other: OtherSite
) -> None:
    # (The browser tells of requests that its policy then stops: the other site knows.)
    visitor.expected.append(f"foreign: http://{other.host}")
    block = show(page, "html", HOSTILE.replace("OTHER", other.host))
    expect(block.locator("iframe")).to_have_count(0)  # until it is asked for
    block.get_by_role("button", name="Preview").click()
    frame = frame_of(block)
    expect(frame.locator("h1")).to_have_text("Sales")
    # Its own styles hold, and pictures within it are shown.
    assert frame.locator("h1").evaluate(
        "(e) => [getComputedStyle(e).color, getComputedStyle(e).fontSize]"
    ) == ["rgb(1, 2, 3)", "40px"]
    assert frame.get_by_alt_text("red").evaluate("(e) => e.decode().then(() => e.naturalWidth)")
    for selector in ("script", "iframe", "form", "meta[http-equiv]", "link"):
        assert frame.locator(selector).count() == 0, selector
    assert frame.locator("h1").evaluate("() => window.origin") == "null"
    assert frame.locator("[onload], [onerror]").count() == 0
    assert frame.get_by_text("Away").get_attribute("href") is None
    assert frame.get_by_text("End", exact=True).get_attribute("href") == "#end"
    assert block.locator("iframe").get_attribute("sandbox") == "allow-scripts"
    assert page.evaluate("window.hit") is None and page.url == f"{visitor.url}/"
    assert httpx.get(f"http://{other.host}/last").status_code == 404
    assert other.paths == ["/last"]
    # The page goes on.
    block.get_by_role("button", name="Show code").click()
    expect(block.locator("iframe")).to_have_count(0)
    expect(block.locator("pre")).to_be_visible()
    page.locator("#input").fill("Go on")


@in_browser
def test_a_preview_is_opened_and_closed_by_keys(page: Page) -> None:
    block = show(page, "html", "<h1>Sales</h1>")
    button = block.locator(".preview-code")
    for is_open in (True, False):
        button.press("Enter")
        expect(block.locator("iframe")).to_have_count(int(is_open))
        expect(button).to_have_attribute("aria-expanded", str(is_open).lower())
        expect(button).to_be_focused()


@in_browser
def test_svg_is_shown_on_request(page: Page) -> None:
    svg = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="40"><rect width="9"/></svg>'
    block = show(page, "svg", svg)
    block.get_by_role("button", name="Preview").click()
    expect(frame_of(block).locator("svg rect")).to_have_count(1)
    expect(show(page, "python", "print()").get_by_text("Preview")).to_have_count(0)


@in_browser
def test_a_script_in_the_frame_reaches_neither_page_nor_network(
    page: Page, visitor: Visitor, other: OtherSite
) -> None:
    """The frame holds even if the sanitizer lets a script pass."""
    block = show(page, "html", "<h1>Sales</h1>")
    block.get_by_role("button", name="Preview").click()
    title = frame_of(block).locator("h1")
    expect(title).to_be_visible()
    visitor.expected += ["Failed to load resource", "Unsafe attempt", "sandboxed"]
    tried = title.evaluate(
        """async (_, other) => {
          const attempts = {
            parent: () => parent.document.title,
            storage: () => localStorage.length,
            top: () => { top.location.href = `http://${other}/top`; },
            fetch: () => fetch("/server_info"),
            other: () => fetch(`http://${other}/fetch`),
            inline: () => {
              const script = document.createElement("script");
              script.textContent = "window.hit = 1";
              document.body.append(script);
              if (!window.hit) throw new Error("blocked");
            },
          };
          const found = {};
          for (const [name, does] of Object.entries(attempts)) {
            try {
              await does();
              found[name] = "done";
            } catch (error) {
              found[name] = error.message;
            }
          }
          return found;
        }""",
        other.host,
    )
    assert other.paths == []
    assert "done" not in tried.values(), tried
    assert page.url == f"{visitor.url}/"


def test_the_frame_has_a_policy_of_its_own(page_server: Any) -> None:
    with httpx.Client(base_url=page_server.url) as client:
        policy = client.get("/web/sandbox.html").headers["content-security-policy"]
        assert policy.startswith("sandbox allow-scripts; default-src 'none'; script-src 'self';")
        assert "allow-same-origin" not in policy and "connect-src" not in policy
        assert (
            "require-trusted-types-for 'script'"
            in (client.get("/").headers["content-security-policy"])
        )


@in_browser
def test_a_diagram_is_drawn_once_it_is_seen(visitor: Visitor) -> None:
    page = new_chat(visitor.open(fakes=True))  # which has drawn none yet
    urls = requested(visitor)
    show(page, "python", "print()")
    assert not [url for url in urls if url.endswith("mermaid.js")]
    block = show(page, "mermaid", DIAGRAM)
    frame = frame_of(block)
    expect(frame.get_by_text("Umbrella")).to_be_visible()
    assert [url for url in urls if url.endswith("mermaid.js")]
    expect(block.locator("pre")).to_be_hidden()
    page.wait_for_function("() => Number(document.querySelector('.preview iframe').height) > 60")
    block.get_by_role("button", name="Show code").click()
    expect(block.locator("pre")).to_contain_text("Umbrella")


@in_browser
def test_a_broken_diagram_shows_its_source_and_the_error(page: Page) -> None:
    block = show(page, "mermaid", "graph TD\n  A --> --> B")
    expect(block.locator(".preview .error")).to_contain_text("The diagram cannot be drawn: Parse")
    expect(block.locator("pre")).to_be_visible()
    expect(block.locator("iframe")).to_have_count(0)


@in_browser
def test_a_diagram_runs_no_scripts_and_has_no_links(page: Page) -> None:
    hostile = (
        'graph TD\n  A["<img src=x onerror=parent.hit=1>Rain"] --> B\n'
        '  click A "javascript:parent.hit=1"\n  click B call alert()\n'
    )
    block = show(page, "mermaid", hostile)
    frame = frame_of(block)
    expect(frame.locator("svg")).to_be_visible()
    assert frame.locator("[onerror], body script").count() == 0
    links = frame.locator("a").evaluate_all("(all) => all.map((a) => a.getAttribute('href'))")
    assert not [link for link in links if link and "javascript" in link]
    assert page.evaluate("window.hit") is None
