"""Architecture: how the metadata and tensors of one kind of model become mlx-lm's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlx_paged.gguf import formats
from mlx_paged.gguf.errors import GGUFError
from mlx_paged.gguf.metadata import Metadata
from mlx_paged.gguf.types import Tensor

Config = dict[str, Any]


@dataclass(frozen=True)
class Regrouped:
    """A tensor with its columns regrouped from ``outer`` x ``inner`` runs of equal length to
    ``inner`` x ``outer``. Happens after recoding, because blocks may be longer than a run.
    """

    tensor: Tensor
    outer: int
    inner: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Numbers of elements, outermost dimension first."""
        return self.tensor.shape


#: A stored tensor, or float32 values made of one.
Content = Tensor | np.ndarray | Regrouped
#: Changes a tensor; given its new name, returns the names and contents of one or several.
Edit = Callable[[Tensor, str, Metadata], Mapping[str, Content]]

_NAME = re.compile(r"(?:blk\.(\d+)\.)?(.+?)(?:\.(weight|bias))?")


@dataclass(frozen=True)
class Architecture:
    """One architecture of GGUF's table, as a family of mlx-lm.

    Attributes:
        config: Returns the contents of a ``config.json``.
        names: Module paths by GGUF's names without "blk.N." and ".weight" or ".bias"; {} is the
            layer. A name with its suffix comes first, and maps to a whole parameter.
        edits: Changes of contents, by the same names.
        ignored: Tensors that are not weights, by the same names.
        is_wide: Its activations may exceed float16's range.
    """

    config: Callable[[Metadata], Config]
    names: Mapping[str, str]
    edits: Mapping[str, Edit] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    is_wide: bool = False

    def parameters_of(self, tensor: Tensor, meta: Metadata) -> Mapping[str, Content]:
        """Returns a tensor's parameters by mlx-lm's names; empty for one that is not a weight.

        Raises:
            GGUFError: The tensor is unknown.
        """
        match = _NAME.fullmatch(tensor.name)
        if match is None:
            raise GGUFError(f"its tensor {tensor.name!r} is unknown")
        layer, stem, suffix = match.groups()
        if layer is not None and int(layer) >= meta.num_layers:
            return {}  # It drafts tokens.
        whole = stem if suffix is None else f"{stem}.{suffix}"
        if stem in self.ignored or whole in self.ignored:
            return {}
        if whole in self.names and (suffix is None or whole != stem):
            name = self.names[whole].format(layer)
        elif stem in self.names and suffix is not None:
            name = f"{self.names[stem].format(layer)}.{suffix}"
        else:
            raise GGUFError(
                f"its tensor {tensor.name!r} is not one of the architecture {meta.architecture!r}"
            )
        edit = self.edits.get(whole) or self.edits.get(stem)
        return {name: tensor} if edit is None else edit(tensor, name, meta)


# --- Configs --------------------------------------------------------------------------------------


def common(meta: Metadata, model_type: str, **fields: Any) -> Config:
    """Returns the fields of a ``config.json`` that nearly all families share.

    Args:
        fields: Further fields, or other values of these.
    """
    layers = meta.num_layers
    hidden = meta.size("embedding_length")
    heads = meta.same("attention.head_count", layers)
    if heads < 1:
        raise GGUFError(f"its metadata {meta.key('attention.head_count')} must be at least 1")
    embedding = meta.file.tensor("token_embd.weight")
    if len(embedding.shape) != 2:
        raise GGUFError(f"its tensor 'token_embd.weight' has {len(embedding.shape)} dimensions")
    found: Config = {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": meta.same("attention.head_count_kv", layers, heads),
        "head_dim": meta.size("attention.key_length", max(hidden // heads, 1)),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": meta.size("context_length"),
        "rope_theta": meta.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in meta.file,
    }
    if "feed_forward_length" in meta:
        found["intermediate_size"] = meta.same("feed_forward_length", layers)
    if "attention.layer_norm_epsilon" not in meta:
        found["rms_norm_eps"] = meta.number("attention.layer_norm_rms_epsilon")
    scaling = rope_scaling(meta)
    if scaling is not None:
        found["rope_scaling"] = scaling
    return {**found, **fields}


def rope_scaling(meta: Metadata) -> Config | None:
    """Returns the scaling of rotary embeddings in the terms of ``config.json``; None if plain."""
    length = meta.size("context_length")
    if "rope_freqs.weight" in meta.file:
        # Llama 3's scaling: what wavelengths are multiplied with.
        factors = _factors(meta, "rope_freqs.weight")
        return _long(factors, factors, length, 1.0)
    if "rope_factors_long.weight" in meta.file:
        return _long(
            _factors(meta, "rope_factors_short.weight"),
            _factors(meta, "rope_factors_long.weight"),
            meta.size("rope.scaling.original_context_length", length),
            meta.number("rope.scaling.attn_factor", None),
        )
    kind = meta.text("rope.scaling.type", "none")
    factor = meta.number("rope.scaling.factor", None)
    if factor is None and "rope.scale_linear" in meta:
        kind, factor = "linear", meta.number("rope.scale_linear")
    if kind == "none" or factor in (None, 0.0) or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"type": kind, "rope_type": kind, "factor": factor}
    if kind == "yarn":
        return {
            "type": kind,
            "rope_type": kind,
            "factor": factor,
            "original_max_position_embeddings": meta.size(
                "rope.scaling.original_context_length", length
            ),
            "beta_fast": meta.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": meta.number("rope.scaling.yarn_beta_slow", 1.0),
        }
    raise GGUFError(f"its metadata {meta.key('rope.scaling.type')} is the unknown type {kind!r}")


def _factors(meta: Metadata, name: str) -> list[float]:
    tensor = meta.file.tensor(name)
    if tensor.type.name != "F32" or len(tensor.shape) != 1:
        raise GGUFError(f"its tensor {name!r} must be a list of F32")
    return [float(factor) for factor in tensor.rows.view("<f4")]


def _long(short: list[float], long: list[float], original: int, scale: float | None) -> Config:
    found: Config = {
        "type": "longrope",
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
    }
    if scale is not None:
        found["attention_factor"] = scale
    return found


def layer_norm(meta: Metadata) -> float:
    """Returns the epsilon of norms that subtract the mean."""
    epsilon: float = meta.number("attention.layer_norm_epsilon")
    return epsilon


def rotated_part(meta: Metadata, config: Config) -> float:
    """Returns the part of a head that is rotated."""
    dims: int = meta.size("rope.dimension_count", config["head_dim"])
    return dims / float(config["head_dim"])


def expert_size(meta: Metadata) -> int:
    """Returns the width of an expert's MLP."""
    size: int | None = meta.size("expert_feed_forward_length", None)
    if size is not None:
        return size
    for name in meta.file.names():
        if name.endswith(".ffn_up_exps.weight"):
            return meta.file.tensor(name).shape[-2]
    raise GGUFError(f"its metadata has no {meta.key('expert_feed_forward_length')}")


def window_layers(meta: Metadata, period: int) -> list[str]:
    """Returns ``layer_types`` of a model in which every `period`-th layer sees all tokens.

    The file may have another period, or say it for each layer.
    """
    key = "attention.sliding_window_pattern"
    if key in meta:
        found = meta.per_layer(key, meta.num_layers)
        if isinstance(meta.values[meta.key(key)], int):
            period = max(found[0], 1)
        else:
            return ["sliding_attention" if each else "full_attention" for each in found]
    return [
        "full_attention" if i % period == period - 1 else "sliding_attention"
        for i in range(meta.num_layers)
    ]


# --- Edits ----------------------------------------------------------------------------------------


def unpermuted(heads: str) -> Edit:
    """Returns an edit that undoes llama.cpp's order of the rows of queries or keys.

    llama.cpp rotates neighboring elements of a head, and mlx-lm element i with i + head_dim / 2.

    Args:
        heads: The key with the number of heads.
    """

    def edit(tensor: Tensor, name: str, meta: Metadata) -> Mapping[str, Content]:
        layers = meta.num_layers
        count = meta.same(heads, layers, meta.same("attention.head_count", layers))
        vector = len(tensor.shape) == 1
        if vector and tensor.type.is_quantized:
            raise GGUFError(f"its tensor {tensor.name!r} must not be quantized")
        rows = tensor.rows
        if vector:  # a bias: each element is a row
            rows = rows.reshape(-1, tensor.type.nbytes)
        if rows.ndim != 2 or not count or len(rows) % (2 * count):
            raise GGUFError(f"its tensor {tensor.name!r} does not have rows for {count} heads")
        shape = rows.shape
        rows = rows.reshape(count, shape[0] // count // 2, 2, shape[1]).swapaxes(1, 2)
        rows = rows.reshape(tensor.rows.shape if vector else shape)
        return {name: tensor.with_rows(rows)}

    return edit


def shifted(tensor: Tensor, name: str, meta: Metadata) -> Mapping[str, Content]:
    """Undoes llama.cpp's addition of one to the weights of norms."""
    return {name: (formats.values(tensor).astype(np.float64) - 1).astype(np.float32)}


def reshaped(*shape: int) -> Edit:
    """Returns an edit that gives a plain tensor another shape; -1 is what remains."""

    def edit(tensor: Tensor, name: str, meta: Metadata) -> Mapping[str, Content]:
        return {name: formats.values(tensor).reshape(shape)}

    return edit


def split_rows(*parts: tuple[str, Callable[[Metadata], int]]) -> Edit:
    """Returns an edit that splits a matrix, or its bias, into several.

    Args:
        parts: For each part, the end of its path in place of the last module's name, and its rows.
    """

    def edit(tensor: Tensor, name: str, meta: Metadata) -> Mapping[str, Content]:
        path, _, suffix = name.rpartition(".")
        base = path.rpartition(".")[0]
        vector = len(tensor.shape) == 1
        rows = tensor.rows.reshape(-1, tensor.type.nbytes) if vector else tensor.rows
        sizes = [size(meta) for _, size in parts]
        if sum(sizes) != len(rows):
            raise GGUFError(f"its tensor {tensor.name!r} has {len(rows)} rows, not {sum(sizes)}")
        pieces = np.split(rows, np.cumsum(sizes)[:-1])
        return {
            f"{base}.{end}.{suffix}": tensor.with_rows(piece.reshape(-1) if vector else piece)
            for (end, _), piece in zip(parts, pieces)
        }

    return edit


def query_rows(meta: Metadata) -> int:
    """Rows of a layer's query projection."""
    heads: int = meta.same("attention.head_count", meta.num_layers)
    return heads * _head_dim(meta)


def key_rows(meta: Metadata) -> int:
    """Rows of a layer's key projection, and of its value projection."""
    layers = meta.num_layers
    heads: int = meta.same(
        "attention.head_count_kv", layers, meta.same("attention.head_count", layers)
    )
    return heads * _head_dim(meta)


def _head_dim(meta: Metadata) -> int:
    heads: int = meta.same("attention.head_count", meta.num_layers)
    found: int = meta.size("attention.key_length", meta.size("embedding_length") // max(heads, 1))
    return found
