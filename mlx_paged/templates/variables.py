"""The variables that a chat template reads, and those that switch thinking on and off."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.meta
from jinja2 import nodes

#: Name under which APIs pass a request's choice of thinking.
ENABLE_THINKING = "enable_thinking"

# transformers' tags for training masks, which Jinja's parser does not know.
_GENERATION = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")
_ABOUT_THINKING = re.compile(r"think|reason", re.IGNORECASE)
# Names of switches for thinking. Similar names, such as `preserve_thinking`, are about history.
_SWITCH_NAME = re.compile(
    r"((enable|force|use|is|with|add|do|allow|disable|skip|no)_)?(thinking|think|reasoning|reason)"
    r"(_(enabled|disabled|on|off))?"
)
_NEGATIVE = re.compile(r"(disable|skip|no|without|hide|suppress|exclude)_|_(disabled|off)$")
# Names whose values are words or numbers, never booleans.
_GRADED = re.compile(r"effort|level|budget|mode|option|type|style")
# Values in order of preference.
_OFF = ("none", "off", "disabled", "disable", "no_think", "nothink", "no", "never", "chat",
        "non-thinking", "non_thinking", "instruct", "false")  # fmt: skip
_ON = ("on", "enabled", "enable", "thinking", "think", "yes", "always", "true", "high", "medium",
       "low", "auto", "adaptive")  # fmt: skip
# Values to try if only the value for thinking is known; the first that changes the output is used.
_OPPOSITES = ("off", "none", "disabled", "chat")


@dataclass(frozen=True)
class Switch:
    """A variable that switches a template's thinking on and off.

    Attributes:
        name: The variable.
        on, off: Its values; None if unknown.
        values: Strings that the template compares it with.
    """

    name: str
    on: Any
    off: Any
    values: frozenset[str] = frozenset()


@lru_cache(maxsize=32)
def variables_of(source: str) -> frozenset[str]:
    """Returns the variables that a template reads before setting them.

    Raises:
        jinja2.TemplateError: The template cannot be parsed.
    """
    return frozenset(jinja2.meta.find_undeclared_variables(_parsed(source)))


def _parsed(source: str) -> nodes.Template:
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"])
    return environment.parse(_GENERATION.sub("", source))


@lru_cache(maxsize=32)
def possible_switches(source: str) -> tuple[Switch, ...]:
    """Returns the variables of a template that may switch thinking, judged by name and use."""
    try:
        names, parsed = variables_of(source), _parsed(source)
    except jinja2.TemplateError:
        return ()
    found = []
    for name in sorted(filter(_ABOUT_THINKING.search, names)):
        values = list(_compared(parsed, name))
        words = {value.lower(): value for value in values if isinstance(value, str)}
        off = next((words[word] for word in _OFF if word in words), None)
        on = next((words[word] for word in _ON if word in words), None)
        if off is not None or (on is not None and "effort" not in name):
            found.append(Switch(name, on, off, frozenset(words)))
        elif 0 in values and "budget" in name:
            found.append(Switch(name, None, 0))
        elif not words and _GRADED.search(name) is None:
            is_negative = _NEGATIVE.search(name) is not None
            found.append(Switch(name, not is_negative, is_negative))
    return tuple(found)


def _compared(parsed: nodes.Template, name: str) -> Iterator[Any]:
    """Yields the constants that a variable, or an alias of it, is compared with."""
    known: set[tuple[str, ...]] = {(name,)}
    size = 0
    while size != len(known):  # an alias may have aliases
        size = len(known)
        for assign in parsed.find_all(nodes.Assign):
            if _mentions(assign.node, known):
                known.add(_key(assign.target) or (name,))
            known |= set(_of_namespace(assign, known))
    for compare in parsed.find_all(nodes.Compare):
        sides = [compare.expr, *(operand.expr for operand in compare.ops)]
        if any(_is(side, known) for side in sides):
            for side in sides:
                yield from (constant.value for constant in _constants(side))


def _of_namespace(assign: nodes.Assign, known: Collection[tuple[str, ...]]) -> Iterator[Any]:
    """Yields the aliases that ``set ns = namespace(mode=thinking_mode)`` makes: ``ns.mode``."""
    if isinstance(assign.node, nodes.Call) and isinstance(assign.target, nodes.Name):
        for keyword in assign.node.kwargs:
            if isinstance(keyword, nodes.Keyword) and _mentions(keyword.value, known):
                yield assign.target.name, keyword.key


def _key(node: nodes.Node) -> tuple[str, ...] | None:
    if isinstance(node, nodes.Name):
        return (node.name,)
    if isinstance(node, nodes.NSRef):
        return node.name, node.attr
    if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
        return node.node.name, node.attr
    return None


def _is(node: nodes.Node, known: Collection[tuple[str, ...]]) -> bool:
    """True if an expression is a variable, perhaps through filters (``mode | lower``)."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
        node = node.node.node  # mode.lower()
    return _key(node) in known


def _mentions(node: nodes.Node, known: Collection[tuple[str, ...]]) -> bool:
    """True if a value is an unmodified variable, possibly with a default."""
    if isinstance(node, nodes.CondExpr):
        return any(_mentions(n, known) for n in (node.expr1, node.expr2) if n is not None)
    if isinstance(node, nodes.Or):
        return _mentions(node.left, known) or _mentions(node.right, known)
    return _is(node, known)


def _constants(node: nodes.Node) -> Iterator[nodes.Const]:
    if isinstance(node, nodes.Const):
        yield node
    elif isinstance(node, (nodes.List, nodes.Tuple)):
        yield from (item for item in node.items if isinstance(item, nodes.Const))


def switches_of(source: str, render: Callable[[Mapping[str, Any]], str]) -> tuple[Switch, ...]:
    """Returns the switches that a template has.

    Args:
        render: Renders a question with variables; may raise any error.
    """

    def text(**values: Any) -> str | None:
        try:
            return render({name: value for name, value in values.items() if value is not None})
        except Exception:  # a template can raise any error
            return None

    found = []
    for switch in possible_switches(source):
        on = text(**{switch.name: switch.on})
        for off in _OPPOSITES if switch.off is None else (switch.off,):
            without = text(**{switch.name: off})
            # Other variables are about reasoning in earlier answers, or are printed verbatim.
            is_shown = "True" in (on or "") or "False" in (without or "")
            if on != without and not is_shown and (without is not None or on is None):
                found.append(replace(switch, off=off))
                break
    return tuple(found)


def with_thinking_choice(
    given: Mapping[str, Any], names: Collection[str], switches: Collection[Switch]
) -> dict[str, Any]:
    """Returns a request's variables, with its choice to think or not under the template's names.

    Adds nothing if the request makes no choice. Changes no variable that the request sets, unless
    it asks for no reasoning with a word that the template does not know.

    Args:
        given: Variables of the request.
        names: All variables that the template reads.
        switches: Switches of the template.
    """
    choices = {
        name: value != (_NEGATIVE.search(name) is not None)
        for name, value in given.items()
        if isinstance(value, bool) and _SWITCH_NAME.fullmatch(name)
    }
    if not choices or any(name in names for name in choices):
        return dict(given)
    wants_thinking = choices.get(ENABLE_THINKING, next(iter(choices.values())))
    found = dict(given)
    for switch in switches:
        value = switch.on if wants_thinking else switch.off
        asks_for_none = str(given.get(switch.name)).lower() == "none" and not wants_thinking
        is_open = switch.name not in given or (asks_for_none and "none" not in switch.values)
        if is_open and value is not None:
            found[switch.name] = value
    return found


def knows_tools(chat_template: str) -> bool:
    """True if a template uses tools in any way."""
    try:
        return "tools" in variables_of(chat_template)
    except jinja2.TemplateError:  # unknown tags
        return "tools" in chat_template
