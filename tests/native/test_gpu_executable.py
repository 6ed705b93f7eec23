"""Decode steps as one list of launches, on the simulated GPU: against the graphs that they were
read from."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support import family_configs
from support.gpu_executables import with_programs
from support.models import GREEDY, StepDriver, step_of, tiny_config, tiny_model
from support.platforms import CUDA_PROGRAMS, run_as_on
from support.quantized import raw
from support.simulated import launches, needs_simulator, sim_ext, simulated
from test_gpu_program_kernels import run, values_of

from mlx_paged import executables, ops
from mlx_paged.engine.sampling.sequence_sampler import SamplingRow
from mlx_paged.kernels import set_piece_tokens
from mlx_paged.model.graph_runner import Refusals, Repeat
from mlx_paged.model.kv_formats import FORMATS
from mlx_paged.model.plan import build_plan
from mlx_paged.model.taps import FINAL

pytestmark = needs_simulator

WIDE = {"hidden_size": 128}  # (where the head dim is hidden_size / heads)
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": tiny_config("llama", head_dim=32),
    "llama with biases": tiny_config(
        "llama", head_dim=32, tied=False, attention_bias=True, mlp_bias=True
    ),
    "traditional RoPE": tiny_config("llama", head_dim=32, rope_traditional=True),
    "windows": tiny_config(
        "llama",
        head_dim=32,
        layer_types=["full_attention", "sliding_attention"] * 2,
        sliding_window=8,
    ),
    "qwen2": tiny_config("qwen2", **WIDE),
    "qwen3": tiny_config("qwen3", head_dim=32, tied=False),
    "phi3": tiny_config("phi3", **WIDE),  # (its projections are one matrix)
    "smollm3": tiny_config("smollm3", head_dim=32),  # (layers without RoPE)
}


def driver_of(config: dict[str, Any]) -> StepDriver:
    return StepDriver(tiny_model(config), config["model_type"], block_size=8)


def new_tokens(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(0, 96, count).tolist()


# --- Whole steps ----------------------------------------------------------------------------------


def steps_of_both(
    rng: np.random.Generator,
    ours: StepDriver,
    graphs: StepDriver,
    works: list[dict[str, int]],
    tolerance: float,
) -> Iterator[list[np.ndarray]]:
    """Yields our logits of each step, and checks them against those of graphs."""
    for work in works:
        tokens = {sequence: new_tokens(rng, count) for sequence, count in work.items()}
        expected = graphs.step(tokens)
        with simulated():
            actual = ours.step(tokens)
        for sequence, logits in expected.items():
            np.testing.assert_allclose(actual[sequence], logits, atol=tolerance)
        yield [actual[sequence] for sequence in tokens]


WORKS = [{"a": 7, "b": 1}, {"a": 1, "b": 1, "c": 9}, {"a": 1, "b": 1, "c": 1}]


@pytest.mark.one_in(7)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_gives_what_its_graph_gives(rng, name: str) -> None:
    ours, graphs = driver_of(CONFIGS[name]), driver_of(CONFIGS[name])
    steps = with_programs(ours, residual_in_product=len(name) % 2 == 0)
    for logits in steps_of_both(rng, ours, graphs, WORKS, 2e-5):
        greedy, rows = steps.newest_greedy(), np.array(logits)
        for found in (greedy.tokens, greedy.reported):
            np.testing.assert_array_equal(np.array(found), rows.argmax(axis=1))
        np.testing.assert_array_equal(np.array(greedy.largest), rows.max(axis=1))
    for mine, theirs in zip(ours.caches, graphs.caches, strict=True):
        for pool, other in ((mine.key_pool, theirs.key_pool), (mine.value_pool, theirs.value_pool)):
            np.testing.assert_allclose(np.array(pool), np.array(other), atol=2e-5)


def test_hidden_states_are_further_outputs(rng) -> None:
    """The inputs of layers are sums that a program otherwise keeps to itself."""
    ours, graphs = driver_of(CONFIGS["llama"]), driver_of(CONFIGS["llama"])
    steps = with_programs(ours)
    for driver in (ours, graphs):
        driver.runner.model.tap([1, 3, FINAL])
    for work in ({"a": 7, "b": 1}, {"a": 1, "b": 1}):
        tokens = {name: new_tokens(rng, count) for name, count in work.items()}
        hidden = []
        for driver in (graphs, ours):
            rows = [driver.schedule(name, own) for name, own in tokens.items()]
            if driver is graphs:
                launched, expected = driver.launch(*rows)
            else:
                with simulated():
                    launched, actual = driver.launch(*rows)
            assert launched.hidden is not None
            hidden.append(np.array(launched.hidden))
        np.testing.assert_allclose(hidden[1], hidden[0], atol=2e-5)
        for name, logits in expected.items():
            np.testing.assert_allclose(actual[name], logits, atol=2e-5)
    assert len(steps.made) == 2


@pytest.mark.one_in(16)
@pytest.mark.parametrize("name", ["llama", "qwen3", "smollm3", "windows"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_steps_with_quantized_pools(rng, kv_format: str, name: str) -> None:
    """Keys and values are quantized and rotated as they are without a program."""
    ours, graphs = (
        StepDriver(
            tiny_model(CONFIGS[name]), CONFIGS[name]["model_type"], block_size=8,
            kv_format=FORMATS[kv_format],
        )
        for _ in range(2)
    )  # fmt: skip
    steps = with_programs(ours)
    assert len(list(steps_of_both(rng, ours, graphs, WORKS, 1e-4))) == len(steps.made) == 3
    for mine, theirs in zip(ours.caches, graphs.caches, strict=True):
        for pool, other in ((mine.key_pool, theirs.key_pool), (mine.value_pool, theirs.value_pool)):
            # (Products in another order of sums: a number between two codes may get the other.)
            assert (raw(pool) != raw(other)).mean() < 1e-3


# The families whose steps are executables, with the settings of `family_configs`, and the
# operations that keep some others from it.
FAMILIES = sorted(set(family_configs.compiled_families("on a GPU")) - set(CONFIGS))
REFUSED_FAMILIES = {
    "cohere": "layer_norm",
    "gemma2": "Multiply",  # scaled embeddings
    "gpt_oss": "ArgPartition",  # experts with another activation
    "olmo2": "Add",  # of what has been normed
    "qwen2_moe": "Sigmoid",  # a shared expert
}


def family_driver(family: str) -> StepDriver:
    fields = {"hidden_size": 128, "head_dim": 32, **family_configs.CONFIGS[family]}
    return driver_of({**family_configs.BASE, **fields, "model_type": family})


@pytest.mark.one_in(16)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_are_programs(rng, family: str) -> None:
    ours, graphs = family_driver(family), family_driver(family)
    steps = with_programs(ours)
    works = [{"a": 9, "b": 1}, {"a": 1, "b": 1}]
    assert len(list(steps_of_both(rng, ours, graphs, works, 5e-5))) == len(steps.made) == 2


@pytest.mark.parametrize("family", REFUSED_FAMILIES)
def test_families_that_are_none(family: str) -> None:
    driver = family_driver(family)
    with_programs(driver)
    reason = f"this graph: the operation {REFUSED_FAMILIES[family]}$"
    with simulated(), pytest.raises(ValueError, match=reason):
        driver.step({"a": [1], "b": [2]})


@pytest.mark.parametrize("has_alibi", [False, True])
def test_sinks(rng, has_alibi: bool) -> None:
    """No dense family of mlx-lm has them."""
    queries, _ = values_of(rng, 3, 4, 64, dtype=mx.float32)
    pools = [values_of(rng, 4, 8, 2, 64, dtype=mx.float32)[0] for _ in range(2)]
    keys, new_values = (values_of(rng, 3, 2, 64, dtype=mx.float32)[0] for _ in range(2))
    sinks, _ = values_of(rng, 4, dtype=mx.float32)
    identity = mx.eye(256)
    plan = build_plan([[1], [2], [3]], [3, 8, 5], [1, 1, 1], block_size=8)
    arrays = [getattr(plan, f) for f in plan.__dataclass_fields__ if f != "bounds"]
    mx.eval(identity, arrays)

    def build(queries, keys, new_values, *rest: mx.array) -> list[mx.array]:
        *arrays, key_pool, value_pool = rest
        plan = ops.AttentionPlan(*arrays)
        written = ops.write_kv(key_pool, value_pool, keys, new_values, plan.slot_mapping)
        slopes = mx.array([0.5, -0.1, 0.0, 2.0]) if has_alibi else None
        options = {"window": 4, "sinks": sinks, "alibi_slopes": slopes}
        out = ops.paged_attention(queries, *written, plan, scale=0.1, **options)
        return [ops.linear(out.reshape(3, -1), identity), *written]

    copies = [mx.array(np.array(pool)) for pool in pools]
    mx.eval(copies)
    expected = build(queries, keys, new_values, *arrays, *copies)
    mx.eval(expected)
    actual, _ = run(build, queries, keys, new_values, *arrays, *pools)
    for mine, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.array(mine), np.array(theirs), atol=1e-5)


def kernels_of(
    config: dict[str, Any], rows: int, *, dtype: mx.Dtype, cuda: bool, **options: Any
) -> list[str]:
    """The launches of a decode step of this many rows."""
    model = tiny_model(config)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    driver = StepDriver(model, config["model_type"], block_size=16, num_blocks=2 + rows, **options)
    with simulated():
        steps = with_programs(driver)
        driver.step({str(i): [i] for i in range(rows)})
        program, inputs = steps.made[-1]
        described = sim_ext.gpu_executable_launches(program._executable, inputs, cuda=cuda)
    return [launch["kernel"] for launch in described]


@pytest.mark.one_in(12)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("rows", "tiles"), [(1, 1), (8, 1), (16, 2), (17, 4), (60, 8)])
def test_a_layer_is_few_kernels_with_cuda(rows: int, tiles: int, family: str) -> None:
    """Seven; heads that are normed (qwen3) are rotated and written by a kernel of their own."""
    config = tiny_config(family, head_dim=64, tied=False, num_hidden_layers=3, vocab_size=112)
    kernels = kernels_of(config, rows, dtype=mx.bfloat16, cuda=True)
    linear = f"linear_stream_bfloat16_{tiles}"
    attention = "paged_decode_tensor_bfloat16_64_n1"
    norm, write, table = "add_rms_norm_bfloat16", "rope_write_bfloat16", "gather_rows_bfloat16"
    layer = [norm, linear, attention, linear, norm, linear, linear]
    assert len(layer) == 7  # (and a merge where contexts are split)
    layer += [write] if family == "qwen3" else []
    ends = [norm, table, linear, "greedy_tokens_bfloat16"]
    assert sorted(kernels) == sorted([*layer * 3, table, "rope_rotations", *ends])
    assert kernels[-4:] == ends


MIXTURE: dict[str, Any] = {
    **tiny_config("qwen3", head_dim=64, tied=False, num_hidden_layers=3, vocab_size=112),
    **{"model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": []},
    **{"moe_intermediate_size": 32, "norm_topk_prob": True},
    **{"num_experts": 8, "num_experts_per_tok": 4},
}


@pytest.mark.one_in(7)
@pytest.mark.parametrize(("rows", "tiles", "linear_tiles"), [(1, 1, 1), (9, 2, 2), (60, 8, 8)])
def test_a_mixture_is_few_kernels_with_cuda(rows: int, tiles: int, linear_tiles: int) -> None:
    """Four, besides the norm and the router's product."""
    kernels = kernels_of(MIXTURE, rows, dtype=mx.bfloat16, cuda=True)
    linear, expert = f"linear_stream_bfloat16_{linear_tiles}", f"expert_stream_bfloat16_{tiles}"
    norm, write = "add_rms_norm_bfloat16", "rope_write_bfloat16"
    attention = [norm, linear, write, "paged_decode_tensor_bfloat16_64_n1", linear]
    mixture = [norm, linear, "route_experts_bfloat16", expert, expert, "combine_experts_bfloat16"]
    of_layers = [k for k in kernels if k not in ("gather_rows_bfloat16", "rope_rotations")]
    assert of_layers[: 3 * 11] == (attention + mixture) * 3


def test_a_mixture_of_many_rows_has_the_kernels_of_few_with_cuda() -> None:
    kernels = Counter(kernels_of(MIXTURE, 130, dtype=mx.bfloat16, cuda=True))
    assert kernels["route_experts_bfloat16"] == kernels["combine_experts_bfloat16"] == 3
    assert kernels["expert_stream_bfloat16_8"] == 6 and kernels["library_product"]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_layer_of_quantized_pools_with_cuda(kv_format: str) -> None:
    """Heads are rotated, then quantized, and queries rotated as integer keys are."""
    config = tiny_config("llama", head_dim=64, tied=False, num_hidden_layers=3, vocab_size=112)
    kernels = kernels_of(
        config, 8, dtype=mx.bfloat16, cuda=True, kv_format=FORMATS[kv_format]
    )  # fmt: skip
    suffix = {"int8_k_int4_v": "int8_int4"}.get(kv_format, kv_format)
    linear, norm = "linear_stream_bfloat16_1", "add_rms_norm_bfloat16"
    write = ["rope_write_bfloat16", f"quantize_rows_bfloat16_64_{suffix}"]
    write += [] if kv_format == "fp8" else ["rotate_rows_bfloat16_64"]
    attention = f"paged_decode_tensor_bfloat16_64_n1_{suffix}"
    layer = [norm, linear, *write, attention, linear, norm, linear, linear]
    of_layers = [k for k in kernels if k not in ("gather_rows_bfloat16", "rope_rotations")]
    assert of_layers[: 2 * len(layer)] == layer * 2


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_products_of_many_rows_are_a_librarys_with_cuda(family: str) -> None:
    """Keys and values in one call, as gate and up."""
    config = tiny_config(family, head_dim=64, tied=False, num_hidden_layers=3, vocab_size=112)
    kernels = kernels_of(config, 65, dtype=mx.bfloat16, cuda=True)
    product, attention = "library_product", "paged_decode_tensor_bfloat16_64_n1"
    norm, write, table = "add_rms_norm_bfloat16", "rope_write_bfloat16", "gather_rows_bfloat16"
    layer = [norm, product, product, write, attention, product]
    layer += [norm, product, "silu_mul_bfloat16", product]
    ends = [norm, table, product, "greedy_tokens_bfloat16"]
    assert sorted(kernels) == sorted([*layer * 3, table, "rope_rotations", *ends])
    first_layer = [kernel for kernel in kernels if kernel not in (table, "rope_rotations")]
    assert first_layer[: len(layer)] == layer


# --- Steps that are replayed ----------------------------------------------------------------------


def products_of(rng: np.random.Generator, rows: int, size: int) -> tuple[Any, mx.array, mx.array]:
    """A program of two products, an input, and what it gives. (Within `simulated`.)"""
    x, _ = values_of(rng, rows, size, dtype=mx.float32)
    weights = [values_of(rng, size, size, dtype=mx.float32)[0] for _ in range(2)]

    def build(x: mx.array) -> mx.array:
        return ops.linear(ops.linear(x, weights[0]), weights[1])

    [unknown] = executables.placeholders([x])
    program = executables.GpuExecutable([unknown], [build(unknown)])
    expected = build(x)
    mx.eval(expected)
    return program, x, expected


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Fills in the steps, captures and replays of programs."""
    before, counts = sim_ext.step_counts(), {}
    yield counts
    after = sim_ext.step_counts()
    counts |= {name: after[name] - before[name] for name in ("steps", "captures", "replays")}


def test_a_step_is_captured_when_it_repeats_and_its_results_are_new_arrays(rng) -> None:
    with simulated():
        program, x, expected = products_of(rng, 3, 64)
        with counted() as first:
            results = [program([x])[0]]
            mx.eval(results)
        assert first == {"steps": 1, "captures": 0, "replays": 0}
        with counted() as others:
            results += [program([x * scale])[0] for scale in (2, 3)]
            mx.eval(results)
        assert others == {"steps": 2, "captures": 1, "replays": 2}
        for scale, result in zip((1, 2, 3), results, strict=True):
            np.testing.assert_allclose(
                np.array(result), np.array(expected) * scale, rtol=1e-3, atol=1e-3
            )


def test_a_capture_that_fails_leaves_nothing(rng) -> None:
    with simulated():
        program, x, expected = products_of(rng, 3, 64)
        mx.eval(program([x])[0])
        sim_ext.fail_next_capture()
        with pytest.raises(RuntimeError, match="a capture that fails"):
            mx.eval(program([x])[0])
        with counted() as found:
            [result] = program([x])
            mx.eval(result)
        assert found == {"steps": 1, "captures": 1, "replays": 1}
        np.testing.assert_allclose(np.array(result), np.array(expected), rtol=1e-5)


def test_programs_share_their_memory_and_give_it_back(rng) -> None:
    gc.collect()
    with simulated():
        before = sim_ext.step_counts()["memory"]
        made = [products_of(rng, rows, 256) for rows in (8, 1, 2, 3, 4, 5, 6, 7, 8)]
        for _ in range(2):
            for program, x, expected in made:
                [result] = program([x])
                np.testing.assert_allclose(
                    np.array(result), np.array(expected), rtol=1e-3, atol=1e-2
                )
        largest = 2 * 8 * 256 * 4  # its input and the first product
        memory = sim_ext.step_counts()["memory"]
        assert largest <= memory - before <= largest + 4096
        del made, program
        gc.collect()
        assert sim_ext.step_counts()["memory"] == before


def test_memory_that_grows_does_so_in_few_steps(rng) -> None:
    """Graphs captured earlier keep their memory, together no more than the newest."""
    with simulated():
        before = sim_ext.step_counts()["memory"]
        made = [products_of(rng, rows, 256) for rows in range(1, 9)]
        for _ in range(2):
            for program, x, expected in made:
                [result] = program([x])
                np.testing.assert_allclose(
                    np.array(result), np.array(expected), rtol=1e-3, atol=1e-2
                )
        assert sim_ext.step_counts()["memory"] - before <= 4 * 2 * 8 * 256 * 4


def test_attention_that_is_launched_otherwise_is_captured_anew(rng) -> None:
    driver, graphs = driver_of(CONFIGS["llama"]), driver_of(CONFIGS["llama"])
    for each in (driver, graphs):
        with simulated():
            each.step({"a": new_tokens(np.random.default_rng(1), 20), "b": [3]})
    with simulated():
        steps = with_programs(driver)
        driver.step({"a": [1], "b": [2]})
        graphs.step({"a": [1], "b": [2]})
        program, inputs = steps.made[-1]
        with counted() as found:
            for _ in range(3):
                logits, *_ = program([*inputs[:-8], *driver.runner.model.pools()])
                mx.eval(logits)
        assert found == {"steps": 3, "captures": 1, "replays": 3}


def test_a_program_takes_a_plan_of_any_size(rng) -> None:
    """Contexts grow, and their pieces and merges become more. The memory of the inputs grows with
    them, and is captured anew."""
    driver, graphs = driver_of(CONFIGS["llama"]), driver_of(CONFIGS["llama"])
    steps = driver.runner.model._graph_runner
    run_as_on(driver.runner.model, **CUDA_PROGRAMS)
    for name, count in (("a", 2), ("b", 300)):
        list(steps_of_both(rng, driver, graphs, [{name: count}], 2e-5))
    num_programs = len(steps._graphs)
    with simulated():
        set_piece_tokens(8)
    try:
        with counted() as found:
            # The pieces of contexts of some tokens, and of some more than 300.
            for names in ("a", "b", "a", "b"):
                assert len(list(steps_of_both(rng, driver, graphs, [{names: 1}] * 3, 2e-5))) == 3
    finally:
        with simulated():
            set_piece_tokens(0)
    assert steps.refusals == Refusals()
    assert len(steps._graphs) == num_programs + 1, "one program for a row"
    assert found["steps"] == 12 and found["captures"] >= 2


# --- Refusals -------------------------------------------------------------------------------------

REFUSALS: dict[str, tuple[Callable[[mx.array], Any], str]] = {
    "another operation": (mx.exp, "the operation Exp"),
    "an addition alone": (lambda x: x + x, "the operation Add"),
    "rows of odd sizes": (lambda x: ops.rms_norm(x[:, :7], mx.ones(7), 1e-5), "a norm of rows"),
    "a view of another value": (
        lambda x: ops.rms_norm(x, mx.ones(16), 1e-5)[:, :8],
        "a result that is part",
    ),
    "no dependence": (lambda x: mx.ones((3, 8)), "an output does not depend"),
}


def weights_in_the_middle() -> mx.array:
    """Sixteen weights, two bytes behind a multiple of 16."""
    whole = mx.arange(33, dtype=mx.float16)
    mx.eval(whole)
    part = whole[1:17]
    mx.eval(part)
    return part


def test_weights_that_begin_anywhere_are_refused() -> None:
    part = weights_in_the_middle()
    with simulated():
        [x] = executables.placeholders([mx.zeros((3, 16), mx.float16)])
        for out in (ops.rms_norm(x, part, 1e-5), x @ mx.broadcast_to(part, (16, 16)).T):
            with pytest.raises(ValueError, match=r"16 bytes|not dense"):
                executables.GpuExecutable([x], [out])


@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_program_cannot_run_is_said(name: str) -> None:
    build, reason = REFUSALS[name]
    with simulated():
        [x] = executables.placeholders([mx.zeros((3, 16))])
        with pytest.raises(ValueError, match=reason):
            executables.GpuExecutable([x], [build(x)])


def test_other_shapes_and_dtypes_are_refused() -> None:
    with simulated():
        [x] = executables.placeholders([mx.zeros((3, 16))])
        program = executables.GpuExecutable([x], [ops.rms_norm(x, mx.ones(16), 1e-5)])
        for wrong in ([], [mx.zeros((4, 16))], [mx.zeros((3, 16), mx.float16)]):
            with pytest.raises(ValueError, match="gpu_executable"):
                program(wrong)


# --- Steps with prompts ---------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["qwen3", "windows"])
def test_steps_with_prompts_are_padded_and_become_programs(rng, name: str) -> None:
    """Prompts of other lengths, alone and beside decodes, in as many rows; and one that is not
    sampled from, which is no program and does not keep the others from being one."""
    ours, graphs = driver_of(CONFIGS[name]), driver_of(CONFIGS[name])
    work = [{"a": 5}, {"b": 11}, {"c": 16}, {"d": 7}, {"a": 1, "e": 9}, {"b": 12}]
    steps = ours.runner.model._graph_runner
    made = []
    run_as_on(ours.runner.model, **CUDA_PROGRAMS)
    with simulated():
        for part in work:
            tokens = {sequence: new_tokens(rng, count) for sequence, count in part.items()}
            with counted() as found:
                actual = ours.step(tokens)
            made.append(found["steps"])
            expected = graphs.step(tokens)
            for sequence, logits in expected.items():
                np.testing.assert_allclose(actual[sequence], logits, atol=2e-5)
    assert made == [1] * 6
    assert steps.refusals == Refusals()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["llama", "windows"])
def test_steps_as_metal_runs_them(rng, name: str) -> None:
    """Decodes whose shape repeats, encoded anew in each step; nothing is captured."""
    ours, graphs = driver_of(CONFIGS[name]), driver_of(CONFIGS[name])
    steps = ours.runner.model._graph_runner
    run_as_on(ours.runner.model, max_gpu_step_rows=4)
    with simulated():
        sim_ext.capture_steps(False)
        try:
            captures = sim_ext.step_counts()["captures"]
            num_launches = []
            for part in [{"a": 5, "b": 9, "c": 1}, *[dict.fromkeys("abc", 1)] * 9]:
                tokens = {sequence: new_tokens(rng, count) for sequence, count in part.items()}
                expected = graphs.step(tokens)
                launches()
                actual = ours.step(tokens)
                num_launches.append(len([o for o in launches() if o["kernel"] != "write_kv"]))
                for sequence, logits in expected.items():
                    np.testing.assert_allclose(actual[sequence], logits, atol=2e-5)
            assert sim_ext.step_counts()["captures"] == captures
        finally:
            sim_ext.capture_steps(True)
    assert not steps.refusals.executables and steps._graphs
    # (The graph's operations that are no kernels of ours run on the CPU here.)
    assert min(num_launches[1:]) > num_launches[0]


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_steps_that_are_no_programs_of_metal_run_as_before(rng, family: str) -> None:
    ours, graphs = family_driver(family), family_driver(family)
    run_as_on(ours.runner.model, max_gpu_step_rows=4)
    with simulated():
        for _ in range(5):
            tokens = {sequence: new_tokens(rng, 1) for sequence in "ab"}
            actual, expected = ours.step(tokens), graphs.step(tokens)
            for sequence, logits in expected.items():
                np.testing.assert_allclose(actual[sequence], logits, atol=2e-5)
    assert ours.runner.model._graph_runner.refusals.steps


def test_a_step_is_under_way_when_the_next_one_is_built(rng, monkeypatch) -> None:
    """Its pools have the handles of before, so nothing built on them waits for it."""
    driver = driver_of(CONFIGS["qwen3"])
    steps = driver.runner.model._graph_runner
    run_as_on(driver.runner.model, **CUDA_PROGRAMS)
    made, run = [], steps.run

    def watched(*args: Any) -> Any:
        with counted() as found:
            result = run(*args)
        made.append(found["steps"])
        assert made[-1] == 0 or all(a is b for a, b in zip(result[1], args[2], strict=True))
        return result

    monkeypatch.setattr(steps, "run", watched)
    with simulated():
        for _ in range(5):
            driver.step({"a": new_tokens(rng, 1)})
    assert made == [1] * 5


def test_all_that_is_asked_of_a_step_is_under_way_when_it_is_launched(rng, monkeypatch) -> None:
    """A program chooses greedily by itself; what else is asked for is launched behind it."""
    driver, started = driver_of(CONFIGS["qwen3"]), []
    begin = mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda *a: started.append(a) or begin(*a))

    def launch(sampling: SamplingRow) -> Any:
        row = driver.schedule("a", new_tokens(rng, 1))._replace(sampling=sampling)
        started.clear()
        return driver.runner.launch(step_of([row], step=9), None)

    run_as_on(driver.runner.model, **CUDA_PROGRAMS)
    drawn, reporting = GREEDY._replace(temperature=1.0), GREEDY._replace(logprobs=2)
    with simulated():
        for _ in range(4):
            launch(GREEDY)
        greedy = launch(GREEDY)
        assert len(started) == 1 and driver.runner.read(greedy).token_ids[0]
        for sampling in (drawn, reporting):
            launched = launch(sampling)
            [_, behind] = started
            results = launched.results
            assert all(any(a is result for a in behind) for result in results)
            driver.runner.read(launched)
        assert len(results) > 1, "log-probabilities too"


def test_prompts_that_are_no_programs_do_not_keep_decodes_from_it(rng) -> None:
    driver = driver_of(CONFIGS["qwen3"])
    steps = driver.runner.model._graph_runner
    run_as_on(driver.runner.model, **CUDA_PROGRAMS)
    with simulated():
        sim_ext.fail_next_preparation()
        driver.step({"a": new_tokens(rng, 5)})
        assert steps.refusals.prompts and not steps.refusals.executables
        five = steps.repetition_of(5, 1, 1, is_of_arrays=True, may_pad_prompts=True)
        assert five.repeat is Repeat.NOT and five.num_rows == 5
        with counted() as found:
            for _ in range(4):
                driver.step({"a": new_tokens(rng, 1)})
        assert found == {"steps": 4, "captures": 1, "replays": 3}
