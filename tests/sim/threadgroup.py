"""`threadgroup` variables of kernels, which all threads of a threadgroup share: the simulator gives
them their memory."""

from __future__ import annotations

from .lexer import MetalError, Token, closing, outside_templates, spelled, split


def threadgroup_variables(body: list[Token]) -> None:
    """threadgroup float tile[N];  becomes  auto& tile = ...<float[N]>();"""
    code = [t for t in body if t.is_code]
    i = 1
    while i < len(code):
        at = i
        while code[at].text in ("static", "const", "volatile", "alignas"):
            at = closing(code, at + 1) + 1 if code[at].text == "alignas" else at + 1
        if code[i - 1].text in (";", "{", "}") and code[at].text == "threadgroup":
            end = next(j for j in range(at, len(code)) if code[j].text == ";")
            _threadgroup_variable(code[i:end])
            at = end
        i = max(i + 1, at)


def _threadgroup_variable(decl: list[Token]) -> None:
    outside = outside_templates(decl)
    if any(t.text in ("*", "&", "(") for t in outside if t.kind == "punctuation") and not any(
        t.text == "alignas" for t in outside
    ):
        return  # a pointer into threadgroup memory
    decl = _without_initial_value(list(decl))
    align = ""
    if decl[0].text == "alignas":
        end = closing(decl, 1)
        align = f", {spelled(decl[2:end])}"
        dropped, decl = decl[: end + 1], decl[end + 1 :]
        for token in dropped:
            token.drop()
    parts = split(decl)
    first = parts[0]
    at = _declared_name(first)
    type_name = spelled([t for t in first[:at] if t.text not in ("threadgroup", "static")])
    variables = [(first[at].text, first[at + 1 :])]
    variables += [(p[0].text, p[1:]) for p in parts[1:]]
    text = "; ".join(
        f"auto& {name} = metal::__threadgroup_variable<{type_name}{spelled(array)}{align}>()"
        for name, array in variables
    )
    head = parts[0][0]
    for token in decl:
        token.drop()
    head.kind, head.text = "name", text


def _without_initial_value(decl: list[Token]) -> list[Token]:
    """Apple's compiler takes `= {0}` and `= {}` but stores nothing, so neither does the simulator:
    reading such a variable before it is written is a fault."""
    at = next((i for i, t in enumerate(decl) if t.text == "="), None)
    if at is None:
        return decl
    if spelled(decl[at:]) not in ("= { 0 }", "= { }"):
        raise MetalError(f"{decl[0].place}: a threadgroup variable cannot have an initial value")
    for token in decl[at:]:
        token.drop()
    return decl[:at]


def _declared_name(part: list[Token]) -> int:
    depth = 0
    for i, token in enumerate(part):
        if token.text == "<":
            depth += 1
        elif token.text == ">":
            depth -= 1
        elif token.text == "[" and depth == 0:
            return i - 1
    return len(part) - 1
