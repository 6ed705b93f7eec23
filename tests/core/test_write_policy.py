"""Tests which content is written to disk, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_paged.core import BlockTables, KVManager, PrefixNode, StateGroupSpec, WindowGroupSpec
from mlx_paged.core.kv.write_policy import WritePolicy

SIZE = 32


class Kept:
    """A disk that takes everything at once.

    Attributes:
        blocks: (tokens of the prefix, group) of what was chosen.
    """

    def __init__(self, block_bytes: Sequence[int], **options: Any) -> None:
        self.kv = KVManager(400, SIZE, **options)
        self.policy = WritePolicy(self.kv.groups, block_bytes, SIZE, self._is_stored)
        self.blocks: set[tuple[int, int]] = set()
        self._nodes: set[tuple[PrefixNode, int]] = set()
        self._step = 0

    def _is_stored(self, node: PrefixNode, group: int) -> bool:
        return (node, group) in self._nodes

    def turn(self, tokens: Sequence[int], *, depth: int | None = None) -> dict[int, int]:
        """Computes a prompt; returns how many blocks of each group were chosen."""
        tables = self.kv.admit(tokens)
        assert tables is not None
        while tables.num_computed_tokens < len(tokens):
            self._advance(tables, len(tokens))
        new = self.policy.choose(tables, len(tokens) // SIZE if depth is None else depth)
        self._nodes.update(new)
        self.blocks.update((node.depth * SIZE, group) for node, group in new)
        self.kv.free(tables)
        counts: dict[int, int] = {}
        for _, group in new:
            counts[group] = counts.get(group, 0) + 1
        return counts

    def _advance(self, tables: BlockTables, length: int) -> None:
        end = self.kv.allocate_up_to(tables, length)
        self.kv.move_state(tables, end)
        self._step += 1
        self.kv.launch_step(self._step)
        self.kv.on_step_evaluated(self._step)
        self.kv.commit(tables, end)


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + 7 * i) % 1000 for i in range(length)]


def test_short_prompts_are_written_the_second_time_and_long_ones_at_once() -> None:
    disk = Kept([100])
    assert disk.turn(prompt(2047)) == {}
    assert disk.turn(prompt(2047)) == {0: 63}  # what was cached: all full blocks
    assert disk.turn(prompt(2048, first=1)) == {0: 64}
    assert disk.turn(prompt(255, first=2)) == disk.turn(prompt(255, first=2)) == {}


def test_few_new_tokens_wait_for_more() -> None:
    disk = Kept([100])
    assert disk.turn(prompt(2048)) == {0: 64}
    assert disk.turn(prompt(2048 + 255)) == {}
    assert disk.turn(prompt(2048 + 300)) == {0: 9}
    assert disk.turn(prompt(2048 + 300)) == {}


def test_a_window_is_written_for_the_end_of_a_turn() -> None:
    def window(span: int) -> WindowGroupSpec:
        return WindowGroupSpec(400, span, lambda position: max(0, position - span + 1))

    disk = Kept([100, 100], windows=[window(320)])
    assert disk.turn(prompt(2080)) == {0: 65, 1: 10}
    assert {tokens for tokens, group in disk.blocks if group} == set(range(1792, 2112, 32))
    assert disk.turn(prompt(2080 + 320)) == {0: 10, 1: 10}
    # A window of many bytes is not worth a few tokens.
    disk = Kept([100, 900], windows=[window(320)])
    assert disk.turn(prompt(2080)) == {0: 65, 1: 10}
    assert disk.turn(prompt(2080 + 320)) == {0: 10, 1: 10}
    disk = Kept([900, 100], windows=[window(2000)])
    assert disk.turn(prompt(2080)) == {0: 65, 1: 63}


def test_a_state_that_weighs_much_is_thinned_out() -> None:
    # As in a hybrid of 27B: a snapshot weighs as much as 2,350 tokens.
    disk = Kept([100, 2350 * 100 // SIZE], states=StateGroupSpec(30))
    assert disk.turn([*prompt(2048), 5], depth=64) == {0: 64, 1: 1}
    num_states = [disk.turn([*prompt(2048 + 320 * turn), 5]).get(1, 0) for turn in range(1, 9)]
    assert num_states == [0, 0, 0, 1, 0, 0, 0, 1]  # every 1,175 tokens
    # Full attention is written with the states, from which alone a sequence continues.
    assert {tokens for tokens, group in disk.blocks if group} == {2048, 3328, 4608}
    assert max(tokens for tokens, group in disk.blocks if not group) == 4608


def test_without_a_point_to_continue_from_nothing_is_written() -> None:
    disk = Kept([100, 100], states=StateGroupSpec(30))
    tables = disk.kv.admit(prompt(2100))
    assert tables is not None
    while tables.num_computed_tokens < 2048:
        disk._advance(tables, 2048)
    assert disk.policy.choose(tables, 63) == []  # the only snapshot is after 64
    disk.kv.free(tables)


def test_a_model_without_attention_keeps_states() -> None:
    disk = Kept([0, 1000], states=StateGroupSpec(30))
    assert disk.turn([*prompt(2048), 5]) == {0: 64, 1: 1}
    assert disk.turn([*prompt(2048 + 512), 5]) == {}
    assert disk.turn([*prompt(2048 + 1024), 5]) == {0: 32, 1: 1}
