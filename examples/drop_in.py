"""Makes mlx-lm paged by one import: the system prompt of four chats is computed once.

$ python examples/drop_in.py [MODEL]
"""

import sys

import mlx_paged  # the one line; all else is mlx-lm
from mlx_lm import batch_generate, load
from mlx_paged.demo import model_path
from mlx_paged.demo.prompts import CHATS, SYSTEM_PROMPT

model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else str(model_path()))
prompts = [
    tokenizer.apply_chat_template(
        [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": chat}],
        add_generation_prompt=True,
    )
    for chat in CHATS[:4]
]
for text in batch_generate(model, tokenizer, prompts, max_tokens=128).texts:
    print(text, end="\n\n")

if stats := mlx_paged.drop_in.stats(model):  # None if mlx-lm is not paged
    print(f"# {sum(map(len, prompts))} prompt tokens, {stats.num_cached_tokens} not recomputed")
