"""Whatever conversation an API takes or makes, a chat template renders it or says why not."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from support.chat_templates import TEMPLATES, WITH_TOOLS
from support.thinking import tokenizer_with
from support.tool_families import families

from mlx_paged.engine.chat.acceptance import _shortened
from mlx_paged.engine.chat.rewrites import normal
from mlx_paged.engine.chat_template import render_chat
from mlx_paged.parsing.definitions import Tool
from mlx_paged.server.bodies import ChatBody
from mlx_paged.server.chat import turn_of as chat_turn
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.conversation import Conversation, Renderer
from mlx_paged.server.errors import ApiError
from mlx_paged.server.messages.bodies import MessagesBody
from mlx_paged.server.messages.turns import turn_of as messages_turn
from mlx_paged.server.responses_api.body import ResponseBody
from mlx_paged.server.responses_api.items import items_of, messages_of

#: More of what is random.
THOROUGH = int(os.environ.get("MLX_PAGED_TEST_TOOLS", "1"))
FAMILIES = {family.name: family.template for family in families()}

Message = dict[str, Any]
OURS, FOREIGN = "call_0123456789abcdef0123456{}", ("toolu_01A09q90qw90lq917835lq9{}", "0{}", "x{}")
TOOLS = [
    Tool("get_weather", None, {"type": "object", "properties": {"city": {"anyOf": []}}}),
    Tool("now", "The time.", {"type": "object"}),
]


TOKENIZER = tokenizer_with()


def renderer_of(template: str) -> Renderer:
    config = ServerConfig(chat_template=template)
    return Renderer(TOKENIZER, config, None, len(TOKENIZER.get_vocab()))


def prompt_of(renderer: Renderer, conversation: Conversation) -> str:
    tokens = asyncio.run(renderer.render(conversation))
    return str(renderer.tokenizer.decode(tokens))


@pytest.fixture(scope="module")
def renderers() -> Iterator[dict[str, Renderer]]:
    made = {name: renderer_of(template) for name, template in TEMPLATES.items()}
    yield made
    for renderer in made.values():
        renderer.close()


# --- Answers of the server, sent back -------------------------------------------------------------


def said(
    content: str | None = None, calls: Sequence[tuple[str, str, str]] = (), reasoning: str = ""
) -> Message:
    """An answer as the server returns it: null where there are calls and no text."""
    message: Message = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if calls:
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, name, arguments in calls
        ]
    return message


def result(id: str, content: Any, **more: Any) -> Message:
    return {"role": "tool", "tool_call_id": id, "content": content, **more}


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


CITY, ZONE = '{"city": "Oslo"}', '{"zone": "Paris", "count": 3}'


def histories(id: str) -> dict[str, list[Message]]:
    """Conversations with answers of the server."""
    first = (id.format(1), "get_weather", CITY)
    second = (id.format(2), "now", ZONE)
    empty = (id.format(3), "now", "{}")
    cut = (id.format(4), "get_weather", '{"city": "Os')
    return {
        "one call": [user("ask"), said(None, [first]), result(first[0], "cold")],
        "a call, and an answer": [
            user("ask"), said(None, [first]), result(first[0], "cold"), said("answer"),
            user("next"),
        ],
        "text beside a call": [user("ask"), said("look", [first]), result(first[0], "cold")],
        "thinking, text and a call": [
            user("ask"), said("look", [first], "hmm"), result(first[0], "cold"),
        ],
        "two calls": [
            user("ask"), said(None, [first, second]), result(first[0], "cold"),
            result(second[0], "noon"),
        ],
        "results in another order": [
            user("ask"), said("look", [first, second], "hmm"), result(second[0], "noon"),
            result(first[0], "cold"),
        ],
        "a call without arguments": [user("ask"), said(None, [empty]), result(empty[0], "noon")],
        "a call that was cut": [user("ask"), said(None, [cut]), result(cut[0], "failed")],
        "several turns": [
            user("ask"), said("look", [first]), result(first[0], "cold"),
            said("again", [second], "hmm"), result(second[0], "noon"), said("answer"), user("next"),
            said(None, [first]), result(first[0], "cold"),
        ],
        "text behind a result": [
            user("ask"), said(None, [first]), result(first[0], "cold"), user("next"),
        ],
        "a result that is empty": [user("ask"), said(None, [first]), result(first[0], "")],
        "a result in parts": [
            user("ask"), said(None, [first]),
            result(first[0], [{"type": "text", "text": "cold"}, {"type": "text", "text": "wet"}]),
        ],
        "no result": [user("ask"), said(None, [first]), user("next")],
        "no text": [user("ask"), said(""), user("next")],
        "only thinking": [user("ask"), said("", reasoning="hmm"), user("next")],
    }  # fmt: skip


def required(messages: Sequence[Message]) -> list[str]:
    """Everything a prompt must show: all but reasoning, and text beside calls."""
    found = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            found += [part["text"] for part in content]
        elif content and not message.get("tool_calls"):
            found.append(content)
        for call in message.get("tool_calls", ()):
            found.append(call["function"]["name"])
            found += [
                w for w in ("city", "Oslo", "zone", "Paris") if w in call["function"]["arguments"]
            ]
    return found


#: Whose ids, and without the tools that were called: fewer histories are enough for these.
SOME = ("two calls", "thinking, text and a call", "a call, and an answer")
HISTORIES = [
    *((kind, messages, True) for kind, messages in histories(OURS).items()),
    *((kind, histories(id)[kind], True) for id in FOREIGN for kind in SOME),
    *((kind, histories(OURS)[kind], False) for kind in SOME),
]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_of_the_server_sent_back(
    renderers: dict[str, Renderer], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    for kind, messages, has_tools in HISTORIES:
        caplog.clear()
        conversation = chat_turn(ChatBody.model_validate({"messages": messages})).conversation
        tools = TOOLS if has_tools and name in WITH_TOOLS else []
        text = prompt_of(renderers[name], Conversation(conversation.messages, tools=tools))
        assert not [word for word in required(messages) if word not in text], (kind, text)
        assert "None" not in text and "'type'" not in text, (kind, text)
        assert "{'" not in text, ("Python's notation", kind, text)
        shows_all = any("look" in (m["content"] or "") for m in messages) <= ("look" in text)
        assert shows_all or "left out: text beside calls" in caplog.text, (kind, text)


def test_a_text_beside_reasoning_and_a_call_of_gpt_oss_stays_in_its_channel(
    renderers: dict[str, Renderer], caplog: pytest.LogCaptureFixture
) -> None:
    """Its template takes text or thinking beside a call, and shows both as analysis."""
    messages = [
        user("ask"),
        said("I will look.", [("call_1", "now", "{}")], "They ask."),
        result("call_1", "noon"),
    ]
    conversation = chat_turn(ChatBody.model_validate({"messages": messages})).conversation
    text = prompt_of(renderers["gpt-oss"], conversation)
    expected = (
        "<|channel|>analysis<|message|>They ask.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I will look.<|end|><|start|>assistant to=functions.now"
    )
    assert expected in text
    assert not caplog.text


@pytest.mark.parametrize("name", TEMPLATES)
def test_instructions_and_orders_that_chats_may_have(
    renderers: dict[str, Renderer], name: str
) -> None:
    system, developer = (
        {"role": "system", "content": "rule"},
        {"role": "developer", "content": "law"},
    )
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    for messages in (
        [system, {**system, "content": "more"}, user("ask")],
        [developer, user("ask")],
        [developer, system, user("ask"), said("answer"), user("next")],
        [user("ask"), system, said("answer"), {**system, "content": "late"}, user("next")],
        [said("hello"), user("ask")],
        [user("ask"), user("again"), said("answer"), said("more"), user("next")],
        [system],
        [{**system, "content": parts}, user(parts), {**said(), "content": parts}, user("next")],
        [user(""), said(""), user("next")],
        [user([]), said("answer")],
    ):
        conversation = chat_turn(ChatBody.model_validate({"messages": messages})).conversation
        text = prompt_of(renderers[name], conversation)
        assert not [w for w in required(messages) if w not in text], (messages, text)
        assert "'type'" not in text, text


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_with_everything_that_a_template_may_refuse(
    renderers: dict[str, Renderer], name: str
) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    first, second = ("call_1", "now", ZONE), ("call_2", "get_weather", '{"city": "Oslo')
    messages = [
        said("hello"), {"role": "developer", "content": parts},
        {"role": "system", "content": "rule"},
        user(parts), user("ask"), said("look", [first, second], "hmm"), result("call_2", parts),
        user("wait"), {"role": "system", "content": parts}, {**said(), "content": parts},
        said("more"), said(None, [("call_3", "now", "[1]")]), user("next"),
    ]  # fmt: skip
    conversation = chat_turn(ChatBody.model_validate({"messages": messages})).conversation
    text = prompt_of(renderers[name], conversation)
    assert not [word for word in required(messages) if word not in text], text


# --- Anything that the APIs take ------------------------------------------------------------------


class Author:
    """Writes bodies of the three APIs at random."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.ids: list[str] = []

    def text(self) -> str:
        words = (
            "word",
            "",
            " ",
            "<think>a</think>b",
            "[TOOL_CALLS]",
            "{}",
            "<|channel|>final",
            "é",
        )
        return self.random.choice(words)

    def some(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def parts(self, kind: str = "text") -> list[Message]:
        return [{"type": kind, "text": self.text()} for _ in range(self.random.randrange(4))]

    def id(self) -> str:
        if self.ids and self.random.random() < 0.7:
            return self.random.choice(self.ids)
        return self.some("call_1", "abcdefghi", "functions.now:0", "7", "x" * 50, "é")

    def arguments(self) -> str:
        return self.some(
            "{}", CITY, ZONE, "", '{"a": [1, {"b": null}]}', "[1]", '"x"', '{"a": ', "7"
        )

    def chat(self) -> list[Mapping[str, Any]]:
        messages: list[Message] = []
        for _ in range(self.random.randrange(1, 9)):
            role = self.some(
                "user", "user", "assistant", "assistant", "tool", "system", "developer"
            )
            message: Message = {"role": role, "content": self.some(self.text(), self.parts())}
            if role == "assistant":
                if self.random.random() < 0.6:
                    self.ids = [self.id() for _ in range(self.random.randrange(1, 4))]
                    calls = [
                        (id, self.some("now", "get_weather"), self.arguments()) for id in self.ids
                    ]
                    message |= said(self.some(None, self.text()), calls)
                    for call in message["tool_calls"]:
                        if self.random.random() < 0.1:
                            del call["id"]
                if self.random.random() < 0.3:
                    message["reasoning_content"] = self.text()
            elif role == "tool" and self.random.random() < 0.9:
                message["tool_call_id"] = self.id()
            messages.append(message)
        return chat_turn(ChatBody.model_validate({"messages": messages})).conversation.messages

    def responses(self) -> list[Mapping[str, Any]]:
        self.ids = []
        items: list[Message] = [{"role": "user", "content": self.text()}]
        for _ in range(self.random.randrange(1, 9)):
            kind = self.some(
                "message", "message", "function_call", "function_call_output", "reasoning"
            )
            if kind == "message":
                role = self.some("user", "assistant", "system", "developer")
                content = self.some(self.text(), self.parts("input_text"))
                items.append({"role": role, "content": content})
            elif kind == "function_call":
                self.ids.append(self.some("call_1", "call_2", "abcdefghi"))
                call = {"call_id": self.ids[-1], "name": "now", "arguments": self.arguments()}
                items.append({"type": kind, **call})
            elif kind == "function_call_output" and self.ids:
                output = self.some(self.text(), self.parts("input_text"))
                items.append(
                    {"type": kind, "call_id": self.random.choice(self.ids), "output": output}
                )
            elif kind == "reasoning":
                thought = {"type": "reasoning_text", "text": self.text()}
                items.append({"type": kind, "summary": [], "content": [thought]})
        return messages_of(items_of(ResponseBody.model_validate({"input": items}).input))

    def messages(self) -> list[Mapping[str, Any]]:
        self.ids = []
        found: list[Message] = []
        for _ in range(self.random.randrange(1, 9)):
            role = self.some("user", "assistant", "system")
            blocks = self.parts()
            if role == "assistant" and self.random.random() < 0.5:
                self.ids = [f"toolu_{i}" for i in range(self.random.randrange(1, 3))]
                blocks += [
                    {"type": "tool_use", "id": id, "name": "now", "input": self.some({}, {"a": 1})}
                    for id in self.ids
                ]
                blocks.insert(0, {"type": "thinking", "thinking": self.text(), "signature": "s"})
            elif role == "user" and self.ids:
                blocks = [
                    {"type": "tool_result", "tool_use_id": id, "is_error": self.some(True, False),
                     "content": self.some(self.text(), self.parts())}
                    for id in self.ids
                ] + blocks  # fmt: skip
            found.append({"role": role, "content": self.some(blocks, self.text())})
        found.append({"role": "user", "content": "ask"})
        system = self.some(None, self.text(), self.parts())
        body = {"model": None, "max_tokens": 1, "messages": found, "system": system}
        return messages_turn(MessagesBody.model_validate(body)).conversation.messages


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [*TEMPLATES, *FAMILIES])
def test_a_conversation_renders_or_the_template_says_why_not(name: str) -> None:
    template = {**FAMILIES, **TEMPLATES}[name]
    renderer = renderer_of(template)
    for seed in range(THOROUGH):
        author = Author(f"{name} {seed}")
        for api in (author.chat, author.responses, author.messages):
            messages = api()
            if not messages:
                continue
            tools = TOOLS if api != author.responses and name in WITH_TOOLS else []
            try:
                asyncio.run(renderer.prompt(Conversation(messages, tools=tools)))
            except ApiError as error:
                assert error.status == 400 and error.param == "messages"
                own = own_refusal(renderer, messages, tools)
                assert own is None or own in error.message, (messages, error.message)
    renderer.close()


def own_refusal(
    renderer: Renderer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
) -> str | None:
    """Renders a conversation with the template alone."""
    given = [tool.for_template() for tool in tools] or None
    try:
        render_chat(renderer.tokenizer, messages, tools=given)
    except Exception as error:
        return f"{error}".strip().splitlines()[0][:40]
    return None


# --- What is rewritten, and what is not -----------------------------------------------------------


def forms_seen(template: str, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Any:
    """The messages as a template has seen them."""
    renderer = renderer_of(template + "{{ messages | tojson }}")
    conversation = chat_turn(ChatBody.model_validate({"messages": messages})).conversation
    text = prompt_of(renderer, Conversation(conversation.messages, tools=tools))
    renderer.close()
    return json.loads(text[text.index("[{") :])


def test_a_conversation_that_is_taken_is_left_as_it_is() -> None:
    call = said("look", [("x", "now", ZONE)], "hmm")
    [asked, answer, came] = forms_seen("", [user("ask"), call, result("x", "noon")])
    assert asked == user("ask") and came == {**result("x", "noon"), "name": "now"}
    assert answer["content"] == "look" and answer["reasoning_content"] == "hmm"
    [given] = answer["tool_calls"]
    assert given["id"] == "x" and given["function"]["arguments"] == json.loads(ZONE)


def test_results_stand_in_the_order_of_their_calls_with_their_names() -> None:
    calls = said(None, [("a", "now", "{}"), ("b", "get_weather", CITY)])
    legacy = {"role": "function", "name": "now", "content": "noon"}
    seen = forms_seen("", [user("ask"), calls, result("b", "cold"), legacy])
    assert [(m["tool_call_id"], m["name"]) for m in seen[2:]] == [
        ("a", "now"),
        ("b", "get_weather"),
    ]


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
LISTS = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        (BOTH, PARTS, "(one)(two)"),
        (BOTH, "text", "text"),
        (BOTH, PARTS[:1], "(one)"),
        (LISTS, PARTS, "onetwo"),
        (LISTS, "text", "text"),
        ("{{ messages[0].content }}", PARTS, "one\ntwo"),
        ("{{ messages[0].content | trim }}", PARTS, "one\ntwo"),
        ("{{ messages[0].content | tojson }}", PARTS, '"one\\ntwo"'),
        ("{{ messages[0].content[0].text or messages[0].content }}", PARTS, "one\ntwo"),
    ],
)
def test_lists_go_to_templates_that_take_them(template: str, content: Any, expected: str) -> None:
    renderer = renderer_of(template)
    conversation = chat_turn(ChatBody.model_validate({"messages": [user(content)]})).conversation
    assert prompt_of(renderer, conversation) == expected
    renderer.close()


def test_what_is_lost_is_logged(renderers: dict[str, Renderer], caplog) -> None:
    messages = [{"role": "system", "content": "rule"}, user("ask")]
    conversation = Conversation(messages)
    with caplog.at_level(logging.WARNING, "mlx_paged"):
        prompt_of(renderers["llama2"], conversation)
        assert not caplog.records
        prompt_of(renderers["gemma2"], conversation)
    assert "system messages are the user's" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "mlx_paged"):
        history = histories(OURS)["several turns"]
        assert "look" not in prompt_of(renderers["mistral v3"], Conversation(history))
    assert caplog.messages == ["for the chat template, left out: text beside calls"]


def test_a_refusal_is_the_template_s_own() -> None:
    renderer = renderer_of(
        "{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}"
    )
    for messages in ([user("a"), said("b")], [said("b"), user("a")]):
        with pytest.raises(ApiError, match=r"template does not take .*one only") as error:
            prompt_of(renderer, Conversation(messages))
        assert error.value.status == 400
    renderer.close()


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 // 0 }}",
        "{{ messages.x.y }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_whatever_a_template_raises_is_a_refusal(template: str) -> None:
    renderer = renderer_of(template)
    with pytest.raises(ApiError, match="the chat template does not take"):
        prompt_of(renderer, Conversation([user("a")]))
    renderer.close()


def test_arguments_nested_without_end_are_text() -> None:
    deep = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
    renderer = renderer_of(TEMPLATES["kimi k2"])
    messages = [user("ask"), said(None, [("x", "now", deep)]), result("x", "y")]
    conversation = chat_turn(ChatBody.model_validate({"messages": messages})).conversation
    assert deep in prompt_of(renderer, conversation)
    renderer.close()


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("mistral v3", r"[0-9a-zA-Z]{9}"),
        ("kimi k2", r"functions\.now:5"),
        ("ids of digits", "5"),
        ("llama3", r"call_[0-9a-f]{24}"),
    ],
)
def test_ids_are_made_in_the_form_that_the_template_takes(
    renderers: dict[str, Renderer], name: str, form: str
) -> None:
    prompt = asyncio.run(renderers[name].prompt(Conversation([user("ask")])))
    made = {prompt.spelling.new_id("now", 5) for _ in range(5)}
    assert all(re.fullmatch(form, id) for id in made)
    assert len(made) == (1 if "5" in form[-1:] else 5)


def test_no_text_beside_a_call_is_no_empty_answer(renderers: dict[str, Renderer]) -> None:
    text = prompt_of(renderers["deepseek r1"], Conversation(histories(OURS)["one call"]))
    assert "<|Assistant|><|end|>" not in text
    assert text.count("<|Assistant|>") == 2


def test_the_same_id_is_always_rewritten_alike(renderers: dict[str, Renderer]) -> None:
    history = histories(FOREIGN[0])["several turns"]
    begun, more = (
        prompt_of(renderers["mistral v3"], Conversation(m)) for m in (history[:3], history[:6])
    )
    assert more.startswith(begun)


def test_long_conversations_are_asked_about_in_short() -> None:
    turn = [user("ask"), said("look", [("x", "now", "{}")]), result("x", "noon"), said("answer")]
    long = _shortened(normal(turn * 100))
    assert len(long) == 8
    renderer = renderer_of(TEMPLATES["llama3"])
    text = prompt_of(renderer, Conversation(turn * 100))
    assert text.count("noon") == 100 and text.count("look") == 100
    renderer.close()
