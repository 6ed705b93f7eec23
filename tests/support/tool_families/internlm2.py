from collections.abc import Sequence

from . import Arguments, Call, Family, Golden
from .tool_calls import CALL, objects, template

BEGIN, END = "<|action_start|><|plugin|>", "<|action_end|>"


def render(calls: Sequence[tuple[str, Arguments]]) -> str:
    return "".join(f"{BEGIN}\n{call}{END}" for call in objects(calls))


FAMILIES = [
    Family(
        name="internlm2",
        tokens=("<|action_start|>", "<|plugin|>", "<|action_end|>", "<|im_end|>"),
        template=template(
            "<|im_start|>",
            f"{{% for c in m.tool_calls %}}{BEGIN}\n{CALL}{END}{{% endfor %}}",
            "<|im_end|>\n",
        ),
        render=render,
        goldens=(
            Golden(
                f'Let me see.{BEGIN}\n{{"name": "get_weather", "parameters": {{"city": "Oslo"}}}}'
                f'{END}{BEGIN}\n{{"name": "now", "arguments": {{}}}}{END}\n',
                "Let me see.",
                (Call("get_weather", {"city": "Oslo"}), Call("now", {})),
            ),
            Golden(
                f'{BEGIN}\n{{"name": "get_weather", "parameters": {{"city": "Os',
                calls=(Call("get_weather", is_complete=False, text='{"city": "Os'),),
            ),
        ),
    )
]
