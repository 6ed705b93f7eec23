"""Files of adapters: what is read from them, and which are refused, by name."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from support.adapters import Layers, random_layers, write_mlx, write_peft
from support.family_configs import config_of
from support.models import tiny_config, tiny_model
from support.parity import family_model

from mlx_paged.engine.lora import files
from mlx_paged.engine.lora.files import Adapter, read_adapter
from mlx_paged.engine.lora.request import LoRARequest
from mlx_paged.engine.lora.store import AdapterStore
from mlx_paged.errors import AdapterError
from mlx_paged.model.lora import AdapterTargets
from mlx_paged.model.lora_slots import LowRank
from mlx_paged.model.wrap import convert_to_paged

LLAMA = tiny_config("llama", tied=False)
Q = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def targets() -> AdapterTargets:
    model = tiny_model(LLAMA)
    return AdapterTargets.of(model, model.lm_head)


@pytest.fixture(scope="module")
def layers() -> Layers:
    return random_layers(tiny_model(LLAMA), 0)


def read(path: Path, targets: AdapterTargets) -> Adapter:
    return read_adapter("x", path, targets)


def assert_change(change: LowRank, layers: Layers, scale: float) -> None:
    a, b = layers[Q]
    np.testing.assert_array_equal(change.a, a)
    np.testing.assert_array_equal(change.b, b.T * np.float32(scale))


def test_mlx_lm(tmp_path: Path, layers: Layers, targets: AdapterTargets) -> None:
    adapter = read(write_mlx(tmp_path, layers, scale=20.0), targets)
    assert adapter.layers.keys() == layers.keys() and adapter.rank == 4
    assert_change(adapter.layers[Q], layers, 20.0)


def test_peft(tmp_path: Path, layers: Layers, targets: AdapterTargets) -> None:
    """Alpha by rank; patterns match the ends of paths, as PEFT has it."""
    adapter = read(write_peft(tmp_path, layers, alpha=16), targets)
    assert_change(adapter.layers[Q], layers, 4.0)
    config: dict[str, Any] = {"use_rslora": True, "r": 64, "rank_pattern": {r".*_proj": 4}}
    config["alpha_pattern"] = {r"layers\.1\.self_attn\.q_proj": 6}
    adapter = read(write_peft(tmp_path, layers, alpha=16, **config), targets)
    assert_change(adapter.layers[Q], layers, 3.0)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_dtypes(tmp_path: Path, layers: Layers, targets: AdapterTargets, dtype: mx.Dtype) -> None:
    adapter = read(write_peft(tmp_path, layers, alpha=4, dtype=dtype), targets)
    a, b = layers[Q]
    for want, got in zip((a, b.T), adapter.layers[Q], strict=True):
        np.testing.assert_array_equal(
            got, np.array(mx.array(want).astype(dtype).astype(mx.float32))
        )


def test_names_of_wrapped_models(tmp_path: Path, layers: Layers) -> None:
    """PEFT and mlx-vlm put other names in front of a multimodal model's layers."""
    linear = {f"language_model.{path}": (64, 64) for path in layers if "q_proj" in path}
    linear["vision_tower.blocks.1.self_attn.q_proj"] = (64, 64)
    only_q = {path: pair for path, pair in layers.items() if "q_proj" in path}
    renamed = {path.replace("model.", "model.language_model."): p for path, p in only_q.items()}
    adapter = read(write_peft(tmp_path, renamed), AdapterTargets(linear, {}))
    assert adapter.layers.keys() == {f"language_model.{path}" for path in only_q}
    linear[f"vision_tower.{Q}"] = (64, 64)
    with pytest.raises(AdapterError, match="must be one linear layer of the model but got"):
        read(tmp_path, AdapterTargets(linear, {}))


# --- Refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fine_tune_type": "dora"}, "fine_tune_type must be 'lora' but got 'dora'"),
        ({"fine_tune_type": "full"}, "fine_tune_type must be 'lora' but got 'full'"),
        ({"lora_parameters": {"alpha": 8}}, "lora_parameters must be an object with a scale"),
        ({"lora_parameters": {"scale": "2"}}, "lora_parameters.scale must be a number but got '2'"),
    ],
)
def test_configs_of_mlx_lm(
    config: dict[str, Any], message: str, tmp_path: Path, layers: Layers, targets: AdapterTargets
) -> None:
    with pytest.raises(AdapterError, match=message):
        read(write_mlx(tmp_path, layers, **config), targets)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type must be 'LORA' but got 'IA3'"),
        ({"use_dora": True}, "use_dora must be False but got True"),
        ({"bias": "all"}, "bias must be 'none' but got 'all'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save must be None but got \['lm_head'\]"),
        ({"target_parameters": "experts"}, "target_parameters must be a list of strings"),
        ({"target_parameters": [1]}, "target_parameters must be a list of strings"),
        ({"kasa_config": {}}, "kasa_config must be None"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights must be True but got 'pissa'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights must be True"),
        ({"lora_alpha": None}, "lora_alpha must be a number but got None"),
        ({"lora_alpha": True}, "lora_alpha must be a number but got True"),
        ({"r": 8}, r"the rank of 'model.layers.0.self_attn.q_proj' must be r \(8\) but got 4"),
        ({"rank_pattern": [4]}, r"rank_pattern must be an object of patterns but got \[4\]"),
        ({"alpha_pattern": {"(": 4}}, r"alpha_pattern must be an object of regular expressions \("),
    ],
)
def test_configs_of_peft(
    config: dict[str, Any], message: str, tmp_path: Path, layers: Layers, targets: AdapterTargets
) -> None:
    with pytest.raises(AdapterError, match=message):
        read(write_peft(tmp_path, layers, **config), targets)


LAYER = r"the layer 'model.layers.1.self_attn.q_proj'"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{Q}.m": (64,)}, r"every tensor must be half .*\(DoRA is not supported\) but got"),
        ({f"{Q}.weight": (64, 64)}, "every tensor must be half of a low-rank update"),
        ({f"{Q}.lora_a": (64, 4)}, f"{LAYER} must be given as both a and b but got only a"),
        (
            {f"{Q}.lora_a": (4, 64, 4), f"{Q}.lora_b": (4, 4, 64)},
            "must be matrices but got shapes",
        ),
        (
            {f"{Q}.lora_a": (32, 4), f"{Q}.lora_b": (4, 64)},
            "64 inputs and 64 outputs, but got ranks 4 and 4, 32 inputs and 64 outputs",
        ),
        ({f"{Q}.lora_a": (64, 4), f"{Q}.lora_b": (3, 64)}, "but got ranks 4 and 3"),
        ({f"{Q}.lora_a": (64, 0), f"{Q}.lora_b": (0, 64)}, "rank above 0, .* got ranks 0 and 0"),
        ({"lm_head.lora_a": (64, 4), "lm_head.lora_b": (4, 96)}, "but got the output projection"),
        (
            {"model.embed_tokens.lora_a": (96, 4), "model.embed_tokens.lora_b": (4, 64)},
            "the layer 'model.embed_tokens' must be a linear layer within .* got an embedding",
        ),
        (
            {"model.layers.9.mlp.up_proj.lora_a": (64, 4)},
            "layers.9.mlp.up_proj' must be a linear layer .* but got a name that it lacks",
        ),
        ({}, "the weights must be at least one low-rank tensor but got none"),
    ],
)
def test_tensors(
    tensors: dict[str, tuple[int, ...]],
    message: str,
    tmp_path: Path,
    layers: Layers,
    targets: AdapterTargets,
) -> None:
    write_mlx(tmp_path, layers)
    made = {name: mx.zeros(shape) for name, shape in tensors.items()}
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), made)
    with pytest.raises(AdapterError, match=message):
        read(tmp_path, targets)


def test_layers_that_are_like_experts_are_refused_by_name(tmp_path: Path) -> None:
    """They are called with groups of heads instead of a token's experts."""
    targets = AdapterTargets.of(family_model(config_of("deepseek_v41")), None)
    [path, *_] = [path for path in targets.refused if path.endswith("o_a_proj")]
    write_mlx(tmp_path, {path: (np.zeros((4, 64), np.float32), np.zeros((32, 4), np.float32))})
    with pytest.raises(AdapterError, match="but got a layer of experts outside of an MLP"):
        read(tmp_path, targets)


def test_layers_that_are_not_called_are_refused_by_name(tmp_path: Path) -> None:
    targets = AdapterTargets.of(family_model(config_of("kimi_k3")), None)
    [path, *_] = [path for path in targets.refused if path.endswith("mlp_res_proj")]
    write_mlx(tmp_path, {path: (np.zeros((4, 64), np.float32), np.zeros((1, 4), np.float32))})
    with pytest.raises(AdapterError, match="but got a layer that the model never calls"):
        read(tmp_path, targets)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("mamba", "x_proj"),  # one token at a time
        ("dbrx", "w2"),  # one expert at a time; a step does not call all of them
        ("afm7", "qkv_proj"),  # returns three arrays
    ],
)
def test_layers_that_see_some_of_the_rows_are_refused_by_name(
    family: str, name: str, tmp_path: Path
) -> None:
    """A step with such an adapter would fail, with all of its requests."""
    model = convert_to_paged(family_model(config_of(family)), family, block_size=16)
    targets = model.adapter_targets()
    layers = random_layers(model.model, 1, names=(name,), within="")
    assert not {*layers} & {*targets.linear}
    with pytest.raises(AdapterError, match="got a layer that does not see one vector for each row"):
        read(write_mlx(tmp_path, layers), targets)


def test_layers_within_the_output_projection_are_refused_by_name(tmp_path: Path) -> None:
    model = convert_to_paged(family_model(config_of("phixtral")), "phixtral", block_size=16)
    write_mlx(tmp_path, {"lm_head.linear": (np.zeros((4, 64)), np.zeros((96, 4)))})
    with pytest.raises(AdapterError, match="got the output projection"):
        read(tmp_path, model.adapter_targets())


def test_files_that_cannot_be_read(tmp_path: Path, layers: Layers, targets: AdapterTargets) -> None:
    with pytest.raises(AdapterError, match=r"cannot load adapter .*there is no such directory"):
        read(tmp_path / "missing", targets)
    with pytest.raises(AdapterError, match=r"the directory has no adapter_config\.json"):
        read(tmp_path, targets)
    (tmp_path / "adapter_config.json").write_text("[1]")
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors but has .*model\.bin"):
        read(tmp_path, targets)
    write_mlx(tmp_path, layers)
    (tmp_path / "adapter_config.json").write_text("[1]")
    with pytest.raises(AdapterError, match=r"must be a JSON object but got \[1\]"):
        read(tmp_path, targets)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterError, match="its files cannot be read"):
        read(tmp_path, targets)
    write_mlx(tmp_path, layers)
    weights = tmp_path / "adapters.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(AdapterError, match="its files cannot be read"):
        read(tmp_path, targets)
    mx.save_safetensors(str(weights), {f"{Q}.lora_a": mx.zeros((64, 4), mx.int32)})
    with pytest.raises(AdapterError, match="tensors must be floating-point but one is I32"):
        read(tmp_path, targets)


# --- The store ------------------------------------------------------------------------------------


def test_adapters_in_memory(tmp_path: Path, layers: Layers, targets: AdapterTargets) -> None:
    """Those used last are kept; equal files are the same adapter, changed ones another."""
    store = AdapterStore(targets, max_rank=16, max_adapters=2)
    get = partial(_get, store)
    x, y, z = (write_mlx(tmp_path / name, layers, scale=i) for i, name in enumerate("xyz", 1))
    first = get(x)
    assert get(x) is first and get(y) is not first
    assert get(x) is first
    get(z)  # in place of y
    assert get(x) is first
    again = get(y)  # in place of z
    assert again == get(y) and again != first
    write_mlx(x, layers, scale=7.0)
    changed = get(x)
    assert changed != first and changed.layers[Q].b[0, 0] == 7 * first.layers[Q].b[0, 0]
    config = json.loads((x / "adapter_config.json").read_text())
    config["lora_parameters"]["scale"] = 1.0
    (x / "adapter_config.json").write_text(json.dumps(config))
    assert get(x).layers[Q].b[0, 0] == first.layers[Q].b[0, 0]


def test_files_that_vanish_while_they_are_looked_at_leave_the_previous_version(
    tmp_path: Path, layers: Layers, targets: AdapterTargets, monkeypatch
) -> None:
    store = AdapterStore(targets, max_rank=16, max_adapters=2)
    path = write_mlx(tmp_path / "x", layers)
    known = _get(store, path)
    gone = path / "gone"
    monkeypatch.setattr(files, "_files_of", lambda path: (gone, gone))
    assert _get(store, path) is known
    with pytest.raises(AdapterError, match=r"its files cannot be read: .*No such file"):
        _get(store, tmp_path / "y")


def test_paths_that_were_asked_for_are_not_remembered(
    tmp_path: Path, layers: Layers, targets: AdapterTargets
) -> None:
    """Clients may name any number of them."""
    store = AdapterStore(targets, max_rank=16, max_adapters=1)
    for name in ("missing", "missing too"):
        with pytest.raises(AdapterError):
            _get(store, tmp_path / name)
    _get(store, write_mlx(tmp_path / "x", layers))
    assert not store._reading


def test_an_adapter_is_read_once_for_all_that_wait_for_it(
    tmp_path: Path, layers: Layers, targets: AdapterTargets, monkeypatch
) -> None:
    store = AdapterStore(targets, max_rank=16, max_adapters=1)
    path, num_read, read = write_mlx(tmp_path / "x", layers), [], AdapterStore._read
    both_wait = threading.Event()

    def counted(self: AdapterStore, *given: Any) -> Adapter:
        num_read.append(given)
        assert both_wait.wait(300)
        return read(self, *given)

    monkeypatch.setattr(AdapterStore, "_read", counted)
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(_get, store, path) for _ in range(2)]
        deadline = time.monotonic() + 300
        while not any(turn.num_threads == 2 for turn in list(store._reading.values())):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        both_wait.set()
        assert found[0].result() is found[1].result()
    assert len(num_read) == 1 and not store._reading


def _get(store: AdapterStore, path: Path) -> Adapter:
    return store.get(LoRARequest(path.name, 1, str(path)))
