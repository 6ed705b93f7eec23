from collections.abc import Sequence

from . import Arguments, Call, Family, Golden, as_json

MESSAGE, START, END, END_OF_TURN = "<|message|>", "<|start|>", "<|eom|>", "<|eot|>"
AGAIN = f"{END}{START}assistant"


def call(name: str, arguments: Arguments) -> str:
    lines = ["<atem:function_calls>", f'<atem:invoke name="{name}">']
    for key, value in arguments.items():
        text = value if isinstance(value, str) else as_json(value)
        lines.append(f'<atem:parameter name="{key}">{text}</atem:parameter>')
    return "\n".join([*lines, "</atem:invoke>", "</atem:function_calls>"])


def render(calls: Sequence[tuple[str, Arguments]]) -> str:
    return AGAIN.join(f" to={name}{MESSAGE}{call(name, arguments)}" for name, arguments in calls)


FAMILIES = [
    Family(
        name="muse_glimmer",
        is_spelled=False,
        tokens=(MESSAGE, START, END, END_OF_TURN),
        template="{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
        "<|start|>{{ m.role }}{% if m.tool_calls %}{% for c in m.tool_calls %}"
        " to={{ c.function.name }}<|message|><atem:function_calls>\n"
        '<atem:invoke name="{{ c.function.name }}">\n'
        "{% for k, v in c.function.arguments.items() %}"
        '<atem:parameter name="{{ k }}">{{ v if v is string else v | tojson }}</atem:parameter>\n'
        "{% endfor %}</atem:invoke>\n</atem:function_calls>{% endfor %}"
        "{% else %} to=user<|message|>{{ m.content }}{% endif %}<|eot|>{% endfor %}",
        render=render,
        before=lambda text: f" to=user{MESSAGE}{text}{AGAIN}",
        alone=lambda text: f" to=user{MESSAGE}{text}",
        begin=f" to=now{MESSAGE}<atem:function_calls>\n",
        goldens=(
            Golden("Plain.", "Plain."),
            Golden(
                f" to=self{MESSAGE}It is 2 < 3.{AGAIN} to=user{MESSAGE}Yes.{END_OF_TURN}",
                "Yes.",
                reasoning="It is 2 < 3.",
            ),
            Golden(
                f" to=self{MESSAGE}Hm.{AGAIN} to=user{MESSAGE}Wait.{AGAIN}"
                + render([("get_weather", {"city": "Oslo", "days": 2}), ("now", {})])
                + END_OF_TURN,
                "Wait.",
                (Call("get_weather", {"city": "Oslo", "days": 2}), Call("now", {})),
                reasoning="Hm.",
            ),
            Golden(
                f" to=commentary{MESSAGE}Wait.{AGAIN} to=user{MESSAGE}Yes.{END_OF_TURN}",
                "Wait.\nYes.",
            ),
            # No recipient, as text and as a call.
            Golden(f"{MESSAGE}Yes.{END_OF_TURN}", "Yes."),
            Golden(f"{MESSAGE}{call('now', {})}{END_OF_TURN}", calls=(Call("now", {}),)),
            Golden(
                f' to=get_weather{MESSAGE}<atem:function_calls>\n<atem:invoke name="get_weather">\n'
                '<atem:parameter name="city">Os',
                calls=(Call("get_weather", is_complete=False, text='{"city": "Os'),),
            ),
        ),
    )
]
