"""The chat page, end to end in a headless Chromium, where there is one.

Screenshots go to the directory that MLX_PAGED_SCREENSHOTS names.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright
from support.server_helpers import RunningServer, running

import mlx_paged
from mlx_paged.server.app import API
from mlx_paged.server.config import ServerConfig

WEB = Path(mlx_paged.__file__).parent / "server/web"
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
SCREENSHOTS = os.environ.get("MLX_PAGED_SCREENSHOTS")
in_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine (Debian: apt install chromium)"
)
PROMPT = "Return the n-th Fibonacci number"


def test_the_page_needs_nothing_from_elsewhere() -> None:
    for path in WEB.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//cdn|@import", text), path
    page = (WEB / "index.html").read_text()
    for name in re.findall(r'(?:src|href)="web/([^"]+)"', page):
        assert (WEB / name).is_file(), name


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(ServerConfig(served_model_names=("demo",)), max_model_len=2048) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, server: RunningServer) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    page = context.new_page()
    page.set_default_timeout(30_000)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    page.on(
        "request",
        lambda r: None if r.url.startswith(server.url) else problems.append(f"foreign: {r.url}"),
    )
    page.goto(server.url)
    yield page
    context.close()
    assert not problems, problems


def shoot(page: Page, name: str) -> None:
    if SCREENSHOTS:
        page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png")


def ask(page: Page, text: str) -> None:
    page.locator("#input").fill(text)
    page.keyboard.press("Enter")


def answered(page: Page, count: int = 1) -> None:
    """Waits for the end of the last of `count` answers."""
    expect(page.locator("#messages .assistant")).to_have_count(count)
    expect(page.locator("#stop")).to_be_hidden(timeout=60_000)


def set_parameters(page: Page, **values: str) -> None:
    if page.locator("#settings").is_hidden():
        page.click("#toggle-settings")
    for name, value in values.items():
        field = page.locator(f"#settings [name={name}]")
        field.fill(value)
        field.blur()
    page.click("#toggle-settings")


@in_browser
def test_a_conversation_with_numbers(page) -> None:
    shoot(page, "empty")
    set_parameters(page, temperature="0", max_tokens="200")
    ask(page, PROMPT)
    answered(page)
    text = page.locator(".assistant .text").inner_text()
    assert text.startswith("def fibonacci")
    stats = page.locator(".assistant .stats").inner_text()
    assert re.search(r"[\d.]+ tokens/s · TTFT \d+ ms · \d+ tokens · 0 of \d+ prompt tokens cached",
                     stats), stats  # fmt: skip
    page.get_by_role("button", name="Regenerate").click()
    answered(page)
    assert page.locator(".assistant .text").inner_text() == text  # greedy
    stats = page.locator(".assistant .stats").inner_text()
    assert re.search(r" [1-9]\d* of \d+ prompt tokens cached", stats), stats
    expect(page.locator("#pool-text")).to_contain_text("% used")
    expect(page.locator("#load")).to_contain_text("running")
    ask(page, "Now check whether it is even")
    answered(page, 2)
    shoot(page, "conversation-light")
    page.emulate_media(color_scheme="dark")
    shoot(page, "conversation-dark")
    page.click("#toggle-settings")
    shoot(page, "parameters-dark")


@in_browser
def test_stop_by_key_and_by_button(page, server) -> None:
    def never_ending(route: Route) -> None:
        body = {**route.request.post_data_json, "ignore_eos": True}
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", never_ending)
    set_parameters(page, max_tokens="1900")
    ask(page, PROMPT)
    expect(page.locator("#stop")).to_be_visible()
    expect(page.locator(".assistant .text")).not_to_be_empty()
    page.keyboard.press("Escape")
    answered(page)
    expect(page.locator(".assistant .stats")).to_contain_text("stopped")
    server.until(lambda: server.stats().num_running == 0, 10)
    page.get_by_role("button", name="Regenerate").click()
    page.click("#stop")
    answered(page)
    server.wait_idle()


@in_browser
def test_editing_asks_anew(page) -> None:
    set_parameters(page, temperature="0", max_tokens="20")
    ask(page, PROMPT)
    answered(page)
    page.get_by_role("button", name="Edit").click()
    page.locator(".editing textarea").fill("Check whether a number is prime")
    page.keyboard.press("Enter")
    answered(page)
    assert "prime" in page.locator(".user .text").inner_text()
    assert "prime" in page.locator(".assistant .text").inner_text()
    page.get_by_role("button", name="Edit").click()
    page.keyboard.press("Escape")
    expect(page.locator(".editing")).to_have_count(0)


@in_browser
def test_chats_are_kept_and_apart(page) -> None:
    set_parameters(page, temperature="0", max_tokens="10")
    ask(page, "First of all")
    answered(page)
    page.keyboard.press("Alt+n")
    expect(page.locator("#messages .assistant")).to_have_count(0)
    ask(page, "Second of all")
    answered(page)
    expect(page.locator("#chats .title")).to_have_text(["Second of all", "First of all"])
    page.reload()
    expect(page.locator("#chats .title")).to_have_count(2)
    page.keyboard.press("Alt+ArrowDown")
    expect(page.locator(".user .text")).to_have_text("First of all")
    assert page.locator("#settings [name=max_tokens]").input_value() == "10"
    page.get_by_label("Delete First of all").click()
    expect(page.locator("#chats .title")).to_have_text(["Second of all"])


@in_browser
def test_an_answer_in_one_piece_has_a_sober_speed(page) -> None:
    chunks = [
        {"choices": [{"index": 0, "delta": {"content": "x = 1"}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 30}},
    ]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"

    def answer(route: Route) -> None:
        time.sleep(0.5)
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/v1/chat/completions", answer)
    ask(page, PROMPT)
    answered(page)
    stats = page.locator(".assistant .stats").inner_text()
    assert 0 < float(re.match(r"([\d.]+) tokens/s", stats)[1]) <= 60, stats


@in_browser
def test_text_is_never_markup_and_errors_are_shown(page) -> None:
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    set_parameters(page, max_tokens="5")
    ask(page, "<img src=x onerror=alert(1)><script>alert(2)</script>")
    answered(page)
    assert page.locator("#messages img").count() == 0
    assert "<script>" in page.locator(".user .text").inner_text()


@in_browser
def test_a_narrow_window(page) -> None:
    page.set_viewport_size({"width": 390, "height": 780})
    expect(page.locator("#sidebar")).to_be_hidden()
    page.click("#toggle-sidebar")
    expect(page.locator("#sidebar")).to_be_visible()
    page.click("#new-chat")
    expect(page.locator("#sidebar")).to_be_hidden()
    set_parameters(page, temperature="0", max_tokens="120")
    ask(page, PROMPT)
    answered(page)
    shoot(page, "narrow")
    page.emulate_media(color_scheme="dark")
    shoot(page, "narrow-dark")
    page.click("#toggle-sidebar")
    shoot(page, "narrow-sidebar-dark")
    overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert overflow <= 0


@in_browser
def test_keys_reach_everything(page) -> None:
    seen = set()
    page.locator("body").focus()
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {"new-chat", "title", "remove", "model", "toggle-settings", "input", "send"} <= seen


@in_browser
def test_the_documentation_page(page, server) -> None:
    page.goto(f"{server.url}/docs")
    expect(page.locator("details")).to_have_count(len(API))
    page.get_by_text("/v1/chat/completions").click()
    expect(page.get_by_text("continue_final_message", exact=True).first).to_be_visible()
    shoot(page, "docs")
    page.emulate_media(color_scheme="dark")
    shoot(page, "docs-dark")


@in_browser
def test_a_key_is_asked_for(browser) -> None:
    with running(ServerConfig(api_keys=("sesame",))) as server:
        page = browser.new_page()
        page.goto(server.url)
        expect(page.locator("#model")).to_contain_text("API key")
        set_parameters(page, key="sesame", max_tokens="5")
        expect(page.locator("#model")).to_contain_text("mlx-paged-demo")
        ask(page, PROMPT)
        answered(page)
        assert page.locator(".assistant .text").inner_text()
        page.close()
