"""The chat page with long chats, many chats and long texts: counts of its work, not times."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from support.page_helpers import Visitor, answered, fake, in_browser, saved, send

NUM_MESSAGES = 280
# Reads of what lays out the page, and transactions that write.
COUNTERS = """
window.layouts = 0;
for (const name of ["scrollHeight", "scrollTop", "clientHeight", "offsetHeight"]) {
  const owner = name === "offsetHeight" ? HTMLElement.prototype : Element.prototype;
  const { get, set } = Object.getOwnPropertyDescriptor(owner, name);
  Object.defineProperty(owner, name, {
    configurable: true, set,
    get() {
      window.layouts += 1;
      return get.call(this);
    },
  });
}
// Messages of other tabs; while this one is deaf, they wait for the next transaction that writes.
const unheard = [];
const hear = () => {
  window.isDeaf = false;
  for (const does of unheard.splice(0)) does();
};
const listen = BroadcastChannel.prototype.addEventListener;
BroadcastChannel.prototype.addEventListener = function (name, listener) {
  listen.call(this, name, (event) => {
    if (window.isDeaf) unheard.push(() => listener(event));
    else listener(event);
  });
};
window.transactions = 0;
const transaction = IDBDatabase.prototype.transaction;
IDBDatabase.prototype.transaction = function (stores, mode, ...more) {
  if (mode === "readwrite") {
    window.transactions += 1;
    if (window.isDeaf) queueMicrotask(hear);
  }
  return transaction.call(this, stores, mode, ...more);
};
"""


def exported(num_chats: int, num_messages: int) -> dict[str, Any]:
    """Chats as a file has them; questions and answers take turns."""
    chats = []
    for i in range(num_chats):
        messages: list[dict[str, Any]] = []
        for j in range(num_messages):
            is_question = j % 2 == 0
            answer = f"## Answer {j}\n\n```python\nx = {j}\n```\n\n" + "word " * 40
            messages.append(
                {
                    "id": f"c{i}-m{j}", "parent": messages[-1]["id"] if messages else None,
                    "role": "user" if is_question else "assistant",
                    "content": f"Question {j} of chat {i}" if is_question else answer,
                    "reasoning": "", "calls": [], "media": [], "status": "done", "error": None,
                    "finish": None, "stats": None, "model": None, "created": j,
                }
            )  # fmt: skip
        chats.append(
            {
                "id": f"c{i}", "title": None, "leaf": messages[-1]["id"], "created": 1, "used": i,
                "tools": [], "messages": messages, "media": [],
            }
        )  # fmt: skip
    return {"format": "mlx-paged-chats", "version": 3, "chats": chats}


def import_chats(page: Page, content: Any) -> None:
    page.click("#open-settings")
    file = {
        "name": "x.json",
        "mimeType": "application/json",
        "buffer": json.dumps(content).encode(),
    }
    page.locator("#import-file").set_input_files(file)
    expect(page.locator("#import-state")).to_contain_text("Imported")
    page.click("#close-settings")


@pytest.fixture
def page(visitor: Visitor) -> Page:
    visitor.context.add_init_script(COUNTERS)
    return visitor.open(fakes=True)


@in_browser
def test_a_long_chat_is_laid_out_a_few_times_for_an_answer(page: Page) -> None:
    import_chats(page, exported(1, NUM_MESSAGES))
    page.get_by_role("button", name="Question 0 of chat 0", exact=True).click()
    expect(page.locator(".message")).to_have_count(NUM_MESSAGES)
    expect(page.locator(".message .code").last).to_be_visible()
    page.evaluate("() => { window.layouts = 0; }")
    send(page, "One more")
    fake(page, "answer.say('Here it is')")
    fake(page, "answer.end()")
    answered(page, NUM_MESSAGES // 2 + 1)
    expect(page.locator(".message").last).to_contain_text("Here it is")
    assert page.evaluate("() => window.layouts") < NUM_MESSAGES / 4
    box = page.locator("#scroll").evaluate("e => e.scrollHeight - e.scrollTop - e.clientHeight")
    assert box < 80  # the end is in view


@in_browser
def test_an_answer_changes_only_its_own_messages(page: Page) -> None:
    """Start, stop and end of an answer touch no message above, and measure no text twice."""
    num_messages = 100
    import_chats(page, exported(1, num_messages))
    page.get_by_role("button", name="Question 0 of chat 0", exact=True).click()
    expect(page.locator(".message")).to_have_count(num_messages)
    page.keyboard.press("Control+f")  # so that all have buttons
    expect(page.locator(".message.filled")).to_have_count(num_messages)
    edits = page.get_by_role("button", name="Edit", exact=True)
    expect(edits).not_to_have_count(0)
    page.evaluate(
        """() => {
          window.changed = new Set();
          window.blobs = 0;
          const Known = Blob;
          window.Blob = class extends Known {
            constructor(...given) {
              super(...given);
              window.blobs += 1;
            }
          };
          new MutationObserver((changes) => {
            for (const { target } of changes) {
              const message = target.closest?.(".message");
              if (message) window.changed.add(message.id);
            }
          }).observe(document.getElementById("messages"), {
            childList: true, subtree: true, attributes: true,
          });
        }"""
    )
    send(page, "One more")
    fake(page, "answer.say('Here it is')")
    expect(page.locator(".message").last).to_contain_text("Here it is")
    expect(edits).to_have_count(0)  # while it comes
    fake(page, "answer.end()")
    answered(page, num_messages // 2 + 1)
    expect(edits).not_to_have_count(0)
    send(page, "And more")
    fake(page, "answer.say('Here')")
    expect(page.locator(".message").last).to_contain_text("Here")
    page.click("#stop")
    answered(page, num_messages // 2 + 2)
    # Four new ones, and those that were the last before them.
    assert page.evaluate("() => window.changed.size") <= 8
    assert page.evaluate("() => window.blobs") < 20


# Most messages that one stretch of script places and fills. `settle` waits for 100 idle callbacks.
STRETCHES = """
window.mostPlaced = window.mostFilled = 0;
const isFilled = (name) => /\\bfilled\\b/.test(name);
new MutationObserver((changes) => {
  let placed = 0;
  let filled = 0;
  for (const { type, addedNodes, target, oldValue } of changes) {
    for (const node of addedNodes) placed += node.classList?.contains("message") ? 1 : 0;
    if (type === "attributes" && !isFilled(oldValue) && isFilled(target.className)) filled += 1;
  }
  window.mostPlaced = Math.max(window.mostPlaced, placed);
  window.mostFilled = Math.max(window.mostFilled, filled);
}).observe(document, {
  childList: true, subtree: true, attributeFilter: ["class"], attributeOldValue: true,
});
// Messages that are read from the database at once.
window.mostRead = 0;
const getAll = IDBObjectStore.prototype.getAll;
IDBObjectStore.prototype.getAll = function (...given) {
  const request = getAll.apply(this, given);
  request.addEventListener("success", () => {
    const { length } = request.result;
    if (this.name === "messages") window.mostRead = Math.max(window.mostRead, length);
  });
  return request;
};
window.settle = async () => {
  for (let i = 0; i < 100; i += 1) await new Promise((done) => { requestIdleCallback(done); });
};
"""
FILLED = "() => document.querySelectorAll('.message.filled').length"


def open_long_chat(page: Page, *chats: dict[str, Any]) -> None:
    content = exported(1, NUM_MESSAGES)
    content["chats"] += chats
    import_chats(page, content)
    page.get_by_role("button", name="Question 0 of chat 0", exact=True).click()
    expect(page.locator(".message")).to_have_count(NUM_MESSAGES)


@in_browser
def test_only_messages_near_the_view_are_drawn(page: Page, visitor: Visitor) -> None:
    visitor.context.add_init_script(STRETCHES)
    open_long_chat(page)
    page.reload()
    expect(page.locator(".message")).to_have_count(NUM_MESSAGES)
    expect(page.locator(".message .code").last).to_be_visible()
    page.evaluate("() => window.settle()")
    assert 4 <= page.evaluate(FILLED) < 40
    page.locator("#scroll").evaluate("(box) => { box.scrollTop = 0; }")
    expect(page.locator("#message-c0-m1 .code")).to_be_visible()
    page.evaluate("() => window.settle()")
    assert page.evaluate(FILLED) < 80
    assert 0 < page.evaluate("() => window.mostRead") <= 250
    assert 0 < page.evaluate("() => window.mostPlaced") <= 60
    assert 0 < page.evaluate("() => window.mostFilled") <= 12
    order = page.locator(".message").evaluate_all("(all) => all.map((item) => item.id)")
    assert order == [f"message-c0-m{i}" for i in range(NUM_MESSAGES)]
    page.keyboard.press("Control+f")
    expect(page.locator(".message.filled")).to_have_count(NUM_MESSAGES)
    assert page.evaluate("() => window.mostFilled") <= 12


@in_browser
def test_the_browser_has_texts_that_are_not_drawn(page: Page) -> None:
    open_long_chat(page)
    message = page.locator("#message-c0-m101")
    expect(message.locator(".code")).to_have_count(0)
    expect(message.locator(".text")).to_contain_text("## Answer 101\n\n```python")
    message.evaluate("(item) => item.scrollIntoView()")  # as the browser's search does
    expect(message.locator(".code")).to_be_visible()
    expect(message.locator(".text")).not_to_contain_text("```")
    expect(page.locator("#message-c0-m201 .code")).to_have_count(0)
    page.locator("#scroll").evaluate("() => document.activeElement.blur()")
    page.keyboard.press("Control+a")
    expect(page.locator(".message.filled")).to_have_count(NUM_MESSAGES)


@in_browser
def test_a_chat_that_goes_while_chats_are_read_stays_away(page: Page) -> None:
    import_chats(page, exported(2, NUM_MESSAGES))
    # Another tab deletes one for good after the first read.
    page.add_init_script(
        """
        const getAll = IDBObjectStore.prototype.getAll;
        IDBObjectStore.prototype.getAll = function (...given) {
          if (this.name === "messages" && given[0]) {
            new BroadcastChannel("mlx-paged").postMessage({ gone: ["c0"] });
          }
          return getAll.apply(this, given);
        };
        """
    )
    page.reload()
    expect(page.locator("#chats .title")).to_have_text(["Question 0 of chat 1"])
    page.evaluate("() => new Promise((done) => { requestIdleCallback(done); })")
    expect(page.locator("#chats .title")).to_have_text(["Question 0 of chat 1"])


@in_browser
def test_paper_has_the_whole_chat(page: Page) -> None:
    open_long_chat(page)
    pages = page.pdf(format="A4").count(b"/Type /Page\n")
    assert page.evaluate(FILLED) == NUM_MESSAGES
    assert pages > 10


@in_browser
def test_a_hit_far_up_is_scrolled_to_unless_another_chat_is_opened(page: Page) -> None:
    [other] = exported(2, 4)["chats"][1:]
    open_long_chat(page, other)
    page.locator("#search").fill("Question")
    hit = page.locator("#chats [data-chat=c0] .title")
    expect(page.locator("#chats .snippet")).to_have_count(2)
    # The older messages are not placed in the task that opens the chat.
    page.evaluate(
        """() => {
          for (const chat of ["c1", "c0", "c1"]) {
            document.querySelector(`#chats [data-chat=${chat}] .title`).click();
          }
        }"""
    )
    expect(page.locator(".message")).to_have_count(4)
    expect(page.locator("#title")).to_have_text("Question 0 of chat 1")
    hit.press("Enter")
    expect(page.locator("#message-c0-m0")).to_be_in_viewport()
    expect(page.locator("#message-c0-m1 .code")).to_be_visible()
    expect(page.locator(".message")).to_have_count(NUM_MESSAGES)


@in_browser
def test_another_version_far_up_is_shown_and_keeps_the_focus(page: Page) -> None:
    content = exported(1, NUM_MESSAGES)
    [chat] = content["chats"]
    parent = "c0-m1"
    for i in range(2, NUM_MESSAGES):
        copy = {**chat["messages"][i], "id": f"new-m{i}", "parent": parent, "created": 1000 + i}
        chat["messages"].append(copy)
        parent = copy["id"]
    chat["leaf"] = parent
    import_chats(page, content)
    page.get_by_role("button", name="Question 0 of chat 0", exact=True).click()
    expect(page.locator(".message")).to_have_count(NUM_MESSAGES)
    page.locator("#message-new-m2").scroll_into_view_if_needed()
    page.locator("#message-new-m2").get_by_role("button", name="Previous version").click()
    expect(page.locator("#message-c0-m2 .arrow:focus")).to_have_accessible_name("Next version")
    expect(page.locator(".message")).to_have_count(NUM_MESSAGES)
    order = page.locator(".message").evaluate_all("(all) => all.map((item) => item.id)")
    assert order == [f"message-c0-m{i}" for i in range(NUM_MESSAGES)]


@in_browser
def test_tab_reaches_the_buttons_of_messages_that_were_not_drawn(page: Page) -> None:
    open_long_chat(page)
    page.locator("#input").focus()
    reached: list[str] = []
    while len(reached) < 16:
        page.keyboard.press("Shift+Tab")
        item = page.evaluate("() => document.activeElement.closest('.message')?.id")
        if item and item not in reached:
            reached.append(item)
        assert item or not reached, reached
    assert reached == [f"message-c0-m{NUM_MESSAGES - 1 - i}" for i in range(16)]
    # Also before the browser has drawn what the focus scrolled to.
    reached = page.evaluate(
        """() => {
          const reached = [];
          let item = document.querySelector(".message.filled");
          for (let i = 0; i < 50; i += 1) {
            item.querySelector("button").focus();
            item = item.previousElementSibling;
            if (!item.querySelector("button")) break;
            reached.push(item.id);
          }
          return reached;
        }"""
    )
    assert len(reached) == 50


@in_browser
def test_many_chats_are_imported_in_few_transactions(page: Page) -> None:
    page.evaluate(
        """() => {
          const state = document.getElementById("import-state");
          window.told = [];
          const observer = new MutationObserver(() => window.told.push(state.textContent));
          observer.observe(state, { childList: true });
        }"""
    )
    page.evaluate("() => { window.transactions = 0; }")
    import_chats(page, exported(60, 20))
    assert page.evaluate("() => window.transactions") <= 4
    told = page.evaluate("() => window.told")
    assert told[-1] == "Imported 60 chats: 1200 new messages."
    assert any(text.startswith("Importing… ") and text.endswith(" of 60 chats.") for text in told)
    page.reload()
    expect(page.locator("#chats li")).to_have_count(60)


@in_browser
def test_math_that_does_not_end_is_read_once(page: Page) -> None:
    """The characters that searches for closing marks look at grow with the text, not its square."""
    scanned = """async ([piece, count]) => {
      const { Markdown } = await import("./web/markdown.js");
      const indexOf = String.prototype.indexOf;
      let scanned = 0;
      String.prototype.indexOf = function (mark, from = 0) {
        const place = indexOf.call(this, mark, from);
        scanned += (place < 0 ? this.length : place) - from;
        return place;
      };
      try {
        new Markdown(document.createElement("div")).update(`Text ${piece.repeat(count)}`, true);
      } finally {
        String.prototype.indexOf = indexOf;
      }
      return scanned;
    }"""
    for piece in ("\\(", "$a\\$", "$$a ", "\\[\n", "\\[ a\n", "$x"):
        few, many = (page.evaluate(scanned, [piece, count]) for count in (400, 3200))
        assert many < 16 * max(few, 400 * len(piece)), piece  # 8 times the text


@in_browser
def test_prose_is_not_taken_for_python(page: Page) -> None:
    drawn = """async (text) => {
      const { Markdown } = await import("./web/markdown.js");
      const box = document.createElement("div");
      new Markdown(box).update(text, true);
      return box.innerHTML;
    }"""
    for text, is_code in (
        ("@John, here is the **summary**:\n\n- one", False),
        ("from Monday on import **duties** are higher.", False),
        ("import duties are higher", False),
        ("@cache\ndef f(x):\n    return x", True),
        ("from math import pi as p, e\nprint(p)", True),
    ):
        assert ("<pre" in page.evaluate(drawn, text)) == is_code, text


@in_browser
def test_keys_of_an_input_method_neither_send_nor_stop(page: Page) -> None:
    press = """([key, keyCode, isComposing]) => {
      const options = { key, isComposing, bubbles: true, cancelable: true };
      const event = new KeyboardEvent("keydown", options);
      Object.defineProperty(event, "keyCode", { value: keyCode });
      document.getElementById("input").dispatchEvent(event);
    }"""
    page.fill("#input", "にほん")
    page.evaluate(press, ["Enter", 229, False])  # Safari, after the composition
    page.evaluate(press, ["Enter", 13, True])
    expect(page.locator("#input")).to_have_value("にほん")
    page.press("#input", "Enter")
    fake(page, "answer.say('Yes')")
    page.evaluate(press, ["Escape", 27, True])
    page.evaluate(press, ["Escape", 229, False])
    fake(page, "answer.say(' and more')")
    expect(page.locator(".assistant .text")).to_contain_text("Yes and more")
    page.press("#input", "Escape")
    expect(page.locator(".assistant .stats")).to_contain_text("stopped")


@in_browser
def test_two_tabs_that_send_at_once_are_both_answered(page: Page, visitor: Visitor) -> None:
    send(page, "The first question")
    fake(page, "answer.say('First answer')")
    fake(page, "answer.end()")
    answered(page)
    other = visitor.open(fakes=True)
    other.get_by_role("button", name="The first question").first.click()
    # The other tab hears of the first one's question when its own is already on its way.
    other.evaluate("() => { window.isDeaf = true; }")
    send(page, "From tab one")
    fake(page, "answer.say('For tab one')")
    saved(page, "For tab one")
    send(other, "From tab two")
    fake(other, "answer.say('For tab two')")
    assert not other.evaluate("() => window.isDeaf")
    for tab in (page, other):
        fake(tab, "answer.end()")
    expect(page.locator(".assistant.busy")).to_have_count(0)
    expect(other.locator(".assistant.busy")).to_have_count(0)
    page.reload()
    found = page.evaluate(
        """() => new Promise((done) => {
          indexedDB.open("mlx-paged").onsuccess = ({ target: { result: db } }) => {
            db.transaction("messages").objectStore("messages").getAll().onsuccess = (event) => {
              db.close();
              done(event.target.result.map(({ content, status }) => `${content} ${status}`));
            };
          };
        })"""
    )
    assert {"For tab one done", "For tab two done"} <= set(found)


def foreign_node(key: str, parent: str | None, role: str, *parts: Any) -> dict[str, Any]:
    """A node of ChatGPT's export."""
    message = {
        "author": {"role": role}, "create_time": 1.5, "metadata": {"model_slug": "gpt"},
        "content": {"content_type": "text", "parts": list(parts)},
    }  # fmt: skip
    return {"id": key, "parent": parent, "children": [], "message": message}


@in_browser
def test_exports_of_chatgpt_and_open_webui_are_imported(page: Page) -> None:
    nodes = [
        {"id": "root", "parent": None, "children": [], "message": None},
        foreign_node("s", "root", "system", ""),
        foreign_node("q", "s", "user", {"asset_pointer": "file"}, "What is it?"),
        foreign_node("a1", "q", "assistant", "An old answer"),
        foreign_node("t", "q", "tool", "searched"),
        foreign_node("a2", "t", "assistant", "A newer answer"),
    ]
    chatgpt = [
        {
            "id": "x", "title": "From ChatGPT", "create_time": 10, "update_time": 20,
            "mapping": {node["id"]: node for node in nodes}, "current_node": "a2",
        }
    ]  # fmt: skip
    messages = {
        "m1": {"id": "m1", "parentId": None, "role": "user", "content": "Hello", "timestamp": 3},
        "m2": {"id": "m2", "parentId": "m1", "role": "assistant", "content": "Hi", "timestamp": 4},
    }
    open_webui = [
        {
            "id": "y", "title": "From Open WebUI", "created_at": 1, "updated_at": 2,
            "chat": {"history": {"messages": messages, "currentId": "m2"}},
        }
    ]  # fmt: skip
    for content in (chatgpt, open_webui, chatgpt):
        import_chats(page, content)
    expect(page.locator("#import-state")).to_have_text("Imported 1 chat: 0 new messages.")
    expect(page.locator("#chats .title")).to_have_text(["From ChatGPT", "From Open WebUI"])
    page.get_by_role("button", name="From ChatGPT", exact=True).click()
    expect(page.locator(".user .text")).to_have_text("[attachment]\n\nWhat is it?")
    expect(page.locator(".assistant .text")).to_have_text("A newer answer")
    expect(page.locator(".assistant .branches")).to_contain_text("2/2")
    page.get_by_role("button", name="From Open WebUI", exact=True).click()
    expect(page.locator(".message .text")).to_have_text(["Hello", "Hi"])


def table(num_columns: int, num_rows: int) -> str:
    def row(cell: str) -> str:
        return f"|{'|'.join(f'{cell}{i}' for i in range(num_columns))}|\n"

    rule = f"|{'---|' * num_columns}\n"
    return row("h") + rule + "".join(row("c") for _ in range(num_rows))


@in_browser
def test_a_wide_table_is_cut_until_all_of_it_is_asked_for(visitor: Visitor) -> None:
    page = visitor.open(fakes=True)
    send(page, "A table")
    # All cells that ever were, also of drawings that were replaced.
    page.evaluate(
        """() => {
          window.cells = 0;
          const count = (node) => node.nodeType === 1
            && (node.matches("td, th") ? 1 : node.querySelectorAll("td, th").length);
          new MutationObserver((changes) => {
            for (const { addedNodes } of changes) {
              for (const node of addedNodes) window.cells += count(node) || 0;
            }
          }).observe(document.getElementById("messages"), { childList: true, subtree: true });
        }"""
    )
    text = table(500, 3)
    step = len(text) // 6
    cells = page.locator(".assistant :is(td, th)")
    for begin in range(0, len(text), step):
        fake(page, f"answer.say({json.dumps(text[begin : begin + step])})")
    expect(cells).to_have_count(400)
    fake(page, "answer.end()")
    answered(page)
    expect(page.locator(".cut")).to_have_text("The first 100 of 500 columns are shown. Show all")
    expect(cells.nth(99)).to_have_text("h99")
    expect(cells.nth(100)).to_have_text("c0")
    # Each drawing has at most 100 columns.
    assert 400 <= page.evaluate("window.cells") <= 400 * 9
    page.get_by_role("button", name="Show all", exact=True).click()
    expect(cells).to_have_count(2000)
    expect(page.locator(".cut")).to_have_count(0)
    page.reload()
    expect(cells).to_have_count(400)

    # Others are whole, also beside a wide one.
    send(page, "More")
    fake(page, f"answer.say({json.dumps(table(100, 1) + chr(10) + table(101, 1))})")
    fake(page, "answer.end()")
    answered(page, 2)
    tables = page.locator(".assistant").last.locator("table")
    for i in range(2):
        expect(tables.nth(i).locator("th, td")).to_have_count(200)
    expect(page.locator(".assistant").last.locator(".cut")).to_have_count(1)
