"""Hidden states of any layers, of all rows of a step: those of mlx-lm's own forward."""

from __future__ import annotations

from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support.eagle3 import states_of
from support.models import StepDriver, random_tokens, tiny_config, tiny_model
from support.reference import ON_GPU

from mlx_paged import executables
from mlx_paged.model.layout import Mode
from mlx_paged.model.taps import FINAL
from mlx_paged.model.wrap import convert_to_paged

pytestmark = pytest.mark.skipif(ON_GPU, reason="heads of 16 dims have no kernel on a GPU")

CONFIG = tiny_config("llama")
NUM_LAYERS = CONFIG["num_hidden_layers"]


def driver_of(places: list[int], mode: Mode = Mode.NATIVE) -> StepDriver:
    driver = StepDriver(tiny_model(CONFIG), "llama", block_size=8, mode=mode)
    driver.runner.model.tap(places)
    return driver


def dense(model: Any, tokens: list[int]) -> dict[int, np.ndarray]:
    """``[len(tokens), hidden_size]`` by place."""
    found = {place: states_of(model, tokens, [place]) for place in range(NUM_LAYERS)}
    inner, last = model.model, mx.array(found[NUM_LAYERS - 1])[None]
    mask = nn.MultiHeadAttention.create_additive_causal_mask(len(tokens))
    end = inner.layers[-1](last, mask)
    found[NUM_LAYERS] = np.array(end[0])
    found[FINAL] = np.array(inner.norm(end)[0])
    return found


@pytest.mark.parametrize("mode", [Mode.NATIVE, Mode.GATHERED, Mode.UNIFORM])
def test_all_rows_of_steps_of_any_size(mode: Mode) -> None:
    """Few rows run as one operation, with these states as further outputs. Of a long prompt, the
    last layer would only compute the rows that are sampled. A gathered model runs once for each
    number of rows, so the states of a step come in parts."""
    places = [2, NUM_LAYERS, FINAL, 0]
    driver, model = driver_of(places, mode), tiny_model(CONFIG)
    rng = np.random.default_rng(0)
    known: dict[str, list[int]] = {"a": [], "b": []}
    for counts in ({"a": 5, "b": 3}, {"a": 1, "b": 1}, {"b": 100}, {"a": 1, "b": 4}):
        work = {name: random_tokens(rng, count) for name, count in counts.items()}
        launched, logits = driver.launch(*(driver.schedule(n, t) for n, t in work.items()))
        assert launched.hidden is not None
        hidden = np.split(np.array(launched.hidden), len(places), axis=1)
        at = 0
        for name, tokens in work.items():
            known[name] += tokens
            expected = dense(model, known[name])
            for place, states in zip(places, hidden):
                wanted = expected[place][-len(tokens) :]
                np.testing.assert_allclose(states[at : at + len(tokens)], wanted, atol=2e-4)
            final = expected[FINAL][-1]
            scores = final @ np.array(model.model.embed_tokens.weight).T
            np.testing.assert_allclose(logits[name], scores, atol=2e-3)
            at += len(tokens)
    if mode is not Mode.NATIVE:
        return
    compiled = driver.runner.model._graph_runner
    assert compiled.refusals.steps is None
    assert bool(compiled._graphs) == (executables.max_cpu_step_rows() > 0)


def test_a_step_without_taps_has_no_states() -> None:
    driver = StepDriver(tiny_model(CONFIG), "llama", block_size=8)
    launched, _ = driver.launch(driver.schedule("a", [1, 2, 3]))
    assert launched.hidden is None


def test_layers_that_a_model_does_not_have() -> None:
    paged = convert_to_paged(tiny_model(CONFIG), "llama", block_size=8)
    with pytest.raises(ValueError, match="has 4 layers, and none before 5"):
        paged.tap([1, 5])
