"""Compares a KV cache in int8 with the model's own dtype: tokens in 1 GiB, and the answers.

$ python examples/quantized_kv.py [MODEL]
"""

import sys
from itertools import takewhile

from mlx_paged import LLM, SamplingParams
from mlx_paged.demo.prompts import CHATS

chats = [[{"role": "user", "content": request}] for request in CHATS]
answers = {}
for dtype in ("auto", "int8"):
    llm = LLM(*sys.argv[1:], kv_cache_dtype=dtype, kv_cache_memory=1 << 30)
    capacity = llm.stats().usage.num_usable_blocks * llm.engine.config.block_size
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=160))
    answers[dtype] = [output.outputs[0].token_ids for output in outputs]
    print(f"{dtype:>4}: {capacity:,} tokens in 1 GiB")

pairs = list(zip(answers["auto"], answers["int8"]))
same = sum(exact == quantized for exact, quantized in pairs)
print(f"{same} of {len(pairs)} greedy answers are the same to the last token")
agreed = sum(len(list(takewhile(lambda t: t[0] == t[1], zip(*pair)))) for pair in pairs)
print(
    f"{agreed} of {sum(map(len, answers['auto']))} tokens come before an answer's first difference"
)
