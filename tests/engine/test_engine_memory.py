"""The pool is sized by what the device has left; memory and live arrays stay flat."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from support.hash_model import hash_model
from support.platforms import platform_with
from support.step_rows import rows_of

# isort: split
import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import cgroups, ops
from mlx_paged.engine import config as config_module
from mlx_paged.engine import memory
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.loading import load
from mlx_paged.engine.memory import largest_step, measure_activations
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import InvalidParameterError
from mlx_paged.model.plan import BlockTableCache, PaddedTables

GIB = 1 << 30


def sized(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig, *, on_cpu: bool = True, **machine: int
) -> Any:
    monkeypatch.setattr(memory, "device_memory", lambda: machine["device"])
    monkeypatch.setattr(memory, "available_memory", lambda: machine["available"])
    monkeypatch.setattr(mx, "get_active_memory", lambda: machine["weights"])
    return memory.left_for_pool(config, lambda: machine["activations"], on_cpu=on_cpu)


def test_the_pool_gets_what_weights_and_activations_leave(monkeypatch) -> None:
    machine = {"device": 100, "available": 100, "weights": 20, "activations": 15}
    config = EngineConfig(gpu_memory_utilization=0.5)
    assert sized(monkeypatch, config, **machine) == (15, 15)
    # If other programs hold the memory, utilization is a share of the rest.
    assert sized(monkeypatch, config, **{**machine, "available": 40}) == (5, 15)
    assert sized(monkeypatch, config, **{**machine, "weights": 80}) == (0, 15)


def test_a_gpu_has_memory_of_its_own(monkeypatch) -> None:
    machine = {"device": 100, "available": 0, "weights": 20, "activations": 15}
    config = EngineConfig(gpu_memory_utilization=0.5)
    assert sized(monkeypatch, config, on_cpu=False, **machine) == (15, 15)
    assert sized(monkeypatch, EngineConfig(), on_cpu=False, **machine) == (55, 15)


def test_the_memory_of_a_served_model_is_that_of_all_its_processes(monkeypatch) -> None:
    usage = memory.MemoryUsage(active=1000, cached=7, peak=2000, cache_limit=500)

    def served(num_ranks: int, num_processes: int, *, has_cuda: bool = False) -> int:
        platform = platform_with(has_cuda=has_cuda)
        monkeypatch.setattr(memory.Platform, "current", lambda: platform)
        return memory.served_memory(usage, num_ranks, num_processes)

    interpreter = served(1, 1) - 1500
    assert interpreter > 100 << 20
    assert served(1, 2) == 1500 + 2 * interpreter  # a server, and its engine
    assert served(2, 3) == 2 * 1500 + 3 * interpreter
    assert served(2, 3, has_cuda=True) == 1500  # on each GPU


@pytest.mark.parametrize(
    "options",
    [{}, {"kv_cache_memory": GIB}, {"num_gpu_blocks_override": 5, "gpu_memory_utilization": 0.5}],
)
def test_nothing_is_measured_where_it_decides_nothing(options) -> None:
    def never() -> int:
        raise AssertionError("the largest step was run for nothing")

    assert memory.left_for_pool(EngineConfig(**options), never, on_cpu=True) == (None, None)


def test_too_small_a_share_is_refused_with_the_numbers() -> None:
    config = EngineConfig(gpu_memory_utilization=0.25)
    with pytest.raises(InvalidParameterError, match=r"0.25.*leaves 100 bytes") as refused:
        config.num_blocks([1024], None, 100)
    assert refused.value.field == "gpu_memory_utilization"
    for share in (0, -0.5, 1.5):
        with pytest.raises(InvalidParameterError, match="gpu_memory_utilization"):
            EngineConfig(gpu_memory_utilization=share)


def share_of_the_rest() -> float:
    """A memory utilization that allows for the arrays of other tests in this process."""
    gc.collect()
    return min(0.95, 0.4 + mx.get_active_memory() / memory.physical_memory())


def test_an_engine_sized_by_utilization() -> None:
    """The embedded model's largest step is measured, and the engine answers as ever."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    tokens = []
    for options in ({"kv_cache_memory": 64 << 20}, {"gpu_memory_utilization": share_of_the_rest()}):
        engine = Engine(load(), EngineConfig(max_num_seqs=8, max_num_batched_tokens=128, **options))
        output = engine.add_request("0", [5, 6, 7], params)
        while engine.has_unfinished:
            engine.step()
        tokens.append(output.outputs[0].token_ids)
    assert tokens[0] == tokens[1]
    usage = engine.stats().memory
    assert usage.cache_limit is not None and usage.cache_limit >= 64 << 20


def test_the_activation_peak_grows_with_the_step() -> None:
    engine = Engine(load(), EngineConfig(num_gpu_blocks_override=8))
    small, large = (
        measure_activations(engine._runner, EngineConfig(max_num_seqs=4, max_num_batched_tokens=n))
        for n in (16, 512)
    )
    # The residual stream alone; and what is freed at once must not add up over the layers.
    hidden = load().config["hidden_size"]
    assert small < large and 512 * hidden * 4 < large < 512 * hidden * 4 * 100


@pytest.mark.parametrize(
    ("bytes_of_two", "ahead"),
    [(1300, 3), (1001, 7), (10_000, 1)],  # 3% of the device: 750 bytes; a part counts at least 125
)
def test_the_host_is_ahead_by_what_memory_allows(monkeypatch, bytes_of_two, ahead) -> None:
    engine = Engine(load(), EngineConfig(num_gpu_blocks_override=8))
    runner = engine._runner
    runner.model.platform = platform_with(has_cuda=True)
    peaks: list[int] = []

    def peak_of(runner, batch) -> int:
        peaks.append(1000 if runner.model.parts_ahead == 1 else bytes_of_two)
        return peaks[-1]

    monkeypatch.setattr(memory, "_peak_of", peak_of)
    monkeypatch.setattr(memory, "device_memory", lambda: 25_000)
    needed = measure_activations(runner, EngineConfig(max_num_seqs=4, max_num_batched_tokens=2048))
    assert peaks == [1000, bytes_of_two] and runner.model.parts_ahead == ahead
    assert needed == 1000 + (ahead - 1) * max(bytes_of_two - 1000, 125)


@pytest.mark.parametrize(("num_seqs", "num_tokens"), [(1, 10), (7, 100), (256, 2048), (8, 8)])
def test_the_largest_step_is_within_the_limits(num_seqs, num_tokens) -> None:
    config = EngineConfig(max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens)
    batch = largest_step(config)
    assert batch.num_tokens == num_tokens and batch.num_seqs == num_seqs
    rows = rows_of(batch)
    blocks = [b for row in rows for b in row.block_table]
    assert len(blocks) == len(set(blocks)) and 0 not in blocks
    assert all(len(r.block_table) * 32 >= r.context_len for r in rows)


def test_a_pool_that_does_not_fit_becomes_smaller() -> None:
    tried = []

    def allocate(num_blocks: int) -> None:
        tried.append(num_blocks)
        if num_blocks > 300:
            raise RuntimeError("[metal::malloc] Attempting to allocate 123 bytes")

    assert memory.allocate_fitting(allocate, 1000, exactly=False) == tried[-1] <= 300
    assert tried == sorted(tried, reverse=True)
    with pytest.raises(RuntimeError):
        memory.allocate_fitting(allocate, 1000, exactly=True)

    def broken(_: int) -> None:
        raise ValueError("something else")

    with pytest.raises(ValueError, match="something else"):
        memory.allocate_fitting(broken, 1000, exactly=False)


def test_a_container_limitsphysical_memory(monkeypatch) -> None:
    files = {
        "/proc/self/cgroup": "0::/system.slice/mlx.service\n",
        "/sys/fs/cgroup/system.slice/memory.max": "123456789\n",
        "/sys/fs/cgroup/system.slice/mlx.service/memory.max": "max\n",
    }
    monkeypatch.setattr(cgroups, "_read", lambda path: files.get(path, ""))
    assert config_module.physical_memory() == 123456789
    files["/sys/fs/cgroup/system.slice/memory.max"] = "max\n"
    assert config_module.physical_memory() > 123456789
    assert 0 < memory.available_memory() <= config_module.physical_memory()


@pytest.mark.parametrize(
    ("activations", "pool", "logits", "limit"),
    [
        (None, 64 << 20, 1 << 20, 64 << 20),
        (None, 1 << 20, 1 << 20, 64 << 20),
        (None, 1 * GIB, 1 << 20, 256 << 20),
        (None, 4 * GIB, 1 << 20, 1 * GIB),
        (None, 64 * GIB, 1 << 20, 1 * GIB),
        (None, 64 << 20, 100 << 20, 400 << 20),
        (None, 64 << 20, 1 * GIB, 1 * GIB),
        (3 * GIB, 64 << 20, 1 << 20, 3 * GIB),
        (1 << 20, 64 * GIB, 1 * GIB, 64 << 20),
    ],
)
def test_the_buffer_cache_is_in_proportion(monkeypatch, activations, pool, logits, limit) -> None:
    set_to = []
    monkeypatch.setattr(mx, "set_cache_limit", set_to.append)
    monkeypatch.setattr(memory, "physical_memory", lambda: 64 * GIB)
    assert memory.limit_buffer_cache(activations, pool, logits) == limit and set_to == [limit]
    if activations is None:
        monkeypatch.setattr(memory, "physical_memory", lambda: 256 << 20)
        assert memory.limit_buffer_cache(None, pool, logits) == 32 << 20


def test_an_engine_with_a_small_pool_has_a_small_cache() -> None:
    mx.clear_cache()  # (of what other tests have left, which a lower limit does not end)
    engine = Engine(hash_model(), EngineConfig(kv_cache_memory=64 << 20))
    limit = engine.stats().memory.cache_limit
    assert limit == 64 << 20 and mx.set_cache_limit(limit) == limit, "and MLX has been told"
    for size in range(1, 30):
        mx.eval(mx.zeros((size, 1 << 18)))
    # (On a GPU MLX keeps what it gets back as long as the limit has not been reached.)
    assert mx.get_cache_memory() < limit + (size << 20)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sync"])
def test_memory_and_live_arrays_are_flat(overlap) -> None:
    """Sequences that decode 600 steps; each sample is taken where the tables have one size."""
    config = EngineConfig(
        block_size=8, num_gpu_blocks_override=2000, max_num_seqs=16, async_scheduling=overlap
    )
    copies = ops.pool_copies()  # other tests make some on purpose
    engine = Engine(hash_model(), config)
    params = SamplingParams(temperature=0, max_tokens=700, ignore_eos=True)
    for i in range(16):
        engine.add_request(str(i), [i, 1, 2], params)
    samples = []
    for step in range(601):
        engine.step()
        if step % 100 == 0:
            gc.collect()
            mx.synchronize()  # (the step that is under way has arrays of its own)
            samples.append((mx.get_active_memory(), memory.live_arrays()))
    active, arrays = zip(*samples[1:])
    assert max(arrays) - min(arrays) == 0
    # Allowed growth: 16 tables of at most 88 blocks, and on a GPU up to four pieces of each context
    # and how they are joined, in at most two steps. (CUDA's buffers are powers of two.)
    assert max(active) - min(active) <= 2 * 2 * 16 * (88 + 4 * 6 + 4) * 4
    assert engine.stats().pool_copies == copies


# --- Block tables, updated where they change ------------------------------------------------------


def test_tables_are_those_of_a_fresh_copy_whatever_happens() -> None:
    rng = np.random.default_rng(0)
    cache = BlockTableCache()
    tables: dict[int, list[int]] = {}
    dirty: dict[int, int] = {}
    unchanged: dict[int, tuple[tuple[int, ...], int]] = {}  # the same objects as in later steps
    present: list[int] = []
    next_id = num_same = 0
    for _ in range(600):
        for seq_id in list(tables):
            event = rng.random()
            if event < 0.05:
                del tables[seq_id]
            elif event < 0.1:  # preempted and admitted anew, maybe with a shorter table
                tables[seq_id] = rng.integers(1, 999, rng.integers(1, 9)).tolist()
                dirty[seq_id] = 0
            elif event < 0.4:
                dirty[seq_id] = min(dirty[seq_id], len(tables[seq_id]))
                tables[seq_id].append(int(rng.integers(1, 999)))
            elif event < 0.5:
                at = int(rng.integers(len(tables[seq_id])))
                tables[seq_id][at] = int(rng.integers(1, 999))
                dirty[seq_id] = min(dirty[seq_id], at)
        while len(tables) < 12:
            tables[next_id], dirty[next_id] = [int(rng.integers(1, 999))], 0
            next_id += 1
        if not present or rng.random() < 0.5 or not tables.keys() >= set(present):
            present = [seq_id for seq_id in tables if rng.random() < 0.8]
            rng.shuffle(present)
        given = []
        for i in present:
            blocks = tuple(tables[i])
            if dirty[i] < len(blocks) or i not in unchanged:
                given.append((blocks, dirty[i]))
                unchanged[i] = blocks, len(blocks)
            else:
                given.append(unchanged[i])
                num_same += 1
        found = cache.update(present, given)
        expected = PaddedTables.of([tables[i] for i in present])
        np.testing.assert_array_equal(found.blocks, expected.blocks)
        np.testing.assert_array_equal(found.lengths, expected.lengths)
        dirty.update({i: len(tables[i]) for i in present})
    assert num_same > 1000
    assert len(cache) <= 64, "rows of sequences that ended are not used again"


@pytest.mark.parametrize(
    ("gib", "share", "expected"),
    [(80, None, 8192), (18, None, 8192), (17, None, 4096), (18, 0.5, 4096), (8, None, 2048)],
)
def test_an_nvidia_gpu_takes_larger_steps_where_it_has_the_memory(
    monkeypatch: pytest.MonkeyPatch, gib: int, share: float | None, expected: int
) -> None:
    platform = platform_with(has_cuda=True)
    monkeypatch.setattr(memory, "device_memory", lambda: gib << 30)
    monkeypatch.setattr(memory.mx, "get_active_memory", lambda: 0)
    chosen = memory.with_step_tokens(EngineConfig(gpu_memory_utilization=share), platform)
    assert chosen.step_tokens == chosen.scheduler_config(None).max_num_batched_tokens == expected
    given = EngineConfig(gpu_memory_utilization=share, max_num_batched_tokens=100)
    assert memory.with_step_tokens(given, platform) is given


def test_elsewhere_a_step_has_2048_tokens() -> None:
    config = memory.with_step_tokens(EngineConfig(), platform_with(has_cuda=False))
    assert config.step_tokens == config.scheduler_config(None).max_num_batched_tokens == 2048


def test_live_arrays_are_counted_beside_dead_proxies() -> None:
    class Thing:
        pass

    thing = Thing()
    dead = [weakref.proxy(thing)]
    del thing
    assert memory.live_arrays() >= 0 and len(dead) == 1
