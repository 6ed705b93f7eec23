"""Steps as one operation on the CPU: the same numbers as the graph that they were read from."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support.family_configs import compiled_families, config_of
from support.models import StepDriver, tiny_config, tiny_model

from mlx_paged import executables, ops
from mlx_paged.model import graph_runner
from mlx_paged.model.graph_runner import GraphRunner, Repeat
from mlx_paged.model.kv_formats import FORMATS as KV_FORMATS
from mlx_paged.model.loader import convert
from mlx_paged.model.plan import StepInputs, build_plan
from mlx_paged.model.wrap import convert_to_paged

pytestmark = pytest.mark.skipif(
    executables.max_cpu_step_rows() == 0, reason="this processor has no product of few rows"
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": tiny_config("llama"),
    "llama with biases": tiny_config("llama", tied=False, attention_bias=True, mlp_bias=True),
    "llama3 RoPE": tiny_config("llama", rope_scaling=LLAMA3),
    "traditional RoPE": tiny_config("llama", rope_traditional=True),
    "windows": tiny_config(
        "llama", layer_types=["full_attention", "sliding_attention"] * 2, sliding_window=16
    ),
    "qwen2": tiny_config("qwen2"),
    "qwen3": tiny_config("qwen3", tied=False),
    "phi3": tiny_config("phi3"),  # (its projections are one matrix, its parts views)
    "olmo2": tiny_config("olmo2"),  # (norms after the projections, over all heads)
    "smollm3": tiny_config("smollm3"),  # (layers without RoPE)
}


# With operations of MLX's own between the phases.
for _family in ("deepseek_v3", "phimoe", "gpt2"):
    CONFIGS[_family] = config_of(_family)
# With experts, LayerNorm and GELU.
for _family in (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "gpt_oss",
    "granitemoe",
    "gemma3_text",
    "cohere",
    "phi",
    "starcoder2",
    "gpt_bigcode",
    "gpt_neox",
):
    CONFIGS[_family] = config_of(_family)

# Weights as checkpoints have them, with heads that are tied and others.
WIDE = {"hidden_size": 128, "intermediate_size": 256}
FORMATS: dict[str, tuple[dict[str, Any], str | dict[str, Any]]] = {
    "llama in bfloat16": (tiny_config("llama"), "bfloat16"),
    "qwen3 in float16": (tiny_config("qwen3", tied=False), "float16"),
    "llama in 4 bits": (tiny_config("llama", **WIDE), {"bits": 4, "group_size": 64}),
    "qwen3 in 4 bits": (tiny_config("qwen3", tied=False), {"bits": 4, "group_size": 32}),
    "qwen2 in 6 bits": (tiny_config("qwen2", **WIDE), {"bits": 6, "group_size": 128}),
    "llama in mxfp4": (tiny_config("llama"), {"bits": 4, "group_size": 32, "mode": "mxfp4"}),
    "qwen3_moe in bfloat16": (config_of("qwen3_moe"), "bfloat16"),
    "mixtral in 4 bits": (config_of("mixtral"), {"bits": 4, "group_size": 32}),
    "qwen2_moe in 8 bits": (config_of("qwen2_moe"), {"bits": 8, "group_size": 32}),
    "gpt_oss in mxfp4": (config_of("gpt_oss"), {"bits": 4, "group_size": 32, "mode": "mxfp4"}),
    "olmoe in nvfp4": (config_of("olmoe"), {"bits": 4, "group_size": 16, "mode": "nvfp4"}),
}


def model_of(name: str) -> tuple[Any, str]:
    if name in CONFIGS:
        return tiny_model(CONFIGS[name]), CONFIGS[name]["model_type"]
    config, form = FORMATS[name]
    model = tiny_model(config)
    model.set_dtype(mx.bfloat16 if isinstance(form, dict) else getattr(mx, form))
    if isinstance(form, dict):
        nn.quantize(model, **form)
    convert(model, "auto", keeps_weights=True)
    return model, config["model_type"]


def driver_of(name: str, kv_format: str | None = None) -> StepDriver:
    model, model_type = model_of(name)
    return StepDriver(model, model_type, block_size=8, kv_format=KV_FORMATS.get(kv_format))


def steps() -> list[dict[str, list[int]]]:
    rng = np.random.default_rng(1)
    new = lambda n: rng.integers(0, 96, n).tolist()  # noqa: E731
    return [
        {"a": new(7), "b": new(1)},
        {"a": new(1), "b": new(1)},
        {"b": new(1), "c": new(20)},
        {"c": new(1)},
        {"a": new(40), "b": new(3), "c": new(9), "d": new(2)},
        *({"a": new(1), "b": new(1), "c": new(1), "d": new(1)} for _ in range(3)),
    ]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [*CONFIGS, *FORMATS])
def test_they_give_what_the_graph_gives(name: str) -> None:
    programs, graphs = driver_of(name), driver_of(name)
    graphs.runner.model._graph_runner.refusals.steps = "a test"
    for work in steps():
        actual, expected = programs.step(work), graphs.step(work)
        for sequence, logits in expected.items():
            np.testing.assert_array_equal(actual[sequence], logits)
    assert (
        programs.runner.model._graph_runner._graphs
        and not graphs.runner.model._graph_runner._graphs
    )
    for ours, theirs in zip(programs.caches, graphs.caches, strict=True):
        np.testing.assert_array_equal(np.array(ours.key_pool), np.array(theirs.key_pool))
        np.testing.assert_array_equal(np.array(ours.value_pool), np.array(theirs.value_pool))


MIXED = {"up_proj": {"bits": 8, "group_size": 32}, "v_proj": {"bits": 3, "group_size": 64}}


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_they_round_activations(bits: int, mixed: bool) -> None:
    """Each input once for all that read it alike; linear layers of other formats do not."""

    def driver(activations: str) -> StepDriver:
        model = tiny_model(tiny_config("llama", **WIDE, attention_bias=True, mlp_bias=True))
        model.set_dtype(mx.bfloat16)
        form = {"bits": bits, "group_size": 64}
        nn.quantize(
            model,
            class_predicate=lambda path, layer: (
                hasattr(layer, "to_quantized")
                and ((mixed and MIXED.get(path.split(".")[-1])) or form)
            ),
        )
        convert(model, "auto", keeps_weights=True)
        made = StepDriver(model, "llama", block_size=8)
        made.runner.model.round_activations(activations)
        made.runner.model.allocate(64)
        return made

    programs, graphs, exact = driver("int8"), driver("int8"), driver("float32")
    graphs.runner.model._graph_runner.refusals.steps = "a test"
    for work in steps():
        actual, expected, floats = (one.step(work) for one in (programs, graphs, exact))
        for sequence, logits in expected.items():
            np.testing.assert_array_equal(actual[sequence], logits)
            error = np.linalg.norm(logits - floats[sequence]) / np.linalg.norm(floats[sequence])
            assert 1e-4 < error < 0.15, error  # (weights are tripled)
    assert (
        programs.runner.model._graph_runner._graphs
        and not graphs.runner.model._graph_runner._graphs
    )


@pytest.mark.parametrize("name", KV_FORMATS)
def test_they_take_quantized_pools(name: str) -> None:
    programs, graphs = (driver_of("windows", name) for _ in range(2))
    graphs.runner.model._graph_runner.refusals.steps = "a test"
    for work in steps():
        actual, expected = programs.step(work), graphs.step(work)
        for sequence, logits in expected.items():
            np.testing.assert_array_equal(actual[sequence], logits)
    assert programs.runner.model._graph_runner._graphs
    for ours, theirs in zip(programs.caches, graphs.caches, strict=True):
        assert ours.key_pool.dtype != mx.float32
        np.testing.assert_array_equal(np.array(ours.key_pool), np.array(theirs.key_pool))
        np.testing.assert_array_equal(np.array(ours.value_pool), np.array(theirs.value_pool))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", compiled_families("on the CPU"))
def test_families_that_need_no_operation_of_mlx(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = []
    original = executables.CpuExecutable.__init__

    def keep(self: executables.CpuExecutable, *arguments: Any) -> None:
        original(self, *arguments)
        programs.append(self)

    monkeypatch.setattr(executables.CpuExecutable, "__init__", keep)
    config = config_of(family)
    StepDriver(tiny_model(config), family, block_size=8).step({"a": [1, 2, 3]})
    assert programs
    assert [program.foreign for program in programs] == [[]] * len(programs)


def test_operations_left_to_mlx_are_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(graph_runner, "_logged", set())
    for _ in range(2):  # the second model logs nothing
        driver = driver_of("gpt2")
        driver.step({"a": [1, 2, 3]})
    assert driver.runner.model.compilation.refused is None
    foreign = driver.runner.model.compilation.foreign
    assert foreign and all(count > 0 for count in foreign.values())
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == len(foreign)
    for name in foreign:
        assert any("gpt2" in text and f"no kernel for {name}, " in text for text in warnings)


def test_a_refused_primitive_is_a_warning_and_a_dtype_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(graph_runner, "_logged", set())
    caplog.set_level("INFO")
    for reason, level in (("the operation Sin", "WARNING"), ("pools of 16 bits", "INFO")):
        caplog.clear()
        compiled = driver_of("llama").runner.model._graph_runner
        compiled._refuse(compiled._cpu_executable, 1, Repeat.AS_GRAPH, reason)
        [record] = caplog.records
        assert record.levelname == level and reason in record.getMessage()
        assert compiled.compilation.refused == reason


def test_as_many_rows_as_they_take_and_one_more() -> None:
    driver = driver_of("llama")
    most = executables.max_cpu_step_rows()
    for rows in (most, most + 1):
        driver.step({str(rows): [i % 96 for i in range(rows)]})
    [shape] = driver.runner.model._graph_runner._graphs
    assert shape[1] == most


def test_a_model_that_reads_values_runs_as_before() -> None:
    driver = driver_of("llama")
    compiled = driver.runner.model._graph_runner
    forward = compiled._forward

    def reads(tokens: mx.array, *rest: Any) -> Any:
        assert tokens.tolist()
        return forward(tokens, *rest)

    compiled._forward = reads
    [logits] = driver.step({"a": [1, 2, 3]}).values()
    [expected] = driver_of("llama").step({"a": [1, 2, 3]}).values()
    np.testing.assert_array_equal(logits, expected)
    assert compiled.refusals.steps


def test_operations_that_it_has_not_are_mlxs_own() -> None:
    """As a router of experts has them: of several outputs, whole arrays, integers and scalars."""
    weight = mx.random.normal((8, 16))

    def graph(x: mx.array, table: mx.array) -> mx.array:
        scores = mx.softmax(ops.linear(x * 2.0, weight), axis=-1, precise=True)
        best = mx.stop_gradient(mx.argpartition(scores, kth=-2, axis=-1)[..., -2:])
        rows = table[best.flatten()].reshape(3, 2, 16)  # (more rows than the step's)
        kept = mx.take_along_axis(scores, best, axis=-1)
        parts = mx.split(rows * kept[..., None], 2, axis=1)
        largest = mx.max(mx.abs(parts[0]))
        return mx.sin(mx.cumsum((parts[0] - parts[1]).squeeze(1), axis=0) / largest) * 3.0

    x, table = mx.random.normal((3, 16)), mx.random.normal((8, 16))
    placeholders = executables.placeholders([x, table])
    program = executables.CpuExecutable(placeholders, [graph(*placeholders)])
    assert len(program.foreign) > 3
    for _ in range(3):
        np.testing.assert_array_equal(np.array(program([x, table])[0]), np.array(graph(x, table)))
        x, table = x + 1.0, table * -2.0


def test_another_view_of_a_value_outlives_its_memory() -> None:
    x = mx.random.normal((3, 16))

    def graph(x: mx.array) -> mx.array:
        seen = mx.view(x * 2.0, mx.int32)  # (the same memory)
        late = x
        for i in range(6):
            late = (late + float(i)) * 0.5
            late = mx.sin(late)
        return mx.view(seen, mx.float32) + late

    [placeholder] = executables.placeholders([x])
    program = executables.CpuExecutable([placeholder], [graph(placeholder)])
    np.testing.assert_array_equal(np.array(program([x])[0]), np.array(graph(x)))


def test_changes_of_shape_that_copy_many_axes() -> None:
    """As internlm2 has them."""
    x = mx.random.normal((3, 48))

    def graph(x: mx.array) -> mx.array:
        parts = (x * 2.0).reshape(1, 3, 2, 4, 6)[..., :3, :]
        return parts.reshape(3, 36) + 1.0

    [placeholder] = executables.placeholders([x])
    program = executables.CpuExecutable([placeholder], [graph(placeholder)])
    np.testing.assert_array_equal(np.array(program([x])[0]), np.array(graph(x)))


def test_row_operations_wait_for_the_rows_that_they_read() -> None:
    x = mx.random.normal((32, 32))
    [placeholder] = executables.placeholders([x])
    out = (placeholder * 2.0).T + 1.0
    program = executables.CpuExecutable([placeholder], [out])
    for _ in range(20):
        np.testing.assert_array_equal(np.array(program([x])[0]), np.array((x * 2.0).T + 1.0))


def test_pools_behind_a_dependency_are_refused() -> None:
    """MLX would return them as copies instead of writing them in place."""
    x, pool = executables.placeholders([mx.zeros((3, 8)), mx.zeros((4, 8, 1, 8))])
    out = x * 2.0
    with pytest.raises(ValueError, match="depend on others by hand"):
        executables.CpuExecutable([x, pool], [out, *mx.depends([pool], [out])])


def test_steps_in_pools_of_another_size_are_compiled_again() -> None:
    driver = driver_of("llama")
    [first] = driver.step({"a": [1, 2, 3]}).values()
    model = driver.runner.model
    [group_spec] = model.layout.group_specs
    model.resize(len(driver.caches[0].key_pool) + 3, group_spec)
    assert not model._graph_runner._graphs
    [again] = driver.step({"b": [1, 2, 3]}).values()
    np.testing.assert_array_equal(first, again)
    assert model._graph_runner._graphs


def test_what_a_program_cannot_be_is_named() -> None:
    [x] = executables.placeholders([mx.zeros((3, 8))])
    with pytest.raises(ValueError, match="does not depend on the inputs"):
        executables.CpuExecutable([x], [mx.zeros((3, 8))])
    [half] = executables.placeholders([mx.zeros((3, 8), dtype=mx.float16)])
    with pytest.raises(ValueError, match="result of other than float32"):
        executables.CpuExecutable([half], [half + half])


def test_placeholders_have_no_values() -> None:
    [x] = executables.placeholders([mx.zeros((3,))])
    with pytest.raises(RuntimeError, match="without a primitive"):
        mx.eval(x + 1)


def test_inputs_of_another_shape_or_dtype_are_refused() -> None:
    placeholders = executables.placeholders([mx.zeros((3, 8)), mx.zeros((3, 8))])
    program = executables.CpuExecutable(placeholders, [placeholders[0] + placeholders[1]])
    x = mx.arange(24.0).reshape(3, 8)
    assert mx.array_equal(program([x, x])[0], 2 * x)
    # (Of any strides.)
    assert mx.array_equal(program([x, x.reshape(8, 3).T])[0], x + x.reshape(8, 3).T)
    with pytest.raises(ValueError, match=r"inputs\[1\] must be \(3,8\) but got \(4,8\)"):
        program([x, mx.zeros((4, 8))])
    with pytest.raises(ValueError, match=r"dtype of inputs\[0\] must be float32"):
        program([x.astype(mx.int32), x])
    with pytest.raises(ValueError, match="must be 2 arrays but got 1"):
        program([x])


def test_inputs_that_are_not_used_may_have_any_length() -> None:
    """As a plan's work in a model without attention."""
    placeholders = executables.placeholders([mx.zeros((3, 8)), mx.zeros((4, 2), dtype=mx.int32)])
    program = executables.CpuExecutable(placeholders, [placeholders[0] * 2.0])
    x = mx.arange(24.0).reshape(3, 8)
    for rows in (4, 9):
        assert mx.array_equal(program([x, mx.zeros((rows, 2), dtype=mx.int32)])[0], 2 * x)


def test_lookups_of_rows() -> None:
    table = mx.random.normal((5, 6))
    indices = mx.array([4, 0, -1, 5, -6], dtype=mx.int32)
    [placeholder] = executables.placeholders([indices])
    program = executables.CpuExecutable([placeholder], [table[placeholder] * 2.0])
    out = np.array(program([indices])[0])
    np.testing.assert_array_equal(out[:3], 2 * np.array(table)[[4, 0, 4]])
    assert np.isnan(out[3:]).all(), "no memory beside the table is read"


@pytest.mark.parametrize("form", ["float32", "float16", "bfloat16", "affine", "mxfp8"])
def test_lookups_in_every_format(form: str) -> None:
    table = mx.random.normal((5, 64))
    arrays: list[mx.array]
    format_of: dict[str, Any] = {}
    if form in ("affine", "mxfp8"):
        format_of = {"group_size": 32, "bits": 8, "mode": form}
        arrays = list(mx.quantize(table.astype(mx.bfloat16), **format_of))
        values = mx.dequantize(
            arrays[0],
            *(a.astype(mx.float32) if form == "affine" else a for a in arrays[1:]),
            **format_of,
            dtype=mx.float32,
        )
    else:
        arrays = [table.astype(getattr(mx, form))]
        values = arrays[0].astype(mx.float32)
    indices = mx.array([[4], [0], [-1], [5], [-6]], dtype=mx.int32)
    graph = np.array(ops.lookup(indices, *arrays, **format_of))
    assert graph.shape == (5, 1, 64)
    np.testing.assert_allclose(graph[:3, 0], np.array(values)[[4, 0, 4]], rtol=1e-6, atol=1e-6)
    assert np.isnan(graph[3:]).all(), "no memory beside the table is read"
    [placeholder] = executables.placeholders([indices])
    program = executables.CpuExecutable(
        [placeholder], [ops.lookup(placeholder, *arrays, **format_of)]
    )
    np.testing.assert_array_equal(np.array(program([indices])[0]), graph)


def test_lookups_refuse_what_is_no_embedding() -> None:
    table, ids = mx.zeros((4, 64)), mx.array([0], dtype=mx.int32)
    quantized = mx.quantize(table, group_size=32, bits=4)
    with pytest.raises(ValueError, match="ids must be int32 or uint32 but got float32"):
        ops.lookup(table, table)
    with pytest.raises(ValueError, match="weight"):
        ops.lookup(ids, table.astype(mx.int32))
    with pytest.raises(ValueError, match="7 bits in groups of 32"):
        ops.lookup(ids, *quantized, group_size=32, bits=7)
    with pytest.raises(ValueError, match="scales"):
        ops.lookup(ids, *quantized, group_size=64, bits=4)
    with pytest.raises(ValueError, match="biases must be an array but got None"):
        ops.lookup(ids, *quantized[:2], group_size=32, bits=4)


@pytest.mark.parametrize("returns_pools", [True, False])
def test_pools_are_written_in_place_with_or_without_new_handles(returns_pools: bool) -> None:
    pools = [ops.allocate_pool(2, 8, 1, 8, mx.float32) for _ in range(4)]
    rows, slots = mx.arange(1.0, 17.0).reshape(2, 1, 8), mx.array([9, 12], mx.int32)
    mx.eval(rows, slots, *pools)
    inputs = executables.placeholders([rows, slots, *pools])
    written: list[mx.array] = []
    for first in (2, 4):
        pair = inputs[first : first + 2]
        written += ops.write_kv(*pair, inputs[0] * float(first), inputs[0], inputs[1])
    program = executables.CpuExecutable(inputs, [inputs[0] * 2.0, *written])
    copies = ops.pool_copies()
    result, *handles = program([rows, slots, *pools], returns_pools=returns_pools)
    assert len(handles) == (4 if returns_pools else 1)
    mx.eval(handles[-1])  # waits for the whole step
    # As bits, since the slots that nothing wrote may hold NaNs.
    assert np.array(handles[-1]).tobytes() == np.array(pools[-1]).tobytes()
    assert ops.pool_copies() == copies
    np.testing.assert_array_equal(np.array(result), 2 * np.array(rows))
    for pool, factor in zip(pools, (2, 1, 4, 1)):
        kept = np.array(pool).reshape(16, 1, 8)
        np.testing.assert_array_equal(kept[[9, 12]], factor * np.array(rows))
    # A pool in other memory would have to be copied, and the caller could not see its contents.
    strided = mx.zeros((2, 8, 1, 16))[..., ::2]
    mx.eval(strided)
    if not returns_pools:
        with pytest.raises(RuntimeError, match="pools must be dense"):
            mx.eval(program([rows, slots, strided, *pools[1:]], returns_pools=False))


def test_a_plan_that_is_used_for_more_than_attention_is_refused() -> None:
    plan = build_plan([[1], [2]], [3, 4], [1, 1], block_size=8)
    pool = ops.allocate_pool(4, 8, 1, 8, mx.float32)
    inputs = executables.placeholders(
        [mx.zeros((2, 2, 8)), plan.positions, plan.block_tables, plan.work_items,
         plan.merge_items, pool, pool]
    )  # fmt: skip
    queries, positions, tables, work, merges, keys, values = inputs
    fields = {"slot_mapping": positions, "context_lens": positions, "query_starts": positions}
    made = ops.AttentionPlan(
        positions, block_tables=tables, work_items=work, merge_items=merges, **fields
    )
    out = ops.paged_attention(queries, keys, values, made, scale=1.0)
    assert executables.CpuExecutable(inputs, [out])
    first = mx.take(mx.ones((4, 16)), tables[:, :1].reshape(2), axis=0)
    with pytest.raises(ValueError, match="used for more than attention"):
        executables.CpuExecutable(inputs, [out.reshape(2, 16) + first])


def test_checking_mode_takes_the_operations_that_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_PAGED_CHECK", "1")
    driver = driver_of("llama")
    driver.step({"a": [1, 2, 3]})
    assert not driver.runner.model._graph_runner._graphs


def test_two_threads_run_programs_at_once() -> None:
    def outputs(name: str) -> list[np.ndarray]:
        """Outputs of steps of one to eight rows, on a stream of this thread."""
        with mx.stream(mx.new_thread_local_stream(mx.cpu)):
            config = CONFIGS[name]
            paged = convert_to_paged(tiny_model(config), config["model_type"], block_size=8)
            paged.allocate(16)
            found = []
            for i in range(40):
                rows = 1 + i % 8
                inputs = StepInputs(
                    context_lens=np.ones(rows, dtype=np.int64),
                    query_lens=np.ones(rows, dtype=np.int64),
                    tables=[[1 + row] for row in range(rows)],
                    logit_rows=np.arange(rows),
                )
                found.append(np.array(paged.forward(mx.arange(i, i + rows), inputs)))
            assert paged._graph_runner._graphs
            return found

    names = ["llama", "qwen3_moe"]
    alone = [outputs(name) for name in names]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(outputs, names))
    for outputs_together, outputs_alone in zip(together, alone, strict=True):
        for ours, theirs in zip(outputs_together, outputs_alone, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_one_thread_after_another_runs_a_model() -> None:
    """Each thread has its own streams, to which MLX binds operations."""
    programs, graphs = driver_of("qwen3_moe"), driver_of("qwen3_moe")
    graphs.runner.model._graph_runner.refusals.steps = "a test"
    expected = [graphs.step({"a": work}) for work in ([1, 2, 3], [4, 5, 6], [7, 8, 9])]

    def step(work: list[int]) -> Any:
        with mx.stream(mx.new_thread_local_stream(mx.cpu)):
            return programs.step({"a": work})

    found = [programs.step({"a": [1, 2, 3]})]
    for work in ([4, 5, 6], [7, 8, 9]):
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(step, work).result())
    assert programs.runner.model._graph_runner._graphs
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours["a"], theirs["a"])


def test_a_graph_is_made_once_for_a_shape() -> None:
    driver = driver_of("llama")
    compiled: GraphRunner = driver.runner.model._graph_runner
    driver.step({"a": [1, 2, 3], "b": [4]})
    for i in range(12):  # (tables and work grow)
        driver.step({"a": [i], "b": [i]})
    assert len(compiled._graphs) == 2


@pytest.mark.parametrize("name", ["llama", "windows", "deepseek_v3", "gpt2"])
def test_steps_of_as_many_rows_repeat_a_graph_whatever_their_sequences(name: str) -> None:
    """Drafts make steps of many numbers of sequences and rows, and a graph takes time to make."""
    programs, graphs = (driver_of(name).runner.model for _ in range(2))
    graphs._graph_runner.refusals.steps = "a test"
    for query_lens in ([4], [1, 3], [1, 1, 1, 1], [2, 2]):
        lens = np.array(query_lens, dtype=np.int64)
        inputs = StepInputs(
            context_lens=lens,
            query_lens=lens,
            tables=[[1 + i] for i in range(len(lens))],
            logit_rows=np.arange(4),
        )
        tokens = mx.array([5, 6, 7, 8])
        ours, theirs = (np.array(each.forward(tokens, inputs)) for each in (programs, graphs))
        np.testing.assert_array_equal(ours, theirs)
    assert len(programs._graph_runner._graphs) == 1 and not graphs._graph_runner._graphs
