"""Answers of engines that keep blocks outside of the device, and the bytes of their blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlx_paged import LLM, SamplingParams
from mlx_paged.engine.engine import Engine

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def answers(llm: LLM, prompts: Sequence[list[int]]) -> tuple[list[list[int]], list[int]]:
    """The answers to prompts, one after another, and how many tokens of each were cached."""
    outputs = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
    llm.engine.check_integrity()
    return [o.outputs[0].token_ids for o in outputs], [o.num_cached_tokens or 0 for o in outputs]


def contents_of(engine: Engine, prompt: list[int]) -> list[bytes]:
    """The bytes of the full blocks of a cached prompt in the first group, and of its last state."""
    kv, offloading = engine._kv, engine._offloading
    assert offloading is not None
    tables = kv.admit([*prompt, 1])
    assert tables is not None and tables.restoration is None
    nodes = [] if tables.tip is None else tables.tip.path()
    entries = [(0, node.entries[0]) for node in nodes]
    if kv.states is not None and tables.state is not None:
        entries.append((kv.states.number, tables.state.slot))
    found = []
    for group, block in entries:
        out = np.zeros(offloading._blocks.num_bytes[group], dtype=np.uint8)
        offloading._blocks.read(group, block, out)
        found.append(out.tobytes())
    kv.free(tables)
    return found
