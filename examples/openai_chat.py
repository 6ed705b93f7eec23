"""Two turns of a chat with OpenAI's client. The second turn reuses what the first one computed.

$ mlx-paged serve
$ python examples/openai_chat.py
"""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id
messages = []

for request in ("Return the n-th Fibonacci number", "Check whether a string is a palindrome"):
    messages.append({"role": "user", "content": request})
    answer = ""
    print(f"# {request}")
    for chunk in client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        for choice in chunk.choices:
            answer += choice.delta.content or ""
            print(choice.delta.content or "", end="", flush=True)
        usage = chunk.usage  # in the last chunk
    messages.append({"role": "assistant", "content": answer})
    cached = usage.prompt_tokens_details.cached_tokens
    print(f"\n# {usage.prompt_tokens} prompt tokens, {cached} from the cache\n")
