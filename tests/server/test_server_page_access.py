"""The chat page for all: axe's checks, keys, phones, dialogs, themes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from support.page_helpers import (
    Visitor,
    answered,
    attach,
    fake,
    file,
    in_browser,
    send,
    visiting,
)
from support.page_quality import AT_ALL_WIDTHS, check_escape, check_keys, check_look


@pytest.fixture
def page(visitor: Visitor) -> Page:
    return visitor.open()


# The policy of the frames of previews is reported by the console.
FRAME_REPORTS = ["Content Security Policy", "Content-Security-Policy"]
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="40"><rect width="9"/></svg>'
PREVIEWS = f"""```html
<h1>Sales</h1>
```

```svg
{SVG}
```

```mermaid
graph TD
  A[Rain] --> B[Umbrella]
```

```mermaid
graph TD
  A --> --> B
```
"""
PICKER = """() => {
  window.showDirectoryPicker = async () => {
    const root = await navigator.storage.getDirectory();
    return root.getDirectoryHandle("backup", { create: true });
  };
}"""


# States that have between them nearly all that is ever shown.
SOME_STATES = {"viewer", "tokens", "previews", "failed", "menu", "search", "preset", "context"}


def chat_that_was_cut() -> dict[str, Any]:
    """A file with a chat whose last answer was made without the first turn."""
    messages = [
        {
            "id": f"cut-{i}", "parent": f"cut-{i - 1}" if i else None,
            "role": "assistant" if i % 2 else "user", "content": f"Text {i}", "reasoning": "",
            "calls": [], "media": [], "status": "done", "error": None, "finish": "stop",
            "stats": None, "model": "demo", "created": i, "edited": False,
            "from": "cut-2" if i == 3 else None,
        }
        for i in range(4)
    ]  # fmt: skip
    chat = {"id": "cut", "title": "Cut", "leaf": "cut-3", "created": 1, "used": 1, "tools": []}
    chat |= {"parameters": None, "pinned": False, "folder": None}
    return {
        "format": "mlx-paged-chats", "version": 4,
        "chats": [{**chat, "messages": messages, "media": []}],
    }  # fmt: skip


def open_everything(page: Page) -> Iterator[str]:
    """The states of the page, one after the other."""
    yield "empty"
    attach(page, file("some notes.txt", "text/plain", b"A note of many words. " * 200))
    page.locator(".tray .chip").click()
    yield "viewer"
    page.click("#close-viewer")
    yield "files"
    send(page, "Show me everything")
    sample = (Path(__file__).parents[1] / "support/page_sample.md").read_text()
    cut = {
        "index": 0,
        "id": "c",
        "function": {"name": "a_tool", "arguments": '{"a": "' + "x" * 300},
    }
    fake(page, f"answer.delta({json.dumps({'tool_calls': [cut]})})")
    top = [{"token": f"word {i}", "logprob": -i / 2} for i in range(5)]
    tokens = {"content": [{**one, "top_logprobs": top} for one in top]}
    fake(page, f"answer.delta({{}}, {json.dumps(tokens)})")
    fake(page, f"(answer.say({json.dumps(sample)}), answer.end('length'))")
    answered(page)
    expect(page.locator(".typeset .katex").first).to_be_visible()
    page.get_by_role("button", name="Tokens", exact=True).click()
    yield "tokens"
    page.keyboard.press("Escape")
    page.locator(".reasoning summary").click()
    page.locator(".call summary").click()
    yield "answer"
    send(page, "Show previews")
    fake(page, f"(answer.say({json.dumps(PREVIEWS)}), answer.end())")
    answered(page, 2)
    blocks = page.locator(".assistant").last.locator(".code")
    for i, drawn in ((0, "h1"), (1, "rect")):
        blocks.nth(i).get_by_role("button", name="Preview").click()
        expect(blocks.nth(i).frame_locator("iframe").locator(drawn)).to_have_count(1)
    for i in (2, 3):
        blocks.nth(i).scroll_into_view_if_needed()
    expect(blocks.nth(2).frame_locator("iframe").get_by_text("Umbrella")).to_be_visible()
    expect(blocks.nth(3).locator(".error")).to_be_visible()
    yield "previews"
    send(page, "Wait")
    fake(page, "answer.say('A little')")
    send(page, "A message that waits")
    expect(page.locator("#queued li")).to_have_count(1)
    yield "queued"
    page.click("#stop")
    expect(page.locator("#input")).to_have_value("A message that waits")
    page.locator("#input").fill("")
    send(page, "And now?")
    fake(page, "answer.fail('no API key')")
    answered(page, 4)
    page.locator(".user").get_by_role("button", name="Edit").last.click()
    yield "failed"
    page.locator(".assistant").first.get_by_role("button", name="Edit").click()
    yield "edit"
    if page.locator("#sidebar").is_hidden():
        page.click("#toggle-sidebar")
        yield "sidebar"
    page.locator("#chats .more").click()
    page.get_by_role("menuitem", name="Pin").click()
    page.locator("#chats .more").click()
    page.get_by_role("menuitem", name="Move to folder").click()
    yield "folder"
    page.keyboard.press("Escape")
    page.locator("#chats .more").click()
    yield "menu"
    page.keyboard.press("Escape")
    page.locator("#search").fill("everything")
    expect(page.locator("#chats .snippet mark")).to_be_visible()
    yield "search"
    page.locator("#search").fill("")
    if page.locator("#shade").is_visible():
        page.click("#close-sidebar")
    page.click("#open-settings")
    page.locator("#parameters [name=top_p]").fill("7")
    page.locator("#schema").fill('{"type": ')
    yield "settings"
    page.locator("#schema").fill("")
    page.click("#save-preset")  # without a name
    yield "unnamed preset"
    page.locator("#preset-name").fill("A preset with a name as long as one may be, or " * 2)
    page.click("#save-preset")
    page.locator("#scope-chat").check()
    yield "preset"
    page.evaluate(PICKER)
    page.click("#export-folder")
    expect(page.locator("#export-state")).to_contain_text("Exported 1 chat")
    content = json.dumps(chat_that_was_cut()).encode()
    page.locator("#import-file").set_input_files(file("x.json", "application/json", content))
    expect(page.locator("#import-state")).to_contain_text("Imported 1 chat")
    yield "exported"
    page.click("#close-settings")
    page.locator("#chats [data-chat=cut] .title").evaluate("(button) => button.click()")
    expect(page.locator(".unseen")).to_have_count(1)
    yield "context"
    page.click("#open-settings")


@in_browser
@AT_ALL_WIDTHS
@pytest.mark.parametrize(
    "states",
    [pytest.param(SOME_STATES, id="some"), pytest.param(None, id="all", marks=pytest.mark.long)],
)
def test_axe_finds_nothing(browser, page_server, width, states) -> None:
    with visiting(
        browser, page_server, viewport={"width": width, "height": 780}, reduced_motion="reduce"
    ) as visitor:
        visitor.expected += FRAME_REPORTS
        page = visitor.open(fakes=True)
        for state in open_everything(page):
            if states is None or state in states:
                check_look(page, state)


@in_browser
def test_a_phone(browser, page_server) -> None:
    viewport = {"width": 390, "height": 780}
    with visiting(
        browser, page_server, viewport=viewport, has_touch=True, is_mobile=True
    ) as visitor:
        visitor.expected += FRAME_REPORTS
        page = visitor.open(fakes=True)
        for state in open_everything(page):
            # (Code, tables and formulas scroll in boxes of their own.)
            cut = page.evaluate(
                """() => [...document.querySelectorAll(
                  "button, input, select, textarea, p, .text, .note, label")]
                .filter((e) => e.checkVisibility({ visibilityProperty: true })
                  && !e.closest(".offscreen, .skip, .table, pre, .katex"))
                .map((e) => [e.outerHTML.slice(0, 80), e.getBoundingClientRect()])
                .filter(([, { left, right }]) => left < -0.5 || right > innerWidth + 0.5)"""
            )
            assert not cut, (state, cut)
            small = page.evaluate(
                """() => [...document.querySelectorAll("button, select, summary, label.check")]
                .filter((e) => e.checkVisibility({ visibilityProperty: true }))
                .map((e) => [e.outerHTML.slice(0, 80), e.getBoundingClientRect()])
                .filter(([, { width, height }]) => width < 43.5 || height < 43.5)"""
            )
            assert not small, (state, small)
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        page.tap("#close-settings")
        page.tap("#toggle-sidebar")
        expect(page.locator("#sidebar")).to_be_visible()
        page.touchscreen.tap(380, 400)  # beside it
        expect(page.locator("#sidebar")).to_be_hidden()
        page.tap("#toggle-sidebar")
        page.keyboard.press("Escape")
        expect(page.locator("#sidebar")).to_be_hidden()
        page.tap("#toggle-sidebar")
        page.tap("#new-chat")
        expect(page.locator("#sidebar")).to_be_hidden()
        page.locator("#input").fill("One line")
        page.keyboard.press("Enter")
        page.keyboard.type("and another")
        expect(page.locator("#input")).to_have_value("One line\nand another")
        page.tap("#send")
        fake(page, "answer.end()")
        answered(page)


@in_browser
def test_keys_reach_everything(visitor) -> None:
    page = visitor.open(fakes=True)
    send(page, "Hello")
    fake(page, "(answer.say('```python\\nx = 1\\n```'), answer.end())")
    answered(page)
    seen = set()
    page.locator("body").focus()
    for _ in range(44):
        page.keyboard.press("Tab")
        seen.add(
            page.evaluate(
                "document.activeElement.id || document.activeElement.className"
                " || document.activeElement.textContent"
            )
        )
    assert {
        "close-sidebar", "new-chat", "search", "title", "more icon-button", "toggle-sidebar",
        "model", "open-settings", "Edit", "Copy", "Fork", "Delete", "attach",
        "copy-code", "Regenerate", "Read aloud", "input", "dictate", "send",
    } <= seen  # fmt: skip
    page.locator("#chats .more").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowUp")
    expect(page.get_by_role("menuitem", name="Delete")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#chats .more")).to_be_focused()
    page.click("#close-sidebar")
    expect(page.locator("#sidebar")).to_be_hidden()
    expect(page.locator("#toggle-sidebar")).to_be_focused()


@in_browser
@AT_ALL_WIDTHS
def test_dialogs_keep_the_focus_and_give_it_back(browser, page_server, width) -> None:
    viewport = {"width": width, "height": 780}
    with visiting(browser, page_server, viewport=viewport) as visitor:
        page = visitor.open(fakes=True)
        opener = page.locator("#open-settings")
        opener.press("Enter")
        dialog = page.locator("#settings")
        page.locator("#preset-name").fill("Mine")
        page.locator("#save-preset").press("Enter")
        check_keys(page, dialog)
        page.locator("#delete-preset").press("Enter")
        expect(page.locator("#preset")).to_be_focused()
        page.evaluate(PICKER)
        for name, state in (("#export-folder", "Exported"), ("#change-folder", "Exported")):
            page.evaluate("() => { document.getElementById('export-state').textContent = ''; }")
            page.locator(name).press("Enter")
            expect(page.locator("#export-state")).to_contain_text(state)
            expect(page.locator("#export-folder")).to_be_enabled()
            expect(page.locator(name)).to_be_focused()
        check_keys(page, dialog)
        check_escape(page, dialog, opener)

        attach(page, file("notes.txt", "text/plain", b"Note\n" * 200))
        opener = page.locator(".tray .chip")
        opener.press("Enter")
        check_keys(page, page.locator("#viewer"))
        check_escape(page, page.locator("#viewer"), opener)

        send(page, "Hello")
        token = {"token": "Hi", "logprob": -0.1, "top_logprobs": []}
        logprobs = json.dumps({"content": [token, token]})
        fake(page, f"(answer.delta({{ content: 'Hi' }}, {logprobs}), answer.end())")
        answered(page)
        opener = page.get_by_role("button", name="Tokens", exact=True)
        opener.press("Enter")
        dialog = page.locator("#token-view")
        expect(dialog.get_by_role("listbox")).to_be_focused()
        check_keys(page, dialog)
        check_escape(page, dialog, opener)

        # Esc in a dialog stops no answer, and a message that waits is reached by keys.
        send(page, "Wait")
        fake(page, "answer.say('A little')")
        send(page, "A message that waits")
        page.get_by_role("button", name="Remove queued message").press("Enter")
        expect(page.locator("#queued")).to_be_hidden()
        expect(page.locator("#input")).to_be_focused()
        page.locator("#open-settings").press("Enter")
        check_escape(page, page.locator("#settings"), page.locator("#open-settings"))
        expect(page.locator("#stop")).to_be_visible()
        fake(page, "answer.end()")
        answered(page, 2)


@in_browser
def test_the_theme_is_chosen_and_kept(page) -> None:
    page.emulate_media(color_scheme="light")
    html = page.locator("html")
    expect(html).to_have_attribute("data-theme", "light")
    page.click("#open-settings")
    page.get_by_label("Dark").check()
    expect(html).to_have_attribute("data-theme", "dark")
    page.reload()
    expect(html).to_have_attribute("data-theme", "dark")
    page.click("#open-settings")
    page.get_by_role("radio", name="System").check()
    expect(html).to_have_attribute("data-theme", "light")
