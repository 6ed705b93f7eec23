"""Reads LLVM IR: source locations, sizes of types."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Site:
    """The source location of an access or call in the kernels."""

    file: str
    line: int
    column: int
    function: str
    align: int = 1
    operation: str = ""  # the library function called there


_LOCATION = re.compile(
    r"!DILocation\(line: (\d+)(?:, column: (\d+))?, scope: !(\d+)(?:, inlinedAt: !(\d+))?"
)


class DebugInfo:
    def __init__(self, text: str) -> None:
        self.nodes = dict(re.findall(r"^!(\d+) = (?:distinct )?(!DI.*)$", text, re.MULTILINE))
        self._chains: dict[str, tuple[Site, ...]] = {}
        self._scopes: dict[str, tuple[str, str]] = {}

    def chain(self, location: str) -> tuple[Site, ...]:
        """Places of an instruction, innermost first: where it is, and where that was inlined."""
        if location not in self._chains:
            found = _LOCATION.match(self.nodes[location])
            assert found, self.nodes[location]
            line, column, scope, outer = found.groups()
            file, function = self._scope(scope)
            site = Site(file, int(line), int(column or 0), function)
            self._chains[location] = (site, *(self.chain(outer) if outer else ()))
        return self._chains[location]

    def _scope(self, node: str) -> tuple[str, str]:
        if node not in self._scopes:
            self._scopes[node] = self._find_scope(node)
        return self._scopes[node]

    def _find_scope(self, node: str) -> tuple[str, str]:
        file, function = "", ""
        while node and not (file and function):
            text = self.nodes.get(node, "")
            file = file or self._file(reference(text, "file"))
            if text.startswith("!DISubprogram"):
                name = re.search(r'name: "([^"]*)"', text)
                function = name[1] if name else "?"
            node = reference(text, "scope")
        return file, function

    def subprogram(self, text: str) -> tuple[str, str]:
        name = re.search(r'name: "([^"]*)"', text)
        return self._file(reference(text, "file")), name[1] if name else "?"

    def _file(self, node: str) -> str:
        found = re.search(r'filename: "([^"]*)"', self.nodes.get(node, ""))
        return unescape(found[1]) if found else ""


def unescape(string: str) -> str:
    """Decodes a string of LLVM IR, which writes bytes beyond printable ASCII as ``\\C3``."""
    escape = re.compile(rb"\\([0-9A-F]{2})")
    return escape.sub(lambda e: bytes([int(e[1], 16)]), string.encode()).decode()


@cache
def _field(key: str, value: str) -> re.Pattern[str]:
    return re.compile(rf"\b{key}: {value}(\d+)")


def reference(text: str, key: str) -> str:
    found = _field(key, "!").search(text)
    return found[1] if found else ""


def number_of(text: str, key: str) -> int:
    found = _field(key, "").search(text)
    return int(found[1]) if found else 0


_DIVIDER = re.compile(r'"[^"]*"?|[(\[{<)\]}>,]')


def split_commas(text: str) -> list[str]:
    """Splits at commas outside of brackets and quotes."""
    parts, depth, start = [], 0, 0
    for found in _DIVIDER.finditer(text):
        c = found[0]
        if c in "([{<":
            depth += 1
        elif c in ")]}>":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start : found.start()].strip())
            start = found.end()
    return [*parts, text[start:].strip()]


class Types:
    """Sizes, by the rules of the 64-bit targets that this runs on."""

    def __init__(self, text: str) -> None:
        self.structs = dict(
            re.findall(r'^(%(?:[\w.$-]+|"[^"]*")) = type (.*)$', text, re.MULTILINE)
        )

    def size(self, name: str) -> int:
        return self._layout(name.strip())[0]

    def _layout(self, name: str) -> tuple[int, int]:
        if name.endswith("*") or name.startswith("ptr"):
            return 8, 8
        if name in ("half", "bfloat"):
            return 2, 2
        if name in ("float", "double"):
            return (4, 4) if name == "float" else (8, 8)
        if integer := re.fullmatch(r"i(\d+)", name):
            size = max(1, int(integer[1]) // 8)
            return size, size
        if vector := re.fullmatch(r"<(\d+) x (.*)>", name):
            size = int(vector[1]) * self.size(vector[2])
            return size, size
        if array := re.fullmatch(r"\[(\d+) x (.*)\]", name):
            size, align = self._layout(array[2])
            return int(array[1]) * size, align
        if name in self.structs:
            return self._layout(self.structs[name])
        packed = name.startswith("<{")
        inside = name.strip("<>").strip()
        if not inside.startswith("{"):
            raise ValueError(f"unknown IR type {name}")
        offset, largest = 0, 1
        for part in split_commas(inside[1:-1].strip()):
            size, align = self._layout(part)
            align = 1 if packed else align
            offset = -(-offset // align) * align + size
            largest = max(largest, align)
        return -(-offset // largest) * largest, largest
