import re
from collections.abc import Sequence

from . import Arguments, Call, Family, Golden, as_json


def rendered(newline: str, calls: Sequence[tuple[str, Arguments]]) -> str:
    texts = []
    for name, arguments in calls:
        parts = [f"<tool_call>{name}"]
        for key, value in arguments.items():
            text = value if isinstance(value, str) else as_json(value)
            parts += [f"<arg_key>{key}</arg_key>", f"<arg_value>{text}</arg_value>"]
        texts.append(newline.join([*parts, "</tool_call>"]))
    return newline.join(texts)


def can_write(text: str) -> bool:
    """The end of a value, with what may follow it, ends the value."""
    return re.search(r"</arg_value>\s*(<arg_key>|</?tool_call>)", text) is None


TOKENS = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<think>", "</think>", "<|user|>"),
)
TEMPLATE = (
    "{{ '<tool_call>' + call.name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n"
)

FAMILIES = [
    Family(
        name="glm45",
        tokens=TOKENS,
        template=TEMPLATE,
        render=lambda calls: rendered("\n", calls),
        can_write=can_write,
        goldens=(
            Golden("Just text, 1 < 2.", "Just text, 1 < 2."),
            Golden(
                "I look it up.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
                "<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
                "</tool_call>",
                "I look it up.",
                (Call("get_weather", {"city": "Oslo", "days": 3}),),
            ),
            Golden(
                "<tool_call>now\n</tool_call>\n<tool_call>search.web-v2\n<arg_key>query</arg_key>\n"
                "<arg_value>5</arg_value>\n<arg_key>limit</arg_key>\n<arg_value>null</arg_value>\n"
                "<arg_key>score</arg_key>\n<arg_value>123456789012345678901.50</arg_value>\n"
                "</tool_call>",
                calls=(
                    Call("now", {}),
                    Call(
                        "search.web-v2",
                        {"query": "5", "limit": None, "score": 123456789012345678901.50},
                    ),
                ),
            ),
            # An incomplete call is reported as far as it was written.
            Golden(
                "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Os",
                calls=(Call("get_weather", is_complete=False, text='{"city": "Os'),),
            ),
            # All arguments are there, and only the end is missing.
            Golden(
                "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>",
                calls=(Call("get_weather", {"city": "Oslo"}),),
            ),
            # The tags of values within a value.
            Golden(
                "<tool_call>write_file\n<arg_key>path</arg_key>\n<arg_value>a.py</arg_value>\n"
                "<arg_key>text</arg_key>\n"
                "<arg_value>x = '</arg_value>'\n<tool_call>\n</arg_value>\n"
                "</tool_call>",
                calls=(
                    Call(
                        "write_file", {"path": "a.py", "text": "x = '</arg_value>'\n<tool_call>\n"}
                    ),
                ),
            ),
            Golden("<tool_call>not a name</tool_call>", "<tool_call>not a name</tool_call>"),
        ),
    ),
    Family(
        name="glm47",
        tokens=TOKENS,
        template=TEMPLATE.replace("\n", ""),
        render=lambda calls: rendered("", calls),
        can_write=can_write,
        goldens=(
            Golden(
                "Two.<tool_call>get_weather<arg_key>city</arg_key><arg_value>Ōsaka</arg_value>"
                "</tool_call><tool_call>now</tool_call>",
                "Two.",
                (Call("get_weather", {"city": "Ōsaka"}), Call("now", {})),
            ),
        ),
    ),
]
