"""Loads multimodal checkpoints with mlx-vlm: the hook of `mlx_paged.model.loader`."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_tokenizer

from mlx_paged.errors import ModelLoadError, UnsupportedModelError
from mlx_paged.model.config_files import has_vocab_size
from mlx_paged.model.directory import weight_names
from mlx_paged.model.loader import LoadedFiles
from mlx_paged.multimodal import deepseek_vl
from mlx_paged.multimodal.corrections import correct
from mlx_paged.multimodal.families import MEDIA_FAMILIES, MEDIA_REFUSED, MediaFamily
from mlx_paged.multimodal.files import as_published
from mlx_paged.multimodal.mlx_vlm import INSTALL, import_mlx_vlm, installed_version
from mlx_paged.multimodal.model import MultiModalModel
from mlx_paged.multimodal.processor import MediaModel

# Parts of the names of towers' weights.
_TOWERS = ("vision", "visual", "audio", "image", "img_", "mm_projector", "multi_modal", "vpm.")


@dataclass(frozen=True)
class Checkpoint:
    """A multimodal checkpoint, see `model.loader.MultiModalCheckpoint`.

    Attributes:
        package: mlx-vlm's package for it, see `packages.package_of`.
    """

    path: Path
    package: str

    @property
    def is_proven(self) -> bool:
        """True if its family is proven, and mlx-vlm is installed."""
        return self.package in MEDIA_FAMILIES and installed_version() is not None

    @property
    def refusal(self) -> str | None:
        """Why its family is not served with media; None if no reason is known."""
        if self.package in MEDIA_FAMILIES:
            return None if self.is_proven else INSTALL
        return MEDIA_REFUSED.get(self.package)

    def why_text_only(self) -> str | None:
        """Returns the reason to leave out its towers; None if they are loaded."""
        if self.package not in MEDIA_FAMILIES:
            return self.refusal or f"media are not proven for model_type {self.package!r}"
        if not _has_towers(self.path):
            return "its files have no weights of a tower"
        return self.refusal

    def load(self, *, lazy: bool = False) -> LoadedFiles:
        """Loads it, with its towers.

        Args:
            lazy: Leave the weights in their files.

        Raises:
            ModelLoadError, UnsupportedModelError: See `load`.
        """
        path, family = self.path, MEDIA_FAMILIES[self.package]
        config = json.loads((path / "config.json").read_text())
        model, processor = load(path, family, str(config["model_type"]), lazy=lazy)
        inner_config = getattr(model.vlm.config, "thinker_config", model.vlm.config)
        media = MediaModel(processor, inner_config, family)
        text = inner_config if hasattr(inner_config, "vocab_size") else inner_config.text_config
        if not has_vocab_size(config):  # Configs omit their library's defaults.
            config["vocab_size"] = int(text.vocab_size)
        inner = config.get("text_config")
        ends = config.get("eos_token_id")
        if ends is None and isinstance(inner, dict):
            ends = inner.get("eos_token_id")
        tokenizer = load_tokenizer(path, eos_token_ids=ends)
        if not tokenizer.has_chat_template and media.chat_template is not None:
            tokenizer = load_tokenizer(path, {"chat_template": media.chat_template}, ends)
        return LoadedFiles(model, tokenizer, config, media=media)


def _has_towers(path: Path) -> bool:
    """Returns True if a checkpoint has weights besides a language model's, which mlx-lm drops."""
    return any(part in name for name in weight_names(path) for part in _TOWERS)


def load(
    path: Path, family: MediaFamily, model_type: str, *, lazy: bool = False
) -> tuple[MultiModalModel, Any]:
    """Loads a checkpoint with mlx-vlm.

    Returns:
        The model, and mlx-vlm's or transformers' processor of it.

    Raises:
        ModelLoadError: mlx-vlm has no processor for its files.
        UnsupportedModelError: Its weights are not supported, see `MediaFamily.refuses`.
    """
    import_mlx_vlm()
    from mlx_vlm.utils import load_model

    with as_published(path) as config:
        vlm = load_model(path, lazy)
    correct(family.module, vlm, config)
    reason = family.refuses(vlm)
    if reason is not None:
        raise UnsupportedModelError(model_type, reason)
    try:
        # Some processors print messages to stdout, which is for this program's output.
        with contextlib.redirect_stdout(sys.stderr):
            return MultiModalModel(vlm, family, model_type), _processor(path, family.module)
    except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        lines = str(error).strip().splitlines()
        raise ModelLoadError(
            str(path),
            f"mlx-vlm could not make a processor of its files ({type(error).__name__}: "
            f"{lines[0] if lines else ''})",
        ) from error


def _processor(path: Path, package: str = "") -> Any:
    from mlx_vlm.utils import load_image_processor, load_processor

    config_type = json.loads((path / "config.json").read_text()).get("model_type")
    with _without_deprecation_warnings():
        # By default, mlx-vlm runs code that comes with a checkpoint.
        if package == "pixtral":  # By name, its checkpoints are LLaVA's.
            from mlx_vlm.models.pixtral.processing_pixtral import PixtralProcessor

            processor = PixtralProcessor.from_pretrained(path, trust_remote_code=False)
        elif config_type in deepseek_vl.TYPES:
            return deepseek_vl.processor(path)
        else:
            processor = load_processor(path, add_detokenizer=False, trust_remote_code=False)
        image_processor = load_image_processor(path)
    # If the class is the same, the processor has one from the checkpoint's files already.
    if image_processor is not None and not isinstance(
        getattr(processor, "image_processor", None), type(image_processor)
    ):
        processor.image_processor = image_processor
    if hasattr(
        getattr(processor, "image_processor", None), "to_mlx"
    ):  # Kimi's makes a list of all pixels.
        processor.image_processor.to_mlx = _pixels
    return processor


def _pixels(image: Any) -> mx.array:
    """``[3, height, width]`` from 0 to 1 of a picture of Pillow."""
    return mx.array(np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / np.float32(255))


@contextlib.contextmanager
def _without_deprecation_warnings() -> Iterator[None]:
    """Drops transformers' warning about an argument that mlx-vlm passes and no user can change."""
    logger = logging.getLogger("transformers.models.auto.image_processing_auto")

    def is_for_users(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("The `use_fast` parameter is deprecated")

    logger.addFilter(is_for_users)
    try:
        yield
    finally:
        logger.removeFilter(is_for_users)
