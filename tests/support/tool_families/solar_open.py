from collections.abc import Sequence

from . import Arguments, Call, Family, Golden, as_json
from .tool_calls import template

BEGIN, END = "<|begin|>", "<|end|>"
THINK, CONTENT, CALLS = "<|think|>", "<|content|>", "<|tool_calls|>"
CALL, NAME, ARGUMENTS, CALL_END = (
    *("<|tool_call:begin|>", "<|tool_call:name|>"),
    *("<|tool_call:args|>", "<|tool_call:end|>"),
)
AGAIN = f"{END}{BEGIN}assistant"


def render(calls: Sequence[tuple[str, Arguments]]) -> str:
    texts = [
        f"{CALL}a1b2c3d4e{i}{NAME}{name}{ARGUMENTS}{as_json(arguments)}{CALL_END}"
        for i, (name, arguments) in enumerate(calls)
    ]
    return CALLS + "".join(texts)


FAMILIES = [
    Family(
        name="solar_open",
        tokens=(BEGIN, END, THINK, CONTENT, CALLS, CALL, NAME, ARGUMENTS, CALL_END, "<|calls|>"),
        template=template(
            BEGIN,
            f"{CALLS}{{% for c in m.tool_calls %}}{CALL}{{{{ c.id }}}}{NAME}"
            f"{{{{ c.function.name }}}}{ARGUMENTS}{{{{ c.function.arguments | tojson }}}}"
            f"{CALL_END}{{% endfor %}}<|calls|>",
            END,
        ),
        render=render,
        before=lambda text: f"{CONTENT}{text}{AGAIN}",
        alone=lambda text: f"{CONTENT}{text}",
        goldens=(
            Golden("Plain.", "Plain."),
            Golden(
                f"{THINK}It is 2 < 3.{AGAIN}{CONTENT}Yes.{END}", "Yes.", reasoning="It is 2 < 3."
            ),
            Golden(
                f"{THINK}Hm.{AGAIN}{CONTENT}Let me check.\n{AGAIN}"
                + render([("get_weather", {"city": "Oslo"}), ("search.web-v2", {"query": END})])
                + "<|calls|>",
                "Let me check.",
                (
                    Call("get_weather", {"city": "Oslo"}, id="a1b2c3d4e0"),
                    Call("search.web-v2", {"query": END}, id="a1b2c3d4e1"),
                ),
                reasoning="Hm.",
            ),
            Golden(
                f'{CALLS}{CALL}0{NAME}get_weather{ARGUMENTS}{{"city": "Os',
                calls=(Call("get_weather", is_complete=False, text='{"city": "Os'),),
            ),
            Golden(f"{CONTENT}One.{AGAIN}{CONTENT}Two.{END}", "One.\nTwo."),
        ),
    )
]
