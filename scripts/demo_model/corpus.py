"""Collects the training text: permissively licensed Python, as source and as requests.

The input is the standard library plus a folder of wheels whose metadata names a permissive license.
A hash of each top-level definition's AST, without its docstring, removes duplicates and selects the
held-out functions. So a held-out function appears neither as a pair nor in the plain source.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from .pairs import Pair, imports_of, pair_of
from .sources import licence_of, stdlib_files, wanted, wheel_files

HELD_OUT_EVERY = 100  # holds out one function in a hundred, selected by its hash


@dataclass
class Corpus:
    """The collected text, with the license of every origin."""

    pairs: list[Pair] = field(default_factory=list)
    sources: list[str] = field(
        default_factory=list
    )  # one entry per file, with docstrings cut to their first line
    prose: list[str] = field(default_factory=list)  # long docstrings: filler for system prompts
    origins: list[dict[str, object]] = field(default_factory=list)


def _docstring_node(node: ast.AST) -> ast.Expr | None:
    body = getattr(node, "body", None)
    if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
        value = body[0].value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return body[0]
    return None


def shorten_docstrings(text: str, tree: ast.Module) -> list[str]:
    """Returns the lines of a file with docstrings cut to one line; dropped ones are "\\0"."""
    lines: list[str] = text.split("\n")
    for node in ast.walk(tree):
        doc = _docstring_node(node) if not isinstance(node, ast.Module) else None
        if doc is None or doc.end_lineno == doc.lineno or not isinstance(doc.value, ast.Constant):
            continue
        first = (
            str(doc.value.value).strip().split("\n")[0].strip().replace("\\", "").replace('"', "'")
        )
        if lines[doc.lineno - 1].strip()[:1] not in "\"'rRuU":
            continue
        lines[doc.lineno - 1] = " " * doc.col_offset + f'"""{first}"""'
        for index in range(doc.lineno, doc.end_lineno or doc.lineno):
            lines[index] = "\0"
    return lines


def fingerprint(node: ast.stmt) -> int:
    """Hashes a statement without its docstring, to find duplicates and to select held-out ones."""
    doc = _docstring_node(node)
    body = getattr(node, "body", None)
    if doc is not None and isinstance(body, list):
        body.pop(0)
    digest = hashlib.blake2b(ast.dump(node).encode(), digest_size=8).digest()
    if doc is not None and isinstance(body, list):
        body.insert(0, doc)
    return int.from_bytes(digest, "little")


def add_file(corpus: Corpus, seen: set[int], text: str, origin: str) -> int:
    """Adds a file's new statements to the corpus; returns their number of characters."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return 0
    lines, imports, kept = shorten_docstrings(text, tree), imports_of(tree), []
    end = 0
    for node in tree.body:
        start, end = end, node.end_lineno or end
        key = fingerprint(node)
        is_definition = isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef))
        if is_definition and key in seen:
            continue
        if is_definition:
            seen.add(key)
        held_out = isinstance(node, ast.FunctionDef) and key % HELD_OUT_EVERY == 0
        if not held_out:
            kept.append("\n".join(line for line in lines[start:end] if line != "\0"))
        pair = pair_of(node, imports, origin, held_out)
        members: list[ast.stmt] = node.body if isinstance(node, ast.ClassDef) else []
        found = [
            pair,
            *(pair_of(member, imports, origin, held_out, method=True) for member in members),
        ]
        corpus.pairs += [p for p in found if p is not None]
    for inner in ast.walk(tree):
        if isinstance(inner, (ast.Module, ast.FunctionDef, ast.ClassDef)):
            prose = ast.get_docstring(inner) or ""
            if 800 < len(prose) < 6000:
                corpus.prose.append(prose)
    source = "\n".join(kept).strip()
    if len(source) > 200:
        corpus.sources.append(source + "\n")
    return len(source)


def ruff_format(texts: list[str], ruff: str = "ruff") -> list[str]:
    """Formats many snippets with one call of ruff; rejected ones come back unchanged."""
    mark = "\n\n# ---- 8< ----\n\n"
    done: list[str] = []
    for first in range(0, len(texts), 200):
        batch = texts[first : first + 200]
        command = [ruff, "format", "--isolated", "--line-length", "88", "-"]
        result = subprocess.run(command, input=mark.join(batch), capture_output=True, text=True)
        pieces = re.split(r"\n*# ---- 8< ----\n*", result.stdout)
        done += [p.strip() + "\n" for p in pieces] if len(pieces) == len(batch) else batch
    return done


def collect(wheels: Path, ruff: str = "ruff") -> Corpus:
    """Reads the standard library and every permissively licensed wheel of a folder."""
    corpus, seen = Corpus(), set[int]()
    places: list[tuple[dict[str, object], Iterator[tuple[str, str]]]] = []
    version = ".".join(map(str, sys.version_info[:3]))
    places.append(
        (
            {"name": "python standard library", "version": version, "licence": "PSF-2.0"},
            stdlib_files(),
        )
    )
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            licence = licence_of(archive.read(name).decode("utf-8", "replace"))
        package, release = wheel.name.split("-")[:2]
        if licence is None:
            print(f"skipped {package}: no permissive license in its metadata")
            continue
        places.append(
            ({"name": package, "version": release, "licence": licence}, wheel_files(wheel))
        )
    for origin, files in places:
        pairs_before = len(corpus.pairs)
        characters = sum(
            add_file(corpus, seen, t, str(origin["name"])) for p, t in files if wanted(p, t)
        )
        corpus.origins.append(
            origin | {"characters": characters, "pairs": len(corpus.pairs) - pairs_before}
        )
    texts = ruff_format([p.source for p in corpus.pairs], ruff)
    corpus.pairs = [
        replace(p, source=text.rstrip() + "\n") for p, text in zip(corpus.pairs, texts, strict=True)
    ]
    corpus.sources = ruff_format(corpus.sources, ruff)
    return corpus


def save(corpus: Corpus, folder: Path) -> None:
    """Writes a corpus as JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(vars(p)) + "\n" for p in corpus.pairs))
    (folder / "sources.jsonl").write_text("".join(json.dumps(s) + "\n" for s in corpus.sources))
    (folder / "prose.jsonl").write_text("".join(json.dumps(s) + "\n" for s in corpus.prose))
    (folder / "origins.json").write_text(json.dumps(corpus.origins, indent=1))


if __name__ == "__main__":
    save(collect(Path(sys.argv[1])), Path(sys.argv[2]))
