from collections.abc import Sequence

from . import Arguments, Call, Family, Golden
from .pythonic import rendered
from .tool_calls import template

BEGIN, END = "<function_calls>", "</function_calls>"


def render(calls: Sequence[tuple[str, Arguments]]) -> str:
    return "\n".join([BEGIN, *(rendered([call])[1:-1] for call in calls), END])


FAMILIES = [
    Family(
        name="olmo3",
        tokens=("<|im_end|>", "<think>", "</think>"),
        template=template(
            "<|im_start|>",
            BEGIN + "\n{% for c in m.tool_calls %}{{ c.function.name }}("
            "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}"
            "{{ ', ' if not loop.last }}{% endfor %}){{ '\\n' }}{% endfor %}" + END,
            "<|im_end|>\n",
        ),
        render=render,
        goldens=(
            Golden(
                f"On it.\n{BEGIN}\nget_weather(city='New York', days=3)\nnow()\n{END}",
                "On it.",
                (Call("get_weather", {"city": "New York", "days": 3}), Call("now", {})),
            ),
            Golden(
                f"{BEGIN}\nsearch.web-v2(query='q', exact=true, limit=null)\n{END}",
                calls=(Call("search.web-v2", {"query": "q", "exact": True, "limit": None}),),
            ),
            Golden(
                f'{BEGIN}\nget_weather(city="Os',
                calls=(Call("get_weather", is_complete=False, text='{"city": "Os'),),
            ),
            Golden(f"{BEGIN}\n1 + 1\n{END}", f"{BEGIN}\n1 + 1\n{END}"),
        ),
    )
]
