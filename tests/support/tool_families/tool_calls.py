from collections.abc import Sequence

from . import Arguments, Call, Family, Golden, as_json

WEATHER = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
NOW = '{"name": "now", "arguments": {}}'
BOTH = (Call("get_weather", {"city": "Oslo"}), Call("now", {}))


def objects(calls: Sequence[tuple[str, Arguments]]) -> list[str]:
    return [f'{{"name": "{name}", "arguments": {as_json(arguments)}}}' for name, arguments in calls]


def array(calls: Sequence[tuple[str, Arguments]]) -> str:
    return f"<tool_calls>[{', '.join(objects(calls))}]</tool_calls>"


def jamba(calls: Sequence[tuple[str, Arguments]]) -> str:
    lines = ",\n    ".join(objects(calls))
    return f"<tool_calls>[\n    {lines}\n]</tool_calls>"


def minimax_m1(calls: Sequence[tuple[str, Arguments]]) -> str:
    return "\n".join(["<tool_calls>", *objects(calls), "</tool_calls>"])


def nemotron(calls: Sequence[tuple[str, Arguments]]) -> str:
    return array(calls).replace("tool_calls", "TOOLCALL")


CALL = (
    '{{ \'{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments if c.function.arguments is string else "
    "c.function.arguments | tojson }}{{ '}' }}"
)
ARRAY = f"[{{% for c in m.tool_calls %}}{CALL}{{{{ ', ' if not loop.last }}}}{{% endfor %}}]"


def template(begin: str, calls: str, end: str, mention: str = "") -> str:
    """A chat template with calls between tags; ``begin`` and ``end`` are around a turn."""
    return (
        f"{{% if tools %}}{{{{ tools | tojson }}}} {mention}{{% endif %}}"
        f"{{% for m in messages %}}{begin}{{{{ m.role }}}}\n"
        f"{{{{ m.content or '' }}}}{{% if m.tool_calls %}}{calls}{{% endif %}}{end}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{begin}assistant\n{{% endif %}}"
    )


IN_TAGS = f"<tool_calls>{ARRAY}</tool_calls>"


def goldens(render_two: str) -> tuple[Golden, ...]:
    return (
        Golden("Just text, 1 < 2.", "Just text, 1 < 2."),
        Golden(f"On it.\n{render_two}", "On it.", BOTH),
        # An id, two blocks, and one object without an array.
        Golden(
            f'<tool_calls>[{WEATHER[:-1]}, "id": "x1"}}]</tool_calls>\n<tool_calls>{NOW}'
            "</tool_calls> So.",
            "So.",
            BOTH,
        ),
        Golden(
            '<tool_calls>[{"name": "write_file", "arguments": {"path": "a", "text": '
            '"</tool_calls>[<tool_calls>\n"}}]</tool_calls>',
            calls=(Call("write_file", {"path": "a", "text": "</tool_calls>[<tool_calls>\n"}),),
        ),
        Golden(
            '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Os',
            calls=(Call("get_weather", is_complete=False, text='{"city": "Os'),),
        ),
        Golden("<tool_calls>none</tool_calls>", "<tool_calls>none</tool_calls>"),
    )


TOKENS = ("<tool_calls>", "</tool_calls>", "<|end|>")
TWO = [("get_weather", {"city": "Oslo"}), ("now", {})]

FAMILIES = [
    Family(
        name="hunyuan_a13b",
        tokens=("<|startoftext|>", "<|extra_0|>", "<|eos|>"),
        template=template("<|startoftext|>", IN_TAGS, "<|eos|>"),
        render=array,
        goldens=(
            *goldens(array(TWO)),
            Golden("<answer>\nYes.\n</answer>", "Yes."),
            Golden(f"<answer>\n{array(TWO)}\n</answer>", calls=BOTH),
        ),
    ),
    Family(
        name="apriel",
        tokens=(*TOKENS, "[BEGIN FINAL RESPONSE]"),
        # (The older template names tags that are Hermes's in its instructions.)
        template=template(
            "<|begin|>",
            IN_TAGS,
            "<|end|>",
            "Return calls within <tool_call></tool_call> XML tags. [BEGIN FINAL RESPONSE]",
        ),
        render=array,
        goldens=(
            *goldens(array(TWO)),
            Golden("[BEGIN FINAL RESPONSE]\nYes.\n[END FINAL RESPONSE]", "Yes."),
            Golden(f"[BEGIN FINAL RESPONSE]\n{array(TWO)}", calls=BOTH),
        ),
    ),
    Family(
        name="jamba",
        tokens=(*TOKENS, "<|bom|>", "<|eom|>"),
        template=template(
            "<|bom|>",
            IN_TAGS.replace("[{%", "[\n    {%").replace("', '", "',\n    '").replace("]<", "\n]<"),
            "<|eom|>",
        ),
        render=jamba,
        goldens=goldens(jamba(TWO)),
    ),
    Family(
        name="minimax_m1",
        tokens=("<end_of_sentence>",),
        template=template(
            "<beginning_of_sentence>",
            f"<tool_calls>\n{{% for c in m.tool_calls %}}{CALL}{{{{ '\\n' }}}}{{% endfor %}}"
            "</tool_calls>",
            "<end_of_sentence>",
            '<tool_calls>\n{"name": <tool-name>, "arguments": <args-json-object>}\n</tool_calls>',
        ),
        render=minimax_m1,
        goldens=goldens(minimax_m1(TWO)),
    ),
    Family(
        name="nemotron_nano_v2",
        tokens=("<SPECIAL_12>", "<think>", "</think>"),
        template=template("<SPECIAL_11>", f"<TOOLCALL>{ARRAY}</TOOLCALL>", "<SPECIAL_12>"),
        render=nemotron,
        goldens=(
            Golden(f"On it.\n\n{nemotron(TWO)}", "On it.", BOTH),
            Golden(
                '<TOOLCALL>[{"name": "now", "arguments": "{}"}]</TOOLCALL>',
                calls=(Call("now", {}),),
            ),
            Golden("<TOOLCALL>[]</TOOLCALL>", "<TOOLCALL>[]</TOOLCALL>"),
        ),
    ),
]
