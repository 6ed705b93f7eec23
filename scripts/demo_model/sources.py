"""Sources of the training text: the standard library, and wheels with a permissive license."""

from __future__ import annotations

import re
import sysconfig
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

PERMISSIVE = re.compile(
    r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|ISC|0BSD|HPND)\b", re.IGNORECASE
)
RESTRICTIVE = re.compile(
    r"\b(A?L?GPL|MPL|Mozilla|General Public|EUPL|CC[- ]BY|Proprietary)", re.IGNORECASE
)
SKIPPED_PARTS = {
    "tests",
    "test",
    "testing",
    "_vendor",
    "vendored",
    "idlelib",
    "lib2to3",
    "migrations",
    "locale",
}
SKIPPED_PARTS |= {"site-packages", "encodings", "pydoc_data", "tutorials"}


def licence_of(metadata: str) -> str | None:
    """Returns the permissive license that a wheel's METADATA names, or None."""
    headers = Parser().parsestr(metadata, headersonly=True)
    expression = headers.get("License-Expression")
    classifiers = [c for c in headers.get_all("Classifier") or [] if c.startswith("License ::")]
    named = [expression] if expression else [c.rsplit(" :: ", 1)[-1] for c in classifiers]
    if not named:
        named = [(headers.get("License") or "").strip().split("\n")[0][:60]]
    text = "; ".join(n for n in named if n)
    if not PERMISSIVE.search(text) or RESTRICTIVE.search(text):
        return None
    return text


def wheel_files(wheel: Path) -> Iterator[tuple[str, str]]:
    """Yields (path, text) of each Python file in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".py"):
                yield name, archive.read(name).decode("utf-8", "replace")


def stdlib_files() -> Iterator[tuple[str, str]]:
    """Yields (path, text) of each Python file of the running interpreter's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        yield str(path.relative_to(root)), path.read_text("utf-8", "replace")


def wanted(path: str, text: str) -> bool:
    """True if a file is useful: no test, no data table, ASCII, of ordinary size."""
    parts = Path(path).parts
    name = parts[-1]
    if SKIPPED_PARTS & set(parts) or name.startswith("test_") or name.endswith("_test.py"):
        return False
    return 200 < len(text) < 200_000 and text.isascii() and max(map(len, text.split("\n"))) < 400
