"""Architectures: a GGUF file gives the answers of mlx-lm's model with the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.gguf_cases import CASES, LLAMA, UNLIKE_LLAMA_CPP
from support.gguf_files import dense_logits, random_model, write_model

from mlx_paged import LLM, SamplingParams
from mlx_paged.engine.loading import load
from mlx_paged.errors import ModelLoadError

TOLERANCE = 2e-5
# llama.cpp looks GELU up in a table of float16.
TABLE_TOLERANCE = 2e-3
GELU = ("gemma", "gemma2", "gemma3", "phi2", "gpt2", "starcoder2")
LLAMA_CPP = json.loads((Path(__file__).parents[1] / "data" / "llama_cpp_logits.json").read_text())


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
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}

    def rounded(name: str, values: np.ndarray) -> gguf.GGMLQuantizationType:
        stored = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
        values[...] = stored.reshape(values.shape)
        return gguf.GGMLQuantizationType.F32

    wide = write_model(tmp_path / "wide.gguf", LLAMA, model, kinds=rounded)
    prompts = [{"prompt_token_ids": list(range(2 + i, 20))} for i in range(3)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = [
        [output.outputs[0].token_ids for output in LLM(file).generate(prompts, params)]
        for file in (path, wide)
    ]
    assert outputs[0] == outputs[1]
    assert len({tuple(tokens) for tokens in outputs[0]}) > 1


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
