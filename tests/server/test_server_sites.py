"""Pages of other sites: they cannot make a local server compute or change, and read no answers."""

from __future__ import annotations

import functools
import gzip
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.page_helpers import FOREIGN_HOST, in_browser
from support.server_helpers import RunningServer, running

from mlx_paged.errors import InvalidParameterError
from mlx_paged.server.api import API
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.sites import known_hosts

COMPLETION = {"prompt": "a", "max_tokens": 1, "temperature": 0}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = ServerConfig(allowed_hosts=("known.test", "::2"), allowed_origins=("http://a.test",))
    with running(config) as server:
        yield server


def refused(answer: httpx.Response, status: int, code: str) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code
    return error["message"]


# --- Origin and Sec-Fetch-Site --------------------------------------------------------------------

FOREIGN = [
    {"Origin": "http://evil.test"},
    {"Origin": "null"},
    {"Origin": "http://["},
    {"Origin": "http://localhost:1"},
    {"Origin": "http://evil.test", "Sec-Fetch-Site": "none"},
    {"Origin": "http://a.test.evil.test", "Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
]


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_pages_of_other_origins_neither_compute_nor_change_anything(server, headers) -> None:
    for operation in API:
        if operation.method == "GET":
            continue
        path = operation.path.replace("{response_id}", "resp_1")
        answer = httpx.request(
            operation.method, server.url + path, content=b"{}", headers={**JSON, **headers}
        )
        if path.startswith("/v1/messages"):
            assert (answer.status_code, answer.json()["type"]) == (403, "error")
        elif path.startswith("/api/") and not path.startswith("/api/v0/"):
            assert answer.status_code == 403 and "--allowed-origins" in answer.json()["error"]
        else:
            assert "--allowed-origins" in refused(answer, 403, "cross_origin"), path
    # A link of another site may lead to the page.
    assert httpx.get(server.url, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Sec-Fetch-Site": "none"},
        {"Origin": "http://localhost:1", "Host": "localhost:1"},
        {"Origin": "https://llm.test", "Sec-Fetch-Site": "same-origin"},  # behind a proxy
        {"Origin": "http://a.test", "Sec-Fetch-Site": "cross-site"},
    ],
    ids=str,
)
def test_programs_and_own_and_allowed_pages_are_answered(server, headers) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json=COMPLETION, headers=headers)
    assert answer.status_code == 200, answer.text
    assert httpx.post(f"{server.url}/reset_prefix_cache", headers=headers).status_code == 200


def test_any_origin_may_be_allowed() -> None:
    with running(ServerConfig(allowed_origins=("*",))) as server:
        headers = {"Origin": "null", "Sec-Fetch-Site": "cross-site"}
        answer = httpx.post(f"{server.url}/reset_prefix_cache", headers=headers)
        assert answer.status_code == 200


# --- Host -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        ("localhost", True),
        ("LOCALHOST.:81", True),
        ("127.0.0.1:9", True),
        ("[::1]:9", True),
        ("known.test:9", True),
        ("[0:0::2]", True),
        ("evil.test", False),
        ("localhost.evil.test", False),
        ("127.0.0.1.evil.test", False),
        ("known.test@evil.test", False),
        ("evil.test:9", False),
        ("192.0.2.1", False),
        ("x", False),
        ("[", False),
        ("", False),
    ],
)
def test_a_server_on_loopback_has_known_names_only(server, host, is_known) -> None:
    for method, path in (("GET", "/"), ("GET", "/v1/models"), ("POST", "/v1/completions")):
        body = COMPLETION if method == "POST" else None
        answer = httpx.request(method, server.url + path, json=body, headers={"Host": host})
        if is_known:
            assert answer.status_code == 200, answer.text
        else:
            assert "--allowed-hosts" in refused(answer, 403, "unknown_host")


def test_elsewhere_names_are_checked_if_some_are_given() -> None:
    assert known_hosts("0.0.0.0", ()) is None
    assert known_hosts("192.0.2.1", ("LLM.test.",)) == {"localhost", "llm.test"}
    assert known_hosts("127.0.0.1", ()) == known_hosts("::1", ()) == {"localhost"}
    assert known_hosts("127.0.0.1", ("a.test", "*")) is None


@pytest.mark.parametrize("name", ["", "http://a.test", "a.test:80", "a.test/", "*.test", "[::1"])
def test_names_that_could_never_match_are_refused(name) -> None:
    with pytest.raises(InvalidParameterError, match="allowed_hosts must be names or addresses"):
        ServerConfig(allowed_hosts=(name,))


# --- Bodies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        (None, "is missing"),
        ("", "is ''"),
        ("text/plain", "'text/plain'"),
        ("application/x-www-form-urlencoded", "'application/x-www-form-urlencoded'"),
        ("multipart/form-data; boundary=x", "'multipart/form-data; boundary=x'"),
        ("text/plain; application/json", "'text/plain; application/json'"),
    ],
)
def test_bodies_must_be_json(server, kind, shown) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    for path in ("/v1/completions", "/v1/responses", "/tokenize", "/reset_prefix_cache", "/ping"):
        answer = httpx.post(f"{server.url}{path}", content=b'{"prompt": "a"}', headers=headers)
        message = refused(answer, 415, "unsupported_media_type")
        assert shown in message and "curl: -H 'Content-Type: application/json'" in message


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON ; charset=utf-8"])
def test_json_may_have_parameters(server, kind) -> None:
    answer = httpx.post(
        f"{server.url}/v1/completions",
        content=json.dumps(COMPLETION),
        headers={"Content-Type": kind, "Content-Encoding": "identity"},
    )
    assert answer.status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "identity, gzip"])
def test_compressed_bodies_are_refused_unread(server, encoding) -> None:
    content = gzip.compress(json.dumps(COMPLETION).encode())
    for path in ("/v1/completions", "/reset_prefix_cache"):
        headers = {**JSON, "Content-Encoding": encoding}
        answer = httpx.post(server.url + path, content=content, headers=headers)
        assert repr(encoding) in refused(answer, 415, "unsupported_media_type")
        assert answer.headers["Accept-Encoding"] == "identity"


# --- In a browser ---------------------------------------------------------------------------------

PAGE = """<script>
async function run(server) {
  const tell = async (request) => {
    try { const r = await request; return r.type + " " + r.status + " " + await r.text(); }
    catch (error) { return "blocked"; }
  };
  const chat = JSON.stringify({ messages: [{ role: "user", content: "a" }], max_tokens: 1 });
  const post = { method: "POST", mode: "no-cors" };
  const found = {};
  for (const [name, url, options] of [
    ["blob", "/v1/chat/completions", { ...post, body: new Blob([chat]) }],
    ["bytes", "/v1/responses", { ...post, body: new TextEncoder().encode('{"input": "a"}') }],
    ["text", "/v1/chat/completions", { ...post, body: chat }],
    ["reset", "/reset_prefix_cache", post],
    ["json", "/v1/chat/completions",
     { method: "POST", headers: { "Content-Type": "application/json" }, body: chat }],
    ["form", "/v1/completions", { ...post, body: new URLSearchParams("a=b") }],
    ["beacon", "/reset_prefix_cache", null],
    ["read", "/v1/models", {}],
  ])
    found[name] = options === null
      ? (navigator.sendBeacon(server + url), "sent")
      : await tell(fetch(server + url, options));
  return found;
}
</script>"""


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[str]:
    """A site on a port of its own."""
    (tmp_path / "evil.html").write_text(PAGE)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        yield f":{site.server_port}/evil.html"
        site.shutdown()
        thread.join()


def statuses(server: RunningServer) -> dict[tuple[str, str], float]:
    """How often each path was answered with each status."""
    found = {}
    for family in server.context.metrics.responses.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                found[sample.labels["path"], sample.labels["status"]] = sample.value
    return found


@in_browser
@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", FOREIGN_HOST])
def test_a_page_of_another_origin_gets_nothing_done(browser, elsewhere, name) -> None:
    with running() as server:
        page = browser.new_page()
        page.goto(f"http://{name}{elsewhere}")
        found: dict[str, Any] = page.evaluate("run", server.url)
        page.close()
        resets = ("/reset_prefix_cache", "200"), ("/reset_prefix_cache", "403")
        server.until(lambda: sum(statuses(server).get(reset, 0) for reset in resets) == 2)
        posted = {place: n for place, n in statuses(server).items() if place[0] != "/v1/models"}
        assert found["json"] == found["read"] == "blocked"
        assert not [answer for answer in found.values() if '"choices"' in answer]
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/completions"):
            assert posted.get((path, "403")), posted
            assert (path, "200") not in posted
        assert ("/reset_prefix_cache", "200") not in posted


@in_browser
def test_a_name_that_was_pointed_here_reads_nothing(browser) -> None:
    """DNS rebinding: for the browser the page and this server are one origin."""
    with running() as server:
        page = browser.new_page()
        page.goto(f"http://{FOREIGN_HOST}:{server.port}/web/icon.svg")
        assert "--allowed-hosts" in page.inner_text("body")
        asked = page.evaluate(
            """async () => {
              const models = await fetch("/v1/models");
              const body = JSON.stringify({ prompt: "a", max_tokens: 1 });
              const headers = { "Content-Type": "application/json" };
              const answer = await fetch("/v1/completions", { method: "POST", headers, body });
              return [models.status, (await models.json()).error.code,
                      answer.status, (await answer.json()).error.code];
            }"""
        )
        assert asked == [403, "unknown_host", 403, "unknown_host"]
        page.close()
