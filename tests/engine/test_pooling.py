"""Embeddings: against float64 over mlx-lm's dense hidden states, however prompts are cut, cached,
preempted or batched."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.family_config_parts import VOCAB_SIZE
from support.family_configs import config_of
from support.models import dense_logits, embedded, embedded_twin, save_tiny, tiny_config, tiny_model
from support.parity import family_model
from support.plain import plain_caches

from mlx_paged import LLM, LoadedModel, PoolingParams, SamplingParams, ops
from mlx_paged.engine import build
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.memory import physical_memory
from mlx_paged.engine.pooling.params import PoolerConfig
from mlx_paged.engine.runner import ModelRunner
from mlx_paged.errors import (
    InvalidParameterError,
    ModelLoadError,
    RequestTooLargeError,
    StepError,
    UnsupportedModelError,
)
from mlx_paged.model.output_rows import OutputRows

# Dense, mixture of experts, hybrid (gated delta and convolutions), sliding windows (with sinks),
# latent attention, gathered keys, a scaled output.
FAMILIES = ["qwen3", "qwen3_moe", "qwen3_next", "lfm2", "gemma3_text", "gpt_oss", "deepseek_v3",
            "deepseek_v32", "cohere2"]  # fmt: skip
OPTIONS: dict[str, Any] = {
    "runner": "pooling",
    "block_size": 16,
    "kv_cache_memory": 1 << 24,
    "max_num_batched_tokens": 48,  # chunks of prompts end anywhere
}
# For components of unit vectors: float32 forwards with different orders of summation.
TOLERANCE = 1e-5
RAW = PoolingParams(normalize=False)
LAST, MEAN = {"pooling_type": "LAST"}, {"pooling_type": "MEAN"}


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    head = rng.integers(0, VOCAB_SIZE, 40).tolist()
    alone = [rng.integers(0, VOCAB_SIZE, n).tolist() for n in (1, 7, 33, 60, 100)]
    return [*alone, *(head + rng.integers(0, VOCAB_SIZE, n).tolist() for n in (1, 9, 25))]


def loaded(family: str, **fields: Any) -> LoadedModel:
    config = {**config_of(family), "max_position_embeddings": 128, **fields}
    return LoadedModel(family_model(config_of(family)), embedded().tokenizer, config, family)


def hidden_states(model: nn.Module, tokens: Sequence[int]) -> np.ndarray:
    """``[len(tokens), hidden_size]`` float64: what mlx-lm's inner model returns."""
    states = model.model(mx.array([list(tokens)]), cache=plain_caches(model))
    return np.array(states[0].astype(mx.float32)).astype(np.float64)


@cache
def expected(family: str) -> list[np.ndarray]:
    model = family_model(config_of(family))
    return [hidden_states(model, prompt) for prompt in prompts()]


def pooled(states: np.ndarray, kind: dict[str, str], dimensions: int | None = None) -> np.ndarray:
    vector = (states.mean(axis=0) if kind == MEAN else states[-1])[:dimensions]
    return vector / np.sqrt((vector * vector).sum())


def vectors(llm: LLM, given: Any, params: PoolingParams | None = None) -> np.ndarray:
    return np.array([output.outputs.embedding for output in llm.embed(given, params)])


def difference(found: np.ndarray, states: list[np.ndarray], kind: dict[str, str]) -> float:
    wanted = np.stack([pooled(each, kind) for each in states])
    return float(np.abs(found - wanted).max())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", [LAST, MEAN], ids=["last", "mean"])
@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_those_of_the_dense_hidden_states(family: str, kind: dict[str, str]) -> None:
    copies = ops.pool_copies()  # other tests make some on purpose
    llm = LLM(loaded(family), **OPTIONS, pooler_config=kind)
    for _ in range(2):
        outputs = llm.embed(prompts())
        found = np.array([output.outputs.embedding for output in outputs])
        assert difference(found, expected(family), kind) < TOLERANCE
        assert np.abs(np.square(found).sum(axis=1) - 1).max() < 1e-6
    # At the second turn a last state needs one token; a mean needs all, and reads no cache.
    cached = [output.num_cached_tokens for output in outputs]
    if kind == MEAN:
        assert not any(cached)
    elif family in ("qwen3_next", "lfm2"):  # (states are kept at the ends of some blocks only)
        assert any(cached)
    else:
        assert cached == [len(prompt) - 1 for prompt in prompts()]
    llm.engine.check_integrity()
    assert llm.stats().pool_copies == copies


@pytest.fixture(scope="module")
def last() -> Iterator[LLM]:
    yield LLM(loaded("qwen3"), **OPTIONS)


@pytest.fixture(scope="module")
def mean() -> Iterator[LLM]:
    yield LLM(loaded("qwen3"), **OPTIONS, pooler_config=MEAN)


def test_raw_vectors_have_the_length_of_the_states(last: LLM, mean: LLM) -> None:
    states = expected("qwen3")
    for llm, wanted in ((last, [s[-1] for s in states]), (mean, [s.mean(axis=0) for s in states])):
        found = vectors(llm, prompts(), RAW)
        assert np.allclose(found, np.stack(wanted), rtol=1e-4, atol=1e-4)
    assert last.engine.hidden_size == mean.engine.hidden_size == states[0].shape[1]


@pytest.mark.parametrize("kind", [LAST, MEAN], ids=["last", "mean"])
@pytest.mark.parametrize("budget", [1, 7, 16, 33, 512])
def test_a_vector_does_not_depend_on_where_its_prompt_is_cut(kind, budget: int) -> None:
    options = {**OPTIONS, "max_num_batched_tokens": budget}
    llm = LLM(loaded("qwen3"), **options, pooler_config=kind)
    some = slice(3, 6)
    found = vectors(llm, prompts()[some])
    assert difference(found, expected("qwen3")[some], kind) < TOLERANCE


@pytest.mark.parametrize("which", ["last", "mean"])
def test_a_vector_does_not_depend_on_its_company(which: str, request) -> None:
    llm: LLM = request.getfixturevalue(which)
    llm.engine.reset_prefix_cache()
    together = vectors(llm, prompts())
    llm.engine.reset_prefix_cache()
    alone = np.concatenate([vectors(llm, [prompt]) for prompt in prompts()])
    assert np.abs(together - alone).max() < 2e-6


@pytest.mark.parametrize("kind", [LAST, MEAN], ids=["last", "mean"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "lfm2"])
def test_preempted_prompts_are_pooled_anew(family: str, kind: dict[str, str]) -> None:
    llm = LLM(loaded(family), **OPTIONS, pooler_config=kind)
    engine, scheduler = llm.engine, llm.engine._scheduler
    outputs = [engine.add_request(str(i), p) for i, p in enumerate(prompts())]
    for _ in range(3):
        engine.step()
        for seq in scheduler.running.items.copy()[:2]:
            # (One with a step in flight is admitted again only when that is committed.)
            scheduler._preempt(seq)
    while engine.has_unfinished:
        engine.step()
    assert engine.stats().num_preemptions > 0
    found = np.stack([output.pooled for output in outputs])
    assert difference(found, expected(family), kind) < TOLERANCE
    engine.check_integrity()


@pytest.mark.parametrize("kind", [LAST, MEAN], ids=["last", "mean"])
@pytest.mark.parametrize("message", ["out of memory", "broken"])
def test_a_step_that_fails_is_pooled_in_parts(kind, message: str, monkeypatch) -> None:
    llm = LLM(loaded("qwen3"), **OPTIONS, pooler_config=kind)
    launch, failures = ModelRunner.launch, iter([True, False, True, True, False, True])

    def failing(self: Any, *args: Any) -> Any:
        if next(failures, False):
            raise RuntimeError(message)
        return launch(self, *args)

    monkeypatch.setattr(ModelRunner, "launch", failing)
    found = vectors(llm, prompts())
    assert llm.stats().num_faults > 0
    assert difference(found, expected("qwen3"), kind) < TOLERANCE


def test_an_engine_that_recovers_goes_on_pooling(monkeypatch) -> None:
    llm = LLM(loaded("qwen3"), **OPTIONS, pooler_config=MEAN)
    engine = llm.engine
    outputs = [engine.add_request(str(i), p) for i, p in enumerate(prompts())]
    for _ in range(3):
        engine.step()
    monkeypatch.setattr(engine._executor, "read", None)
    with pytest.raises(TypeError):
        while engine.has_unfinished:
            engine.step()
    monkeypatch.undo()
    while engine.has_unfinished:
        engine.step()
    assert engine.stats().num_recoveries == 1
    found = np.stack([output.pooled for output in outputs])
    assert difference(found, expected("qwen3"), MEAN) < TOLERANCE


@pytest.mark.parametrize("kind", [LAST, MEAN], ids=["last", "mean"])
def test_states_that_are_no_numbers_end_their_prompt_only(kind: dict[str, str]) -> None:
    model = loaded("qwen3")
    bad = 5
    model.model.model.embed_tokens.weight[bad] = mx.nan
    llm = LLM(model, **OPTIONS, pooler_config=kind)
    engine = llm.engine
    good = [[t if t != bad else bad + 1 for t in prompt] for prompt in prompts()]
    outputs = [engine.add_request(str(i), p) for i, p in enumerate([*good, [1, bad, 2]])]
    while engine.has_unfinished:
        engine.step()
    *fine, failed = outputs
    assert all(np.isfinite(output.pooled).all() for output in fine)
    assert failed.pooled is None and failed.outputs[0].finish_reason == "error"
    with pytest.raises(StepError, match="hidden states are not finite"):
        llm.embed([[1, bad, 2]])


def test_nothing_is_projected(monkeypatch) -> None:
    llm = LLM(loaded("qwen3"), **OPTIONS)
    head = llm.engine._runner.model.model.lm_head
    linear, called = nn.Linear.__call__, set()

    def noting(self: nn.Linear, x: mx.array) -> mx.array:
        called.add(id(self))
        return linear(self, x)

    monkeypatch.setattr(nn.Linear, "__call__", noting)
    found = vectors(llm, prompts())
    assert difference(found, expected("qwen3"), LAST) < TOLERANCE
    assert called and id(head) not in called


def test_rows_of_last_tokens_only_are_gathered(monkeypatch) -> None:
    shapes = []
    finish = OutputRows.finish

    def noting(self: OutputRows, logits: mx.array) -> mx.array:
        rows = finish(self, logits)
        shapes.append(rows.shape)
        return rows

    llm = LLM(loaded("qwen3"), **OPTIONS)
    monkeypatch.setattr(OutputRows, "finish", noting)
    llm.embed([list(range(40)), list(range(50, 58)), list(range(30, 90))])
    # One row for each prompt that ends in a step, none in a step without one.
    assert sum(rows for rows, _ in shapes) == 3
    assert {width for _, width in shapes} == {llm.engine.hidden_size}


@pytest.mark.parametrize("method", ["tied", "untied"])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_the_width_of_quantized_models_is_known(method: str, bits: int) -> None:
    config = {**config_of("qwen3"), "tie_word_embeddings": method == "tied", "hidden_size": 64}
    model = family_model(config)
    nn.quantize(model, 32, bits)
    llm = LLM(LoadedModel(model, embedded().tokenizer, config, "qwen3"), **OPTIONS)
    assert llm.engine.hidden_size == 64 == vectors(llm, [[1, 2, 3]]).shape[1]


def test_dimensions_are_cut_and_scaled_again(last: LLM, mean: LLM) -> None:
    whole = vectors(last, prompts(), RAW)
    for dimensions in (1, 13, 64):
        found = vectors(last, prompts(), PoolingParams(dimensions=dimensions))
        wanted = whole[:, :dimensions] / np.linalg.norm(whole[:, :dimensions], axis=1)[:, None]
        assert found.shape[1] == dimensions and np.abs(found - wanted).max() < 1e-6
    raw = vectors(mean, prompts(), PoolingParams(dimensions=13, normalize=False))
    assert np.array_equal(raw, vectors(mean, prompts(), RAW)[:, :13])
    with pytest.raises(InvalidParameterError, match="dimensions must be at most 64"):
        last.embed([[1]], PoolingParams(dimensions=65))
    cut = LLM(loaded("qwen3"), **OPTIONS, pooler_config={"dimensions": 7})
    assert vectors(cut, [[1, 2]]).shape == (1, 7)
    assert vectors(cut, [[1, 2]], PoolingParams(dimensions=9)).shape == (1, 9)
    with pytest.raises(InvalidParameterError, match=r"pooler_config.dimensions must be at most 64"):
        LLM(loaded("qwen3"), **OPTIONS, pooler_config={"dimensions": 65})


def test_a_prompt_may_be_as_long_as_the_model(last: LLM) -> None:
    rng = np.random.default_rng(1)
    longest = rng.integers(0, VOCAB_SIZE, 128).tolist()
    assert last.engine.max_request_len == 128
    [found] = vectors(last, longest)
    states = hidden_states(family_model(config_of("qwen3")), longest)
    assert np.abs(found - pooled(states, LAST)).max() < TOLERANCE
    with pytest.raises(RequestTooLargeError, match=r"129 prompt.*maximum length"):
        last.embed([[*longest, 1]])
    for limit in (-1, 128):
        params = PoolingParams(truncate_prompt_tokens=limit)
        cut = vectors(last, [[1, 2, *longest]], params)
        assert np.abs(cut[0] - found).max() < 2e-6
    with pytest.raises(InvalidParameterError, match="truncate_prompt_tokens must be at most 128"):
        last.embed([longest], PoolingParams(truncate_prompt_tokens=129))
    small = LLM(loaded("qwen3"), **OPTIONS, num_gpu_blocks_override=3)
    assert vectors(small, longest[:32]).shape == (1, 64)
    with pytest.raises(RequestTooLargeError, match="whole KV cache can hold is 32"):
        small.embed(longest[:33])


@pytest.mark.parametrize("kind", [LAST, MEAN], ids=["last", "mean"])
def test_the_largest_step_is_measured(kind: dict[str, str]) -> None:
    gc.collect()
    share = min(0.95, 0.2 + mx.get_active_memory() / physical_memory())  # (others keep some)
    options = {"runner": "pooling", "gpu_memory_utilization": share, "max_num_batched_tokens": 64}
    llm = LLM(loaded("qwen3"), **options, max_num_seqs=8, pooler_config=kind)
    assert difference(vectors(llm, prompts()), expected("qwen3"), kind) < TOLERANCE


def test_scores_are_cosines(last: LLM) -> None:
    texts = prompts()
    found = vectors(last, texts)
    query, rest = texts[0], texts[1:]
    scores = [output.outputs.score for output in last.score(query, rest)]
    assert np.allclose(scores, found[1:] @ found[0], atol=1e-6)
    pairs = last.score(texts, texts, RAW)
    assert np.allclose([output.outputs.score for output in pairs], 1, atol=1e-6)
    assert pairs[3].prompt_token_ids == texts[3] * 2
    for wrong in ((texts[:2], texts), ([], texts), (texts[0], [])):
        with pytest.raises(InvalidParameterError, match=r"text_[12]"):
            last.score(*wrong)


def test_texts_and_tokens_are_one(embedded_llm: LLM) -> None:
    texts = ["def f(x):", "return x + 1"]
    tokens = [embedded_llm.tokenizer.encode(text) for text in texts]
    outputs = embedded_llm.embed(texts)
    assert [output.prompt for output in outputs] == texts
    assert [output.prompt_token_ids for output in outputs] == tokens
    found = np.array([output.outputs.embedding for output in outputs])
    # (The second time the beginning comes from the cache.)
    assert np.abs(found - vectors(embedded_llm, tokens)).max() < 1e-5
    assert np.abs(found[0] - vectors(embedded_llm, texts[0])[0]).max() < 1e-5
    assert embedded_llm.embed([]) == []


@pytest.fixture(scope="module")
def embedded_llm() -> Iterator[LLM]:
    yield LLM(embedded_twin(), runner="pooling", num_gpu_blocks_override=64)


def test_each_runner_refuses_the_other_ones_work(embedded_llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match=r"runner must be 'generate'.*got 'pooling'"):
        embedded_llm.generate("x", SamplingParams(max_tokens=1))
    generating = LLM(embedded_twin(), num_gpu_blocks_override=64)
    assert generating.engine.config.runner == "generate" and generating.engine.hidden_size is None
    with pytest.raises(InvalidParameterError, match=r"runner must be 'pooling'.*got 'generate'"):
        generating.embed("x")
    assert generating.generate("x", SamplingParams(max_tokens=1))[0].finished


def test_requests_of_an_aborted_call_leave_nothing(embedded_llm: LLM) -> None:
    engine = embedded_llm.engine
    output = engine.add_request("gone", list(range(500)))
    engine.step()
    assert engine.abort("gone") and output.pooled is None
    late = engine.add_request("late", [1, 2, 3], timeout=0.0)
    while engine.has_unfinished:
        engine.step()
    assert late.outputs[0].finish_reason == "timeout" and late.pooled is None
    engine.synchronize()
    assert engine.stats().usage.num_used_blocks == 0
    engine.check_integrity()


# --- Options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"runner": "embed"}, "runner"),
        ({"pooler_config": 1}, "pooler_config"),
        ({"pooler_config": {"kind": "MEAN"}}, "pooler_config"),
        ({"pooler_config": {"pooling_type": "CLS"}}, "pooler_config.pooling_type"),
        ({"pooler_config": {"pooling_type": 3}}, "pooler_config.pooling_type"),
        ({"pooler_config": {"normalize": "yes"}}, "pooler_config.normalize"),
        ({"pooler_config": {"dimensions": 0}}, "pooler_config.dimensions"),
        ({"pooler_config": {"normalize": True, "use_activation": False}},
         "pooler_config.normalize"),
        ({"runner": "generate", "pooler_config": {}}, "pooler_config"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_by_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        EngineConfig(**given)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 1.5}, "dimensions"),
        ({"normalize": 1}, "normalize"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ],
)
def test_wrong_parameters_are_refused_by_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        PoolingParams(**given)
    assert caught.value.field == field


def test_parameters_of_the_other_kind_are_refused(last: LLM) -> None:
    with pytest.raises(InvalidParameterError, match="params must be PoolingParams"):
        last.embed([[1]], SamplingParams())  # type: ignore[arg-type]
    for wrong in ([[]], [[VOCAB_SIZE]], [["x"]]):
        with pytest.raises(InvalidParameterError, match="prompt_token_ids"):
            last.embed(wrong)


def test_other_names_of_options_are_known() -> None:
    given = {"seq_pooling_type": "mean", "use_activation": False}
    assert PoolerConfig.of(given) == PoolerConfig(pooling_type="MEAN", normalize=False)


def test_a_pooler_config_needs_a_pooling_runner() -> None:
    with pytest.raises(InvalidParameterError, match="pooler_config"):
        LLM(embedded_twin(), num_gpu_blocks_override=64, pooler_config=MEAN)


def sentence_transformer(path: Path, pooling: dict[str, Any], *kinds: str) -> Path:
    path.mkdir(exist_ok=True)
    names, package = ["Transformer", "Pooling", *kinds], "sentence_transformers.models"
    modules = [
        {"idx": i, "path": f"{i}_{name}" if i else "", "type": f"{package}.{name}"}
        for i, name in enumerate(names)
    ]  # fmt: skip
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


@pytest.mark.parametrize(
    ("pooling", "kinds", "wanted"),
    [
        ({"pooling_mode_lasttoken": True}, ["Normalize"], ("LAST", True)),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, [], ("MEAN", False)),
        ({"pooling_mode": "mean"}, ["Normalize"], ("MEAN", True)),
    ],
)
def test_auto_is_what_the_files_of_the_model_say(tmp_path, pooling, kinds, wanted) -> None:
    path = sentence_transformer(tmp_path / "m", pooling, *kinds)
    config = EngineConfig().for_model(path, {})
    assert config.runner == "pooling" and config.pooler is not None
    assert (config.pooler.pooling_type, config.pooler.normalize) == wanted
    # An option given by the user overrides the checkpoint's, the runner's too.
    given = EngineConfig(pooler_config={"pooling_type": "LAST", "normalize": False})
    chosen = given.for_model(path, {}).pooler
    assert chosen is not None and (chosen.pooling_type, chosen.normalize) == ("LAST", False)
    assert EngineConfig(runner="generate").for_model(path, {}).runner == "generate"
    assert EngineConfig(runner="generate").for_model(path, {}).pooler is None


def test_models_made_for_something_else_are_refused_by_name(tmp_path) -> None:
    config = EngineConfig(runner="pooling")
    for field, value in (("is_causal", False), ("use_bidirectional_attention", True)):
        with pytest.raises(UnsupportedModelError, match=field):
            config.for_model(None, {"model_type": "x", field: value})
    dense = sentence_transformer(tmp_path / "a", {"pooling_mode_mean_tokens": True}, "Dense")
    with pytest.raises(UnsupportedModelError, match="module 'Dense'"):
        config.for_model(dense, {"model_type": "x"})
    other = sentence_transformer(tmp_path / "b", {"pooling_mode_cls_token": True})
    with pytest.raises(UnsupportedModelError, match="cls_token"):
        config.for_model(other, {"model_type": "x"})
    chosen = EngineConfig(pooler_config=MEAN).for_model(other, {"model_type": "x"})
    assert chosen.pooler is not None and chosen.pooler.pooling_type == "MEAN"


def test_a_model_without_a_linear_output_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="OutputHead"):
        Engine(loaded("phixtral"), EngineConfig(**OPTIONS))


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_saved_without_its_projection_is_loaded(tmp_path, tied: bool) -> None:
    """As sentence-transformers save them: the inner model's weights, under its own names."""
    config = tiny_config("qwen3", tied=tied)
    model = tiny_model(config)
    path = sentence_transformer(tmp_path / "m", {"pooling_mode_lasttoken": True}, "Normalize")
    save_tiny(path, config, model)
    inner = dict(tree_flatten(model.model.parameters()))
    for file in path.glob("model*.safetensors*"):
        file.unlink()
    mx.save_safetensors(str(path / "model.safetensors"), inner, metadata={"format": "mlx"})
    llm = LLM(str(path), num_gpu_blocks_override=16, block_size=16)
    tokens = list(range(5, 40))
    found = vectors(llm, tokens)[0]
    assert np.abs(found - pooled(hidden_states(model, tokens), LAST)).max() < TOLERANCE
    assert llm.engine.config.runner == "pooling"
    (path / "modules.json").unlink()
    with pytest.raises(ModelLoadError):
        LLM(str(path), num_gpu_blocks_override=16)


# --- Rerankers ------------------------------------------------------------------------------------

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def words() -> tuple[str, str]:
    """Two tokens of the embedded model that stand for "no" and "yes"."""
    tokenizer = embedded().tokenizer
    return tuple(tokenizer.convert_ids_to_tokens([400, 700]))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def reranker(words: tuple[str, str]) -> Iterator[LLM]:
    overrides = {
        "architectures": ["LlamaForSequenceClassification"],
        "classifier_from_token": list(words),
        "is_original_qwen3_reranker": True,
    }
    yield LLM(embedded_twin(), num_gpu_blocks_override=64, hf_overrides=overrides)


def probability(tokens: list[int]) -> float:
    """The probability of token 700 against 400, by mlx-lm's logits."""
    logits = dense_logits(embedded().model, [tokens]).astype(np.float64)
    return float(np.exp(logits[700]) / (np.exp(logits[400]) + np.exp(logits[700])))


def test_a_reranker_says_yes_as_its_logits_do(reranker: LLM) -> None:
    encode = reranker.tokenizer.encode
    query, documents = "def is_even(n):", [" return n % 2 == 0", " import os", "\n"]
    found = [output.outputs.score for output in reranker.score(query, documents)]
    wanted = [probability(encode(query + document)) for document in documents]
    assert np.allclose(found, wanted, rtol=1e-4) and max(wanted) - min(wanted) > 0.01
    templated = reranker.score(query, documents[0], chat_template=TEMPLATE)
    text = f"[query]{query}\n[document]{documents[0]}\n"
    tokens = encode(text, add_special_tokens=False)
    assert templated[0].prompt_token_ids == tokens
    assert templated[0].outputs.score == pytest.approx(probability(tokens), rel=1e-4)
    pair = reranker.score([5, 6], [[7], [8]])
    assert [output.prompt_token_ids for output in pair] == [[5, 6, 7], [5, 6, 8]]
    with pytest.raises(InvalidParameterError, match="texts on both sides"):
        reranker.score("x", [[7, 8]])


def test_a_reranker_embeds_nothing(reranker: LLM, embedded_llm: LLM) -> None:
    assert reranker.engine.config.runner == "pooling" and reranker.engine.info.scores_pairs
    with pytest.raises(InvalidParameterError, match="classifier_from_token must be None to embed"):
        reranker.embed("x")
    with pytest.raises(InvalidParameterError, match="dimensions must be None"):
        reranker.score("x", "y", PoolingParams(dimensions=3))
    with pytest.raises(InvalidParameterError, match="chat_template must be None"):
        embedded_llm.score("x", "y", chat_template=TEMPLATE)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bits", [None, 4])
def test_one_word_is_enough(tied: bool, bits: int | None) -> None:
    config = {**config_of("qwen3"), "tie_word_embeddings": tied}
    model = family_model(config)
    if bits is not None:
        nn.quantize(model, 32, bits)
    tokens = [3, 5, 7, 11]
    logit = float(dense_logits(model, [tokens])[41])
    tokenizer = embedded().tokenizer
    [word] = tokenizer.convert_ids_to_tokens([41])
    options = {**OPTIONS, "pooler_config": {"classifier_from_token": [word]}}
    llm = LLM(LoadedModel(model, tokenizer, config, "qwen3"), **options)
    [output] = llm.score(tokens[:2], tokens[2:])
    assert output.outputs.score == pytest.approx(1 / (1 + np.exp(-logit)), rel=1e-3)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"hf_overrides": 3}, "hf_overrides"),
        ({"hf_overrides": {}}, "hf_overrides"),
        ({"hf_overrides": {"num_labels": 1, "classifier_from_token": ["a"]}}, "hf_overrides"),
        ({"hf_overrides": {"architectures": ["X"]}}, "hf_overrides.architectures"),
        ({"hf_overrides": {"classifier_from_token": ["a"], "is_original_qwen3_reranker": True}},
         "hf_overrides.classifier_from_token"),
        ({"hf_overrides": {"classifier_from_token": ["a", "b"], "method": "no_post_processing"}},
         "hf_overrides.classifier_from_token"),
        ({"hf_overrides": {"classifier_from_token": ["a"], "method": "x"}}, "hf_overrides.method"),
        ({"hf_overrides": {"classifier_from_token": "no"}}, "pooler_config.classifier_from_token"),
        ({"pooler_config": {"classifier_from_token": ["a", "b", "c"]}},
         "pooler_config.classifier_from_token"),
        ({"pooler_config": {"classifier_from_token": ["a"], "pooling_type": "MEAN"}},
         "pooler_config.classifier_from_token"),
        ({"runner": "generate", "hf_overrides": {"classifier_from_token": ["a"]}},
         "pooler_config"),
    ],
)  # fmt: skip
def test_wrong_overrides_are_refused_by_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        EngineConfig(**given)
    assert caught.value.field == field


def test_a_word_of_several_tokens_is_refused() -> None:
    pooler = {"classifier_from_token": ["no such token"]}
    with pytest.raises(InvalidParameterError, match="tokens of the model's vocabulary"):
        LLM(embedded_twin(), num_gpu_blocks_override=64, pooler_config=pooler)


def test_an_engine_that_pools_has_no_grammars(monkeypatch) -> None:
    """A large vocabulary's take seconds of its start, and memory."""
    made = []
    monkeypatch.setattr(build, "GrammarCompiler", lambda *_, **__: made.append("a compiler"))
    llm = LLM(embedded_twin(), runner="pooling", num_gpu_blocks_override=64)
    assert not made
    wanted = SamplingParams(structured_outputs={"choice": ["a"]}, max_tokens=1)
    for ask in (
        lambda: llm.generate("x", wanted),
        lambda: llm.engine.intake.grammar_compiler,
    ):
        with pytest.raises(InvalidParameterError, match="runner must be 'generate'"):
            ask()
