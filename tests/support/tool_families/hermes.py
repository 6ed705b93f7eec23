from collections.abc import Sequence

from . import Arguments, Call, Family, Golden, as_json


def rendered(calls: Sequence[tuple[str, Arguments]]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {as_json(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    )


TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_end|>")
WEATHER = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'

GOLDENS = (
    Golden("Just text, 1 < 2.", "Just text, 1 < 2."),
    Golden(
        f"I look it up.\n<tool_call>\n{WEATHER}\n</tool_call>",
        "I look it up.",
        (Call("get_weather", {"city": "Oslo"}),),
    ),
    # Text before, between and after; a number of many digits; a name with a dot and a dash.
    Golden(
        f"One.\n<tool_call>\n{WEATHER}\n</tool_call>\nTwo.\n<tool_call>\n"
        '{"name": "search.web-v2", "arguments": {"query": "π", "limit": 123456789012345678901}}\n'
        "</tool_call>\nThree.",
        "One.\nTwo.\nThree.",
        (
            Call("get_weather", {"city": "Oslo"}),
            Call("search.web-v2", {"query": "π", "limit": 123456789012345678901}),
        ),
    ),
    # No arguments, none at all, and a call after that.
    Golden(
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "now"}'
        f"\n</tool_call>\n<tool_call>\n{WEATHER}\n</tool_call>",
        calls=(Call("now", {}), Call("now", {}), Call("get_weather", {"city": "Oslo"})),
    ),
    # Several objects between one pair of tags, and an array.
    Golden(
        f'<tool_call>\n{WEATHER}\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
        f'<tool_call>[{WEATHER}, {{"name": "now", "arguments": null}}]</tool_call>',
        calls=(
            Call("get_weather", {"city": "Oslo"}),
            Call("now", {}),
            Call("get_weather", {"city": "Oslo"}),
            Call("now", {}),
        ),
    ),
    # Newlines as they are within a string, a backslash that escapes nothing, and tags.
    Golden(
        '<tool_call>\n{"name": "write_file", "arguments": {"path": "C:\\dir", "text": "one\n'
        'two\t</tool_call> <tool_call> </parameter>"}}\n</tool_call>',
        calls=(
            Call(
                "write_file",
                {"path": "C:\\dir", "text": "one\ntwo\t</tool_call> <tool_call> </parameter>"},
            ),
        ),
    ),
    # Arguments before the name, as a string, within another object, and other keys.
    Golden(
        '<tool_call>{"arguments": {"city": "Oslo"}, "name": "get_weather"}</tool_call>'
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>'
        '<tool_call>{"id": "x1", "type": "function", "function": {"name": "get_weather",'
        ' "arguments": {"city": "Oslo"}}}</tool_call>'
        '<tool_call>{"thought": {"a": [1]}, "name": "now", "parameters": {}}</tool_call>',
        calls=(
            Call("get_weather", {"city": "Oslo"}),
            Call("get_weather", {"city": "Oslo"}),
            Call("get_weather", {"city": "Oslo"}, id="x1"),
            Call("now", {}),
        ),
    ),
    # Cut within its arguments, within a string, and where only the end is missing.
    Golden(
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os',
        calls=(Call("get_weather", is_complete=False, text='{"city": "Os'),),
    ),
    Golden(
        f"<tool_call>\n{WEATHER}",
        calls=(Call("get_weather", {"city": "Oslo"}),),
    ),
    Golden(
        f"<tool_call>\n{WEATHER[:-1]}",
        calls=(Call("get_weather", {"city": "Oslo"}),),
    ),
    Golden(
        f"<tool_call>\n{WEATHER[:-2]}\n</tool_call>\nSo.",
        "So.",
        (Call("get_weather", is_complete=False, text='{"city": "Oslo"\n'),),
    ),
    # One bracket too many, and a tag too many.
    Golden(
        f"<tool_call>\n{WEATHER}}}\n</tool_call></tool_call>\nDone.",
        "Done.",
        (Call("get_weather", {"city": "Oslo"}),),
    ),
    # No calls.
    Golden("<tool_call>hm</tool_call> no", "<tool_call>hm</tool_call> no"),
    Golden('<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>'),
    Golden("A </tool_call> B", "A </tool_call> B"),
    Golden("<tool_call>\n", "<tool_call>\n"),
)

FAMILIES = [
    Family(
        name="hermes",
        tokens=TOKENS,
        template='<tool_call>\\n{"name": "\' + tool_call.name + \'"}\\n</tool_call>',
        goldens=GOLDENS,
        render=rendered,
    )
]
