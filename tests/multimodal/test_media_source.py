"""The bytes behind URLs: what is read, what may not be reached, and what ends early."""

from __future__ import annotations

import base64
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlx_paged.addresses import Reach, UnreachableHostError, addresses_of
from mlx_paged.multimodal import source
from mlx_paged.multimodal.items import Deadline, Unusable
from mlx_paged.multimodal.source import read_url

LOOPBACK = ("127.0.0.1",)


def read(url: str, *, seconds: float = 300.0, cancelled: Any = None, **options: Any) -> bytes:
    defaults = {"max_bytes": 1000, "max_redirects": 3, "local_path": None, "domains": None}
    deadline = Deadline(seconds, cancelled or threading.Event(), "it was not fetched")
    return read_url(url, deadline=deadline, **{**defaults, **options})  # type: ignore[arg-type]


def refusal(url: str, **options: Any) -> str:
    with pytest.raises(Unusable) as caught:
        read(url, **options)
    return str(caught.value)


# --- data: ----------------------------------------------------------------------------------------

DATA = bytes(range(256))
PLAIN = base64.b64encode(DATA).decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{PLAIN}",
        f"data:;base64,{PLAIN}",
        f"DATA:image/png;charset=x;BASE64,{PLAIN}",
        f"data:;base64,{PLAIN[:40]}\n {PLAIN[40:]}",
        f"data:;base64,{PLAIN.rstrip('=')}",
        f"data:;base64,{PLAIN.replace('+', '-').replace('/', '_')}",
        f"data:;base64,{PLAIN.replace('+', '%2B').replace('=', '%3D')}",
        "data:application/octet-stream," + "".join(f"%{byte:02x}" for byte in DATA),
    ],
)
def test_data_urls_in_every_spelling(url: str) -> None:
    assert read(url) == DATA


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64", "no comma"),
        ("data:;base64,AAA*", "not base64"),
        ("data:;base64,AAAAA", "not base64"),
        ("data:;base64,\u00e9AAA", "not base64"),
        ("data:;base64," + "A" * 1400, "more than 1000 bytes"),
        ("data:;base64," + "A" * 100_000, "more than 1000 bytes"),
        ("data:," + "a" * 1001, "more than 1000 bytes"),
        ("ftp://example.com/a.png", "must be a data:, http:, https: or file: URL"),
        ("cat.png", "must be a data:, http:, https: or file: URL"),
        ("", "must be a data:, http:, https: or file: URL"),
        ("javascript:alert(1)", "must be a data:, http:, https: or file: URL"),
    ],
)
def test_what_is_no_url_of_data_is_refused(url: str, reason: str) -> None:
    assert reason in refusal(url)


# --- file: ----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = (tmp_path / "allowed").resolve()
    (inside / "deep").mkdir(parents=True)
    (inside / "a b.png").write_bytes(b"inside")
    (inside / "deep" / "large.png").write_bytes(bytes(1001))
    (tmp_path / "outside.png").write_bytes(b"outside")
    (tmp_path / "allowed-not").mkdir()
    (tmp_path / "allowed-not" / "x.png").write_bytes(b"outside")
    (inside / "link.png").symlink_to(tmp_path / "outside.png")
    (inside / "good.png").symlink_to(inside / "a b.png")
    os.mkfifo(inside / "pipe")
    return inside


def test_files_under_the_folder_are_read(folder: Path) -> None:
    assert read(f"file://{folder}/a%20b.png", local_path=folder) == b"inside"
    assert read(f"file://localhost{folder}/a%20b.png", local_path=folder) == b"inside"
    assert read(f"file://{folder}/deep/../good.png", local_path=folder) == b"inside"


@pytest.mark.parametrize(
    "path",
    [
        "../outside.png", "%2e%2e/outside.png", "deep/../../outside.png", "link.png",
        "../allowed-not/x.png", "missing.png", "a%00.png", "%ff.png", "/etc/passwd",
    ],
)  # fmt: skip
def test_other_files_are_not_there(folder: Path, path: str) -> None:
    """Whatever is outside looks as if it were missing: nobody learns which files exist."""
    url = f"file://{path}" if path.startswith("/") else f"file://{folder}/{path}"
    assert refusal(url, local_path=folder) == "there is no such file under allowed_local_media_path"


def test_what_is_no_file_is_refused(folder: Path) -> None:
    assert "not a regular file" in refusal(f"file://{folder}/pipe", local_path=folder)
    assert "cannot be read" in refusal(f"file://{folder}/deep", local_path=folder)
    assert "more than 1000 bytes" in refusal(f"file://{folder}/deep/large.png", local_path=folder)
    assert "no host" in refusal(f"file://example.com{folder}/a.png", local_path=folder)


def test_no_file_may_be_named_without_a_folder(folder: Path) -> None:
    assert "allowed_local_media_path is not set" in refusal(f"file://{folder}/a%20b.png")


# --- http: ----------------------------------------------------------------------------------------


@contextmanager
def answering(answer: Callable[[bytes, socket.socket], bytes | None]) -> Iterator[tuple[str, list]]:
    """A server on loopback that answers each request with some bytes, and what it was asked."""
    listener = socket.create_server(("127.0.0.1", 0))
    asked: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        with connection:
            request = b""
            while b"\r\n\r\n" not in request:
                part = connection.recv(4096)
                if not part:
                    return
                request += part
            asked.append(request)
            found = answer(request, connection)
            if found is not None:
                connection.sendall(found)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(300)


def ok(body: bytes, *headers: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def moved(to: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode()


def test_what_a_server_answers_is_read() -> None:
    with answering(lambda *_: ok(b"picture")) as (url, asked):
        assert read(f"{url}/a/b.png?x=1&y=%20#frag", domains=LOOPBACK) == b"picture"
        assert read(f"{url}/\u00e4.png", domains=LOOPBACK) == b"picture"
    head = asked[0].decode().split("\r\n")
    assert head[0] == "GET /a/b.png?x=1&y=%20 HTTP/1.1"
    assert f"Host: {url.removeprefix('http://')}" in head
    assert asked[1].startswith(b"GET /%C3%A4.png ")


def test_private_addresses_are_reached_only_where_they_are_named() -> None:
    with answering(lambda *_: ok(b"picture")) as (url, asked):
        assert "not public" in refusal(f"{url}/a.png")
        assert "not public" in refusal(f"{url}/a.png".replace("127.0.0.1", "localhost"))
        assert not asked
        assert "allowed_media_domains" in refusal(f"{url}/a.png", domains=("example.com",))
        assert not asked
        assert read(f"{url}/a.png", domains=("example.com", "127.0.0.1")) == b"picture"


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "0.0.0.0", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1%eth0", "fd00::1",
        "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1",
        "2002:7f00:1::", "198.18.0.1", "192.0.2.1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(monkeypatch, address: str) -> None:
    public = ("93.184.216.34", 80)
    for found in ([address], ["93.184.216.34", address]):
        entries = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, 80)) for a in found]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, entries=entries, **__: entries)
        with pytest.raises(UnreachableHostError, match="not public"):
            addresses_of("x.example", 80, Reach.PUBLIC)
        assert addresses_of("x.example", 80, Reach.ANY)
    entries = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", public)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entries)
    assert addresses_of("x.example", 80, Reach.PUBLIC)[0][3] == public


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_addresses_that_are_public(address: str) -> None:
    assert addresses_of(address, 80, Reach.PUBLIC)


@pytest.mark.parametrize(
    ("address", "is_allowed"),
    [
        ("127.0.0.1", True), ("10.1.2.3", True), ("192.168.1.1", True), ("::1", True),
        ("8.8.8.8", True), ("169.254.169.254", False), ("::ffff:169.254.169.254", False),
        ("64:ff9b::a9fe:a9fe", False), ("fd00:ec2::254", False), ("100.100.100.200", False),
        ("fe80::1", False), ("224.0.0.1", False), ("0.0.0.0", False),
    ],
)  # fmt: skip
def test_metadata_services_are_out_of_reach_where_private_networks_are_not(
    address: str, is_allowed: bool
) -> None:
    if is_allowed:
        assert addresses_of(address, 80, Reach.NO_METADATA)
    else:
        with pytest.raises(UnreachableHostError, match="metadata"):
            addresses_of(address, 80, Reach.NO_METADATA)


@pytest.mark.parametrize(
    "host", ["0x7f000001", "2130706433", "127.1", "0177.0.0.1", "[::ffff:127.0.0.1]", "[::1]"]
)
def test_odd_spellings_of_loopback_are_loopback(host: str) -> None:
    assert "not public" in refusal(f"http://{host}:1/a.png") or "no host" in refusal(
        f"http://{host}:1/a.png"
    )


def test_the_address_that_was_checked_is_the_one_that_is_asked(monkeypatch) -> None:
    """A name that leads elsewhere when it is looked up again: it is not."""
    looked_up, connected, ends = [], [], []
    answers = iter([[("93.184.216.34", 80)], [("127.0.0.1", 80)]])

    def getaddrinfo(host: str, *_: Any, **__: Any) -> Any:
        looked_up.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", a) for a in next(answers)]

    def connect(where: Any, timeout: float) -> socket.socket:
        connected.append(where[3])
        ours, theirs = socket.socketpair()
        ends.append(theirs)
        theirs.sendall(ok(b"picture"))
        return ours

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(source, "_connected", connect)
    assert read("http://rebinding.example/a.png") == b"picture"
    assert looked_up == ["rebinding.example"] and connected == [("93.184.216.34", 80)]
    assert "not public" in refusal("http://rebinding.example/a.png")
    assert len(connected) == 1


def test_redirects_are_followed_and_counted() -> None:
    def answer(request: bytes, _: Any) -> bytes:
        step = int(request.split()[1].removeprefix(b"/"))
        return moved(f"/{step + 1}", [301, 302, 303, 307, 308][step]) if step < 3 else ok(b"end")

    with answering(answer) as (url, asked):
        assert read(f"{url}/0", domains=LOOPBACK) == b"end"
        assert len(asked) == 4
        assert "redirects more than 2" in refusal(f"{url}/0", domains=LOOPBACK, max_redirects=2)


@pytest.mark.parametrize(
    ("to", "reason"),
    [
        ("http://localhost:1/", "allowed_media_domains"),
        ("file:///etc/passwd", "must be http: or https:"),
        ("data:text/plain,hello", "must be http: or https:"),
        ("http://user@127.0.0.1/", "no user name"),
        ("//169.254.169.254/latest", "allowed_media_domains"),
        ("http://[::1/", "not well formed"),
    ],
)
def test_a_redirect_is_checked_like_a_url_of_the_prompt(to: str, reason: str) -> None:
    with answering(lambda *_: moved(to)) as (url, asked):
        assert reason in refusal(f"{url}/a", domains=LOOPBACK)
        assert len(asked) == 1


def test_a_public_host_cannot_redirect_to_a_private_one(monkeypatch) -> None:
    ends = []
    addresses = {"public.example": "93.184.216.34", "inside.example": "10.0.0.7"}

    def getaddrinfo(host: str, port: int, **_: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (addresses[host], port))]

    def connect(where: Any, timeout: float) -> socket.socket:
        assert where[3][0] == "93.184.216.34"
        ours, theirs = socket.socketpair()
        ends.append(theirs)
        theirs.sendall(moved("http://inside.example/"))
        return ours

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(source, "_connected", connect)
    assert "not public" in refusal("http://public.example/a.png")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://", "with a host"),
        ("http:///a.png", "with a host"),
        ("http://a b/", "no spaces"),
        ("http://good.example\\@127.0.0.1/", "no spaces"),
        ("http://a@b/", "no user name"),
        ("http://a:99999/", "not well formed"),
        ("http://a:0/", "with a host"),
        ("http://[::1/", "not well formed"),
        ("http://a/\r\nHost: b", "no spaces"),
        ("http://" + "a" * 9000, "at most 8192"),
        ("http://" + "a" * 70 + ".example/", "no host"),
        ("http://\u2100.example/", "not well formed"),
    ],
)
def test_urls_that_parsers_may_differ_about_are_refused(monkeypatch, url: str, reason: str) -> None:
    def nobody(*_: Any, **__: Any) -> Any:
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    assert reason in refusal(url)


def test_large_answers_are_not_read_to_their_end() -> None:
    def endless(_: bytes, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                connection.sendall(bytes(65536))
        except OSError:  # the reader has hung up
            hung_up.set()

    hung_up = threading.Event()
    with answering(endless) as (url, _):
        assert "more than 1000 bytes" in refusal(f"{url}/a", domains=LOOPBACK)
        assert hung_up.wait(300)
    says_so = b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"
    with answering(lambda *_: says_so) as (url, _):
        assert "more than 1000 bytes" in refusal(f"{url}/a", domains=LOOPBACK)


@pytest.mark.parametrize("what", ["nothing", "a slow head", "a slow body"])
def test_a_slow_server_is_left(what: str) -> None:
    """Each of its bytes comes in time, and all of them together do not."""

    def drip(_: bytes, connection: socket.socket) -> None:
        head = b"HTTP/1.1 200 OK\r\n"
        connection.sendall({"nothing": b"", "a slow head": head}.get(what, head + b"\r\n"))
        try:
            while not left.wait(0.02):
                if what != "nothing":
                    connection.sendall(b"X")
        except OSError:
            pass

    left = threading.Event()
    with answering(drip) as (url, _):
        reason = refusal(f"{url}/a", domains=LOOPBACK, seconds=0.3, max_bytes=1 << 20)
        left.set()
    assert reason == "it was not fetched within 0.3 s"


def test_nobody_waits_for_a_client_that_has_gone() -> None:
    from concurrent.futures import CancelledError

    asked, cancelled = threading.Event(), threading.Event()

    def wait(_: bytes, connection: socket.socket) -> None:
        asked.set()
        connection.recv(1)  # until the reader hangs up

    with answering(wait) as (url, _):
        threading.Thread(target=lambda: (asked.wait(300), cancelled.set()), daemon=True).start()
        with pytest.raises(CancelledError):
            read(f"{url}/a", domains=LOOPBACK, cancelled=cancelled)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "answered with status 404"),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n", "answered with status 500"),
        (b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n", "answered with status 302"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "answered with status 204"),
        (ok(b"x", "Content-Encoding: gzip"), "compressed data"),
        (b"SSH-2.0-OpenSSH\r\n", "cannot be fetched"),
        (b"", "cannot be fetched"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", "cannot be fetched"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\nabc", "cannot be fetched"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 40_000 + b"\r\n", "cannot be fetched"),
    ],
)
def test_what_is_no_answer_is_refused(answer: bytes, reason: str) -> None:
    with answering(lambda *_: answer) as (url, _):
        assert reason in refusal(f"{url}/a", domains=LOOPBACK)


def test_nobody_listens() -> None:
    free = socket.create_server(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    assert "cannot be fetched" in refusal(f"http://127.0.0.1:{port}/a", domains=LOOPBACK)


def test_proxies_of_the_environment_are_not_asked(monkeypatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with answering(lambda *_: ok(b"picture")) as (url, _):
        assert read(f"{url}/a.png", domains=LOOPBACK) == b"picture"
