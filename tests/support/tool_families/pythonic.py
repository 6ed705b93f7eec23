import json
from collections.abc import Sequence
from typing import Any

from . import Arguments, Call, Family, Golden


def literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def rendered(calls: Sequence[tuple[str, Arguments]]) -> str:
    texts = []
    for name, arguments in calls:
        values = ", ".join(f"{key}={literal(value)}" for key, value in arguments.items())
        texts.append(f"{name}({values})")
    return "[" + ", ".join(texts) + "]"


GOLDENS = (
    Golden(
        '[get_weather(city="Oslo", days=3), now()]',
        calls=(Call("get_weather", {"city": "Oslo", "days": 3}), Call("now", {})),
    ),
    Golden(
        "Now.\n[search.web-v2(query='it\\'s \"q\", [a](b)', limit=None, exact=True, "
        "tags=['a', ')'], filter={'k': (1, None)}, score=12345678901234567890.5)]\nOk.",
        "Now.\nOk.",
        (
            Call(
                "search.web-v2",
                {
                    "query": 'it\'s "q", [a](b)',
                    "limit": None,
                    "exact": True,
                    "tags": ["a", ")"],
                    "filter": {"k": [1, None]},
                    "score": 12345678901234567890.5,
                },
            ),
        ),
    ),
    # Quotes that are not escaped, a number between quotes, a word without them.
    Golden(
        '[get_weather(city="the "big" one", days="3"), get_weather(city=Oslo, days = 3 )]',
        calls=(
            Call("get_weather", {"city": 'the "big" one', "days": 3}),
            Call("get_weather", {"city": "Oslo", "days": 3}),
        ),
    ),
    Golden(
        "[now(a=1, b=[1, \"x\"], c=true, d='\\u00e9\\U0001F600\\n')]",
        calls=(Call("now", {"a": 1, "b": [1, "x"], "c": True, "d": "é😀\n"}),),
    ),
    Golden(
        '[now(), get_weather(city="Os',
        calls=(Call("now", {}), Call("get_weather", is_complete=False, text='{"city": "Os')),
    ),
    Golden(
        '[get_weather(city="Oslo")',
        calls=(Call("get_weather", {"city": "Oslo"}),),
    ),
    # A call of no tool is text, and does not keep others from being calls.
    Golden("[unknown(a=1)]", "[unknown(a=1)]"),
    Golden(
        '[now(), unknown(a="]"), get_weather(city="Oslo")]',
        ', unknown(a="]")',
        (Call("now", {}), Call("get_weather", {"city": "Oslo"})),
    ),
    Golden("[1, 2] and [link](http://x)", "[1, 2] and [link](http://x)"),
    Golden("[a(b)]", "[a(b)]"),
    Golden("Call [now()] then.", "Call [now()] then."),
    Golden("[now(", "[now("),
)

FAMILIES = [
    Family(
        name="pythonic",
        tokens=("<|eot_id|>",),
        template="Respond in the format [func_name1(params_name1=value1), func_name2(params)]",
        render=rendered,
        lead="Before.\n",
        begin="\n[",
        goldens=GOLDENS,
    ),
    Family(
        name="llama4_pythonic",
        tokens=("<|python_start|>", "<|python_end|>", "<|header_start|>", "<|eot|>"),
        template="<|header_start|> Use exact format: [func_name1(param1=value1), func_name2(...)]",
        render=rendered,
        lead="Before.\n",
        begin="\n[",
        goldens=(
            *GOLDENS,
            Golden(
                'Hm.<|python_start|>[get_weather(city="<|python_end|>")]<|python_end|>',
                "Hm.",
                (Call("get_weather", {"city": "<|python_end|>"}),),
            ),
        ),
    ),
]
