"""ModelDetails: reads family, quantization and size from a model's files.

Reads only file headers, once per version of the files; loads nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from mlx_paged.gguf.errors import GGUFError
from mlx_paged.gguf.reader import GGUFFile, parts_of
from mlx_paged.model.config_files import model_len
from mlx_paged.server.catalog import ModelStatus
from mlx_paged.templates.variables import ENABLE_THINKING, knows_tools

_MAX_HEADER = 100 << 20  # bytes; safetensors' own limit
_MAX_CONFIG = 16 << 20
# Strings in the templates of thinking models.
_THINKING = (ENABLE_THINKING, "<think>", "<|channel|>analysis")


@dataclass(frozen=True)
class ModelDetails:
    """Details from a model's files. Unknown values are empty or 0.

    Attributes:
        format: "safetensors" or "gguf"; "" if its files are not on this machine.
        family: Its ``model_type``, or GGUF's name of its architecture.
        quantization: Bits ("4bit") or the type of most weights ("Q4_K", "BF16").
        num_parameters: Number of weights before quantization.
        digest: Changes with the files (64 hexadecimal digits).
        modified: Unix time of their last change.
        context_len: The model's context length in tokens.
        template: Source of its chat template.
        embeds: True for an embedding model.
        modalities: Media that it accepts, according to its config.
        sizes: Other sizes by GGUF's names, such as ``block_count``.
    """

    format: Literal["safetensors", "gguf", ""] = ""
    family: str = ""
    quantization: str = ""
    num_parameters: int = 0
    digest: str = ""
    modified: float = 0.0
    context_len: int = 0
    template: str = ""
    embeds: bool = False
    modalities: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def takes_tools(self) -> bool:
        """True if its template describes tools."""
        return bool(self.template) and knows_tools(self.template)

    @property
    def thinks(self) -> bool:
        """True if its template supports thinking."""
        return any(mark in self.template for mark in _THINKING)


def details_of(status: ModelStatus) -> ModelDetails:
    """Returns the details of a catalog's model."""
    files = _files_of(status)
    if not files:
        return ModelDetails()
    stats = [(str(file), found.st_size, found.st_mtime) for file in files if (found := file.stat())]
    return _read(tuple(stats))


def _files_of(status: ModelStatus) -> list[Path]:
    """Returns the files with the details; config.json comes first."""
    directory = status.directory
    if directory is not None:
        config = directory / "config.json"
        return [config, *sorted(directory.glob("*.safetensors"))] if config.is_file() else []
    if status.path is None or not Path(status.path).is_file():
        return []
    try:
        return list(parts_of(Path(status.path)))
    except GGUFError:  # Loading will report why.
        return []


@lru_cache(maxsize=256)
def _read(stats: tuple[tuple[str, int, float], ...]) -> ModelDetails:
    """Reads the details of files, given as (path, size, modification time)."""
    digest = hashlib.sha256(
        json.dumps([(Path(path).name, *rest) for path, *rest in stats]).encode()
    ).hexdigest()
    modified = max(time for _, _, time in stats)
    paths = [Path(path) for path, _, _ in stats]
    try:
        if paths[0].name == "config.json":
            return _of_directory(paths[0].parent, paths[1:], digest, modified)
        return _of_gguf(paths[0], digest, modified)
    except (OSError, ValueError, GGUFError):  # damaged; loading will report how
        return ModelDetails(digest=digest, modified=modified)


# --- Directories of safetensors -------------------------------------------------------------------


def _of_directory(
    directory: Path, weights: Iterable[Path], digest: str, modified: float
) -> ModelDetails:
    config = _json(directory / "config.json")
    quantization = config.get("quantization") or config.get("quantization_config")
    quantization = quantization if isinstance(quantization, dict) else {}
    headers = [_header(file) for file in weights]
    tensors = {name: each for header in headers for name, each in header.items()}
    bits = quantization.get("bits")
    main = Counter(each["dtype"] for each in tensors.values()).most_common(1)
    inner = next((config[name] for name in ("text_config", "llm_config") if name in config), config)
    return ModelDetails(
        "safetensors",
        str(config.get("model_type", "")),
        f"{bits}bit" if isinstance(bits, int) else main[0][0] if main else "",
        _num_parameters(tensors, quantization),
        digest,
        modified,
        model_len(config) or 0,
        _template(directory),
        (directory / "modules.json").is_file() or (directory / "1_Pooling").is_dir(),
        tuple(kind for kind in ("vision", "audio") if f"{kind}_config" in config),
        _sizes(inner if isinstance(inner, dict) else {}),
    )


def _json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _MAX_CONFIG:
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


def _header(path: Path) -> dict[str, Any]:
    """Returns dtype and shape of each tensor in a safetensors file."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > _MAX_HEADER:
            raise ValueError("the header is too large")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return dict(header)


def _num_parameters(tensors: Mapping[str, Any], quantization: Mapping[str, Any]) -> int:
    """Counts the weights. Quantized ones are packed, and have scales and biases beside them."""
    count = 0
    for name, tensor in tensors.items():
        layer, _, last = name.rpartition(".")
        is_quantized = f"{layer}.scales" in tensors
        if is_quantized and last in ("scales", "biases"):
            continue
        size = math.prod(tensor["shape"])
        if is_quantized and last == "weight" and tensor["dtype"] == "U32":
            own = quantization.get(layer)
            bits = (own if isinstance(own, dict) else quantization).get("bits") or 4
            size = size * 32 // bits
        count += size
    return count


def _template(directory: Path) -> str:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    for name in ("tokenizer_config.json", "chat_template.json", "processor_config.json"):
        file = directory / name
        found = _json(file).get("chat_template") if file.is_file() else None
        if isinstance(found, str):
            return found
        if isinstance(found, list):  # several, by name
            texts = {each.get("name"): each.get("template") for each in found}
            return str(texts.get("tool_use") or texts.get("default") or "")
    return ""


# Fields of a config.json, by GGUF's names.
_SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    return {
        name: config[field] for name, field in _SIZES.items() if isinstance(config.get(field), int)
    }


# --- GGUF -----------------------------------------------------------------------------------------


def _of_gguf(path: Path, digest: str, modified: float) -> ModelDetails:
    file = GGUFFile(path)
    values = file.metadata
    family = str(values.get("general.architecture", ""))
    tensors = [file.tensor(name) for name in file.names()]
    weights: Counter[str] = Counter()
    for tensor in tensors:
        weights[tensor.type.name] += math.prod(tensor.shape)
    names = (*_SIZES, "context_length")
    sizes = {name: values.get(f"{family}.{name}") for name in names}
    numbers = {name: int(size) for name, size in sizes.items() if isinstance(size, int)}
    context_len = numbers.pop("context_length", 0)
    return ModelDetails(
        "gguf",
        family,
        weights.most_common(1)[0][0] if weights else "",
        weights.total(),
        digest,
        modified,
        context_len,
        str(values.get("tokenizer.chat_template", "")),
        f"{family}.pooling_type" in values,
        sizes=numbers,
    )
