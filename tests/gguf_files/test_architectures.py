"""Architectures: a GGUF file gives the answers of mlx-lm's model with the same weights."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
from support.gguf_cases import CASES, LLAMA, UNLIKE_LLAMA_CPP, case
from support.gguf_files import (
    dense_logits,
    random_blocks,
    random_model,
    tensors_of,
    write_file,
    write_model,
)

# isort: split
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_paged import LLM, SamplingParams
from mlx_paged.engine.loading import load
from mlx_paged.errors import ModelLoadError
from mlx_paged.gguf.architectures import ARCHITECTURES
from mlx_paged.gguf.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from mlx_paged.model import gguf_loading

DOCS = Path(__file__).parents[2] / "docs" / "models.md"
TOLERANCE = 2e-5
# llama.cpp looks GELU up in a table of float16.
TABLE_TOLERANCE = 2e-3
GELU = ("gemma", "gemma2", "gemma3", "phi2", "gpt2", "starcoder2")
LLAMA_CPP = json.loads((Path(__file__).parents[1] / "data" / "llama_cpp_logits.json").read_text())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_mlx_lm_and_of_llama_cpp(tmp_path: Path, name: str) -> None:
    """llama.cpp's were recorded by `scripts/record_llama_cpp.py`."""
    case = CASES[name]
    model = random_model(case.config)
    path = write_model(tmp_path / "model.gguf", case, model)
    loaded = load(path)
    expected, found = dense_logits(model), dense_logits(loaded.model)
    assert expected.std() > 0.1
    np.testing.assert_allclose(found, expected, atol=TOLERANCE * np.abs(expected).max())
    if name not in UNLIKE_LLAMA_CPP:
        recorded = np.array(LLAMA_CPP[name])
        tolerance = TABLE_TOLERANCE if name in GELU else TOLERANCE
        np.testing.assert_allclose(
            found[-1, ::4], recorded, rtol=0, atol=tolerance * np.abs(recorded).max()
        )


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_llm_generates_from_a_file(tmp_path: Path, kind: str) -> None:
    """The engine's tokens are those of the same values in float32."""
    model = random_model(LLAMA.config)
    type_ = gguf.GGMLQuantizationType[kind]

    def kinds(name: str, values: np.ndarray) -> gguf.GGMLQuantizationType:
        return type_ if values.ndim > 1 else gguf.GGMLQuantizationType.F32

    path = write_model(tmp_path / f"tiny-{kind}.gguf", LLAMA, model, kinds=kinds)
    values = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(path).tensors
    }
    wide = write_file(tmp_path / "wide.gguf", "llama", LLAMA.metadata, values)
    found = greedy(path)
    assert found == greedy(wide)
    assert len({tuple(tokens) for tokens in found}) > 1


@pytest.mark.parametrize(("head_dim", "is_packed"), [(32, True), (16, False)])
def test_columns_of_quantized_weights_are_reordered(tmp_path, head_dim, is_packed) -> None:
    """Qwen 3.5's output projections; heads shorter than a group of codes are not packed."""
    before = CASES["qwen35"]
    config = {**before.config, "linear_key_head_dim": head_dim, "linear_value_head_dim": head_dim}
    sizes = {"ssm.state_size": head_dim, "ssm.inner_size": 4 * head_dim}
    changed = replace(before, config=config, metadata={**before.metadata, **sizes})

    def kinds(name: str, values: np.ndarray) -> gguf.GGMLQuantizationType:
        return gguf.GGMLQuantizationType["Q8_0" if "ssm_out" in name else "F32"]

    path = write_model(tmp_path / "a.gguf", changed, random_model(config), kinds=kinds)
    values = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(path).tensors
    }
    wide = write_file(tmp_path / "wide.gguf", "qwen35", changed.metadata, values)
    loaded = load(path)
    projection = loaded.model.language_model.layers[0].linear_attn.out_proj
    assert ("scales" in projection) == is_packed
    expected, found = (dense_logits(model) for model in (load(wide).model, loaded.model))
    np.testing.assert_allclose(found, expected, atol=TOLERANCE * np.abs(expected).max())


#: A Llama wide enough for blocks of 256.
WIDE = case(
    "llama",
    "llama",
    {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64},
    {
        "embedding_length": 256,
        "feed_forward_length": 256,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "rope.dimension_count": 64,
    },
)


def mixed_file(path: Path, *names: str) -> tuple[Path, dict[str, np.ndarray]]:
    """Writes a model whose matrices have these types in turns; returns their values, too."""
    tensors = tensors_of(WIDE, random_model(WIDE.config))
    matrices = [name for name, values in tensors.items() if values.ndim > 1]
    types = {
        name: gguf.GGMLQuantizationType[names[i % len(names)]] for i, name in enumerate(matrices)
    }
    values = dict(tensors)
    for i, (name, kind) in enumerate(types.items()):
        shape = tensors[name].shape
        tensors[name] = random_blocks(
            kind, shape, i, {"Q4_K": 2e-4, "Q5_K": 1e-4}.get(kind.name, 1e-4)
        )
        values[name] = gguf.quants.dequantize(tensors[name], kind).reshape(shape)

    def kinds(name: str, values: np.ndarray) -> gguf.GGMLQuantizationType:
        return types.get(name, gguf.GGMLQuantizationType.F32)

    return write_file(path, "llama", WIDE.metadata, tensors, kinds=kinds), values


def greedy(path: Path) -> list[list[int]]:
    prompts = [{"prompt_token_ids": list(range(2 + i, 20))} for i in range(3)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return [list(o.outputs[0].token_ids) for o in LLM(path).generate(prompts, params)]


def test_k_quants_keep_their_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, values = mixed_file(tmp_path / "tiny-Q4_K_S.gguf", "Q4_K", "Q5_K")
    wide = write_file(tmp_path / "wide.gguf", "llama", WIDE.metadata, values)
    expected, found = (dense_logits(load(each).model) for each in (wide, path))
    np.testing.assert_allclose(found, expected, atol=TOLERANCE * np.abs(expected).max())
    assert greedy(path) == greedy(wide)
    assert "8 bits" not in caplog.text


def test_types_that_are_rounded_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, values = mixed_file(tmp_path / "tiny-Q4_K_M.gguf", "Q4_K", "Q6_K", "Q3_K", "Q2_K")
    wide = write_file(tmp_path / "wide.gguf", "llama", WIDE.metadata, values)
    expected, found = (dense_logits(load(each).model) for each in (wide, path))
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert 0 < error < 0.05
    lines = [line for line in caplog.messages if "are held in 8 bits" in line]
    assert len(lines) == 3
    for (name, count), line in zip((("Q6_K", 6), ("Q3_K", 6), ("Q2_K", 5)), lines):
        assert line.startswith(f"tiny-Q4_K_M.gguf: {count} tensors of {name} are held in 8 bits, ")
        assert 0.05 < float(re.search(r"error of ([\d.]+)%", line)[1]) < 0.6


@pytest.mark.parametrize(
    ("name", "dtype", "is_rounded"),
    [("Q8_0", mx.float16, False), ("Q4_0", mx.float16, False), ("Q4_K", mx.float16, True)],
)
def test_a_gpu_gets_one_dtype(tmp_path, monkeypatch, caplog, name, dtype, is_rounded) -> None:
    path, values = mixed_file(tmp_path / "model.gguf", name)
    wide = write_file(tmp_path / "wide.gguf", "llama", WIDE.metadata, values)
    expected = dense_logits(load(wide).model)
    monkeypatch.setattr(gguf_loading, "is_cpu_default", lambda: False)
    _, model, _, _ = gguf_loading.load_gguf(str(path))
    arrays = [array for _, array in tree_flatten(model.parameters())]
    assert {array.dtype for array in arrays if array.dtype != mx.uint32} == {dtype}
    assert ("are rounded to float16, with a relative error of 0.0" in caplog.text) == is_rounded
    error = np.abs(dense_logits(model) - expected).max() / np.abs(expected).max()
    assert error < 0.03  # of float16


def test_an_explicit_dtype_is_not_rounded_twice(tmp_path, monkeypatch) -> None:
    path, _ = mixed_file(tmp_path / "model.gguf", "Q4_K")
    monkeypatch.setattr(gguf_loading, "is_cpu_default", lambda: False)
    _, model, _, _ = gguf_loading.load_gguf(str(path), "float32")
    assert model.lm_head.scales.dtype == mx.float32


def test_every_architecture_has_a_case_and_is_in_the_docs() -> None:
    assert {case.architecture for case in CASES.values()} == set(ARCHITECTURES)
    section = DOCS.read_text().split("## GGUF files")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| (`.+`) \|$", section, re.MULTILINE)
    families = {name: set(re.findall(r"`(\w+)`", cell)) for name, cell in rows}
    expected: dict[str, set[str]] = {}
    for each in CASES.values():
        expected.setdefault(each.architecture, set()).add(each.config["model_type"])
    assert families == expected
    assert all(f"`{name}`" in section for name in PRE_TOKENIZERS)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    model = random_model(LLAMA.config)
    path = tmp_path / "model.gguf"
    write_model(path, LLAMA, model)
    data = path.read_bytes().replace(
        b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05\x00\x00\x00\x00\x00\x00\x00lamda"
    )
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=r"'lamda' is not read from GGUF; .*llama"):
        load(path)
