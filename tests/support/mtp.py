"""Checkpoints with MTP heads, made by transformers, and their reference in float64.

A model with more layers than it should have is saved. The last ones become the head's, under the
names of published checkpoints. The reference runs transformers' layers, with its own code around
them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from support.models import VOCAB_SIZE, embedded
from support.oracle_torch import oracle_torch
from support.reference_configs import BASE, HEAD, REFERENCES, SLIDING_FIRST, Reference
from support.reference_models import save

NUM_LAYERS, HIDDEN = 4, 64


@dataclass(frozen=True)
class Case:
    """A family.

    Attributes:
        reference: transformers' model, without the head's layer.
        prefix: Before the names of the head's weights; "{}" is its number behind the layers.
        names: Of its two first norms, its projection and its last norm; None: the model's norm.
        layer: Before the names of its layers' weights, after `prefix`; "{}" is a layer's number.
        renamed: Names in its layers, by transformers' names.
        dropped: Matches names in the last layer that the head does not have.
        hidden_first: Order of the projection's inputs.
        reads_normed: It reads the model's states after the model's last norm.
        returns_normed: The next draft reads the state after the last norm.
        offset: Added to the weights of norms.
        output: Name of the head's own output projection, if it has one.
        model_type: The family, if transformers' is another one with the same layers.
        counts: Fields that count layers, and what each layer counts.
        num_heads: Heads, of one layer each if there are several: one for each draft.
        added: Entries of its layers in lists of the config.
        own_fields: Fields that the saved config has in addition.
        published: The published config, if it has no field in common with transformers'.
        layer_of: Makes the head's layer of one of the model's, if it is not the same.
    """

    reference: Reference
    prefix: str
    names: tuple[str, str, str, str | None]
    layer: str = ""
    renamed: tuple[tuple[str, str], ...] = ()
    dropped: str = "$^"
    hidden_first: bool = False
    reads_normed: bool = True
    returns_normed: bool = False
    offset: float = 0.0
    output: str | None = None
    model_type: str | None = None
    counts: Mapping[str, int] = field(default_factory=lambda: {"num_hidden_layers": 1})
    num_heads: int = 1
    added: Mapping[str, list[Any]] = field(default_factory=dict)
    own_fields: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, Any] | None = None
    layer_of: Callable[[Any], Any] | None = None

    @property
    def num_head_layers(self) -> int:
        return max((len(values) for values in self.added.values()), default=1)


def with_fields(name: str, **fields: Any) -> Reference:
    """A reference with other fields."""
    reference = REFERENCES[name]
    return replace(reference, config={**reference.config, **fields})


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
    "added": {"layer_types": ["full_attention"]},
}


def _without_experts(layer: Any) -> Any:
    """LongCat's layer for its head: the first attention and the first MLP of a model's."""
    torch = oracle_torch()

    class WithoutExperts(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Any, **given: Any) -> Any:
            x = x + layer.self_attn[0](layer.input_layernorm[0](x), **given)[0]
            return x + layer.mlps[0](layer.post_attention_layernorm[0](x))

    return WithoutExperts()


_STEP_LISTS: dict[str, list[Any]] = {
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "rope_theta": [1e5, 1e4] * 2,
    "partial_rotary_factors": [0.5, 1.0] * 2,
    "swiglu_limits": [0.0, 0.5, 0.0, 0.5],
    "swiglu_limits_shared": [0.0, 0.0, 0.5, 0.5],
}
_STEP_HEAD: dict[str, list[Any]] = {
    "layer_types": ["sliding_attention"] * 3,
    "rope_theta": [1e4] * 3,
    "partial_rotary_factors": [1.0] * 3,
    "swiglu_limits": [0.0] * 3,
    "swiglu_limits_shared": [0.25, 0.0, 0.5],
}
_STEP_FIELDS = {
    **HEAD,
    "pad_token_id": 0,
    "sliding_window": 16,
    "moe_intermediate_size": 32,
    "share_expert_dim": 32,
    "moe_router_scaling_factor": 2.0,
}
_STEP = Reference(
    "step3p7",
    text={
        **_STEP_FIELDS,
        **_STEP_LISTS,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_sliding_attention_heads": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    },
    vision={"width": 32, "layers": 1, "heads": 2, "image_size": 28, "mlp_ratio": 2.0},
    architecture="Step3p7ForConditionalGeneration",
)
_SLIDING = {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]}
_DENSE_FIRST = ["dense", *["sparse"] * (NUM_LAYERS - 1)]
CASES: dict[str, Case] = {
    "bailing_hybrid": Case(
        with_fields("bailing_hybrid", layer_types=["linear_attention", "full_attention"] * 2),
        f"model.layers.{NUM_LAYERS}.",
        ("enorm", "hnorm", "eh_proj", "final_layernorm"),
        returns_normed=True,
        added={"layer_types": ["full_attention"]},
    ),
    "ernie4_5_moe": Case(
        with_fields("ernie4_5_moe", moe_layer_end_index=NUM_LAYERS - 1),
        "model.",
        ("mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0", None),
        layer="mtp_block.0.",
        returns_normed=True,
    ),
    "exaone_moe": Case(
        with_fields("exaone_moe", mlp_layer_types=_DENSE_FIRST),
        **{**_QWEN, "offset": 0.0, "added": _SLIDING},  # type: ignore[arg-type]
    ),
    "mellum": Case(
        with_fields("mellum", mlp_layer_types=["sparse"] * NUM_LAYERS),
        **{  # type: ignore[arg-type]
            **_QWEN,
            "offset": 0.0,
            "added": {**_SLIDING, "mlp_layer_types": ["sparse"]},
        },
    ),
    "mimo_v2_flash": Case(
        with_fields("mimo_v2_flash", layer_types=SLIDING_FIRST, mlp_layer_types=_DENSE_FIRST),
        "model.mtp.layers.0.",
        ("enorm", "hnorm", "eh_proj", "final_layernorm"),
        renamed=(("post_attention_layernorm.", "pre_mlp_layernorm."),),
        returns_normed=True,
        added=_SLIDING,
    ),
    "nemotron_h": Case(
        REFERENCES["nemotron_h"],
        "mtp.",
        ("layers.0.enorm", "layers.0.hnorm", "layers.0.eh_proj", "layers.1.final_layernorm"),
        layer="layers.{}.",
        returns_normed=True,
        added={"layers_block_type": ["attention", "moe"]},
        own_fields={"mtp_hybrid_override_pattern": "*E", "num_nextn_predict_layers": 1},
    ),
    "deepseek_v3": Case(REFERENCES["deepseek_v3"], **_DEEPSEEK),  # type: ignore[arg-type]
    "deepseek_v32": Case(REFERENCES["deepseek_v32"], **_DEEPSEEK),  # type: ignore[arg-type]
    "glm_moe_dsa": Case(REFERENCES["glm_moe_dsa"], **_DEEPSEEK),  # type: ignore[arg-type]
    "glm4_moe": Case(
        REFERENCES["glm4_moe"],
        **_DEEPSEEK,  # type: ignore[arg-type]
        output="shared_head.head",
    ),
    "glm4_moe_lite": Case(REFERENCES["glm4_moe_lite"], **_DEEPSEEK),  # type: ignore[arg-type]
    "longcat_flash": Case(
        REFERENCES["longcat_flash"],
        "model.mtp.",
        ("layers.0.enorm.m", "layers.0.hnorm.m", "layers.0.eh_proj", "norm"),
        layer="layers.0.",
        renamed=(
            ("self_attn.0.", "self_attn."),
            ("mlps.0.", "transformer_layer.mlp."),
            ("layernorm.0.", "layernorm."),
        ),
        dropped=r"(self_attn|mlps|.*layernorm)\.1\.|mlp\.",
        returns_normed=True,
        counts={"num_layers": 1, "num_hidden_layers": 2},
        layer_of=_without_experts,
    ),
    "step3p5": Case(
        _STEP,
        **{  # type: ignore[arg-type]
            "prefix": "model.layers.{}.",
            "names": ("enorm", "hnorm", "eh_proj", "transformer.shared_head.norm"),
        },
        reads_normed=False,
        offset=1.0,
        output="transformer.shared_head.output",
        num_heads=3,
        added={**_STEP_HEAD, "mlp_layer_types": ["dense"] * 3},
        published={
            **BASE,
            **_STEP_FIELDS,
            **{name: [*values, *_STEP_HEAD[name]] for name, values in _STEP_LISTS.items()},
            "model_type": "step3p5",
            "num_attention_groups": 2,
            "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 2},
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_layers_enum": "1,2,3",
            "num_nextn_predict_layers": 3,
        },
    ),
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
        num_layers = NUM_LAYERS + case.num_head_layers
        reference = case.reference
        fields = dict(reference.config if reference.text is None else reference.text)
        fields.update({name: count * num_layers for name, count in case.counts.items()})
        for name, values in case.added.items():
            if name in fields:
                fields[name] = [*fields[name], *values]
        section = "config" if reference.text is None else "text"
        model = save(replace(reference, **{section: fields}), path)
        rng = np.random.default_rng(5)
        self._own = [_own_weights(case, rng) for _ in range(case.num_heads)]
        _rewrite(path, case, self._own)
        model.config._experts_implementation = "eager"  # Its grouped products take no float64.
        model = model.double()
        self._inner = getattr(model.model, "language_model", model.model)
        if case.layer_of is not None:
            self._inner.layers[-1] = case.layer_of(self._inner.layers[-1])
        self._output = model.lm_head.weight.detach()

    def drafts(
        self, tokens: Sequence[int], choose: Callable[[np.ndarray, int], int], count: int
    ) -> list[int]:
        """Returns the head's drafts after known tokens.

        Args:
            choose: From logits and a position to a token.
        """
        torch, chained = oracle_torch(), self._case.num_heads > 1
        known, found = list(tokens[1:]), []
        with torch.no_grad():
            states = self._states(tokens[:-1])
            for number in range(count):
                logits, own = self._head(number if chained else 0, known, states)
                found.append(choose(logits, len(tokens) + number))
                known.append(found[-1])
                if chained:
                    known, states = known[1:], own
                else:
                    states = torch.cat([states, own[-1:]])
        return found

    def _states(self, tokens: Sequence[int]) -> Any:
        """``[len(tokens), hidden_size]``: the model's last states."""
        torch = oracle_torch()
        ids = torch.tensor([list(tokens)])
        normed, last = self._run(slice(NUM_LAYERS), input_ids=ids)
        return normed if self._case.reads_normed else last

    def _run(self, places: slice, **given: Any) -> tuple[Any, Any]:
        """Runs some of the layers; returns their states with and without the model's last norm."""
        inner, found = self._inner, []
        with _layers(inner, places, self._case.counts):
            hook = inner.layers[-1].register_forward_hook(
                lambda module, given, out: found.append(out[0] if isinstance(out, tuple) else out)
            )
            normed = inner(**given, use_cache=False)[0][0]
            hook.remove()
        return normed, found[0][0]

    def _head(self, number: int, tokens: Sequence[int], states: Any) -> tuple[np.ndarray, Any]:
        torch = oracle_torch()
        inner, case, own = self._inner, self._case, self._own[number]
        embed, hidden, projection, norm = (
            self._last_norm if name is None else torch.tensor(own[name], dtype=torch.float64)
            for name in case.names
        )
        embeds = inner.get_input_embeddings()(torch.tensor(list(tokens)))
        both = [self._norm(embeds, embed), self._norm(states, hidden)]
        x = torch.cat(both[::-1] if case.hidden_first else both, dim=-1) @ projection.T
        first = NUM_LAYERS + number
        places = slice(first, first + 1 if case.num_heads > 1 else None)
        last = self._run(places, inputs_embeds=x[None])[1]
        normed = self._norm(last, norm)
        output = self._output
        if case.output is not None:
            output = torch.tensor(own[case.output], dtype=torch.float64)
        return (output @ normed[-1]).numpy(), normed if case.returns_normed else last

    @property
    def _last_norm(self) -> Any:
        return self._inner.norm.weight.detach()

    def _norm(self, x: Any, weight: Any) -> Any:
        config = self._inner.config
        names = ("rms_norm_eps", "layer_norm_epsilon", "layernorm_epsilon")
        eps = next(getattr(config, name) for name in names if hasattr(config, name))
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (weight + self._case.offset)


_LISTS = ("layer_types", "mlp_layer_types", "layers_block_type")


class _layers:
    """Limits a model to some of its layers, for a while."""

    def __init__(self, inner: Any, places: slice, counts: Mapping[str, int]) -> None:
        self._inner, self._places, self._counts = inner, places, counts

    def __enter__(self) -> None:
        torch, config = oracle_torch(), self._inner.config
        self._layers = self._inner.layers
        self._inner.layers = torch.nn.ModuleList(list(self._layers)[self._places])
        fields = {name: vars(config)[name] for name in _LISTS if vars(config).get(name)}
        self._before = dict(fields)
        for name, values in fields.items():
            setattr(config, name, values[self._places])
        for name, count in self._counts.items():
            if name in vars(config):
                self._before[name] = vars(config)[name]
                setattr(config, name, count * len(self._inner.layers))

    def __exit__(self, *_: object) -> None:
        self._inner.layers = self._layers
        for name, value in self._before.items():
            setattr(self._inner.config, name, value)


def _own_weights(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Norms, projections and the output of a head, by their names."""
    embed, hidden, projection, norm = case.names
    own = {
        name: (0.2 * rng.standard_normal(HIDDEN) + 1 - case.offset).astype(np.float32)
        for name in (embed, hidden, norm)
        if name is not None
    }
    wide = rng.standard_normal((HIDDEN, 2 * HIDDEN)) / np.sqrt(2 * HIDDEN)
    own[projection] = wide.astype(np.float32)
    if case.output is not None:
        scores = rng.standard_normal((VOCAB_SIZE, HIDDEN)) / np.sqrt(HIDDEN)
        own[case.output] = scores.astype(np.float32)
    return own


def _rewrite(path: Path, case: Case, heads: Sequence[dict[str, np.ndarray]]) -> None:
    """Gives the last layers' weights the names of a head's, and adds the rest of it."""
    weights: dict[str, mx.array] = mx.load(str(path / "model.safetensors"))  # type: ignore[assignment]
    named = {_published(name, case): w for name, w in weights.items()}
    found = {name: w for name, w in named.items() if name is not None}
    for number, own in enumerate(heads):
        prefix = case.prefix.format(NUM_LAYERS + number)
        found.update({f"{prefix}{name}.weight": mx.array(w) for name, w in own.items()})
    mx.eval(found)
    mx.save_safetensors(str(path / "model.safetensors"), found, metadata={"format": "pt"})
    if case.published is not None:
        config = dict(case.published)
    else:
        config = json.loads((path / "config.json").read_text())
        config.update({name: count * NUM_LAYERS for name, count in case.counts.items()})
        for name, value in config.items():
            if isinstance(value, list) and len(value) == NUM_LAYERS + case.num_head_layers:
                config[name] = value[:NUM_LAYERS]
    if case.model_type is not None:
        config["model_type"] = case.model_type
    config.update(case.own_fields)
    assert config["vocab_size"] == VOCAB_SIZE
    (path / "config.json").write_text(json.dumps(config))
    embedded().tokenizer.save_pretrained(path)


def _published(name: str, case: Case) -> str | None:
    """The name of a weight in the checkpoint; None if it is not there."""
    for number in range(case.num_head_layers):
        _, found, rest = name.partition(f".layers.{NUM_LAYERS + number}.")
        if found:
            if re.match(case.dropped, rest):
                return None
            for theirs, published in case.renamed:
                rest = rest.replace(theirs, published)
            prefix = case.prefix.format(NUM_LAYERS + number)
            return prefix + case.layer.format(number) + rest
    return name
