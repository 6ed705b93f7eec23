from . import Call, Family, Golden
from .hermes import WEATHER, rendered
from .tool_calls import CALL, template

FAMILIES = [
    Family(
        name="ernie45",
        tokens=("<think>", "</think>", "<response>", "</response>", "<tool_call>", "</tool_call>"),
        template=template(
            "<|im_start|>",
            f"{{% for c in m.tool_calls %}}<tool_call>\n{CALL}\n</tool_call>{{% endfor %}}",
            "<|im_end|>",
            "<response>\n...\n</response>",
        ),
        render=rendered,
        before=lambda text: f"<response>\n{text}\n</response>\n",
        goldens=(
            Golden("<response>\nYes.\n\nNo.\n</response>\n", "Yes.\n\nNo."),
            Golden("Yes.", "Yes."),
            Golden(
                f"<response>\nWait.\n</response>\n\n<tool_call>\n{WEATHER}\n</tool_call>\n",
                "Wait.",
                (Call("get_weather", {"city": "Oslo"}),),
            ),
            Golden("<response>\nCut", "Cut"),
        ),
    )
]
