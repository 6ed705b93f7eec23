"""Text files on the chat page, with a model that reads text only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, Route, expect
from support.page_helpers import (
    Visitor,
    answered,
    attach,
    fake,
    file,
    give,
    in_browser,
    send,
    shoot,
    visiting,
)
from support.pdf_files import encrypted, pdf

CODE = "def f():\n    '''```'''\n    return 1\n"
TABLE = "Größe,Preis\n1,2"
# A fence is longer than any within the text.
FOLDED = f"File: main.ts\n````ts\n{CODE}````\n\nFile: a table.csv\n```csv\n{TABLE}\n```"


@pytest.fixture
def page(visitor: Visitor) -> Page:
    return visitor.open(fakes=True)


def tray(page: Page) -> Locator:
    return page.locator("#composer .tray li")


def note(page: Page) -> Locator:
    return page.locator("#composer + .tray-note")


def paste(page: Page, text: str, at: str = "#input") -> bool:
    """Pastes text; true where the page leaves it to the browser."""
    return page.locator(at).evaluate(
        """(target, text) => {
          const clipboardData = new DataTransfer();
          clipboardData.setData("text/plain", text);
          const options = { bubbles: true, cancelable: true, clipboardData };
          return target.dispatchEvent(new ClipboardEvent("paste", options));
        }""",
        text,
    )


def question(page: Page) -> Any:
    """Returns the content of the last message of the request that waits for its answer."""
    return fake(page, "answer.body.messages.at(-1).content")


@in_browser
def test_text_files_are_read_by_any_model(page: Page, visitor: Visitor) -> None:
    expect(page.locator("#attach")).to_have_attribute("aria-label", "Attach text files, PDFs")
    # Browsers take TypeScript for a video.
    attach(page, file("main.ts", "video/mp2t", CODE.encode()))
    give(page, "drop", [file("a table.csv", "", TABLE.encode("utf-16"))], "#messages")
    expect(tray(page).locator(".media-name")).to_have_text(["main.ts", "a table.csv"])
    attach(page, file("a.bin", "", b"a\0b"), file("b.bin", "", b"\xff"))
    expect(note(page)).to_have_text(
        "a.bin cannot be attached: this model takes text files and PDFs. "
        "b.bin cannot be attached: this model takes text files and PDFs."
    )
    give(page, "paste", [file("cat.png", "image/png", b"x")])
    expect(note(page)).to_have_text("This model takes no images: it reads text only.")
    expect(tray(page)).to_have_count(2)
    send(page, "Explain")
    assert question(page) == f"{FOLDED}\n\nExplain"
    fake(page, "(answer.say('A function.'), answer.end())")
    answered(page)

    page.reload()
    page.locator(".user .chip", has_text="a table.csv").click()
    expect(page.locator("#viewer-body pre")).to_have_text(TABLE, use_inner_text=True)
    shoot(page, "files-viewer")
    page.keyboard.press("Escape")
    expect(page.locator("#viewer")).to_be_hidden()
    page.get_by_role("button", name="Regenerate").click()
    assert question(page) == f"{FOLDED}\n\nExplain"
    fake(page, "answer.end()")
    answered(page)

    # Files of chats keep them.
    with page.expect_download() as download:
        page.get_by_role("button", name="Menu of Explain").click()
        page.get_by_role("menuitem", name="Export as Markdown").click()
    assert f"Explain\n\n{FOLDED.split(chr(10) * 2)[0]}\n" in Path(download.value.path()).read_text()
    with page.expect_download() as download:
        page.get_by_role("button", name="Menu of Explain").click()
        page.get_by_role("menuitem", name="Export as JSON").click()
    exported = json.loads(Path(download.value.path()).read_text())
    browser = visitor.context.browser
    assert browser is not None
    with visiting(browser, visitor) as elsewhere:
        fresh = elsewhere.open(fakes=True)
        fresh.click("#open-settings")
        state = fresh.locator("#import-state")
        bad = json.loads(json.dumps(exported))
        bad["chats"][0]["messages"][0]["media"][0]["type"] = "text/html"
        for chats, told in ((bad, "must be a list of images"), (exported, "Imported 1 chat")):
            content = json.dumps(chats).encode()
            fresh.locator("#import-file").set_input_files(
                file("x.json", "application/json", content)
            )
            expect(state).to_contain_text(told)
        fresh.click("#close-settings")
        fresh.get_by_role("button", name="Explain", exact=True).click()
        fresh.get_by_role("button", name="Regenerate").click()
        assert question(fresh) == f"{FOLDED}\n\nExplain"
        fake(fresh, "answer.end()")


@in_browser
def test_long_pasted_text_is_a_file_and_one_too_long_is_refused(
    page: Page, visitor: Visitor
) -> None:
    visitor.expected.append("400")  # the server counts no text of a megabyte
    assert paste(page, "x" * 8000)  # left to the browser
    assert not paste(page, "word " * 1700)
    assert not paste(page, "x" * 1_000_000)
    expect(tray(page).locator(".media-name")).to_have_text(["Pasted text.txt", "Pasted text 2.txt"])
    expect(page.locator("#input")).to_have_value("")
    page.locator("#input").fill("Read it")
    page.press("#input", "Enter")
    expect(note(page)).to_contain_text("Too long for the context: this message has 1,008,5")
    expect(note(page)).to_contain_text("characters, but the model takes at most 2,048 tokens")
    expect(page.locator("#input")).to_have_value("Read it")
    page.wait_for_function("() => localStorage.getItem('mlx-paged.draft.pasted.new')?.length > 1e6")
    page.reload()
    page.get_by_role("button", name="Remove Pasted text 2.txt").click()
    page.press("#input", "Enter")
    shoot(page, "files-too-long")
    # The limit is one of tokens, not of bytes.
    assert question(page).startswith("File: Pasted text.txt\n```txt\nword word")
    fake(page, "answer.end()")
    answered(page)
    page.locator("#input").fill("Some words, one after the other, " * 300)
    page.press("#input", "Enter")
    expect(note(page)).to_contain_text("tokens, but the model takes at most 2,048 tokens")
    expect(page.locator(".message")).to_have_count(2)


@in_browser
def test_a_pdf_is_attached_as_its_text(page: Page, visitor: Visitor) -> None:
    visitor.expected.append("400")  # of PDFs that cannot be read
    report = pdf("It rains in Oslo.", "Rome is dry.")
    attach(page, file("report.pdf", "application/pdf", report))
    expect(tray(page).locator(".chip .media-name")).to_have_text(["report.pdf"])
    expect(note(page)).to_have_text(
        "report.pdf: the model reads the text of 2 pages, without pictures."
    )
    # A file whose type the browser does not know.
    give(page, "drop", [file("b.PDF", "", pdf("Snow."))], "#messages")
    expect(tray(page)).to_have_count(2)
    for name, content, reason in (
        ("locked.pdf", encrypted(report, "secret"), "it is encrypted: remove its password first"),
        ("scan.pdf", pdf(""), "it has no text: it may be scanned, attach its pages as images"),
        ("broken.pdf", b"%PDF-1.7", "it is broken"),
    ):
        attach(page, file(name, "application/pdf", content))
        expect(note(page)).to_have_text(f"{name} cannot be attached: {reason}.")
    expect(tray(page)).to_have_count(2)
    send(page, "So?")
    folded = "File: report.pdf\n```pdf\nIt rains in Oslo.\n\nRome is dry.\n```"
    assert question(page) == f"{folded}\n\nFile: b.PDF\n```pdf\nSnow.\n```\n\nSo?"
    fake(page, "(answer.say('Umbrella.'), answer.end())")
    answered(page)
    page.locator(".user .chip", has_text="report.pdf").click()
    expect(page.locator("#viewer-body pre")).to_contain_text("Rome is dry.")
    page.keyboard.press("Escape")


@in_browser
def test_a_server_that_reads_no_pdf_says_why(visitor: Visitor) -> None:
    def route(route: Route) -> None:
        response = route.fetch()
        info = response.json()
        info["media"]["pdf"]["reason"] = "PDFs need a package"
        route.fulfill(response=response, json=info)

    visitor.context.route("**/server_info", route)
    page = visitor.open(fakes=True)
    expect(page.locator("#attach")).to_have_attribute("aria-label", "Attach text files")
    attach(page, file("report.pdf", "application/pdf", pdf("It rains.")))
    expect(note(page)).to_have_text("report.pdf cannot be attached: PDFs need a package.")
    expect(tray(page)).to_have_count(0)
