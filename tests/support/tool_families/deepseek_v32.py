from collections.abc import Sequence

from . import Arguments, Call, Family, Golden, as_json

D = "｜DSML｜"


def render(calls: Sequence[tuple[str, Arguments]], block: str = "function_calls") -> str:
    lines = [f"<{D}{block}>"]
    for name, arguments in calls:
        lines.append(f'<{D}invoke name="{name}">')
        for key, value in arguments.items():
            is_string = isinstance(value, str)
            text = value if is_string else as_json(value)
            attribute = "true" if is_string else "false"
            lines.append(f'<{D}parameter name="{key}" string="{attribute}">{text}</{D}parameter>')
        lines.append(f"</{D}invoke>")
    return "\n".join([*lines, f"</{D}{block}>"])


FAMILIES = [
    Family(
        name="deepseek_v32",
        tokens=(D, "<think>", "</think>", "<｜end▁of▁sentence｜>"),
        template='{% set dsml_token = "｜DSML｜" %}<{{ dsml_token }}invoke name="{{ name }}">',
        render=render,
        goldens=(
            Golden(
                f'Looking.\n\n<{D}function_calls>\n<{D}invoke name="search.web-v2">\n'
                f'<{D}parameter name="query" string="true">42</{D}parameter>\n'
                f'<{D}parameter name="limit" string="false">5</{D}parameter>\n'
                f'<{D}parameter name="tags" string="false">["a", "b"]</{D}parameter>\n'
                f'<{D}parameter name="note" string="true">null</{D}parameter>\n'
                f"</{D}invoke>\n</{D}function_calls>",
                "Looking.",
                (
                    Call(
                        "search.web-v2",
                        {"query": "42", "limit": 5, "tags": ["a", "b"], "note": "null"},
                    ),
                ),
            ),
            Golden(
                f'<{D}function_calls>\n<{D}invoke name="write_file">\n'
                f'<{D}parameter name="path" string="true">a</{D}parameter>\n'
                f'<{D}parameter name="text" string="true">unfini',
                calls=(
                    Call("write_file", is_complete=False, text='{"path": "a", "text": "unfini'),
                ),
            ),
            # Parameters that the tool does not have.
            Golden(
                f'<{D}function_calls>\n<{D}invoke name="now">\n'
                f'<{D}parameter name="n" string="false">1</{D}parameter>\n'
                f'<{D}parameter name="s" string="true">1</{D}parameter>\n'
                f"</{D}invoke>\n</{D}function_calls>",
                calls=(Call("now", {"n": 1, "s": "1"}),),
            ),
        ),
    ),
    Family(
        name="deepseek_v4",
        tokens=(D, "<think>", "</think>", "<｜end▁of▁sentence｜>"),
        template="<｜DSML｜tool_calls>",
        render=lambda calls: render(calls, "tool_calls"),
        goldens=(
            Golden(render([("now", {})], "tool_calls"), calls=(Call("now", {}),)),
            Golden(render([("now", {})]), calls=(Call("now", {}),)),
        ),
    ),
]
