"""Adapters of experts: the tokens of mlx-lm with the adapter, in any company."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from support.adapters import (
    Layers,
    adapted,
    fused,
    greedy,
    random_layers,
    write_mlx,
    write_peft,
)
from support.embedded_llm import make
from support.family_configs import config_of
from support.models import embedded
from support.parity import family_model
from support.platforms import CUDA_PROGRAMS, run_as_on
from support.reference import ON_GPU

from mlx_paged import LLM, LoadedModel, LoRARequest, SamplingParams
from mlx_paged.engine.lora.files import read_adapter
from mlx_paged.errors import AdapterError
from mlx_paged.model import patches
from mlx_paged.model.expert_lora import ExpertOverrides
from mlx_paged.model.graph_runner import Repeat
from mlx_paged.model.linear_parts import LinearPart
from mlx_paged.model.lora import AdapterTargets
from mlx_paged.model.plan import PaddedTables, StepInputs
from mlx_paged.model.sharding import Division

pytestmark = pytest.mark.skipif(ON_GPU, reason="heads of 16 dims have no kernel on a GPU")

NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
EXPERTS = ("gate_proj", "up_proj", "down_proj")
ALL = ("q_proj", "v_proj", *EXPERTS)
# The last is too long for a program.
PROMPTS = [
    np.random.default_rng(i).integers(0, 90, count).tolist() for i, count in enumerate((5, 14, 90))
]


def maker(family: str) -> Callable[[], nn.Module]:
    return partial(family_model, config_of(family))


def server(family: str, make_model: Callable[[], nn.Module] | None = None, **options: Any) -> LLM:
    config = {**config_of(family), "max_position_embeddings": 256}
    model = (make_model or maker(family))()
    loaded = LoadedModel(model, embedded().tokenizer, config, "tiny")
    return make(loaded, enable_lora=True, block_size=16, **options)


def requests_of(*paths: Path) -> list[LoRARequest]:
    return [LoRARequest(path.name, i, str(path)) for i, path in enumerate(paths, 1)]


def assert_answers(outputs: list[Any], models: list[nn.Module], prompts: list[list[int]]) -> None:
    for output, model, prompt in zip(outputs, models, prompts, strict=True):
        assert output.outputs[0].token_ids == greedy(model, prompt, NUM_TOKENS)


def of_experts(model: nn.Module, seed: int, **options: Any) -> Any:
    layers = random_layers(model, seed, names=ALL, **options)
    assert any(a.ndim == 3 for a, _ in layers.values())
    return layers


# One with biases and clipped gates, one with a single expert for each token, one with latent
# attention, one with recurrent layers.
@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4", "deepseek_v3", "lfm2_moe"])
def test_rows_of_different_adapters_share_steps(family: str, tmp_path: Path) -> None:
    paths = [
        write_mlx(tmp_path / str(seed), of_experts(maker(family)(), seed, rank=2 + 3 * seed))
        for seed in range(2)
    ]
    llm = server(family, max_loras=2)
    models = [fused(maker(family)(), path) for path in paths] + [maker(family)()]
    given = [*requests_of(*paths), None]
    outputs = llm.generate(
        PROMPTS * 3, GREEDY, lora_request=[request for request in given for _ in PROMPTS]
    )
    assert_answers(outputs, [model for model in models for _ in PROMPTS], PROMPTS * 3)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs[2::3]}) == 3
    compilation = llm.stats().compilation
    assert compilation.refused is None and not {"GatherMM", "Remainder"} & {*compilation.foreign}
    assert llm.stats().num_faults == 0


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "glm4_moe", "lfm2_moe"])
def test_what_mlx_lm_trains_by_default(family: str, tmp_path: Path) -> None:
    """All layers within blocks: attention's, routers and experts, shared or not."""
    trained = maker(family)()
    trained.freeze()
    parameters = {"rank": 4, "scale": 2.0, "dropout": 0.0}
    linear_to_lora_layers(trained, len(trained.layers), parameters)
    mx.random.seed(1)
    tensors = {
        name: 0.3 * mx.random.normal(array.shape)
        for name, array in tree_flatten(trained.trainable_parameters())
    }
    assert any("gate_proj" in name and array.ndim == 3 for name, array in tensors.items())
    trained.load_weights(list(tensors.items()), strict=False)
    trained.eval()
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), tensors)
    config = {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": parameters}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    outputs = server(family).generate(PROMPTS, GREEDY, lora_request=requests_of(tmp_path)[0])
    assert_answers(outputs, [trained] * 3, PROMPTS)


def test_a_quantized_base_keeps_its_weights(tmp_path: Path) -> None:
    def predicate(_: str, module: nn.Module) -> bool:
        return hasattr(module, "to_quantized")

    def made() -> nn.Module:
        model = maker("qwen3_moe")()
        nn.quantize(model, group_size=32, bits=4, class_predicate=predicate)
        return model

    path = write_mlx(tmp_path / "x", of_experts(made(), 3))
    outputs = server("qwen3_moe", made).generate(PROMPTS, GREEDY, lora_request=requests_of(path)[0])
    assert_answers(outputs, [adapted(made(), path)] * 3, PROMPTS)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_files_of_peft_have_experts_one_by_one(family: str, tmp_path: Path) -> None:
    layers = of_experts(maker(family)(), 3, rank=4)
    path = write_mlx(tmp_path / "mlx", layers, scale=2.0)
    if family == "mixtral":  # its names in transformers
        names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
        layers = {
            f"{name.rpartition('.')[0]}.{names.get(name.rpartition('.')[2], '')}"
            if "switch_mlp" in name
            else name: pair
            for name, pair in layers.items()
        }
    peft = write_peft(tmp_path / "peft", layers, alpha=8.0)
    outputs = server(family).generate(PROMPTS, GREEDY, lora_request=requests_of(peft)[0])
    assert_answers(outputs, [fused(maker(family)(), path)] * 3, PROMPTS)


def test_experts_that_a_file_lacks_do_not_change(tmp_path: Path) -> None:
    """PEFT can train some of the experts."""
    layers = of_experts(maker("qwen3_moe")(), 3)
    some = {
        name: (a, b)
        for name, (a, b) in layers.items()
        if a.ndim == 2 or not name.endswith("up_proj")
    }
    for a, b in some.values():
        if a.ndim == 3:
            a[1:] = 0
            b[1:] = 0
    whole = write_mlx(tmp_path / "mlx", some)
    path = write_peft(
        tmp_path / "peft", some, keeps=lambda name: ".experts." not in name or ".experts.0." in name
    )
    outputs = server("qwen3_moe").generate(PROMPTS, GREEDY, lora_request=requests_of(path)[0])
    assert_answers(outputs, [fused(maker("qwen3_moe")(), whole)] * 3, PROMPTS)


def test_pairs_that_are_sorted_keep_their_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family whose rows run in groups of equal length: mlx-lm sorts the pairs of prompts."""
    family, seen = "deepseek_v32", set()
    add = ExpertOverrides._adapted

    def spy(self: Any, out: Any, x: Any, slots: Any, experts: Any, layer: Any) -> Any:
        seen.add((self._context.pairs_have_slots, experts.size >= 64))
        return add(self, out, x, slots, experts, layer)

    monkeypatch.setattr(ExpertOverrides, "_adapted", spy)
    prompts = [np.random.default_rng(i).integers(0, 90, 47).tolist() for i in range(3)]
    paths = [
        write_mlx(tmp_path / str(seed), of_experts(maker(family)(), seed)) for seed in range(2)
    ]
    llm = server(family, max_loras=2)
    outputs = llm.generate(prompts, GREEDY, lora_request=[None, *requests_of(*paths)])
    models = [maker(family)(), *(fused(maker(family)(), path) for path in paths)]
    assert_answers(outputs, models, prompts)
    assert seen == {(True, True), (True, False)}


@pytest.mark.parametrize("names", [ALL, ("down_proj",)], ids=["all", "some"])
def test_pairs_that_carry_slots_give_the_same(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, in a family that does not need it on the CPU."""
    layers = random_layers(maker("qwen3_moe")(), 3, names=names)
    path = write_mlx(tmp_path / "x", layers)
    given = [*requests_of(path), None, *requests_of(path)]
    expected = server("qwen3_moe").generate(PROMPTS, GREEDY, lora_request=given)
    asked = []
    monkeypatch.setattr(patches, "keeps_order_of_pairs", lambda around: asked.append(around))
    outputs = server("qwen3_moe").generate(PROMPTS, GREEDY, lora_request=given)
    assert asked
    for ours, theirs in zip(outputs, expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids


def test_steps_without_adapters_are_the_same_graphs(tmp_path: Path) -> None:
    path = write_mlx(tmp_path / "x", of_experts(maker("qwen3_moe")(), 3))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3)

    def logprobs(llm: LLM) -> list[Any]:
        return [output.outputs[0].logprobs for output in llm.generate(PROMPTS, params)]

    llm = server("qwen3_moe", enable_prefix_caching=False)
    plain = logprobs(llm)
    llm.generate(PROMPTS, GREEDY, lora_request=requests_of(path)[0])
    assert logprobs(llm) == plain


@pytest.mark.parametrize("names", [("q_proj", "v_proj"), ALL], ids=["attention", "experts"])
def test_a_gpu_does_not_compile_steps_with_adapters_of_experts(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    """It would be refused, which also ends the compilation of all other steps."""
    llm = server("qwen3_moe")
    model = llm.engine._runner.model
    path = write_mlx(tmp_path / "x", random_layers(model.model, 3, names=names))
    llm.generate(PROMPTS[0], GREEDY, lora_request=requests_of(path)[0])
    run_as_on(model, on_cpu=False, **CUDA_PROGRAMS)
    ones = np.ones(2, np.int64)
    tables = PaddedTables(np.ones((2, 1), np.int32), ones)
    plain = StepInputs(ones, ones, tables, np.arange(2), None)
    adapted = replace(plain, adapters=np.array([1, 0], np.int32))
    assert model.repetition_of(plain).repeat is Repeat.AS_GRAPH
    expected = Repeat.NOT if names is ALL else Repeat.AS_GRAPH
    assert model.repetition_of(adapted).repeat is expected


def test_slots_have_room_for_experts() -> None:
    model = server("qwen3_moe", max_loras=2, max_lora_rank=8).engine._runner.model
    targets = model.adapter_targets()
    sizes = [sum(shape) for shape in targets.linear.values()]
    sizes += [count * (width + out) for count, width, out in targets.experts.values()]
    assert targets.experts and model.adapter_bytes == 2 * 8 * 4 * sum(sizes)


def test_experts_on_several_ranks_are_refused() -> None:
    model = maker("qwen3_moe")()
    [path, *_] = AdapterTargets.of(model, None).experts
    part = LinearPart((8, 8), slice(0, 4), np.arange(8))
    model.division = Division(2, {"model.layers.0.self_attn.q_proj": part})
    targets = AdapterTargets.of(model, None)
    assert not targets.experts and targets.refused[path] == "a layer of experts, on several ranks"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda a, b: (a[:-1], b),
            r"must be of equal rank above 0, with (\d+) experts, .* got (?!\1)\d+ and \1 experts",
        ),
        (lambda a, b: (a[..., :-1], b), r"with \d+ experts, \d+ inputs"),
        (lambda a, b: (a, b[:, :-1]), r"with \d+ experts, \d+ inputs"),
        (lambda a, b: (a[0].T, b[0].T), "must be a matrix for each expert but got shapes"),
    ],
)
def test_wrong_shapes_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    layers = of_experts(maker("qwen3_moe")(), 3)
    name = next(name for name, (a, _) in layers.items() if a.ndim == 3)
    layers[name] = change(*layers[name])
    path = write_mlx(tmp_path / "x", layers)
    with pytest.raises(AdapterError, match=message):
        server("qwen3_moe").generate(PROMPTS, GREEDY, lora_request=requests_of(path)[0])


def test_an_expert_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    layers = of_experts(maker("qwen3_moe")(), 3)
    layers = {
        name: (np.concatenate([a, a]), np.concatenate([b, b])) if a.ndim == 3 else (a, b)
        for name, (a, b) in layers.items()
    }
    path = write_peft(tmp_path / "x", layers)
    with pytest.raises(AdapterError, match=r"must be one of \d+ experts but got"):
        server("qwen3_moe").generate(PROMPTS, GREEDY, lora_request=requests_of(path)[0])


# --- Experts in one parameter ---------------------------------------------------------------------


class Parameters:
    """An adapter in PEFT's form for the parameters of experts, and in mlx-lm's.

    Args:
        swaps: True for the inputs and outputs of older versions of PEFT.
    """

    def __init__(self, family: str, swaps: bool = False, rank: int = 4) -> None:
        rng = np.random.default_rng(3)
        self.tensors: dict[str, mx.array] = {}
        self.layers: Layers = {}
        shapes = AdapterTargets.of(maker(family)(), None).experts
        for path, (experts, width, hidden) in shapes.items():
            around, _, name = path.rpartition(".")
            if name == "gate_proj":
                a, b = self._random(rng, experts, rank, width, 2 * hidden)
                self.layers[path] = a, b[:, :hidden]
                self.layers[f"{around}.up_proj"] = a, b[:, hidden:]
                self._write(f"{around.rpartition('.')[0]}.experts.base_layer", a, b, swaps)
            elif name == "down_proj":
                self.layers[path] = a, b = self._random(rng, experts, rank, width, hidden)
                self._write(f"{around.rpartition('.')[0]}.experts", a, b, swaps)

    def _random(
        self, rng: np.random.Generator, experts: int, rank: int, width: int, out: int
    ) -> tuple[np.ndarray, np.ndarray]:
        a = rng.standard_normal((experts, rank, width)) / np.sqrt(width)
        b = rng.standard_normal((experts, out, rank)) / np.sqrt(rank)
        return a.astype(np.float32), b.astype(np.float32)

    def _write(self, name: str, a: np.ndarray, b: np.ndarray, swaps: bool) -> None:
        if swaps:
            a, b = b.transpose(0, 2, 1), a.transpose(0, 2, 1)
        self.tensors[f"base_model.model.{name}.lora_A.weight"] = mx.array(a.reshape(-1, a.shape[2]))
        flat = b.transpose(1, 2, 0).reshape(b.shape[1], -1)
        self.tensors[f"base_model.model.{name}.lora_B.weight"] = mx.array(flat)

    def save(self, path: Path, **config: Any) -> Path:
        path.mkdir()
        given = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_parameters": ["x"], **config}
        (path / "adapter_config.json").write_text(json.dumps(given))
        mx.save_safetensors(str(path / "adapter_model.safetensors"), self.tensors)
        return path


@pytest.mark.parametrize("swaps", [False, True])
def test_parameters_of_all_experts(swaps: bool, tmp_path: Path) -> None:
    given = Parameters("olmoe", swaps)
    targets = AdapterTargets.of(maker("olmoe")(), None)
    found = read_adapter("x", given.save(tmp_path / "peft"), targets)
    expected = read_adapter("x", write_mlx(tmp_path / "mlx", given.layers, scale=2.0), targets)
    assert found.rank == 4 and found.layers.keys() == expected.layers.keys()
    for path, change in found.layers.items():
        for ours, theirs in zip(change, expected.layers[path], strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (lambda a: a[:-1], {}, r"of equal rank above 0 for each of \d+ experts but got shapes"),
        (lambda a: a[:, :-1], {}, "must be of one of .* inputs and outputs but got"),
        (lambda a: a[None], {}, "of equal rank above 0"),
        (lambda a: a, {"r": 8}, r"experts.gate_up_proj' must be r \(8\) but got 4"),
        (lambda a: a, {"target_parameters": None}, "must be a linear layer of the model"),
    ],
)
def test_wrong_parameters_are_refused(
    change: Any, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    given = Parameters("olmoe")
    name = next(n for n in given.tensors if "base_layer" not in n and "lora_A" in n)
    given.tensors[name] = change(given.tensors[name])
    targets = AdapterTargets.of(maker("olmoe")(), None)
    with pytest.raises(AdapterError, match=message):
        read_adapter("x", given.save(tmp_path / "peft", **config), targets)


def test_parameters_of_a_model_without_experts(tmp_path: Path) -> None:
    path = Parameters("olmoe").save(tmp_path / "peft")
    targets = AdapterTargets.of(maker("qwen3")(), None)
    with pytest.raises(AdapterError, match="one with experts but got no experts"):
        read_adapter("x", path, targets)
