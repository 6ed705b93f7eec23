"""State slots: what a step reads and writes, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from support.family_config_parts import VOCAB_SIZE
from support.family_configs import config_of
from support.models import dense_logits
from support.parity import Driver, family_model, relative_rms

from mlx_paged.model.layout import StateSpec
from mlx_paged.model.plan import SequenceGroup, StateSlots, build_state_plan
from mlx_paged.model.recurrent import RecurrentCache, StatePool
from mlx_paged.model.wrap import convert_to_paged

HYBRIDS = ["qwen3_next", "nemotron_h", "lfm2", "kimi_linear", "rwkv7"]


def int32(*values: int) -> mx.array:
    return mx.array(values, dtype=mx.int32)


def rows_of(group: SequenceGroup) -> list[int] | None:
    return None if group.rows is None else group.rows.tolist()


# --- Plans ----------------------------------------------------------------------------------------


def test_sequences_of_one_length_are_one_group_in_place() -> None:
    plan = build_state_plan([1, 1, 1], StateSlots([3, 8, 5], [4, 1, 6]))
    [group] = plan.groups
    assert plan.order is None and rows_of(group) is None
    assert (group.num_seqs, group.length, group.begins) == (3, 1, False)
    assert group.reads.tolist() == [3, 8, 5] and group.writes.tolist() == [4, 1, 6]
    plan = build_state_plan([2, 2], StateSlots([0, 0], [4, 1]))
    [group] = plan.groups
    assert plan.order is None and rows_of(group) is None
    assert (group.num_seqs, group.length, group.begins) == (2, 2, True)


def test_rows_are_grouped_by_length_and_beginning_and_put_back_in_order() -> None:
    plan = build_state_plan(
        [1, 3, 1, 2, 3, 0, 3, 0],
        StateSlots([1, 2, 3, 4, 0, 5, 6, 0], [-1, 7, 8, 9, 10, 11, 12, 13]),
    )
    assert [(g.length, g.begins, rows_of(g)) for g in plan.groups] == [
        (1, False, [0, 4]),
        (2, False, [5, 6]),
        (3, False, [1, 2, 3, 10, 11, 12]),
        (3, True, [7, 8, 9]),
    ]
    assert [g.reads.tolist() for g in plan.groups] == [[1, 3], [4], [2, 6], [0]]
    assert [g.writes.tolist() for g in plan.groups] == [[-1, 8], [9], [7, 12], [10]]
    assert [g.num_seqs for g in plan.groups] == [2, 1, 2, 1]
    grouped = [row for g in plan.groups for row in rows_of(g) or []]
    assert plan.order is not None
    assert [grouped[i] for i in plan.order.tolist()] == list(range(13))


@pytest.mark.parametrize(
    ("reads", "writes", "message"),
    [
        ([0], [1, 2], "reads must be of shape"),
        ([0, 0], [1], "writes must be of shape"),
        ([0, -1], [1, 2], "reads must be at least 0"),
        ([0, 0], [1, 0], "slot is the initial state"),
        ([0, 0], [2, 2], "writes must be distinct"),
        ([1, 2], [3, 1], "slot 1 is written by one sequence and read by another"),
    ],
)
def test_slots_that_cannot_be_meant_are_refused(
    reads: list[int], writes: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_state_plan([1, 1], StateSlots(reads, writes))


def test_a_slot_may_be_written_where_it_was_read() -> None:
    build_state_plan([1, 1], StateSlots([1, 2], [1, -1]))


# --- Pools ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.int64, mx.int32])
@pytest.mark.parametrize("shape", [(3,), (2, 5), (4, 16, 16), (3, 1100), (1,)])
def test_a_pool_keeps_the_bits_of_a_state(shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    pool = StatePool(shape, dtype, num_slots=11)
    values = mx.random.randint(-100, 100, (3, *shape), key=mx.random.key(0)).astype(dtype)
    pool.write(values, int32(10, 1, 5))
    pool.write(values + 1, int32(7, -1, 2))
    got = pool.read(int32(5, 0, 10, 1, 2))
    assert got.dtype == dtype and got.shape == (5, *shape)
    expected = [values[2], mx.zeros(shape, dtype), values[0], values[1], values[2] + 1]
    assert mx.array_equal(got, mx.stack(expected))


def test_a_pool_is_written_in_place_and_takes_states_of_its_shape_only() -> None:
    pool = StatePool((4,), mx.float32, num_slots=8)
    mx.eval(pool.pool)
    held = pool.pool
    pool.write(mx.ones((1, 4)), int32(3))
    mx.eval(pool.pool)
    assert held.reshape(8, -1)[3, :4].tolist() == [1, 1, 1, 1]
    with pytest.raises(ValueError, match=r"shape \(1, 4\) but got \(1, 5\)"):
        pool.write(mx.ones((1, 5)), int32(3))
    with pytest.raises(ValueError, match="at least 2 bytes"):
        StatePool((4,), mx.int8, num_slots=8)


# --- Caches ---------------------------------------------------------------------------------------


@pytest.fixture
def cache() -> RecurrentCache:
    """Two states and an entry that nobody uses."""
    spec = StateSpec(((3,), None, (2, 2)), (mx.float32, mx.float32, mx.float16))
    assert spec.bytes_per_slot == 3 * 4 + 4 * 2
    return RecurrentCache(spec, num_slots=8)


def group_of(reads: list[int], writes: list[int]) -> SequenceGroup:
    [group] = build_state_plan([1] * len(reads), StateSlots(reads, writes)).groups
    return group


def test_a_group_reads_its_slots_and_writes_what_was_replaced(cache: RecurrentCache) -> None:
    with cache.grouped(group_of([0, 0], [4, 2])):
        assert cache.empty() and cache[0] is cache[1] is cache[2] is None  # as in mlx-lm
        cache[0] = mx.array([[1.0, 2, 3], [4, 5, 6]])
        assert cache[0][1].tolist() == [4, 5, 6] and not cache.empty()
    with cache.grouped(group_of([2, 4], [-1, -1])):
        assert cache[0].tolist() == [[4, 5, 6], [1, 2, 3]]
        assert cache[1] is None and not cache.empty()
        assert len(list(cache)) == 3  # as some code unpacks its states
        cache[0] = cache[0] + 1
        assert cache[0].tolist() == [[5, 6, 7], [2, 3, 4]]
    # The other state has a slot of the same number, which nobody wrote.
    assert cache.pools[2] is not None
    cache.pools[2].write(mx.ones((1, 2, 2), mx.float16), int32(4))
    with cache.grouped(group_of([4, 2], [-1, -1])):
        assert cache[0].tolist() == [[1, 2, 3], [4, 5, 6]]
        assert cache[2][0].tolist() == [[1, 1], [1, 1]]


def test_a_state_that_grows_with_the_first_tokens_is_kept_behind_zeros() -> None:
    cache = RecurrentCache(StateSpec(((4,), (2, 3)), (mx.int64, mx.float32)), num_slots=8)
    with cache.grouped(group_of([0, 0], [4, 2])):
        cache[0] = mx.array([[7, 8], [9, 6]], mx.int64)
        cache[1] = mx.ones((2, 2, 3))
    with cache.grouped(group_of([2], [-1])):
        assert cache[0].tolist() == [[0, 0, 9, 6]] and cache[1].tolist() == [[[1] * 3] * 2]
    for wrong in (mx.zeros((1, 5)), mx.zeros((1, 4, 1)), mx.zeros((2, 4))):
        with pytest.raises(ValueError, match="states must be"), cache.grouped(group_of([0], [1])):
            cache[0] = wrong
    with pytest.raises(ValueError, match="states must be"), cache.grouped(group_of([2], [1])):
        cache[0] = mx.zeros((1, 2))  # (its sequence has begun)


def test_a_group_that_fails_writes_nothing(cache: RecurrentCache) -> None:
    with cache.grouped(group_of([0], [4])):
        cache[0] = mx.ones((1, 3))
    with pytest.raises(ZeroDivisionError), cache.grouped(group_of([4], [4])):
        cache[0] = mx.zeros((1, 3))
        raise ZeroDivisionError
    with cache.grouped(group_of([4], [-1])):
        assert cache[0].tolist() == [[1, 1, 1]]


def test_states_mean_nothing_outside_of_a_group(cache: RecurrentCache) -> None:
    with pytest.raises(RuntimeError, match="read outside"):
        cache[0]
    with pytest.raises(RuntimeError, match="written outside"):
        cache[0] = mx.zeros((1, 3))
    assert cache.make_mask(5) is None


# --- Steps ----------------------------------------------------------------------------------------


def hybrid(family: str) -> tuple[Any, Driver]:
    model = family_model(config_of(family))
    return model, Driver(convert_to_paged(model, family, block_size=8))


def new(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(0, VOCAB_SIZE, count).tolist()


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_step_that_is_run_again_gives_the_same(family: str) -> None:
    """A failed step leaves the states that it read untouched."""
    _, driver = hybrid(family)
    rng = np.random.default_rng(0)
    driver.step({"a": new(rng, 11), "b": new(rng, 3)})
    work = {"a": new(rng, 1), "b": new(rng, 5), "c": new(rng, 5)}
    before = {name: (seq.slot, len(seq.chunks)) for name, seq in driver.sequences.items()}
    first = driver.step(work)
    for name, seq in driver.sequences.items():
        seq.slot, count = before.get(name, (0, 0))
        del seq.chunks[count:]
    again = driver.step(work)
    assert all(np.array_equal(first[name], again[name]) for name in work)


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_snapshot_is_a_slot_that_is_left_alone(family: str) -> None:
    """A second turn begins where the first prompt ended, for as many sequences as want to."""
    model, driver = hybrid(family)
    rng = np.random.default_rng(1)
    driver.step({"first": new(rng, 24)})
    driver.fork("second", "first", 24)
    driver.fork("third", "first", 24)
    driver.step({"first": new(rng, 1)})
    logits = driver.step({"first": new(rng, 2), "second": new(rng, 9), "third": new(rng, 2)})
    logits |= driver.step({"third": new(rng, 1), "second": new(rng, 1)})
    for name, got in logits.items():
        expected = dense_logits(model, driver.sequences[name].chunks)
        assert relative_rms(got, expected) < 1e-5


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_cut_of_a_prompt_does_not_matter(family: str) -> None:
    model, driver = hybrid(family)
    tokens = new(np.random.default_rng(2), 40)
    for cut in (1, 2, 3, 17, 39):
        driver.step({f"cut at {cut}": tokens[:cut]})
        [got] = driver.step({f"cut at {cut}": tokens[cut:]}).values()
        assert relative_rms(got, dense_logits(model, [tokens])) < 1e-5


def test_a_step_without_slots_is_refused() -> None:
    _, driver = hybrid("lfm2")
    from mlx_paged.model.plan import StepInputs

    ones = np.array([1])
    with pytest.raises(ValueError, match="needs state slots"):
        driver.paged.forward(int32(1), StepInputs(ones, ones, [[1]], ones - 1))
    with pytest.raises(ValueError, match="at least 2 state slots but got 0"):
        driver.paged.allocate(4)
