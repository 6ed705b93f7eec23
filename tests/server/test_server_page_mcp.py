"""MCP servers that users add on the chat page: who may, where they may be, what they offer."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import httpx
import pytest
from playwright.sync_api import Page, Route, expect
from support.mcp_files import MCP_SERVER, PIXEL
from support.page_helpers import Visitor, answered, in_browser, send, visiting
from support.page_quality import AT_ALL_WIDTHS, check_escape, check_keys, check_look
from support.scripted_engine import ScriptedEngine
from support.server_helpers import ENGINE, TIMEOUT, RunningServer, running, until

from mlx_paged import mcp as mcp_client
from mlx_paged.cli.entry import ExitCode, status_of
from mlx_paged.cli.main import app
from mlx_paged.server import page_mcp
from mlx_paged.server import run as server_run
from mlx_paged.server.config import ServerConfig


@pytest.fixture(scope="module")
def mcp_url(tmp_path_factory) -> Iterator[str]:
    """URL of a server with streamable HTTP."""
    port = tmp_path_factory.mktemp("mcp") / "port"
    command = [sys.executable, str(MCP_SERVER), str(port)]
    with subprocess.Popen(command) as process:
        try:
            until(lambda: (port.exists() and port.read_text()) or process.poll() is not None)
            yield f"http://127.0.0.1:{port.read_text()}/mcp"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = ServerConfig(tool_template=True, page_mcp="private")
    with running(config, lambda: ScriptedEngine.from_model(**ENGINE)) as server:
        yield server


class Refuses(BaseHTTPRequestHandler):
    """Answers with 401, and remembers the headers that came."""

    seen: ClassVar[list[dict[str, str]]] = []

    def do_POST(self) -> None:
        self.seen.append(dict(self.headers))
        self.send_response(401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listener.server_address[1]}"
        listener.shutdown()
        thread.join()


@pytest.fixture
def refusing() -> Iterator[str]:
    with serving(Refuses) as url:
        yield f"{url}/mcp?key=secret"


def listed(server: RunningServer, *servers: dict[str, Any]) -> list[dict[str, Any]]:
    """The offers of the page's servers, once none is starting."""
    found: list[dict[str, Any]] = []

    def is_settled() -> bool:
        answer = httpx.post(f"{server.url}/mcp/tools", json={"servers": servers}, timeout=TIMEOUT)
        assert answer.status_code == 200, answer.text
        found[:] = answer.json()["servers"]
        return all(each["status"] != "starting" for each in found)

    server.until(is_settled)
    return found


def test_a_server_of_the_page_offers_tools_prompts_and_resources(server, mcp_url) -> None:
    mine = {"name": "mine", "url": mcp_url}
    [offers] = listed(server, mine)
    assert (offers["status"], offers["error"], offers["is_own"]) == ("ready", None, True)
    assert "mine__add" in [tool["name"] for tool in offers["tools"]]
    [prompt] = offers["prompts"]
    assert (prompt["name"], prompt["title"]) == ("review", "Review code")
    assert [(a["name"], a["required"]) for a in prompt["arguments"]] == [
        ("code", True), ("language", False),
    ]  # fmt: skip
    assert {r["uri"]: r["type"] for r in offers["resources"]} == {
        "notes://today": "text/plain", "pixel://red": "image/png",
    }  # fmt: skip
    with server.client() as client:
        arguments = '{"a": 1, "b": 2}'
        body = {
            "name": "mine__add", "arguments": arguments, "server": mine,
            "consent": {"name": "mine__add", "arguments": arguments},
        }  # fmt: skip
        assert client.post("/mcp/call", json=body).json() == {"text": "3", "is_error": False}
        body["consent"] = {"name": "mine__add", "arguments": "{}"}
        assert client.post("/mcp/call", json=body).status_code == 403
        body = {"server": mine, "name": "review", "arguments": {"code": "x = 1"}}
        answer = client.post("/mcp/prompt", json=body)
        assert answer.json() == {"text": "Review this Python code:\nx = 1"}
        answer = client.post("/mcp/prompt", json={**body, "name": "no"})
        assert answer.status_code == 502 and "mine" in answer.json()["error"]["message"]
        answer = client.post("/mcp/resource", json={"server": mine, "uri": "notes://today"})
        [contents] = answer.json()["contents"]
        assert (contents["text"], contents["type"]) == ("Buy a ladder.", "text/plain")
        answer = client.post("/mcp/resource", json={"server": mine, "uri": "pixel://red"})
        assert answer.json()["contents"][0]["data"] == PIXEL


def test_a_result_of_two_megabytes_is_cut(server, mcp_url) -> None:
    call = {"name": "mine__long", "arguments": '{"count": 2000000}'}
    body = {**call, "consent": call, "server": {"name": "mine", "url": mcp_url}}
    with server.client() as client:
        answer = client.post("/mcp/call", json=body).json()
    assert not answer["is_error"] and "more characters are not shown" in answer["text"], answer
    assert len(answer["text"]) < 110_000


def test_a_call_connects_to_a_server_that_is_not_listed_yet(mcp_url, refusing) -> None:
    call = {"name": "mine__add", "arguments": '{"a": 1, "b": 2}'}
    body = {**call, "consent": call, "server": {"name": "mine", "url": mcp_url}}
    # As after a restart of the server, or when an idle connection was closed.
    config = ServerConfig(page_mcp="private")
    scripted = running(config, lambda: ScriptedEngine.from_model(**ENGINE))
    with scripted as server, server.client() as client:
        answer = client.post("/mcp/call", json=body)
        assert answer.json() == {"text": "3", "is_error": False}
        body["server"] = {"name": "mine", "url": refusing}
        answer = client.post("/mcp/call", json=body).json()
        assert answer["is_error"] and "requires authorization" in answer["text"]


def test_a_refusal_is_told_and_keys_are_not(server, refusing, caplog) -> None:
    headers = {"Authorization": "Bearer sesame"}
    [offers] = listed(server, {"name": "locked", "url": refusing, "headers": headers})
    assert offers["status"] == "failed" and "requires authorization" in offers["error"]
    assert Refuses.seen[-1]["Authorization"] == "Bearer sesame"
    told = offers["error"] + caplog.text
    assert "secret" not in told and "sesame" not in told


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"name": "a__b", "url": "http://127.0.0.1/mcp"}, "servers[0].name"),
        ({"name": "", "url": "http://127.0.0.1/mcp"}, "servers[0].name"),
        ({"name": "a", "url": "file:///etc/passwd"}, "servers[0].url"),
        ({"name": "a", "url": "http://user:pass@host/"}, "servers[0].url"),
        ({"name": "a", "url": "http://h/", "headers": {"a b": "c"}}, "servers[0].headers"),
        ({"name": "a", "url": "http://h/", "headers": {"a": "b\r\nc: d"}}, "servers[0].headers"),
        ({"name": "a", "url": "http://h/", "command": "rm"}, "servers[0].command"),
    ],
)
def test_wrong_servers_are_refused(server, body, param) -> None:
    answer = httpx.post(f"{server.url}/mcp/tools", json={"servers": [body]}, timeout=TIMEOUT)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_two_servers_have_two_names(server, mcp_url) -> None:
    twice = [{"name": "a", "url": mcp_url}] * 2
    answer = httpx.post(f"{server.url}/mcp/tools", json={"servers": twice}, timeout=TIMEOUT)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "servers[1].name"


def test_metadata_services_are_out_of_reach(server) -> None:
    [offers] = listed(server, {"name": "cloud", "url": "http://169.254.169.254/latest"})
    assert offers["status"] == "failed" and "metadata" in offers["error"]


def test_off_loopback_only_public_addresses_are_reached(mcp_url) -> None:
    config = ServerConfig(page_mcp="public")
    with running(config, lambda: ScriptedEngine.from_model(**ENGINE)) as server:
        [offers] = listed(server, {"name": "mine", "url": mcp_url})
        assert offers["status"] == "failed" and "not public" in offers["error"]


@pytest.mark.parametrize(
    "headers", [{"Origin": "http://evil.test"}, {"Sec-Fetch-Site": "cross-site"}]
)
def test_pages_of_other_origins_are_refused(server, mcp_url, headers) -> None:
    mine = {"name": "mine", "url": mcp_url}
    for path, body in (
        ("tools", {"servers": [mine]}),
        ("prompt", {"server": mine, "name": "review"}),
        ("resource", {"server": mine, "uri": "notes://today"}),
    ):
        answer = httpx.post(f"{server.url}/mcp/{path}", json=body, headers=headers, timeout=TIMEOUT)
        assert answer.status_code == 403, answer.text
        assert answer.json()["error"]["code"] == "cross_origin"


def test_without_the_option_there_are_none(mcp_url, tmp_path) -> None:
    file = tmp_path / "mcp.json"
    file.write_text(json.dumps({"mcpServers": {}}))
    mine = {"servers": [{"name": "mine", "url": mcp_url}]}
    for config, status in ((None, 404), (ServerConfig(mcp_config=str(file)), 403)):
        with running(config, lambda: ScriptedEngine.from_model(**ENGINE)) as server:
            answer = httpx.post(f"{server.url}/mcp/tools", json=mine, timeout=TIMEOUT)
            assert answer.status_code == status, answer.text


def test_connections_are_shared_and_closed_when_they_are_idle(server, mcp_url, monkeypatch) -> None:
    pages = server.context.page_servers
    mine, other = {"name": "mine", "url": mcp_url}, {"name": "other", "url": mcp_url}
    listed(server, mine, other)
    before = dict(pages._connections)
    listed(server, mine, other)
    assert pages._connections == before, "another request made another connection"
    monkeypatch.setattr(page_mcp, "IDLE_SECONDS", -1.0)
    listed(server)
    assert not pages._connections
    server.until(lambda: not pages._closing)
    monkeypatch.setattr(page_mcp, "IDLE_SECONDS", 600.0)
    listed(server, mine)
    monkeypatch.setattr(page_mcp, "MAX_SERVERS", 1)
    listed(server, other)
    assert [key[0] for key in pages._connections] == ["other"]


class Floods(BaseHTTPRequestHandler):
    """Answers with more bytes than any answer may have, or with compressed ones."""

    #: True for each answer that the client ended.
    were_ended: ClassVar[queue.Queue[bool]] = queue.Queue()

    def do_POST(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        if self.path == "/compressed":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        try:
            # Far more than is read and socket buffers hold, which is up to 36 MB more on Linux.
            for _ in range(8):
                self.wfile.write(bytes(mcp_client._MAX_ANSWER_BYTES))
        except ConnectionError:
            self.were_ended.put(True)
        else:
            self.were_ended.put(False)


@pytest.mark.parametrize(
    ("path", "reason"), [("endless", "larger than 32 MB"), ("compressed", "compressed (gzip)")]
)
def test_an_answer_that_is_too_large_ends_its_connection(server, path, reason) -> None:
    with serving(Floods) as url:
        [offers] = listed(server, {"name": "floods", "url": f"{url}/{path}"})
        assert Floods.were_ended.get(timeout=TIMEOUT)
    assert offers["status"] == "failed" and reason in offers["error"], offers


#: Options of `serve`, and the servers that users of the page may then name by default.
BY_DEFAULT = [
    ([], "private"),
    (["--host", "localhost"], "private"),
    (["--host", "0.0.0.0"], "off"),
    (["--uds", "/tmp/mlx-paged.sock"], "off"),
    (["--root-path", "/llm"], "off"),
    (["--allowed-hosts", "llm.example.com"], "off"),
    (["--no-page-mcp"], "off"),
    (["--page-mcp", "--api-key", "k"], "private"),
    (["--page-mcp", "--api-key", "k", "--host", "0.0.0.0"], "public"),
    (["--page-mcp", "--api-key", "k", "--root-path", "/llm"], "public"),
]


@pytest.fixture
def configs(monkeypatch) -> list[ServerConfig]:
    """Configurations that `serve` would have run a server with."""
    configs: list[ServerConfig] = []

    def run(_: Any, config: ServerConfig, **__: Any) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr(server_run, "serve", run)
    return configs


@pytest.mark.parametrize(("options", "expected"), BY_DEFAULT, ids=str)
def test_the_default_depends_on_who_reaches_the_server(configs, options, expected) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        status_of(app, ["serve", *options])
    assert [config.page_mcp for config in configs] == [expected]


@pytest.mark.parametrize("option", [["--host", "0.0.0.0"], ["--root-path", "/llm"]], ids=str)
def test_the_option_needs_a_key_where_others_reach_the_server(configs, capsys, option) -> None:
    assert status_of(app, ["serve", "--page-mcp", *option]) == ExitCode.USAGE
    assert "--api-key" in capsys.readouterr().err
    assert not configs


# --- The page -------------------------------------------------------------------------------------


@pytest.fixture
def visitor(browser, server) -> Iterator[Visitor]:
    with visiting(browser, server) as visitor:
        yield visitor


def add(page: Page, name: str, url: str, headers: str = "") -> None:
    page.get_by_role("button", name="Add an MCP server").click()
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_label("URL (streamable HTTP)").fill(url)
    page.get_by_label("Headers, one a line").fill(headers)
    page.get_by_role("button", name="Add", exact=True).click()


@in_browser
def test_a_server_is_added_used_turned_off_and_removed(server, visitor, mcp_url) -> None:
    page = visitor.open()
    page.click("#open-tools")
    add(page, "mine", mcp_url)
    page.get_by_role("checkbox", name="mine__add").check()
    page.keyboard.press("Escape")
    expect(page.locator("#tools-label")).to_have_text("Tools (1)")
    say = '<tool_call>\n{"name": "mine__add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    server.engine.says(say, "It is 3.")
    send(page, "1 + 2?")
    question = page.locator(".call .question")
    for _ in range(2):
        expect(question).to_contain_text("Run mine__add of the server “mine” with these arguments?")
        page.reload()  # the list is kept
    question.get_by_role("button", name="Run").click()
    answered(page, 2)
    assert "<tool_response>\n3\n</tool_response>" in server.engine.prompts[-1]
    page.click("#open-tools")
    page.get_by_role("button", name="Turn off mine").click()
    expect(page.locator("#tool-list")).to_contain_text("It is turned off.")
    page.get_by_role("button", name="Turn on mine").click()
    expect(page.get_by_role("checkbox", name="mine__add")).to_be_checked()
    page.get_by_role("button", name="Edit mine").click()
    page.get_by_label("Name", exact=True).fill("yours")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("checkbox", name="yours__add")).to_be_visible()
    page.get_by_role("button", name="Remove yours").click()
    expect(page.locator("#tool-list section")).to_have_count(0)


@in_browser
def test_wrong_servers_are_told_beside_the_field(visitor, refusing) -> None:
    page = visitor.open()
    page.click("#open-tools")
    for name, url, headers, told in (
        ("a__b", "http://h/", "", "single"),
        ("a", "ftp://h/", "", "http or https"),
        ("a", "http://h/", "no colon", "Name: value"),
    ):
        add(page, name, url, headers)
        expect(page.locator(".own-server .error:not(:empty)")).to_contain_text(told)
        expect(page.locator(":focus")).to_have_attribute("aria-invalid", "true")
        page.get_by_role("button", name="Cancel").click()
    add(page, "locked", refusing)
    expect(page.locator("#tool-list")).to_contain_text("requires authorization")


@in_browser
def test_prompts_are_inserted_and_resources_attached(server, visitor, mcp_url) -> None:
    page = visitor.open()
    page.click("#open-tools")
    add(page, "mine", mcp_url)
    page.get_by_role("button", name="Insert Review code").click()
    page.get_by_label("code", exact=True).fill("x = 1")
    page.keyboard.press("Enter")
    expect(page.locator("#input")).to_have_value("Review this Python code:\nx = 1")
    page.click("#open-tools")
    page.get_by_role("button", name="Attach Notes of today").click()
    expect(page.locator(".tray .chip")).to_contain_text("Notes of today")
    server.engine.says("Done.")
    page.locator("#input").press("Enter")
    answered(page)
    assert "Buy a ladder." in server.engine.prompts[-1]


@in_browser
@AT_ALL_WIDTHS
def test_the_dialog_of_tools_in_all_states(browser, server, mcp_url, refusing, width) -> None:
    """By axe, by its widths, and by keys alone."""
    with visiting(browser, server, viewport={"width": width, "height": 780}) as visitor:
        page = visitor.open()
        opener, dialog = page.locator("#open-tools"), page.locator("#tools")

        def press(name: str) -> None:
            page.get_by_role("button", name=name, exact=True).press("Enter")

        def check(state: str) -> None:
            if width != 2560 or state in ("tools-wrong", "tools", "tools-edit"):
                check_look(page, state)
            check_keys(page, dialog)

        def focused(name: str) -> None:
            expect(page.get_by_role("button", name=name, exact=True)).to_be_focused()

        expect(opener).to_be_visible()  # once the server has said what it takes
        opener.press("Enter")
        check("tools-none")
        press("Add an MCP server")
        check("tools-new")
        press("Cancel")
        focused("Add an MCP server")
        add(page, "a__b", mcp_url)
        expect(page.locator(":focus")).to_have_attribute("aria-invalid", "true")
        check("tools-wrong")
        press("Cancel")
        add(page, "locked", refusing)
        expect(page.locator("#tool-list")).to_contain_text("requires authorization")
        focused("Edit locked")
        add(page, "mine", mcp_url)
        expect(page.get_by_role("checkbox", name="mine__add")).to_be_visible()
        check("tools")
        press("Insert Review code")
        expect(page.get_by_label("code", exact=True)).to_be_focused()
        check("tools-arguments")
        press("Cancel")
        focused("Insert Review code")
        press("Edit mine")
        check("tools-edit")
        page.get_by_label("Name", exact=True).fill("yours")
        page.keyboard.press("Enter")
        focused("Edit yours")
        expect(page.get_by_role("checkbox", name="yours__add")).to_be_visible()
        focused("Edit yours")
        press("Turn off yours")
        focused("Turn on yours")
        expect(page.locator("#tool-list")).to_contain_text("It is turned off.")
        check("tools-off")
        press("Remove yours")
        focused("Add an MCP server")
        check_escape(page, dialog, opener)


@in_browser
def test_polls_leave_the_focus_where_it_is(server, visitor, mcp_url) -> None:
    page = visitor.open()
    page.click("#open-tools")
    add(page, "mine", mcp_url)
    box = page.get_by_role("checkbox", name="mine__add")
    expect(box).to_be_visible()

    def answer(route: Route) -> None:
        response = route.fetch()
        offers = response.json()
        offers["servers"].append({**offers["servers"][0], "name": "slow", "status": "starting"})
        offers["servers"][-1] |= {"tools": [], "prompts": [], "resources": []}
        route.fulfill(response=response, json=offers)

    page.route("**/mcp/tools", answer)
    page.keyboard.press("Escape")
    page.click("#open-tools")
    expect(page.locator("#tool-list")).to_contain_text("It is being started.")
    box.evaluate("(box) => { window.box = box; box.focus(); }")
    page.wait_for_function("() => !window.box.isConnected")  # it was drawn anew
    expect(box).to_be_focused()
