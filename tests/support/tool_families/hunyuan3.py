from collections.abc import Sequence

from . import Arguments, Call, Family, Golden, as_json
from .tool_calls import template

NAMES = ("tool_calls", "tool_call", "arg_key", "arg_value", "think")
TOKENS = tuple(f"<{slash}{name}:opensource>" for name in NAMES for slash in ("", "/"))
SEPARATOR = "<tool_sep:opensource>"


def tagged(name: str, text: str) -> str:
    return f"<{name}:opensource>{text}</{name}:opensource>"


def render(calls: Sequence[tuple[str, Arguments]]) -> str:
    texts = []
    for name, arguments in calls:
        lines = [name + SEPARATOR]
        for key, value in arguments.items():
            text = value if isinstance(value, str) else as_json(value)
            lines += [tagged("arg_key", key), tagged("arg_value", text)]
        texts.append(tagged("tool_call", "\n".join([*lines, ""])))
    return tagged("tool_calls", "\n".join(["", *texts, ""]))


FAMILIES = [
    Family(
        name="hy_v3",
        tokens=(*TOKENS, SEPARATOR),
        template=template(
            "<|hy|>",
            "<tool_calls:opensource>\n{% for c in m.tool_calls %}<tool_call:opensource>"
            "{{ c.function.name }}<tool_sep:opensource>\n"
            "{% for k, v in c.function.arguments.items() %}"
            "<arg_key:opensource>{{ k }}</arg_key:opensource>\n<arg_value:opensource>"
            "{{ v if v is string else v | tojson }}</arg_value:opensource>\n{% endfor %}"
            "</tool_call:opensource>\n{% endfor %}</tool_calls:opensource>",
            "<|eos|>",
        ),
        render=render,
        goldens=(
            Golden(
                "I look.\n" + render([("get_weather", {"city": "Oslo", "days": 3}), ("now", {})]),
                "I look.",
                (Call("get_weather", {"city": "Oslo", "days": 3}), Call("now", {})),
            ),
            # Without newlines, and without the block.
            Golden(
                f"<tool_call:opensource>get_weather{SEPARATOR}{tagged('arg_key', 'city')}"
                f"{tagged('arg_value', 'Oslo')}</tool_call:opensource>",
                calls=(Call("get_weather", {"city": "Oslo"}),),
            ),
            Golden(
                f"<tool_calls:opensource>\n<tool_call:opensource>get_weather{SEPARATOR}\n"
                f"{tagged('arg_key', 'city')}\n<arg_value:opensource>Os",
                calls=(Call("get_weather", is_complete=False, text='{"city": "Os'),),
            ),
            Golden(
                f"<tool_call:opensource>a b{SEPARATOR}</tool_call:opensource>",
                f"<tool_call:opensource>a b{SEPARATOR}</tool_call:opensource>",
            ),
        ),
    )
]
