"""``MLX_PAGED_CHECK=1``: wrong ids are named before a kernel follows them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from support.reference import assert_close, make_batch, spans_of

from mlx_paged import ops

# Raises one refusal of each op. Prints the types, then survives many more.
PROBE = """
import sys, mlx_paged, mlx.core as mx
from mlx_paged import ops
from mlx_paged.model.plan import build_plan
mx.set_default_device(mx.cpu)
rows, slots = mx.ones((1, 1, 8)), mx.array([99])
plan = build_plan([[99]], [1], [1], block_size=8)
mx.eval(rows, slots, *vars(plan).values())

def refused(call):
    pools = [mx.zeros((4, 8, 1, 8)) for _ in range(2)]
    mx.eval(pools)
    try:
        mx.eval(call(pools))
    except (IndexError, RuntimeError) as error:
        return type(error).__name__
    return "nothing"

calls = [
    lambda pools: ops.write_kv(*pools, rows, rows, slots),
    lambda pools: ops.copy_blocks(pools, mx.array([[0, 99]])),
    lambda pools: ops.gather_kv(*pools, mx.array([[99]]), mx.array([1]), 1),
    lambda pools: ops.paged_attention(rows, *pools, plan, scale=1.0),
]
print(*map(refused, calls), flush=True)
for _ in range(int(sys.argv[1])):
    refused(calls[0])
print("alive")
"""


def probe(repeats: int) -> list[str]:
    command = [sys.executable, "-c", PROBE, str(repeats)]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.split()


@pytest.fixture(autouse=True)
def check_mode(monkeypatch) -> None:
    monkeypatch.setenv("MLX_PAGED_CHECK", "1")


@pytest.fixture(scope="module")
def clean_refusals() -> None:
    """Fails at once where refusals would wedge this process.

    An exception on a stream's thread makes MLX drop the task that is enqueued next; after some
    twenty of them it waits for ever for tasks that it still counts as running.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_PAGED_CHECK", "1")
        kinds = probe(0)[:4]
    if kinds != ["IndexError"] * 4:
        pytest.fail(f"refusals come from a stream's thread, as {kinds}")


def int32(values: object) -> mx.array:
    return mx.array(np.array(values, np.int32))


def pools(num_blocks: int = 4) -> list[mx.array]:
    made = [mx.zeros((num_blocks, 8, 1, 8)) for _ in range(2)]
    mx.eval(*made)
    return made


def write(slots: list[int]) -> mx.array:
    rows = mx.ones((len(slots), 1, 8))
    return ops.write_kv(*pools(), rows, rows, int32(slots))[0]


def copy(pairs: list[list[int]]) -> mx.array:
    return ops.copy_blocks(pools(), int32(pairs))[0]


def gather(tables: list[list[int]], lens: list[int], max_len: int = 16) -> mx.array:
    return ops.gather_kv(*pools(), int32(tables), int32(lens), max_len)[0]


def attend(rng: np.random.Generator, **changes: Callable) -> mx.array:
    """Two sequences, three rows, of which the plan's fields are changed."""
    batch = make_batch(rng, [70, 20], [2, 1])
    plan = batch.plan()
    for field, change in changes.items():
        values = np.array(getattr(plan, field))
        change(values)
        plan = replace(plan, **{field: mx.array(values)})
    return ops.paged_attention(batch.queries, batch.key_pool, batch.value_pool, plan, scale=0.125)


def put(index: tuple[int, int], value: int) -> Callable:
    return lambda array: array.__setitem__(index, value)


REFUSALS = {
    "slot past the pool": (
        lambda rng: write([1, 32]),
        "[write_kv] slot_mapping[1] must be -1 or in [0, 32) but got 32",
    ),
    "slot below -1": (
        lambda rng: write([-2]),
        "[write_kv] slot_mapping[0] must be -1 or in [0, 32) but got -2",
    ),
    "slot written twice": (
        lambda rng: write([5, -1, 5]),
        "[write_kv] slot_mapping[2] must be unique but slot 5 is written twice",
    ),
    "source past the pool": (
        lambda rng: copy([[0, 1], [4, 2]]),
        "[copy_blocks] block_pairs[1, 0] must be in [0, 4) but got 4",
    ),
    "destination negative": (
        lambda rng: copy([[0, -1]]),
        "[copy_blocks] block_pairs[0, 1] must be in [0, 4) but got -1",
    ),
    "destination twice": (
        lambda rng: copy([[0, 2], [1, 2]]),
        "[copy_blocks] block_pairs[1, 1] must be unique but block 2 is a destination",
    ),
    "source is a destination": (
        lambda rng: copy([[0, 2], [2, 3]]),
        "[copy_blocks] block_pairs[1, 0] must not be a destination but block 2 is",
    ),
    "gathered block past the pool": (
        lambda rng: gather([[0, 1], [3, 7]], [4, 9]),
        "[gather_kv] block_tables[1, 1] must be in [0, 4) but got 7",
    ),
    "gathered block negative": (
        lambda rng: gather([[-1, 1]], [4]),
        "[gather_kv] block_tables[0, 0] must be in [0, 4) but got -1",
    ),
    "context longer than its table": (
        lambda rng: gather([[0, 1], [2, 3]], [4, 17]),
        "[gather_kv] context_lens[1] must be in [0, 16] but got 17",
    ),
    "context negative": (
        lambda rng: gather([[0, 1]], [-1]),
        "[gather_kv] context_lens[0] must be in [0, 16] but got -1",
    ),
    "attended block past the pool": (
        lambda rng: attend(rng, block_tables=put((1, 1), 10)),
        "[paged_attention] block_tables[1, 1] must be in [0, 10) but got 10",
    ),
    "attended block negative": (
        lambda rng: attend(rng, block_tables=put((0, 4), -3)),
        "[paged_attention] block_tables[0, 4] must be in [0, 10) but got -3",
    ),
    "item of no sequence": (
        lambda rng: attend(rng, work_items=put((1, 0), 2)),
        "[paged_attention] the sequence of work_items[1] must be in [0, 2) but got 2",
    ),
    "item beyond the rows": (
        lambda rng: attend(rng, work_items=put((0, 2), 4)),
        "[paged_attention] the rows of work_items[0] must be in [0, 3] but got [0, 4)",
    ),
    "item beyond the table": (
        lambda rng: attend(rng, work_items=put((0, 4), 6)),
        "[paged_attention] the blocks of row 0 must be in [0, 5] but got [0, 6)",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_wrong_ids_are_named_with_their_row(rng, clean_refusals, name) -> None:
    make, message = REFUSALS[name]
    with pytest.raises(IndexError, match=re.escape(message)):
        mx.eval(make(rng))
    # The process goes on: the error is reported once, and later work is right.
    assert (mx.ones(3) + 1).tolist() == [2.0] * 3
    written = write([3])
    assert np.array(written)[0, 3, 0].tolist() == [1.0] * 8


def test_a_row_whose_bounds_are_wrong_is_named(rng, clean_refusals) -> None:
    batch = make_batch(rng, [10], [4], bounds=spans_of([10], [4], [[(6, 9)]]))
    pools = (batch.key_pool, batch.value_pool)
    plan = batch.plan()
    mx.eval(ops.paged_attention(batch.queries, *pools, plan, scale=0.125))
    wrong = np.array(plan.bounds)
    wrong[2, 1] = 6
    with pytest.raises(
        IndexError, match="the bounds of row 1 must contain its position 7 but are 6 "
    ):
        plan = replace(plan, bounds=mx.array(wrong))
        mx.eval(ops.paged_attention(batch.queries, *pools, plan, scale=0.125))


def test_right_ids_pass(rng) -> None:
    mx.eval(write([-1, 0, 31]), copy([[0, 1], [0, 2]]), gather([[0, 3], [-1, 99]], [16, 0]))
    batch = make_batch(rng, [70, 0, 20], [2, 0, 1])
    plan = batch.plan(split_tokens=16)
    out = ops.paged_attention(batch.queries, batch.key_pool, batch.value_pool, plan, scale=0.125)
    assert_close(out, batch.expected(scale=0.125))


def test_blocks_that_no_item_reads_may_be_anything(rng) -> None:
    batch = make_batch(rng, [70, 20], [2, 1])
    tables = [batch.tables[0], [*batch.tables[1], 10**6]]
    plan = replace(batch, tables=tables).plan()
    out = ops.paged_attention(batch.queries, batch.key_pool, batch.value_pool, plan, scale=0.125)
    assert_close(out, batch.expected(scale=0.125))


def test_a_refused_step_writes_nothing(clean_refusals) -> None:
    made = pools()
    rows = mx.ones((2, 1, 8))
    with pytest.raises(IndexError, match="slot_mapping"):
        mx.eval(ops.write_kv(*made, rows, rows, int32([1, 99])))
    assert not np.array(made[0]).any() and not np.array(made[1]).any()


@pytest.mark.parametrize("wait", [mx.synchronize, lambda: mx.eval(mx.ones(3) + 1)])
def test_an_error_of_async_eval_reaches_whoever_waits_next(clean_refusals, wait) -> None:
    with pytest.raises(IndexError, match=re.escape("slot_mapping[0]")):
        mx.async_eval(write([99]))  # already here, if the kernel was quick
        wait()
    wait()


def test_a_pool_serves_on_after_a_refused_step(clean_refusals) -> None:
    made = pools()
    rows = mx.ones((1, 1, 8))
    with pytest.raises(IndexError, match=re.escape("slot_mapping[0]")):
        mx.eval(ops.write_kv(*made, rows, rows, int32([99])))
    written, _ = ops.write_kv(*made, rows, rows, int32([9]))
    assert np.argwhere(np.array(written)[..., 0, 0]).tolist() == [[1, 1]]


def test_a_refusal_is_an_index_error_of_the_call_that_evaluates() -> None:
    assert probe(0)[:4] == ["IndexError"] * 4


def test_a_process_survives_many_refusals() -> None:
    assert probe(1000)[-1] == "alive"


@pytest.mark.parametrize("value", [None, "0", ""])
def test_unset_means_off(monkeypatch, value) -> None:
    if value is None:
        monkeypatch.delenv("MLX_PAGED_CHECK")
    else:
        monkeypatch.setenv("MLX_PAGED_CHECK", value)
    # Twice the same slot with the same row: harmless, so it can show that nothing looks.
    assert np.array(write([5, 5]))[0, 5, 0].tolist() == [1.0] * 8
