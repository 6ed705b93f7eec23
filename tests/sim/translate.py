"""From Metal to the dialect that the simulator compiles: C++ for OpenCL, the one dialect of
clang whose address spaces are types of their own. Lines keep their numbers.

What differs between the two languages, and only that, is rewritten: attributes are read and
dropped, address spaces get the dialect's names, `threadgroup` variables come from the simulator,
methods get the `thread` address space that Metal gives them, explicit instantiations become entry
points.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

from .conditionals import conditional_operands
from .kernels import Kernel, entry_point, parameters_of
from .lexer import MetalError, Token, closing, outside_templates, spelled, text_of, tokens
from .threadgroup import threadgroup_variables

SPACES = {
    "device": "__attribute__((opencl_global_device))",
    "constant": "const __attribute__((opencl_global_host))",
    "threadgroup": "__local",
    "thread": "__private",
}
# Identifiers of a kernel that the dialect keeps for itself.
_RENAMED = {"local", "global", "generic", "read_only", "write_only", "read_write", "pipe"} | {
    "event_t", "sampler_t", "queue_t", "vec_step"
}  # fmt: skip
_ATOMIC = re.compile(r"atomic_(int|uint|bool|float|ulong)$")
_RESERVED = re.compile(
    r"__(sim|msl|opencl|global|local|private|generic|constant|kernel|bind|declspec)(_.*)?$|__MSL_.*"
)
_NOT_METAL = {
    "double": "double is not a Metal type",
    "goto": "goto is not in Metal",
    "throw": "exceptions are not in Metal",
    "try": "exceptions are not in Metal",
    "new": "new is not in Metal",
    "delete": "delete is not in Metal",
    "virtual": "virtual functions are not in Metal",
    "dynamic_cast": "dynamic_cast is not in Metal",
    "thread_local": "thread_local is not in Metal",
}
_SCALARS = ["bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "size_t"]
_SCALARS += ["half", "bfloat", "float"]
_PLAIN_TYPES = {*_SCALARS, *(f"{t}{n}" for t in _SCALARS for n in (2, 3, 4)), "void", "unsigned"}
_TENSOR = ["#pragma", "msl", "tensor"]  # of msl/include/metal_tensor
_SWIZZLE = re.compile(r"[xyzw]{2,4}$|[rgba]{2,4}$")


@dataclass
class Function:
    """A function body, for coverage."""

    name: str
    file: str
    first: int
    last: int
    constant: bool  # constexpr: the compiler runs it


@dataclass
class Translation:
    entries: dict[str, str] = field(default_factory=dict)  # host name -> entry point
    kernels: dict[str, Kernel] = field(default_factory=dict)
    constants: dict[str, int] = field(default_factory=dict)  # function constant -> index
    functions: list[Function] = field(default_factory=list)
    swizzles: set[str] = field(default_factory=set)
    classes: int = 0  # seen so far
    methods: set[str] = field(default_factory=set)  # with an address space, by class
    tensor_layout: int | None = None  # of cooperative tensors, if <metal_tensor> is included
    _tokens: list[Token] = field(default_factory=list)

    @property
    def files(self) -> set[str]:
        return {t.file for t in self._tokens if t.is_code}

    @cached_property
    def text(self) -> str:
        """Everything but entry points."""
        library = '#include "metal.h"\n'
        if self.tensor_layout is not None:
            library += f'#define MSL_TENSOR_LAYOUT {self.tensor_layout}\n#include "tensor.h"\n'
        return f"{_swizzle_macros(self.swizzles)}{library}{text_of(self._tokens)}\n"

    def entry_points(self, host_names: list[str]) -> str:
        """Functions __sim_entry_0, ... for the kernels named, to follow the text."""
        return "".join(
            self.entries[name].replace("__sim_entry", f"__sim_entry_{number}") + "\n"
            for number, name in enumerate(host_names)
        )


def translate(preprocessed: str, tensor_layout: int = 0) -> Translation:
    """Raises MetalError for what Metal does not have."""
    out = Translation(_tokens=tokens(preprocessed))
    if any(t.kind == "pragma" and t.text.split() == _TENSOR for t in out._tokens):
        out.tensor_layout = tensor_layout
    _check_and_rename(out)
    _scope(out, [t for t in out._tokens if t.is_code or t.kind == "attribute"], "")
    conditional_operands(out._tokens)
    for token in out._tokens:
        if token.kind == "name":
            token.text = SPACES.get(token.text, token.text)
    return out


# --- Words ----------------------------------------------------------------------------------------


def _check_and_rename(out: Translation) -> None:
    code = [t for t in out._tokens if t.is_code]
    for i, token in enumerate(code):
        before = code[i - 1].text if i else ""
        after = code[i + 1].text if i + 1 < len(code) else ""
        if token.kind == "name":
            if token.text in _NOT_METAL and before != "=":  # = delete
                raise MetalError(f"{token.place}: {_NOT_METAL[token.text]}")
            if _RESERVED.match(token.text):
                raise MetalError(f"{token.place}: {token.text} is not a Metal name")
            if before in (".", "->") and _SWIZZLE.match(token.text):
                out.swizzles.add(token.text)
            if token.text in _RENAMED:
                token.text += "_"
            elif _ATOMIC.match(token.text):
                token.text = f"__msl_{token.text}"
            if token.text in _PLAIN_TYPES and after in ("*", "&"):
                _check_address_space(code, i)
        if token.text == "&" and before == "*" and code[i - 3].text in SPACES:
            token.text = "__private &"  # a reference to a pointer: the pointer is the thread's
        if token.text == "private" and after != ":":
            token.text = "private_"
    for token in out._tokens:
        if token.kind == "pragma" and "once" in token.text:
            token.drop()


def _check_address_space(code: list[Token], at: int) -> None:
    """A pointer or reference to a built-in type names its address space before it, or after it."""
    first = at
    while first and code[first - 1].text not in (";", "{", "}", "(", ",", "<", "=", "return"):
        first -= 1
    if not any(t.text in SPACES for t in code[first:at]):
        what = "pointer" if code[at + 1].text == "*" else "reference"
        raise MetalError(f"{code[at].place}: {what} type must name an address space")


def _swizzle_macros(used: set[str]) -> str:
    lines = []
    for size in (2, 3, 4):
        letters = set("xyzw"[:size]) | set("rgba"[:size])
        calls = [f"M{len(s)}({s}, {', '.join(s)})" for s in sorted(used) if set(s) <= letters]
        lines.append(f"#define MSL_SWIZZLES_{size}(M2, M3, M4) {' '.join(calls)}\n")
    return "".join(lines)


# --- Declarations ---------------------------------------------------------------------------------


def _scope(out: Translation, code: list[Token], class_name: str) -> None:
    """Declarations at namespace scope or, with a class name, members."""
    i = 0
    while i < len(code):
        if code[i].text == ";":
            i += 1
            continue
        if code[i].text in ("public", "private", "protected") and code[i + 1].text == ":":
            i += 2
            continue
        i = _declaration(out, code, i, class_name)


def _declaration(out: Translation, code: list[Token], start: int, class_name: str) -> int:
    """Handles the declaration that begins at `start` and returns where the next begins."""
    i = start
    while i < len(code):
        if code[i].text in ("(", "["):
            i = closing(code, i)
        elif code[i].text == "{":
            end = closing(code, i)
            head, inside = code[start:i], code[i + 1 : end]
            words = {t.text for t in outside_templates(head)}
            if "namespace" in words or (head[0].text == "extern" and head[-1].kind == "string"):
                _scope(out, inside, "")
                return end + 1
            if "enum" not in words and words & {"struct", "class", "union"} and "(" not in words:
                out.classes += 1
                _scope(out, inside, _class_name(head))
            elif "(" in words and ("=" not in words or "operator" in words):
                _function(out, head, code[i : end + 1], class_name)
                return end + 1
            i = end
        elif code[i].text == ";":
            _statement(out, code[start:i], class_name)
            return i + 1
        i += 1
    return i


def _class_name(head: list[Token]) -> str:
    words = [t for t in outside_templates(head) if t.is_code]
    at = next(i for i, t in enumerate(words) if t.text in ("struct", "class", "union"))
    names = [t.text for t in words[at + 1 :] if t.kind == "name" and t.text not in ("alignas",)]
    return names[0] if names else "<anonymous>"


def _function(out: Translation, head: list[Token], body: list[Token], class_name: str) -> None:
    name = _function_name(head)
    constant = any(t.text == "constexpr" for t in head)
    out.functions.append(Function(name, body[0].file, body[0].line, body[-1].line, constant))
    if class_name:
        _qualify_method(out, head, body, name, class_name)
    _kernel(out, head, name)
    _scalars_by_value(head)
    threadgroup_variables(body)


def _scalars_by_value(head: list[Token]) -> None:
    """`thread const short& n` takes a converted value in Metal. In the dialect a temporary object
    has no address space that could be named, so such a parameter becomes a value."""
    for i in range(len(head) - 3):
        words = head[i : i + 4]
        pattern = [t.text for t in words]
        is_reference = {"thread", "const"} == set(pattern[:2]) and pattern[3] == "&"
        if is_reference and pattern[2] in _SCALARS:
            words[pattern.index("thread")].drop()
            words[3].drop()


def _function_name(head: list[Token]) -> str:
    code = outside_templates([t for t in head if t.is_code])
    at = next(i for i, t in enumerate(code) if t.text == "(")
    if any(t.text == "operator" for t in code[:at]):
        first = next(i for i, t in enumerate(code) if t.text == "operator")
        return spelled(code[first:at])
    return code[at - 1].text


def _qualify_method(
    out: Translation, head: list[Token], body: list[Token], name: str, class_name: str
) -> None:
    """Metal's methods are for `thread` objects unless they say otherwise. The dialect has one word
    for `device` and `constant` objects, so of two overloads for these one stays."""
    words = {t.text for t in outside_templates(head)}
    if words & {"static", "friend", "~"}:
        return
    opening = [i for i, t in enumerate(head) if t.text == "(" and _at_top(head, i)]
    first = opening[1 if name.endswith("( )") or head[opening[0] - 1].text == "operator" else 0]
    end = at = closing(head, first)
    while at + 1 < len(head) and head[at + 1].text in ("const", "volatile", *SPACES):
        at += 1
    space = next((t for t in head[end : at + 1] if t.text in SPACES), None)
    converts = re.match(r"operator \w", name) and "constexpr" in words
    if name == class_name or converts:  # for every address space, like those of constants
        if space:
            space.drop()
    elif space is None:
        head[at].text += " __private"
    elif space.text in ("device", "constant"):
        space.text = "__global"
    if space:
        key = f"{out.classes} {class_name} {spelled(head[: at + 1])}"
        if key in out.methods:
            for token in [*head, *body]:
                token.drop()
        out.methods.add(key)


def _at_top(head: list[Token], at: int) -> bool:
    """True if the bracket is outside all others, of templates too."""
    return any(t is head[at] for t in outside_templates(head[: at + 1]))


def _statement(out: Translation, decl: list[Token], class_name: str) -> None:
    """Translates a declaration that ends with a semicolon."""
    code = [t for t in decl if t.is_code]
    if not code:
        return
    words = {t.text for t in outside_templates(code)}
    if code[0].text == "template" and len(code) > 1 and code[1].text != "<":
        _instantiation(out, decl)
    elif words & {"using", "typedef", "static_assert", "friend"}:
        return
    elif "constant" in words and _is_constructed(code):
        _program_scope_constant(out, decl)
    elif "(" in words and ("=" not in words or "operator" in words):
        name = _function_name(code)
        if class_name:
            _qualify_method(out, decl, [], name, class_name)
        _kernel(out, decl, name)
    elif "constant" in words:
        _program_scope_constant(out, decl)


def _is_constructed(code: list[Token]) -> bool:
    """True if this is a variable with arguments of a constructor, `constant T x("a", 1)`."""
    outside = outside_templates(code)
    return (
        outside[-1].text == "("
        and code[code.index(outside[-1]) + 1].kind in ("string", "number")
        and "constant" in (code[0].text, code[1].text)
    )


def _program_scope_constant(out: Translation, decl: list[Token]) -> None:
    code = [t for t in decl if t.is_code]
    words = {t.text for t in code}
    index = [a.arguments for t in decl for a in t.attributes if a.name == "function_constant"]
    space = next(t for t in code if t.text == "constant")
    if index:
        at = next(t for t in decl if any(a.name == "function_constant" for a in t.attributes))
        name = decl[decl.index(at) - 1]
        if not index[0].isdigit():
            raise MetalError(f"{at.place}: function_constant needs a number, not {index[0]}")
        out.constants[name.text] = int(index[0])
        for token in decl:
            if token.text in ("static", "constexpr", "const"):  # the simulator stores its value
                token.drop()
        space.text, at.text = "__global", f' __asm__("__sim_constant_{index[0]}")'
    elif "constexpr" in words:
        space.text = "const"
    elif not any(t.text in ("*", "&") for t in outside_templates(code)):
        space.text = "__global const"


# --- Kernels --------------------------------------------------------------------------------------


def _kernel(out: Translation, head: list[Token], name: str) -> None:
    keyword = [t for t in head if t.text == "kernel"]
    attributes = [a for t in head for a in t.attributes]
    if not keyword and not any(a.name == "kernel" for a in attributes):
        return
    for token in keyword:
        token.drop()
    at = next(i for i, t in enumerate(head) if t.text == name and head[i + 1].text == "(")
    parameters = parameters_of(head[at + 2 : closing(head, at + 1)])
    host = [a.arguments.strip('"') for a in attributes if a.name == "host_name"]
    kernel = Kernel(name, parameters, head[at].place, attributes)
    known = out.kernels.setdefault(name, kernel)
    if not known.parameters:
        out.kernels[name] = kernel
    if not any(t.text == "template" for t in head):
        _entry(out, head[0], host[0] if host else name, name, kernel)


def _instantiation(out: Translation, decl: list[Token]) -> None:
    """template [[host_name("x")]] [[kernel]] decltype(f<T>) f<T>;  or with its type written out,
    template [[host_name("x")]] [[kernel]] void f<T>(device T* out [[buffer(0)]]);"""
    host = [a.arguments for t in decl for a in t.attributes if a.name == "host_name"]
    code = [t for t in decl if t.is_code]
    if len(code) > 1 and code[1].text == "decltype":
        function = code[closing(code, 2) + 1 :]
    elif host and code[1].text == "void" and code[-1].text == ")":
        last = next(i for i in range(len(code)) if code[i].text == "(" and _ends(code, i))
        function = code[2:last]
    elif host:
        raise MetalError(
            f"{code[0].place}: instantiate as template [[host_name(..)]] [[kernel]] "
            "decltype(f<..>) f<..>;"
        )
    else:
        return
    name = next(t for t in reversed(outside_templates(function)) if t.kind == "name").text
    if name not in out.kernels:
        raise MetalError(f"{code[0].place}: {name} is not a kernel")
    if not host:
        raise MetalError(f"{code[0].place}: the instantiation of {name} has no host_name")
    expression = spelled(function)
    for token in decl[1:]:
        token.drop()
    decl[0].text = ""
    _entry(out, decl[0], re.sub(r'"\s*"', "", host[0]).strip('"'), expression, out.kernels[name])


def _ends(code: list[Token], opening: int) -> bool:
    return closing(code, opening) == len(code) - 1


def _entry(out: Translation, at: Token, host: str, function: str, kernel: Kernel) -> None:
    if host in out.entries:
        raise MetalError(f"{at.place}: two kernels have the host name {host}")
    out.entries[host] = entry_point(function, kernel)
