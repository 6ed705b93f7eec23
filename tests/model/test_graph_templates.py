"""Steps made from templates: the bits of the steps that model code builds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from support.family_configs import config_of
from support.models import StepDriver, random_tokens, tiny_config, tiny_model
from support.parity import family_model
from support.reference import ON_GPU

from mlx_paged.model.caches import Step
from mlx_paged.model.graph_runner import GraphRunner
from mlx_paged.model.graph_templates import MIN_ROWS, GraphTemplates
from mlx_paged.model.layerwise import LayerwiseSubmit
from mlx_paged.model.step_output import Pools, StepOutput
from mlx_paged.platform import Platform

pytestmark = pytest.mark.skipif(ON_GPU, reason="heads of 16 dims have no kernel on a GPU")

CONFIG = tiny_config("llama")
MANY = MIN_ROWS + 20
# Beside decodes, of several prompts, of few rows that are not sampled, without a template at all.
STEPS: tuple[dict[str, int], ...] = (
    {"a": MANY},
    {"b": 2 * MANY, "c": 5},
    {"a": 1, "b": 1, "c": 1, "d": MANY},
    {"a": 1, "b": 3},
    {"d": 1, "e": MANY, "f": 20},
)


def with_templates(driver: StepDriver) -> GraphTemplates:
    model = driver.runner.model
    templates = model._graph_runner.templates = GraphTemplates(model._run)
    return templates


def made_by(templates: GraphTemplates) -> int:
    return sum(each is not None for each in templates._templates.values())


def pools_of(driver: StepDriver) -> list[np.ndarray]:
    return [np.array(pool.astype(mx.float32)) for pool in driver.runner.model.pools()]


def assert_same(drivers: tuple[StepDriver, StepDriver], steps: Any = STEPS) -> None:
    rng = np.random.default_rng(0)
    for counts in steps:
        work = {name: random_tokens(rng, count) for name, count in counts.items()}
        expected, actual = (driver.step(work) for driver in drivers)
        for name in work:
            np.testing.assert_array_equal(actual[name], expected[name])
    for expected, actual in zip(*map(pools_of, drivers)):
        np.testing.assert_array_equal(actual, expected)


# Norms of heads, windows and caps, experts, sinks, fused projections, biases, two norms per layer.
@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma2", "qwen3_moe", "gpt_oss", "phi3", "qwen2", "gemma3_text"]
)
def test_families(family: str) -> None:
    config = config_of(family)
    plain, other = (StepDriver(family_model(config), family, block_size=8) for _ in range(2))
    templates = with_templates(other)
    assert_same((plain, other))
    assert made_by(templates) and not templates.refusals


def test_a_family_without_templates() -> None:
    config = config_of("deepseek_v3")
    plain, other = (StepDriver(family_model(config), "deepseek_v3", block_size=8) for _ in range(2))
    templates = with_templates(other)
    assert_same((plain, other))
    assert not made_by(templates) and templates.refusals


def test_dtypes_taps_and_formats() -> None:
    def bf16() -> Any:
        model = tiny_model(CONFIG)
        model.set_dtype(mx.bfloat16)
        return model

    plain, other = (StepDriver(bf16(), "llama", block_size=8) for _ in range(2))
    for driver in (plain, other):
        driver.runner.model.tap([1, 4])
        driver.runner.allocate(64)
    templates = with_templates(other)
    rng = np.random.default_rng(0)
    work = {name: random_tokens(rng, count) for name, count in (("a", MANY), ("b", 7))}
    hidden = []
    for driver in (plain, other):
        launched, _ = driver.launch(*(driver.schedule(n, t) for n, t in work.items()))
        assert launched.hidden is not None
        hidden.append(np.array(launched.hidden.astype(mx.float32)))
    np.testing.assert_array_equal(*hidden)
    assert made_by(templates) == 1


def test_few_templates_serve_all_steps() -> None:
    driver = StepDriver(tiny_model(CONFIG), "llama", block_size=8, num_blocks=256)
    templates, rng = with_templates(driver), np.random.default_rng(0)
    for i, count in enumerate(range(MANY, MANY + 400, 80)):
        driver.step({f"{i}{j}": random_tokens(rng, count // (j + 1)) for j in range(i % 3 + 1)})
    assert made_by(templates) == 1


def test_a_chunk_that_samples_nothing() -> None:
    drivers = [StepDriver(tiny_model(CONFIG), "llama", block_size=8) for _ in range(2)]
    templates, tokens = with_templates(drivers[1]), random_tokens(np.random.default_rng(0), MANY)
    for driver in drivers:
        driver.launch(driver.schedule("a", tokens, samples=False))
    assert made_by(templates) == 1
    [expected, actual] = [driver.step({"a": tokens[:9]})["a"] for driver in drivers]
    np.testing.assert_array_equal(actual, expected)


def test_new_pools_forget_templates() -> None:
    cuda = replace(Platform.current(), has_cuda=True, on_cpu=False, max_gpu_step_rows=64)
    runner = GraphRunner(lambda *_: StepOutput(mx.zeros(1), []), platform=cuda)
    assert runner.templates is not None
    runner.templates._templates[None] = None  # type: ignore[index]
    runner.forget()
    assert not runner.templates._templates
    assert GraphRunner(lambda *_: StepOutput(mx.zeros(1), [])).templates is None, "on the CPU"


def test_templates_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = replace(Platform.current(), has_cuda=True, on_cpu=False, max_gpu_step_rows=64)
    monkeypatch.setenv("MLX_PAGED_GRAPH_TEMPLATES", "0")
    assert GraphRunner(lambda *_: StepOutput(mx.zeros(1), []), platform=cuda).templates is None
    monkeypatch.delenv("MLX_PAGED_GRAPH_TEMPLATES")
    runner = GraphRunner(lambda *_: StepOutput(mx.zeros(1), []), platform=cuda, enabled=False)
    assert runner.templates is None, "an eager engine builds each step"


# --- Submitting in parts --------------------------------------------------------------------------


@dataclass(frozen=True)
class Submitted(LayerwiseSubmit):
    """Notes what a step submits."""

    noted: list[Any] = field(default_factory=list, compare=False)

    def layer_built(self, layer: int, pool: mx.array, rows: mx.array) -> None:
        self.noted.append((layer, pool.shape, rows.shape))
        super().layer_built(layer, pool, rows)


@pytest.mark.parametrize("submit", [(4, None), (1, 2)])
def test_layers_are_submitted_in_order(
    monkeypatch: pytest.MonkeyPatch, submit: tuple[int, int | None]
) -> None:
    noted: list[list[Any]] = []
    plan = GraphTemplates.run, GraphRunner._build

    def build(self: GraphRunner, tokens: mx.array, step: Step, pools: Pools) -> StepOutput:
        layerwise = Submitted(*submit)
        noted.append(layerwise.noted)
        return plan[1](self, tokens, replace(step, layerwise=layerwise), pools)

    monkeypatch.setattr(GraphRunner, "_build", build)
    drivers = tuple(StepDriver(tiny_model(CONFIG), "llama", block_size=8) for _ in range(2))
    templates = with_templates(drivers[1])
    noted.clear()  # of other steps when the models were made
    assert_same(drivers, ({"a": MANY}, {"b": 2 * MANY, "c": 3}))
    assert made_by(templates) == 1 and len(noted) == 4
    assert noted[0] == noted[1] and noted[2] == noted[3]
    assert [layer for layer, _, _ in noted[0]] == [0, 1, 2, 3]


# --- Code that is no model's ----------------------------------------------------------------------


def stepped(driver: StepDriver, change: Any) -> tuple[GraphTemplates, list[int]]:
    """Templates for a driver's model whose logits `change` changes, and where code has run."""
    model = driver.runner.model
    rows: list[int] = []

    def forward(tokens: mx.array, step: Step, pools: Pools) -> StepOutput:
        rows.append(tokens.shape[0])
        output = model._run(tokens, step, pools)
        return output._replace(logits=change(output.logits, tokens.shape[0]))

    model._graph_runner.templates = GraphTemplates(forward)
    return model._graph_runner.templates, rows


def test_a_condition_on_the_rows_has_templates_on_both_sides() -> None:
    driver = StepDriver(tiny_model(CONFIG), "llama", block_size=8, num_blocks=256)
    templates, _ = stepped(driver, lambda x, rows: x * 2 if rows > 256 else x - 1)
    plain = StepDriver(tiny_model(CONFIG), "llama", block_size=8, num_blocks=256)
    rng = np.random.default_rng(0)
    for i, count in enumerate((MANY, 250, 257, 400, 256)):
        work = {str(i): random_tokens(rng, count)}
        [actual], [expected] = driver.step(work).values(), plain.step(work).values()
        wanted = expected * 2 if count > 256 else expected - 1
        np.testing.assert_array_equal(actual, wanted)
    assert made_by(templates) == 3, "65 to 128, 129 to 256, and 257 to 512 rows"


def test_code_that_reads_values_runs_itself() -> None:
    def change(logits: mx.array, rows: int) -> mx.array:
        return logits * 2 if float(logits.sum()) < 1e9 else logits

    driver = StepDriver(tiny_model(CONFIG), "llama", block_size=8)
    templates, _ = stepped(driver, change)
    plain = StepDriver(tiny_model(CONFIG), "llama", block_size=8)
    work = {"a": random_tokens(np.random.default_rng(0), MANY)}
    # Steps without a template are the model's own, here without the change.
    np.testing.assert_array_equal(driver.step(work)["a"], plain.step(work)["a"])
    assert not made_by(templates) and templates.refusals


def test_a_kind_is_learned_once() -> None:
    driver = StepDriver(tiny_model(CONFIG), "llama", block_size=8, num_blocks=256)
    _, rows = stepped(driver, lambda x, rows: x)
    rng = np.random.default_rng(0)
    for i in range(3):
        driver.step({str(i): random_tokens(rng, MANY + i)})
    assert len(rows) == 2, "for the fewest and for the most rows"
