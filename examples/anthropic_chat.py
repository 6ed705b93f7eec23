"""Streams an answer with Anthropic's SDK, and then counts the tokens of the conversation.

$ mlx-paged serve
$ python examples/anthropic_chat.py
"""

import os

from anthropic import Anthropic

client = Anthropic(
    base_url=os.environ.get("ANTHROPIC_BASE_URL", "http://127.0.0.1:8000"),
    api_key=os.environ.get("ANTHROPIC_API_KEY", "none"),
)
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Return the n-th Fibonacci number"}]

with client.messages.stream(
    model=model,
    max_tokens=500,
    messages=messages,
    extra_body={"temperature": 0},  # the SDK has no parameter for it any more
) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
    answer = stream.get_final_message()
print(f"\n# {answer.usage.output_tokens} tokens, {answer.stop_reason}")

messages.append({"role": "assistant", "content": answer.content})
counted = client.messages.count_tokens(model=model, messages=messages)
print(f"# the conversation has {counted.input_tokens} tokens by now")
