"""Process that extracts the text of one PDF: bytes on standard input, JSON on standard output.

PDFs come from strangers, and pypdf is slow on some of them. The process limits its memory and
processor time, and the server kills it if it takes too long.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from contextlib import suppress
from typing import Any

MAX_PAGES = 2000
MAX_CHARACTERS = 8 << 20
MAX_MEMORY = 2 << 30  # bytes of address space
MAX_SECONDS = 30  # of processor time
_NICENESS = 10  # the model's threads come first


class UnreadableError(Exception):
    """A PDF without text that can be extracted. The message says why, without naming the file."""


def text_of(content: bytes) -> tuple[str, int]:
    """Extracts the text of a PDF.

    Returns:
        The text, with empty lines between pages, and the number of pages.

    Raises:
        UnreadableError: It is encrypted, broken, too long, or has no text.
    """
    from pypdf import PdfReader
    from pypdf.errors import DependencyError

    try:
        reader = PdfReader(io.BytesIO(content))
        # Many PDFs are encrypted with an empty password, which only restricts printing.
        try:
            is_locked = reader.is_encrypted and not reader.decrypt("")
        except DependencyError:  # AES needs a package that is not installed
            is_locked = True
        if is_locked:
            raise UnreadableError("it is encrypted: remove its password first")
        count = len(reader.pages)
        if count > MAX_PAGES:
            raise UnreadableError(f"it has {count} pages, more than {MAX_PAGES}")
        found: list[str] = []
        size = 0
        for page in reader.pages:
            text = page.extract_text().strip()
            size += len(text)
            if size > MAX_CHARACTERS:
                raise UnreadableError(f"its text has more than {MAX_CHARACTERS} characters")
            if text:
                found.append(text)
    except (UnreadableError, MemoryError):
        raise
    except Exception:  # pypdf raises errors of many kinds on broken files
        raise UnreadableError("it is broken") from None
    if not found:
        raise UnreadableError("it has no text: it may be scanned, attach its pages as images")
    return _clean("\n\n".join(found)), count


def _clean(text: str) -> str:
    """Removes characters that UTF-8 JSON or a tokenizer cannot represent."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()


def _limit() -> None:
    with suppress(ImportError, OSError, ValueError):  # Windows has no such limits.
        import resource

        limits = ((resource.RLIMIT_AS, MAX_MEMORY), (resource.RLIMIT_CPU, MAX_SECONDS))
        for resource_id, maximum in limits:
            _, hard = resource.getrlimit(resource_id)
            if hard != resource.RLIM_INFINITY:
                maximum = min(hard, maximum)
            resource.setrlimit(resource_id, (maximum, hard))
    with suppress(OSError, AttributeError):
        os.nice(_NICENESS)


def main() -> None:
    """Answers with {"text", "num_pages"}, or {"reason"}."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library's prints are no answer
    logging.disable()  # pypdf warns of each fault of a file
    _limit()
    found: dict[str, Any]
    try:
        text, count = text_of(sys.stdin.buffer.read())
        found = {"text": text, "num_pages": count}
    except UnreadableError as error:
        found = {"reason": f"{error}"}
    except MemoryError:
        found = {"reason": "it takes too much memory"}
    # On a line of its own, after anything that was printed before.
    answers.write(b"\n" + json.dumps(found).encode())
    answers.close()


if __name__ == "__main__":
    main()
