"""`Documents` extracts the text of PDFs in separate processes. Parts of bodies with a PDF or a text
file become text before anything else reads them."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from pydantic import BaseModel

from mlx_paged.server.child_process import PIPE, ChildProcess
from mlx_paged.server.errors import ApiError, bad_request
from mlx_paged.server.pdf_process import MAX_PAGES as MAX_PAGES

#: Maximum bytes of a PDF.
MAX_BYTES = 32 << 20
_MAX_PROCESSES = 2
_SECONDS = 30.0
_COMMAND = (sys.executable, "-m", "mlx_paged.server.pdf_process")
# It needs neither MLX nor OpenBLAS.
_ENVIRONMENT = {"MLX_PAGED_DISABLE": "1", "MLX_PAGED_BLAS": "off", "OPENBLAS_NUM_THREADS": "1"}
_PDF = "application/pdf"
_MAX_PREAMBLE = 1024  # bytes allowed before the header of a PDF
_HEAD = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)


def missing_pdf() -> str | None:
    """Returns why PDFs cannot be read; None if they can."""
    if find_spec("pypdf") is not None:
        return None
    return "PDFs need the package pypdf: pip install 'mlx-paged[documents]'"


class Documents:
    """Extracts the text of PDFs, in at most two processes at a time.

    Args:
        command: Command of such a process.
        seconds: Time limit of a PDF, from the start of its process.
    """

    def __init__(self, command: Sequence[str] = _COMMAND, seconds: float = _SECONDS) -> None:
        self._command, self._seconds = command, seconds
        self._processes = asyncio.Semaphore(_MAX_PROCESSES)

    async def text_of(self, content: bytes, where: str) -> tuple[str, int]:
        """Returns the text of a PDF and its number of pages.

        Args:
            where: Path of its field, for errors.

        Raises:
            ApiError: 400 if it cannot be read.
        """
        reason = missing_pdf()
        if reason is not None:
            raise _unreadable(where, reason)
        if len(content) > MAX_BYTES:
            raise _unreadable(where, f"it has {len(content)} bytes, more than {MAX_BYTES}")
        async with self._processes:
            found = await self._run(content)
        if "reason" in found:
            raise _unreadable(where, found["reason"])
        return found["text"], found["num_pages"]

    async def _run(self, content: bytes) -> dict[str, Any]:
        search_path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = await ChildProcess.start(
            self._command,
            environment={**os.environ, **_ENVIRONMENT, **search_path},
            stdin=PIPE,
            stdout=PIPE,
        )
        try:
            async with asyncio.timeout(self._seconds):
                answer = await process.communicate(content)
        except TimeoutError:
            return {"reason": f"its text takes longer than {self._seconds:g} s to extract"}
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            return {"reason": "its text takes too much time or memory to extract"}
        return json.loads(answer.rpartition(b"\n")[2])


def _unreadable(where: str, reason: str) -> ApiError:
    return bad_request(where, f"{where} is not a readable PDF: {reason}", "invalid_document")


# Parts of bodies.


async def read_documents(body: BaseModel, documents: Documents) -> None:
    """Replaces the files in the messages of a body, or in its items, by their text.

    Raises:
        ApiError: 400 for a file that cannot be read.
    """
    messages, items = getattr(body, "messages", None), getattr(body, "input", None)
    for name, entries in (("messages", messages), ("input", items)):
        if not isinstance(entries, list):
            continue
        for i, entry in enumerate(entries):
            for field in ("content", "output"):
                for part, path in _parts(getattr(entry, field, None), (name, i, field)):
                    await _read(part, path, documents)


_Path = tuple[str | int, ...]


def _parts(content: Any, path: _Path) -> Iterator[tuple[Any, _Path]]:
    """Yields the parts of a content, including those within results of tools."""
    if not isinstance(content, list):
        return
    for i, part in enumerate(content):
        yield part, (*path, i)
        yield from _parts(getattr(part, "content", None), (*path, i, "content"))


async def _read(part: Any, path: _Path, documents: Documents) -> None:
    kind = getattr(part, "type", None)
    if kind == "document":
        source = part.source
        if not isinstance(source, dict) or source.get("type") != "base64":
            return
        if source.get("media_type") != _PDF or not isinstance(source.get("data"), str):
            return  # A text, or refused by the code that reads it.
        where = ".".join(map(str, (*path, "source", "data")))
        text, _ = await documents.text_of(decoded(source["data"], where), where)
        part.source = {"type": "text", "media_type": "text/plain", "data": text}
    elif kind in ("file", "input_file"):
        given = part.file or {} if kind == "file" else vars(part)
        inner = ("file",) if kind == "file" else ()
        where = re.sub(r"\.(\d+)", r"[\1]", ".".join(map(str, (*path, *inner, "file_data"))))
        part.type, part.text = "text", await _text_of_file(given, where, documents)


async def _text_of_file(given: Mapping[str, Any], where: str, documents: Documents) -> str:
    """Returns a file as the model reads it, with its name."""
    data, name = given.get("file_data"), given.get("filename") or "file"
    if not isinstance(data, str) or not isinstance(name, str):
        message = f"{where} is missing: files by id or URL are not supported, send their bytes"
        raise bad_request(where, message, "missing_field")
    content = decoded(_HEAD.sub("", data, count=1), where)
    if content[:_MAX_PREAMBLE].find(b"%PDF-") >= 0:
        text, _ = await documents.text_of(content, where)
        return folded(name, text)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise bad_request(
            where, f"{where} must be a PDF, or text in UTF-8, in base64", "invalid_document"
        )
    return folded(name, text)


def folded(name: str, text: str) -> str:
    """Returns a file in a prompt, in the chat page's form: its name, and a fence longer than any in
    it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    ending = re.search(r"\.(\w{1,12})$", name)
    language = ending[1].lower() if ending else ""
    line_end = "" if text.endswith("\n") else "\n"
    return f"File: {' '.join(name.split())}\n{fence}{language}\n{text}{line_end}{fence}"


def decoded(data: str, where: str) -> bytes:
    """Decodes a field in base64.

    Raises:
        ApiError: 400 if it is not base64.
    """
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        raise bad_request(where, f"{where} must be base64", "invalid_document") from None
