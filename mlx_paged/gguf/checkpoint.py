"""Checkpoint: a GGUF file as a config, a tokenizer and named arrays of MLX."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlx_paged import extension  # noqa: F401  checks the extension, and loads BLAS, before mlx

# isort: split
import mlx.core as mx
import numpy as np

from mlx_paged.gguf import formats
from mlx_paged.gguf.architectures import architecture_of
from mlx_paged.gguf.architectures.base import Content, Regrouped
from mlx_paged.gguf.errors import GGUFError
from mlx_paged.gguf.formats import GROUP, Rounding, Scratch
from mlx_paged.gguf.metadata import Metadata
from mlx_paged.gguf.reader import GGUFFile
from mlx_paged.gguf.tokenizer import build_tokenizer
from mlx_paged.gguf.tokenizer.vocabulary import Vocabulary

logger = logging.getLogger(__name__)


@dataclass
class Weights:
    """Arrays by mlx-lm's names.

    Attributes:
        formats: Formats of quantized modules, as ``config.json`` names them.
        roundings: Errors of types that are not loaded exactly.
    """

    arrays: dict[str, mx.array] = field(default_factory=dict)
    formats: dict[str, dict[str, int | str]] = field(default_factory=dict)
    roundings: dict[str, Rounding] = field(default_factory=dict)


class Checkpoint:
    """A model in a GGUF file.

    Attributes:
        config: The contents of its ``config.json``.

    Raises:
        GGUFError: It is damaged or not supported; the message gives the reason.
        OSError: It cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = GGUFFile(path)
        self._meta = Metadata(self._file)
        self._architecture = architecture_of(self._meta)
        for name in self._file.names():
            formats.require_supported(self._file.tensor(name))
        vocabulary = Vocabulary.of(self._meta)
        self.config: dict[str, Any] = self._architecture.config(self._meta)
        size = self.config["vocab_size"]
        if len(vocabulary.tokens) > size:
            raise GGUFError(f"it has {len(vocabulary.tokens)} tokens but embeddings of {size}")
        self.config["torch_dtype"] = self._dtype()
        ends = vocabulary.end_ids()
        if ends:
            self.config["eos_token_id"] = ends
        bos = vocabulary.special("bos")
        if bos is not None:
            self.config["bos_token_id"] = bos

    @property
    def has_choice_bias(self) -> bool:
        """True if experts are chosen with a bias."""
        return any(name.endswith(".exp_probs_b.bias") for name in self._file.names())

    def tokenizer(self) -> Any:
        """Returns the tokenizer, as mlx-lm wraps it.

        Raises:
            GGUFError: It is damaged or not supported.
        """
        return build_tokenizer(self._meta)

    def generation_config(self) -> dict[str, Any]:
        """Returns how the model's makers would sample from it, as far as the file says so."""
        found: dict[str, Any] = {}
        names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
        for name, field_name in names.items():
            key = f"general.sampling.{name}"
            if key in self._meta:
                value = self._meta.number(key)
                found[field_name] = int(value) if name == "top_k" else value
        return found

    def _dtype(self) -> str:
        """The activation dtype on a GPU: the scales' or weights' dtype, unless it is too narrow."""
        matrices = [
            tensor.type.name
            for tensor in map(self._file.tensor, self._file.names())
            if len(tensor.shape) > 1
        ]
        if all(name == "F32" for name in matrices):
            return "float32"
        if self._architecture.is_wide or "BF16" in matrices:
            return "bfloat16"
        return "float16"

    def weights(
        self, shapes: Mapping[str, tuple[int, ...]], quantizable: Collection[str]
    ) -> Weights:
        """Reads all weights.

        Args:
            shapes: Shapes of the model's parameters before quantization, by name.
            quantizable: Paths of modules that multiply quantized weights.

        Raises:
            GGUFError: Weights are missing, unknown, or have other shapes.
        """
        found, scratch = Weights(), Scratch()
        for name in self._file.names():
            tensor = self._file.tensor(name)
            for target, content in self._architecture.parameters_of(tensor, self._meta).items():
                if target not in shapes:
                    if self._is_spare(target):
                        continue
                    raise GGUFError(f"its tensor {name!r} has no place in the model")
                if content.shape != shapes[target]:
                    raise GGUFError(
                        f"its tensor {name!r} has the shape {list(content.shape)}, and its "
                        f"metadata says {list(shapes[target])}"
                    )
                _add(found, target, content, quantizable, scratch)
            self._file.release(name)
        missing = [target for target in shapes if target not in found.arrays]
        if missing:
            raise GGUFError(f"it lacks {len(missing)} weights of the model, such as {missing[0]}")
        for kind, rounding in found.roundings.items():
            logger.warning(
                "%s: %d tensors of %s are held in 8 bits, with a relative error of %.2g%% (root "
                "mean square)",
                self._file.path.name,
                rounding.tensors,
                kind,
                100 * rounding.relative_error,
            )
        return found

    def _is_spare(self, target: str) -> bool:
        """True for an output projection that equals the embedding."""
        return target.startswith("lm_head.") and bool(self.config.get("tie_word_embeddings"))


def _add(
    found: Weights,
    target: str,
    content: Content,
    quantizable: Collection[str],
    scratch: Scratch,
) -> None:
    if isinstance(content, np.ndarray):
        found.arrays[target] = mx.array(content)
        return
    regroup = None
    if isinstance(content, Regrouped):
        regroup, content = content, content.tensor
    path, _, suffix = target.rpartition(".")
    if not content.type.is_quantized or suffix != "weight" or path not in quantizable:
        array = formats.plain(content)
        found.arrays[target] = array if regroup is None else _regrouped(array, regroup)
        return
    if regroup is not None and content.columns // (regroup.outer * regroup.inner) % GROUP:
        # A group of codes would be split.
        found.arrays[target] = _regrouped(formats.plain(content), regroup)
        return
    packed = formats.pack(content, found.roundings, scratch)
    if regroup is not None:
        packed = replace(
            packed,
            weight=_regrouped(packed.weight, regroup),
            scales=_regrouped(packed.scales, regroup),
            biases=None if packed.biases is None else _regrouped(packed.biases, regroup),
        )
    found.arrays[target] = packed.weight
    found.arrays[f"{path}.scales"] = packed.scales
    if packed.biases is not None:
        found.arrays[f"{path}.biases"] = packed.biases
    found.formats[path] = packed.parameters


def _regrouped(array: mx.array, by: Regrouped) -> mx.array:
    parts = array.reshape(*array.shape[:-1], by.outer, by.inner, -1)
    return mx.contiguous(parts.swapaxes(-2, -3).reshape(array.shape))
