"""Checkpoints with MTP heads, made by transformers, and their reference in float64.

A model with one layer more than it should have is saved. That layer becomes the head's, under the
names of published checkpoints. transformers has no MTP heads, but runs their layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from support.models import VOCAB_SIZE, embedded
from support.oracle_torch import oracle_torch
from support.reference_configs import REFERENCES, Reference
from support.reference_models import save

NUM_LAYERS, HIDDEN = 4, 64


@dataclass(frozen=True)
class Case:
    """A family.

    Attributes:
        reference: transformers' model, without the head's layer.
        prefix: Before the names of the head's weights.
        names: Of its two first norms, its projection and its last norm.
        layer: Before the names of its layer's weights, after `prefix`.
        hidden_first: Order of the projection's inputs.
        returns_normed: The next draft reads the state after the last norm.
        offset: Added to the weights of norms.
        has_output: The head has an output projection of its own.
        model_type: The family, if transformers' is another one with the same layers.
    """

    reference: Reference
    prefix: str
    names: tuple[str, str, str, str]
    layer: str = ""
    hidden_first: bool = False
    returns_normed: bool = False
    offset: float = 0.0
    has_output: bool = False
    model_type: str | None = None


_DEEPSEEK = {
    "prefix": f"model.layers.{NUM_LAYERS}.",
    "names": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
}
_QWEN = {
    "prefix": "mtp.",
    "names": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    "layer": "layers.0.",
    "returns_normed": True,
    "offset": 1.0,
}
CASES: dict[str, Case] = {
    "deepseek_v3": Case(REFERENCES["deepseek_v3"], **_DEEPSEEK),  # type: ignore[arg-type]
    "glm4_moe": Case(
        REFERENCES["glm4_moe"],
        **_DEEPSEEK,  # type: ignore[arg-type]
        has_output=True,
    ),
    "glm4_moe_lite": Case(REFERENCES["glm4_moe_lite"], **_DEEPSEEK),  # type: ignore[arg-type]
    "mimo": Case(
        REFERENCES["qwen2"],
        "model.mtp_layers.0.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        hidden_first=True,
        returns_normed=True,
        model_type="mimo",
    ),
    "qwen3_5_moe_text": Case(REFERENCES["qwen3_5_moe_text"], **_QWEN),  # type: ignore[arg-type]
    "qwen3_next": Case(REFERENCES["qwen3_next"], **_QWEN),  # type: ignore[arg-type]
    "qwen3_5_text": Case(REFERENCES["qwen3_5_text"], **_QWEN),  # type: ignore[arg-type]
}


class MtpReference:
    """The model and its head in float64.

    Args:
        path: Where the checkpoint is written.
    """

    def __init__(self, case: Case, path: Path) -> None:
        self._case = case
        fields = {**case.reference.config, "num_hidden_layers": NUM_LAYERS + 1}
        if "layer_types" in fields:
            fields["layer_types"] = [*fields["layer_types"], "full_attention"]
        model = save(replace(case.reference, config=fields), path)
        rng = np.random.default_rng(5)
        embed, hidden, projection, norm = case.names
        self._own = {
            name: (0.2 * rng.standard_normal(HIDDEN) + 1 - case.offset).astype(np.float32)
            for name in (embed, hidden, norm)
        }
        wide = rng.standard_normal((HIDDEN, 2 * HIDDEN)) / np.sqrt(2 * HIDDEN)
        self._own[projection] = wide.astype(np.float32)
        output = "shared_head.head"
        if case.has_output:
            scores = rng.standard_normal((VOCAB_SIZE, HIDDEN)) / np.sqrt(HIDDEN)
            self._own[output] = scores.astype(np.float32)
        _rewrite(path, case, self._own)
        model.config._experts_implementation = "eager"  # Its grouped products take no float64.
        self._model = model.double()
        weight = self._model.lm_head.weight.detach()
        if case.has_output:
            weight = oracle_torch().tensor(self._own[output], dtype=weight.dtype)
        self._output = weight

    def drafts(
        self, tokens: Sequence[int], choose: Callable[[np.ndarray, int], int], count: int
    ) -> list[int]:
        """What the head drafts after known tokens.

        Args:
            choose: From logits and a position to a token.
        """
        torch = oracle_torch()
        known, found = list(tokens[1:]), []
        with torch.no_grad():
            states = self._states(tokens[:-1])
            for number in range(count):
                logits, state = self._head(known, states)
                found.append(choose(logits, len(tokens) + number))
                known.append(found[-1])
                states = torch.cat([states, state[None]])
        return found

    def _states(self, tokens: Sequence[int]) -> Any:
        """``[len(tokens), hidden_size]``: the model's last states, normed."""
        torch = oracle_torch()
        inner = self._model.model
        with _layers(inner, range(NUM_LAYERS)):
            return inner(input_ids=torch.tensor([list(tokens)]), use_cache=False)[0][0]

    def _head(self, tokens: Sequence[int], states: Any) -> tuple[np.ndarray, Any]:
        torch = oracle_torch()
        inner, case = self._model.model, self._case
        embed, hidden, projection, norm = (
            torch.tensor(self._own[name], dtype=torch.float64) for name in case.names
        )
        embeds = self._norm(inner.embed_tokens(torch.tensor(list(tokens))), embed)
        both = [embeds, self._norm(states, hidden)]
        x = torch.cat(both[::-1] if case.hidden_first else both, dim=-1) @ projection.T
        found: list[Any] = []
        hook = inner.layers[NUM_LAYERS].register_forward_hook(
            lambda module, given, out: found.append(out[0] if isinstance(out, tuple) else out)
        )
        with _layers(inner, [NUM_LAYERS]):
            inner(inputs_embeds=x[None], use_cache=False)
        hook.remove()
        last = found[0][0, -1]
        normed = self._norm(last, norm)
        logits = (self._output @ normed).numpy()
        return logits, normed if case.returns_normed else last

    def _norm(self, x: Any, weight: Any) -> Any:
        eps = self._model.config.rms_norm_eps
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (weight + self._case.offset)


class _layers:
    """Limits a model to some of its layers, for a while."""

    def __init__(self, inner: Any, places: Sequence[int]) -> None:
        self._inner, self._places = inner, list(places)

    def __enter__(self) -> None:
        torch, config = oracle_torch(), self._inner.config
        self._before = self._inner.layers, config.num_hidden_layers
        self._types = getattr(config, "layer_types", None)
        self._inner.layers = torch.nn.ModuleList([self._before[0][i] for i in self._places])
        config.num_hidden_layers = len(self._places)
        if self._types is not None:
            config.layer_types = [self._types[i] for i in self._places]

    def __exit__(self, *_: object) -> None:
        config = self._inner.config
        self._inner.layers, config.num_hidden_layers = self._before
        if self._types is not None:
            config.layer_types = self._types


def _rewrite(path: Path, case: Case, own: dict[str, np.ndarray]) -> None:
    """Gives the last layer's weights the names of a head's, and adds the rest of it."""
    weights: dict[str, mx.array] = mx.load(str(path / "model.safetensors"))  # type: ignore[assignment]
    last = f"model.layers.{NUM_LAYERS}."
    found = {
        case.prefix + case.layer + name.removeprefix(last) if name.startswith(last) else name: w
        for name, w in weights.items()
    }
    found.update({f"{case.prefix}{name}.weight": mx.array(w) for name, w in own.items()})
    mx.eval(found)
    mx.save_safetensors(str(path / "model.safetensors"), found, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["num_hidden_layers"] = NUM_LAYERS
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:NUM_LAYERS]
    if "mlp_layer_types" in config:
        config["mlp_layer_types"] = config["mlp_layer_types"][:NUM_LAYERS]
    if case.model_type is not None:
        config["model_type"] = case.model_type
    assert config["vocab_size"] == VOCAB_SIZE
    (path / "config.json").write_text(json.dumps(config))
    embedded().tokenizer.save_pretrained(path)
