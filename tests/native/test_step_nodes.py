"""Nodes of whole steps for adapters, ranks and drafters: `lora`, collectives, and taps, which are
hidden states as further results. On the CPU and on the simulated GPU."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.ports import free_ports
from support.reference import DTYPES, ON_GPU
from support.simulated import launches, needs_simulator, sim_ext, simulated
from support.waiting import TIMEOUT

from mlx_paged import executables, ops, reference
from mlx_paged.doctor.self_test import exact

ROWS, K, N, RANK, ADAPTERS = 5, 64, 96, 8, 3
CHOSEN = [2, -1, 0, 2, 3]  # -1 and 3 are no adapters
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1e-2}

needs_cpu_steps = pytest.mark.skipif(
    executables.max_cpu_step_rows() == 0 or ON_GPU,
    reason="the device is a GPU, or this processor has no product of few rows",
)


def normal(rng: np.random.Generator, *shape: int, dtype: mx.Dtype) -> mx.array:
    array = mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)
    mx.eval(array)
    return array


def lora_inputs(rng: np.random.Generator, dtype: mx.Dtype, of_rows: mx.Dtype) -> list[mx.array]:
    return [
        normal(rng, ROWS, N, dtype=of_rows),
        normal(rng, ROWS, K, dtype=of_rows),
        mx.array(CHOSEN, mx.int32),
        normal(rng, ADAPTERS, RANK, K, dtype=dtype),
        normal(rng, ADAPTERS, RANK, N, dtype=dtype),
    ]


def assert_lora(got: mx.array, inputs: list[mx.array]) -> None:
    base, x, _, a, b = map(exact, inputs)
    expected = reference.lora(base, x, CHOSEN, a, b)
    assert got.dtype == inputs[0].dtype
    errors = reference.relative_errors(exact(got), expected)
    assert errors.max() < TOLERANCE[inputs[0].dtype]
    for row in (1, 4):  # rows without an adapter keep their bits
        np.testing.assert_array_equal(exact(got)[row], base[row])


# --- Adapters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("of_rows", [mx.float32, None], ids=["float32 rows", "the same"])
def test_each_row_has_its_adapter(rng, dtype: mx.Dtype, of_rows: mx.Dtype | None) -> None:
    inputs = lora_inputs(rng, dtype, of_rows or dtype)
    together = ops.lora(*inputs, stream=mx.cpu)
    assert_lora(together, inputs)
    for i in range(ROWS):  # the sums do not depend on the company
        alone = [a[i : i + 1] for a in inputs[:3]] + inputs[3:]
        row = ops.lora(*alone, stream=mx.cpu)
        np.testing.assert_array_equal(exact(row)[0], exact(together)[i])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("k", "n", "rank"), [(64, 96, 8), (77, 101, 19)])
def test_rows_of_one_adapter_share_its_matrices(
    rng, dtype: mx.Dtype, k: int, n: int, rank: int
) -> None:
    """A row has the same bits alone, and with any number of others."""
    chosen = [0, 0, 1, 0, 0, 0, 0, 1, 0, 2, -1, 1, 0] * 6
    base, x = (
        normal(rng, len(chosen), n, dtype=mx.float32),
        normal(rng, len(chosen), k, dtype=mx.float32),
    )
    a, b = normal(rng, 3, rank, k, dtype=dtype), normal(rng, 3, rank, n, dtype=dtype)
    together = exact(ops.lora(base, x, mx.array(chosen, mx.int32), a, b, stream=mx.cpu))
    expected = reference.lora(exact(base), exact(x), chosen, exact(a), exact(b))
    assert reference.relative_errors(together, expected).max() < 1e-5
    for i, adapter in enumerate(chosen[:13]):
        ids = mx.array([adapter], mx.int32)
        alone = ops.lora(base[i : i + 1], x[i : i + 1], ids, a, b, stream=mx.cpu)
        np.testing.assert_array_equal(exact(alone)[0], together[i])


@needs_cpu_steps
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("are_inputs", [False, True], ids=["constants", "inputs"])
def test_adapters_in_a_cpu_executable(rng, dtype: mx.Dtype, are_inputs: bool) -> None:
    """The same bits as the operation; adapters may be inputs, so that others replace them."""
    inputs = lora_inputs(rng, dtype, mx.float32)
    weight = normal(rng, N, K, dtype=dtype)

    def build(base, x, adapters, a, b) -> mx.array:
        return ops.lora(base + ops.linear(x, weight), x, adapters, a, b)

    given = inputs if are_inputs else inputs[:3]
    unknown = executables.placeholders(given)
    executable = executables.CpuExecutable(unknown, [build(*unknown, *inputs[len(given) :])])
    assert executable.foreign == []
    [got] = executable(given)
    np.testing.assert_array_equal(np.array(got), np.array(build(*inputs)))


def alone(outs: list[mx.array], _: mx.array) -> mx.array:
    return mx.concatenate(outs, axis=1)


def gated(outs: list[mx.array], _: mx.array) -> mx.array:
    return ops.silu_mul(*outs)


def added(outs: list[mx.array], base: mx.array) -> mx.array:
    return mx.concatenate([base + out for out in outs], axis=1)


@needs_cpu_steps
@pytest.mark.parametrize("finish", [alone, gated, added])
@pytest.mark.parametrize("is_quantized", [False, True], ids=["float32", "4 bits"])
def test_a_product_adds_its_adapters_on_the_cpu(rng, finish, is_quantized: bool) -> None:
    """The bits are those of the operations one by one; one phase more than without adapters."""
    rows, k, n, rank = 37, 160, 208, 12
    chosen = rng.integers(-1, ADAPTERS + 1, rows).astype(np.int32)
    x, base = normal(rng, rows, k, dtype=mx.float32), normal(rng, rows, n, dtype=mx.float32)
    bias = normal(rng, n, dtype=mx.float32)
    weights = [normal(rng, n, k, dtype=mx.float32) for _ in range(2)]
    stacks = [
        [normal(rng, ADAPTERS, rank, size, dtype=mx.float32) for size in (k, n)] for _ in range(2)
    ]
    packed = [mx.quantize(weight, group_size=32, bits=4) for weight in weights]
    mx.eval(packed)

    def product(x: mx.array, i: int) -> mx.array:
        if is_quantized:
            return ops.quantized_linear(x, *packed[i], group_size=32, bits=4)
        return ops.linear(x, weights[i], bias)

    def build(x: mx.array, base: mx.array, adapters: mx.array, adapts: bool = True) -> mx.array:
        outs = [product(x, i) for i in range(2)]
        if adapts:
            outs = [ops.lora(out, x, adapters, *stacks[i]) for i, out in enumerate(outs)]
        return finish(outs, base)

    given = [x, base, mx.array(chosen)]
    unknown = executables.placeholders(given)
    adapted, plain = (
        executables.CpuExecutable(unknown, [build(*unknown, adapts)]) for adapts in (True, False)
    )
    assert adapted.num_phases == plain.num_phases + 1
    [got], [without] = adapted(given), plain(given)
    np.testing.assert_array_equal(np.array(got), np.array(build(*given)))
    has_none = (chosen < 0) | (chosen >= ADAPTERS)
    np.testing.assert_array_equal(np.array(got)[has_none], np.array(without)[has_none])
    assert (np.array(got) != np.array(without))[~has_none].any(axis=1).all()


@needs_cpu_steps
def test_a_product_that_others_read_keeps_its_sums(rng) -> None:
    _, x, adapters, a, b = lora_inputs(rng, mx.float32, mx.float32)
    weight = normal(rng, N, K, dtype=mx.float32)

    def build(x: mx.array, adapters: mx.array) -> list[mx.array]:
        out = ops.linear(x, weight)
        return [ops.lora(out, x, adapters, a, b), out]

    unknown = executables.placeholders([x, adapters])
    executable = executables.CpuExecutable(unknown, build(*unknown))
    for got, expected in zip(executable([x, adapters]), build(x, adapters), strict=True):
        np.testing.assert_array_equal(np.array(got), np.array(expected))


@needs_simulator
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adapters_on_the_simulated_gpu(rng, dtype: mx.Dtype) -> None:
    """As an operation, and in an executable, whose second run is a replay."""
    inputs = lora_inputs(rng, dtype, dtype)
    with simulated():
        alone = ops.lora(*inputs)
        mx.eval(alone)
        kernels = [launch["kernel"].rpartition("_")[0] for launch in launches()]
        unknown = executables.placeholders(inputs)
        executable = executables.GpuExecutable(unknown, [ops.lora(*unknown)])
        for _ in range(3):
            [got] = executable(inputs)
            mx.eval(got)
            np.testing.assert_array_equal(exact(got), exact(alone))
    assert kernels == ["lora_down", "lora_up"]
    assert_lora(alone, inputs)


@pytest.mark.skipif(not ops.has_cuda(), reason="needs an NVIDIA GPU as the device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adapters_on_a_gpu(rng, dtype: mx.Dtype) -> None:
    inputs = lora_inputs(rng, dtype, dtype)
    alone = ops.lora(*inputs)
    unknown = executables.placeholders(inputs)
    executable = executables.GpuExecutable(unknown, [ops.lora(*unknown)])
    for _ in range(3):
        [got] = executable(inputs)
        mx.eval(got)
        np.testing.assert_array_equal(exact(got), exact(alone))
    assert_lora(alone, inputs)


@pytest.mark.skipif(not ops.has_cuda(), reason="needs an NVIDIA GPU as the device")
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_adapters_of_products_on_a_gpu(rng, dtype: mx.Dtype) -> None:
    """Adapters of three layers of one input, before a gate, and before a residual."""
    rows, k, n, rank = 33, 2112, 1056, 16
    chosen = ([2, 2, 2, 2, 0, 1, 2, 0, -1, 1, 3, 1, -1, -1, -1, -1] * 3)[:rows]
    x, more = normal(rng, rows, k, dtype=dtype), normal(rng, rows, n, dtype=dtype)
    layers = [
        [normal(rng, *shape, dtype=dtype) / shape[-1] ** 0.5
         for shape in ((n, k), (ADAPTERS, rank, k), (ADAPTERS, rank, n))]
        for _ in range(3)
    ]  # fmt: skip
    mx.eval(layers)
    inputs = [x, mx.array(chosen, mx.int32), more]

    def run(build: Callable) -> list[np.ndarray]:
        unknown = executables.placeholders(inputs)
        outs = executables.GpuExecutable(unknown, build(*unknown))(inputs)
        mx.eval(outs)
        return [exact(out) for out in outs]

    def adapted(x: mx.array, slots: mx.array, _: mx.array) -> list[mx.array]:
        return [ops.lora(ops.linear(x, w), x, slots, a, b) for w, a, b in layers]

    bases = run(lambda x, slots, more: [ops.linear(x, w) for w, _, _ in layers])
    made = run(adapted)
    for out, base, (_, a, b) in zip(made, bases, layers, strict=True):
        expected = reference.lora(base, exact(x), chosen, exact(a), exact(b))
        assert reference.relative_errors(out, expected).max() < TOLERANCE[dtype]
        for i in (8, 10, 12):  # without an adapter
            np.testing.assert_array_equal(out[i], base[i])
    del layers[2]
    [gated] = run(lambda *unknown: [ops.silu_mul(*adapted(*unknown))])
    expected = made[1] * made[0] / (1 + np.exp(-made[0]))
    assert reference.relative_errors(gated, expected).max() < TOLERANCE[dtype]
    del layers[1]
    [added] = run(lambda *unknown: [unknown[2] + adapted(*unknown)[0]])
    assert reference.relative_errors(added, exact(more) + made[0]).max() < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i[2].astype(mx.float32), "adapters"),
        (lambda i: i[2][:2], "adapters"),
        (lambda i: i[3][:, :, :4], "a must"),
        (lambda i: i[3].astype(mx.int32), "a must"),
        (lambda i: i[4][:, :2], "b must"),
        (lambda i: i[0][0], "base"),
        (lambda i: i[1].astype(mx.bfloat16), "x must"),
    ],
)
def test_wrong_adapters_are_refused(rng, change: Callable, message: str) -> None:
    inputs = lora_inputs(rng, mx.float32, mx.float32)
    wrong = change(inputs)
    at = {"adapters": 2, "a must": 3, "b must": 4, "base": 0, "x must": 1}[message]
    inputs[at] = wrong
    with pytest.raises(ValueError, match=r"\[lora\]"):
        ops.lora(*inputs, stream=mx.cpu)


def test_only_the_selected_rows_of_adapters_are_computed(rng) -> None:
    inputs = lora_inputs(rng, mx.float32, mx.float32)
    rows = mx.array([3, 0], mx.int32)
    base, x, adapters, a, b = inputs
    out = ops.lora(base * 2.0, x * 2.0, adapters, a, b)
    selected = ops.select_rows(out, rows)
    np.testing.assert_allclose(np.array(selected), np.array(out)[[3, 0]], rtol=1e-6)


# --- Taps -----------------------------------------------------------------------------------------


def layers(rng: np.random.Generator, dtype: mx.Dtype) -> Callable[[mx.array], list[mx.array]]:
    """A build of four residual layers that returns logits, and hidden states of two layers."""
    weights = [normal(rng, K, K, dtype=dtype) * 0.1 for _ in range(4)]
    scale, head = mx.ones((K,), dtype), normal(rng, N, K, dtype=dtype)
    mx.eval(weights)

    def build(x: mx.array) -> list[mx.array]:
        taps = []
        for i, weight in enumerate(weights):
            x = x + ops.linear(ops.rms_norm(x, scale, 1e-5), weight)
            if i in (0, 2):
                taps.append(x)
        return [ops.linear(ops.rms_norm(x, scale, 1e-5), head), *taps]

    return build


@needs_cpu_steps
def test_taps_of_a_cpu_executable(rng) -> None:
    build, x = layers(rng, mx.float32), normal(rng, ROWS, K, dtype=mx.float32)
    unknown = executables.placeholders([x])
    executable = executables.CpuExecutable(unknown, build(*unknown))
    for _ in range(2):
        got, expected = executable([x]), build(x)
        assert [a.shape for a in got] == [(ROWS, N), (ROWS, K), (ROWS, K)]
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_array_equal(np.array(a), np.array(b))
        x = x * 2.0


@needs_cpu_steps
def test_a_tap_may_be_any_result_twice(rng) -> None:
    """Also a view, the input of an operation of MLX, and the result itself."""
    x = normal(rng, ROWS, K, dtype=mx.float32)

    def build(x: mx.array) -> list[mx.array]:
        hidden = x * 2.0
        out = mx.sin(hidden)
        return [out, hidden, out, hidden[:, :8], hidden.reshape(ROWS, 8, 8)]

    unknown = executables.placeholders([x])
    executable = executables.CpuExecutable(unknown, build(*unknown))
    for a, b in zip(executable([x]), build(x), strict=True):
        np.testing.assert_array_equal(np.array(a), np.array(b))


@needs_simulator
@pytest.mark.parametrize("in_product", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_taps_of_a_gpu_executable(rng, dtype: mx.Dtype, in_product: bool) -> None:
    """All launches but the last ones are captured: taps are copied behind them."""
    build, x = layers(rng, dtype), normal(rng, ROWS, K, dtype=dtype)
    with simulated():
        unknown = executables.placeholders([x])
        outputs = build(*unknown)
        executable = executables.GpuExecutable(unknown, outputs, residual_in_product=in_product)
        before = sim_ext.step_counts()
        for _ in range(4):
            launches()
            got, expected = executable([x]), build(x)
            mx.eval(got)
            ran = [launch["kernel"] for launch in launches()]
            mx.eval(expected)
            for a, b in zip(got, expected, strict=True):
                np.testing.assert_allclose(exact(a), exact(b), rtol=0.05, atol=0.05)
            x = x * 2.0
            mx.eval(x)
        after = sim_ext.step_counts()
    assert [name.startswith("gather_rows") for name in ran[-2:]] == [True, True]
    # The first run launches, the second one captures and replays.
    assert after["replays"] - before["replays"] == 3


# --- Collectives ----------------------------------------------------------------------------------

RANK_PROGRAM = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
import mlx_paged
import mlx.core as mx
import numpy as np
from mlx_paged import executables, ops
from support.simulated import simulated, sim_ext

group = mx.distributed.init(strict=True, backend="ring")
rank, size = group.rank(), group.size()
mx.random.seed(7)
x = mx.random.normal((5, 64))
weights = [mx.random.normal((64, 64)) * 0.1 for _ in range(2)]
# Each rank has a part of the first layer's outputs and of the second one's inputs.
part = slice(64 * rank // size, 64 * (rank + 1) // size)
first, second = mx.contiguous(weights[0][part]), mx.contiguous(weights[1][:, part])
ones = mx.ones((64,))
mx.eval(x, weights, first, second, ones)

def build(x, gathers):
    out = ops.linear(ops.linear(x, first), second)
    out = ops.rms_norm(x + mx.distributed.all_sum(out, group=group), ones, 1e-5)
    if gathers:
        out = mx.distributed.all_gather(out, group=group)
    return ops.linear(out, weights[1])

results = {}
for gathers in (False, True):
    for kind in sys.argv[2].split(","):
        def steps():
            unknown = executables.placeholders([x])
            out = build(*unknown, gathers)
            make = executables.CpuExecutable if kind == "cpu" else executables.GpuExecutable
            executable = make(unknown, [out])
            assert kind == "gpu" or executable.foreign == [], executable.foreign
            found = []
            for i in range(3):
                given = x * (i + 1.0)
                mx.eval(given)
                [got] = executable([given])
                mx.eval(got)
                expected = build(given, gathers)
                mx.eval(expected)
                found.append(float(mx.abs(got - expected).max()))
            return found
        if kind == "cpu":
            results[f"{kind} {gathers}"] = steps()
        else:
            with simulated():
                counts = sim_ext.step_counts()
                results[f"{kind} {gathers}"] = steps()
                results[f"replays {gathers}"] = sim_ext.step_counts()["replays"] - counts["replays"]
whole = ops.rms_norm(x + (x @ weights[0].T) @ weights[1].T, ones, 1e-5)
alone = build(x, False)
results["whole"] = float(mx.abs(alone - whole @ weights[1].T).max())

# With memory that their GPUs share, sums that fit are kernels of a step. (Nothing runs them here.)
def launches(rows, dtype):
    [unknown] = executables.placeholders([mx.zeros((rows, 64), dtype)])
    weight = mx.ones((64,), dtype)
    out = sim_ext.all_sum(ops.rms_norm(unknown, weight, 1e-5), group=group)
    found = sim_ext.cuda_executable_launches([unknown], [ops.rms_norm(out, weight, 1e-5)])
    return [(launch["kernel"], launch["grid"][0], launch["constants"].hex()) for launch in found]

before = launches(1, mx.float16)
sim_ext.use_peer_memory(group, [0x1111, 0x2222])
sums = [launches(*of) for of in ((1, mx.float16), (99, mx.bfloat16), (1, mx.float32))]
large = launches(50_000, mx.float16)
sim_ext.forget_peer_memory(group)
results["sums"] = [before, *sums, large, launches(1, mx.float16)]
print("RESULT", json.dumps(results))
"""


@needs_cpu_steps
@needs_simulator
def test_ranks_reduce_and_gather_within_steps(tmp_path: Path) -> None:
    """Two processes over MLX's ring. A collective ends a captured part of a GPU's step."""
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
    program = tmp_path / "rank.py"
    program.write_text(RANK_PROGRAM)
    paths = json.dumps([str(Path(__file__).parents[1])])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), paths, "cpu,gpu"],
            env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=TIMEOUT) for rank in ranks]
    for number, (rank, (output, errors)) in enumerate(zip(ranks, outputs, strict=True)):
        assert rank.returncode == 0, errors[-3000:]
        [line] = [line for line in output.splitlines() if line.startswith("RESULT ")]
        results = json.loads(line.removeprefix("RESULT "))
        for name in ("cpu False", "cpu True"):
            assert max(results[name]) == 0, "the same bits as the graph"
        for name in ("gpu False", "gpu True", "whole"):
            assert np.max(results[name]) < 1e-4
        assert results["replays False"] >= 2, "the parts before and after the collective"
        before, *sums, large, forgotten = results["sums"]
        assert before[1][0] == large[1][0] == forgotten[1][0] == "Sum AllReduce"
        names = ["peer_sum_float16_2", "peer_sum_bfloat16_2", "peer_sum_float32_2"]
        assert [launches[1][0] for launches in sums] == names
        assert [launches[1][1] for launches in sums] == [1, 2, 1], "blocks"
        params = bytes.fromhex(sums[1][1][2])
        assert struct.unpack("8Qiiii", params) == (0x1111, 0x2222, *[0] * 6, number, 99 * 8, 0, 0)
