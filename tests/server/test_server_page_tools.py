"""Tool calls, reasoning and JSON schemas on the chat page."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from support.page_helpers import answered, fake, in_browser, send, visiting

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 3}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.fixture
def page(chat: Page) -> Page:
    return chat


def call(page: Page, *calls: tuple[str, str]) -> None:
    """The answer that comes calls tools, each (name, arguments)."""
    for i, (name, arguments) in enumerate(calls):
        begin = {"index": i, "id": f"id{i}", "type": "function"}
        whole = [{**begin, "function": {"name": name, "arguments": ""}}]
        fake(page, f"answer.delta({json.dumps({'tool_calls': whole})})")
        for piece in (arguments[:5], arguments[5:]):
            part = [{"index": i, "function": {"arguments": piece}}]
            fake(page, f"answer.delta({json.dumps({'tool_calls': part})})")


@in_browser
def test_reasoning_is_open_while_it_comes_unless_the_reader_folds_it(page) -> None:
    send(page, "Think")
    fake(page, "answer.delta({ reasoning: 'First thought.' })")
    summary = page.locator(".reasoning summary")
    expect(summary).to_have_text("Reasoning…")
    expect(page.locator(".thought")).to_be_visible()
    summary.focus()
    page.keyboard.press("Enter")
    expect(page.locator(".thought")).to_be_hidden()
    fake(page, "answer.delta({ reasoning: ' Second thought.' })")
    expect(page.locator(".thought")).to_have_text("First thought. Second thought.")
    expect(page.locator(".thought")).to_be_hidden()
    page.keyboard.press("Space")
    fake(page, "(answer.say('Done.'), answer.end())")
    answered(page)
    expect(summary).to_have_text("Reasoning")
    expect(page.locator(".thought")).to_be_visible()  # the reader's choice holds
    page.reload()
    expect(summary).to_be_visible()
    expect(page.locator(".thought")).to_be_hidden()


@in_browser
def test_a_schema_is_checked_sent_and_what_the_server_says_of_it_shown(visitor) -> None:
    page = visitor.open()
    page.click("#open-settings")
    page.locator("#schema").fill('{"type": ')
    expect(page.locator("#wrong-schema")).to_contain_text(
        "This is not a JSON schema, so it is not sent"
    )
    expect(page.locator("#schema")).to_have_attribute("aria-invalid", "true")
    page.locator("#schema").fill("[]")
    expect(page.locator("#wrong-schema")).to_contain_text("must be an object")
    page.locator("#schema").fill(json.dumps({"type": "strange"}))
    expect(page.locator("#wrong-schema")).to_be_hidden()
    page.click("#close-settings")
    visitor.expected.append("400")
    send(page, "A number")
    expect(page.locator(".assistant .note")).to_contain_text("strange")
    answered(page)
    page.get_by_role("button", name="Edit JSON schema").click()
    expect(page.locator("#schema")).to_be_focused()
    expect(page.locator("#wrong-schema")).to_contain_text("The server refuses it")
    page.locator("#schema").fill(json.dumps(SCHEMA))
    expect(page.locator("#wrong-schema")).to_be_hidden()
    page.click("#close-settings")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".assistant .language")).to_have_text("json")
    answered(page)
    sent = visitor.bodies[-1]["response_format"]
    assert sent["type"] == "json_schema" and sent["json_schema"]["schema"] == SCHEMA
    code = page.locator(".assistant .code code").inner_text()
    assert json.loads(code)["n"] in (1, 2, 3) and code.startswith('{\n  "n": ')
    page.reload()
    page.click("#open-settings")
    expect(page.locator("#schema")).to_have_value(json.dumps(SCHEMA))
    page.get_by_role("button", name="Clear all").click()
    expect(page.locator("#schema")).to_have_value("")


@in_browser
def test_json_is_shown_as_it_is(page) -> None:
    send(page, "JSON")
    text = '{"big":12345678901234567890,"none":{},"list":[1,{"a":"b:,}"}],"hidden":"\u202ex"}'
    fake(page, f"(answer.say({json.dumps(text)}), answer.end())")
    answered(page)
    shown = page.locator(".assistant .code code").inner_text()
    assert shown.splitlines() == [
        "{",
        '  "big": 12345678901234567890,',
        '  "none": {},',
        '  "list": [',
        "    1,",
        "    {",
        '      "a": "b:,}"',
        "    }",
        "  ],",
        '  "hidden": "\\u202ex"',
        "}",
    ]
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text }")
    page.locator(".assistant .below").get_by_role("button", name="Copy").click()
    page.wait_for_function("(text) => window.copied === text", arg=text)


@in_browser
def test_a_call_of_a_tool_that_there_is_not_is_told_to_the_model(page) -> None:
    send(page, "Call it")
    fake(page, "answer.delta({ reasoning: 'A tool.' })")
    call(page, ("strange__tool", '{"a": "\u009b\\u001b"}'))
    fake(page, "answer.end('tool_calls')")
    messages = fake(page, "answer.body.messages")  # of the next request
    assert messages == [
        {"role": "user", "content": "Call it"},
        {
            "role": "assistant",
            "content": "",
            "reasoning": "A tool.",
            "tool_calls": [
                {
                    "id": "id0",
                    "type": "function",
                    "function": {"name": "strange__tool", "arguments": '{"a": "\u009b\\u001b"}'},
                }
            ],
        },
        {
            "role": "tool",
            "tool_call_id": "id0",
            "content": "Not run. There is no such tool in this chat.",
        },
    ]
    fake(page, "(answer.say('A pity.'), answer.end())")
    answered(page, 2)
    folded = page.locator(".call details")
    expect(folded).not_to_have_attribute("open", "")
    expect(folded.locator("summary")).to_have_text("strange__tool Failed")
    folded.locator("summary").click()
    expect(folded.locator("pre").first).to_have_text('{\n  "a": "\\u009b\\u001b"\n}')
    expect(folded.locator("pre").last).to_contain_text("There is no such tool")
    page.reload()
    expect(folded.locator("summary")).to_have_text("strange__tool Failed")
    send(page, "And now?")
    again = fake(page, "answer.body.messages")
    assert again[: len(messages)] == messages and again[3:] == [
        {"role": "assistant", "content": "A pity."},
        {"role": "user", "content": "And now?"},
    ]
    fake(page, "answer.end()")


@in_browser
def test_a_call_that_was_cut_is_shown_and_not_sent(page) -> None:
    send(page, "Call it")
    call(page, ("strange__tool", '{"a": [1, '))
    fake(page, "(answer.say('I call.'), answer.end('length'))")
    expect(page.locator(".call summary")).to_have_text("strange__tool Failed")
    answered(page)
    expect(page.get_by_role("button", name="Send the results")).to_have_count(0)
    send(page, "Well?")
    messages: list[Any] = fake(page, "answer.body.messages")
    assert [m["content"] for m in messages] == ["Call it", "I call.", "Well?"]
    assert "tool_calls" not in messages[1]
    fake(page, "answer.end()")


@in_browser
def test_chats_of_the_page_before_are_shown_sent_and_imported(
    visitor, browser, page_server
) -> None:
    """Records and files without calls and tools."""
    page = visitor.open(fakes=True)
    message = {"role": "user", "content": "Old?", "reasoning": "", "status": "done", "error": None,
               "finish": None, "stats": None, "model": None, "created": 1}  # fmt: skip
    answer = {**message, "role": "assistant", "content": "Old."}
    messages = [{**message, "id": "m1", "parent": None}, {**answer, "id": "m2", "parent": "m1"}]
    chat = {"id": "c1", "title": None, "leaf": "m2", "created": 1, "used": 1}
    page.evaluate(
        """async ([chat, messages]) => {
          const db = await new Promise((done) => {
            const request = indexedDB.open("mlx-paged");
            request.onsuccess = () => done(request.result);
          });
          const tx = db.transaction(["chats", "messages"], "readwrite");
          tx.objectStore("chats").put({ ...chat, deleted: null, updated: 1 });
          for (const m of messages) {
            tx.objectStore("messages").put({ ...m, chat: chat.id, owner: null, updated: 1 });
          }
          await new Promise((done) => { tx.oncomplete = done; });
          db.close();
        }""",
        [chat, messages],
    )
    page.reload()
    page.get_by_role("button", name="Old?").first.click()
    expect(page.locator(".assistant .text")).to_have_text("Old.")
    send(page, "New?")
    sent = [m["content"] for m in fake(page, "answer.body.messages")]
    assert sent == ["Old?", "Old.", "New?"]
    fake(page, "answer.end()")
    with visiting(browser, page_server) as elsewhere:
        fresh = elsewhere.open()
        fresh.click("#open-settings")
        for version, told in (
            (1, "Imported 1 chat: 2 new messages."),
            (5, "version must be 1, 2, 3 or 4"),
        ):
            file = {"format": "mlx-paged-chats", "version": version,
                    "chats": [{**chat, "messages": messages}]}  # fmt: skip
            body = {"name": "x.json", "mimeType": "application/json",
                    "buffer": json.dumps(file).encode()}  # fmt: skip
            fresh.locator("#import-file").set_input_files(body)
            expect(fresh.locator("#import-state")).to_contain_text(told)


@in_browser
def test_what_is_not_enforced_of_a_schema_is_told_beside_the_answer(visitor) -> None:
    page = visitor.open()
    page.click("#open-settings")
    numbers = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": True}
    schema = {**SCHEMA, "properties": {"n": numbers}}
    page.locator("#schema").fill(json.dumps(schema))
    page.click("#close-settings")
    send(page, "Numbers")
    answered(page)
    note = page.locator(".assistant .note")
    told = "Not enforced parts of the schema: properties.n.uniqueItems."
    expect(note).to_have_text(told)
    page.reload()
    expect(note).to_have_text(told)
    page.click("#open-settings")
    page.locator("#schema").fill(json.dumps(SCHEMA))
    page.click("#close-settings")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".assistant .branches")).to_contain_text("2/2")
    answered(page)
    expect(note).to_be_hidden()
