"""Loss of quality by quantized keys, values and activations, on a model with real outliers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from support.real_model import CONVERSATIONS, log_softmax, paged_logits, texts

from mlx_paged import LLM, SamplingParams, ops
from mlx_paged.model.loader import LoadedModel

# Most mean KL in nats, and most relative change of perplexity.
LIMITS = {
    "int8": (0.0005, 0.003),
    "k8v4": (0.012, 0.02),
    "fp8": (0.02, 0.03),
    "int4": (0.08, 0.10),
}
INT8_ACTIVATIONS = (0.006, 0.02)


@pytest.fixture(scope="module")
def exact(loaded: LoadedModel) -> Callable[[int], tuple[list[int], np.ndarray]]:
    """(number of a text) -> its tokens, and their exact log-probabilities."""

    @cache
    def of(number: int) -> tuple[list[int], np.ndarray]:
        tokens = texts(loaded.tokenizer)[number]
        return tokens, log_softmax(paged_logits(loaded, tokens, "auto"))

    return of


def loss(exact: list[np.ndarray], found: list[np.ndarray], tokens: list[list[int]]):
    """The mean KL, and the relative change of perplexity."""
    kl = np.mean([(np.exp(e) * (e - f)).sum(axis=-1).mean() for e, f in zip(exact, found)])

    def nats(logs: list[np.ndarray]) -> float:
        return -float(
            np.mean([x[np.arange(len(t) - 1), t[1:]].mean() for x, t in zip(logs, tokens)])
        )

    return float(kl), float(np.exp(nats(found) - nats(exact)) - 1)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", LIMITS)
def test_quantized_keys_and_values(name: str, loaded: LoadedModel, exact: Callable) -> None:
    pairs = [exact(i) for i in range(2)]
    found = [log_softmax(paged_logits(loaded, tokens, name)) for tokens, _ in pairs]
    kl, change = loss([logs for _, logs in pairs], found, [tokens for tokens, _ in pairs])
    print(f"{name}: KL {kl:.5f}, perplexity {change:+.2%}")
    most_kl, most_change = LIMITS[name]
    assert 0 < kl < most_kl
    assert change < most_change


needs_int8 = pytest.mark.skipif(
    "int8" not in ops.activations(), reason="this processor has no products of int8 activations"
)


@needs_int8
def test_int8_activations(loaded: LoadedModel, exact: Callable) -> None:
    pairs = [exact(i) for i in range(2)]
    found = [log_softmax(paged_logits(loaded, tokens, "auto", "int8")) for tokens, _ in pairs]
    kl, change = loss([logs for _, logs in pairs], found, [tokens for tokens, _ in pairs])
    print(f"int8 activations: KL {kl:.5f}, perplexity {change:+.2%}")
    assert 0 < kl < INT8_ACTIVATIONS[0]
    assert change < INT8_ACTIVATIONS[1]


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    "options",
    [{"kv_cache_dtype": name} for name in LIMITS]
    + [pytest.param({"cpu_activations": "int8"}, marks=needs_int8)],
    ids=str,
)
def test_the_engine_still_knows_the_capital(options: dict[str, str], loaded: LoadedModel) -> None:
    llm = LLM(loaded, kv_cache_memory=1 << 27, **options)
    outputs = llm.chat(CONVERSATIONS[:4], SamplingParams(temperature=0, max_tokens=12))
    assert "Paris" in outputs[0].outputs[0].text
    llm.engine.check_integrity()
