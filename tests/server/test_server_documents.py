"""PDF documents: their text, its limits, and the parts of all three APIs that hold files."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.pdf_files import encrypted, in_base64, pdf
from support.scripted_engine import ScriptedEngine
from support.server_helpers import ENGINE, RunningServer, running, validate

from mlx_paged.multimodal import decode
from mlx_paged.multimodal.options import IoOptions, MediaLimits
from mlx_paged.server import documents, pdf_process, responses
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.documents import Documents
from mlx_paged.server.errors import ApiError

REPORT = pdf("It rains in Oslo.", "", "Rome is dry.")
TEXT = "It rains in Oslo.\n\nRome is dry."
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
# Programs in place of the one that reads a PDF.
HANGS = (sys.executable, "-c", "import time; time.sleep(3600)")
DIES = (sys.executable, "-c", "import os; os.abort()")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = ServerConfig(served_model_names=("demo",), chat_template=TEMPLATE)
    options: dict[str, Any] = {**ENGINE, "max_model_len": 2048}
    with running(config, lambda: ScriptedEngine.from_model(**options)) as server:
        yield server


@pytest.fixture
def engine(server: RunningServer) -> Iterator[ScriptedEngine]:
    assert isinstance(server.engine, ScriptedEngine)
    yield server.engine
    server.engine.script.clear()


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def extract(client: httpx.Client, content: bytes) -> httpx.Response:
    return client.post("/extract_text", json={"data": in_base64(content)})


def prompt_of(client: httpx.Client, engine: ScriptedEngine, path: str, body: dict[str, Any]) -> str:
    engine.says("ok")
    response = client.post(path, json={"model": "demo", **body})
    assert response.status_code == 200, response.text
    return engine.prompts[-1]


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def block(content: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "application/pdf", "data": in_base64(content)}
    return {"type": "document", "source": source, "title": "Weather"}


def test_text_of_a_pdf(client) -> None:
    found = extract(client, REPORT).json()
    validate(responses.DocumentText, found)
    assert found == {"text": TEXT, "num_pages": 3}
    # A PDF that only restricts printing opens with an empty password.
    assert extract(client, encrypted(REPORT, "")).json()["text"] == TEXT
    info = client.get("/server_info").json()
    validate(responses.ServerInfo, info)
    assert info["media"]["pdf"] == {"max_bytes": 32 << 20, "max_pages": 2000, "reason": None}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (encrypted(REPORT, "secret"), "it is encrypted: remove its password first"),
        (pdf("", ""), "it has no text: it may be scanned, attach its pages as images"),
        (b"%PDF-1.7\n\xff", "it is broken"),
        (b"a picture", "it is broken"),
    ],
    ids=["encrypted", "scanned", "broken", "no PDF"],
)
def test_a_pdf_without_readable_text_is_refused(client, content, reason) -> None:
    response = extract(client, content)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"] == f"data is not a readable PDF: {reason}"
    assert (error["param"], error["code"]) == ("data", "invalid_document")


def test_data_that_is_not_base64_is_refused(client) -> None:
    response = client.post("/extract_text", json={"data": "?"})
    assert response.json()["error"]["message"] == "data must be base64"


def test_pages_characters_and_bytes_have_limits(monkeypatch) -> None:
    def refused(content: bytes) -> str:
        with pytest.raises(pdf_process.UnreadableError) as error:
            pdf_process.text_of(content)
        return f"{error.value}"

    monkeypatch.setattr(pdf_process, "MAX_PAGES", 2)
    assert refused(REPORT) == "it has 3 pages, more than 2"
    monkeypatch.setattr(pdf_process, "MAX_PAGES", 3)
    monkeypatch.setattr(pdf_process, "MAX_CHARACTERS", 20)
    assert refused(REPORT) == "its text has more than 20 characters"
    monkeypatch.setattr(documents, "MAX_BYTES", 10)
    with pytest.raises(ApiError, match="more than 10"):
        asyncio.run(Documents().text_of(REPORT, "data"))


@pytest.mark.parametrize(
    ("command", "seconds", "reason"),
    [
        (HANGS, 0.1, "its text takes longer than 0.1 s to extract"),
        (DIES, 300.0, "its text takes too much time or memory to extract"),
    ],
    ids=["hangs", "dies"],
)
def test_a_process_that_hangs_or_dies_is_a_clear_error(command, seconds, reason) -> None:
    with pytest.raises(ApiError) as error:
        asyncio.run(Documents(command, seconds).text_of(REPORT, "data"))
    assert (error.value.status, error.value.message) == (
        400, f"data is not a readable PDF: {reason}",
    )  # fmt: skip


def test_prints_of_libraries_are_no_answers() -> None:
    prints = "print('a library says this', end='', flush=True)"
    module = "from mlx_paged.server import pdf_process; pdf_process.main()"
    command = (sys.executable, "-c", f"{prints}; {module}")
    _, num_pages = asyncio.run(Documents(command).text_of(REPORT, "data"))
    assert num_pages == 3


def test_without_pypdf_the_error_names_the_extra(client, monkeypatch) -> None:
    monkeypatch.setattr(documents, "find_spec", lambda name: None)
    message = extract(client, REPORT).json()["error"]["message"]
    assert message.endswith("PDFs need the package pypdf: pip install 'mlx-paged[documents]'")
    info = client.get("/server_info").json()
    assert "mlx-paged[documents]" in info["media"]["pdf"]["reason"]


def test_documents_of_messages(client, engine) -> None:
    for content in (
        [block(REPORT)],
        [{"type": "tool_result", "tool_use_id": "t", "content": [block(REPORT)]}],
    ):
        body = {"max_tokens": 9, "messages": user(*content)}
        prompt = prompt_of(client, engine, "/v1/messages", body)
        assert f"<title>Weather</title>\n<document_content>\n{TEXT}\n</document_content>" in prompt
    counted = client.post(
        "/v1/messages/count_tokens", json={"model": "demo", "messages": user(block(REPORT))}
    )
    assert counted.json()["input_tokens"] > 10


def test_files_of_chats_and_responses(client, engine) -> None:
    question = {"type": "text", "text": "So?"}
    folded = f"File: report.pdf\n```pdf\n{TEXT}\n```"
    url = f"data:application/pdf;base64,{in_base64(REPORT)}"
    for data in (url, in_base64(REPORT)):
        file = {"type": "file", "file": {"filename": "report.pdf", "file_data": data}}
        body = {"messages": user(file, question)}
        assert f"[user]{folded}\nSo?" in prompt_of(client, engine, "/v1/chat/completions", body)
        assert client.post("/tokenize", json={"model": "demo", **body}).json()["count"] > 10
        item = {"type": "input_file", "filename": "report.pdf", "file_data": data}
        body = {"input": user(item, {"type": "input_text", "text": "So?"})}
        prompt = prompt_of(client, engine, "/v1/responses", body)
        assert folded in prompt and "So?" in prompt
    # A file of text is folded, too; its fence is longer than any in it.
    notes = {"filename": "a.md", "file_data": in_base64(b"```x```\n")}
    body = {"messages": user({"type": "file", "file": notes})}
    prompt = prompt_of(client, engine, "/v1/chat/completions", body)
    assert "[user]File: a.md\n````md\n```x```\n````" in prompt


@pytest.mark.parametrize(
    ("path", "body", "where", "reason"),
    [
        (
            "/v1/chat/completions",
            {"messages": user({"type": "file", "file": {"file_data": in_base64(pdf(""))}})},
            "messages[0].content[0].file.file_data", "it has no text",
        ),
        (
            "/v1/chat/completions",
            {"messages": user({"type": "file", "file": {"file_id": "f"}})},
            "messages[0].content[0].file.file_data", "is missing: files by id or URL",
        ),
        (
            "/v1/chat/completions",
            {"messages": user({"type": "file", "file": {"file_data": in_base64(b"\xff\0")}})},
            "messages[0].content[0].file.file_data", "must be a PDF, or text in UTF-8",
        ),
        (
            "/v1/responses",
            {"input": user({"type": "input_file", "file_url": "http://x/y.pdf"})},
            "input[0].content[0].file_data", "is missing: files by id or URL",
        ),
        (
            "/v1/messages", {"max_tokens": 9, "messages": user(block(pdf("")))},
            "messages.0.content.0.source.data", "it has no text",
        ),
    ],
    ids=["no text", "stored file", "not text", "file by URL", "document"],
)  # fmt: skip
def test_unreadable_files_are_refused_by_name(client, path, body, where, reason) -> None:
    response = client.post(path, json={"model": "demo", **body})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert where in message and reason in message


def test_heic_pictures_are_read_and_reported() -> None:
    import pillow_heif
    from PIL import Image

    assert {"image/heic", "image/heif", "image/png"} <= set(decode.image_types())
    picture = Image.new("RGB", (64, 48), (200, 30, 30))
    out = io.BytesIO()
    pillow_heif.from_pillow(picture).save(out, quality=90)
    found = decode.image_of(out.getvalue(), MediaLimits(), IoOptions())
    assert (found.size, found.mode) == ((64, 48), "RGB")
    red, green, blue = found.getpixel((32, 24))
    assert red > 180 and max(green, blue) < 60
