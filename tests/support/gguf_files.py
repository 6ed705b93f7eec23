"""Writes GGUF files with the `gguf` package: random models of an architecture, and vocabularies.

A model's weights are those of a random model of mlx-lm. Their names in the file come from the
package's own table, and the rest is what llama.cpp's converter does: it permutes rows of Llama's
queries and keys, adds one to Gemma's norms, and so on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from mlx_paged.model.deviations import conform
from mlx_paged.model.mlx_lm_config import mlx_lm_config

Values = dict[str, np.ndarray]
TOKENS = [3, 17, 96, 5, 41, 41, 8, 2, 77, 60, 13, 29]
VOCAB_SIZE = 128


@dataclass(frozen=True)
class Case:
    """An architecture, with a small config.

    Attributes:
        architecture: GGUF's name.
        config: A ``config.json``.
        metadata: Keys without the architecture's name.
        rename: Names of weights that the package's table does not have, as regular expressions.
        change: Changes weights, as llama.cpp's converter does. It gets and returns names of GGUF.
        extra: Tensors that the converter adds.
        table: The package's name of the architecture, if it differs from GGUF's name in upper case.
    """

    architecture: str
    config: dict[str, Any]
    metadata: dict[str, Any]
    rename: tuple[tuple[str, str], ...] = ()
    change: Callable[[str, np.ndarray, Mapping[str, Any]], Mapping[str, np.ndarray]] | None = None
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)
    table: str | None = None


_EXPERTS = (
    r"(.*layers\.)(\d+)\..*\.(?:switch_mlp|experts)\.(gate|up|down)_proj",
    r"blk.\2.ffn_\3_exps",
)


def random_model(config: Mapping[str, Any], seed: int = 0) -> nn.Module:
    """A model of mlx-lm with float32 weights that every numpy makes alike.

    It is made as from a directory with this ``config.json``.
    """
    normalized = mlx_lm_config(config)
    model_class, args_class = _get_classes(config=normalized)
    model = model_class(args_class.from_dict(normalized))
    if config.get("moe_use_aux_free"):  # ERNIE's choice of experts, which mlx-lm's module lacks
        for layer in model.layers:
            if hasattr(layer.mlp, "switch_mlp"):
                layer.mlp.choice_bias = mx.zeros(layer.mlp.gate.weight.shape[0])
    random = np.random.RandomState(seed)
    weights = []
    for name, array in sorted(tree_flatten(model.parameters())):
        values = random.standard_normal(array.shape)
        if "norm" in name and name.endswith("weight"):
            values = 1 + values * 0.1
        elif array.ndim > 1:
            values = values / np.sqrt(array.shape[-1]) * 1.5
        else:
            values = values * 0.2
        weights.append((name, mx.array(values.astype(np.float32))))
    model.load_weights(weights)
    model.eval()
    conform(model, normalized, config)
    return model


#: One takes 30 ms to make.
_tensor_names = cache(lambda kind: gguf.get_tensor_name_map(kind, 64))


def gguf_name(case: Case, name: str) -> str:
    """The file's name of a weight of mlx-lm."""
    path, _, suffix = name.rpartition(".")
    for pattern, target in (*case.rename, _EXPERTS):
        if match := re.fullmatch(pattern, name):
            return match.expand(target)
        if match := re.fullmatch(pattern, path):
            return f"{match.expand(target)}.{suffix}"
    kind = getattr(gguf.MODEL_ARCH, case.table or case.architecture.upper().replace("-", "_"))
    found = _tensor_names(kind).get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, f"the package has no name for {name}"
    return found


def tensors_of(case: Case, model: nn.Module) -> Values:
    """The file's tensors in float32, by the file's names."""
    found: Values = dict(case.extra)
    for name, array in tree_flatten(model.parameters()):
        stored = gguf_name(case, name)
        values = np.array(array.astype(mx.float32))
        changed = (
            {stored: values} if case.change is None else case.change(stored, values, case.config)
        )
        found.update(changed)
    return found


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of queries or keys."""
    shape = values.shape
    return (
        values.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    )


def permute_llama(name: str, values: np.ndarray, config: Mapping[str, Any]) -> Values:
    """The converter's change to Llama's weights."""
    if ".attn_q." in name:
        values = permuted(values, config["num_attention_heads"])
    elif ".attn_k." in name:
        values = permuted(values, config["num_key_value_heads"])
    return {name: values}


def write_file(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    kinds: Callable[[str, np.ndarray], gguf.GGMLQuantizationType] | None = None,
    tokens: Mapping[str, Any] | None = None,
    split_max_tensors: int = 0,
) -> Path:
    """Writes a file.

    Args:
        metadata: Keys without the architecture's name.
        kinds: Returns the type of a tensor; F32 by default. A tensor of uint8 holds its blocks.
        tokens: Keys of the tokenizer without "tokenizer."; a small one of bytes by default.
        split_max_tensors: Write several files with up to this number of tensors; 0: one file.
    """
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
    entries = {f"{architecture}.{name}": value for name, value in metadata.items()}
    vocabulary = byte_vocabulary() if tokens is None else tokens
    entries |= {f"tokenizer.{name}": value for name, value in vocabulary.items()}
    for name, value in entries.items():
        add_value(writer, name, value)
    for name, values in tensors.items():
        kind = gguf.GGMLQuantizationType.F32 if kinds is None else kinds(name, values)
        is_stored = values.dtype == np.uint8  # blocks
        stored = values if is_stored else gguf.quants.quantize(values, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    """Adds a key of the metadata, with the type that llama.cpp expects for such a value."""
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, list(value))


def random_blocks(
    kind: gguf.GGMLQuantizationType, shape: tuple[int, ...], seed: int, scale: float = 0.02
) -> np.ndarray:
    """Random blocks of a type that the package cannot quantize to: ``[*shape[:-1], bytes]``."""
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.RandomState(seed)
    blocks = random.randint(0, 256, (*shape[:-1], shape[-1] // size, nbytes)).astype(np.uint8)
    for at in HALVES[kind.name]:
        scales = (random.standard_normal(blocks.shape[:-1]) * scale).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


#: Places of the float16 scales in a block of each type.
HALVES = {
    **{"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)},
    **{"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82)},
    "MXFP4": (),
}


def byte_vocabulary(size: int = VOCAB_SIZE) -> dict[str, Any]:
    """A byte-level tokenizer of `size` tokens, without letters outside ASCII."""
    letters = [chr(code) for code in range(33, 127)]  # byte-level BPE spells these as themselves
    specials = ["<s>", "</s>"]
    words = ["\u0120", "\u010a", "\u0120a", "th"]
    tokens = [*specials, *letters, *words]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), size)]
    kinds = [3, 3, *[1] * (len(letters) + len(words))]
    kinds += [5] * (size - len(kinds))
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "gpt-2",
        "ggml.tokens": tokens,
        "ggml.token_type": kinds,
        "ggml.merges": ["\u0120 a", "t h"],
        "ggml.bos_token_id": 0,
        "ggml.eos_token_id": 1,
        "ggml.add_bos_token": False,
    }


def write_model(path: Path, case: Case, model: nn.Module, **options: Any) -> Path:
    """Writes a model of a case."""
    return write_file(path, case.architecture, case.metadata, tensors_of(case, model), **options)


def dense_logits(model: nn.Module, tokens: list[int] | None = None) -> np.ndarray:
    """Logits ``[len(tokens), vocab]`` float32 without a cache."""
    found = model(mx.array([TOKENS if tokens is None else tokens]))
    return np.array(found[0].astype(mx.float32))
