"""Pictures, videos and sounds on the chat page, with the embedded vision model behind it."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import Locator, Page, Route, expect
from support.media_files import clip, png, saved, sound
from support.page_helpers import (
    Browser,
    Visitor,
    answered,
    ask,
    attach,
    fake,
    file,
    give,
    in_browser,
    send,
    set_parameters,
    shoot,
    visiting,
)
from support.server_helpers import RunningServer, running

from mlx_paged.demo import vision_model_path
from mlx_paged.demo.pictures import SAMPLES, draw
from mlx_paged.server.config import ServerConfig

MAX_BODY = 400_000
CIRCLES = saved(draw(SAMPLES[0].shapes, SAMPLES[0].background))
QUESTION = SAMPLES[0].question


@pytest.fixture(scope="module")
def page_server() -> Iterator[RunningServer]:
    config = ServerConfig(served_model_names=("vision",), max_body_size=MAX_BODY)
    options: dict[str, Any] = {"max_model_len": 1024, "limit_mm_per_prompt": {"image": 3}}
    with running(config, model=str(vision_model_path()), **options) as server:
        yield server


@pytest.fixture
def page(visitor: Visitor) -> Page:
    return visitor.open()


def circles(name: str = "circles.png") -> dict[str, Any]:
    return file(name, "image/png", CIRCLES)


def tray(page: Page) -> Locator:
    return page.locator("#composer .tray li")


def note(page: Page) -> Locator:
    return page.locator("#composer + .tray-note")


def parts(body: dict[str, Any], index: int = -1) -> list[Any]:
    """The parts of a message: texts, and the bytes of pictures."""
    found = []
    for part in body["messages"][index]["content"]:
        if part["type"] == "image_url":
            kind, _, data = part["image_url"]["url"].partition(";base64,")
            assert kind.startswith("data:image/")
            found.append(base64.b64decode(data))
        else:
            found.append(part["text"])
    return found


def stored(page: Page) -> dict[str, int]:
    """The number of records of each kind in the database."""
    return page.evaluate(
        """async () => {
          const result = (request) => new Promise((done) => {
            request.onsuccess = () => done(request.result);
          });
          const db = await result(indexedDB.open("mlx-paged"));
          const found = {};
          for (const kind of ["chats", "messages", "media"]) {
            found[kind] = await result(db.transaction(kind).objectStore(kind).count());
          }
          db.close();
          return found;
        }"""
    )


def wide(size: int) -> bytes:
    """A picture that no format makes small."""
    noise = np.random.default_rng(0).integers(0, 256, (size, 2 * size, 3), np.uint8)
    return saved(Image.fromarray(noise))


@in_browser
def test_a_true_answer_about_a_picture_that_stays_in_the_chat(page, visitor, tmp_path) -> None:
    set_parameters(page, temperature="0")
    attach(page, circles())
    expect(tray(page)).to_have_count(1)
    page.wait_for_function("() => document.querySelector('.tray img').naturalWidth > 0")
    shoot(page, "media-tray")
    ask(page, QUESTION)
    expect(page.locator(".assistant .text")).to_have_text("Three red circles.")
    expect(tray(page)).to_have_count(0)
    assert parts(visitor.bodies[0]) == [CIRCLES, QUESTION]
    ask(page, "How many circles are there?", 2)
    expect(page.locator(".assistant .text").last).to_have_text("There are three circles.")
    assert parts(visitor.bodies[1], 0) == [CIRCLES, QUESTION]
    shoot(page, "media-light")

    page.reload()
    picture = page.locator(".user img")
    expect(picture).to_have_attribute("alt", "circles.png")
    page.wait_for_function("() => document.querySelector('.user img').naturalWidth > 0")
    page.get_by_role("button", name="Show circles.png").click()
    expect(page.locator("#viewer img")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#viewer")).to_be_hidden()
    page.get_by_role("button", name="Regenerate").last.click()
    expect(page.locator(".assistant .branches")).to_contain_text("2/2")
    answered(page, 2)
    assert visitor.bodies[2]["messages"] == visitor.bodies[1]["messages"]

    # An edited message keeps its picture, has another, or lacks it; the bytes are kept once.
    page.locator(".user").get_by_role("button", name="Edit").first.click()
    editor = page.locator(".editor")
    expect(editor.locator(".tray li")).to_have_count(1)
    give(
        page, "paste", [circles("again.png"), file("b.png", "image/png", png())], ".editor textarea"
    )
    expect(editor.locator(".tray li")).to_have_count(3)
    editor.get_by_role("button", name="Remove circles.png").click()
    expect(editor.get_by_role("button", name="Remove again.png")).to_be_focused()
    shoot(page, "media-editor")
    editor.get_by_role("button", name="Send").click()
    expect(page.locator(".user .branches")).to_contain_text("2/2")
    answered(page)
    assert parts(visitor.bodies[3]) == [CIRCLES, png(), QUESTION]
    assert stored(page)["media"] == 2
    page.get_by_role("button", name="Previous version").click()
    expect(picture).to_have_count(1)

    # Files of chats have them too, and what was imported can be sent.
    page.click("#open-settings")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    page.get_by_role("button", name="Close settings").click()
    exported = json.loads(Path(download.value.path()).read_text())
    assert [len(m["media"]) for m in exported["chats"][0]["messages"] if m["role"] == "user"] == [
        1,
        0,
        2,
    ]
    browser = visitor.context.browser
    with visiting(browser, visitor) as elsewhere:
        fresh = elsewhere.open(fakes=True)
        fresh.click("#open-settings")
        bad = json.loads(json.dumps(exported))
        bad["chats"][0]["messages"][0]["media"][0]["type"] = "image/svg+xml"
        state = fresh.locator("#import-state")
        for chats, told in ((bad, "must be a list of images"), (exported, "Imported 1 chat")):
            content = json.dumps(chats).encode()
            fresh.locator("#import-file").set_input_files(
                file("x.json", "application/json", content)
            )
            expect(state).to_contain_text(told)
        fresh.get_by_role("button", name="Close settings").click()
        fresh.get_by_role("button", name=QUESTION).first.click()
        fresh.wait_for_function("() => document.querySelector('.user img')?.naturalWidth > 0")
        fresh.get_by_role("button", name="Regenerate").last.click()
        assert parts(fake(fresh, "answer.body"), 0) == [CIRCLES, QUESTION]
        fake(fresh, "answer.end()")

    page.get_by_role("button", name=f"Menu of {QUESTION}").click()
    page.get_by_role("menuitem", name="Delete").click()
    assert stored(page)["media"] == 2  # it can be brought back
    page.evaluate("""async () => {
      const db = await new Promise((done) => {
        const request = indexedDB.open("mlx-paged");
        request.onsuccess = () => done(request.result);
      });
      const store = db.transaction("chats", "readwrite").objectStore("chats");
      const [chat] = await new Promise((done) => {
        store.getAll().onsuccess = (event) => done(event.target.result);
      });
      await new Promise((done) => { store.put({ ...chat, deleted: 1 }).onsuccess = done; });
      db.close();
    }""")
    page.reload()
    expect(page.locator("#no-chats")).to_be_visible()
    assert stored(page) == {"chats": 0, "messages": 0, "media": 0}


@in_browser
def test_paste_drop_and_remove(visitor) -> None:
    page = visitor.open(fakes=True)
    expect(page.locator("#attach")).to_have_attribute(
        "aria-label", "Attach text files, PDFs, images"
    )
    give(page, "paste", [circles("pasted.png")])
    expect(tray(page)).to_have_text(["pasted.png"])
    expect(page.locator("#announce")).to_have_text("Attached pasted.png.")
    give(page, "dragover", [circles()], "#messages")
    expect(page.locator("#drop")).to_have_text("Drop text files, PDFs, images here")
    shoot(page, "media-drop")
    give(page, "drop", [file("b.jpg", "image/jpeg", png()), circles("c.png")], "#messages")
    expect(page.locator("#drop")).to_be_hidden()
    expect(tray(page)).to_have_text(["pasted.png", "b.jpg", "c.png"])
    page.get_by_role("button", name="Remove b.jpg").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Remove c.png")).to_be_focused()
    expect(tray(page)).to_have_text(["pasted.png", "c.png"])
    # Each chat has its own; what is only a picture is sent too.
    page.locator("#send").click()
    assert parts(fake(page, "answer.body")) == [CIRCLES, CIRCLES]
    fake(page, "answer.end()")
    answered(page)
    expect(page.locator("#chats .title")).to_have_text(["pasted.png, c.png"])
    attach(page, circles("later.png"))
    expect(tray(page)).to_have_count(1)
    page.keyboard.press("Alt+n")
    expect(tray(page)).to_have_count(0)
    page.keyboard.press("Alt+ArrowDown")
    expect(tray(page)).to_have_text(["later.png"])
    page.get_by_role("button", name="Remove later.png").click()
    expect(page.locator("#input")).to_be_focused()
    assert stored(page)["media"] == 1  # the two are equal


@in_browser
def test_what_cannot_be_sent_is_said_before(page, visitor) -> None:
    attach(page, file("clip.mp4", "video/mp4", b"x"), file("a.zip", "application/zip", b"PK\0"))
    expect(note(page)).to_have_text(
        "clip.mp4 cannot be attached: this model takes no videos, only text files, "
        "PDFs and images. "
        "a.zip cannot be attached: this model takes text files, PDFs and images."
    )
    large = wide(400)
    assert len(large) > MAX_BODY
    attach(page, file("noise.png", "image/png", large))
    scaled = r"^noise.png was scaled down to \d+ . \d+ to fit into a request \(--max-body-size\).$"
    expect(note(page)).to_have_text(re.compile(scaled))
    drawing = b'<svg xmlns="http://www.w3.org/2000/svg" width="20" height="10"/>'
    attach(page, file("a.svg", "image/svg+xml", drawing), file("b.svg", "image/svg+xml", b"<"))
    expect(note(page)).to_have_text(
        "a.svg was converted: the server does not read image/svg+xml. "
        "b.svg cannot be attached: neither this browser nor the server reads image/svg+xml."
    )
    attach(page, circles(), circles("fourth.png"))
    expect(note(page)).to_contain_text(
        "fourth.png is too many: this server takes at most 3 images in a chat"
    )
    expect(tray(page)).to_have_text(["noise.png", "a.svg", "circles.png"])
    shoot(page, "media-refused")
    set_parameters(page, max_tokens="3")
    ask(page, "What?")
    expect(page.locator(".assistant .note.error")).to_have_count(0)
    sizes = [part for part in parts(visitor.bodies[0]) if isinstance(part, bytes)]
    assert len(sizes) == 3 and all(len(size) < MAX_BODY for size in sizes)
    attach(page, circles("one-more.png"))  # beside those of the message before
    expect(note(page)).to_contain_text("one-more.png is too many")
    # An error that only the server finds names the file, not its place in the body.
    page.keyboard.press("Alt+n")
    visitor.expected.append("400")
    attach(page, file("broken.png", "image/png", png()[:60]))
    expect(tray(page)).to_have_text(["broken.png"])
    ask(page, "What?")
    expect(page.locator(".assistant .note")).to_contain_text(
        "Failed: broken.png: its picture is broken"
    )


@in_browser
def test_videos_and_sounds(visitor) -> None:
    """The page is told that the model takes them."""

    def route(route: Route) -> None:
        info = route.fetch().json()
        limit = {"max_items": 9, "max_bytes": 60_000}
        info["media"]["kinds"] = dict.fromkeys(("image", "video", "audio"), limit)
        route.fulfill(json=info)

    visitor.context.route("**/server_info", route)
    page = visitor.open(fakes=True)
    expect(page.locator("#attach")).to_have_attribute(
        "aria-label", "Attach text files, PDFs, images, videos, sounds"
    )
    video, wave = clip(form="webm", codec="libvpx"), sound()
    attach(
        page,
        file("a.webm", "video/webm", video),
        file("b.wav", "audio/wav", wave),
        file("long.wav", "audio/wav", b"x" * 60_001),
    )
    expect(note(page)).to_have_text(
        "long.wav has 0.1 MB: this server takes sounds of at most 0.1 MB."
    )
    expect(tray(page)).to_have_text(["a.webm", "b.wav"])
    send(page, "What happens?")
    sent = fake(page, "answer.body.messages[0].content")
    data = [base64.b64encode(content).decode() for content in (video, wave)]
    assert sent == [
        {"type": "video_url", "video_url": {"url": f"data:video/webm;base64,{data[0]}"}},
        {"type": "input_audio", "input_audio": {"data": data[1], "format": "wav"}},
        {"type": "text", "text": "What happens?"},
    ]
    fake(page, "(answer.say('Little.'), answer.end())")
    answered(page)
    page.reload()
    page.wait_for_function("() => document.querySelector('.user video')?.readyState > 0")
    page.wait_for_function("() => document.querySelector('.user audio')?.readyState > 0")
    shoot(page, "media-players")
    # (The page may just be asking again, and an answer that is cut off fails the next test.)
    visitor.context.unroute_all(behavior="wait")


@in_browser
def test_chats_of_a_page_without_media_are_kept(visitor, page_server) -> None:
    other = visitor.context.new_page()
    other.goto(f"{page_server.url}/docs")
    other.evaluate("""() => new Promise((done) => {
      const request = indexedDB.open("mlx-paged", 1);
      request.onupgradeneeded = () => {
        const db = request.result;
        const times = { created: 1, used: 1, updated: 1, deleted: null };
        const chat = { ...times, id: "c1", title: "Old", leaf: "m1" };
        db.createObjectStore("chats", { keyPath: "id" }).put(chat);
        const messages = db.createObjectStore("messages", { keyPath: "id" });
        messages.createIndex("chat", "chat");
        const message = { role: "user", content: "Old?", created: 1, updated: 1 };
        messages.put({ ...message, id: "m1", chat: "c1", parent: null });
      };
      request.onsuccess = () => { window.db = request.result; done(); };
    })""")
    page = visitor.context.new_page()
    page.goto(page_server.url)
    expect(page.locator("#banner")).to_contain_text("which run an older version")
    expect(page.locator("#chats .title")).to_have_count(0)
    other.close()
    expect(page.locator("#chats .title")).to_have_text(["Old"])
    expect(page.locator("#banner")).to_be_empty()
    expect(page.locator(".user .text")).to_have_text("Old?")
    expect(page.locator(".user .items")).to_be_hidden()


@in_browser
def test_narrow_dark_and_by_axe(browser: Browser, page_server: RunningServer) -> None:
    viewport = {"width": 390, "height": 780}
    with visiting(
        browser, page_server, viewport=viewport, color_scheme="dark", has_touch=True, is_mobile=True
    ) as visitor:
        page = visitor.open(fakes=True)
        attach(page, circles(), circles("a-picture-with-quite-a-long-name.png"), circles("c.png"))
        expect(tray(page)).to_have_count(3)
        attach(page, circles("d.png"))
        expect(note(page)).not_to_be_empty()
        shoot(page, "media-narrow-tray")
        small = page.evaluate(
            """() => [...document.querySelectorAll("button")]
            .filter((e) => e.checkVisibility({ visibilityProperty: true }))
            .map((e) => [e.outerHTML.slice(0, 80), e.getBoundingClientRect()])
            .filter(([, { width, height, left, right }]) =>
              width < 43.5 || height < 43.5 || left < 0 || right > innerWidth)"""
        )
        assert not small
        send(page, "What is this?")
        fake(page, "(answer.say('Circles.'), answer.end())")
        answered(page)
        page.locator(".user").get_by_role("button", name="Edit").click()
        shoot(page, "media-narrow-dark")
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        violations = Axe().run(page).response["violations"]
        assert not violations, [(v["id"], v["nodes"][0]["html"]) for v in violations]
