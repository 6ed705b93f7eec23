"""Helpers for tests of `LLM` on the embedded model; its fixture `llm` is in conftest.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from mlx_paged import LLM, RequestOutput, SamplingParams, ops
from mlx_paged.core import FinishReason
from mlx_paged.engine.detokenizer import IncrementalDetokenizer
from support.models import dense_greedy, embedded, embedded_twin

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
# Lengths from one token to several blocks; most are unrelated, some share a prefix.
SHARED = 'class Stack:\n    """A last-in, first-out stack."""\n\n    def __init__(self):\n'
PROMPTS = [
    "x",
    "def fibonacci(n):\n",
    "import math\n\n\ndef area(radius):\n",
    SHARED,
    SHARED + "        self.items = []\n\n    def push(self, item):\n",
    SHARED + "        self.items = []\n\n    def pop(self):\n",
    "for i in range(10):\n    print(",
    *(f"def function_{i}(a, b):\n    return a" for i in range(5)),
    '"""A module that sorts words.\n\nIt reads a text and counts its words.\n"""\n' * 3,
    "class Node:\n    def __init__(self, value, left=None, right=None):\n",
    "try:\n    value = int(text)\nexcept",
    "日本語 = 1\n",
]
assert len(PROMPTS) == 16


# Pool copies are counted per process, and other tests cause some on purpose.
_copies_before: WeakKeyDictionary[LLM, int] = WeakKeyDictionary()


def tokens_of(prompt: str) -> list[int]:
    return embedded().tokenizer.encode(prompt)


def text_of(tokens: Sequence[int]) -> str:
    """The text of an answer, as streamed in total."""
    stream = IncrementalDetokenizer(embedded().tokenizer)
    return "".join([*(stream.add(token) for token in tokens), stream.finish()])


def make(model: Any = None, **options: Any) -> LLM:
    """Makes an `LLM` with a small pool of its own; by default with the embedded model."""
    llm = LLM(model or embedded_twin(), **{"kv_cache_memory": 1 << 26, **options})
    _copies_before[llm] = ops.pool_copies()
    return llm


def check_at_rest(llm: LLM) -> None:
    """Checks the state of an idle engine: no block in use, no pool ever copied, integrity."""
    llm.engine.check_integrity()
    stats = llm.stats()
    assert not llm.engine.has_unfinished
    assert stats.num_running == stats.num_waiting == 0
    assert stats.usage.num_used_blocks == stats.usage.num_quarantined_blocks == 0
    at_rest = stats.usage.num_free_blocks + stats.usage.num_cached_blocks
    assert at_rest == stats.usage.num_usable_blocks
    assert stats.pool_copies == _copies_before[llm]


def assert_dense(outputs: list[RequestOutput], prompts: list[str], num_tokens: int) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        [answer] = output.outputs
        assert output.prompt == prompt
        assert output.prompt_token_ids == tokens_of(prompt)
        assert answer.token_ids == dense_greedy(tokens_of(prompt), num_tokens), prompt
        assert answer.text == text_of(answer.token_ids)
        assert answer.finish_reason is FinishReason.LENGTH
        assert answer.stop_reason is None
