"""Operands of `a ? b : c`. The dialect's compiler does not find the common type of two objects of
one class that lie in different address spaces; their values have one."""

from __future__ import annotations

from .lexer import Token, closing

_LITERALS = {"true", "false"}
# Tokens in template arguments of an operand that a comparison cannot have.
_IN_TEMPLATES = {",", "::", "<", ">"}


def conditional_operands(tokens: list[Token]) -> None:
    """a ? b : c  becomes  a ? metal::__value(b) : metal::__value(c)"""
    code = [t for t in tokens if t.is_code]
    for i, token in enumerate(code):
        if token.text != "?":
            continue
        colon = _end(code, i + 1, {":"})
        end = _end(code, colon + 1, {":", ";", ","})
        operands = (code[i + 1 : colon], code[colon + 1 : end])
        if any([t.text for t in operand] == ["nullptr"] for operand in operands):
            continue  # pointers and arrays
        for operand in operands:
            # An operand that is a conditional has its own operands, and one that compares, or ends
            # with template arguments that it is the last of, is a number.
            plain = {t.text for t in operand}.isdisjoint(("?", "<", ">")) or _has_template(operand)
            if plain and not _is_literal(operand):
                operand[0].text = f"metal::__value({operand[0].text}"
                operand[-1].text += ")"


def _is_literal(operand: list[Token]) -> bool:
    """A null pointer's constant must stay one."""
    return len(operand) == 1 and (operand[0].kind == "number" or operand[0].text in _LITERALS)


def _has_template(operand: list[Token]) -> bool:
    words = [t.text for t in operand]
    return "?" not in words and words.count("<") == words.count(">") > 0


def _end(code: list[Token], start: int, ends: set[str]) -> int:
    """Returns the end of the operand that begins at `start`."""
    i, conditionals = start, 0
    while i < len(code):
        text = code[i].text
        if text in (")", "]", "}") or (text in ends and not (text == ":" and conditionals)):
            return i
        if text == "?":
            conditionals += 1
        elif text == ":":
            conditionals -= 1
        elif text in ("(", "[", "{"):
            i = closing(code, i)
        elif text == "<" and code[i - 1].kind == "name":
            i = _template_end(code, i)
        i += 1
    return i


def _template_end(code: list[Token], opening: int) -> int:
    """The bracket that closes template arguments, or `opening` where it compares."""
    depth = 0
    for i in range(opening, len(code)):
        depth += {"<": 1, ">": -1}.get(code[i].text, 0)
        if depth == 0:
            return i
        if code[i].kind not in ("name", "number") and code[i].text not in _IN_TEMPLATES:
            return opening
    return opening
