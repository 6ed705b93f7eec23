from . import Call, Family, Golden
from .granite import array

FAMILIES = [
    Family(
        name="phi4_mini_json",
        tokens=("<|end|>",),
        template='functools[{"name": [function name], "arguments": [function arguments as JSON]}]',
        render=lambda calls: f"functools{array(calls)}",
        goldens=(
            Golden(
                'functools[{"name": "get_weather", "arguments": {"city": "Oslo"}}, '
                '{"name": "now", "arguments": {}}]',
                calls=(Call("get_weather", {"city": "Oslo"}), Call("now", {})),
            ),
            Golden("import functools\n[1]", "import functools\n[1]"),
            Golden("functools.wraps, functool", "functools.wraps, functool"),
            Golden(
                'functools[{"name": "now", "arguments": {"a": ["functools", 1',
                calls=(Call("now", is_complete=False, text='{"a": ["functools", 1'),),
            ),
        ),
    ),
    Family(
        name="phi4_mini_json",
        tokens=("<|tool_call|>", "<|/tool_call|>", "<|end|>"),
        template="<|tool|>{{ tools }}<|/tool|>",
        render=lambda calls: f"<|tool_call|>{array(calls)}<|/tool_call|>",
        goldens=(
            Golden(
                'A.<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>B.',
                "A.\nB.",
                (Call("now", {}),),
            ),
        ),
        begin="<|tool_call|>",
        is_spelled=False,
    ),
]
