"""The chat page in a headless Chromium, for its tests. Screenshots go to MLX_PAGED_SCREENSHOTS."""

from __future__ import annotations

import base64
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright

from support.programs import needs
from support.server_helpers import RunningServer

# The shell first: without windows of its own, a page takes half the CPU time.
CHROMIUMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, CHROMIUMS)), None)
FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")
SCREENSHOTS = os.environ.get("MLX_PAGED_SCREENSHOTS")
in_browser = needs("Chromium", found=CHROMIUM is not None)
in_firefox = needs("Firefox", found=FIREFOX is not None, option="--browsers")
PROMPT = "Return the n-th Fibonacci number"
PATIENCE = 300_000  # timeout of a wait in milliseconds
# A non-loopback name: over plain HTTP, browsers give such a page no clipboard.
FOREIGN_HOST = "page.test"

# Answers that the test writes piece by piece, in place of the server's.
FAKE_ANSWERS = """
window.answers = [];
const fetched = window.fetch.bind(window);
window.fetch = (url, options) => {
  if (!String(url).endsWith("chat/completions")) return fetched(url, options);
  const answer = { body: JSON.parse(options.body), over: false };
  const stream = new ReadableStream({ start(controller) { answer.controller = controller; } });
  const send = (data) => answer.controller.enqueue(new TextEncoder().encode(`data: ${data}\\n\\n`));
  answer.delta = (delta, logprobs) => (
    send(JSON.stringify({ choices: [{ index: 0, delta, logprobs }] }))
  );
  answer.say = (content) => answer.delta({ content });
  answer.end = (finish = "stop") => {
    send(JSON.stringify({ choices: [{ index: 0, delta: {}, finish_reason: finish }] }));
    const usage = { prompt_tokens: 900, completion_tokens: 100, total_tokens: 1000 };
    send(JSON.stringify({ choices: [], usage }));
    send("[DONE]");
    answer.controller.close();
    answer.over = true;
  };
  answer.reply = (content) => { // to a request without a stream
    const body = JSON.stringify({ choices: [{ message: { content }, finish_reason: "stop" }] });
    answer.controller.enqueue(new TextEncoder().encode(body));
    answer.controller.close();
    answer.over = true;
  };
  answer.fail = (message, code = null) => {
    send(JSON.stringify({ error: { message, code } }));
    answer.over = true;
  };
  answer.lose = () => {
    answer.controller.error(new TypeError("network error"));
    answer.over = true;
  };
  options.signal.addEventListener("abort", () => {
    answer.over = true;
    answer.controller.error(new DOMException("aborted", "AbortError"));
  });
  window.answers.push(answer);
  const headers = { "Content-Type": "text/event-stream" };
  return Promise.resolve(new Response(stream, { headers }));
};
"""

LOAD_LIBRARIES = """async () => {
  await import(new URL("web/markdown.js", document.baseURI));
}"""

# A page without a site has no storage.
NO_TITLES = """try { localStorage["mlx-paged.titles"] = "off"; } catch {}"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser for all tests of a module; each test has its own context with its own storage."""
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=[
                "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--in-process-gpu",
                f"--host-resolver-rules=MAP {FOREIGN_HOST} 127.0.0.1",
            ],
        )  # fmt: skip
        yield browser
        browser.close()


@contextmanager
def firefox() -> Iterator[Browser]:
    """Like `chromium`: Debian's Firefox, driven by WebDriver BiDi instead of Playwright's patches.

    BiDi has no bodies of requests, no downloads and no color schemes, among others.
    """
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.firefox.launch(channel="moz-firefox", executable_path=FIREFOX)
        yield browser
        browser.close()


class Visitor:
    """A browser's storage and its tabs. At its end, fails if the console logged errors.

    Args:
        titles: Let the model write titles of chats, as by default.

    Attributes:
        bodies: Bodies of the page's requests for answers, in order.
        expected: Parts of console errors that the test provokes.
    """

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        viewport = options.pop("viewport", {"width": 1200, "height": 800})
        titles = options.pop("titles", False)
        self.context: BrowserContext = browser.new_context(viewport=viewport, **options)
        if not titles:
            self.context.add_init_script(NO_TITLES)
        self.context.set_default_timeout(PATIENCE)
        self.url = url
        self.bodies: list[dict[str, Any]] = []
        self.expected: list[str] = []
        self._problems: list[str] = []
        self.context.on("weberror", lambda error: self._problems.append(str(error.error)))
        self.context.on(
            "console", lambda m: self._problems.append(m.text) if m.type == "error" else None
        )
        self.context.on("request", self._on_request)

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith((self.url, "blob:", "data:")):
            self._problems.append(f"foreign: {request.url}")
        if request.url.endswith("/v1/chat/completions") and request.method == "POST":
            self.bodies.append(request.post_data_json)

    def open(self, *, fakes: bool = False, path: str = "/", is_whole: bool = True) -> Page:
        """Opens a tab with the page; returns when it is ready.

        Args:
            is_whole: Wait also for the libraries that load after the page can be used. Until they
                have come, texts are shown without their Markdown.
        """
        page = self.context.new_page()
        if fakes:
            page.add_init_script(FAKE_ANSWERS)
        page.goto(self.url + path)
        expect(page.locator("#messages > li")).not_to_have_count(0)
        if is_whole:
            page.evaluate(LOAD_LIBRARIES)
        return page

    def close(self) -> None:
        self.context.close()
        problems = [p for p in self._problems if not any(part in p for part in self.expected)]
        assert not problems, problems


@contextmanager
def visiting(browser: Browser, server: RunningServer, **options: Any) -> Iterator[Visitor]:
    visitor = Visitor(browser, options.pop("url", server.url), **options)
    try:
        yield visitor
    except BaseException:
        visitor.context.close()
        raise
    visitor.close()


def new_chat(tab: Page) -> Page:
    """Opens an empty chat in a tab with `FAKE_ANSWERS` that tests share, and ends open answers."""
    tab.evaluate("() => { for (const a of window.answers) if (!a.over) a.end(); }")
    expect(tab.locator(".assistant.busy")).to_have_count(0)
    tab.click("#new-chat")
    expect(tab.locator("#messages .message")).to_have_count(0)
    return tab


def shoot(page: Page, name: str) -> None:
    if SCREENSHOTS:
        page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png")


def send(page: Page, text: str) -> None:
    """Types and sends a message; does not wait for the answer."""
    page.locator("#input").fill(text)
    page.locator("#send").click()


def answered(page: Page, count: int = 1) -> None:
    """Waits until the last of `count` answers on the page has ended."""
    expect(page.locator("#messages .assistant")).to_have_count(count)
    expect(page.locator("#stop")).to_be_hidden()


def ask(page: Page, text: str, count: int = 1) -> None:
    send(page, text)
    answered(page, count)


def file(name: str, kind: str, content: bytes) -> dict[str, Any]:
    return {"name": name, "mimeType": kind, "buffer": content}


def attach(page: Page, *files: dict[str, Any]) -> None:
    expect(page.locator("#attach")).to_be_visible()
    page.locator("#attach-file").set_input_files(list(files))


def give(page: Page, event: str, files: list[dict[str, Any]], at: str = "#input") -> None:
    """Pastes or drops files."""
    given = [{**f, "buffer": base64.b64encode(f["buffer"]).decode()} for f in files]
    page.locator(at).evaluate(
        """(target, [name, files]) => {
          const data = new DataTransfer();
          for (const { name, mimeType: type, buffer } of files) {
            const bytes = Uint8Array.from(atob(buffer), (c) => c.charCodeAt(0));
            data.items.add(new File([bytes], name, { type }));
          }
          const options = { bubbles: true, cancelable: true };
          const event = name === "paste"
            ? new ClipboardEvent(name, { ...options, clipboardData: data })
            : new DragEvent(name, { ...options, dataTransfer: data });
          if (target.dispatchEvent(event)) throw new Error(`left to the browser: ${name}`);
        }""",
        [event, given],
    )


def set_parameters(page: Page, **values: str) -> None:
    page.click("#open-settings")
    for name, value in values.items():
        page.locator(f"#parameters [name={name}]").fill(value)
    page.click("#close-settings")


def never_ending(
    context: BrowserContext, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lets the server's answers run until they are stopped: the model's maximum takes two minutes,
    and a click on a busy machine some seconds."""
    engine = server.engine.engine
    step = engine.step

    def slow_step() -> Any:
        time.sleep(0.05)
        return step()

    monkeypatch.setattr(engine, "step", slow_step)

    def route(route: Route) -> None:
        body = {**route.request.post_data_json, "ignore_eos": True}
        route.continue_(post_data=json.dumps(body))

    context.route("**/v1/chat/completions", route)


def fake(page: Page, script: str) -> Any:
    """Controls the next answer of `FAKE_ANSWERS`, once the page has requested it."""
    page.wait_for_function("() => window.answers.some((answer) => !answer.over)")
    return page.evaluate(
        f"() => {{ const answer = window.answers.find((a) => !a.over); return {script}; }}"
    )


def saved(page: Page, text: str) -> None:
    """Waits until the database has a message that contains a text."""
    page.evaluate(
        """async ([text, patience]) => {
          const result = (request) => new Promise((done) => {
            request.onsuccess = () => done(request.result);
          });
          const db = await result(indexedDB.open("mlx-paged"));
          for (const started = Date.now(); ;) {
            if (Date.now() - started > patience) throw new Error(`not saved: ${text}`);
            const store = db.transaction("messages").objectStore("messages");
            const messages = await result(store.getAll());
            if (messages.some((m) => m.content.includes(text))) break;
            await new Promise((done) => setTimeout(done, 20));
          }
          db.close();
        }""",
        [text, PATIENCE],
    )
