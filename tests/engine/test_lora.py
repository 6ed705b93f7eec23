"""Adapters for each request: the tokens of mlx-lm with the adapter fused, in any company."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support.adapters import adapted, fused, greedy, quantized, random_layers, write_mlx, write_peft
from support.embedded_llm import check_at_rest, make
from support.family_configs import config_of
from support.models import embedded, embedded_twin, tiny_config, tiny_model
from support.parity import family_model
from support.reference import HEAD_DIM, ON_GPU

from mlx_paged import LLM, AsyncEngine, LoadedModel, LoRARequest, SamplingParams
from mlx_paged.engine import memory
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.stats import LoraStats
from mlx_paged.errors import InvalidParameterError

NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LLAMA = tiny_config("llama", tied=False, head_dim=HEAD_DIM)
PROMPTS = [
    np.random.default_rng(i).integers(0, LLAMA["vocab_size"], 5 + 9 * i).tolist() for i in range(3)
]


def requests_of(paths: list[Path]) -> list[LoRARequest]:
    return [LoRARequest(path.name, i, str(path)) for i, path in enumerate(paths, 1)]


def loaded(make_model: Callable[[], nn.Module], config: dict[str, Any]) -> LoadedModel:
    config = {**config, "max_position_embeddings": 256}
    return LoadedModel(make_model(), embedded().tokenizer, config, "tiny")


def llama(**options: Any) -> LLM:
    return make(loaded(partial(tiny_model, LLAMA), LLAMA), enable_lora=True, **options)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three adapters of the tiny Llama, of different layers and ranks."""
    folder, model = tmp_path_factory.mktemp("adapters"), tiny_model(LLAMA)
    names = [("q_proj", "v_proj"), ALL, ("o_proj", "down_proj")]
    return [
        write_mlx(folder / f"adapter{i}", random_layers(model, i, rank=2 + 3 * i, names=each))
        for i, each in enumerate(names)
    ]


@cache
def expected(path: Path | None, prompt: tuple[int, ...]) -> list[int]:
    """The tiny Llama's answer."""
    model = tiny_model(LLAMA) if path is None else _fused(path)
    return greedy(model, prompt, NUM_TOKENS)


@cache
def _fused(path: Path) -> nn.Module:
    return fused(tiny_model(LLAMA), path)


def assert_fused(outputs: list[Any], paths: list[Path | None], prompts: list[list[int]]) -> None:
    for output, path, prompt in zip(outputs, paths, prompts, strict=True):
        assert output.outputs[0].token_ids == expected(path, tuple(prompt)), path


# --- Tokens ---------------------------------------------------------------------------------------


def test_rows_of_different_adapters_share_steps(adapters: list[Path]) -> None:
    llm = llama(max_loras=3)
    paths = [path for path in [*adapters, None] for _ in PROMPTS]
    given = [r for r in [*requests_of(adapters), None] for _ in PROMPTS]
    prompts = PROMPTS * 4
    answers = {tuple(expected(path, tuple(PROMPTS[2]))) for path in [*adapters, None]}
    assert len(answers) == 4, "each adapter has an answer of its own"
    order = np.random.default_rng(1).permutation(len(prompts)).tolist()
    for _ in range(2):
        outputs = llm.generate(
            [prompts[i] for i in order], GREEDY, lora_request=[given[i] for i in order]
        )
        assert_fused(outputs, [paths[i] for i in order], [prompts[i] for i in order])
    compilation = llm.stats().compilation
    # (A GPU has no products of float32 weights of its own.)
    assert (ON_GPU or compilation.refused is None) and not compilation.foreign
    assert llm.stats().num_faults == 0
    check_at_rest(llm)


def test_the_embedded_model_with_adapters(tmp_path: Path) -> None:
    prompts = [embedded().tokenizer.encode(text) for text in ("def add(a, b):\n", "import math\n")]
    paths = [
        write_mlx(
            tmp_path / str(i), random_layers(embedded().model, i, names=ALL), scale=0.5 + 0.5 * i
        )
        for i in range(2)
    ]
    llm = make(embedded_twin(), enable_lora=True, max_loras=2)
    given = [r for r in requests_of(paths) for _ in prompts]
    outputs = llm.generate(prompts * 2, GREEDY, lora_request=given)
    for i, path in enumerate(paths):
        model = fused(embedded_twin().model, path)
        for j, prompt in enumerate(prompts):
            assert outputs[2 * i + j].outputs[0].token_ids == greedy(model, prompt, NUM_TOKENS)


# Every way to run a model: all rows at once, recurrent layers by groups, dense copies by groups.
FAMILIES = {
    "gemma2": ALL,
    "phi3": ("qkv_proj", "gate_up_proj"),
    "lfm2": ("in_proj", "out_proj", "q_proj", "w1"),
    "minicpm3": ("q_a_proj", "o_proj", "down_proj"),
    "baichuan_m1": ("W_pack", "o_proj", "down_proj"),
}


@pytest.mark.skipif(ON_GPU, reason="heads of 16 dims have no kernel on a GPU")
@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    make_model = partial(family_model, config_of(family))
    path = write_mlx(tmp_path / "x", random_layers(make_model(), 3, names=FAMILIES[family]))
    llm = make(loaded(make_model, config_of(family)), enable_lora=True, block_size=16)
    [request] = requests_of([path])
    outputs = llm.generate(PROMPTS * 2, GREEDY, lora_request=[request] * 3 + [None] * 3)
    for model, part in ((fused(make_model(), path), outputs[:3]), (make_model(), outputs[3:])):
        for prompt, output in zip(PROMPTS, part):
            assert output.outputs[0].token_ids == greedy(model, prompt, NUM_TOKENS)
    assert llm.stats().num_faults == 0


def test_a_quantized_base_keeps_its_weights(tmp_path: Path) -> None:
    """mlx-lm's answers with the adapter beside the quantized weights, as training had it."""
    make_model = quantized(partial(tiny_model, LLAMA))
    path = write_mlx(tmp_path / "x", random_layers(make_model(), 3, names=ALL))
    llm = make(loaded(make_model, LLAMA), enable_lora=True)
    outputs = llm.generate(PROMPTS, GREEDY, lora_request=requests_of([path])[0])
    model = adapted(make_model(), path)
    for prompt, output in zip(PROMPTS, outputs):
        assert output.outputs[0].token_ids == greedy(model, prompt, NUM_TOKENS)
    assert not llm.stats().compilation.foreign


def test_files_of_peft(adapters: list[Path], tmp_path: Path) -> None:
    """The same change in both formats; its scale is alpha / r, or alpha / sqrt(r)."""
    layers = random_layers(tiny_model(LLAMA), 0, rank=4, names=ALL)
    same = [
        write_mlx(tmp_path / "mlx", layers, scale=2.0),
        write_peft(tmp_path / "peft", layers, alpha=8.0),
        write_peft(tmp_path / "rslora", layers, alpha=4.0, use_rslora=True),
    ]
    llm = llama(max_loras=3)
    outputs = llm.generate([PROMPTS[2]] * 3, GREEDY, lora_request=requests_of(same))
    assert_fused(outputs, [same[0]] * 3, [PROMPTS[2]] * 3)


def test_an_adapter_for_all_requests(adapters: list[Path]) -> None:
    """Its rank needs no option, and requests may name others."""
    llm = make(loaded(partial(tiny_model, LLAMA), LLAMA), adapter_path=adapters[2], max_lora_rank=1)
    assert_fused(llm.generate(PROMPTS, GREEDY), [adapters[2]] * 3, PROMPTS)
    with pytest.raises(InvalidParameterError, match="lora_request must be None for an engine"):
        llm.generate(PROMPTS, GREEDY, lora_request=requests_of(adapters)[0])
    both = llama(adapter_path=adapters[2], max_loras=2)
    outputs = both.generate(PROMPTS[:2], GREEDY, lora_request=[requests_of(adapters)[0], None])
    assert_fused(outputs, [adapters[0], adapters[2]], PROMPTS[:2])


# --- Steps without adapters -----------------------------------------------------------------------


def test_steps_without_adapters_are_the_same_graphs(adapters: list[Path]) -> None:
    """After an adapter was loaded, the model alone still has the bits it had before."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3)

    def logprobs(llm: LLM) -> list[Any]:
        return [output.outputs[0].logprobs for output in llm.generate(PROMPTS, params)]

    plain = logprobs(make(loaded(partial(tiny_model, LLAMA), LLAMA)))
    llm = llama(enable_prefix_caching=False)
    assert logprobs(llm) == plain
    llm.generate(PROMPTS, GREEDY, lora_request=requests_of(adapters)[1])
    assert logprobs(llm) == plain
    kept = llm.engine._runner.model._graph_runner._graphs
    llm.generate(PROMPTS, GREEDY)
    assert kept, "the steps were compiled"


@pytest.mark.skipif(ON_GPU, reason="float32 weights have products of other libraries on a GPU")
def test_a_row_has_the_same_bits_in_any_company(adapters: list[Path]) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3)
    llm = llama(max_loras=3, enable_prefix_caching=False)
    given = [*requests_of(adapters), None]
    prompts = [PROMPTS[0]] * 4
    together = llm.generate(prompts, params, lora_request=given)
    for request, output in zip(given, together):
        [alone] = llm.generate(PROMPTS[:1], params, lora_request=request)
        assert alone.outputs[0].logprobs == output.outputs[0].logprobs


# --- Prefixes, slots, versions --------------------------------------------------------------------


def test_prefixes_are_shared_within_an_adapter_only(adapters: list[Path]) -> None:
    llm = llama(max_loras=2, block_size=8)
    prompt = PROMPTS[2]
    x, y, _ = requests_of(adapters)
    for request in (x, y, None):
        path = None if request is None else Path(request.lora_path)
        for num_cached in (0, len(prompt) - 1):
            [output] = llm.generate(prompt, GREEDY, lora_request=request)
            assert output.num_cached_tokens == num_cached
            assert_fused([output], [path], [prompt])


def test_changed_files_are_another_adapter(adapters: list[Path], tmp_path: Path) -> None:
    """From the next request on; the old prefixes are not used."""
    model, path = tiny_model(LLAMA), tmp_path / "x"
    [request] = requests_of([path])
    llm = llama(block_size=8)
    for seed in (5, 6):
        write_mlx(path, random_layers(model, seed))
        want = greedy(fused(tiny_model(LLAMA), path), PROMPTS[2], NUM_TOKENS)
        for _ in range(2):
            [output] = llm.generate(PROMPTS[2], GREEDY, lora_request=request)
            assert output.outputs[0].token_ids == want
        assert output.num_cached_tokens > 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_more_adapters_than_slots_take_turns(adapters: list[Path], async_scheduling: bool) -> None:
    """Slots are written while other sequences run; none sees another's adapter."""
    llm = llama(max_loras=2, async_scheduling=async_scheduling, max_num_seqs=4)
    given = requests_of(adapters)
    order = np.random.default_rng(2).integers(0, 3, 24).tolist()
    prompts = [PROMPTS[i % 3] for i in range(24)]
    params = [
        SamplingParams(temperature=0, max_tokens=1 + i % NUM_TOKENS, ignore_eos=True)
        for i in range(24)
    ]
    outputs = llm.generate(prompts, params, lora_request=[given[i] for i in order])
    for i, output in enumerate(outputs):
        want = expected(adapters[order[i]], tuple(prompts[i]))[: params[i].max_tokens]
        assert output.outputs[0].token_ids == want
    assert llm.engine._scheduler.adapters.num_evictions > 2
    check_at_rest(llm)


def test_preempted_sequences_keep_their_adapters(adapters: list[Path]) -> None:
    llm = llama(max_loras=3, num_gpu_blocks_override=10, block_size=8, kv_cache_memory=None)
    prompts, params = PROMPTS * 3, SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    outputs = llm.generate(
        prompts, params, lora_request=[r for r in requests_of(adapters) for _ in PROMPTS]
    )
    assert llm.stats().num_preemptions > 0
    for i, output in enumerate(outputs):
        want = greedy(_fused(adapters[i // 3]), prompts[i], 14)
        assert output.outputs[0].token_ids == want


def test_a_step_that_failed_runs_again_with_its_adapters(
    adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts, each with the adapters of its sequences; also when a slot was half written."""
    llm = llama(max_loras=2)
    model = llm.engine._runner.model
    run, load, failures = model.run, model.load_adapter, [0, 0]

    def failing(*args: Any) -> Any:
        failures[0] += 1
        if failures[0] in (1, 4):
            raise RuntimeError("the device stumbles")
        return run(*args)

    def interrupted(slot: int, layers: Any) -> None:
        failures[1] += 1
        load(slot, dict(list(layers.items())[:1]) if failures[1] == 1 else layers)
        if failures[1] == 1:
            raise RuntimeError("the device stumbles")

    monkeypatch.setattr(model, "run", failing)
    monkeypatch.setattr(model, "load_adapter", interrupted)
    given, paths = requests_of(adapters), [adapters[0], adapters[1], adapters[0]]
    outputs = llm.generate(PROMPTS, GREEDY, lora_request=[given[0], given[1], given[0]])
    assert_fused(outputs, paths, PROMPTS)
    assert failures[0] > 4 and llm.stats().num_faults >= 2


def test_an_interrupted_engine_recovers_its_adapters(adapters: list[Path]) -> None:
    llm = llama(max_loras=2)
    engine: Engine = llm.engine
    x, y, _ = requests_of(adapters)
    outputs = [
        engine.add_request("x", PROMPTS[0], GREEDY, lora_request=x),
        engine.add_request("y", PROMPTS[1], GREEDY, lora_request=y),
    ]
    engine.step()
    engine._recovery.is_whole = False  # as after Ctrl-C within a step
    while engine.has_unfinished:
        engine.step()
    assert engine.stats().num_recoveries == 1
    assert_fused(outputs, adapters[:2], PROMPTS[:2])


def test_drafts_are_verified_with_the_adapter(adapters: list[Path]) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    llm = llama(max_loras=3, speculative_config={**config, "adaptive": False})
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    given, prompts = [*requests_of(adapters), None], [PROMPTS[1]] * 4
    outputs, plain = (
        [
            output.outputs[0].token_ids
            for output in each.generate(prompts, params, lora_request=given)
        ]
        for each in (llm, llama(max_loras=3))
    )
    assert outputs == plain
    found = llm.stats().spec_decoding
    assert found is not None and found.num_draft_tokens > 0


@pytest.mark.parametrize("pooling_type", ["LAST", "MEAN"])
def test_embeddings(adapters: list[Path], pooling_type: str) -> None:
    config = {"pooling_type": pooling_type, "normalize": False}
    llm = llama(runner="pooling", pooler_config=config, max_loras=3, max_num_batched_tokens=32)
    given = [*requests_of(adapters), None]
    outputs = llm.embed([PROMPTS[2]] * 4, lora_request=given)
    for path, output in zip([*adapters, None], outputs, strict=True):
        model = tiny_model(LLAMA) if path is None else _fused(path)
        states = np.array(model.model(mx.array([PROMPTS[2]]))[0])
        want = states[-1] if pooling_type == "LAST" else states.mean(axis=0)
        np.testing.assert_allclose(output.outputs.embedding, want, atol=1e-4)


def test_statistics(adapters: list[Path]) -> None:
    engine: Engine = llama(max_loras=1).engine
    assert engine.stats().lora == LoraStats(1)
    for name, request in zip("xy", requests_of(adapters)):
        engine.add_request(name, PROMPTS[0], GREEDY, lora_request=request)
    engine.step()
    assert engine.stats().lora == LoraStats(1, running=("adapter0",), waiting=("adapter1",))
    while engine.has_unfinished:
        engine.step()
    assert make(loaded(partial(tiny_model, LLAMA), LLAMA)).stats().lora is None


def test_an_async_engine_takes_adapters(adapters: list[Path]) -> None:
    async def answers() -> list[Any]:
        engine = AsyncEngine(
            lambda: Engine(
                loaded(partial(tiny_model, LLAMA), LLAMA), llama(max_loras=2).engine.config
            )
        )
        async with engine:
            given = requests_of(adapters)
            return await asyncio.gather(
                *(
                    engine.generate(prompt, GREEDY, lora_request=request)
                    for prompt, request in zip(PROMPTS, given)
                )
            )

    assert_fused(asyncio.run(answers()), list(adapters), PROMPTS)


# --- Wrong requests -------------------------------------------------------------------------------


def test_requests_with_adapters_are_checked(adapters: list[Path]) -> None:
    [request, *_] = requests_of(adapters)
    plain = make(loaded(partial(tiny_model, LLAMA), LLAMA))
    with pytest.raises(InvalidParameterError, match="lora_request must be None for an engine"):
        plain.generate(PROMPTS, GREEDY, lora_request=request)
    llm = llama(max_lora_rank=4)
    with pytest.raises(InvalidParameterError, match="a LoRARequest or None but got 'adapter0'"):
        llm.generate(PROMPTS, GREEDY, lora_request="adapter0")  # type: ignore[arg-type]
    with pytest.raises(InvalidParameterError, match="one for each of 3 prompts but got 1"):
        llm.generate(PROMPTS, GREEDY, lora_request=[request])
    with pytest.raises(InvalidParameterError, match="max_lora_rank must be at least 8, the rank"):
        llm.generate(PROMPTS, GREEDY, lora_request=requests_of(adapters)[2])
    for name, number, path in (("", 1, "x"), ("x", 0, "x"), ("x", 1, "")):
        with pytest.raises(InvalidParameterError, match=r"lora_(name|int_id|path) must be"):
            LoRARequest(name, number, path)
    for options in (
        {"max_loras": 0},
        {"max_lora_rank": 1024},
        {"max_loras": 2, "max_cpu_loras": 1},
    ):
        with pytest.raises(InvalidParameterError):
            llama(**options)


@pytest.mark.skipif(ON_GPU, reason="a GPU takes one format")
def test_adapters_of_16_bits(adapters: list[Path]) -> None:
    """The logits of adapters that were rounded, almost; not those of the files."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
    found = {}
    for dtype in ("auto", "float16", "bfloat16"):
        llm = llama(lora_dtype=dtype)
        assert llm.engine._runner.model.adapter_bytes > 0
        [output] = llm.generate([PROMPTS[2]], params, lora_request=requests_of(adapters)[1])
        [first] = output.outputs[0].logprobs
        found[dtype] = max(each.logprob for each in first.values())
    assert 0 < abs(found["float16"] - found["auto"]) < abs(found["bfloat16"] - found["auto"]) < 0.1
    with pytest.raises(InvalidParameterError, match="lora_dtype must be 'auto' or 'float32' or"):
        llama(lora_dtype="int8")


def test_a_client_cannot_choose_the_salt_of_an_adapter(adapters: list[Path]) -> None:
    llm = llama(block_size=8)
    [request, *_] = requests_of(adapters)
    adapter = llm.engine.intake.adapter_of(request)
    assert adapter is not None
    llm.generate(PROMPTS[2], GREEDY, lora_request=request)
    salt = f"\0lora/{adapter.digest}/"
    output = llm.engine.add_request("r", PROMPTS[2], GREEDY, cache_salt=salt)
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert output.num_cached_tokens == 0
    assert_fused([output], [None], [PROMPTS[2]])


def test_the_memory_of_adapters_is_taken_from_the_pool() -> None:
    model = loaded(partial(tiny_model, LLAMA), LLAMA)
    assert make(model).engine._runner.model.adapter_bytes == 0
    llm = llama(max_loras=64, max_lora_rank=512)
    paged = llm.engine._runner.model
    sizes = paged.adapter_targets().linear.values()
    assert paged.adapter_bytes == 64 * 512 * 4 * sum(map(sum, sizes))
    kept: list[int] = []
    real = memory.left_for_pool

    def noting(*args: Any, **given: Any) -> Any:
        kept.append(given["kept"])
        return real(*args, **given)

    with mock.patch.object(memory, "left_for_pool", noting):
        llama(max_loras=2)
    assert kept == [2 * 16 * 4 * sum(map(sum, sizes))]
