from collections.abc import Sequence

from . import Arguments, Call, Family, Golden, as_json
from .tool_calls import template


def render(calls: Sequence[tuple[str, Arguments]]) -> str:
    lines = ["<dots_function_call>"]
    for name, arguments in calls:
        lines.append(f'<invoke name="{name}">')
        for key, value in arguments.items():
            text = value if isinstance(value, str) else as_json(value)
            lines.append(f'<parameter name="{key}">\n{text}\n</parameter>')
        lines.append("</invoke>")
    return "\n".join([*lines, "</dots_function_call>"])


FAMILIES = [
    Family(
        name="dots",
        tokens=("<|endofresponse|>", "<think>", "</think>"),
        template=template(
            "<|role|>",
            "<dots_function_call>\n{% for c in m.tool_calls %}"
            '<invoke name="{{ c.function.name }}">\n'
            "{% for k, v in c.function.arguments.items() %}"
            '<parameter name="{{ k }}">\n{{ v if v is string else v | tojson }}\n</parameter>\n'
            "{% endfor %}</invoke>\n{% endfor %}</dots_function_call>",
            "<|endofresponse|>",
        ),
        render=render,
        goldens=(
            Golden(
                "I check." + render([("get_weather", {"city": "北京", "days": 3}), ("now", {})]),
                "I check.",
                (Call("get_weather", {"city": "北京", "days": 3}), Call("now", {})),
            ),
            Golden(
                '<dots_function_call>\n<invoke name="get_weather">\n'
                '<parameter name="city">Oslo</parameter>\n</invoke>\n</dots_function_call>',
                calls=(Call("get_weather", {"city": "Oslo"}),),
            ),
            Golden(
                '<dots_function_call>{"name":"get_weather","arguments":{"city":"Oslo"}}'
                "</dots_function_call>\nDone.",
                "Done.",
                (Call("get_weather", {"city": "Oslo"}),),
            ),
            Golden("<dots_function_call>ls", "<dots_function_call>ls"),
        ),
    )
]
