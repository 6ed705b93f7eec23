"""LLVM IR of the translated kernels, with every access to device, constant and threadgroup memory
reported to the simulator, and every block of code counted.

Works on the text of clang's unoptimised IR, where one access of the source is one load or store and
still has its address space. Address spaces are taken out afterwards: memory is the simulator's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from .ir import DebugInfo, Site, Types, number_of, split_commas

SITE = "1366515437"  # __MSL_SITE
# Address spaces as clang's -ffake-address-space-map numbers them.
PRIVATE, PROGRAM, LITERAL, GENERIC = 0, 1, 2, 4

_SPACE = re.compile(r" ?addrspace\((\d+)\)")
_OUTER_SPACE = re.compile(r"addrspace\((\d+)\)\*?$")  # of `float addrspace(1)*`, `ptr addrspace(1)`
_NAME = r'[%@](?:[\w.$-]+|"[^"]*")'
_LAST_NAME = re.compile(rf"({_NAME})$")
_PLAIN_POINTER = re.compile(r"((?:ptr|%?[\w.]+)(?: addrspace\(\d+\))?\*?) [%@][\w.$-]+")
_DBG = re.compile(r", !dbg !(\d+)")
_DBG_ATTACHED = re.compile(r",? !dbg !\d+")
_DBG_RECORD = re.compile(r"^(?:.*@llvm\.dbg\.| *#dbg_).*\n", re.MULTILINE)
_LOCATION = re.compile(r"^!(\d+) = (?:distinct )?!DI", re.MULTILINE)
_ASSIGN = re.compile(rf"^  ({_NAME}) = (.*)$")
_CALL = re.compile(r"\b(?:call|invoke)\b[^@]*@([\w.$]+|\"[^\"]*\")\(")
_DEFINE = re.compile(r"^define .*?@([\w.$]+|\"[^\"]*\")\(")
_UNROLL = re.compile(
    r'!"llvm\.loop\.unroll\.(?:full|enable)"\}|!"llvm\.loop\.unroll\.count", i32 \d+\}'
)
_LABEL = re.compile(r'^(?:[\w.$-]+|"[^"]*"):')
_MEMORY_CALL = re.compile(r"@llvm\.(memcpy|memmove|memset)\.")
_OBJECT = re.compile(r"NU9CLgeneric")  # a method's own object, also a lambda's
_POINTER_SUFFIX = re.compile(r"(@llvm\.[\w.]*)")


@dataclass
class Instrumented:
    text: str
    sites: list[Site]
    blocks: list[frozenset[tuple[str, int]]]  # lines of each counted block
    lines: frozenset[tuple[str, int]]  # every line that has code
    refused: list[str] = field(default_factory=list)  # what Metal would not compile
    # Symbols and their bytes: function constants, other program-scope variables.
    constants: list[tuple[str, int]] = field(default_factory=list)
    globals: list[tuple[str, int]] = field(default_factory=list)
    initialisers: list[str] = field(default_factory=list)  # functions that set the latter


class Instrumenter:
    def __init__(self, text: str, user_files: set[str]) -> None:
        self.text, self.user_files = text, user_files
        self.debug, self.types = DebugInfo(text), Types(text)
        # Since LLVM 15 a pointer does not say what it points to.
        self.opaque = re.search(r"[(,] ?ptr (?:addrspace\(\d+\) |noundef )?[%@]", text) is not None
        self.sites: list[Site] = []
        self.site_numbers: dict[object, int] = {}
        self.places: dict[str, tuple[Site | None, list[tuple[str, int]]]] = {}
        self.blocks: list[frozenset[tuple[str, int]]] = []
        self.lines: set[tuple[str, int]] = set()
        self.serial = 0

    def run(self) -> Instrumented:
        out: list[str] = []
        function: list[str] | None = None
        for line in self.text.split("\n"):
            if function is not None:
                function.append(line)
                if line == "}":
                    out += self._function(function)
                    function = None
            elif line.startswith("define "):
                function = [line]
            else:
                out.append(line)
        text, initialisers = _without_constructors("\n".join(out))
        result = Instrumented(
            "", self.sites, self.blocks, frozenset(self.lines), initialisers=initialisers
        )
        text = self._globals(text, result)
        result.refused = list(self._without_address_space())
        size = max(1, len(self.blocks))
        declarations = (
            f"@sim_blocks = global [{size} x i8] zeroinitializer\n"
            "declare void @__sim_read(i64, i64, i32)\ndeclare void @__sim_write(i64, i64, i32)\n"
        )
        at = text.index("\ndefine ") + 1 if "\ndefine " in text else len(text)
        text = strip_debug_info(text[:at] + declarations + text[at:])
        result.text = strip_address_spaces(text)
        return result

    # --- One function -----------------------------------------------------------------------------

    def _function(self, lines: list[str]) -> list[str]:
        name = _DEFINE.match(lines[0])
        assert name, lines[0]
        self._definitions(lines)
        out, block, block_lines = [lines[0]], [], set()
        counted = not name[1].startswith("__sim_entry") and "__cxx_global" not in name[1]
        for line in lines[1:]:
            if _LABEL.match(line) or line == "}":
                out += self._block(block, block_lines if counted else set())
                block, block_lines = [line], set()
                continue
            if "@llvm.dbg" in line or line.lstrip().startswith("#dbg"):
                block.append(line)
                continue
            location = _DBG.search(line)
            user, user_lines = self._place(location[1]) if location else (None, ())
            block_lines.update(user_lines)
            block += self._instruction(line, user)
        return [*out, *block]

    def _place(self, location: str) -> tuple[Site | None, list[tuple[str, int]]]:
        """The innermost place in the kernels, and the lines of all."""
        if location not in self.places:
            chain = self.debug.chain(location)
            user = [s for s in chain if s.file in self.user_files and s.line]
            innermost = _with_operation(user[0], chain) if user else None
            self.places[location] = innermost, [(s.file, s.line) for s in user]
        return self.places[location]

    def _block(self, block: list[str], lines: set[tuple[str, int]]) -> list[str]:
        if not lines:
            return block
        self.lines |= lines
        array = "[SIM_BLOCKS x i8]"  # how many there are is known at the end
        pointers = ("ptr", "ptr") if self.opaque else ("i8*", f"{array}*")
        element = f"({array}, {pointers[1]} @sim_blocks, i64 0, i64 {len(self.blocks)})"
        count = f"  store i8 1, {pointers[0]} getelementptr inbounds {element}"
        self.blocks.append(frozenset(lines))
        at = 0
        while at < len(block) and (_LABEL.match(block[at]) or " = phi " in block[at]):
            at += 1
        return [*block[:at], count, *block[at:]]

    def _instruction(self, line: str, user: Site | None) -> list[str]:
        body = line.strip()
        if " = load " in body:
            operand = body.split(" = load ", 1)[1].removeprefix("volatile ")
            parts = split_commas(operand)
            return [*self._access("read", parts[1], self.types.size(parts[0]), parts, user), line]
        if body.startswith("store "):
            parts = split_commas(body.removeprefix("store ").removeprefix("volatile "))
            size = self._size_of_value(parts[0])
            return [*self._access("write", parts[1], size, parts, user), line]
        if " call " in f" {body}":
            if _MEMORY_CALL.search(body):
                return [*self._memory_call(body, user), line]
            if SITE in line:
                called = _CALL.search(body)
                own = called is not None and called[1] == "__sim_threadgroup_variable"
                number = self._site(user or Site("<library>", 0, 0, "?"), own)
                return [line.replace(f"i32 {SITE}", f"i32 {number}").replace(
                    f"i32 noundef {SITE}", f"i32 noundef {number}")]  # fmt: skip
        return [line]

    def _size_of_value(self, typed: str) -> int:
        """Returns the size of `TYPE value`; both may contain spaces and brackets."""
        depth = 0
        for i, c in enumerate(typed):
            depth += (c in "([{<") - (c in ")]}>")
            if depth == 0 and c == " " and not typed[i + 1 :].startswith(("addrspace", "*", "x ")):
                return self.types.size(typed[:i])
        raise ValueError(typed)

    def _memory_call(self, body: str, user: Site | None) -> list[str]:
        call = _MEMORY_CALL.search(body)
        assert call
        inside = body[body.index("(", call.start()) + 1 :]
        arguments = split_commas(inside[: inside.rindex(")")])
        size = arguments[2].split()[-1]
        pointers = [("write", arguments[0])]
        if call[1] != "memset":
            pointers.insert(0, ("read", arguments[1]))
        out = []
        for kind, argument in pointers:
            align = re.search(r" align (\d+)", argument)
            bare = re.sub(
                r" (noundef|nonnull|noalias|nocapture|readonly|writeonly)\b", "", argument
            )
            bare = re.sub(r" (align|dereferenceable)[ (]\d+\)?", "", bare)
            out += self._access(kind, bare, size, [f"align {align[1] if align else 1}"], user)
        return out

    def _access(
        self, kind: str, pointer: str, size: int | str, parts: list[str], user: Site | None
    ) -> list[str]:
        space = self._space(pointer)
        if space in (PRIVATE, LITERAL):
            return []
        align = next((int(p.split()[1]) for p in parts if p.startswith("align ")), 1)
        place = user or Site("<library>", 0, 0, "?")
        number = self._site(place if align == place.align else replace(place, align=align))
        self.serial += 1
        address = f"%sim.{self.serial}"
        return [
            f"  {address} = ptrtoint {pointer} to i64",
            f"  call void @__sim_{kind}(i64 {address}, i64 {size}, i32 {number})",
        ]

    def _site(self, site: Site, own: bool = False) -> int:
        key: object = (site, len(self.sites)) if own else site
        if key not in self.site_numbers:
            self.site_numbers[key] = len(self.sites)
            self.sites.append(site)
        return self.site_numbers[key]

    def _without_address_space(self) -> Iterator[str]:
        """Functions of the kernels that take a pointer or reference to the generic address space:
        Metal has none, so the type lacks its address space."""
        for text in self.debug.nodes.values():
            name = re.search(r'linkageName: "([^"]*)"', text)
            if not name or not text.startswith("!DISubprogram") or "Artificial" in text:
                continue
            if "U9CLgeneric" not in _OBJECT.sub("", name[1]):
                continue
            file, function = self.debug.subprogram(text)
            if file in self.user_files:
                line = number_of(text, "line")
                what = "takes a pointer or reference without an address space"
                yield f"{file}:{line}: error: {function} {what}"

    # --- Where generic pointers come from ---------------------------------------------------------

    def _definitions(self, lines: list[str]) -> None:
        """Methods take objects of any address space; inlined, most are of one that is known."""
        self.defined: dict[str, str] = {}
        self.stored: dict[str, str | None] = {}
        for line in lines:
            if assigned := _ASSIGN.match(line):
                self.defined[assigned[1]] = assigned[2]
            elif line.startswith("  store "):
                parts = split_commas(line.strip().removeprefix("store ").removeprefix("volatile "))
                value, target = _LAST_NAME.search(parts[0]), _LAST_NAME.search(parts[1])
                if target:
                    twice = target[1] in self.stored
                    self.stored[target[1]] = None if twice or not value else parts[0]

    def _space(self, pointer: str, depth: int = 0) -> int:
        """Address space of `TYPE %name`, looked up where the type says generic."""
        head = pointer.split("(", 1)[0] if pointer.startswith("getelementptr") else pointer
        outer = _OUTER_SPACE.search(_pointer_type(pointer))
        space = int(outer[1]) if outer else PRIVATE
        name = _LAST_NAME.search(head)
        if space != GENERIC or not name or depth > 40:
            return space
        source = self.defined.get(name[1], "")
        operation, _, rest = source.partition(" ")
        if operation in ("addrspacecast", "bitcast"):
            return self._space(rest.rsplit(" to ", 1)[0], depth + 1)
        if operation == "getelementptr":
            return self._space(
                split_commas(rest.removeprefix("inbounds ").removeprefix("nuw "))[1], depth + 1
            )
        if operation == "load":
            slot = _LAST_NAME.search(split_commas(rest.removeprefix("volatile "))[1])
            value = self.stored.get(slot[1]) if slot else None
            is_slot = slot is not None and self.defined.get(slot[1], "").startswith("alloca")
            return self._space(value, depth + 1) if is_slot and value else GENERIC
        return GENERIC

    # --- Globals ----------------------------------------------------------------------------------

    def _globals(self, text: str, result: Instrumented) -> str:
        """Program-scope variables become visible to the tables of the launch."""
        pattern = rf"^({_NAME}) = ([^\n]*?)\b(global|constant) (.*)$"
        for match in list(re.finditer(pattern, text, re.MULTILINE)):
            spaces = _SPACE.findall(match[2])
            if not spaces or int(spaces[-1]) != PROGRAM:
                continue
            size = self._size_of_value(split_commas(match[4])[0])
            symbol = match[1].lstrip("@").strip('"').replace("\\01", "")
            kind = result.constants if "__sim_constant_" in symbol else result.globals
            kind.append((symbol, size))
            text = text.replace(match[0], match[0].replace("internal ", "", 1), 1)
        return text


def _with_operation(user: Site, chain: tuple[Site, ...]) -> Site:
    at = chain.index(user)
    name = chain[at - 1].function if at else ""
    return user if name.startswith(("_", "operator", "vec")) else replace(user, operation=name)


def _pointer_type(pointer: str) -> str:
    """The type part of `TYPE %name` or `TYPE getelementptr (...)`."""
    if plain := _PLAIN_POINTER.fullmatch(pointer):
        return plain[1]
    depth = 0
    for i, c in enumerate(pointer):
        depth += (c in "([{<") - (c in ")]}>")
        if (
            depth == 0
            and c == " "
            and re.match(
                r"[%@](?!.*\*)|getelementptr|bitcast|addrspacecast|inttoptr", pointer[i + 1 :]
            )
        ):
            return pointer[:i]
    return pointer


def _without_constructors(text: str) -> tuple[str, list[str]]:
    """Initialisers of program-scope variables run at every launch, after the function constants."""
    found = re.search(r"^@llvm\.global_ctors = .*$", text, re.MULTILINE)
    if not found:
        return text, []
    names = re.findall(r"@(_GLOBAL__[\w.]+)", found[0])
    text = text.replace(found[0], "")
    for name in names:
        text = re.sub(rf"^define internal (.*@{re.escape(name)}\()", r"define \1", text, flags=re.M)
        text = re.sub(
            rf"^(define .*@{re.escape(name)}\(.*?) section \"[^\"]*\"", r"\1", text, flags=re.M
        )
    return text, names


def strip_address_spaces(text: str) -> str:
    out, declared = [], set()
    for line in text.split("\n"):
        if "addrspace" in line:
            line = _SPACE.sub("", line).replace("addrspacecast", "bitcast")
        if "@llvm." in line:
            line = _POINTER_SUFFIX.sub(lambda m: re.sub(r"\.p\d+", ".p0", m[1]), line)
            if line.startswith("declare "):
                name = _POINTER_SUFFIX.search(line)
                assert name
                if name[1] in declared:
                    continue
                declared.add(name[1])
        if line.startswith("attributes #"):
            line = re.sub(r' (noinline|"frame-pointer"="[^"]*")', "", line)
        out.append(line)
    return "\n".join(out)


def strip_debug_info(text: str) -> str:
    """Removes source locations, which the sites have by now: optimizing them takes a third of the
    optimizer's time. Loops lose their hints to unroll, too: unrolling is for registers."""
    at = text.find("\n!") + 1 or len(text)
    code, metadata = _DBG_RECORD.sub("", text[:at]), text[at:]
    code = _DBG_ATTACHED.sub("", code)
    locations = {f"!{number}" for number in _LOCATION.findall(metadata)}
    out = []
    for line in metadata.split("\n"):
        name, _, node = line.partition(" = ")
        if name in locations or name == "!llvm.dbg.cu":
            continue
        if node.startswith("distinct !{!"):  # a loop
            parts = [p for p in node[len("distinct !{") : -1].split(", ") if p not in locations]
            line = f"{name} = distinct !{{{', '.join(parts)}}}"
        out.append(_UNROLL.sub('!"llvm.loop.unroll.disable"}', line))
    return code + "\n".join(out)


def instrument(text: str, user_files: set[str]) -> Instrumented:
    result = Instrumenter(text, user_files).run()
    result.text = result.text.replace("SIM_BLOCKS", str(max(1, len(result.blocks))))
    return result
