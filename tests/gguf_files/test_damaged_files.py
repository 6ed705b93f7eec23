"""Damaged GGUF files: each gives a model or one line that names the file and the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.gguf_cases import CASES, LLAMA
from support.gguf_files import byte_vocabulary, random_model, tensors_of, write_file, write_model

from mlx_paged.engine.loading import load
from mlx_paged.errors import ModelLoadError, UnsupportedModelError
from mlx_paged.gguf.reader import GGUFFile

NAMES = ("llama", "gemma3", "qwen3moe")
_FILL = (b"\xff" * 8, bytes(8), (1 << 40).to_bytes(8, "little"), (1 << 31).to_bytes(8, "little"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, bytes, int]]:
    """By name: a path to write damaged files to, the whole file, and the size of its header."""
    folder = tmp_path_factory.mktemp("damaged")
    found = {}
    for name in NAMES:
        path = write_model(folder / f"{name}.gguf", CASES[name], random_model(CASES[name].config))
        data = path.read_bytes()
        tensors = sum(file.tensor(n).rows.nbytes for file in [GGUFFile(path)] for n in file.names())
        found[name] = (path, data, len(data) - tensors)
    return found


def loads_or_says_why(path: Path) -> None:
    try:
        load(path)
    except (ModelLoadError, UnsupportedModelError) as error:
        message = str(error)
        assert "\n" not in message and len(message) < 700
        assert isinstance(error, UnsupportedModelError) or repr(str(path)) in message


@given(
    name=st.sampled_from(NAMES),
    places=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=6),
    values=st.lists(st.integers(0, 255), min_size=6, max_size=6),
    fill=st.none() | st.sampled_from(_FILL),
)
@settings(max_examples=80)
def test_changed_bytes(files, name, places, values, fill) -> None:
    path, whole, header = files[name]
    data = bytearray(whole)
    for place, value in zip(places, values):
        data[int(place * header)] = value
    if fill is not None:
        at = int(places[0] * (header - 8))
        data[at : at + 8] = fill
    path.write_bytes(data)
    loads_or_says_why(path)


@given(name=st.sampled_from(NAMES), share=st.floats(0, 1, exclude_max=True))
@example("llama", 0.999999)
@settings(max_examples=40)
def test_cut_off_files(files, name, share) -> None:
    path, whole, _ = files[name]
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ModelLoadError, match=r"cut off or damaged|lacks \d+ weights") as caught:
        load(path)
    assert "\n" not in str(caught.value) and path.name in str(caught.value)


def _without(*names: str) -> dict[str, object]:
    return {key: value for key, value in byte_vocabulary().items() if key not in names}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_count": 4}, "metadata says 4 layers, but it has tensors of 3"),
        ({"attention.head_count": 0}, "attention.head_count must be at least 1"),
        ({"attention.head_count": 8}, "metadata says"),
        ({"attention.head_count_kv": 3}, "does not have rows for 3 heads"),
        ({"embedding_length": 65}, "metadata says"),
        ({"feed_forward_length": [96, 64, 96]}, "layers differ in llama.feed_forward_length"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "must be a finite number"),
        ({"attention.layer_norm_rms_epsilon": None}, "has no llama.attention.layer_norm_rms"),
        ({"context_length": None}, "has no llama.context_length"),
        ({"rope.scaling.type": "spiral", "rope.scaling.factor": 2.0}, "unknown type 'spiral'"),
    ],
)
def test_metadata_that_contradicts_the_tensors(tmp_path, changes, reason) -> None:
    keys = {**LLAMA.metadata, **changes}
    keys = {name: value for name, value in keys.items() if value is not None}
    tensors = tensors_of(LLAMA, random_model(LLAMA.config))
    path = write_file(tmp_path / "a.gguf", "llama", keys, tensors)
    with pytest.raises(ModelLoadError, match=reason):
        load(path)


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (_without("ggml.model"), "has no tokenizer.ggml.model"),
        (_without("ggml.tokens"), "has no tokenizer.ggml.tokens"),
        (_without("ggml.merges"), "has no tokenizer.ggml.merges"),
        ({**byte_vocabulary(), "ggml.model": "rwkv"}, "tokenizer 'rwkv' is not read"),
        ({**byte_vocabulary(), "ggml.model": "llama"}, "has no tokenizer.ggml.scores"),
        ({**byte_vocabulary(), "ggml.pre": "klingon"}, "pre-tokenizer 'klingon' is not read"),
        ({**byte_vocabulary(), "ggml.merges": ["t h", "q zz"]}, "vocabulary is damaged: .*`zz`"),
        ({**byte_vocabulary(), "ggml.merges": ["th"]}, "merge 'th' is not a pair"),
        ({**byte_vocabulary(), "ggml.token_type": [1, 2]}, "128 tokens but 2 types"),
        ({**byte_vocabulary(), "ggml.eos_token_id": 999}, "eos_token_id is 999"),
        (byte_vocabulary(200), "200 tokens but embeddings of 128"),
    ],
)
def test_a_damaged_vocabulary(tmp_path, tokens, reason) -> None:
    tensors = tensors_of(LLAMA, random_model(LLAMA.config))
    path = write_file(tmp_path / "a.gguf", "llama", LLAMA.metadata, tensors, tokens=tokens)
    with pytest.raises(ModelLoadError, match=reason):
        load(path)


def test_missing_and_unknown_tensors(tmp_path) -> None:
    tensors = tensors_of(LLAMA, random_model(LLAMA.config))
    part = {name: values for name, values in tensors.items() if name != "blk.1.ffn_up.weight"}
    path = write_file(tmp_path / "a.gguf", "llama", LLAMA.metadata, part)
    with pytest.raises(ModelLoadError, match=r"lacks 1 weights .*layers.1.mlp.up_proj.weight"):
        load(path)
    more = {**tensors, "blk.0.ffn_sub_norm.weight": tensors["output_norm.weight"]}
    path = write_file(tmp_path / "b.gguf", "llama", LLAMA.metadata, more)
    with pytest.raises(ModelLoadError, match=r"'blk.0.ffn_sub_norm.weight' is not one of"):
        load(path)
