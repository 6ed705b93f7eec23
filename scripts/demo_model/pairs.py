"""Pairs: a function and the one-line request that its docstring opens with."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from dataclasses import dataclass

MAX_FUNCTION_LINES = 40

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
    kind: str = "clean"  # self-contained; "loose": uses names of its module; "method": in a class
    held_out: bool = False


def clean_description(docstring: str) -> str | None:
    """Returns a docstring's opening one-line request, or None if it is not plain English."""
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
    if first.endswith("s") and first[:-1].lower() in VERBS:  # "Returns x" -> "Return x"
        first = first[:-1]
    if first.lower() not in VERBS:
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
VERBS = frozenset(_OPENING_VERBS.split())


def free_names(function: ast.FunctionDef | ast.ClassDef) -> set[str]:
    """Names that a definition uses, but that it does not bind and that are not builtins."""
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


def imports_of(tree: ast.Module) -> dict[str, str]:
    """The import statement of each name that a file imports from the standard library or NumPy."""
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
    free = free_names(node)
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
