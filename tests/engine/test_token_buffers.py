"""The token ids of a request lie in few buffers: a long prompt is copied only where it must be."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterator
from typing import Any

from support.models import embedded_twin

from mlx_paged import LLM, SamplingParams

NUM_TOKENS = 3001


def fields_of(thing: Any) -> Iterator[Any]:
    yield from vars(thing).values() if hasattr(thing, "__dict__") else ()
    for kind in type(thing).__mro__:
        for name in getattr(kind, "__slots__", ()):
            yield getattr(thing, name, None)


def num_buffers() -> int:
    """Counts lists, arrays and byte strings of about as many tokens, in fields of our objects."""
    found = set()
    for thing in gc.get_objects():
        # (Some classes have a descriptor there.)
        if str(type(thing).__module__).startswith("mlx_paged."):
            for value in fields_of(thing):
                if isinstance(value, (list, tuple, array, bytes)):
                    size = len(value) // (4 if isinstance(value, bytes) else 1)
                    if NUM_TOKENS <= size + 1 <= NUM_TOKENS + 100:
                        found.add(id(value))
    return len(found)


def test_a_running_prompt_lies_in_three_buffers() -> None:
    """The caller's output, the request, and its sequence, whose answer grows behind the prompt."""
    engine = LLM(embedded_twin(), num_gpu_blocks_override=128, block_size=32).engine
    before = num_buffers()
    prompt = array("I", [5 + i * 7919 % 250 for i in range(NUM_TOKENS)])
    engine.add_request("a", prompt, SamplingParams(max_tokens=20, ignore_eos=True))
    del prompt
    for _ in range(8):
        engine.step()
    assert engine.has_unfinished
    assert num_buffers() - before == 3
