from collections.abc import Sequence

from . import Arguments, Call, Family, Golden, as_json
from .tool_calls import template


def render(calls: Sequence[tuple[str, Arguments]]) -> str:
    return "".join(f"<function={name}>{as_json(arguments)}</function>" for name, arguments in calls)


def recipients(calls: Sequence[tuple[str, Arguments]]) -> str:
    return "".join(f">>>{name}\n{as_json(arguments)}" for name, arguments in calls)


FAMILIES = [
    Family(
        name="functionary_v3_1",
        tokens=("<|eot_id|>", "<|eom_id|>"),
        template=template(
            "<|start_header_id|>",
            "{% for c in m.tool_calls %}<function={{ c.function.name }}>"
            "{{ c.function.arguments | tojson }}</function>{% endfor %}",
            "<|eot_id|>",
        ),
        render=render,
        goldens=(
            Golden(
                "So. " + render([("get_weather", {"city": "Oslo"}), ("now", {})]),
                "So.",
                (Call("get_weather", {"city": "Oslo"}), Call("now", {})),
            ),
            Golden(
                '<function=get_weather>{"city": "Os',
                calls=(Call("get_weather", is_complete=False, text='{"city": "Os'),),
            ),
            Golden("<function=a b>{}</function>", "<function=a b>{}</function>"),
        ),
    ),
    Family(
        name="functionary_v3_2",
        tokens=("<|eot_id|>",),
        template="{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
        "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{% if m.content %}{{ '>>>all\n' if m.role == 'assistant' }}{{ m.content }}{% endif %}"
        "{% for c in m.tool_calls or [] %}>>>{{ c.function.name }}\n"
        "{{ c.function.arguments if c.function.arguments is string else "
        "c.function.arguments | tojson }}{% endfor %}<|eot_id|>{% endfor %}",
        render=recipients,
        before=lambda text: f">>>all\n{text}",
        alone=lambda text: f"all\n{text}",
        begin=">>>now\n",
        goldens=(
            Golden("all\nYes >> no.", "Yes >> no."),
            Golden("Plain.", "Plain."),
            Golden(
                'get_weather\n{"city": "Oslo"}>>>now\n{}',
                calls=(Call("get_weather", {"city": "Oslo"}), Call("now", {})),
            ),
            Golden(
                'all\nWait.\n>>>get_weather\n{"city": ">>>now"}',
                "Wait.",
                (Call("get_weather", {"city": ">>>now"}),),
            ),
            Golden(
                'get_weather\n{"city": "Os',
                calls=(Call("get_weather", is_complete=False, text='{"city": "Os'),),
            ),
            # A prompt of Python's, and a tool that is none.
            Golden("all\n>>> 1 + 1\n2\n>>>other\nx", ">>> 1 + 1\n2\n>>>other\nx"),
        ),
    ),
]
