"""Loading: what a directory lacks is said by name, and weights arrive in the dtype asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.models import (
    StepDriver,
    dense_logits,
    embedded,
    rms,
    save_tiny,
    tiny_config,
    tiny_model,
)

# isort: split
import mlx.core as mx
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model, save_config, save_model

from mlx_paged.demo import model_path
from mlx_paged.engine.loading import load
from mlx_paged.errors import ModelLoadError, UnsupportedModelError
from mlx_paged.model.directory import check_weights

CONFIG = tiny_config("llama")
TOKENS = [7, 3, 50, 11, 90]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A complete model, for a test to take something away from."""
    save_tiny(tmp_path / "model", CONFIG)
    return tmp_path / "model"


def rewrite_config(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def refused(path: str | Path, reason: str) -> ModelLoadError:
    """Loading fails with `ModelLoadError`, whose message names the model and says `reason`."""
    with pytest.raises(ModelLoadError, match=f"(?s){reason}") as caught:
        load(path)
    assert caught.value.model == str(path)
    assert repr(str(path)) in str(caught.value)
    return caught.value


# --- What works -----------------------------------------------------------------------------------


def test_a_directory_loads_from_a_string_or_a_path(directory: Path) -> None:
    for path in (directory, str(directory)):
        loaded = load(path)
        assert loaded.name == str(directory)
        assert loaded.model_type == "llama"
        assert loaded.max_model_len == CONFIG["max_position_embeddings"]
        assert loaded.tokenizer.encode("def") == embedded().tokenizer.encode("def")


def test_the_embedded_model_is_the_default() -> None:
    loaded = load()
    assert loaded.name == str(model_path())
    assert loaded.max_model_len is not None and loaded.max_model_len >= 2048


def test_a_config_without_a_length_sets_no_limit(directory: Path) -> None:
    rewrite_config(directory, lambda config: config.pop("max_position_embeddings"))
    assert load(directory).max_model_len is None


def test_end_tokens_of_the_tokenizer_and_the_generation_config_are_both_end_tokens(
    directory: Path,
) -> None:
    own = load(directory).tokenizer.eos_token_ids
    assert own and not own & {5, 6}
    (directory / "generation_config.json").write_text('{"eos_token_id": [5, 6], "top_k": 3}')
    loaded = load(directory)
    assert loaded.tokenizer.eos_token_ids == own | {5, 6}
    assert loaded.generation_config["top_k"] == 3
    # One that is given stands for the file, if it is empty too. (mlx-lm reads its end tokens.)
    assert load(directory, generation_config={}).generation_config == {}
    given = load(directory, generation_config={"eos_token_id": 7})
    assert given.tokenizer.eos_token_ids == own | {5, 6, 7}
    assert "top_k" not in given.generation_config


def without_template(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": None}))


@pytest.mark.parametrize("file", ["chat_template.json", "processor_config.json"])
@pytest.mark.parametrize(
    "template", ["{{ 1 }}", [{"name": "default", "template": "{{ 1 }}"}]], ids=["one", "several"]
)
def test_the_template_of_an_older_processor_is_used(
    directory: Path, file: str, template: Any
) -> None:
    own = load(directory)
    assert own.tokenizer.has_chat_template
    (directory / file).write_text(json.dumps({"chat_template": template}))
    assert load(directory).tokenizer.chat_template == own.tokenizer.chat_template
    without_template(directory)
    loaded = load(directory).tokenizer
    assert loaded.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "1"
    assert loaded.eos_token_ids == own.tokenizer.eos_token_ids


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3", "smollm3"])
def test_every_family_loads_and_runs(tmp_path: Path, model_type: str) -> None:
    config = tiny_config(model_type, tied=False)
    model = tiny_model(config)
    save_tiny(tmp_path, config, model)
    loaded = load(tmp_path)
    assert loaded.model_type == model_type
    logits = StepDriver(loaded.model, model_type, block_size=8).step({"a": TOKENS})["a"]
    assert rms(logits - dense_logits(tiny_model(config), [TOKENS])) < 1e-5


# --- What does not --------------------------------------------------------------------------------


def test_a_missing_path_is_no_hub_id(tmp_path: Path) -> None:
    for path in (tmp_path / "gone", "./gone", "~/gone", "gone", "a/b/c"):
        refused(path, "there is no such directory, and it is not a hub id")


def test_a_file_is_not_a_model(directory: Path) -> None:
    refused(directory / "model.safetensors", "it is a file")


def test_a_directory_without_a_config(directory: Path) -> None:
    (directory / "config.json").unlink()
    refused(directory, "no config.json")


@pytest.mark.parametrize(
    "content", [b"", b'{"model_type": "llama",', b"\xff\xfe\x00"], ids=["empty", "cut", "binary"]
)
def test_a_config_that_is_not_json(directory: Path, content: bytes) -> None:
    (directory / "config.json").write_bytes(content)
    refused(directory, "config.json is not valid JSON")


@pytest.mark.parametrize("content", ["5", "null", "[]", '"model_type"', "true"])
def test_a_config_that_is_not_an_object(directory: Path, content: str) -> None:
    (directory / "config.json").write_text(content)
    refused(directory, "config.json")


def test_a_config_without_a_model_type(directory: Path) -> None:
    rewrite_config(directory, lambda config: config.pop("model_type"))
    refused(directory, "names no model_type")


@pytest.mark.parametrize(
    "model_type", ["deepseek_v41", "no-such-family", "Llama", "", None, 5, ["llama"]]
)
def test_an_unknown_family(directory: Path, model_type: object) -> None:
    rewrite_config(directory, lambda config: config.update(model_type=model_type))
    with pytest.raises((UnsupportedModelError, ModelLoadError), match="model_type"):
        load(directory)


def test_a_family_is_refused_before_its_weights_are_missed(directory: Path) -> None:
    rewrite_config(directory, lambda config: config.update(model_type="olmo"))
    (directory / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match="olmo"):
        load(directory)


def test_a_directory_without_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    refused(directory, "no weights")


@pytest.mark.parametrize("has_config", [True, False])
@pytest.mark.parametrize(
    ("file", "remedy"),
    [
        ("pytorch_model-00001-of-00002.bin", "save them as safetensors with transformers"),
        ("consolidated.00.pth", "save them as safetensors with transformers"),
        ("model-Q4_K_M.gguf", "GGUF, a format of one file: give the path .*model-Q4_K_M.gguf"),
    ],
)
def test_weights_of_another_format(
    directory: Path, file: str, remedy: str, has_config: bool
) -> None:
    (directory / "model.safetensors").rename(directory / file)
    if not has_config:
        (directory / "config.json").unlink()
    refused(directory, remedy)
    if file.endswith(".gguf"):
        refused(directory / file, "is not a GGUF file: it begins with")


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "bert", "architectures": ["BertModel"]},
        {"model_type": "xlm-roberta", "architectures": ["XLMRobertaForSequenceClassification"]},
        {"model_type": "mt5", "is_encoder_decoder": True},
        {"model_type": "new_kind", "architectures": ["NewForMaskedLM"]},
    ],
)
def test_an_encoder_is_called_one(directory: Path, config: dict[str, Any]) -> None:
    rewrite_config(directory, lambda given: given.update({"architectures": None, **config}))
    with pytest.raises(UnsupportedModelError, match=r"it is an encoder.*Qwen3-Embedding") as caught:
        load(directory)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("keep", [0, 40, -1000], ids=["empty", "header cut", "data cut"])
def test_weights_of_a_broken_download(directory: Path, keep: int) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    refused(directory, r"model\.safetensors is damaged or incomplete \(.*\); copy or download it")


@pytest.mark.parametrize("present", [1, 0])
def test_weights_with_a_part_that_is_missing(directory: Path, present: int) -> None:
    """An index whose files are all missing is that of another model, and is ignored."""
    files = ["model.safetensors", "model-00002-of-00002.safetensors"][1 - present :]
    index = {"weight_map": {f"{i}.weight": file for i, file in enumerate(files)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    if present:
        refused(directory, r"model-00002-of-00002\.safetensors is missing")
    else:
        check_weights(str(directory), directory)


@pytest.mark.parametrize("fields", [{"hidden_size": 128}, {"num_hidden_layers": 5}])
def test_weights_that_do_not_fit_the_config(directory: Path, fields: dict[str, int]) -> None:
    rewrite_config(directory, lambda config: config.update(fields))
    refused(directory, "embed_tokens|model.layers.4")


def test_a_config_that_lacks_a_field(directory: Path) -> None:
    rewrite_config(directory, lambda config: config.pop("hidden_size"))
    refused(directory, "hidden_size")


def test_an_activation_that_mlx_lm_does_not_read_is_refused_by_name(directory: Path) -> None:
    rewrite_config(directory, lambda config: config.update(hidden_act="gelu"))
    with pytest.raises(UnsupportedModelError, match=r"'silu'.*hidden_act: 'gelu'"):
        load(directory)
    rewrite_config(directory, lambda config: config.update(hidden_act="swish"))
    load(directory)


def test_layers_of_different_sizes_are_refused_by_name(directory: Path) -> None:
    sizes = {"1": {"intermediate_size": 32}}
    rewrite_config(directory, lambda config: config.update(per_layer_config=sizes))
    with pytest.raises(UnsupportedModelError, match="per_layer_config"):
        load(directory)


def test_a_config_with_a_field_of_the_wrong_type(directory: Path) -> None:
    rewrite_config(directory, lambda config: config.update(hidden_size="many"))
    refused(directory, "")


def test_a_directory_without_a_tokenizer(directory: Path) -> None:
    for path in directory.glob("*token*"):
        path.unlink()
    refused(directory, "has no tokenizer .*: copy the tokenizer's files")


@pytest.mark.parametrize("content", ["[]", "{}", '{"chat_template": 1}', "{"])
def test_a_template_file_without_a_template(directory: Path, content: str) -> None:
    without_template(directory)
    assert not load(directory).tokenizer.has_chat_template
    (directory / "chat_template.json").write_text(content)
    refused(directory, "" if content == "{" else "chat_template.json must be an object")


def test_an_id_that_the_hub_would_never_take() -> None:
    refused("owner/bad name!", "hub")


@pytest.mark.parametrize("offline", ["1", "0"], ids=["offline", "unreachable"])
def test_an_unreachable_hub_is_said_at_once(tmp_path: Path, offline: str) -> None:
    """In a process of its own: the hub's settings are read when it is imported."""
    code = (
        "import mlx_paged, time\n"
        "slept = []\n"
        "time.sleep = slept.append\n"
        "from mlx_paged.errors import ModelLoadError\n"
        "try:\n"
        "    mlx_paged.load('mlx-community/no-such-model-4bit')\n"
        "except ModelLoadError as error:\n"
        "    print(sum(slept), error)\n"
    )
    # A port that nothing listens on: unreachable even on a machine that has a network.
    environment = os.environ | {
        "HF_HUB_OFFLINE": offline,
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path),
    }
    run = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    slept, message = run.stdout.split(maxsplit=1)
    assert float(slept) == 0  # no pauses between tries
    assert "'mlx-community/no-such-model-4bit'" in message
    assert "not a local directory" in message and "hub" in message
    assert "network" in message and "download it and pass its path" in message


# --- Dtypes ---------------------------------------------------------------------------------------


def save_quantized(path: Path, bits: int) -> None:
    """A float16 model quantized and saved by mlx-lm's own utilities."""
    model = tiny_model(CONFIG)
    model.set_dtype(mx.float16)
    model, config = quantize_model(model, dict(CONFIG), group_size=32, bits=bits)
    path.mkdir(exist_ok=True)
    save_model(path, model)
    save_config(config, path / "config.json")
    embedded().tokenizer.save_pretrained(path)


def dtypes(model: Any) -> set[mx.Dtype]:
    return {weight.dtype for _, weight in tree_flatten(model.parameters())}


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_weights_stay_on_the_cpu(tmp_path: Path, bits: int) -> None:
    save_quantized(tmp_path, bits)
    file = mx.load(str(tmp_path / "model.safetensors"))
    quantized = mlx_lm.load(str(tmp_path))[0]
    quantized.set_dtype(mx.float32)
    expected = dense_logits(quantized, [TOKENS])

    loaded = load(tmp_path)
    for name, weight in tree_flatten(loaded.model.parameters()):
        parts = ("embed_tokens", "_proj", "lm_head")
        kept = any(part in name for part in parts)
        assert weight.dtype == (file[name].dtype if kept else mx.float32), name
    assert rms(dense_logits(loaded.model, [TOKENS]) - expected) < 1e-5 * rms(expected)
    driver = StepDriver(loaded.model, "llama", block_size=8)
    assert driver.caches[0].spec.dtype == mx.float32
    assert rms(driver.step({"a": TOKENS})["a"] - expected) < 1e-5 * rms(expected)


def test_float32_dequantizes_to_exactly_what_the_file_stands_for(tmp_path: Path) -> None:
    save_quantized(tmp_path, 4)
    file = mx.load(str(tmp_path / "model.safetensors"))
    weights = dict(tree_flatten(load(tmp_path, dtype="float32").model.parameters()))
    assert {w.dtype for w in weights.values()} == {mx.float32}
    for name in ("model.embed_tokens", "model.layers.1.mlp.up_proj"):
        expected = mx.dequantize(
            *(file[f"{name}.{part}"] for part in ("weight", "scales", "biases")),
            group_size=32,
            bits=4,
        )
        got = np.array(weights[f"{name}.weight"])
        assert np.array_equal(got, np.array(expected.astype(mx.float32)))


@pytest.mark.parametrize("saved", [mx.float16, mx.bfloat16])
def test_16_bit_weights_stay_on_the_cpu_and_compute_as_float32_ones(
    tmp_path: Path, saved: mx.Dtype
) -> None:
    model = tiny_model(CONFIG)
    model.set_dtype(saved)
    save_tiny(tmp_path, CONFIG, model)
    kept, wide = load(tmp_path).model, load(tmp_path, dtype="float32").model
    expected = dense_logits(wide, [TOKENS])
    assert kept.model.layers[0].mlp.up_proj.weight.dtype == saved
    assert kept.model.norm.weight.dtype == mx.float32
    driver = StepDriver(kept, "llama", block_size=8)
    assert driver.caches[0].spec.dtype == mx.float32
    assert rms(driver.step({"a": TOKENS})["a"] - expected) < 1e-5 * rms(expected)
    assert rms(dense_logits(kept, [TOKENS]) - expected) < 1e-5 * rms(expected)


@pytest.mark.parametrize("saved", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("asked", ["auto", "float32", "float16", "bfloat16"])
def test_the_dtype_asked_for_is_honoured(tmp_path: Path, saved: mx.Dtype, asked: str) -> None:
    model = tiny_model(CONFIG)
    model.set_dtype(saved)
    save_tiny(tmp_path, CONFIG, model)
    expected = {"float16": mx.float16, "bfloat16": mx.bfloat16}.get(asked, mx.float32)
    others = {saved} if asked == "auto" else set()  # the CPU reads weights as they are
    assert dtypes(load(tmp_path, dtype=asked).model) == {expected} | others


def test_quantized_models_may_stay_quantized(tmp_path: Path) -> None:
    save_quantized(tmp_path, 8)
    loaded = load(tmp_path, dtype="float16")
    assert dtypes(loaded.model) == {mx.uint32, mx.float16}
    driver = StepDriver(loaded.model, "llama", block_size=8)
    assert driver.caches[0].spec.dtype == mx.float16
    logits = driver.step({"a": TOKENS})["a"]
    expected = dense_logits(loaded.model, [TOKENS])
    assert rms(logits - expected) < 2e-2 * rms(expected)


@pytest.mark.parametrize("dtype", ["int8", "Float32", "fp16", "", None, 32, mx.float32])
def test_a_dtype_that_is_none_is_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"dtype must be 'auto' or one of"):
        load(dtype=dtype)
