"""The chat page in Firefox: the main paths, each without an error in the console."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect
from support.page_helpers import (
    PROMPT,
    Visitor,
    answered,
    ask,
    attach,
    fake,
    file,
    firefox,
    in_firefox,
    send,
)

pytestmark = in_firefox


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with firefox() as browser:
        yield browser


@pytest.fixture
def page(visitor: Visitor) -> Page:
    return visitor.open(fakes=True)


def test_an_answer_streams_as_markdown(page: Page) -> None:
    send(page, PROMPT)
    fake(page, "answer.say('# Title\\n\\nSome **bold** text.\\n\\n```python\\nx = 1\\n')")
    expect(page.locator(".assistant h1")).to_have_text("Title")
    expect(page.locator(".assistant code")).to_contain_text("x = 1")
    fake(page, "(answer.say('```\\n\\n$x^2$'), answer.end())")
    answered(page)
    expect(page.locator(".assistant math")).to_have_count(1)
    expect(page.locator(".assistant strong")).to_have_text("bold")


def test_the_server_answers_and_a_reload_keeps_the_chat(visitor: Visitor) -> None:
    page = visitor.open()
    ask(page, PROMPT)
    answer = page.locator(".assistant").inner_text()
    page.reload()
    answered(page)
    expect(page.locator(".user")).to_contain_text(PROMPT)
    assert page.locator(".assistant").inner_text() == answer


def test_an_answer_is_stopped(page: Page) -> None:
    send(page, PROMPT)
    fake(page, "answer.say('It begins')")
    expect(page.locator(".assistant")).to_contain_text("It begins")
    page.keyboard.press("Escape")
    answered(page)
    expect(page.locator(".assistant")).to_contain_text("It begins")


def test_the_enter_that_ends_a_composition_sends_nothing(page: Page) -> None:
    page.locator("#input").fill("日本")
    sent = page.locator("#input").evaluate(
        """(input) => {
          const enter = (options) => {
            const all = { key: "Enter", bubbles: true, cancelable: true, ...options };
            return input.dispatchEvent(new KeyboardEvent("keydown", all));
          };
          return [enter({ isComposing: true }), enter({ keyCode: 229 })];
        }"""
    )
    assert sent == [True, True], "both are left to the input method"
    expect(page.locator("#input")).to_have_value("日本")
    page.locator("#input").press("Enter")
    fake(page, "(answer.say('Yes.'), answer.end())")
    answered(page)


def test_a_text_file_goes_with_the_message(page: Page) -> None:
    attach(page, file("notes.txt", "text/plain", b"Buy a ladder."))
    send(page, "What is in it?")
    sent = fake(page, "JSON.stringify(answer.body.messages)")
    assert "Buy a ladder." in sent and "notes.txt" in sent
    fake(page, "(answer.say('A ladder.'), answer.end())")
    answered(page)


def test_a_dialog_opens_by_keyboard_and_escape_closes_it(page: Page) -> None:
    page.locator("#open-settings").focus()
    page.keyboard.press("Enter")
    settings = page.locator("dialog[open]")
    expect(settings).to_have_count(1)
    page.keyboard.press("Escape")
    expect(settings).to_have_count(0)
    expect(page.locator("#open-settings")).to_be_focused()


def test_chats_are_found_by_their_text(page: Page) -> None:
    send(page, "Where is the lighthouse?")
    fake(page, "(answer.say('On the island.'), answer.end())")
    answered(page)
    page.locator("#search").fill("island")
    expect(page.locator("#chats mark, #results mark").first).to_have_text(re.compile("island"))
