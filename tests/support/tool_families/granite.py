from collections.abc import Sequence

from . import Arguments, Call, Family, Golden, as_json, hermes


def array(calls: Sequence[tuple[str, Arguments]]) -> str:
    objects = [f'{{"name": "{name}", "arguments": {as_json(a)}}}' for name, a in calls]
    return "[" + ", ".join(objects) + "]"


FAMILIES = [
    Family(
        name="granite",
        tokens=("<|tool_call|>", "<|start_of_role|>", "<|end_of_text|>"),
        template="<|start_of_role|>assistant<|end_of_role|><|tool_call|>{{ calls | tojson }}",
        render=lambda calls: f"<|tool_call|>{array(calls)}",
        goldens=(
            Golden("[1, 2]", "[1, 2]"),
            Golden(
                '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}, '
                '{"name": "now", "arguments": {}}]',
                calls=(Call("get_weather", {"city": "Oslo"}), Call("now", {})),
            ),
            Golden(
                'So.\n<|tool_call|> [{"name": "now"}]\nThat is {"name": "now"}.',
                'So.\nThat is {"name": "now"}.',
                (Call("now", {}),),
            ),
            Golden(
                '<tool_call>[{"arguments": {"city": "["}, "name": "get_weather"}]',
                calls=(Call("get_weather", {"city": "["}),),
            ),
            Golden(
                '<|tool_call|>[{"name": "now", "arguments": {}}, {"name": "get_weather", '
                '"arguments": {"city"',
                calls=(Call("now", {}), Call("get_weather", is_complete=False, text='{"city"')),
            ),
            Golden("<|tool_call|>[]", "<|tool_call|>[]"),
            Golden("<|tool_call|>[5]", "<|tool_call|>[5]"),
        ),
    ),
    Family(
        name="granite-20b-fc",
        tokens=(),
        template="{{ '<function_call> ' + {'name': tc.name, 'arguments': tc.arguments} | tojson }}",
        render=lambda calls: "".join(
            f'<function_call> {{"name": "{name}", "arguments": {as_json(arguments)}}}'
            for name, arguments in calls
        ),
        goldens=(
            Golden(
                '<function_call> {"name": "get_weather", "arguments": {"city": "Oslo"}}'
                '<function_call> {"name": "now", "arguments": {}}',
                calls=(Call("get_weather", {"city": "Oslo"}), Call("now", {})),
            ),
            Golden(
                'Well. <function_call> {"name": "write_file", "arguments": {"path": '
                '"<function_call>", "text": ""}} And text.',
                "Well.\nAnd text.",
                (Call("write_file", {"path": "<function_call>", "text": ""}),),
            ),
            Golden("A <function_call>", "A <function_call>"),
            Golden("A <function_", "A <function_"),
        ),
    ),
    Family(
        name="granite4",
        tokens=("<|start_of_role|>", "<tool_call>", "</tool_call>"),
        template="<|start_of_role|>" + hermes.FAMILIES[0].template,
        render=hermes.rendered,
        goldens=hermes.GOLDENS[1:4],
    ),
]
