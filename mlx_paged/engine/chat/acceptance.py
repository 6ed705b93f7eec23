"""Rewrites any legal conversation so that a chat template accepts it.

Templates differ in the roles, orders and contents that they accept. Some raise on anything unknown,
others silently ignore it. So a skeleton of the conversation (`skeletons`) is rendered first, which
is cheap and shows what the template drops. The rewrites (`rewrites`) with the lowest cost, for
themselves and for what is dropped, are then applied to the conversation itself.
"""

from __future__ import annotations

import enum
import hashlib
import heapq
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from mlx_paged.engine.chat.rewrites import (
    ROLES,
    Rewrite,
    Spelling,
    forms_of_tools,
    normal,
    rewrites,
    spelled,
    with_ids,
)
from mlx_paged.engine.chat.skeletons import TOOL, Skeleton
from mlx_paged.engine.chat.tools_as_text import Messages
from mlx_paged.parsing.call_ids import ID_FORMS

logger = logging.getLogger(__name__)

Tools = Sequence[Mapping[str, Any]]
#: A chat template: messages and tools to a text. It may raise any error.
Render = Callable[[Messages, Tools], str]

_MAX_SKELETONS = 150  # renders of a search
_MAX_FORMS = 24  # of the conversation itself, if its skeleton hides why it is refused
_MAX_MEDIA_FORMS = 6
_MAX_SHAPES = 256  # of conversations whose rewrites are cached
_MAX_PERIOD = 6  # messages
_REFUSED_LATER = 25  # cost, in units of `Rewrite.cost`


class _Unknown(enum.Enum):
    UNKNOWN = 0


_UNKNOWN = _Unknown.UNKNOWN  # not in the cache, where None means that no form is accepted


class TemplateForms:
    """Rewrites conversations into forms that one chat template accepts. Any thread may call it.

    Args:
        render: The template.

    Attributes:
        spelling: The template's choice among equivalent spellings.
    """

    def __init__(self, render: Render) -> None:
        self.spelling = spelling_of(render)
        self._rewrites = rewrites(self.spelling)
        self._choices: dict[bytes, _Choice | None] = {}  # by the shape of conversations

    def rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Tools,
        render: Render,
        options: str = "",
    ) -> str:
        """Returns the text of a conversation without media, as faithful as the template allows.

        Args:
            messages: See `ChatRenderer.render`; contents have no media.
            tools: OpenAI's format.
            render: The template, with the variables of this request.
            options: These variables, as a cache key.

        Raises:
            Exception: The template's own error, if it accepts no form.
        """
        plain = normal(messages)
        chosen = self._cheapest(plain, tools, render, options)
        others = [] if chosen is None else (r for _, r in _subsets(plain, self._rewrites))
        first = () if chosen is None else chosen.rewrites
        refusal: Exception | None = None
        tried: list[Messages] = []
        for applied in itertools.islice(itertools.chain([first], others), _MAX_FORMS):
            form = _applied(plain, applied)
            if form in tried:
                continue
            tried.append(form)
            try:
                text = with_tools(spelled(form, self.spelling), tools, render)
            except Exception as error:  # Templates may raise anything.
                refusal = refusal or error
            else:
                if chosen is not None and applied == chosen.rewrites:
                    log_losses(chosen.lost)
                else:
                    log_losses(self._lost(plain, applied, tools, render))
                return text
        assert refusal is not None
        raise refusal

    def with_media(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Tools,
        render: Render,
        options: str = "",
    ) -> Iterator[tuple[Messages, list[str]]]:
        """Yields a conversation with media in the forms that the template may accept, best first,
        each with its losses.

        Contents stay unchanged, because the caller, who inserts the media, knows their forms. For
        everything else, the template is tried with the texts alone.
        """
        plain = normal(messages)
        texts = [{**m, "content": _texts(m["content"])} if "content" in m else m for m in plain]
        kept = [rewrite for rewrite in self._rewrites if not rewrite.contents]
        chosen = self._cheapest(texts, tools, render, options)
        first = () if chosen is None else chosen.rewrites
        best = tuple(rewrite for rewrite in first if rewrite in kept)
        tried: list[Messages] = []
        for applied in itertools.chain([best], (r for _, r in _subsets(plain, kept))):
            form = _applied(plain, applied)
            if form in tried:
                continue
            tried.append(form)
            if applied == best and chosen is not None:
                lost = chosen.lost
            else:
                lost = [rewrite.lossy for rewrite in applied if rewrite.lossy]
            # Only the calls are respelled, because contents that are lists become parts later.
            yield (
                [
                    {**m, "content": old["content"]} if isinstance(old.get("content"), list) else m
                    for m, old in zip(spelled(form, self.spelling), form)
                ],
                lost,
            )
            if len(tried) == _MAX_MEDIA_FORMS:
                return

    def _cheapest(
        self, plain: Messages, tools: Tools, render: Render, options: str
    ) -> _Choice | None:
        """Returns the rewrites with which the template accepts a conversation, or None.

        Args:
            plain: The conversation in the normal form.
        """
        short = _shortened(plain)
        shapes = repr(([_shape(message) for message in short], bool(tools), options))
        key = hashlib.sha256(shapes.encode(errors="replace")).digest()
        # Looked up once: another thread may empty the cache at any time.
        known = self._choices.get(key, _UNKNOWN)
        if not isinstance(known, _Unknown):
            return known
        small_tools = [TOOL] if tools else []
        found = _cheapest(
            Skeleton.of(short),
            _continued(short),
            self.spelling,
            self._rewrites,
            lambda form: render(form, small_tools),
        )
        choice = None
        if found is not None:
            choice = _Choice(found, self._lost(short, found, tools, render))
        if len(self._choices) >= _MAX_SHAPES:
            self._choices.clear()
        self._choices[key] = choice
        return choice

    def _lost(
        self, plain: Messages, applied: Sequence[Rewrite], tools: Tools, render: Render
    ) -> list[str]:
        """Returns the losses of a conversation: by rewrites, and by texts that the template leaves
        out."""
        skeleton = Skeleton.of(_shortened(plain))
        form = spelled(_applied(skeleton.messages, applied), self.spelling)
        lost = [rewrite.lossy for rewrite in applied if rewrite.lossy]
        return lost + skeleton.left_out(form, lambda form: render(form, [TOOL] if tools else []))


class _Choice(NamedTuple):
    """A conversation rewritten for a template, with its losses."""

    rewrites: tuple[Rewrite, ...]
    lost: list[str]


def log_losses(lost: Sequence[str]) -> None:
    """Logs the parts of a conversation that are missing from its prompt, if any."""
    if lost:
        logger.warning("for the chat template, %s", "; ".join(lost))


def _texts(content: str | list[Any]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part for part in content if isinstance(part, str))


def with_tools(form: Messages, tools: Tools, render: Render) -> str:
    """Renders a conversation, with the tools in the first form that the template accepts.

    Raises:
        Exception: The template accepts none; its error for the tools as given.
    """
    refusal: Exception | None = None
    for given in forms_of_tools(tools) if tools else ([],):
        try:
            return render(form, given)
        except Exception as error:  # Templates may raise anything.
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def spelling_of(render: Render) -> Spelling:
    """Returns the spelling that a template accepts, found with a small conversation with a call."""
    best, min_penalty = Spelling(), math.inf
    empties: tuple[Literal["absent", "null", "text"], ...] = ("absent", "null", "text")
    for as_lists in (False, True):
        for ids, objects, empty in itertools.product(ID_FORMS, (True, False), empties):
            spelling = Spelling(objects, empty, ids)
            skeleton = Skeleton.of(with_ids(_sample(as_lists), ids))
            penalty = skeleton.penalty(
                spelled(skeleton.messages, spelling), lambda m: render(m, [TOOL])
            )
            if penalty < min_penalty:
                best, min_penalty = spelling, penalty
            if not penalty:
                return replace(best, between=_between(render, best))
    return replace(best, between=_between(render, best))


def _between(render: Render, spelling: Spelling) -> str:
    """Returns the separator between reasoning and content: a new message if a template writes
    channels."""
    messages = normal(with_ids(_sample(as_lists=False), spelling.ids))
    messages[1] |= {"thinking": "zqthought", "reasoning": "zqthought"}
    try:
        text = render(spelled(messages, spelling), [TOOL])
    except Exception:  # Templates may raise anything.
        return spelling.between
    if "<|channel|>analysis<|message|>zqthought" not in text:
        return spelling.between
    return "<|end|><|start|>assistant<|channel|>commentary<|message|>"


def _sample(as_lists: bool) -> Messages:
    function = {"name": "tool", "arguments": '{"x": "y"}'}
    call = {"id": "call_0", "type": "function", "function": function}
    text: Any = ["text"] if as_lists else "text"
    return [
        {"role": "user", "content": text},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "name": "tool", "content": text},
    ]


# Shapes: conversations of one shape share their rewrites.


def _shortened(messages: Messages) -> Messages:
    """Returns a conversation in which no sequence of message shapes repeats more than twice."""
    found: Messages = []
    shapes: list[Any] = []
    for message in messages:
        found.append(message)
        shapes.append(_shape(message))
        for period in range(1, _MAX_PERIOD + 1):
            last = shapes[-period:]
            if len(shapes) >= 3 * period and shapes[-3 * period :] == last * 3:
                del found[-period:], shapes[-period:]
                break
    return found


def _shape(message: Mapping[str, Any]) -> Any:
    """Returns the properties by which a template may distinguish messages, besides their texts."""
    calls = []
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], call["function"].get("arguments")
        calls.append((_id_shape(call.get("id"), name), Skeleton().arguments(arguments)))
    return (
        message["role"],
        _content_shape(message.get("content")),
        sorted(message),
        calls,
        _id_shape(message.get("tool_call_id"), message.get("name")),
    )


def _content_shape(content: Any) -> Any:
    if isinstance(content, list):
        return [_content_shape(part) for part in content]
    return bool(content.strip()) if isinstance(content, str) else str(type(content))


def _id_shape(id: str | None, name: str | None) -> Any:
    return id and (len(id), id.isalnum(), id.isdigit(), f".{name}:" in id)


# The search.


def _applied(messages: Messages, chosen: Sequence[Rewrite]) -> Messages:
    for rewrite in chosen:
        messages = rewrite.apply(messages)
    return messages


def _subsets(
    messages: Messages, known: Sequence[Rewrite]
) -> Iterator[tuple[int, tuple[Rewrite, ...]]]:
    """Yields sets of rewrites that may change a conversation, cheapest first, from none."""
    useful = _useful(messages, known)
    waiting: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    while waiting:
        cost, indices = heapq.heappop(waiting)
        yield cost, tuple(useful[i] for i in indices)
        for i in range(indices[-1] + 1 if indices else 0, len(useful)):
            heapq.heappush(waiting, (cost + useful[i].cost, (*indices, i)))


def _useful(messages: Messages, known: Sequence[Rewrite]) -> list[Rewrite]:
    """Returns the rewrites that change a conversation, or the result of other rewrites."""
    found: list[Rewrite] = []
    # Each alone and all in turn, because one that removes calls would hide the effect of others.
    forms, last = [messages], messages
    for rewrite in known:
        if any(rewrite.apply(form) != form for form in (*forms, last)):
            found.append(rewrite)
            forms.append(rewrite.apply(messages))
            last = rewrite.apply(last)
    return found


def _continued(messages: Messages) -> Skeleton | None:
    """Returns a conversation one turn later; None if it does not end with an answer."""
    if messages[-1]["role"] not in ("user", "tool"):
        return None
    later = [{"role": "assistant", "content": "answer"}, {"role": "user", "content": "ask"}]
    return Skeleton.of([*messages, *later])


def _cheapest(
    skeleton: Skeleton,
    later: Skeleton | None,
    spelling: Spelling,
    known: Sequence[Rewrite],
    render: Callable[[Messages], str],
) -> tuple[Rewrite, ...] | None:
    """Returns the rewrites with which a template accepts a skeleton, or None.

    Args:
        later: The conversation one turn later. Rewrites that fail there should not be used now,
            because the prompt would then begin differently and miss the prefix cache.
    """
    best: tuple[Rewrite, ...] | None = None
    min_cost = math.inf
    tried: list[Messages] = []

    def consider(chosen: tuple[Rewrite, ...]) -> bool:
        """Keeps rewrites that are better than the best so far; returns True if they are."""
        nonlocal best, min_cost
        form = _applied(skeleton.messages, chosen)
        if form in tried:
            return False
        tried.append(form)
        total = sum(rewrite.cost for rewrite in chosen) + skeleton.penalty(
            spelled(form, spelling), render
        )
        if later is not None and total < min_cost:
            form = spelled(_applied(later.messages, chosen), spelling)
            total += _REFUSED_LATER * (later.penalty(form, render) == math.inf)
        if total >= min_cost:
            return False
        best, min_cost = chosen, total
        return True

    for cost, chosen in _subsets(skeleton.messages, known):
        if cost >= min_cost:
            return best
        if len(tried) >= _MAX_SKELETONS:
            break
        consider(chosen)
    # Much is wrong: start with all rewrites, and remove those that are not needed.
    useful = _useful(skeleton.messages, known)
    of_one = [{"lists", *ROLES} - {role} for role in ROLES]  # lists for one role only
    for contents in (set[str](), {*ROLES}, {"lists"}, *of_one):
        kept = tuple(r for r in useful if not r.contents or r.contents in contents)
        if not consider(kept):
            continue
        for rewrite in sorted(kept, key=lambda rewrite: -rewrite.cost):
            fewer = tuple(other for other in kept if other is not rewrite)
            if consider(fewer):
                kept = fewer
    return best
