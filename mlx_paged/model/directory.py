"""Looks into a model's directory, and explains missing parts where mlx-lm would give no reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from mlx_paged.errors import ModelLoadError
from mlx_paged.gguf.reader import is_gguf

_PYTORCH = ("pytorch_model*.bin", "model*.bin", "consolidated*.pth", "*.pth", "*.pt", "*.bin")
# Files with the vocabulary of a tokenizer, and those of tokenizers that are code.
_VOCABULARIES = (
    *("tokenizer.json", "tokenizer.model", "*.tiktoken", "tekken.json", "vocab.json", "vocab.txt"),
    *("spiece.model", "sentencepiece*.model", "*.spm", "tokenization_*.py", "*vocab*"),
)


def check_path(name: str) -> None:
    """Refuses a path that is neither a directory nor a GGUF file nor a hub id.

    Raises:
        ModelLoadError: It gives the reason.
    """
    path = Path(name)
    if not name or not path.exists():
        if path.suffix == ".gguf":
            raise ModelLoadError(name, "there is no such file")
        if not name or name.startswith(("/", "./", "../", "~")) or name.count("/") != 1:
            raise ModelLoadError(
                name, "there is no such directory, and it is not a hub id ('owner/model')"
            )
    elif not path.is_dir() and not is_gguf(path):
        raise ModelLoadError(
            name, "it is a file, but none in GGUF; give the directory that holds config.json"
        )


def embedded_model() -> Path:
    """Returns the directory of the embedded model."""
    from mlx_paged.demo import model_path

    return model_path()


def model_directory(name: str) -> Path | None:
    """Returns the directory of a loaded model's files; None if it has none on this machine."""
    if Path(name).is_file():  # GGUF
        return None
    try:
        if Path(name).exists():
            return Path(name)
        if name.count("/") != 1:
            return None
        return Path(snapshot_download(name, local_files_only=True, allow_patterns="config.json"))
    except (OSError, ValueError):  # not downloaded; no hub id
        return None


def config_of(name: str, path: Path) -> Mapping[str, Any]:
    """Returns the config of a directory.

    Raises:
        ModelLoadError: It is missing or invalid.
    """
    file = path / "config.json"
    if not file.is_file():
        others = _other_weights(path)
        if others is not None and not any(path.glob("*.safetensors")):
            raise ModelLoadError(name, others)
        raise ModelLoadError(name, "the directory has no config.json")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ModelLoadError(name, f"its config.json is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelLoadError(name, f"its config.json must be an object but is {config!r}")
    if "model_type" not in config:
        raise ModelLoadError(name, "its config.json names no model_type")
    return config


def check_files(name: str, path: Path) -> None:
    """Refuses a directory without weights or without a tokenizer.

    Raises:
        ModelLoadError: It names the missing files and a remedy.
    """
    if not any(path.glob("model*.safetensors")):
        missing = "the directory has no weights (model*.safetensors)"
        raise ModelLoadError(name, _other_weights(path) or missing)
    if not any(any(path.glob(pattern)) for pattern in _VOCABULARIES):
        raise ModelLoadError(
            name,
            "the directory has no tokenizer (tokenizer.json, tokenizer.model, vocab.json or "
            "tekken.json): copy the tokenizer's files from the original model into it",
        )


def check_weights(name: str, path: Path) -> None:
    """Refuses incomplete weights, such as those of an interrupted copy or download.

    Raises:
        ModelLoadError: It names the file.
    """
    remedy = "copy or download it again"
    indexed = sorted({path / file for file in _weight_map(path).values()})
    missing = [file.name for file in indexed if not file.is_file()]
    if 0 < len(missing) < len(indexed):  # If all are missing, the index is another model's.
        raise ModelLoadError(name, f"the file {missing[0]} is missing; {remedy}")
    for file in sorted(path.glob("model*.safetensors")):
        try:
            with safe_open(file, framework="numpy"):
                pass
        except SafetensorError as error:
            reason = f"the file {file.name} is damaged or incomplete ({error}); {remedy}"
            raise ModelLoadError(name, reason) from error


def _other_weights(path: Path) -> str | None:
    """Returns a remedy for weights of another format; None if there are none."""
    if found := sorted(path.glob("*.gguf")):
        return f"its weights are in GGUF, a format of one file: give the path {found[0]}"
    found = sorted(file for pattern in _PYTORCH for file in path.glob(pattern))
    if found:
        return (
            f"its weights are PyTorch's ({found[0].name}), which MLX does not read: save them as "
            "safetensors with transformers (from_pretrained(...).save_pretrained(...)), or take a "
            "conversion from https://huggingface.co/mlx-community"
        )
    return None


def weight_names(path: Path) -> list[str]:
    """Returns the names of the weights in a directory."""
    if found := _weight_map(path):
        return list(found)
    names: list[str] = []
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as weights:
            names += list(weights.keys())
    return names


def _weight_map(path: Path) -> Mapping[str, str]:
    """Returns the file of each weight from the index of a directory; empty if it has none."""
    index = path / "model.safetensors.index.json"
    return json.loads(index.read_text()).get("weight_map", {}) if index.is_file() else {}
