"""Measures the quality loss of int8 activations (`--cpu-activations int8`): KL and perplexity.

python bench/activation_quality.py          # some minutes; writes
                                            # bench/results/activation_quality-cpu.json
python bench/activation_quality.py --quick  # a sixteenth of the tokens, writes nothing

Two models, each with 8-bit and 4-bit weights in groups of 64: the embedded one on source files
outside its training data (this package's own), and a random one with sharpened logits on texts it
sampled itself. Each also runs with planted outliers: four channels of every norm's output are
thirty times as large, and the matching columns of the next linear layers are divided by as much, so
the model is unchanged before its weights are quantized. The reference uses float32 activations and
the same quantized weights. For comparison, the results include the loss from quantizing the
weights, relative to the float32 model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from harness import print_table, save
from kv_quality import BLOCK_SIZE, CHUNK, log_softmax, random_model, sources, written_by

from mlx_paged.engine.loading import load
from mlx_paged.model.plan import StepInputs
from mlx_paged.model.wrap import build_paged_model

GROUP_SIZE = 64
BITS = (8, 4)
OUTLIERS = {3: 30.0, 17: -30.0, 100: 30.0, 130: 30.0}  # scale by channel


@dataclass(frozen=True)
class Quality:
    """Quality of int8 activations relative to float32 ones with the same weights.

    Attributes:
        kl: Mean of KL(float32 || int8) over all positions, in nats.
        kl_of_weights: The same for the quantized weights with float32 activations, relative to the
            float32 model.
        perplexity: With int8 activations.
        perplexity_change: Relative change.
        top1: Share of positions with the same most likely token.
    """

    model: str
    weight_bits: int
    kl: float
    kl_of_weights: float
    perplexity: float
    perplexity_change: float
    top1: float


def plant_outliers(model: nn.Module) -> None:
    """Scales up channels of the norms' outputs, and scales down the layers that read them."""

    def scale(norm: nn.Module, *linears: nn.Module) -> None:
        factors = np.ones(norm.weight.shape[0], np.float32)
        for channel, factor in OUTLIERS.items():
            factors[channel] = factor
        norm.weight = norm.weight * mx.array(factors)
        for linear in linears:
            linear.weight = linear.weight / mx.array(factors)

    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        scale(layer.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj)
        scale(layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj)
    mx.eval(model.parameters())


def cases(quick: bool) -> Iterator[tuple[str, nn.Module, dict[str, Any], list[np.ndarray]]]:
    """Returns names, float32 models, their configurations, and texts."""
    num_texts, length = (2, 256) if quick else (8, 1024)
    loaded = load(dtype="float32")
    random, config = random_model("llama", 64, is_sharpened=True)
    named = (
        ("embedded", loaded.model, loaded.config, sources(loaded, num_texts, length)),
        ("random llama, sharpened", random, config, written_by(random, num_texts, length // 2)),
    )
    for name, model, config, texts in named:
        yield name, deepcopy(model), config, texts
        plant_outliers(model)
        yield f"{name}, outliers planted", model, config, texts


def logits(
    model: nn.Module, config: dict[str, Any], activations: str, tokens: np.ndarray
) -> np.ndarray:
    """Computes ``[num_tokens, vocab_size]`` logits, chunk by chunk."""
    served = build_paged_model(model, config, block_size=BLOCK_SIZE)
    served.round_activations(activations)
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    served.allocate(num_blocks + 1)
    found = []
    for begin in range(0, len(tokens), CHUNK):
        end = min(begin + CHUNK, len(tokens))
        inputs = StepInputs(
            context_lens=np.array([end]),
            query_lens=np.array([end - begin]),
            tables=[list(range(1, -(-end // BLOCK_SIZE) + 1))],
            logit_rows=np.arange(end - begin),
        )
        step = served.forward(mx.array(tokens[begin:end].astype(np.int32)), inputs)
        mx.eval(step, *served.pools())
        found.append(np.array(step))
    return np.concatenate(found)


def kl(references: list[np.ndarray], others: list[np.ndarray]) -> float:
    pairs = zip(references, others, strict=True)
    return float(np.mean([(np.exp(r) * (r - x)).sum(axis=-1).mean() for r, x in pairs]))


def loss(logs: list[np.ndarray], texts: list[np.ndarray]) -> float:
    """Cross-entropy in nats per token."""
    pairs = zip(logs, texts, strict=True)
    return -float(np.mean([x[np.arange(len(t) - 1), t[1:]].mean() for x, t in pairs]))


def measure(
    name: str, model: nn.Module, config: dict[str, Any], texts: list[np.ndarray]
) -> Iterator[Quality]:
    def run(model: nn.Module, activations: str) -> list[np.ndarray]:
        return [log_softmax(logits(model, config, activations, text)) for text in texts]

    quantized = []
    for bits in BITS:
        quantized.append(deepcopy(model))
        nn.quantize(quantized[-1], group_size=GROUP_SIZE, bits=bits)
        mx.eval(quantized[-1].parameters())
    exact = run(model, "float32")
    for bits, one in zip(BITS, quantized, strict=True):
        reference, found = run(one, "float32"), run(one, "int8")
        same = [
            (r.argmax(axis=-1) == x.argmax(axis=-1)).mean()
            for r, x in zip(reference, found, strict=True)
        ]
        lost = loss(found, texts)
        yield Quality(
            name,
            bits,
            kl(reference, found),
            kl(exact, reference),
            float(np.exp(lost)),
            float(np.exp(lost - loss(reference, texts)) - 1),
            float(np.mean(same)),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer tokens, no file")
    quick = parser.parse_args().quick
    mx.set_default_device(mx.cpu)
    rows: list[Quality] = []
    for case in cases(quick):
        rows += measure(*case)
        print(rows[-1], flush=True)
    print_table(
        ["", "weights", "KL", "of the weights", "perplexity", "change", "same top-1"],
        [
            [
                q.model,
                f"{q.weight_bits} bits",
                f"{q.kl:.6f}",
                f"{q.kl_of_weights:.5f}",
                f"{q.perplexity:.3f}",
                f"{100 * q.perplexity_change:+.3f}%",
                f"{100 * q.top1:.1f}%",
            ]
            for q in rows
        ],
    )
    if not quick:
        save(
            "activation_quality-cpu",
            {"benchmark": "activation_quality", "results": [asdict(q) for q in rows]},
        )


if __name__ == "__main__":
    main()
