from collections.abc import Sequence

from . import Arguments, Call, Family, Golden, as_json
from .tool_calls import template

BEGIN, END = "<|tools_prefix|>", "<|tools_suffix|>"


def render(calls: Sequence[tuple[str, Arguments]]) -> str:
    texts = [f'{{"{name}": {as_json(arguments)}}}' for name, arguments in calls]
    return f"{BEGIN}[{', '.join(texts)}]{END}"


FAMILIES = [
    Family(
        name="apertus",
        tokens=(BEGIN, END, "<|inner_prefix|>", "<|inner_suffix|>", "<|assistant_end|>"),
        template=template(
            "<|assistant_start|>",
            BEGIN + "[{% for c in m.tool_calls %}"
            "{{ '{\"' + c.function.name + '\": ' + c.function.arguments + '}' }}"
            "{{ ', ' if not loop.last }}{% endfor %}]" + END,
            "<|assistant_end|>",
        ),
        render=render,
        goldens=(
            Golden(
                f'I will check. {BEGIN}[{{"get_weather": {{"city": "Oslo"}}}}, {{"now":{{}}}}]{END}'
                " Done.",
                "I will check.\nDone.",
                (Call("get_weather", {"city": "Oslo"}), Call("now", {})),
            ),
            # Without the end, without the array, and with a token in a string.
            Golden(f'{BEGIN}[{{"now": {{}}}}]\nSo.', "So.", (Call("now", {}),)),
            Golden(f'{BEGIN}{{"now": {{}}}}{END}', calls=(Call("now", {}),)),
            Golden(
                f'{BEGIN}[{{"get_weather": {{"city": "{END}"}}}}]{END}',
                calls=(Call("get_weather", {"city": END}),),
            ),
            Golden(
                f'{BEGIN}[{{"get_weather": {{"city": "Os',
                calls=(Call("get_weather", is_complete=False, text='{"city": "Os'),),
            ),
            Golden(f"{BEGIN}[1]{END}", f"{BEGIN}[1]{END}"),
            Golden(f'{BEGIN}[{{"a": 1}}]{END}', f'{BEGIN}[{{"a": 1}}]{END}'),
            Golden(f"{BEGIN}[]{END}", f"{BEGIN}[]{END}"),
        ),
    )
]
