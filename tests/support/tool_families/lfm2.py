from . import Call, Family, Golden
from .pythonic import rendered

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"

FAMILIES = [
    Family(
        name="lfm2",
        tokens=(BEGIN, END, "<|im_end|>"),
        template=f"{{{{ '{BEGIN}[' + calls + ']{END}' }}}}",
        render=lambda calls: BEGIN + rendered(calls) + END,
        goldens=(
            Golden(
                f"Looking. {BEGIN}[get_weather(city='Oslo', days=3), now()]{END}Wait.",
                "Looking.\nWait.",
                (Call("get_weather", {"city": "Oslo", "days": 3}), Call("now", {})),
            ),
            Golden(
                f'{BEGIN}[{{"name": "get_weather", "arguments": {{"city": "Oslo"}}}}]{END}',
                calls=(Call("get_weather", {"city": "Oslo"}),),
            ),
            Golden(
                f'{BEGIN}[write_file(path="a", text="li',
                calls=(Call("write_file", is_complete=False, text='{"path": "a", "text": "li'),),
            ),
            Golden(f"{BEGIN}[1, 2]{END}", f"{BEGIN}[1, 2]{END}"),
        ),
    )
]
