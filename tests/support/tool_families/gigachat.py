from collections.abc import Sequence

from . import Arguments, Call, Family, Golden
from .tool_calls import CALL, NOW, WEATHER, objects, template

ROLE, SEPARATOR = "function call<|role_sep|>\n", "<|message_sep|>\n\n"


def render(calls: Sequence[tuple[str, Arguments]]) -> str:
    return "".join(f"{SEPARATOR}{ROLE}{call}" for call in objects(calls))


FAMILIES = [
    Family(
        name="gigachat3",
        tokens=("<|message_sep|>", "<|role_sep|>", "</s>"),
        template=template(
            "",
            f"{{% for c in m.tool_calls %}}{SEPARATOR}{ROLE}{CALL}{{% endfor %}}",
            SEPARATOR,
        ).replace("}}\n", "}}<|role_sep|>\n"),
        render=render,
        begin=f"{SEPARATOR}{ROLE}",
        has_parallel=False,
        goldens=(
            Golden(
                f"Wait.{SEPARATOR}{ROLE}{WEATHER}{SEPARATOR}",
                "Wait.",
                (Call("get_weather", {"city": "Oslo"}),),
            ),
            Golden(f"{ROLE}{NOW}", calls=(Call("now", {}),)),
            Golden(f"Wait.<|function_call|>{NOW}", "Wait.", (Call("now", {}),)),
            Golden("A function call is a call.", "A function call is a call."),
            Golden(f"{ROLE}none", f"{ROLE}none"),
        ),
    )
]
