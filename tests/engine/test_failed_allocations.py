"""A lack of memory raises in the operation that finds it, and ends no other request's answer."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import pytest
from support.reference import ON_GPU, assert_close, make_batch

from mlx_paged import ops
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.loading import load
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.extension import ext
from mlx_paged.platform import is_out_of_memory

linux_only = pytest.mark.skipif(
    sys.platform != "linux" or ON_GPU, reason="GPUs' allocators raise by themselves"
)
can_fail = pytest.mark.skipif(
    not hasattr(ext, "_fail_allocation"),
    reason="failing allocations are built with -Ccmake.define.MLX_PAGED_BUILD_TESTS=ON only",
)


@pytest.fixture(autouse=True)
def _nothing_fails_later():
    yield
    if hasattr(ext, "_fail_allocation"):
        ext._fail_allocation(-1)


@pytest.fixture(scope="module")
def engine() -> Engine:
    options = {"kv_cache_memory": 16 << 20, "block_size": 8, "max_num_batched_tokens": 64}
    return Engine(load(dtype="float32"), EngineConfig(max_num_seqs=4, **options))


def finish(engine: Engine, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 1, "ignore_eos": True, **options})
    engine.reset_prefix_cache()
    outputs = [engine.add_request(str(i), p, params) for i, p in enumerate(prompts)]
    while engine.has_unfinished:
        engine.step()
    engine.check_integrity()
    assert [o.outputs[0].error for o in outputs] == [None] * len(outputs)
    return [o.outputs[0].token_ids for o in outputs]


@linux_only
@can_fail
def test_every_allocation_of_a_prompts_step_may_fail(engine) -> None:
    prompts = [list(range(10, 40)), list(range(200, 207))]
    expected = finish(engine, prompts)
    for index in range(1000):
        num_faults = engine.stats().num_faults
        ext._fail_allocation(index)
        answers = finish(engine, prompts)
        num_allocations = ext._num_allocations()
        ext._fail_allocation(-1)
        engine._executor.max_rows = None  # (the next step is whole again)
        assert answers == expected, index
        if num_allocations <= index:
            break
        assert engine.stats().num_faults > num_faults, index
    assert index > 10


@linux_only
@can_fail
def test_every_allocation_of_a_decode_step_may_fail(engine) -> None:
    prompts = [list(range(10, 40)), list(range(200, 207))]
    expected = finish(engine, prompts, max_tokens=100)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    outputs = [engine.add_request(str(i), p, params) for i, p in enumerate(prompts)]
    index, were_all_tried = 0, False
    while engine.has_unfinished:
        ext._fail_allocation(index)
        engine.step()
        were_all_tried = were_all_tried or ext._num_allocations() <= index
        ext._fail_allocation(-1)
        engine._executor.max_rows = None
        index += 1
    engine.check_integrity()
    assert [o.outputs[0].token_ids for o in outputs] == expected
    assert were_all_tried


@linux_only
@can_fail
def test_a_kernel_that_fails_on_the_streams_thread_raises_where_its_result_is_waited_for(
    rng,
) -> None:
    batch = make_batch(rng, [90, 40], [1, 1])
    plan = batch.plan(split_tokens=16)  # pieces whose partial results need memory
    mx.eval(batch.queries, batch.key_pool, batch.value_pool)

    def attend() -> mx.array:
        return ops.paged_attention(
            batch.queries, batch.key_pool, batch.value_pool, plan, scale=0.125
        )

    expected = batch.expected(scale=0.125)
    assert_close(attend(), expected)
    ext._fail_allocation(1)  # (the first is the result)
    failed = attend()
    with pytest.raises(RuntimeError) as raised:
        mx.eval(failed)
    ext._fail_allocation(-1)
    assert is_out_of_memory(raised.value)
    assert "bytes" in str(raised.value)
    if mx.any(failed).item():  # (MLX evaluates it again, unless the error came after that)
        assert_close(failed, expected)
    assert_close(attend(), expected)


# (A process of its own: MLX's main thread is the one that used it first.)
LOST_TASKS = """
import contextlib
import mlx_paged
from mlx_paged import ops, runtime
from mlx_paged.extension import ext
import mlx.core as mx

# A busy machine rarely runs the stream's thread at the right moment.
were_lost = False
for attempt in range(4000):
    with contextlib.suppress(RuntimeError):
        mx.async_eval(mx.linalg.inv(mx.zeros((4, 4))))
        x = mx.ones(4)
        for _ in range(attempt % 40):
            x = x + 1
        mx.eval(x)
    with contextlib.suppress(RuntimeError):
        mx.synchronize()
    were_lost = were_lost or ext._num_active_tasks() > 0
    runtime.make_room()
    assert ext._num_active_tasks() == 0
    if were_lost and attempt >= 40:
        break
assert were_lost, "MLX no longer loses tasks: `correct_num_tasks` can go"
"""


@linux_only
@can_fail
def test_tasks_that_an_error_of_a_stream_kept_from_being_queued_are_not_waited_for() -> None:
    run = subprocess.run(
        [sys.executable, "-c", LOST_TASKS], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]


@linux_only
@can_fail
def test_steps_that_find_an_error_of_a_stream_leave_no_lost_tasks(engine, monkeypatch) -> None:
    prompts = [list(range(10, 40)), list(range(200, 207))]
    expected = finish(engine, prompts, max_tokens=8)
    launch, launches = engine._executor._runner.launch, itertools.count()

    def lose_a_task() -> None:
        """Raises an error of the stream; most times once a task is lost."""
        for num_operations in range(100):
            try:
                mx.async_eval(mx.linalg.inv(mx.zeros((4, 4))))  # fails on the stream's thread
                x = mx.ones(4)
                for _ in range(num_operations):
                    x = x + 1
                mx.eval(x)
            except RuntimeError:
                if ext._num_active_tasks() > 0 or num_operations == 99:
                    raise

    def launch_after_an_error(*arguments):
        if next(launches) % 3 == 0:
            lose_a_task()
        return launch(*arguments)

    monkeypatch.setattr(engine._executor._runner, "launch", launch_after_an_error)
    num_faults = engine.stats().num_faults
    for _ in range(3):
        assert finish(engine, prompts, max_tokens=8) == expected
        assert ext._num_active_tasks() == 0
    assert engine.stats().num_faults > num_faults


@linux_only
def test_a_pool_larger_than_mlxs_memory_limit_raises_the_limit() -> None:
    before = mx.set_memory_limit(1 << 20)
    try:
        Engine(load(dtype="float32"), EngineConfig(max_num_seqs=1, kv_cache_memory=16 << 20))
        raised = mx.set_memory_limit(before)
        assert raised > mx.get_active_memory()
    finally:
        mx.set_memory_limit(before)


# Machines differ in what an address space leaves: the limit goes down until a step
# fails, and none may end the process.
LIMITED = """
import json, resource, sys
import mlx_paged
from mlx_paged import LLM, SamplingParams, ops, runtime
from mlx_paged.errors import OutOfMemoryError
import mlx.core as mx

llm = LLM(kv_cache_memory=16 << 20, max_num_seqs=8, max_num_batched_tokens=1024,
          enable_prefix_caching=False)
# (Tokens: the tokenizer is Rust, which ends a process that is out of memory.)
prompts = [[10 + i % 900 for i in range(n)] for n in (700, 20, 300, 5, 150, 450)]
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
line = next(line for line in open("/proc/self/status") if line.startswith("VmSize"))
size = int(line.split()[1]) * 1024
active = mx.get_active_memory()
rounds = []
held = []  # all but some 2 MiB of what the process has already and could use again
for extra in (1, 0):  # (in the first round there are no threads yet)
    resource.setrlimit(resource.RLIMIT_AS, (size + (extra << 20), resource.RLIM_INFINITY))
    if extra == 0:
        for num_bytes in (16 << 20, 1 << 20):
            try:
                while True:
                    mx.eval(mx.zeros((1,)))
                    held.append(mx.zeros((num_bytes,), mx.uint8))
                    mx.eval(held[-1])
            except OutOfMemoryError as error:
                assert error.num_bytes > 0
                held.pop()
        del held[-2:]
        runtime.make_room()
    outputs = llm.generate(prompts, params)
    rounds.append([[list(o.outputs[0].token_ids), str(o.outputs[0].error)] for o in outputs])
    faults = llm.stats().num_faults
held.clear()
runtime.make_room()
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
expected = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params)]
print(json.dumps([expected, rounds, faults, mx.get_active_memory() - active]))
"""


@linux_only
@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="AddressSanitizer reserves address space")
def test_a_process_without_address_space_lives_and_fails_only_what_does_not_fit() -> None:
    run = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    expected, rounds, num_faults, kept = json.loads(run.stdout.splitlines()[-1])
    assert [len(tokens) for tokens in expected] == [4] * 6
    assert num_faults > 0, "the limit was met nowhere"
    assert kept < 1 << 20, "what was not allocated counts as active"
    for outputs in rounds:
        for (tokens, error), wanted in zip(outputs, expected):
            assert tokens == wanted or "allocate" in error or "Memory" in error, (tokens, error)
