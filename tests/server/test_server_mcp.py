"""Tools of MCP servers on the chat page: who may call them, and what the user is asked."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from playwright.sync_api import Page, expect
from support.mcp_files import MCP_SERVER, PIXEL
from support.page_helpers import answered, in_browser, send, visiting
from support.page_quality import AT_ALL_WIDTHS, check_look
from support.scripted_engine import ScriptedEngine
from support.server_helpers import ENGINE, TIMEOUT, RunningServer, running

from mlx_paged import mcp
from mlx_paged.cli.entry import ExitCode, status_of
from mlx_paged.cli.main import app
from mlx_paged.server.config import ServerConfig


def config_file(folder: Path) -> str:
    path = folder / "mcp.json"
    servers = {
        "test": {"command": sys.executable, "args": [str(MCP_SERVER)]},
        "missing": {"command": "no-such-program"},
    }
    path.write_text(json.dumps({"mcpServers": servers}))
    return str(path)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[RunningServer]:
    config = ServerConfig(
        tool_template=True,
        mcp_config=config_file(tmp_path_factory.mktemp("mcp")),
        allowed_origins=("*", "http://known.test"),
        allowed_hosts=("known.test",),
    )
    with running(config, lambda: ScriptedEngine.from_model(**ENGINE)) as server:
        server.until(lambda: "starting" not in httpx.get(f"{server.url}/mcp/tools").text)
        yield server


@pytest.fixture
def page(browser, server) -> Iterator[Page]:
    with visiting(browser, server) as visitor:
        yield visitor.open()


def body_of(name: str, arguments: str, /, **consent: str) -> dict[str, Any]:
    return {
        "name": name,
        "arguments": arguments,
        "consent": {"name": name, "arguments": arguments, **consent},
    }


def say_call(name: str, **arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def test_dead_servers_are_logged(tmp_path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(mcp, "WATCH_INTERVAL", 0.05)
    others = set(psutil.Process().children())
    config = ServerConfig(mcp_config=config_file(tmp_path))

    def told(name: str, reason: str) -> bool:
        return any(
            r.levelname == "WARNING" and repr(name) in r.getMessage() and reason in r.getMessage()
            for r in caplog.records
        )

    with running(config, lambda: ScriptedEngine.from_model(**ENGINE)) as server:
        server.until(lambda: told("missing", "no-such-program"))
        with server.client() as client:

            def status() -> str:
                return client.get("/mcp/tools").json()["servers"][0]["status"]

            server.until(lambda: status() == "ready")
            assert not told("test", "")
            # It ends without a call that would notice.
            [program] = set(psutil.Process().children()) - others
            program.kill()
            server.until(lambda: status() == "failed")
            assert told("test", "")


# --- The paths ------------------------------------------------------------------------------------


def test_tools_are_listed_and_called(server) -> None:
    with server.client() as client:
        test, missing = client.get("/mcp/tools").json()["servers"]
        assert (test["name"], test["status"], test["error"]) == ("test", "ready", None)
        [add] = [tool for tool in test["tools"] if tool["name"] == "test__add"]
        assert add["description"] == "Add two numbers." and "a" in add["parameters"]["properties"]
        assert missing["status"] == "failed" and "no-such-program" in missing["error"]

        def called(name: str, arguments: str) -> dict[str, Any]:
            answer = client.post("/mcp/call", json=body_of(name, arguments))
            assert answer.status_code == 200, answer.text
            return answer.json()

        assert called("test__add", '{"a": 1, "b": 2}') == {"text": "3", "is_error": False}
        for name, arguments, told in (
            ("test__fails", "{}", "Error executing tool fails"),
            ("test__add", '{"a": 1, "a": 2}', "a name twice"),
            ("test__add", "[1]", "not a JSON object"),
            ("other", "{}", "there is no tool"),
            ("test__dies", "{}", "has ended"),
        ):
            answer = called(name, arguments)
            assert answer["is_error"] and told in answer["text"], answer
        assert called("test__add", '{"a": 1, "b": 2}')["text"] == "3"  # it was started again


def test_a_call_needs_consent_for_exactly_what_it_is(server, tmp_path) -> None:
    path = tmp_path / "notes"
    arguments = json.dumps({"path": str(path), "text": "x"})
    with server.client() as client:
        for body, status in (
            (body_of("test__note", arguments, arguments="{}"), 403),
            (body_of("test__note", arguments, name="test__add"), 403),
            ({"name": "test__note", "arguments": arguments}, 400),
            ({**body_of("test__note", arguments), "consent": True}, 400),
        ):
            answer = client.post("/mcp/call", json=body)
            assert answer.status_code == status, answer.text
            assert "consent" in answer.json()["error"]["param"]
    assert not path.exists()


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Origin": "http://evil.test"}, "cross_origin"),
        ({"Origin": "null"}, "cross_origin"),
        ({"Origin": "http://known.test"}, "cross_origin"),  # allowed for the API only
        ({"Sec-Fetch-Site": "cross-site"}, "cross_origin"),
        ({"Sec-Fetch-Site": "same-site"}, "cross_origin"),
        ({"Origin": "http://evil.test", "Host": "evil.test"}, "unknown_host"),
        ({"Host": "evil.test", "Sec-Fetch-Site": "same-origin"}, "unknown_host"),
        ({"Host": "localhost.evil.test"}, "unknown_host"),
        ({"Host": "["}, "unknown_host"),
        ({"Host": "known.test", "Origin": "https://known.test"}, None),
        ({"Host": "localhost:1", "Origin": "http://localhost:1"}, None),
        ({"Host": "[::1]:1", "Origin": "http://[::1]:1", "Sec-Fetch-Site": "same-origin"}, None),
    ],
)
def test_pages_of_other_origins_are_refused(server, headers, code) -> None:
    for method, path, body in (
        ("GET", "/mcp/tools", None),
        ("POST", "/mcp/call", body_of("test__add", '{"a": 1, "b": 2}')),
    ):
        answer = httpx.request(
            method, server.url + path, json=body, headers=headers, timeout=TIMEOUT
        )
        assert answer.status_code == (403 if code else 200), answer.text
        assert code is None or answer.json()["error"]["code"] == code


def test_a_form_cannot_call(server) -> None:
    body = json.dumps(body_of("test__add", '{"a": 1, "b": 2}'))
    headers = {"Content-Type": "text/plain"}
    answer = httpx.post(f"{server.url}/mcp/call", content=body, headers=headers)
    assert answer.status_code == 415


def test_keys_hold_for_tools_and_without_the_option_there_are_none(tmp_path) -> None:
    config = ServerConfig(api_keys=("sesame",), mcp_config=config_file(tmp_path))
    with running(config, lambda: ScriptedEngine.from_model(**ENGINE)) as server:
        assert httpx.get(f"{server.url}/mcp/tools").status_code == 401
        body = body_of("test__add", "{}")
        assert httpx.post(f"{server.url}/mcp/call", json=body).status_code == 401
        headers = {"Authorization": "Bearer sesame"}
        assert httpx.get(f"{server.url}/mcp/tools", headers=headers).status_code == 200
    with running(None, lambda: ScriptedEngine.from_model(**ENGINE)) as server:
        assert httpx.get(f"{server.url}/mcp/tools").status_code == 404


def test_the_option_is_checked_before_the_model_is_loaded(tmp_path, capsys) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    assert status_of(app, ["serve", "--mcp", str(wrong)]) == ExitCode.FAILED
    assert "mcpServers" in capsys.readouterr().err
    open_to_all = ["serve", "--mcp", config_file(tmp_path), "--host", "0.0.0.0"]
    assert status_of(app, open_to_all) == ExitCode.USAGE
    assert "--api-key" in capsys.readouterr().err


# --- The page -------------------------------------------------------------------------------------


def switch_on(page: Page, *names: str) -> None:
    page.click("#open-tools")
    for name in names:
        page.get_by_role("checkbox", name=name).check()
    page.click("#close-tools")


@in_browser
def test_nothing_runs_before_the_user_agrees(server, page, tmp_path) -> None:
    notes = tmp_path / "notes"
    arguments = {"path": str(notes), "text": "x\u202e"}
    server.engine.says("I write. " + say_call("test__note", **arguments), "As you like.")
    switch_on(page, "test__note")
    expect(page.locator("#tools-label")).to_have_text("Tools (1)")
    send(page, "Write it")
    question = page.locator(".call .question")
    expect(question).to_contain_text("Run test__note of the server “test” with these arguments?")
    shown = page.locator(".call pre").first
    expect(shown).to_be_visible()
    assert r"x\u202e" in shown.inner_text() and str(notes) in shown.inner_text()
    expect(page.locator("#announce")).to_contain_text("It wants to call test__note.")
    page.reload()  # the question stays, and so does the choice of tools
    expect(page.locator("#tools-label")).to_have_text("Tools (1)")
    question.get_by_role("button", name="Refuse").click()
    answered(page, 2)
    expect(page.locator(".assistant .text").last).to_have_text("As you like.")
    assert not notes.exists() and "The user refused this call." in server.engine.prompts[-1]
    expect(page.locator(".call summary")).to_have_text("test__note Refused")
    expect(shown).to_be_hidden()

    page.click("#new-chat")  # another chat has no tools
    expect(page.locator("#tools-label")).to_have_text("Tools")


@in_browser
def test_a_call_runs_once_and_always_is_for_this_chat_and_tool(server, page, tmp_path) -> None:
    notes = tmp_path / "notes"
    note = say_call("test__note", path=str(notes), text="x")
    server.engine.says(note, "Once.", note, note, "Thrice.", say_call("test__add", a=1, b=2), "3.")
    switch_on(page, "test__note", "test__add")
    send(page, "Write it")
    question = page.locator(".call .question").last
    question.get_by_role("button", name="Run").dblclick()
    answered(page, 2)
    expect(page.locator(".assistant .text").last).to_have_text("Once.")
    assert notes.read_text() == "x"
    page.locator(".call summary").click()
    expect(page.locator(".call pre").last).to_have_text("written")
    send(page, "Write it again")
    question.get_by_role("button", name="Always in this chat").click()
    answered(page, 5)
    expect(page.locator(".assistant .text").last).to_have_text("Thrice.")
    assert notes.read_text() == "xxx"
    send(page, "Add")  # another tool is asked for
    question.get_by_role("button", name="Run").click()
    answered(page, 7)
    assert "<tool_response>\n3\n</tool_response>" in server.engine.prompts[-1]


@in_browser
def test_pictures_of_a_result_are_shown_and_kept(server, page) -> None:
    server.engine.says(say_call("test__picture"), "A pixel.")
    switch_on(page, "test__picture")
    send(page, "Show it")
    page.locator(".call .question").get_by_role("button", name="Run").click()
    answered(page, 2)
    assert "[image of type image/png: not shown]" in server.engine.prompts[-1]
    for _ in range(2):
        page.wait_for_function("() => document.querySelector('.call img')?.naturalWidth === 1")
        page.get_by_role("button", name="Show picture 1").click()
        expect(page.locator("#viewer img")).to_have_attribute("alt", "picture 1")
        page.get_by_role("button", name="Close viewer").click()
        page.reload()
    page.click("#open-settings")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    [chat] = json.loads(Path(download.value.path()).read_text())["chats"]
    assert [record["data"] for record in chat["media"]] == [PIXEL]
    file = {"name": "x.json", "mimeType": "application/json"}
    page.locator("#import-file").set_input_files(
        {**file, "buffer": Path(download.value.path()).read_bytes()}
    )
    expect(page.locator("#import-state")).to_have_text("Imported 1 chat: 0 new messages.")


@in_browser
def test_a_call_that_hangs_is_stopped(server, page, tmp_path) -> None:
    begun = tmp_path / "begun"
    server.engine.says(say_call("test__hangs", path=str(begun)), "Stopped, then.")
    switch_on(page, "test__hangs")
    send(page, "Hang")
    page.locator(".question").get_by_role("button", name="Run").focus()
    page.keyboard.press("Enter")
    server.until(begun.exists)
    stop = page.get_by_role("button", name="Stop the call")
    expect(stop).to_be_focused()
    page.keyboard.press("Enter")
    answered(page, 2)
    expect(page.locator(".call summary")).to_have_text("test__hangs Failed")
    assert "The user stopped this call." in server.engine.prompts[-1]


@in_browser
@AT_ALL_WIDTHS
def test_axe_finds_nothing_in_tools(browser, server, width) -> None:
    with visiting(browser, server, viewport={"width": width, "height": 780}) as visitor:
        page = visitor.open()
        server.engine.says(say_call("test__add", a=1, b=2), "It is 3.")
        page.click("#open-tools")
        expect(page.locator("#tool-list")).to_contain_text("no-such-program")
        check_look(page, "server-tools")
        page.get_by_role("checkbox", name="test__add").check()
        page.keyboard.press("Escape")
        send(page, "1 + 2?")
        expect(page.locator(".question button")).to_have_count(3)
        check_look(page, "question")
        page.get_by_role("button", name="Run", exact=True).click()
        answered(page, 2)
        page.locator(".call summary").click()
        check_look(page, "result")
