from collections.abc import Mapping, Sequence
from typing import Any

from . import TOOLS, Arguments, Call, Family, Golden, as_json, tool
from .tool_calls import template

NS = "]<]minimax[>["
NESTED = tool(
    "nested",
    {
        "place": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "at": {"$ref": "#/$defs/at"}},
        },
        "days": {"type": "array", "items": {"type": "integer"}},
        "either": {"type": ["array", "string"], "items": {"type": "string"}},
    },
    **{"$defs": {"at": {"type": "array", "items": {"type": "number"}}}},
)


def value_of(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return "".join(f"{NS}<item>{item}{NS}</item>" for item in value)
    return value if isinstance(value, str) else as_json(value)


def call(name: str, arguments: Mapping[str, Any]) -> str:
    values = [f"{NS}<{key}>{value_of(value)}{NS}</{key}>" for key, value in arguments.items()]
    return f'{NS}<invoke name="{name}">{"".join(values)}{NS}</invoke>'


def render(calls: Sequence[tuple[str, Arguments]]) -> str:
    lines = [f"{NS}<tool_call>", *(call(*one) for one in calls), f"{NS}</tool_call>"]
    return "\n".join(lines)


def in_call(text: str, end: str = f"{NS}</invoke>\n{NS}</tool_call>") -> str:
    return f'{NS}<tool_call>\n{NS}<invoke name="nested">{text}{end}'


FAMILIES = [
    Family(
        name="minimax_m3",
        is_spelled=False,
        tokens=(NS, "<mm:think>", "</mm:think>", "[e~["),
        template="{% set ns = ']<]minimax[>[' %}"
        + template(
            "]~b]",
            "{{ ns }}<tool_call>\n{% for c in m.tool_calls %}"
            '{{ ns }}<invoke name="{{ c.function.name }}">'
            "{% for k, v in c.function.arguments.items() %}"
            "{{ ns }}<{{ k }}>{{ v }}{{ ns }}</{{ k }}>{% endfor %}{{ ns }}</invoke>\n"
            "{% endfor %}{{ ns }}</tool_call>",
            "[e~[\n",
        ),
        tools=(*TOOLS, NESTED),
        render=render,
        can_write=lambda text: NS not in text,
        begin=f"{NS}<tool_call>",
        goldens=(
            Golden(
                "Let me see.\n"
                + render([("get_weather", {"city": "Oslo", "days": 2}), ("now", {})]),
                "Let me see.",
                (Call("get_weather", {"city": "Oslo", "days": 2}), Call("now", {})),
            ),
            # Objects and arrays, one in the other; numbers and strings by the schema.
            Golden(
                in_call(
                    f"{NS}<place>{NS}<name>5{NS}</name>{NS}<at>{NS}<item>1.5{NS}</item>{NS}<item>2"
                    f"{NS}</item>{NS}</at>{NS}</place>{NS}<days>{NS}<item>3{NS}</item>{NS}</days>"
                    f"{NS}<either>a{NS}</either>"
                ),
                calls=(
                    Call(
                        "nested",
                        {"place": {"name": "5", "at": [1.5, 2]}, "days": [3], "either": "a"},
                    ),
                ),
            ),
            # Keys that no schema lists, one of them twice.
            Golden(
                f'{NS}<tool_call>\n{NS}<invoke name="search.web-v2">{NS}<query>q{NS}</query>'
                f"{NS}<filter>{NS}<tag>a{NS}</tag>{NS}<in>{NS}<n>1{NS}</n>{NS}</in>{NS}<tag>b"
                f"{NS}</tag>{NS}</filter>{NS}</invoke>\n{NS}</tool_call>",
                calls=(
                    Call(
                        "search.web-v2",
                        {"query": "q", "filter": {"tag": ["a", "b"], "in": {"n": 1}}},
                    ),
                ),
            ),
            # The same as JSON, and empty.
            Golden(
                in_call(f'{NS}<place>{{"name": "x"}}{NS}</place>{NS}<days>{NS}</days>'),
                calls=(Call("nested", {"place": {"name": "x"}, "days": []}),),
            ),
            # A string with a tag of its own, space after the token, and newlines between tags.
            Golden(
                f'{NS}<tool_call>\n{NS}<invoke name="write_file">\n{NS}<path>a{NS}</path>\n'
                f"{NS} <text>x{NS}<b>y{NS}</text>\n{NS}</invoke>\n{NS}</tool_call>",
                calls=(Call("write_file", {"path": "a", "text": f"x{NS}<b>y"}),),
            ),
            # Ends are missing.
            Golden(
                in_call(f"{NS}<place>{NS}<name>x{NS}</place>{NS}<days>{NS}<item>1"),
                calls=(Call("nested", {"place": {"name": "x"}, "days": [1]}),),
            ),
            Golden(
                f'{NS}<tool_call>\n{NS}<invoke name="get_weather">{NS}<city>Os',
                calls=(Call("get_weather", is_complete=False, text='{"city": "Os'),),
            ),
            Golden(f"{NS}<tool_call>none{NS}</tool_call>", f"{NS}<tool_call>none{NS}</tool_call>"),
            Golden(f"A token {NS} alone", f"A token {NS} alone"),
        ),
    )
]
