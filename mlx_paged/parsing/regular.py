"""Converts Lark grammars without true recursion to one regular expression.

Calls contain strings in the model's syntax: quoted, escaped, between tags. A regular expression for
these can be enforced everywhere; a grammar cannot. Most grammars of inputs are regular.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

#: Maximum characters of the expression, which repeats rules that are used several times.
MAX_SIZE = 1 << 16
# Maximum characters of all expressions of rules and their parts.
_MAX_WORK = 1 << 20

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|//[^\n]*|\#[^\n]*)
      | (?P<newline>\n)
      | (?P<string>"(?:\\.|[^"\\\n])*"i?)
      | (?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[imslux]*)
      | (?P<directive>%[a-z]+)
      | (?P<name>[!?]*_?[A-Za-z][A-Za-z0-9_]*)
      | (?P<number>[0-9]+)
      | (?P<sign>->|\.\.|[:|()\[\]?*+~.,])""",
    re.VERBOSE,
)
_KINDS = {"string": "a string", "name": "a name", "number": "a number",
         "newline": "the end of the line"}  # fmt: skip

# Lark's library of terminals (`%import common`).
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
}
_COMMON["NUMBER"] = f"(?:{_COMMON['FLOAT']}|{_COMMON['INT']})"
_COMMON["SIGNED_FLOAT"] = f"[+-]?{_COMMON['FLOAT']}"
_COMMON["SIGNED_NUMBER"] = f"[+-]?{_COMMON['NUMBER']}"


class NotRegular(ValueError):
    """A grammar is not equivalent to one regular expression; the message says why."""


@dataclass
class _Token:
    kind: str
    text: str
    line: int


@dataclass
class _Item:
    """A part of an alternative: a name or an expression, and its repetition.

    Attributes:
        atom: A literal expression; None for `name`, or one of `options`.
        times: Repetition in a regular expression: "", "?", "{2,3}", ...
    """

    atom: str | None = None
    name: str = ""
    options: list[list[_Item]] = field(default_factory=list)
    times: str = ""


def regular_expression(grammar: str) -> str:
    """Returns a regular expression of all texts that a Lark grammar accepts from its `start`.

    Raises:
        NotRegular: It is not Lark, has an undefined name, or is recursive.
    """
    return _Writer(_Reader(grammar)).written()


class _Reader:
    """Reads definitions.

    Attributes:
        rules: Alternatives of rules and terminals, by name.
        ignored: Those that may occur between terminals.
    """

    def __init__(self, grammar: str) -> None:
        self._tokens = list(_tokens(grammar))
        self._at = 0
        self.rules: dict[str, list[list[_Item]]] = {}
        self.ignored: list[list[list[_Item]]] = []
        while self._peek().kind != "end":
            self._statement()

    def _peek(self, ahead: int = 0) -> _Token:
        return self._tokens[min(self._at + ahead, len(self._tokens) - 1)]

    def _next(self, kind: str = "", text: str = "") -> _Token:
        token = self._peek()
        if (kind and token.kind != kind) or (text and token.text != text):
            expected = repr(text) if text else _KINDS.get(kind, kind)
            raise NotRegular(f"line {token.line}: expected {expected}, not {_shown(token)}")
        self._at += 1
        return token

    def _takes(self, text: str) -> bool:
        token = self._peek()
        if token.kind == "sign" and token.text == text:
            self._at += 1
            return True
        return False

    def _statement(self) -> None:
        token = self._peek()
        if token.kind == "newline":
            self._at += 1
        elif token.kind == "directive":
            self._directive()
        else:
            name = self._next("name").text.lstrip("!?")
            if self._takes("."):  # a priority, which makes no difference here
                self._next("number")
            self._next("sign", ":")
            if name in self.rules:
                raise NotRegular(f"line {token.line}: there are two definitions of {name!r}")
            self.rules[name] = self._alternatives()
            self._end()

    def _end(self) -> None:
        if self._peek().kind != "end":
            self._next("newline")

    def _directive(self) -> None:
        token = self._next("directive")
        if token.text == "%ignore":
            self.ignored.append(self._alternatives())
            self._end()
            return
        if token.text != "%import":
            raise NotRegular(f"line {token.line}: {token.text} is not supported")
        library = self._next("name").text
        if library != "common":
            raise NotRegular(f"line {token.line}: there is no {library!r} to import from")
        if self._takes("."):
            name = self._next("name").text
            alias = self._next("name").text if self._takes("->") else name
            self._import(name, alias, token.line)
        else:
            self._next("sign", "(")
            while True:
                name = self._next("name").text
                self._import(name, name, token.line)
                if not self._takes(","):
                    break
            self._next("sign", ")")
        self._end()

    def _import(self, name: str, alias: str, line: int) -> None:
        if name not in _COMMON:
            raise NotRegular(f"line {line}: common.{name} is not supported")
        self.rules[alias] = [[_Item(atom=_COMMON[name])]]

    def _alternatives(self) -> list[list[_Item]]:
        found = [self._sequence()]
        while True:
            begin = self._at
            while self._peek().kind == "newline":  # The next line may continue it.
                self._at += 1
            if not self._takes("|"):
                self._at = begin
                return found
            found.append(self._sequence())

    def _sequence(self) -> list[_Item]:
        items: list[_Item] = []
        while True:
            token = self._peek()
            if token.kind in ("string", "regex", "name") or token.text in ("(", "["):
                items.append(self._repeated(self._atom()))
            elif self._takes("->"):
                self._next("name")
            else:
                return items

    def _atom(self) -> _Item:
        token = self._next()
        if token.kind == "string":
            if self._takes(".."):
                return _Item(atom=_range(token, self._next("string")))
            return _Item(atom=_literal(token))
        if token.kind == "regex":
            return _Item(atom=_expression(token))
        if token.kind == "name":
            return _Item(name=token.text.lstrip("!?"))
        options = self._alternatives()
        while self._peek().kind == "newline":
            self._at += 1
        self._next("sign", ")" if token.text == "(" else "]")
        return _Item(options=options, times="?" if token.text == "[" else "")

    def _repeated(self, item: _Item) -> _Item:
        times = ""
        token = self._peek()
        if token.text in ("?", "*", "+") and token.kind == "sign":
            times = self._next().text
        elif self._takes("~"):
            min_times = max_times = self._next("number").text
            if self._takes(".."):
                max_times = self._next("number").text
            times = f"{{{min_times},{max_times}}}"
        if not times:
            return item
        return _Item(options=[[item]], times=times)


class _Writer:
    """Writes the expression of the definitions."""

    def __init__(self, read: _Reader) -> None:
        self._rules = read.rules
        self._found: dict[str, str] = {}
        self._open: list[str] = []
        self._space = ""
        self._left = _MAX_WORK
        if read.ignored:
            ignored = [self._options(options, in_terminal=True) for options in read.ignored]
            self._space = _group("|".join(ignored)) + "*"

    def written(self) -> str:
        if "start" not in self._rules:
            raise NotRegular("there is no rule 'start'")
        return self._of("start") + self._space

    def _of(self, name: str) -> str:
        """Returns the expression of a rule or a terminal, as a group."""
        if name in self._found:
            return self._found[name]
        if name not in self._rules:
            raise NotRegular(f"there is no {name!r}")
        if name in self._open:
            raise NotRegular(f"{name!r} contains itself")
        self._open.append(name)
        is_terminal = name.lstrip("_")[:1].isupper()
        options = self._rules[name]
        if is_terminal:
            written = _group(self._options(options, in_terminal=True))
        else:
            written = self._linear(name, options)
        self._open.pop()
        self._found[name] = written
        return written

    def _linear(self, name: str, options: list[list[_Item]]) -> str:
        """Returns a rule; one that contains itself at an end of alternatives is a repetition."""

        def is_own(item: _Item) -> bool:
            return item.name == name

        left = [o for o in options if len(o) > 1 and is_own(o[0])]
        right = [o for o in options if len(o) > 1 and is_own(o[-1])]
        if bool(left) == bool(right):
            return _group(self._options(options))
        begun = left or right
        others = [option for option in options if option not in begun]
        if not others:
            raise NotRegular(f"{name!r} has no end")
        more = _group(self._options([o[1:] if left else o[:-1] for o in begun]))
        base = _group(self._options(others))
        return f"(?:{base}{more}*)" if left else f"(?:{more}*{base})"

    def _options(self, options: list[list[_Item]], *, in_terminal: bool = False) -> str:
        written = [
            "".join(self._item(item, in_terminal=in_terminal) for item in option)
            for option in options
        ]
        return self._checked("|".join(written))

    def _item(self, item: _Item, *, in_terminal: bool) -> str:
        if item.atom is not None:
            found = item.atom
        elif item.name:
            found = self._of(item.name)
        else:
            found = _group(self._options(item.options, in_terminal=in_terminal))
        is_token = item.atom is not None or item.name.lstrip("_")[:1].isupper()
        if is_token and self._space and not in_terminal:
            found = f"(?:{self._space}{found})"
        return (_group(found) if item.times else found) + item.times

    def _checked(self, written: str) -> str:
        self._left -= len(written)
        if len(written) > MAX_SIZE or self._left < 0:
            raise NotRegular(f"it has more than {MAX_SIZE} characters when all rules are written")
        return written


def _group(written: str) -> str:
    """An expression in a group, unless it is one character, class or group."""
    if len(written) == 1 or (len(written) == 2 and written[0] == "\\"):
        return written
    depth, i, in_class = 0, 0, False
    while i < len(written):
        if written[i] == "\\":
            i += 1
        elif in_class:
            in_class = written[i] != "]"
        else:
            in_class = written[i] == "["
            depth += (written[i] == "(") - (written[i] == ")")
        if not depth and not in_class:
            break
        i += 1
    is_one = i == len(written) - 1 and written[0] in "(["
    return written if is_one else f"(?:{written})"


def _tokens(grammar: str) -> Iterator[_Token]:
    at, line = 0, 1
    while at < len(grammar):
        found = _TOKEN.match(grammar, at)
        if found is None:
            shown = grammar[at : at + 16].split("\n")[0]
            raise NotRegular(f"line {line}: {shown!r} is not supported")
        kind = found.lastgroup
        assert kind is not None
        if kind != "space":
            yield _Token(kind, found.group(), line)
        line += kind == "newline"
        at = found.end()
    yield _Token("end", "", line)


def _shown(token: _Token) -> str:
    return {"end": "the end", "newline": "the end of the line"}.get(token.kind, repr(token.text))


def _text(token: _Token) -> str:
    quoted = token.text.removesuffix("i")
    try:
        found = str(ast.literal_eval(quoted.replace("\\/", "/")))
        found.encode()  # Half of a surrogate pair is no character.
    except (ValueError, SyntaxError) as error:
        raise NotRegular(f"line {token.line}: {quoted} is not a valid string") from error
    return found


def _letter(c: str) -> str:
    """A character, for a regular expression or a class of one."""
    if c in "\\.^$|?*+()[]{}-&~#/":
        return f"\\{c}"
    return c if c.isprintable() or ord(c) > 0x7F else f"\\x{ord(c):02x}"


def _literal(token: _Token) -> str:
    written = "".join(map(_letter, _text(token)))
    return f"(?i:{written})" if token.text.endswith("i") else written


def _range(first: _Token, last: _Token) -> str:
    begin, end = _text(first), _text(last)
    if len(begin) != 1 or len(end) != 1 or begin > end:
        raise NotRegular(f"line {first.line}: a range must be of two letters, in their order")
    return f"[{_letter(begin)}-{_letter(end)}]"


def _expression(token: _Token) -> str:
    body, _, flags = token.text[1:].rpartition("/")
    if "x" in flags:
        raise NotRegular(f"line {token.line}: the flag x is not supported")
    body = body.replace("\\/", "/")
    used = "".join(flag for flag in "is" if flag in flags)
    return f"(?{used}:{body})" if used else f"(?:{body})"
