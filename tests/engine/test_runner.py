"""The runner: what a step is given, what it computes, and where its tokens go."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
from support.models import (
    IN_FLIGHT_TOKEN,
    StepDriver,
    dense_logits,
    embedded,
    embedded_twin,
    random_tokens,
    rms,
    step_of,
    tiny_config,
    tiny_model,
)

# isort: split
import mlx.core as mx
import mlx.nn as nn

from mlx_paged import ops
from mlx_paged.engine import runner as runner_module
from mlx_paged.engine.sampling.sampler import SamplingRow

CONFIG = tiny_config("llama")


@pytest.fixture(autouse=True)
def no_pool_is_copied() -> Iterator[None]:
    before = ops.pool_copies()
    yield
    assert ops.pool_copies() == before


@pytest.fixture
def model() -> nn.Module:
    return tiny_model(CONFIG)


@pytest.fixture
def driver(model: nn.Module) -> StepDriver:
    return StepDriver(model, "llama", block_size=8)


def test_rope_sees_the_position_of_every_row(driver: StepDriver, rng: np.random.Generator) -> None:
    """Not by the logits: rotary positions that are all off by the same amount cancel out."""
    driver.step({"a": random_tokens(rng, 11), "b": random_tokens(rng, 3)})
    seen: list[list[int]] = []
    rope = mx.fast.rope

    def record(x: mx.array, *args: object, offset: mx.array, **kwargs: object) -> mx.array:
        assert x.shape[0] == offset.size and x.shape[2] == 1
        seen.append(offset.tolist())
        return rope(x, *args, offset=offset, **kwargs)

    with mock.patch.object(mx.fast, "rope", record):
        driver.step({"b": [1], "c": random_tokens(rng, 4), "a": [2, 3]})
    assert seen == [[3, 0, 1, 2, 3, 11, 12]] * (2 * CONFIG["num_hidden_layers"])


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_output_projection_sees_only_the_rows_that_sample(
    tied: bool, rng: np.random.Generator
) -> None:
    model = tiny_model(tiny_config("llama", tied=tied))
    head = model.model.embed_tokens if tied else model.lm_head
    method = "as_linear" if tied else "__call__"
    project = getattr(type(head), method)
    seen: list[tuple[int, ...]] = []

    def record(self: nn.Module, x: mx.array) -> mx.array:
        seen.append(x.shape)
        return project(self, x)

    head.__class__ = type("Recording", (type(head),), {method: record})
    driver = StepDriver(model, "llama", block_size=8)
    seen.clear()
    driver.launch(
        driver.schedule("a", random_tokens(rng, 20)),
        driver.schedule("b", random_tokens(rng, 9), samples=False),
        driver.schedule("c", random_tokens(rng, 1)),
    )
    assert seen == [(2, 1, CONFIG["hidden_size"])]


def test_sampled_and_other_sequences_in_any_order(
    model: nn.Module, driver: StepDriver, rng: np.random.Generator
) -> None:
    """`logit_rows` picks the last row of each sequence that samples, wherever it stands."""
    _, logits = driver.launch(
        driver.schedule("a", random_tokens(rng, 6), samples=False),
        driver.schedule("b", random_tokens(rng, 5)),
        driver.schedule("c", random_tokens(rng, 12), samples=False),
        driver.schedule("d", random_tokens(rng, 1)),
    )
    assert list(logits) == ["b", "d"]
    for name, got in logits.items():
        assert rms(got - dense_logits(model, driver.sequences[name].chunks)) < 1e-5


def test_tokens_come_back_in_the_place_of_their_sequence(
    model: nn.Module, driver: StepDriver, rng: np.random.Generator
) -> None:
    rows = [driver.schedule(name, random_tokens(rng, 4 + i)) for i, name in enumerate("abc")]
    rows[1] = rows[1]._replace(samples=False)
    launched, logits = driver.launch(*rows)
    a, c = (int(np.argmax(logits[name])) for name in "ac")
    assert driver.runner.read(launched).token_ids == [[a], [], [c]]


def test_a_step_without_samples_has_no_tokens(driver: StepDriver, rng: np.random.Generator) -> None:
    launched, logits = driver.launch(
        driver.schedule("a", random_tokens(rng, 9), samples=False),
        driver.schedule("b", random_tokens(rng, 3), samples=False),
    )
    assert driver.runner.read(launched).token_ids == [[], []] and logits == {}
    mx.synchronize()
    assert driver.num_written_slots() == [(12, 12)] * 4


def test_every_sequence_is_sampled_with_its_own_row(
    driver: StepDriver, rng: np.random.Generator
) -> None:
    rows = [driver.schedule(name, random_tokens(rng, 3)) for name in "ab"]
    rows[1] = rows[1]._replace(sampling=SamplingRow(50.0, 4, 9))
    skipped = driver.schedule("c", random_tokens(rng, 3), samples=False)
    with mock.patch.object(runner_module, "sample", wraps=runner_module.sample) as sample:
        driver.runner.launch(step_of((*rows, skipped)), None)
    logits, columns, _ = sample.call_args.args
    assert logits.shape == (2, CONFIG["vocab_size"])
    assert columns.temperature.tolist() == [0, 50]
    assert columns.key.tolist() == [[0, 0], [4, 0]] and columns.position.tolist() == [3, 3]


# --- Overlap --------------------------------------------------------------------------------------


def test_tokens_in_flight_are_those_of_the_step_before(
    model: nn.Module, driver: StepDriver, rng: np.random.Generator
) -> None:
    """The same steps with the tokens read in between give the same logits, to the bit."""
    prompts = {name: random_tokens(rng, 4 + i) for i, name in enumerate("abcd")}
    late = random_tokens(rng, 7)
    results = []
    for overlap in (True, False):
        run = StepDriver(model, "llama", block_size=8)
        first, _ = run.launch(*(run.schedule(n, tokens) for n, tokens in prompts.items()))
        tokens = {
            n: ids[0] for n, ids in zip(prompts, run.runner.read(first).token_ids, strict=True)
        }
        # Other order, one sequence gone, one new, one chunk whose tokens are known.
        in_flight = {n: [IN_FLIGHT_TOKEN] if overlap else [tokens[n]] for n in "dac"}
        rows = [run.schedule("d", in_flight["d"]), run.schedule("late", late)]
        rows += [run.schedule(n, in_flight[n]) for n in "ac"]
        second, logits = run.launch(*rows, previous=first if overlap else None)
        third, last = run.launch(run.schedule("c", [IN_FLIGHT_TOKEN]), previous=second)
        results.append((logits, last, run.runner.read(third)))
        for name in "dac":
            expected = dense_logits(model, [prompts[name], [tokens[name]]])
            assert rms(logits[name] - expected) < 1e-5
    for name in results[0][0]:
        assert np.array_equal(results[0][0][name], results[1][0][name])
    assert np.array_equal(results[0][1]["c"], results[1][1]["c"])
    assert results[0][2] == results[1][2]


def test_a_token_in_flight_needs_a_step_in_flight(driver: StepDriver) -> None:
    driver.step({"a": [1, 2, 3]})
    waiting = driver.schedule("a", [IN_FLIGHT_TOKEN])._replace(input_from=0)
    with pytest.raises(AssertionError, match="no step is in flight"):
        driver.launch(waiting)


def test_launching_does_not_wait(driver: StepDriver, rng: np.random.Generator) -> None:
    """Twenty steps are launched, each on the tokens of the one before, and only then read."""
    launched, _ = driver.launch(driver.schedule("a", random_tokens(rng, 8)))
    chain = [launched]
    for _ in range(20):
        row = driver.schedule("a", [IN_FLIGHT_TOKEN])._replace(input_from=0)
        chain.append(driver.runner.launch(step_of([row], step=9), chain[-1]))
    tokens = [driver.runner.read(step).token_ids[0][0] for step in chain]
    # The prompt was known; what followed it is now.
    model = tiny_model(CONFIG)
    prompt = driver.sequences["a"].chunks[0]
    for i in (0, 7, 19, 20):
        expected = dense_logits(model, [prompt, tokens[:i]] if i else [prompt])
        assert tokens[i] == int(np.argmax(expected))


# --- Copies ---------------------------------------------------------------------------------------


def test_copies_come_before_the_writes_of_the_step(
    model: nn.Module, driver: StepDriver, rng: np.random.Generator
) -> None:
    """A block is copied as it was, though its owner overwrites and extends it in the same step."""
    driver.step({"owner": random_tokens(rng, 13)})
    driver.fork("copy", "owner", 11)
    # The second step shows that what the first one wrote is still there.
    for _ in range(2):
        logits = driver.step({"owner": random_tokens(rng, 2), "copy": random_tokens(rng, 4)})
        for name, got in logits.items():
            assert rms(got - dense_logits(model, driver.sequences[name].chunks)) < 1e-5


def test_a_copy_is_a_copy(model: nn.Module, driver: StepDriver, rng: np.random.Generator) -> None:
    """Writing to a copy does not change its source, in any layer's keys or values."""
    driver.step({"owner": random_tokens(rng, 13)})
    source = driver.sequences["owner"].blocks[1]
    before = [(np.array(c.key_pool[source]), np.array(c.value_pool[source])) for c in driver.caches]
    driver.fork("copy", "owner", 10)
    driver.step({"copy": random_tokens(rng, 3)})
    for cache, (keys, values) in zip(driver.caches, before):
        assert np.array_equal(np.array(cache.key_pool[source]), keys, equal_nan=True)
        assert np.array_equal(np.array(cache.value_pool[source]), values, equal_nan=True)


# --- The embedded model ---------------------------------------------------------------------------


def test_the_embedded_model_matches_its_dense_logits_in_a_mixed_step() -> None:
    tokenizer = embedded().tokenizer
    twin = embedded_twin()
    driver = StepDriver(twin.model, "llama", block_size=32)
    long = tokenizer.encode('def area(radius):\n    """Return the area."""\n' * 6)
    driver.launch(driver.schedule("chunked", long[:50], samples=False))
    driver.step({"long": long})
    driver.fork("forked", "long", 41)
    logits = driver.step(
        {
            "long": long[:1],
            "chunked": long[50:70],
            "prefill": tokenizer.encode("class Stack:\n"),
            "forked": tokenizer.encode("import math"),
        }
    )
    for name, got in logits.items():
        expected = dense_logits(embedded().model, driver.sequences[name].chunks)
        assert rms(got - expected) < 1e-4 * rms(expected)
        assert np.argmax(got) == np.argmax(expected)
