from collections.abc import Sequence

from . import Arguments, Call, Family, Golden, as_json


def rendered(calls: Sequence[tuple[str, Arguments]]) -> str:
    return "; ".join(
        f'{{"name": "{name}", "parameters": {as_json(arguments)}}}' for name, arguments in calls
    )


FAMILIES = [
    Family(
        name="llama3_json",
        tokens=("<|python_tag|>", "<|eot_id|>", "<|start_header_id|>", "<|eom_id|>"),
        template="<|start_header_id|>assistant{{ '\"parameters\": ' }}{{ call.arguments }}",
        render=rendered,
        lead="Before.\n",
        begin="\n{",
        goldens=(
            Golden(
                '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
                calls=(Call("get_weather", {"city": "Oslo"}),),
            ),
            Golden(
                '<|python_tag|>{"name": "unknown_tool", "parameters": {"a": "1"}}; '
                '{"name": "now", "parameters": {}}',
                '<|python_tag|>{"name": "unknown_tool", "parameters": {"a": "1"}};',
                (Call("now", {}),),
            ),
            Golden(
                'I look it up.\n  {"type": "function", "name": "now"}\n\nThat was it.',
                "I look it up.\nThat was it.",
                (Call("now", {}),),
            ),
            # JSON that is an answer.
            Golden('{"city": "Oslo", "name": "now"}', '{"city": "Oslo", "name": "now"}'),
            Golden('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}'),
            Golden('[\n  {"name": "Bob"},\n  7\n]', '[\n  {"name": "Bob"},\n  7\n]'),
            Golden('See {"name": "now"} here.', 'See {"name": "now"} here.'),
            # Behind text on its line; arguments that are no JSON.
            Golden(
                'Here is: {"name": "now", "parameters": {}} More? {"a": {"name": "now"}}',
                'Here is:\nMore? {"a": {"name": "now"}}',
                (Call("now", {}),),
            ),
            Golden(
                '{"name": "now", "parameters": {invalid json}}',
                '{"name": "now", "parameters": {invalid json}}',
            ),
            Golden("<|python_tag|>print(1)", "<|python_tag|>print(1)"),
            Golden(
                '{"name": "get_weather", "parameters": {"city": "Os',
                calls=(Call("get_weather", is_complete=False, text='{"city": "Os'),),
            ),
            Golden('{"name": "get_wea', '{"name": "get_wea'),
            Golden(
                '{"name": "get_weather", "parameters": {"city": "Oslo"}}}',
                calls=(Call("get_weather", {"city": "Oslo"}),),
            ),
        ),
    )
]
