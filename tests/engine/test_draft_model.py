"""Draft models: answers do not change, and drafts are what the draft model alone would say."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from support.embedded_llm import PROMPTS, check_at_rest, make, tokens_of
from support.grouped_models import GROUPED, HYBRIDS, engine_of, loaded
from support.mixed_requests import assert_same, requests_of
from support.models import embedded, embedded_twin, random_tokens, tiny_config, tiny_model
from support.plain import plain_caches
from support.reference import ON_GPU

from mlx_paged import LLM, RequestOutput, SamplingParams
from mlx_paged.engine.sampling.sampler import sample
from mlx_paged.engine.sampling.sequence_sampler import SamplingRow
from mlx_paged.engine.speculation.acceptance import Draft
from mlx_paged.engine.speculation.drafter import StartedDrafts, Wanted
from mlx_paged.engine.speculation.model_drafter import ModelDrafter
from mlx_paged.errors import InvalidParameterError
from mlx_paged.model.loader import LoadedModel

NUM_DRAFTS = 3


def twin(noise: float = 0.0, vocab_size: int | None = None) -> LoadedModel:
    """The embedded model, with noise in its weights, or padded to another vocabulary."""
    loaded = embedded_twin()
    mx.random.seed(5)
    if noise:
        rough = tree_map(
            lambda w: w * (1 + noise * mx.random.normal(w.shape)), loaded.model.parameters()
        )
        loaded.model.update(rough)
    if vocab_size is not None:
        embedding = loaded.model.model.embed_tokens
        missing = vocab_size - loaded.vocab_size
        if missing > 0:
            more = mx.random.normal((missing, embedding.weight.shape[1]))
            embedding.weight = mx.concatenate([embedding.weight, more])
        else:
            embedding.weight = embedding.weight[:vocab_size]
        loaded = LoadedModel(
            loaded.model, loaded.tokenizer, {**loaded.config, "vocab_size": vocab_size}, "padded"
        )
    mx.eval(loaded.model.parameters())
    return loaded


def drafting(draft: LoadedModel, target: Any = None, **options: Any) -> LLM:
    config = {
        "method": "draft_model",
        "model": draft,
        "num_speculative_tokens": NUM_DRAFTS,
        "adaptive": False,
    }
    return make(target, speculative_config=config, **options)


def drafter_of(llm: LLM) -> ModelDrafter:
    speculator = llm.engine._speculator
    assert speculator is not None and isinstance(speculator._drafter, ModelDrafter)
    return speculator._drafter


def assert_all_accepted(llm: LLM, least: int) -> None:
    found = llm.stats().spec_decoding
    assert found is not None and found.num_accepted_tokens >= least
    assert found.num_accepted_tokens == found.num_draft_tokens


def sampled(count: int, max_tokens: int = 24) -> list[SamplingParams]:
    """Greedy and sampled requests."""
    temperatures = [0.0, 1.0, 0.7, 1.3]
    return [
        SamplingParams(
            temperature=temperatures[i % 4], seed=i, max_tokens=max_tokens, ignore_eos=True
        )
        for i in range(count)
    ]


# --- A model as its own draft: every draft must be accepted ---------------------------------------


@pytest.mark.parametrize("splits", [False, True], ids=["together", "as on a GPU"])
@pytest.mark.one_in(2)
def test_a_model_always_accepts_itself(splits: bool) -> None:
    """Only the noise of the right position, and the keys and values of the right tokens do so.

    The pool is tight, so sequences are preempted. The second time, all prefixes are in the cache;
    partly matching blocks are copied.
    """
    options: dict[str, Any] = {"num_gpu_blocks_override": 60, "block_size": 8}
    expected = make(**options).generate(PROMPTS, sampled(16))
    llm = drafting(embedded_twin(), **options)
    if splits:
        llm.engine._runner.splits_drafts = drafter_of(llm).runner.splits_drafts = True
    for _ in range(2):
        assert_same(llm.generate(PROMPTS, sampled(16)), expected)
    stats = llm.stats()
    assert stats.num_preemptions > 0 and stats.counters.num_block_copies > 0
    assert_all_accepted(llm, 300)
    check_at_rest(llm)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.one_in(16)
def test_parameters_that_depend_on_the_drafts_before(seed: int) -> None:
    """Penalties, bad words and grammars: drafts take them into account."""
    prompts, params = requests_of(30 + seed, 30)
    options: dict[str, Any] = {"block_size": 8, "max_num_batched_tokens": 64}
    expected = make(**options).generate(prompts, params)
    llm = drafting(embedded_twin(), **options)
    outputs = llm.generate(prompts, params)
    assert_same(outputs, expected)
    found = llm.stats().spec_decoding
    assert found is not None and found.num_accepted_tokens > 200
    for output in outputs:
        # An answer that stops drops the drafts after its end.
        ends = sum(answer.finish_reason == "stop" for answer in output.outputs)
        assert output.num_rejected_drafts <= (NUM_DRAFTS - 1) * ends
    check_at_rest(llm)


@pytest.mark.parametrize("more", [-8, 40])
def test_padded_vocabularies_have_the_same_noise(more: int) -> None:
    """Models of one family pad theirs to different sizes."""
    prompts, params = PROMPTS[:6], sampled(6, 16)
    expected = make().generate(prompts, params)
    llm = drafting(twin(vocab_size=embedded().vocab_size + more))
    assert_same(llm.generate(prompts, params), expected)
    assert_all_accepted(llm, 40)


@pytest.mark.skipif(ON_GPU, reason="heads of 16 dims have no kernel on a GPU")
@pytest.mark.parametrize("name", list(GROUPED))
@pytest.mark.one_in(4)
def test_windows_and_recurrent_states(name: str) -> None:
    """The draft model sees everything through the tables of full attention."""
    rng = np.random.default_rng(3)
    prompts = [random_tokens(rng, int(count)) for count in rng.integers(3, 50, 6)]
    params = sampled(6, 20)
    expected = engine_of(name).generate(prompts, params)
    llm = engine_of(name, speculative_config=own_draft(name))
    for _ in range(2):
        assert_same(llm.generate(prompts, params), expected)
    found = llm.stats().spec_decoding
    assert found is not None and found.num_draft_tokens > 100
    if name not in HYBRIDS:
        assert_all_accepted(llm, 100)
    llm.engine.check_integrity()


def own_draft(name: str) -> dict[str, Any]:
    """The model itself, or a small one if that has recurrent layers."""
    if name in HYBRIDS:
        config = tiny_config("llama")
        draft = LoadedModel(tiny_model(config), embedded().tokenizer, config, "tiny")
    else:
        draft = loaded(name)
    return {"model": draft, "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}


def test_pools_of_other_sizes() -> None:
    """Blocks move when the pools shrink, in the draft model's pools, too."""
    prompts, params = PROMPTS[:8], sampled(8, 20)
    expected = make(block_size=8).generate(prompts, params)
    llm = drafting(embedded_twin(), block_size=8, num_gpu_blocks_override=300)
    pools, drafter = llm.engine._relief.pools, drafter_of(llm)
    assert_same(llm.generate(prompts, params), expected)
    num_bytes = llm.engine.pool_bytes
    assert pools.resize(llm.engine._kv, 150) == num_bytes - llm.engine.pool_bytes > 0
    assert all(len(pool) == 150 for pool in drafter.runner.model.pools())
    assert_same(llm.generate(prompts, params), expected)
    pools.resize(llm.engine._kv, 300)
    assert_same(llm.generate(prompts, params), expected)
    assert_all_accepted(llm, 300)
    check_at_rest(llm)


def test_its_pools_are_part_of_the_memory() -> None:
    plain, llm = make(kv_cache_memory=1 << 22), drafting(embedded_twin(), kv_cache_memory=1 << 22)
    num_plain, num_drafting = (m.stats().usage.num_usable_blocks for m in (plain, llm))
    assert num_drafting == pytest.approx(num_plain / 2, abs=1)
    assert llm.engine.pool_bytes <= 1 << 22


# --- Another draft model: some drafts are rejected ------------------------------------------------


def alone(model: Any, tokens: Sequence[int], row: SamplingRow, count: int) -> list[int]:
    """A model's continuation on mlx-lm's own cache."""
    cache, known, answer = plain_caches(model), list(tokens), []
    for number in range(count):
        logits = model(mx.array([known]), cache=cache)[0, -1:]
        settings = row._replace(position=len(tokens) + number, logprobs=None)
        known = [int(sample(logits, [settings]).tokens.item())]
        answer += known
    return answer


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[list[int], SamplingRow, Draft]]]:
    """Every draft that is made, with the tokens before it."""
    found: list[tuple[list[int], SamplingRow, Draft]] = []
    real = ModelDrafter.begin

    def recorded(self: ModelDrafter, wanted: Sequence[Wanted]) -> StartedDrafts:
        started = real(self, wanted)
        before = [(list(each.seq.tokens), each.seq.sampler.row) for each in wanted]

        def finish() -> list[Draft | None]:
            made = started.finish()
            found.extend((*known, draft) for known, draft in zip(before, made) if draft is not None)
            return made

        return started._replace(finish=finish)

    monkeypatch.setattr(ModelDrafter, "begin", recorded)
    yield found


@pytest.mark.parametrize("step_tokens", [32, 2048])
@pytest.mark.one_in(16)
def test_drafts_are_those_of_the_draft_model_alone(step_tokens: int, drafts: Any) -> None:
    """After rejected drafts, prefix hits, copies and preemption, and after steps without drafts.
    Prompts go in chunks."""
    options: dict[str, Any] = {
        "num_gpu_blocks_override": 50,
        "block_size": 8,
        "max_num_batched_tokens": step_tokens,
    }
    expected = make(**options).generate(PROMPTS, sampled(16, 20))
    draft = twin(noise=0.08)
    reference = twin(noise=0.08)
    llm = drafting(draft, **options)
    speculator, rng = llm.engine._speculator, random.Random(1)
    assert speculator is not None

    def switch(num_rows: int) -> None:
        speculator.is_active = rng.random() < 0.7

    llm.engine.on_launch = switch
    for _ in range(2):
        assert_same(llm.generate(PROMPTS, sampled(16, 20)), expected)
    found = llm.stats().spec_decoding
    assert found is not None
    assert 0.2 < found.num_accepted_tokens / found.num_draft_tokens < 0.95
    check_at_rest(llm)
    some = rng.sample(drafts, 24)
    num_same = sum(
        tuple(alone(reference.model, tokens, row, len(made.tokens))) == made.tokens
        for tokens, row, made in some
    )
    # On a GPU, a tie within rounding may go either way.
    assert num_same >= len(some) - 2 * ON_GPU


# --- Errors ---------------------------------------------------------------------------------------


def test_an_error_of_the_draft_model_ends_speculation_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = make().generate(PROMPTS[:6], sampled(6))
    llm = drafting(embedded_twin())
    runner = drafter_of(llm).runner
    launch, calls = runner.launch, 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise RuntimeError("no memory is left")
        return launch(*args)

    monkeypatch.setattr(runner, "launch", failing)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_same(llm.generate(PROMPTS[:6], sampled(6)), expected)
    assert caplog.text.count("no memory is left") == 1 and calls == 6
    check_at_rest(llm)


def test_an_interrupt_within_a_draft_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    params = sampled(6, 20)
    expected = make().generate(PROMPTS[:6], params)
    llm = drafting(embedded_twin())
    runner = drafter_of(llm).runner
    launch, left, calls = runner.launch, iter([2, 6, 11]), 0
    fail_at = next(left)

    def failing(*args: Any) -> Any:
        nonlocal calls, fail_at
        calls += 1
        if calls == fail_at:
            fail_at = next(left, -1)
            raise KeyboardInterrupt
        return launch(*args)

    monkeypatch.setattr(runner, "launch", failing)
    outputs: list[RequestOutput] = [
        llm.engine.add_request(str(i), tokens_of(prompt), each)
        for i, (prompt, each) in enumerate(zip(PROMPTS, params))
    ]
    num_interrupts = 0
    while llm.engine.has_unfinished:
        try:
            llm.engine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
    assert num_interrupts == 3 and fail_at == -1
    answers = [[a.token_ids for a in output.outputs] for output in outputs]
    assert answers == [[a.token_ids for a in output.outputs] for output in expected]
    assert_all_accepted(llm, 30)


def other_vocabulary() -> LoadedModel:
    """The embedded model with another tokenizer, in which two tokens have changed places."""
    loaded = embedded_twin()

    class Swapped:
        def get_vocab(self) -> dict[str, int]:
            vocab = dict(loaded.tokenizer.get_vocab())
            first, second = (next(t for t, i in vocab.items() if i == n) for n in (300, 301))
            vocab[first], vocab[second] = 301, 300
            return vocab

    return LoadedModel(loaded.model, Swapped(), loaded.config, "swapped")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "draft_model"}, "speculative_config.model.*a path or hub id.*None"),
        ({"model": 3}, "speculative_config.model.*a path or hub id.*3"),
        ({"method": "suffix", "model": "x"}, "speculative_config.model.*left out.*suffix"),
        ({"method": "medusa"}, "speculative_config.method.*'medusa' is not supported yet"),
        ({"model": other_vocabulary}, "speculative_config.model.*token 300 is .*swapped"),
    ],
)
def test_wrong_draft_models_are_refused(options: dict[str, Any], message: str) -> None:
    given = {k: v() if callable(v) else v for k, v in options.items()}
    with pytest.raises(InvalidParameterError, match=message):
        make(speculative_config=given)


def test_a_recurrent_draft_model_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="without recurrent layers"):
        engine_of("lfm2", speculative_config={"model": loaded("lfm2")})
