"""Prints an answer while it is generated, and then how fast it came.

$ python examples/streaming.py [MODEL]
"""

import sys
import time

from mlx_paged import LLM, SamplingParams

llm = LLM(*sys.argv[1:])
prompts = llm.chat_prompts([{"role": "user", "content": "Sort a list with quicksort"}])

begun = time.perf_counter()
arrivals = []
for update in llm.stream(prompts, SamplingParams(temperature=0.7, seed=1, max_tokens=200)):
    arrivals.append(time.perf_counter() - begun)
    print(update.text, end="", flush=True)

rate = (len(arrivals) - 1) / (arrivals[-1] - arrivals[0])
print(f"\n\n# first token after {1000 * arrivals[0]:.0f} ms, then {rate:.0f} tokens/s")
