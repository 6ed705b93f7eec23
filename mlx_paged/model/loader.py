"""Loads a model directory, hub id or GGUF file with mlx-lm.

A caller that serves media passes `FindMultiModal`; `mlx_paged.engine.loading` does so.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from mlx_paged import extension  # noqa: F401  checks the extension, and loads BLAS, before mlx is imported

# isort: split
import mlx.core as mx
import mlx.nn as nn
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import (
    _download,
    _get_classes,
    dequantize_model,
    hf_repo_to_path,
    load_config,
    load_model,
    load_tokenizer,
)

from mlx_paged import descriptors, macos, ops
from mlx_paged.errors import ModelLoadError, UnsupportedModelError
from mlx_paged.gguf.reader import is_gguf
from mlx_paged.model import option_costs, pages
from mlx_paged.model.classification import ClassificationHead, load_head, without_head
from mlx_paged.model.config_files import (
    eos_token_ids,
    model_len,
    read_generation_config,
    vocab_size,
)
from mlx_paged.model.deviations import conform
from mlx_paged.model.directory import (
    check_files,
    check_path,
    check_weights,
    config_of,
    embedded_model,
    weight_names,
)
from mlx_paged.model.families import require_family
from mlx_paged.model.mlx_lm_config import mlx_lm_config
from mlx_paged.model.mlx_lm_weights import renaming
from mlx_paged.model.overrides import overridden
from mlx_paged.model.takes_media import MediaProcessor
from mlx_paged.model.wide_embeddings import WideEmbedding, WideQuantizedEmbedding
from mlx_paged.platform import is_cpu_default, is_out_of_memory, use_supported_device

logger = logging.getLogger(__name__)

# Maximum files that mlx-lm opens together while it loads a model.
_MANY_FILES = 2048
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    """A model, its tokenizer, and the contents of ``config.json`` and ``generation_config.json``.

    Attributes:
        media: Processor of its media; None if it accepts only text.
        media_reason: Why a multimodal checkpoint accepts only text; None for text models.
        head: The layer that classifies texts, or None.
        dtype: The argument of `load`.
    """

    model: nn.Module
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    name: str
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    media: MediaProcessor | None = None
    media_reason: str | None = None
    head: ClassificationHead | None = None
    dtype: str = "auto"

    @property
    def model_type(self) -> str:
        """The family, as ``config.json`` names it."""
        return str(self.config["model_type"])

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return vocab_size(self.config)

    @property
    def max_model_len(self) -> int | None:
        """The model's context limit in tokens; None if its config has none."""
        return model_len(self.config)


@dataclass(frozen=True)
class LoadedFiles:
    """The contents of a checkpoint, see `LoadedModel`."""

    model: nn.Module
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    head: ClassificationHead | None = None
    media: MediaProcessor | None = None


class MultiModalCheckpoint(Protocol):
    """A checkpoint with towers, see `mlx_paged.multimodal.loading`."""

    @property
    def is_proven(self) -> bool:
        """True if its family is proven with media, and can run on this machine."""

    @property
    def refusal(self) -> str | None:
        """Why its family is not served with media; None if no reason is known."""

    def why_text_only(self) -> str | None:
        """Returns the reason to leave out its towers; None if they are loaded."""

    def load(self, *, lazy: bool = False) -> LoadedFiles:
        """Loads it, with its towers; `lazy` leaves the weights in their files."""


#: (directory, its ``config.json``) -> the checkpoint if it is multimodal, else None.
FindMultiModal = Callable[[Path, Mapping[str, Any]], MultiModalCheckpoint | None]
#: (model, its ``config.json``): keeps a part of its weights, see `model.sharding`.
Shard = Callable[[nn.Module, Mapping[str, Any]], None]


def load(
    path_or_hub_id: str | Path | None = None,
    *,
    dtype: str = "auto",
    generation_config: Mapping[str, Any] | None = None,
    find_multimodal: FindMultiModal = lambda path, config: None,
    shard: Shard | None = None,
) -> LoadedModel:
    """Loads a model for paged serving.

    Args:
        path_or_hub_id: A directory in mlx-lm's format, a GGUF file, or a Hugging Face id. None
            loads the model embedded in this package.
        dtype: "auto", "float32", "float16" or "bfloat16". "auto" keeps the dtypes of the weights,
            except on the CPU, where activations are float32. There, the weights of linear layers,
            experts and embeddings stay quantized or in 16 bits, and all others become float32.
            "float32" on the CPU dequantizes and widens those, too.
        generation_config: Replaces the model's own ``generation_config.json``. Its end tokens are
            end tokens of the model, too.
        find_multimodal: Finds multimodal checkpoints. The default takes every model as one of text.
        shard: Keeps a part of the weights before any are read; None keeps all.

    Raises:
        InvalidParameterError: The generation config cannot be read.
        ModelLoadError: The path, its weights or the hub cannot be read; it gives the reason.
        UnsupportedModelError: The family is not verified with the paged cache.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype must be 'auto' or one of {sorted(DTYPES)} but got {dtype!r}")
    use_supported_device()
    name = str(embedded_model() if path_or_hub_id is None else path_or_hub_id)
    check_path(name)
    if is_gguf(name):
        return _load_gguf(name, dtype, generation_config, shard)
    reason, library = None, "mlx-lm"
    try:
        with descriptors.at_least(_MANY_FILES):
            path = _download(name)
            config = config_of(name, path)
            multimodal = find_multimodal(path, config)
            require_served(config, multimodal)
            check_files(name, path)
            check_weights(name, path)
            if "model_file" in config:  # mlx-lm decides whether to run code of a checkpoint.
                multimodal = None
            reason = None if multimodal is None else multimodal.why_text_only()
            if multimodal is None or reason is not None:
                loaded = _load(name, lazy=shard is not None)
                directory = _directory_of(name)
                loaded = replace(loaded, tokenizer=_with_chat_template(loaded.tokenizer, directory))
            else:
                library = "mlx-vlm"
                loaded = multimodal.load(lazy=shard is not None)
    except (ModelLoadError, UnsupportedModelError):
        raise
    except (OSError, RepositoryNotFoundError, HFValidationError) as error:
        raise ModelLoadError(name, _reason(name, error)) from error
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        _require_room(name, error)
        # mlx-lm has no error types: a damaged file or config raises these.
        raise ModelLoadError(
            name,
            f"{library} could not make a model of its config.json and safetensors files "
            f"({type(error).__name__}: {error})",
        ) from error
    if loaded.media is None:
        require_family(loaded.config)
    if shard is not None:
        _shard(loaded.model, loaded.config, dtype, shard)
    # Encoders run outside of steps, where products are MLX's.
    with _weights_of(name):
        convert(loaded.model, dtype, keeps_weights=loaded.media is None)
        mx.eval(loaded.model.parameters())  # A part of them is read only now.
    if generation_config is None:
        # A hub id's files have been downloaded; this only finds their path.
        generation_config = read_generation_config(_directory_of(name))
    tokenizer = loaded.tokenizer
    tokenizer.eos_token_ids = {*tokenizer.eos_token_ids, *eos_token_ids(generation_config)}
    if reason is not None:
        logger.warning("%s is served for text only: %s", name, reason)
    return LoadedModel(
        loaded.model,
        tokenizer,
        loaded.config,
        name,
        generation_config,
        loaded.media,
        reason,
        loaded.head,
        dtype,
    )


def _load_gguf(
    name: str, dtype: str, generation_config: Mapping[str, Any] | None, shard: Shard | None
) -> LoadedModel:
    """Loads a GGUF file, which holds the config and the tokenizer, too.

    Raises:
        ModelLoadError, UnsupportedModelError: See `load`.
    """
    from mlx_paged.model.gguf_loading import load_gguf

    checkpoint, model, config, tokenizer = load_gguf(name, dtype)
    if shard is not None:
        _shard(model, config, dtype, shard)
    with _weights_of(name):
        convert(model, dtype, keeps_weights=True)
        mx.eval(model.parameters())
    if generation_config is None:
        generation_config = checkpoint.generation_config()
    tokenizer.eos_token_ids = {*tokenizer.eos_token_ids, *eos_token_ids(generation_config)}
    return LoadedModel(model, tokenizer, config, name, generation_config, dtype=dtype)


def _load(name: str, *, lazy: bool = False) -> LoadedFiles:
    """Loads a model like mlx-lm's `load`, but also those that embed or classify texts, whose files
    have no output projection.

    Args:
        lazy: Leaves the weights in their files.
    """
    path = _download(name)
    config = load_config(path)
    names = weight_names(path)
    has_head = any(name.endswith("lm_head.weight") for name in names)
    head = load_head(path, config, names)
    if head is not None and not has_head:
        config["tie_word_embeddings"] = True  # The projection is not used.
    errors: list[Exception] = []
    # Checkpoints written for mlx-lm omit fields with mlx-lm's defaults. If these and transformers'
    # give different modules, the weights show which were meant.
    for fill in (True, False):
        try:
            model, loaded = load_model(
                path,
                lazy,
                model_config=mlx_lm_config(config, fill=fill, has_head=has_head),
                get_model_classes=model_classes if head is None else _without_head,
            )
            model.__class__ = type(model).__mro__[1]  # without the changes of `renaming`
            conform(model, loaded, config)
            ends = loaded.get("eos_token_id")
            return LoadedFiles(model, load_tokenizer(path, eos_token_ids=ends), loaded, head)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            errors.append(error)
    if not (path / "modules.json").is_file():
        first, second = errors
        if isinstance(first, UnsupportedModelError) or str(first) == str(second):
            raise first
        own = f"with mlx-lm's own defaults: {type(second).__name__}: {second}"
        raise ValueError(f"{first}; {own}") from first
    # Pooling does not use the projection; the embedding takes its place.
    model, config = load_model(
        path,
        lazy,
        model_config={**mlx_lm_config(config), "tie_word_embeddings": True},
        get_model_classes=_of_inner_weights,
    )
    ends = config.get("eos_token_id")
    return LoadedFiles(model, load_tokenizer(path, eos_token_ids=ends), config)


def _with_chat_template(tokenizer: TokenizerWrapper, path: Path) -> TokenizerWrapper:
    """Returns a tokenizer with the template saved by older processors, if it has none of its own.

    No tokenizer reads these files, and many text-only conversions kept them.

    Raises:
        ValueError: ``chat_template.json`` has no template.
    """
    for name in ("chat_template.json", "processor_config.json"):
        file = path / name
        if tokenizer.has_chat_template or not file.is_file():
            continue
        found = json.loads(file.read_text())
        template = found.get("chat_template") if isinstance(found, dict) else None
        if isinstance(template, str | list):  # Several are a list of names and templates.
            ends = sorted(tokenizer.eos_token_ids)
            tokenizer = load_tokenizer(path, {"chat_template": template}, ends)
        elif name == "chat_template.json":
            expected = "an object with a chat_template, a text or a list"
            raise ValueError(f"chat_template.json must be {expected}, but is {found!r}")
    return tokenizer


def model_classes(config: dict[str, Any]) -> tuple[type[nn.Module], Any]:
    """Returns mlx-lm's classes, extended to read transformers' names of weights."""
    model_class, args_class = _get_classes(config=config)
    return renaming(model_class), args_class


def _without_head(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    """Like `model_classes`, for a model whose file also has a classification layer."""
    model_class, args_class = _get_classes(config=config)
    sanitize = getattr(model_class, "sanitize", lambda _, weights: weights)
    dropping = overridden(
        model_class, "sanitize", lambda self, weights: sanitize(self, without_head(weights))
    )
    return renaming(dropping), args_class


def _of_inner_weights(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    """Returns mlx-lm's classes for a file with only the weights of the model's `model`."""
    model_class, args_class = _get_classes(config=config)
    sanitize = getattr(model_class, "sanitize", lambda _, weights: weights)

    def of_inner(self: nn.Module, weights: dict[str, mx.array]) -> Any:
        if not any(name.startswith("model.") for name in weights):
            weights = {f"model.{name}": weight for name, weight in weights.items()}
        return sanitize(self, weights)

    return overridden(model_class, "sanitize", of_inner), args_class


def _directory_of(name: str) -> Path:
    return Path(name) if Path(name).exists() else hf_repo_to_path(name)


def local_directory(name: str) -> Path:
    """Returns the directory of a checkpoint; downloads that of a hub id.

    Raises:
        ModelLoadError: There is none.
    """
    check_path(name)
    try:
        return Path(_download(name))
    except (OSError, RepositoryNotFoundError, HFValidationError) as error:
        raise ModelLoadError(name, _reason(name, error)) from error


def require_served(config: Mapping[str, Any], multimodal: MultiModalCheckpoint | None) -> None:
    """Refuses a family that is served neither for text nor with media.

    Args:
        config: Its ``config.json``.
        multimodal: The checkpoint if it is multimodal.

    Raises:
        UnsupportedModelError: It gives the reason.
    """
    if multimodal is not None and multimodal.is_proven:
        return
    try:
        require_family(mlx_lm_config(config))
    except UnsupportedModelError as error:
        reason = None if multimodal is None else multimodal.refusal
        if reason is None:
            raise
        raise UnsupportedModelError(str(config.get("model_type")), reason) from error


@contextmanager
def _weights_of(name: str) -> Iterator[None]:
    """Reads weights; raises `ModelLoadError` if the GPU has no memory for them."""
    try:
        yield
    except RuntimeError as error:
        _require_room(name, error)
        raise


def _require_room(name: str, error: Exception) -> None:
    """Raises `ModelLoadError` if MLX found no memory for the weights."""
    if not is_out_of_memory(error):
        return
    advice = macos.limit_advice_here()
    reason = f"its weights do not fit into memory ({error})" + (f": {advice}" if advice else "")
    raise ModelLoadError(name, reason) from error


def _reason(name: str, error: Exception) -> str:
    if Path(name).exists():
        return str(error)
    return (
        f"it is not a local directory, and the Hugging Face hub did not give it "
        f"({type(error).__name__}: {str(error).strip().splitlines()[0]}). Check the name and the "
        "network, log in for a gated model, or download it and pass its path"
    )


def _shard(model: nn.Module, config: Mapping[str, Any], dtype: str, shard: Shard) -> None:
    if dtype == "float32":
        dequantize_model(model)  # lazily; groups of quantized weights could not be divided
    shard(model, config)


def convert(model: nn.Module, dtype: str, *, keeps_weights: bool) -> None:
    """Converts the weights of a model, and evaluates them. On the CPU they move into huge pages,
    which takes longer than this call.

    Args:
        dtype: See `load`.
        keeps_weights: On the CPU, "auto" keeps the weights of linear layers, experts and embeddings
            that have native products.
    """
    on_cpu = is_cpu_default()
    if dtype == "auto" and not on_cpu:
        return
    if on_cpu and (cost := option_costs.of_dtype(model, dtype)) is not None:
        logger.warning("%s", cost)
    kept: list[tuple[nn.Module, type]] = []
    if dtype == "auto" and keeps_weights:
        kept = [(module, type(module)) for module in model.modules() if _stays(module)]
    # Formats without a native product are scalar code in MLX's CPU backend, quantized or 16-bit.
    for module, _ in kept:
        module.__class__ = nn.Module  # hides it from the following steps
    try:
        if dtype in ("auto", "float32"):
            dequantize_model(model)
        weights = {id(module): dict(module) for module, _ in kept}
        model.set_dtype(DTYPES.get(dtype, mx.float32))
    finally:
        for module, kind in kept:
            module.__class__ = _WIDE.get(kind, kind)
    for module, _ in kept:
        before = weights[id(module)]
        module.update({name: before[name] for name in _KEPT if name in before})
    mx.eval(model.parameters())
    if on_cpu:
        pages.collapse_pages(array for _, array in tree_flatten(model.parameters()))


_WIDE = {nn.Embedding: WideEmbedding, nn.QuantizedEmbedding: WideQuantizedEmbedding}
_KEPT = ("weight", "scales", "biases")


def _stays(module: nn.Module) -> bool:
    """Returns True if a module multiplies its weight unchanged. No subclass does."""
    if type(module) in (nn.Linear, nn.Embedding, SwitchLinear):
        return module.weight.dtype in (mx.float16, mx.bfloat16)
    if type(module) in (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear):
        return ops.has_product(module.mode, module.bits, module.group_size)
    return False
