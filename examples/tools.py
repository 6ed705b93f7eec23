"""The loop of an agent: the model calls a function of this program until it has its answer.

$ mlx-paged serve --tool-template
$ python examples/tools.py
"""

import os
from datetime import datetime
from typing import Literal
from zoneinfo import ZoneInfo

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel


class LocalTime(BaseModel):
    """The date and time in a city."""

    city: Literal["Europe/Oslo", "America/Lima", "Asia/Tokyo"]

    def run(self) -> str:
        return datetime.now(ZoneInfo(self.city)).isoformat(timespec="minutes")


TOOLS = {tool.__name__: tool for tool in [LocalTime]}

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "What time is it in Tokyo?"}]

for turn in range(5):
    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[pydantic_function_tool(tool) for tool in TOOLS.values()],
        # The embedded model would not think of calling anything. Leave this out for a good one.
        tool_choice="auto" if turn else "required",
        parallel_tool_calls=False,
        max_tokens=100,
        temperature=0,
    )
    message = answer.choices[0].message
    messages.append(message.to_dict())
    if not message.tool_calls:
        print(message.content)
        break
    for call in message.tool_calls:
        tool = TOOLS[call.function.name].model_validate_json(call.function.arguments)
        result = tool.run()
        print(f"{tool!r} -> {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
