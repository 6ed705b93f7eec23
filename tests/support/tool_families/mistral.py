from collections.abc import Sequence

from . import Arguments, Call, Family, Golden, as_json
from .granite import array

TOKENS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")


def rendered(calls: Sequence[tuple[str, Arguments]]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{as_json(arguments)}" for name, arguments in calls)


def with_ids(calls: Sequence[tuple[str, Arguments]]) -> str:
    return "".join(
        f"[TOOL_CALLS]{name}[CALL_ID]{i:09}[ARGS]{as_json(arguments)}"
        for i, (name, arguments) in enumerate(calls)
    )


OLD = (
    Golden(
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "a1B2c3D4e"}]',
        calls=(Call("get_weather", {"city": "Oslo"}),),
    ),
    Golden(
        'Hm.\n[TOOL_CALLS][{"name": "now", "arguments": {}}, {"arguments": '
        '{"path": "[ARGS]", "text": "[TOOL_CALLS]"}, "name": "write_file"}] Ok.',
        "Hm.\nOk.",
        (Call("now", {}), Call("write_file", {"path": "[ARGS]", "text": "[TOOL_CALLS]"})),
    ),
    Golden(
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city',
        calls=(Call("get_weather", is_complete=False, text='{"city'),),
    ),
    Golden("[TOOL_CALLS] [1]", "[TOOL_CALLS] [1]"),
)

NEW = (
    Golden("No call [ARGS] here.", "No call [ARGS] here."),
    Golden(
        'Two.[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]now[ARGS]{}',
        "Two.",
        (Call("get_weather", {"city": "Oslo"}), Call("now", {})),
    ),
    Golden(
        '[TOOL_CALLS]search.web-v2[CALL_ID]a1B2c3D4e[ARGS]{"query": "[CALL_ID]\n"}\nYes.',
        "Yes.",
        (Call("search.web-v2", {"query": "[CALL_ID]\n"}, id="a1B2c3D4e"),),
    ),
    Golden('[TOOL_CALLS]now{"a": 1}', calls=(Call("now", {"a": 1}),)),
    Golden(
        '[TOOL_CALLS]now[ARGS]{"a": [1, {',
        calls=(Call("now", is_complete=False, text='{"a": [1, {'),),
    ),
    Golden(
        '[TOOL_CALLS]now[ARGS]{"a": 1[TOOL_CALLS]now[ARGS]{}',
        calls=(Call("now", is_complete=False, text='{"a": 1'), Call("now", {})),
    ),
    Golden("[TOOL_CALLS]not a call", "[TOOL_CALLS]not a call"),
    Golden("[TOOL_CALLS]no", "[TOOL_CALLS]no"),
)

FAMILIES = [
    Family(
        name="mistral",
        tokens=TOKENS,
        template="[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}",
        render=rendered,
        goldens=OLD + NEW,
    ),
    Family(
        name="mistral",
        tokens=TOKENS,
        template="[TOOL_CALLS]{{ name }}[CALL_ID]{{ id }}[ARGS]{{ arguments }}",
        render=with_ids,
        goldens=NEW[2:3],
    ),
    Family(
        name="mistral",
        tokens=("[TOOL_CALLS]", "[INST]"),
        template="{{ '[TOOL_CALLS] [' }}",
        render=lambda calls: f"[TOOL_CALLS] {array(calls)}",
        goldens=OLD[:1],
    ),
]
