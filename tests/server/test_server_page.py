"""The chat page, end to end in a headless Chromium, where there is one."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, Route, expect
from support.page_helpers import (
    FOREIGN_HOST,
    PROMPT,
    Visitor,
    answered,
    ask,
    fake,
    in_browser,
    never_ending,
    saved,
    send,
    set_parameters,
    shoot,
    visiting,
)
from support.server_helpers import running

import mlx_paged
from mlx_paged.server.api import API
from mlx_paged.server.config import ServerConfig

WEB = Path(mlx_paged.__file__).parent / "server/web"
VENDOR = WEB / "vendor"
# The code of the demo model's answer to PROMPT, at temperature 0.
FIBONACCI = re.compile(r"^def fibonacci\(n: int\) -> int:\n.*\n    return a$", re.DOTALL)


def test_the_page_needs_nothing_from_elsewhere() -> None:
    for path in WEB.iterdir():
        if path.is_dir():
            continue
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//cdn|@import", text), path
    page = (WEB / "index.html").read_text()
    for name in re.findall(r'(?:src|href)="web/([^"]+)"', page):
        assert (WEB / name).is_file(), name
    for path in WEB.glob("*.js"):
        for name in re.findall(r'(?:from |import\()"\./([^"]+)"', path.read_text()):
            assert (WEB / name).is_file(), (path, name)


def test_vendored_files_are_those_of_the_manifest() -> None:
    packages = json.loads((VENDOR / "manifest.json").read_text())["packages"]
    listed = {name: digest for p in packages for name, digest in p["files"].items()}
    found = {p.relative_to(VENDOR).as_posix(): p for p in VENDOR.rglob("*") if p.is_file()}
    assert found.keys() - {"manifest.json"} == listed.keys()
    for name, digest in listed.items():
        assert hashlib.sha256(found[name].read_bytes()).hexdigest() == digest, name
    for package in packages:
        assert re.fullmatch(r"\d+\.\d+\.\d+", package["version"])
        licences = [n for n in package["files"] if n.startswith("licenses/")]
        assert licences and found[licences[0]].stat().st_size > 400, package["name"]
        assert package.get("part_of") or len(package["files"]) > 1
    # (Diagrams are loaded only where there is one.)
    sizes = {name: path.stat().st_size for name, path in found.items()}
    assert sizes.pop("mermaid.js") < 3_600_000
    assert sum(sizes.values()) < 1_200_000
    fonts = {p.name for p in (VENDOR / "katex/fonts").iterdir()}
    css = (VENDOR / "katex/katex.css").read_text()
    assert fonts == set(re.findall(r"fonts/([\w-]+\.woff2)", css))


@pytest.fixture
def page(visitor: Visitor) -> Page:
    return visitor.open()


def test_texts_are_compressed_for_clients_that_take_it(page_server) -> None:
    for path in ("/", "/docs", "/web/page.js", "/web/page.css", "/web/icon.svg"):
        packed = httpx.get(f"{page_server.url}{path}", headers={"Accept-Encoding": "gzip"})
        plain = httpx.get(f"{page_server.url}{path}", headers={"Accept-Encoding": "identity"})
        if len(plain.content) >= 1024:
            assert packed.headers["Content-Encoding"] == "gzip", path
            assert "Accept-Encoding" in packed.headers["Vary"]
        assert "Content-Encoding" not in plain.headers and packed.content == plain.content
    font = "/web/vendor/katex/fonts/KaTeX_Main-Regular.woff2"
    part = {"Range": "bytes=0-1999", "Accept-Encoding": "gzip"}
    for path, headers in ((font, {}), ("/web/page.js", part), ("/v1/models", {})):
        answer = httpx.get(f"{page_server.url}{path}", headers=headers)
        assert "Content-Encoding" not in answer.headers, path
    body = {"prompt": "x", "stream": True, "max_tokens": 200, "ignore_eos": True}
    stream = httpx.post(f"{page_server.url}/v1/completions", json=body)
    assert len(stream.content) > 2000 and "Content-Encoding" not in stream.headers


def test_files_are_revalidated_and_typed(page_server) -> None:
    kinds = {
        "": "text/html", "web/page.js": "text/javascript", "web/page.css": "text/css",
        "web/vendor/katex/fonts/KaTeX_Main-Regular.woff2": "font/woff2",
    }  # fmt: skip
    for path, kind in kinds.items():
        answer = httpx.get(f"{page_server.url}/{path}")
        assert answer.status_code == 200 and answer.headers["Content-Type"].startswith(kind)
        assert answer.headers["Cache-Control"] == "no-cache"
        tag = {"If-None-Match": answer.headers["ETag"]}
        again = httpx.get(f"{page_server.url}/{path}", headers=tag)
        assert again.status_code == 304 and again.headers["Cache-Control"] == "no-cache"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
    policy = httpx.get(page_server.url).headers["Content-Security-Policy"]
    assert "unsafe" not in policy and "require-trusted-types-for 'script'" in policy


@in_browser
def test_a_conversation_with_numbers(page, visitor) -> None:
    shoot(page, "empty")
    set_parameters(page, temperature="0")
    ask(page, PROMPT)
    code = page.locator(".assistant .code code")
    text = code.inner_text()
    assert FIBONACCI.match(text), text
    stats = page.locator(".assistant .stats").inner_text()
    numbers = r"[\d.]+ tokens/s · TTFT \d+ ms · \d+ tokens · 0 of \d+ prompt tokens cached"
    assert re.fullmatch(f"{numbers} · complete · demo", stats), stats
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".assistant .branches")).to_contain_text("2/2")
    answered(page)
    assert code.inner_text() == text  # greedy
    stats = page.locator(".assistant .stats").inner_text()
    assert re.search(r" [1-9]\d* of \d+ prompt tokens cached", stats), stats
    expect(page.locator("#context-text")).to_have_text(re.compile(r"^\d+ of 2,048 tokens$"))
    expect(page.locator("#pool-text")).to_contain_text("% used")
    expect(page.locator("#load")).to_contain_text("running")
    ask(page, "Now check whether it is even", 2)
    sent = visitor.bodies[-1]["messages"]
    assert [m["role"] for m in sent] == ["user", "assistant", "user"] and sent[1]["content"] == text
    shoot(page, "conversation-light")


@in_browser
def test_parameters_are_sent_only_when_set(page, visitor) -> None:
    expect(page.locator("#model")).to_have_value(re.compile("."))  # (else none is sent)
    ask(page, PROMPT)
    assert visitor.bodies[0].keys() == {"model", "messages", "stream", "stream_options"}
    field = page.locator("#parameters [name=temperature]")
    expect(field).to_have_attribute("placeholder", "default: 0.7")  # of generation_config.json
    set_parameters(page, temperature="0", max_tokens="5")
    page.reload()
    ask(page, "And again", 2)
    assert visitor.bodies[1]["temperature"] == 0 and visitor.bodies[1]["max_tokens"] == 5
    page.click("#open-settings")
    field.fill("-1")
    expect(page.locator("#wrong-temperature")).to_contain_text("not sent")
    page.locator("#system").fill("Be brief.")
    page.get_by_role("button", name="Clear all").click()
    page.keyboard.press("Escape")
    ask(page, "Once more", 3)
    assert visitor.bodies[2].keys() == visitor.bodies[0].keys()
    assert visitor.bodies[2]["messages"][0] == {"role": "system", "content": "Be brief."}


@in_browser
def test_an_answer_that_was_cut_is_continued(page, visitor) -> None:
    set_parameters(page, temperature="0", max_tokens="12")
    ask(page, PROMPT)
    expect(page.locator(".assistant .note")).to_contain_text("Stopped at the token limit")
    cut = page.locator(".assistant code").inner_text()
    set_parameters(page, max_tokens="100")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".assistant .note")).to_be_hidden()
    answered(page)
    whole = page.locator(".assistant code").inner_text()
    assert whole.startswith(cut) and FIBONACCI.match(whole), whole
    body = visitor.bodies[-1]
    assert body["continue_final_message"] is True and body["add_generation_prompt"] is False


@in_browser
def test_stop_by_key_and_by_button(page, visitor, page_server, monkeypatch) -> None:
    never_ending(visitor.context, page_server, monkeypatch)
    send(page, PROMPT)
    expect(page.locator(".assistant .text")).not_to_be_empty()
    page.keyboard.press("Escape")
    answered(page)
    expect(page.locator(".assistant .stats")).to_contain_text("stopped")
    page_server.wait_idle()
    page.get_by_role("button", name="Regenerate").click()
    page.click("#stop")
    answered(page)
    page_server.wait_idle()


@in_browser
def test_two_chats_answer_at_once_and_one_is_stopped(
    page, visitor, page_server, monkeypatch
) -> None:
    never_ending(visitor.context, page_server, monkeypatch)
    for text in ("First of all", "Second of all"):
        page.click("#new-chat")
        send(page, text)
        expect(page.locator(".assistant .text")).not_to_be_empty()
    stops = page.locator("#chats .stop")
    expect(stops).to_have_count(2)
    page.get_by_role("button", name="Stop First of all").click()
    expect(stops).to_have_count(1)
    expect(page.get_by_role("button", name="Stop Second of all")).to_be_visible()
    expect(page.locator("#stop")).to_be_visible()  # of the second, which goes on
    page_server.until(lambda: page_server.stats().num_running == 1)
    before = page.locator(".assistant .text").inner_text()
    page.wait_for_function(
        "n => document.querySelector('.assistant .text')?.innerText.length > n", arg=len(before)
    )
    page.click("#stop")
    expect(stops).to_have_count(0)
    expect(page.locator("#chats .unread")).to_have_count(1)  # the first ended out of sight
    page.get_by_role("button", name="First of all").first.click()
    expect(page.locator(".assistant .stats")).to_contain_text("stopped")
    page_server.wait_idle()


@in_browser
def test_editing_makes_a_branch(page, visitor) -> None:
    set_parameters(page, temperature="0", max_tokens="20")
    ask(page, PROMPT)
    first = page.locator(".assistant .text").inner_text()
    page.locator(".user").get_by_role("button", name="Edit").click()
    page.locator(".editor textarea").fill("Check whether a number is prime")
    page.keyboard.press("Enter")
    expect(page.locator(".user .branches")).to_contain_text("2/2")
    answered(page)
    assert "prime" in page.locator(".assistant .text").inner_text()
    assert len(visitor.bodies[1]["messages"]) == 1
    ask(page, "Go on", 2)
    page.get_by_role("button", name="Previous version").click()
    expect(page.locator(".user .text")).to_have_text(PROMPT)
    assert page.locator(".assistant .text").inner_text() == first
    page.locator(".user").get_by_role("button", name="Edit").click()
    page.keyboard.press("Escape")
    expect(page.locator(".editor")).to_have_count(0)
    page.reload()
    expect(page.locator(".user .text")).to_have_text(PROMPT)
    page.get_by_role("button", name="Next version").click()
    expect(page.locator(".user .text")).to_have_text(["Check whether a number is prime", "Go on"])


@in_browser
def test_chats_are_named_searched_deleted_and_brought_back(page) -> None:
    set_parameters(page, max_tokens="5")
    titles = page.locator("#chats .title")
    ask(page, "First of all")
    page.keyboard.press("Alt+n")
    expect(page.locator("#messages .assistant")).to_have_count(0)
    ask(page, "Second of all\nwith a zebra")
    expect(titles).to_have_text(["Second of all", "First of all"])
    page.reload()
    expect(titles).to_have_text(["Second of all", "First of all"])
    page.keyboard.press("Alt+ArrowDown")
    expect(page.locator(".user .text")).to_have_text("First of all")

    page.get_by_role("button", name="Menu of First of all").click()
    page.get_by_role("menuitem", name="Rename").click()
    page.keyboard.type("A better name")
    page.keyboard.press("Enter")
    expect(titles).to_have_text(["Second of all", "A better name"])

    page.keyboard.press("Control+k")
    page.keyboard.type("ZEBRA second")
    expect(titles).to_have_text(["Second of all"])
    page.keyboard.press("Escape")
    expect(titles).to_have_count(2)

    page.get_by_role("button", name="Menu of A better name").click()
    page.get_by_role("menuitem", name="Delete").click()
    expect(titles).to_have_text(["Second of all"])
    expect(page.locator(".user .text")).to_contain_text("zebra")
    page.get_by_role("button", name="Undo").click()
    expect(titles).to_have_text(["Second of all", "A better name"])
    expect(page.locator(".user .text")).to_have_text("First of all")

    page.click("#open-settings")
    page.get_by_role("button", name="Delete all").click()
    expect(titles).to_have_count(0)
    expect(page.locator(".empty")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    expect(titles).to_have_count(2)
    page.get_by_role("button", name="Menu of A better name").click()
    page.get_by_role("menuitem", name="Delete").click()
    expect(titles).to_have_count(1)
    page.reload()
    expect(titles).to_have_text(["Second of all"])


@in_browser
def test_what_was_typed_survives_a_reload(page) -> None:
    page.locator("#input").fill("Half a sentence")
    page.reload()
    expect(page.locator("#input")).to_have_value("Half a sentence")
    set_parameters(page, max_tokens="5")
    page.locator("#send").click()
    answered(page)
    expect(page.locator("#input")).to_have_value("")
    page.locator(".user").get_by_role("button", name="Edit").click()
    page.locator(".editor textarea").fill("A whole sentence")
    page.reload()
    expect(page.locator(".editor textarea")).to_have_value("A whole sentence")


@in_browser
def test_a_reload_in_mid_answer_keeps_what_came(page, visitor, page_server, monkeypatch) -> None:
    never_ending(visitor.context, page_server, monkeypatch)
    set_parameters(page, temperature="0")
    send(page, PROMPT)
    saved(page, "return a")
    page.reload()
    expect(page.locator(".user .text")).to_have_text(PROMPT)
    expect(page.locator(".assistant .note")).to_contain_text("Interrupted")
    expect(page.locator(".assistant .text code")).to_contain_text("return a")
    kept = page.locator(".assistant .text").inner_text()
    assert "def fibonacci" in kept
    page_server.wait_idle()
    set_parameters(page, max_tokens="8")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".assistant .note")).to_contain_text("Stopped at the token limit")
    assert page.locator(".assistant .text").inner_text().startswith(kept.rstrip())
    assert visitor.bodies[1]["messages"][-1]["content"].startswith("def fibonacci")


@in_browser
def test_a_question_is_saved_before_it_is_sent(chat) -> None:
    question = "Is this saved?"  # asked by no other test
    send(chat, question)
    saved(chat, question)
    fake(chat, "answer.body")  # nothing comes
    chat.reload()
    expect(chat.locator(".user .text")).to_have_text(question)
    expect(chat.locator(".assistant .note")).to_contain_text("Interrupted")


@in_browser
def test_two_tabs_merge(page, visitor) -> None:
    first, other = visitor.open(fakes=True), visitor.open()
    send(first, "From the first tab")
    fake(first, "answer.say('It grows')")
    # Others see the answer grow, do not take it for an interrupted one, and can stop it.
    other.get_by_role("button", name="From the first tab").first.click()
    expect(other.locator(".assistant.busy .text")).to_contain_text("It grows")
    third = visitor.open()
    third.get_by_role("button", name="From the first tab").first.click()
    expect(third.locator(".assistant.busy .text")).to_contain_text("It grows")
    fake(first, "answer.say(' on')")
    expect(third.locator(".assistant.busy .text")).to_contain_text("It grows on")
    third.close()
    other.click("#stop")
    answered(first)
    expect(first.locator(".assistant .stats")).to_contain_text("stopped")
    first.close()
    page.get_by_role("button", name="From the first tab").first.click()
    # Both write at the same time, to the same chat and to one of their own.
    for tab in (page, other):
        set_parameters(tab, max_tokens="5")
    other.get_by_role("button", name="Menu of From the first tab").click()
    other.get_by_role("menuitem", name="Rename").click()
    other.keyboard.type("Named by the second")
    other.keyboard.press("Enter")
    ask(page, "More from the first", 2)
    other.click("#new-chat")
    ask(other, "From the second tab")
    for tab in (page, other, visitor.open()):
        titles = tab.locator("#chats .title")
        expect(titles).to_have_text(["From the second tab", "Named by the second"])
        titles.last.click()
        expect(tab.locator(".user .text")).to_have_text(
            ["From the first tab", "More from the first"]
        )


@in_browser
def test_a_tab_that_is_closed_in_mid_answer(visitor, page_server) -> None:
    page, other = visitor.open(fakes=True), visitor.open()
    send(page, "Tell me")
    fake(page, "answer.say('Half an answer')")
    other.get_by_role("button", name="Tell me").first.click()
    expect(other.locator(".assistant.busy .text")).to_contain_text("Half an answer")
    page.close(run_before_unload=False)
    expect(other.locator(".assistant .note")).to_contain_text("Interrupted")
    set_parameters(other, max_tokens="5")
    other.get_by_role("button", name="Continue").click()
    expect(other.locator(".assistant .note")).to_contain_text("Stopped at the token limit")
    assert other.locator(".assistant .text").inner_text().startswith("Half an answer")


@in_browser
def test_a_failed_turn_is_shown_but_not_sent_again(page, visitor) -> None:
    visitor.expected.append("Failed to load resource")

    def fail(route: Route) -> None:
        body = {"error": {"message": "the queue is full", "code": "queue_full"}}
        route.fulfill(status=429, json=body)

    set_parameters(page, max_tokens="5")
    ask(page, "One")
    visitor.context.route("**/v1/chat/completions", fail)
    ask(page, "Two", 2)
    expect(page.locator(".assistant .note").nth(1)).to_contain_text("the queue is full")
    visitor.context.unroute("**/v1/chat/completions")
    ask(page, "Three", 3)
    contents = [m["content"] for m in visitor.bodies[-1]["messages"] if m["role"] == "user"]
    assert contents == ["One", "Three"]
    expect(page.locator(".user .text")).to_have_text(["One", "Two", "Three"])
    page.reload()
    expect(page.locator(".assistant .note").nth(1)).to_contain_text("the queue is full")
    page.get_by_role("button", name="Try again").click()  # of the second turn
    expect(page.locator(".assistant .note.error")).to_have_count(0)
    answered(page, 3)
    assert [m["content"] for m in visitor.bodies[-1]["messages"]][::2] == ["One", "Two"]
    ask(page, "Four", 4)
    contents = [m["content"] for m in visitor.bodies[-1]["messages"] if m["role"] == "user"]
    assert contents == ["One", "Two", "Three", "Four"]


@in_browser
def test_offline_says_what_to_do(page, visitor) -> None:
    visitor.expected.append("ERR_INTERNET_DISCONNECTED")
    set_parameters(page, max_tokens="5")
    visitor.context.set_offline(True)
    expect(page.locator("#banner")).to_contain_text("This device is offline")
    expect(page.get_by_role("button", name="Try now")).to_be_visible()
    ask(page, PROMPT)
    expect(page.locator(".assistant .note")).to_contain_text("the server could not be reached")
    visitor.context.set_offline(False)
    expect(page.locator("#banner")).to_be_empty()
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".assistant .text")).not_to_be_empty()
    answered(page)
    expect(page.locator(".assistant .branches")).to_have_count(0)  # it replaced the failure


@in_browser
def test_a_connection_that_breaks_keeps_what_came(chat) -> None:
    send(chat, "Tell me")
    fake(chat, "answer.say('Half an answer, ')")
    expect(chat.locator(".assistant .text")).to_contain_text("Half")
    fake(chat, "answer.lose()")
    expect(chat.locator(".assistant .note")).to_contain_text("the connection was lost")
    chat.get_by_role("button", name="Continue").click()
    messages = fake(chat, "answer.body.messages")
    assert messages[-1] == {"role": "assistant", "content": "Half an answer,"}
    fake(chat, "(answer.say(' and the rest.'), answer.end())")
    expect(chat.locator(".assistant .text")).to_have_text("Half an answer, and the rest.")
    send(chat, "Thanks")
    assert len(fake(chat, "answer.body.messages")) == 3
    fake(chat, "(answer.say('You are'), answer.fail('the engine has failed'))")
    expect(chat.locator(".assistant .note").last).to_contain_text("the engine has failed")
    chat.locator("#input").fill("Are you there?")
    chat.keyboard.press("Enter")
    assert [m["content"] for m in fake(chat, "answer.body.messages")][::2] == [
        "Tell me", "Are you there?",
    ]  # fmt: skip


@in_browser
def test_a_continuation_that_is_refused_changes_nothing(chat) -> None:
    send(chat, "Tell me")
    fake(chat, "(answer.say('Half an answer,'), answer.end('length'))")
    chat.get_by_role("button", name="Continue").click()
    fake(chat, "answer.fail('the queue is full')")
    expect(chat.locator(".assistant .note")).to_contain_text("the queue is full")
    expect(chat.locator(".assistant .text")).to_have_text("Half an answer,")
    expect(chat.get_by_role("button", name="Continue")).to_be_visible()
    send(chat, "Go on")
    assert fake(chat, "answer.body.messages")[1]["content"] == "Half an answer,"


@in_browser
def test_an_answer_in_one_piece_has_a_sober_speed(chat) -> None:
    send(chat, PROMPT)
    fake(chat, "(answer.say('x = 1'), answer.end())")
    answered(chat)
    stats = chat.locator(".assistant .stats").inner_text()
    speed, ttft = re.match(r"([\d.]+) tokens/s · TTFT (\d+) ms", stats).groups()
    # 100 tokens, all within the time to the first one.
    assert float(speed) * (float(ttft) - 1) / 1000 <= 101, stats


@in_browser
def test_export_and_import(page, visitor, browser, page_server, tmp_path) -> None:
    set_parameters(page, temperature="0", max_tokens="20")
    ask(page, PROMPT)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".assistant .branches")).to_contain_text("2/2")
    answered(page)
    with page.expect_download() as download:
        page.get_by_role("button", name=f"Menu of {PROMPT}").click()
        page.get_by_role("menuitem", name="Export as Markdown").click()
    assert download.value.suggested_filename == "Return-the-n-th-Fibonacci-number.md"
    text = Path(download.value.path()).read_text()
    assert text.startswith(f"# {PROMPT}\n\n## You\n\n{PROMPT}\n\n## demo\n\ndef fibonacci")
    page.click("#open-settings")
    page.locator("#key").fill("sesame")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    path = tmp_path / "chats.json"
    download.value.save_as(path)
    exported = json.loads(path.read_text())
    assert "sesame" not in path.read_text() and len(exported["chats"][0]["messages"]) == 3

    def import_file(page: Page, content: object) -> str:
        body = content if isinstance(content, str) else json.dumps(content)
        file = {"name": "x.json", "mimeType": "application/json", "buffer": body.encode()}
        page.locator("#import-state").evaluate("e => e.textContent = ''")
        page.locator("#import-file").set_input_files(file)
        expect(page.locator("#import-state")).not_to_have_text(re.compile(r"^(Importing.*)?$"))
        return page.locator("#import-state").inner_text()

    assert import_file(page, exported) == "Imported 1 chat: 0 new messages."  # all there already
    with visiting(browser, page_server) as elsewhere:
        fresh = elsewhere.open()
        fresh.click("#open-settings")
        assert import_file(fresh, exported) == "Imported 1 chat: 3 new messages."
        for change, reason in (
            ('"role": "user"', 'chats[0].messages[0].role must be "user" or "assistant" but is 7'),
            ('"content": ', "chats[0].messages[0].content must be a text but is 7"),
            ('"parent": null', 'chats[0].messages[0].parent names no message: "x"'),
            ('"format": ', "but format is 7"),
            ('"status": "done"', "chats[0].messages[0].status must be"),
        ):
            name = change.split(":")[0]
            value = '"x"' if "parent" in name else "7"
            found = re.compile(rf'{name}: ("(\\.|[^"\\])*"|null)')
            broken = found.sub(f"{name}: {value}", json.dumps(exported), count=1)
            assert reason in import_file(fresh, broken), change
        assert "not JSON" in import_file(fresh, "{")
        assert 'unknown field "more"' in import_file(
            fresh, {**exported, "chats": [{**exported["chats"][0], "more": 1}]}
        )
        looped = json.loads(json.dumps(exported))
        looped["chats"][0]["messages"][0]["parent"] = looped["chats"][0]["messages"][1]["id"]
        assert "leads in a circle" in import_file(fresh, looped)
        fresh.keyboard.press("Escape")
        fresh.get_by_role("button", name=PROMPT).first.click()
        expect(fresh.locator(".assistant .branches")).to_contain_text("2/2")
        fresh.click("#open-settings")
        with fresh.expect_download() as download:
            fresh.get_by_role("button", name="Export all").click()
        assert json.loads(Path(download.value.path()).read_text())["chats"] == exported["chats"]


@in_browser
def test_chats_of_the_old_page_are_kept(visitor) -> None:
    old = [
        {
            "id": "0.17", "messages": [
                {"role": "user", "content": "An old question"},
                {"role": "assistant", "content": "An old answer", "stats": {"finish": "stop"}},
                {"role": "user", "content": "Another"},
                {"role": "assistant", "content": "", "error": "it broke"},
            ],
        },
        {"id": "empty", "messages": []},
    ]  # fmt: skip
    settings = {"temperature": "0.7", "top_p": "0.5", "max_tokens": "512", "system": "Be old."}
    visitor.context.add_init_script(
        f"""if (location.protocol === "http:" && !localStorage.getItem("seen")) {{
          localStorage.setItem("mlx-paged.chats", {json.dumps(json.dumps(old))});
          localStorage.setItem("mlx-paged.settings", {json.dumps(json.dumps(settings))});
          localStorage.setItem("seen", "yes");
        }}"""
    )
    page = visitor.open()
    for _ in range(2):
        expect(page.locator("#chats .title")).to_have_text(["An old question"])
        expect(page.locator(".assistant .text").first).to_have_text("An old answer")
        expect(page.locator(".assistant .note").last).to_contain_text("it broke")
        page.reload()
    assert page.evaluate("localStorage.getItem('mlx-paged.chats')") is None
    ask(page, PROMPT, 3)
    body = visitor.bodies[0]
    assert body["top_p"] == 0.5 and "temperature" not in body and "max_tokens" not in body
    assert [m["content"] for m in body["messages"]] == [
        "Be old.", "An old question", "An old answer", PROMPT,
    ]  # fmt: skip


@in_browser
def test_a_browser_that_keeps_nothing(visitor) -> None:
    visitor.context.add_init_script(
        """for (const name of ["localStorage", "sessionStorage", "indexedDB"]) {
          const get = () => { throw new DOMException("denied", "SecurityError"); };
          Object.defineProperty(window, name, { get });
        }"""
    )
    page = visitor.open()
    expect(page.locator("#banner")).to_contain_text("This browser is not saving chats")
    set_parameters(page, temperature="0", max_tokens="12")
    ask(page, PROMPT)
    assert visitor.bodies[0]["max_tokens"] == 12
    ask(page, "And again", 2)
    page.click("#open-settings")
    page.get_by_role("radio", name="Dark").check()
    page.click("#close-settings")
    page.click("#new-chat")
    page.locator("#chats .title").click()
    expect(page.locator(".user .text")).to_have_text([PROMPT, "And again"])


@in_browser
def test_an_idle_page_is_quiet(page, page_server) -> None:
    expect(page.locator("#model option")).to_have_count(1)
    page.wait_for_load_state("networkidle")  # its libraries come after the page can be used
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url.removeprefix(page_server.url)))
    for _ in range(3):
        page.wait_for_event("request")
    # Only requests that the server does not log.
    assert set(requests) == {"/server_info"}


@in_browser
def test_copying_over_plain_http_from_another_host(browser, page_server) -> None:
    url = f"http://{FOREIGN_HOST}:{page_server.port}"
    with visiting(browser, page_server, url=url) as visitor:
        page = visitor.open()
        assert page.evaluate("isSecureContext") is False
        assert page.evaluate("navigator.clipboard") is None
        set_parameters(page, temperature="0")
        ask(page, PROMPT)
        code = page.locator(".assistant code").inner_text()
        for button in (page.locator(".copy-code"), page.locator(".assistant .below >> text=Copy")):
            page.locator("#input").fill("")
            button.click()
            expect(page.locator("#toasts")).to_contain_text("Copied")
            page.locator("#input").focus()
            page.keyboard.press("Control+V")
            expect(page.locator("#input")).to_have_value(code)


@in_browser
def test_a_key_is_asked_for(browser) -> None:
    with (
        running(ServerConfig(api_keys=("sesame",))) as page_server,
        visiting(browser, page_server) as visitor,
    ):
        visitor.expected.append("401")
        page = visitor.open()
        expect(page.locator("#banner")).to_contain_text("This server requires an API key")
        ask(page, PROMPT)
        expect(page.locator(".assistant .note")).to_contain_text("API key")
        page.get_by_role("button", name="Enter API key").click()
        expect(page.locator("#key")).to_be_focused()
        page.keyboard.type("wrong")
        page.keyboard.press("Tab")
        expect(page.locator("#key-state")).to_contain_text("does not accept")
        page.locator("#key").fill("sesame")
        page.keyboard.press("Tab")
        expect(page.locator("#model")).to_contain_text("mlx-paged-demo")
        expect(page.locator("#banner")).to_be_empty()
        page.click("#close-settings")
        page.get_by_role("button", name="Try again").click()
        expect(page.locator(".assistant code")).to_contain_text("def")
        answered(page)
        page.reload()
        expect(page.locator("#model")).to_contain_text("mlx-paged-demo")
        page.click("#open-settings")
        page.locator("#keep-key").uncheck()
        assert page.evaluate("localStorage.getItem('mlx-paged.key')") is None
        page.reload()
        expect(page.locator("#model")).to_contain_text("mlx-paged-demo")
        other = visitor.open()
        expect(other.locator("#banner")).to_contain_text("This server requires an API key")


@in_browser
def test_the_documentation_page(visitor, page_server) -> None:
    page = visitor.context.new_page()
    page.goto(f"{page_server.url}/docs")
    expect(page.locator("details")).to_have_count(len(API))
    page.get_by_text("/v1/chat/completions").first.click()  # (then /render)
    expect(page.get_by_text("continue_final_message", exact=True).first).to_be_visible()
    shoot(page, "docs")
    page.emulate_media(color_scheme="dark")
    shoot(page, "docs-dark")


# A tab whose worker holds a transaction until it is let go. It sleeps in between: requests without
# a pause would keep a core busy. Memory that is shared with a worker needs an isolated page.
ISOLATED = {
    "Content-Type": "text/html",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
}
HOLDER = """<script>
const isLetGo = new Int32Array(new SharedArrayBuffer(4));
const work = () => {
  onmessage = ({ data: isLetGo }) => {
    indexedDB.open("mlx-paged").onsuccess = ({ target: { result: db } }) => {
      const store = db.transaction(["chats", "messages"], "readwrite").objectStore("chats");
      const again = () => {
        if (Atomics.wait(isLetGo, 0, 0, 20) === "timed-out") store.get("none").onsuccess = again;
      };
      store.get("none").onsuccess = () => {
        postMessage("held");
        again();
      };
    };
  };
};
window.hold = () => new Promise((held) => {
  const worker = new Worker(URL.createObjectURL(new Blob([`(${work})()`])));
  worker.onmessage = held;
  worker.postMessage(isLetGo);
});
window.letGo = () => Atomics.store(isLetGo, 0, 1);
</script>"""


@in_browser
def test_a_page_that_goes_before_all_is_saved_loses_nothing(page, visitor) -> None:
    """A busy database is slower than a reload."""
    set_parameters(page, max_tokens="5")
    ask(page, "First of all")
    page.keyboard.press("Alt+n")
    expect(page.locator("#messages .assistant")).to_have_count(0)
    ask(page, "Second of all")
    other = visitor.context.new_page()
    other.route("**/hold", lambda route: route.fulfill(body=HOLDER, headers=ISOLATED))
    other.goto(f"{visitor.url}/hold")
    other.evaluate("async () => { await window.hold(); }")
    page.bring_to_front()
    titles = page.locator("#chats .title")
    page.get_by_role("button", name="Menu of First of all").click()
    page.get_by_role("menuitem", name="Delete").click()
    expect(titles).to_have_text(["Second of all"])
    page.get_by_role("button", name="Menu of Second of all").click()
    page.get_by_role("menuitem", name="Rename").click()
    page.keyboard.type("Renamed")
    page.keyboard.press("Enter")
    expect(titles).to_have_text(["Renamed"])
    page.reload(wait_until="commit")
    other.evaluate("() => { window.letGo(); }")
    expect(titles).to_have_text(["Renamed"])
    page.reload()
    expect(titles).to_have_text(["Renamed"])
