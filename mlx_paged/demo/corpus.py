"""Collects the training text: permissively licensed Python, as source and as requests.

Input is the standard library plus a folder of wheels whose metadata names a permissive licence.
Every top-level definition is seen once (a hash of its AST without its docstring decides), and
functions are held out by that same hash, so a held-out function appears neither as a pair nor in
the plain source.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import json
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
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
MAX_FUNCTION_LINES = 40
HELD_OUT_EVERY = 100  # one function in a hundred, chosen by its hash

_BUILTINS = set(dir(builtins)) | {"__name__", "__file__"}
_IMPORTABLE = set(sys.stdlib_module_names) | {"numpy"}
_MARKUP = re.compile(
    r"[`\\@{}<>|*_=\[\]#]|::|:\w+:|https?|>>>|\.\.\.|deprecated|internal|\bself\b|XXX|TODO"
)


@dataclass(frozen=True)
class Pair:
    """A one-line description and the function it describes."""

    description: str
    source: str
    origin: str
    kind: str = "clean"  # self-contained; "loose": uses names of its module; "method": of a class
    held_out: bool = False


@dataclass
class Corpus:
    """What was collected, with the licence of every origin."""

    pairs: list[Pair] = field(default_factory=list)
    sources: list[str] = field(
        default_factory=list
    )  # one entry a file, docstrings cut to their first line
    prose: list[str] = field(default_factory=list)  # long docstrings: filler for system prompts
    origins: list[dict[str, object]] = field(default_factory=list)


def licence_of(metadata: str) -> str | None:
    """Returns the permissive licence that a wheel's METADATA names, or None."""
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
    """Tells whether a file is worth reading: no test, no table of data, ASCII, of ordinary size."""
    parts = Path(path).parts
    name = parts[-1]
    if SKIPPED_PARTS & set(parts) or name.startswith("test_") or name.endswith("_test.py"):
        return False
    return 200 < len(text) < 200_000 and text.isascii() and max(map(len, text.split("\n"))) < 400


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
    """Hashes a statement without its docstring, to de-duplicate and to hold out."""
    doc = _docstring_node(node)
    body = getattr(node, "body", None)
    if doc is not None and isinstance(body, list):
        body.pop(0)
    digest = hashlib.blake2b(ast.dump(node).encode(), digest_size=8).digest()
    if doc is not None and isinstance(body, list):
        body.insert(0, doc)
    return int.from_bytes(digest, "little")


def clean_description(docstring: str) -> str | None:
    """Returns the one-line request a docstring opens with, or None if it is not plain English."""
    paragraph = docstring.strip().split("\n\n")[0]
    line = " ".join(paragraph.replace("``", "").replace("`", "").split())
    line = line.split(". ")[0].rstrip(".").strip()
    words = line.split(" ")
    if (
        not 3 <= len(words) <= 24
        or len(line) > 140
        or _MARKUP.search(line)
        or not line[:1].isalpha()
    ):
        return None
    first = words[0]
    if first.endswith("s") and first[:-1].lower() in _VERBS:  # "Returns x" -> "Return x"
        first = first[:-1]
    if first.lower() not in _VERBS:
        return None
    return " ".join([first[0].upper() + first[1:], *words[1:]]) + "."


_OPENING_VERBS = """
return compute calculate convert check create get find make remove read write parse generate test
build apply given determine split join merge sort reverse count iterate yield add set load save
format extract replace evaluate construct estimate transform normalize validate verify list print
update wrap decode encode flatten select filter map sum multiply divide subtract compare copy draw
plot fit predict sample shuffle rotate swap insert delete append strip pad truncate round clip
scale shift implement combine group partition search look ensure guess infer translate turn take
convolve integrate interpolate solve factor reduce expand simplify tell escape quote hash walk
open close send receive run execute call decorate compile match unescape prepare produce give
retrieve fetch collect use do handle start stop allow raise raises define assert change move put
push pop store keep describe report initialize configure register bind attach connect log mark
query enumerate emit dump visit process invert negate differentiate rewrite assign assemble
approximate resolve clean display show render perform
"""
_VERBS = frozenset(_OPENING_VERBS.split())


def _free_names(function: ast.FunctionDef | ast.ClassDef) -> set[str]:
    bound = {function.name}
    used: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return used - bound - _BUILTINS


def _imports(tree: ast.Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in _IMPORTABLE:
                    text = f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
                    found[(alias.asname or alias.name).split(".")[0]] = text
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            for alias in node.names:
                if node.module.split(".")[0] in _IMPORTABLE:
                    text = f"from {node.module} import {alias.name}" + (
                        f" as {alias.asname}" if alias.asname else ""
                    )
                    found[alias.asname or alias.name] = text
    return found


def pair_of(
    node: ast.AST, imports: dict[str, str], origin: str, held_out: bool, method: bool = False
) -> Pair | None:
    """Turns a documented function into a pair; None if too long or its docstring is no request."""
    if (
        not isinstance(node, ast.FunctionDef)
        or (node.decorator_list and not method)
        or node.name.startswith("__")
    ):
        return None
    description = clean_description(ast.get_docstring(node) or "")
    if description is None or len(node.body) < 2:
        return None
    free = _free_names(node)
    outside = free - imports.keys()
    if len(outside) > 3:
        return None
    kind = "method" if method else "loose" if outside else "clean"
    doc, node.body[0] = node.body[0], ast.Expr(ast.Constant(description))
    source = ast.unparse(node)
    node.body[0] = doc
    if source.count("\n") + 1 > MAX_FUNCTION_LINES or len(source) > 1800 or not source.isascii():
        return None
    head = "\n".join(sorted({imports[name] for name in free - outside})) if kind == "clean" else ""
    return Pair(description, f"{head}\n\n\n{source}" if head else source, origin, kind, held_out)


def add_file(corpus: Corpus, seen: set[int], text: str, origin: str) -> int:
    """Adds one file's new statements to the corpus and returns how many characters they have."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return 0
    lines, imports, kept = shorten_docstrings(text, tree), _imports(tree), []
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
    """Formats many snippets with one call of ruff; those it refuses come back as they were."""
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
            print(f"skipped {package}: no permissive licence in its metadata")
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
