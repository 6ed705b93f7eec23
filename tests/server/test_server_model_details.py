"""Tests the details in lists of models, which come from a model's files alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from support.gguf_files import byte_vocabulary, write_file

from mlx_paged.server.catalog import ModelFiles, ModelState, ModelStatus
from mlx_paged.server.model_details import ModelDetails, details_of

TEMPLATE = "{% for tool in tools %}{{ tool }}{% endfor %}<think>{{ messages[0].content }}"


def details(path: Path | str) -> ModelDetails:
    name = str(path)
    return details_of(ModelStatus("name", ModelState.UNLOADED, path=name, files=ModelFiles(name)))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A quantized layer of 8 x 64 weights, another one of 8 bits, and a norm of 64."""
    config = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "max_position_embeddings": 4096,
        "quantization": {"bits": 4, "group_size": 32, "head": {"bits": 8, "group_size": 32}},
        "vision_config": {},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    tensors = {"norm.weight": mx.ones(64, mx.bfloat16)}
    for layer, bits in (("layer", 4), ("head", 8)):
        weight = mx.random.normal((8, 64)).astype(mx.bfloat16)
        packed, scales, biases = mx.quantize(weight, group_size=32, bits=bits)
        tensors |= {
            f"{layer}.weight": packed, f"{layer}.scales": scales, f"{layer}.biases": biases,
        }  # fmt: skip
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    return tmp_path


def test_a_quantized_model(model: Path) -> None:
    found = details(model)
    assert (found.format, found.family, found.quantization) == ("safetensors", "qwen3", "4bit")
    assert found.num_parameters == 2 * 8 * 64 + 64 and found.context_len == 4096
    assert found.sizes == {"embedding_length": 64, "block_count": 1}
    assert found.template == TEMPLATE and found.takes_tools and found.thinks
    assert found.modalities == ("vision",) and not found.embeds and len(found.digest) == 64
    assert found.modified == pytest.approx((model / "model.safetensors").stat().st_mtime, abs=5)


def test_details_follow_the_files(model: Path) -> None:
    before = details(model)
    assert details(model) is before, "they are read once"
    file = model / "config.json"
    file.write_text(file.read_text().replace("qwen3", "llama"))
    os.utime(file, (1, 1))
    after = details(model)
    assert after.family == "llama" and after.digest != before.digest
    (model / "modules.json").write_text("[]")
    (model / "chat_template.jinja").write_text("plain")
    os.utime(file, (2, 2))
    found = details(model)
    assert found.embeds and found.template == "plain" and not (found.takes_tools or found.thinks)


def test_files_that_are_damaged_or_elsewhere(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\xff" * 100)
    found = details(model)
    assert found.family == "" and len(found.digest) == 64
    assert details("nobody/has-this") == ModelDetails()
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF, but broken")
    assert details(file).format == ""


def test_a_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    metadata = {"context_length": 2048, "embedding_length": 64}
    tokens = {**byte_vocabulary(), "chat_template": TEMPLATE}
    tensors = {"a.weight": np.ones((4, 64), np.float32), "norm": np.ones(64, np.float32)}
    write_file(file, "llama", metadata, tensors, kinds=_kinds, tokens=tokens)
    found = details(file)
    assert (found.format, found.family, found.quantization) == ("gguf", "llama", "Q8_0")
    assert found.num_parameters == 5 * 64 and found.context_len == 2048
    assert found.sizes == {"embedding_length": 64} and found.takes_tools


def _kinds(name: str, values: np.ndarray) -> gguf.GGMLQuantizationType:
    kinds = gguf.GGMLQuantizationType
    return kinds.Q8_0 if name == "a.weight" else kinds.F32
