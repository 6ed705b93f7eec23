from . import Call, Family, Golden
from .granite import array

GOLDENS = (
    Golden(
        '[{"name": "get_weather", "arguments": {"city": "Oslo"}}, '
        '{"name": "now", "arguments": {}}]',
        calls=(Call("get_weather", {"city": "Oslo"}), Call("now", {})),
    ),
    Golden(
        'So:\n```json\n[{"name": "now", "arguments": {}}]\n```\nDone.',
        "So:\nDone.",
        (Call("now", {}),),
    ),
    Golden(
        '{"tool": "now", "args": {}}\n{"function_name": "now"}',
        calls=(Call("now", {}), Call("now", {})),
    ),
    Golden("Code:\n```json\n[1, 2]\n```\n", "Code:\n```json\n[1, 2]\n```\n"),
    Golden("```python\nprint({1})\n```", "```python\nprint({1})\n```"),
    Golden("[1](a) and\n  {x}\n[", "[1](a) and\n  {x}\n["),
    Golden("`", "`"),
    Golden(
        '[{"name": "now", "arguments": {}}, {"no": 1}]',
        '{"no": 1}]',
        (Call("now", {}),),
    ),
)

FAMILIES = [
    Family(
        name="xlam",
        tokens=("<|eot_id|>",),
        template="",
        is_detected=False,
        render=array,
        lead="Before.\n",
        begin="\n[",
        goldens=(
            *GOLDENS,
            Golden(
                'Hm.<tool_call>[{"name": "now", "arguments": {}}]</tool_call>',
                "Hm.",
                (Call("now", {}),),
            ),
        ),
    ),
    Family(
        name="json",
        tokens=(),
        template="",
        is_detected=False,
        render=array,
        lead="Before.\n",
        begin="\n[",
        goldens=GOLDENS,
    ),
]
