"""Export of all chats into a folder on the chat page."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from support.page_helpers import (
    FOREIGN_HOST,
    Visitor,
    answered,
    fake,
    file,
    in_browser,
    send,
    visiting,
)

# No test can use the browser's dialog: a folder of the page's own storage is chosen instead.
PICKER = """
window.asked = 0;
window.showDirectoryPicker = async (options) => {
  if (options.mode !== "readwrite") throw new Error("not to be written");
  window.asked += 1;
  const root = await navigator.storage.getDirectory();
  return root.getDirectoryHandle("backup", { create: true });
};
"""
READ = """async () => {
  const root = await navigator.storage.getDirectory();
  const folder = await root.getDirectoryHandle("backup");
  const found = {};
  for await (const [name, handle] of folder.entries()) {
    found[name] = await (await handle.getFile()).text();
  }
  return found;
}"""


@pytest.fixture
def page(visitor: Visitor) -> Page:
    visitor.context.add_init_script(PICKER)
    return visitor.open(fakes=True)


def chat(page: Page, question: str, answer: str) -> None:
    send(page, question)
    fake(page, f"(answer.say({json.dumps(answer)}), answer.end())")
    answered(page, page.locator("#messages .assistant").count())


def files(page: Page) -> dict[str, dict[str, Any]]:
    return {name: json.loads(text) for name, text in page.evaluate(READ).items()}


@in_browser
def test_a_folder_is_chosen_once_and_chats_keep_their_files(page: Page, browser, visitor) -> None:
    chat(page, "First/chat", "One")
    page.click("#new-chat")
    chat(page, "Second", "Two")
    page.click("#open-settings")
    page.get_by_role("button", name="Export to a folder…").click()
    state = page.locator("#export-state")
    expect(state).to_have_text("Exported 2 chats to “backup”.")
    found = files(page)
    names = sorted(found)
    assert [name.split()[0] for name in names] == ["First-chat", "Second"]
    assert found[names[0]]["format"] == "mlx-paged-chats"

    # After a reload the folder is still known, and a changed chat has one file.
    page.reload()
    page.click("#open-settings")
    page.get_by_role("button", name="Export to “backup”").wait_for()
    page.click("#close-settings")
    chat(page, "More", "Three")
    page.click("#open-settings")
    page.get_by_role("button", name="Export to “backup”").click()
    expect(state).to_have_text("Exported 2 chats to “backup”.")
    assert page.evaluate("window.asked") == 0  # since the reload
    again = files(page)
    assert sorted(again) == names
    changed = [name for name in names if "Three" in json.dumps(again[name])]
    assert len(changed) == 1

    # Each file can be imported.
    with visiting(browser, visitor) as elsewhere:
        fresh = elsewhere.open()
        fresh.click("#open-settings")
        content = json.dumps(again[names[0]]).encode()
        fresh.locator("#import-file").set_input_files(file("x.json", "application/json", content))
        expect(fresh.locator("#import-state")).to_contain_text("Imported 1 chat")


@in_browser
def test_errors_are_said(page: Page) -> None:
    chat(page, "First", "One")
    page.click("#open-settings")
    state = page.locator("#export-state")
    page.evaluate("() => { window.kept = window.showDirectoryPicker; }")
    page.evaluate(
        "() => { window.showDirectoryPicker = () => { throw new DOMException('', 'AbortError') } }"
    )
    page.click("#export-folder")
    expect(page.locator("#export-folder")).to_be_enabled()
    expect(state).to_be_empty()
    page.evaluate("() => { window.showDirectoryPicker = window.kept; }")
    page.click("#export-folder")
    expect(state).to_contain_text("Exported 1 chat")
    refuse = "() => { FileSystemHandle.prototype.queryPermission = async () => 'denied';"
    refuse += " FileSystemHandle.prototype.requestPermission = async () => 'denied'; }"
    kept = "() => [window.query, window.request] = [FileSystemHandle.prototype.queryPermission,"
    page.evaluate(f"{kept} FileSystemHandle.prototype.requestPermission]")
    page.evaluate(refuse)
    page.click("#export-folder")
    expect(state).to_have_text("The browser does not let this page write into “backup”.")
    page.evaluate(
        """async () => {
          FileSystemHandle.prototype.queryPermission = window.query;
          FileSystemHandle.prototype.requestPermission = window.request;
          const root = await navigator.storage.getDirectory();
          await root.removeEntry("backup", { recursive: true });
        }"""
    )
    page.click("#export-folder")
    expect(state).to_contain_text("the folder is gone. Choose another one.")
    page.get_by_role("button", name="Change folder…").click()
    expect(state).to_contain_text("Exported 1 chat")


@in_browser
def test_without_the_browsers_support_a_reason_is_shown(browser: Browser, page_server) -> None:
    remove = "delete window.showDirectoryPicker"
    for url, script, reason in (
        (page_server.url, remove, "This browser cannot write into a folder."),
        (page_server.url.replace("127.0.0.1", FOREIGN_HOST), "", "needs HTTPS, or localhost."),
    ):
        with visiting(browser, page_server, url=url) as visitor:
            visitor.context.add_init_script(script)
            page = visitor.open()
            page.click("#open-settings")
            expect(page.locator("#export-folder")).to_be_hidden()
            expect(page.locator("#change-folder")).to_be_hidden()
            expect(page.locator("#export-state")).to_contain_text(reason)
