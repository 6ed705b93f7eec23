from collections.abc import Sequence

from . import Arguments, Call, Family, Golden, as_json
from .tool_calls import template


def value_of(value: object) -> str:
    text = value if isinstance(value, str) else as_json(value)
    is_quoted = isinstance(value, str) and any(c in text for c in "<&\n")
    return f"<![CDATA[{text}]]>" if is_quoted else text


def render(calls: Sequence[tuple[str, Arguments]]) -> str:
    texts = []
    for name, arguments in calls:
        values = [
            f'<param name="{key}">{value_of(value)}</param>' for key, value in arguments.items()
        ]
        texts.append(f'<function name="{name}">{"".join(values)}</function>')
    return "".join(texts)


FAMILIES = [
    Family(
        name="minicpm5",
        tokens=("<|im_end|>", "<think>", "</think>"),
        template=template(
            "<|im_start|>",
            '{% for c in m.tool_calls %}<function name="{{ c.function.name }}">'
            "{% for k, v in c.function.arguments.items() %}"
            '<param name="{{ k }}">{{ v if v is string else v | tojson }}</param>{% endfor %}'
            "</function>{% endfor %}",
            "<|im_end|>\n",
        ),
        render=render,
        # (The end of the quotes cannot be quoted.)
        can_write=lambda text: "]]>" not in text and not text.startswith("<![CDATA["),
        goldens=(
            Golden(
                'So.\n<function name="get_weather"><param name="city">北京</param>'
                '<param name="days">2</param></function>\n<function name="now"></function>',
                "So.",
                (Call("get_weather", {"city": "北京", "days": 2}), Call("now", {})),
            ),
            Golden(
                '<function name="write_file"><param name="path">a</param><param name="text">'
                "<![CDATA[<b>\n</param> & ]]> ]]></param></function>",
                calls=(Call("write_file", {"path": "a", "text": "<b>\n</param> & ]]> "}),),
            ),
            Golden(
                '<function name="get_weather"><param name="city"><![CDATA[Os',
                calls=(Call("get_weather", is_complete=False, text='{"city": "Os'),),
            ),
            Golden(
                '<functionname="get_weather"><param\u0120name="city">Oslo</param></function>',
                calls=(Call("get_weather", {"city": "Oslo"}),),
            ),
            Golden('<function name="a b">', '<function name="a b">'),
        ),
    )
]
