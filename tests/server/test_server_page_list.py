"""The list of chats: titles written by the model, pins and folders, search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect
from support.page_helpers import answered, fake, in_browser, send, visiting


def talk(page: Page, question: str, answer: str = "Yes.", count: int = 1) -> None:
    send(page, question)
    fake(page, f"(answer.say({json.dumps(answer)}), answer.end())")
    answered(page, count)


def menu(page: Page, title: str, item: str) -> None:
    page.get_by_label(f"Menu of {title}").click()
    page.get_by_role("menuitem", name=item, exact=True).click()


def asked(page: Page, count: int) -> None:
    page.wait_for_function("(count) => window.answers.length === count", arg=count)


@in_browser
def test_the_model_writes_titles_when_nothing_else_runs(browser, page_server) -> None:
    with visiting(browser, page_server, titles=True) as visitor:
        page = visitor.open(fakes=True)
        talk(page, "How do bees fly?", "They beat their wings.")
        asked(page, 2)
        body = page.evaluate("window.answers[1].body")
        assert "stream" not in body and body["max_tokens"] <= 32 and body["stop"] == ["\n"]
        assert "bees fly" in body["messages"][1]["content"]
        send(page, "And birds?")
        asked(page, 3)  # it comes first
        assert page.evaluate("window.answers[1].over")
        fake(page, "(answer.say('Them, too.'), answer.end())")
        asked(page, 4)
        page.evaluate("window.answers[3].reply('**How Bees Fly.**')")
        expect(page.locator("#chats .title")).to_have_text("How Bees Fly")
        page.click("#new-chat")
        talk(page, "Why?")
        asked(page, 6)
        menu(page, "Why?", "Rename")
        page.keyboard.type("Mine")
        page.keyboard.press("Enter")
        page.evaluate("window.answers[5].reply('Not this')")
        page.click("#open-settings")
        page.locator("#write-titles").uncheck()
        page.click("#close-settings")
        page.click("#new-chat")
        talk(page, "No title, please")
        for _ in range(2):
            with page.expect_response("**/server_info"):
                pass
        expect(page.locator("#chats .title")).to_have_text(
            ["No title, please", "Mine", "How Bees Fly"]
        )
        asked(page, 7)


def many_chats(count: int, length: int) -> dict[str, Any]:
    """An export whose chats have the word "zebra" in one message of each hundredth chat."""
    chats = []
    for i in range(count):
        messages = [
            {
                "id": f"c{i}-{j}", "parent": f"c{i}-{j - 1}" if j else None,
                "role": "assistant" if j % 2 else "user", "created": j, "reasoning": "",
                "content": f"Text {j} of chat {i}. " + "Some more words. " * 30
                + ("A **zebra** (i+1) here." if i % 100 == 7 and j == 11 else ""),
                "calls": [], "media": [], "status": "done", "error": None, "finish": None,
                "stats": None, "model": None, "edited": False, "from": None,
            }
            for j in range(length)
        ]  # fmt: skip
        chats.append(
            {
                "id": f"c{i}", "title": f"Chat {i}", "leaf": messages[-1]["id"], "created": 1,
                "used": i + 1, "tools": [], "parameters": None, "pinned": False, "folder": None,
                "messages": messages, "media": [],
            }
        )  # fmt: skip
    return {"format": "mlx-paged-chats", "version": 4, "chats": chats}


@in_browser
def test_a_search_of_many_chats_marks_hits_and_does_not_block(visitor, tmp_path: Path) -> None:
    page = visitor.open(fakes=True)
    (tmp_path / "many.json").write_text(json.dumps(many_chats(300, 14)))
    page.locator("#import-file").set_input_files(tmp_path / "many.json")
    expect(page.locator("#import-state")).to_contain_text("Imported 300 chats")
    # Slices are counted, not timed: the machine may be busy, or fast enough for a single one.
    page.evaluate("""() => {
      let now = performance.now();
      performance.now = () => now += 3;
      window.slices = 0;
      const later = window.setTimeout;
      window.setTimeout = (does, ...delay) => {
        if (!delay.length) window.slices += 1;
        return later(does, ...delay);
      };
    }""")
    page.locator("#search").press_sequentially("ZEBRA (i+1)")
    titles = page.locator("#chats .title")
    expect(titles).to_have_text([f"Chat {i}" for i in (207, 107, 7)])
    assert page.evaluate("window.slices") > 1
    expect(page.locator("#chats .snippet mark").first).to_have_text("zebra")
    titles.nth(1).click()
    expect(page.locator("#message-c107-11 strong")).to_be_in_viewport()
    page.wait_for_function(
        """() => [...CSS.highlights.get("search") ?? []].map(String).join() === "zebra,(i+1)" """
    )
    page.locator("#search").fill("no such word")
    expect(page.locator("#no-chats")).to_have_text("No chats match.")
    page.locator("#search").fill("")
    page.wait_for_function("() => !CSS.highlights.has('search')")


@in_browser
def test_pins_and_folders_stay_and_travel(visitor, tmp_path: Path) -> None:
    page = visitor.open(fakes=True)
    for question in ("First", "Second", "Third"):
        page.click("#new-chat")
        talk(page, question)
    menu(page, "First", "Pin")
    menu(page, "Second", "Move to folder")
    page.keyboard.type("Work")
    page.keyboard.press("Enter")
    groups = page.locator("#chats .group")
    expect(groups.locator("summary .group-name")).to_have_text(["Pinned", "Work"])
    expect(page.locator("#chats .title")).to_have_text(["First", "Second", "Third"])
    page.locator("summary", has_text="Work").press("Enter")
    expect(page.get_by_role("button", name="Second", exact=True)).to_be_hidden()
    page.wait_for_function("() => localStorage['mlx-paged.collapsed']?.includes('Work')")
    page.reload()
    expect(page.get_by_role("button", name="First", exact=True)).to_be_visible()
    expect(page.get_by_role("button", name="Second", exact=True)).to_be_hidden()
    page.click("#open-settings")
    with page.expect_download() as download:
        page.click("#export")
    download.value.save_as(tmp_path / "chats.json")
    page.click("#delete-all")
    expect(page.locator("#no-chats")).to_be_visible()
    file = json.loads((tmp_path / "chats.json").read_text())
    for chat in file["chats"]:  # as if they came from another browser
        chat["id"] += "-b"
        ids = {m["id"]: m["id"] + "-b" for m in chat["messages"]} | {None: None}
        chat["leaf"] = ids[chat["leaf"]]
        for message in chat["messages"]:
            message.update(id=ids[message["id"]], parent=ids[message["parent"]])
    (tmp_path / "others.json").write_text(json.dumps(file))
    page.locator("#import-file").set_input_files(tmp_path / "others.json")
    expect(groups.locator("summary .group-name")).to_have_text(["Pinned", "Work"])
    menu(page, "First", "Unpin")
    page.locator("summary", has_text="Work").click()
    menu(page, "Second", "Move to folder")
    page.keyboard.press("Delete")
    page.keyboard.press("Enter")
    expect(groups).to_have_count(0)
