"""Chats on the page whose messages are edited, deleted, forked and written ahead."""

from __future__ import annotations

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
    shoot,
)


@pytest.fixture
def page(visitor: Visitor) -> Page:
    page = visitor.open(fakes=True)
    expect(page.locator("#model")).to_have_value("demo")  # answers are marked with it
    return page


def exchange(page: Page, question: str, answer: str) -> None:
    """A question and its whole answer."""
    send(page, question)
    fake(page, f"(answer.say({answer!r}), answer.end())")
    expect(page.locator("#stop")).to_be_hidden()


def sent(page: Page) -> list[str]:
    """Contents of the messages of the request that waits for its answer."""
    messages: list[dict[str, Any]] = fake(page, "answer.body.messages")
    roles = [message["role"] for message in messages]
    assert roles == [("user", "assistant")[i % 2] for i in range(len(roles))]  # templates want it
    return [message["content"] for message in messages]


def texts(page: Page) -> Any:
    return expect(page.locator(".message .text"))


def press(page: Page, place: int, name: str) -> None:
    page.locator(".message").nth(place).get_by_role("button", name=name).click()


@in_browser
def test_an_edited_answer_is_the_one_that_is_sent(page: Page) -> None:
    exchange(page, "Two plus two?", "<think>Hm.</think>Five")
    press(page, 1, "Edit")
    area = page.get_by_label("Edit answer")
    expect(area).to_be_focused()
    expect(area).to_have_value("Five")
    area.fill("Four")
    page.keyboard.press("Enter")
    page.keyboard.type("Sure.")
    page.reload()  # what was typed stays
    expect(area).to_have_value("Four\nSure.")
    shoot(page, "edit-answer")
    area.press("Control+Enter")
    expect(page.locator(".assistant .branches")).to_contain_text("2/2")
    expect(page.locator(".assistant .stats")).to_have_text("edited · demo")
    send(page, "Thanks")
    assert sent(page) == ["Two plus two?", "Four\nSure.", "Thanks"]
    fake(page, "answer.end()")
    answered(page, 2)
    page.get_by_role("button", name="Previous answer").click()
    texts(page).to_have_text(["Two plus two?", "Five"])


@in_browser
def test_a_deleted_message_is_not_sent_and_comes_back(page: Page) -> None:
    exchange(page, "One", "Answer one")
    exchange(page, "Two", "Answer two")
    press(page, 1, "Delete")
    texts(page).to_have_text(["One", "Two", "Answer two"])
    page.reload()
    texts(page).to_have_text(["One", "Two", "Answer two"])
    send(page, "Three")
    assert sent(page) == ["One\n\nTwo", "Answer two", "Three"]
    fake(page, "(answer.say('Answer three'), answer.end())")
    expect(page.locator("#stop")).to_be_hidden()
    press(page, 3, "Delete")
    texts(page).to_have_text(["One", "Two", "Answer two", "Answer three"])
    # Answers that follow each other are one to the model; the second answers nothing.
    expect(page.get_by_role("button", name="Regenerate")).to_have_count(1)
    send(page, "Four")
    assert sent(page) == ["One\n\nTwo", "Answer two\n\nAnswer three", "Four"]
    page.keyboard.press("Escape")
    expect(page.locator("#stop")).to_be_hidden()
    press(page, 2, "Regenerate")
    assert sent(page) == ["One\n\nTwo"]
    fake(page, "(answer.say('Another'), answer.end())")
    expect(page.locator("#stop")).to_be_hidden()
    texts(page).to_have_text(["One", "Two", "Another"])
    # A version goes with all below it.
    press(page, 2, "Delete")
    texts(page).to_have_text(["One", "Two", "Answer two", "Answer three", "Four", ""])
    page.get_by_role("button", name="Undo").click()
    texts(page).to_have_text(["One", "Two", "Another"])


@in_browser
def test_a_chat_is_forked_with_its_files(page: Page) -> None:
    attach(page, file("notes.txt", "text/plain", b"Milk"))
    expect(page.locator("#composer .tray li")).to_have_count(1)
    exchange(page, "One", "Answer one")
    exchange(page, "Two", "Answer two")
    press(page, 1, "Fork")
    titles = page.locator("#chats .title")
    expect(titles).to_have_text(["One (fork)", "One"])
    texts(page).to_have_text(["One", "Answer one"])
    send(page, "And?")
    assert sent(page) == ["File: notes.txt\n```txt\nMilk\n```\n\nOne", "Answer one", "And?"]
    fake(page, "answer.end()")
    answered(page, 2)
    titles.last.click()
    texts(page).to_have_text(["One", "Answer one", "Two", "Answer two"])


@in_browser
def test_the_next_messages_wait_for_the_answer(page: Page) -> None:
    queued = page.locator("#queued .queued-text")
    send(page, "One")
    fake(page, "answer.say('Answer')")
    send(page, "Two")
    attach(page, file("notes.txt", "text/plain", b"Milk"))
    expect(page.locator("#composer .tray li")).to_have_count(1)
    page.locator("#input").fill("Three")
    page.press("#input", "Enter")
    expect(queued).to_have_text(["Two", "Three · notes.txt"])
    shoot(page, "queued")
    page.get_by_role("button", name="Edit queued message").first.click()
    expect(page.locator("#input")).to_have_value("Two")
    page.locator("#input").fill("Two!")
    page.press("#input", "Enter")
    expect(queued).to_have_text(["Three · notes.txt", "Two!"])
    # Sent also while another chat is open.
    page.keyboard.press("Alt+n")
    expect(page.locator("#queued")).to_be_hidden()
    fake(page, "answer.end()")
    page.wait_for_function("() => window.answers.length === 2")
    assert sent(page) == ["One", "Answer", "File: notes.txt\n```txt\nMilk\n```\n\nThree"]
    page.keyboard.press("Alt+ArrowDown")
    expect(queued).to_have_text(["Two!"])
    fake(page, "(answer.say('Read'), answer.end())")
    page.wait_for_function("() => window.answers.length === 3")
    expect(page.locator("#queued")).to_be_hidden()
    assert sent(page)[-2:] == ["Read", "Two!"]
    # Messages behind an answer that is stopped come back, and after a reload too.
    send(page, "Four")
    page.locator("#input").fill("typed")
    page.press("#input", "Escape")
    expect(page.locator("#input")).to_have_value("Four\n\ntyped")
    page.press("#input", "Enter")
    fake(page, "answer.say('Half')")
    send(page, "Five")
    expect(queued).to_have_text(["Five"])
    page.reload()
    expect(page.locator("#input")).to_have_value("Five")
    expect(page.locator("#queued")).to_be_hidden()


@in_browser
def test_the_oldest_turns_are_left_out_where_the_context_is_full(page: Page) -> None:
    marker = page.locator(".unseen")
    words = ("word " * 900).strip()
    exchange(page, "One", words)
    exchange(page, "Two", words)
    more = "Three " + ("more " * 250).strip()
    send(page, more)  # counted by the server: 2,048 tokens have no room for it
    assert sent(page) == ["Two", words, more]
    expect(marker).to_have_text(["The model no longer sees the messages above"])
    expect(page.locator(".message").nth(2)).to_contain_text("longer sees the messages above")
    shoot(page, "context-full")
    fake(page, "(answer.say('Yes'), answer.end())")
    answered(page, 3)
    page.reload()
    expect(marker).to_have_count(1)
    # The server may know better.
    send(page, "Four")
    assert sent(page) == ["Two", words, more, "Yes", "Four"]
    fake(page, "answer.fail('no room', 'context_length_exceeded')")
    page.wait_for_function("() => window.answers.length === 2")
    assert sent(page) == [more, "Yes", "Four"]
    expect(page.locator(".message").nth(4)).to_contain_text("longer sees the messages above")
    fake(page, "answer.fail('no room', 'context_length_exceeded')")
    page.wait_for_function("() => window.answers.length === 3")
    assert sent(page) == ["Four"]
    fake(page, "answer.fail('no room', 'context_length_exceeded')")
    expect(page.locator(".note.error")).to_contain_text("Failed: Too long for the context. no room")
    expect(marker).to_have_count(1)


# Holds back the opening of the database until `release()`.
HELD_STORE = """
const openDatabase = IDBFactory.prototype.open;
const isReleased = new Promise((resolve) => { window.release = resolve; });
IDBFactory.prototype.open = function (...given) {
  const request = openDatabase.apply(this, given);
  const listen = request.addEventListener.bind(request);
  request.addEventListener = (name, listener, ...more) => {
    const later = (event) => isReleased.then(() => listener.call(request, event));
    listen(name, name === "success" ? later : listener, ...more);
  };
  return request;
};
"""


@in_browser
def test_what_is_sent_while_the_page_loads_is_sent_in_the_chat_that_opens(visitor) -> None:
    page = visitor.open(fakes=True)
    send(page, "First")
    fake(page, "(answer.say('One'), answer.end())")
    answered(page)
    page.add_init_script(HELD_STORE)
    page.reload()
    page.locator("#input").fill("Second")
    page.locator("#input").press("Enter")
    page.locator("#input").press("Enter")  # it is sent once
    page.evaluate("() => window.release()")
    expect(page.locator(".user .text")).to_have_text(["First", "Second"])
    fake(page, "(answer.say('Two'), answer.end())")
    answered(page, 2)
    expect(page.locator("#input")).to_have_value("")
