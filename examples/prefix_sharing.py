"""Measures a shared system prompt: the first request computes it, the next ones hardly anything.

$ python examples/prefix_sharing.py [MODEL]
"""

import sys

from mlx_paged import LLM, SamplingParams
from mlx_paged.demo.prompts import SYSTEM_PROMPT

llm = LLM(*sys.argv[1:])
params = SamplingParams(temperature=0, max_tokens=32)
llm.generate("warm up", params)  # the first steps of a process are slower than all others

print("prompt  from cache  computed    TTFT")
for request in ("Reverse a string", "Find the median of a list", "Reverse a string"):
    chat = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": request}]
    [output] = llm.chat(chat, params)
    prompt, cached = len(output.prompt_token_ids), output.num_cached_tokens
    ttft = 1000 * output.metrics.time_to_first_token
    print(f"{prompt:6}  {cached:10}  {prompt - cached:8}  {ttft:3.0f} ms  {request}")

counters = llm.stats().counters
share = counters.num_cached_tokens / counters.num_queried_tokens
print(f"{share:.0%} of all prompt tokens were not computed again")
