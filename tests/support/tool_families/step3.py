from collections.abc import Sequence

from . import Arguments, Call, Family, Golden, as_json
from .tool_calls import template

BEGIN, END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
CALL, CALL_END = "<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"
PARAMETER = '<steptml:parameter name="{}">{}</steptml:parameter>'


def render(calls: Sequence[tuple[str, Arguments]]) -> str:
    lines = [BEGIN]
    for name, arguments in calls:
        lines.append(f'{CALL}<steptml:invoke name="{name}">')
        for key, value in arguments.items():
            lines.append(PARAMETER.format(key, value if isinstance(value, str) else as_json(value)))
        lines.append(f"</steptml:invoke>{CALL_END}")
    return "\n".join([*lines, END])


FAMILIES = [
    Family(
        name="step3",
        tokens=(
            *("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", "<｜tool_call_begin｜>"),
            *("<｜tool_call_end｜>", "<｜tool_sep｜>", "<think>", "</think>", "<|EOT|>"),
        ),
        template=template(
            "<|BOT|>",
            BEGIN + "\n{% for c in m.tool_calls %}" + CALL + '<steptml:invoke name="'
            '{{ c.function.name }}">\n{% for k, v in c.function.arguments.items() %}'
            '<steptml:parameter name="{{ k }}">{{ v if v is string else v | tojson }}'
            "</steptml:parameter>\n{% endfor %}</steptml:invoke>"
            + CALL_END
            + "\n{% endfor %}"
            + END,
            "<|EOT|>",
        ),
        render=render,
        goldens=(
            Golden(
                "Some.\n" + render([("get_weather", {"city": "Oslo", "days": 5}), ("now", {})]),
                "Some.",
                (Call("get_weather", {"city": "Oslo", "days": 5}), Call("now", {})),
            ),
            # With the name in front, too.
            Golden(
                f"{BEGIN}{CALL}get_weather\n"
                + render([("get_weather", {"city": " Oslo\n"})]).split("｜tool_sep｜>")[1],
                calls=(Call("get_weather", {"city": " Oslo\n"}),),
            ),
            # As some answers have it: without the kind of call, and a separator between calls.
            Golden(
                f'{BEGIN}<｜tool_call_begin｜><steptml:invoke name="get_weather">'
                f"{PARAMETER.format('city', 'Tokyo')}</steptml:invoke>{CALL_END}<｜tool_sep｜>"
                f'<｜tool_call_begin｜><steptml:invoke name="now"></steptml:invoke>{CALL_END}{END}',
                calls=(Call("get_weather", {"city": "Tokyo"}), Call("now", {})),
            ),
            Golden(
                f'{BEGIN}\n{CALL}<steptml:invoke name="get_weather">\n'
                '<steptml:parameter name="city">Os',
                calls=(Call("get_weather", is_complete=False, text='{"city": "Os'),),
            ),
        ),
    )
]
