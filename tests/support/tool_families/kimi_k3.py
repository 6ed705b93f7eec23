from collections.abc import Sequence

from . import Arguments, Call, Family, Golden, as_json
from .tool_calls import template

TYPES = {str: "string", bool: "boolean", int: "number", float: "number", dict: "object"}
TYPES |= {list: "array", type(None): "null"}


def tag(name: str, text: str, attributes: str = "") -> str:
    return f"<|open|>{name}{attributes}<|sep|>{text}<|close|>{name}<|sep|>"


def render(calls: Sequence[tuple[str, Arguments]]) -> str:
    texts = []
    for i, (name, arguments) in enumerate(calls):
        values = [
            tag(
                "argument",
                value if isinstance(value, str) else as_json(value),
                f' key="{key}" type="{TYPES[type(value)]}"',
            )
            for key, value in arguments.items()
        ]
        texts.append(tag("call", "".join(values), f' tool="{name}" index="{i + 1}"'))
    return tag("tools", "".join(texts))


def response(text: str) -> str:
    return tag("response", text)


FAMILIES = [
    Family(
        name="kimi_k3",
        is_spelled=False,
        tokens=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        template=template(
            "<|open|>message<|sep|>",
            "<|open|>tools<|sep|>{% for c in m.tool_calls %}"
            '<|open|>call tool="{{ c.function.name }}" index="{{ loop.index }}"<|sep|>'
            "{% for k, v in c.function.arguments.items() %}"
            "<|open|>argument key=\"{{ k }}\" type=\"{{ 'string' if v is string else 'number' }}\""
            "<|sep|>{{ v }}<|close|>argument<|sep|>{% endfor %}<|close|>call<|sep|>{% endfor %}"
            "<|close|>tools<|sep|>",
            "<|close|>message<|sep|><|end_of_msg|>",
        ),
        render=render,
        before=response,
        alone=response,
        goldens=(
            Golden("Plain.", "Plain."),
            Golden(response("Yes.") + "<|close|>message<|sep|><|end_of_msg|>", "Yes."),
            # The prompt has opened the text.
            Golden("Yes.<|close|>response<|sep|>", "Yes."),
            Golden(
                response("")
                + render([("get_weather", {"city": "Oslo", "days": 3}), ("now", {})])
                + "<|close|>message<|sep|>",
                calls=(Call("get_weather", {"city": "Oslo", "days": 3}), Call("now", {})),
            ),
            # All arguments in one object.
            Golden(
                tag(
                    "tools",
                    tag(
                        "call",
                        tag("json", '{"city": "Oslo"}', ' type="object"'),
                        ' tool="get_weather" index="1"',
                    ),
                ),
                calls=(Call("get_weather", {"city": "Oslo"}),),
            ),
            Golden(
                '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
                '<|open|>argument key="city" type="string"<|sep|>Os',
                calls=(Call("get_weather", is_complete=False, text='{"city": "Os'),),
            ),
        ),
    )
]
