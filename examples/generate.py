"""Answers several conversations in one batch, in this process.

$ python examples/generate.py [MODEL]
"""

import sys

from mlx_paged import LLM, SamplingParams

REQUESTS = [
    "Return the n-th Fibonacci number",
    "Check whether a string is a palindrome",
    "Return the prime factors of a number",
]

# The embedded model; or a directory, a GGUF file or a Hugging Face id.
llm = LLM(*sys.argv[1:])
chats = [[{"role": "user", "content": request}] for request in REQUESTS]
outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=160))

for request, output in zip(REQUESTS, outputs):
    answer = output.outputs[0]
    print(f"# {request}: {len(answer.token_ids)} tokens, {answer.finish_reason}")
    print(answer.text, end="\n\n")
