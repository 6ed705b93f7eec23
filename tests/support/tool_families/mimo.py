from collections.abc import Sequence

from . import Arguments, Call, Family, Golden, as_json
from .tool_calls import template


def render(calls: Sequence[tuple[str, Arguments]]) -> str:
    texts = []
    for name, arguments in calls:
        values = [
            f"<parameter={key}>{value if isinstance(value, str) else as_json(value)}</parameter>"
            for key, value in arguments.items()
        ]
        texts.append(f"<tool_call><function={name}>{''.join(values)}</function></tool_call>")
    return "".join(texts)


FAMILIES = [
    Family(
        name="mimo",
        tokens=("<tool_call>", "</tool_call>", "<|im_end|>"),
        template=template(
            "<|im_start|>",
            "{% for c in m.tool_calls %}<tool_call><function={{ c.function.name }}>"
            "{% for k, v in c.function.arguments.items() %}"
            "<parameter={{ k }}>{{ v if v is string else v | tojson }}</parameter>{% endfor %}"
            "</function></tool_call>{% endfor %}",
            "<|im_end|>",
        ),
        render=render,
        goldens=(
            # Newlines are a part of the value.
            Golden(
                render([("write_file", {"path": "a", "text": "\none\ntwo\n"}), ("now", {})]),
                calls=(Call("write_file", {"path": "a", "text": "\none\ntwo\n"}), Call("now", {})),
            ),
            Golden(
                "<tool_call><function=get_weather><parameter=city>Os",
                calls=(Call("get_weather", is_complete=False, text='{"city": "Os'),),
            ),
        ),
    )
]
