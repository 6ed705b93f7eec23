"""Files of the pages are compressed once, for clients that take it, and are not sent twice."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from mlx_paged.server import pages

TEXT = b"let x = 1;\n" * 500
GZIP = {"Accept-Encoding": "gzip, deflate, br"}
PLAIN = {"Accept-Encoding": "identity"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("a.js", "b.js", "index.html", "c.woff2"):
        (tmp_path / name).write_bytes(TEXT)
    (tmp_path / "small.js").write_bytes(b"1;")
    monkeypatch.setattr(pages, "_WEB", tmp_path)
    monkeypatch.setattr(pages, "_cache", pages._Cache())
    return tmp_path


@pytest.fixture
def client(folder: Path) -> Iterator[TestClient]:
    page = Route("/", pages.page("index.html"), methods=["GET"])
    with TestClient(Starlette(routes=[page, Mount("/web", pages.files())])) as client:
        yield client


@pytest.fixture
def compress(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    found = mock.Mock(wraps=gzip.compress)
    monkeypatch.setattr(gzip, "compress", found)
    return found


def test_a_file_is_compressed_once(client: TestClient, folder: Path, compress: mock.Mock) -> None:
    for _ in range(3):
        for path in ("/", "/web/a.js", "/web/b.js"):
            answer = client.get(path, headers=GZIP)
            assert answer.content == TEXT and answer.headers["Content-Encoding"] == "gzip"
            assert int(answer.headers["Content-Length"]) < len(TEXT)
            assert client.head(path, headers=GZIP).headers == answer.headers
    assert compress.call_count == 3
    # A file that has changed is another one.
    before = client.get("/web/a.js", headers=GZIP).headers["ETag"]
    (folder / "a.js").write_bytes(TEXT[::-1])
    os.utime(folder / "a.js", (1e9, 1e9))
    answer = client.get("/web/a.js", headers={**GZIP, "If-None-Match": before})
    assert answer.content == TEXT[::-1] and answer.headers["ETag"] != before
    assert compress.call_count == 4


def test_a_client_does_not_get_what_it_has(client: TestClient, compress: mock.Mock) -> None:
    for path in ("/", "/web/a.js"):
        tags = {}
        for accepted in (GZIP, PLAIN):
            answer = client.get(path, headers=accepted)
            tags[accepted["Accept-Encoding"]] = tag = answer.headers["ETag"]
            again = client.get(path, headers={**accepted, "If-None-Match": f"{tag}, W/{tag}"})
            assert again.status_code == 304 and not again.content
            for name in ("ETag", "Vary", "Cache-Control", "Referrer-Policy"):
                assert again.headers[name] == answer.headers[name]
            since = {"If-Modified-Since": answer.headers["Last-Modified"]}
            assert client.get(path, headers={**accepted, **since}).status_code == 304
        # The two forms have other bytes, so they have other tags.
        plain, packed = tags["identity"], tags[GZIP["Accept-Encoding"]]
        assert plain != packed and packed.endswith('-gzip"')
        other = client.get(path, headers={**GZIP, "If-None-Match": plain})
        assert other.status_code == 200 and other.content == TEXT
    assert compress.call_count == 2


def test_ranges_and_what_is_not_compressed(client: TestClient, compress: mock.Mock) -> None:
    part = client.get("/web/a.js", headers={**GZIP, "Range": "bytes=3-12"})
    assert part.status_code == 206 and part.content == TEXT[3:13]
    assert part.headers["Vary"] == "Accept-Encoding"
    for path in ("/web/c.woff2", "/web/small.js"):
        answer = client.get(path, headers=GZIP)
        assert answer.status_code == 200 and "Content-Encoding" not in answer.headers
    assert client.get("/web/c.woff2").headers["Content-Type"] == "font/woff2"
    assert client.get("/web/none.js", headers=GZIP).status_code == 404
    assert not compress.called


@pytest.mark.parametrize(
    ("accepted", "expected"),
    [
        ("gzip", True),
        ("GZip ; Q=0.5 , br", True),
        ("x-gzip", True),
        ("*", True),
        ("identity;q=0.5, *;q=0.6", True),
        ("gzip;q=1.0, identity; q=1", True),
        ("", False),
        ("br, zstd", False),
        ("gzip;q=0", False),
        ("gzip;q=0.0, *", False),
        ("gzip;q=0.3, identity;q=0.7", False),
        ("notgzip", False),
        ("gzip;q=much", False),
        ("gzip;q=nan", False),
        (";;=,,;q=", False),
    ],
)
def test_what_a_client_accepts(client: TestClient, accepted: str, expected: bool) -> None:
    assert pages.accepts_gzip(accepted) == expected
    answer = client.get("/web/a.js", headers={"Accept-Encoding": accepted})
    assert answer.content == TEXT and ("Content-Encoding" in answer.headers) == expected
