from collections.abc import Sequence

from . import Arguments, Call, Family, Golden, as_json
from .tool_calls import template


def tag(name: str) -> str:
    return f"<|plamo:{name}:plamo|>"


ARGUMENTS = f"{tag('begin_tool_arguments')}<|plamo:constrain|>json<|plamo:msg|>"


def call(name: str, arguments: str) -> str:
    return (
        f"{tag('begin_tool_request')}{tag('begin_tool_name')}{name}{tag('end_tool_name')}"
        f"{ARGUMENTS}{arguments}{tag('end_tool_arguments')}{tag('end_tool_request')}"
    )


def render(calls: Sequence[tuple[str, Arguments]]) -> str:
    texts = [call(name, as_json(arguments)) for name, arguments in calls]
    return tag("begin_tool_requests") + "".join(texts) + tag("end_tool_requests")


FAMILIES = [
    Family(
        name="plamo3",
        is_spelled=False,
        tokens=("<|plamo:begin_", "<|plamo:end_", ":plamo|>", "<|plamo:msg|>", "<|plamo:tag|>"),
        template=template(
            "<|plamo:tag|>",
            f"{tag('begin_tool_requests')}{{% for c in m.tool_calls %}}"
            f"{call('{{ c.function.name }}', '{{ c.function.arguments | tojson }}')}"
            f"{{% endfor %}}{tag('end_tool_requests')}",
            "",
        ),
        render=render,
        goldens=(
            Golden(
                "Wait." + render([("get_weather", {"city": "Oslo"}), ("now", {})]),
                "Wait.",
                (Call("get_weather", {"city": "Oslo"}), Call("now", {})),
            ),
            # Without the constraint.
            Golden(
                render([("now", {})]).replace("<|plamo:constrain|>json", ""),
                calls=(Call("now", {}),),
            ),
            Golden(
                f"{tag('begin_tool_requests')}{tag('begin_tool_request')}{tag('begin_tool_name')}"
                f'get_weather{tag("end_tool_name")}{ARGUMENTS}{{"city": "Os',
                calls=(Call("get_weather", is_complete=False, text='{"city": "Os'),),
            ),
        ),
    )
]
