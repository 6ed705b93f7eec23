"""Answers of engines that keep blocks outside of the device, and the bytes of their blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from mlx_paged import LLM, SamplingParams
from mlx_paged.engine.engine import Engine
from support.grouped_models import dense_answer
from support.hash_model import follows
from support.models import random_tokens

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def random_prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    """Random prompts of these lengths."""
    rng = np.random.default_rng(seed)
    return [random_tokens(rng, length) for length in lengths]


def flush(llm: LLM) -> None:
    """Waits until everything is on disk."""
    assert llm.engine._offloading is not None and llm.engine._offloading.flush()


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
        offloading._blocks.collect()
        found.append(out.tobytes())
    kv.free(tables)
    return found


def run_load(
    name: str,
    engine: Engine,
    chats: Sequence[list[int]],
    rng: random.Random,
    after: Callable[[int], None] = lambda index: None,
) -> None:
    """Sends all chats twice to a model of `grouped_models`, a few steps apart, and aborts some of
    them; checks all books after each step, and all tokens.

    Args:
        after: Called with the index of each request once it has run for a while.
    """
    outputs = {}
    for i, chat in enumerate([*chats, *chats]):
        outputs[i] = engine.add_request(str(i), chat, GREEDY)
        for _ in range(rng.randint(0, 6)):
            engine.step()
            engine.check_integrity()
        if i % 5 == 4:
            engine.abort(str(i - 2))
        after(i)
    while engine.has_unfinished:
        engine.step()
        engine.check_integrity()
    for i, output in outputs.items():
        tokens = output.outputs[0].token_ids
        assert tokens == dense_answer(name, chats[i % len(chats)], NUM_TOKENS)[: len(tokens)]


def run_beside(
    engine: Engine, waiting: list[int], on_step: Callable[[int], None] = lambda count: None
) -> tuple[int, int]:
    """Runs a stream of the hash model while a prompt comes back; checks that the stream gains a
    token in each step, and both answers.

    Args:
        on_step: Called with the number of steps in which something was coming back.

    Returns:
        That number in the end, and how many tokens of the prompt were cached.
    """
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    running = engine.add_request("running", [9] * 10, params)
    engine.step()
    engine.step()
    output = engine.add_request("waiting", waiting, params)
    on_step(0)
    num_meanwhile = 0
    while engine.has_unfinished:
        before = len(running.outputs[0].token_ids)
        engine.step()
        engine.check_integrity()
        if engine._kv.restorations:
            num_meanwhile += 1
            assert len(running.outputs[0].token_ids) == before + 1
            on_step(num_meanwhile)
    for prompt, each in (([9] * 10, running), (waiting, output)):
        assert each.outputs[0].token_ids == follows(prompt, 80)
    return num_meanwhile, output.num_cached_tokens or 0
