import json
from collections.abc import Sequence

from . import Arguments, Call, Family, Golden
from .tool_calls import template

THINK, TEXT, CALL = "<|content_thinking|>", "<|content_text|>", "<|content_invoke_tool_json|>"
END, AGAIN = "<|end_message|>", "<|end_message|><|message_model|>"


def compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def render(calls: Sequence[tuple[str, Arguments]]) -> str:
    texts = [
        f'{name}{CALL}{{"name":"{name}","args":{compact(arguments)}}}' for name, arguments in calls
    ]
    return AGAIN.join(texts)


FAMILIES = [
    Family(
        name="inkling",
        tokens=(THINK, TEXT, CALL, END, "<|message_model|>", "<|content_model_end_sampling|>"),
        template=template(
            "<|message_model|>",
            "{% for c in m.tool_calls %}{{ c.function.name }}"
            + CALL
            + '{"name":{{ c.function.name | tojson }},"args":{{ c.function.arguments | tojson }}}'
            "{% endfor %}",
            END,
        )
        .replace("}}\n{{ m.content", "}}{{ m.content")
        .replace("assistant\n", ""),
        render=render,
        before=lambda text: f"{TEXT}{text}{AGAIN}",
        alone=lambda text: f"{TEXT}{text}",
        begin=f"now{CALL}",
        goldens=(
            Golden("Plain.", "Plain."),
            Golden(f"{THINK}It is 2 < 3.{AGAIN}{TEXT}Yes.{END}", "Yes.", reasoning="It is 2 < 3."),
            Golden(
                f"{THINK}One.{AGAIN}{TEXT}Let me see.{AGAIN}{THINK}Two.{AGAIN}"
                + render([("get_weather", {"city": "Oslo"}), ("now", {})])
                + END,
                "Let me see.",
                (Call("get_weather", {"city": "Oslo"}), Call("now", {})),
                reasoning="One.\nTwo.",
            ),
            # The prompt ends before the header.
            Golden(f"<|message_model|>{TEXT}Yes.{END}", "Yes."),
            # Without the name in front of it, and text after it.
            Golden(
                f'{CALL}{{"name": "now", "args": {{}}}}{AGAIN}{TEXT}Done.{END}',
                "Done.",
                (Call("now", {}),),
            ),
            Golden(
                f'get_weather{CALL}{{"name":"get_weather","args":{{"city":"Os',
                calls=(Call("get_weather", is_complete=False, text='{"city":"Os'),),
            ),
        ),
    )
]
