"""`BatchGenerator` and `batch_generate` over the paged store, against mlx-lm's own."""

from __future__ import annotations

import copy
import gc
import sys
from typing import Any

import pytest
from support.models import embedded, embedded_twin, tiny_config, tiny_model
from test_drop_in_generate import SYSTEM, chat, dense, integrity, tokens_of

# isort: split
import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_paged import drop_in
from mlx_paged.demo.prompts import CHATS
from mlx_paged.drop_in.caches import PagedKVCache
from mlx_paged.model import weight_identity

mlx_lm_generate = sys.modules["mlx_lm.generate"]
pytestmark = pytest.mark.usefixtures("paged")

Answers = dict[int, list[int]]


@pytest.fixture
def model() -> nn.Module:
    return embedded_twin().model


def generator(model: nn.Module, **options: Any) -> Any:
    """Looked up at every call, as a program does."""
    return mlx_lm_generate.BatchGenerator(model, **options)


def run(batch: Any) -> tuple[Answers, dict[int, Any]]:
    """Runs a generator to its end; returns tokens and last responses by uid."""
    answers: Answers = {}
    last = {}
    while responses := batch.next_generated():
        for r in responses:
            answers.setdefault(r.uid, []).append(r.token)
            last[r.uid] = r
    return answers, last


def prompts(n: int = 6, system: str | None = SYSTEM) -> list[list[int]]:
    return [chat(request, system) for request in CHATS[:n]]


# --- The same answers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"prefill_step_size": 50}, marks=pytest.mark.long),
        {"completion_batch_size": 3, "prefill_batch_size": 2},
        pytest.param(
            {"prefill_step_size": 7, "prefill_batch_size": 1, "completion_batch_size": 1},
            marks=pytest.mark.long,
        ),
    ],
    ids=str,
)
def test_answers_are_those_of_mlx_lm(model, options) -> None:
    texts = [*prompts(3), *prompts(3, None), [5], [6, 7]]
    limits = [3, 20, 9, 1, 14, 30, 8, 5]

    def answers() -> Answers:
        batch = generator(model, stop_tokens=[[2]], **options)
        batch.insert(texts, max_tokens=limits)
        return run(batch)[0]

    expected = dense(answers)
    assert answers() == expected
    assert answers() == expected  # from the cache
    integrity(model)


def test_prompts_share_what_they_begin_with_even_if_they_come_together(model) -> None:
    texts = prompts(6)
    response = mlx_lm.batch_generate(model, embedded().tokenizer, texts, max_tokens=8)
    stats = drop_in.stats(model)
    common = min(
        next(i for i, (a, b) in enumerate(zip(texts[0], other)) if a != b) for other in texts[1:]
    )
    assert stats.num_cached_tokens >= 5 * (common // 32 * 32)
    assert stats.num_prompt_tokens == sum(map(len, texts))
    expected = dense(mlx_lm.batch_generate, model, embedded().tokenizer, texts, max_tokens=8)
    assert response.texts == expected.texts
    assert response.stats.prompt_tokens == expected.stats.prompt_tokens
    assert response.stats.generation_tokens == expected.stats.generation_tokens


@pytest.mark.parametrize("prefill_step_size", [50, 7])
def test_a_prompt_waits_for_a_block_that_takes_another_several_steps(
    model, prefill_step_size
) -> None:
    text = prompts(1)[0]
    batch = generator(model, max_tokens=3, prefill_step_size=prefill_step_size)
    uids = batch.insert([text, [*text, 5], text[:-3]])
    answers, _ = run(batch)
    # All but the last block that the first prompt fills in part, and what others have of that.
    assert drop_in.stats(model).num_cached_tokens >= 2 * (len(text) // 32 * 32 - 32)
    for uid, prompt in zip(uids, [text, [*text, 5], text[:-3]]):
        assert answers[uid] == dense(tokens_of, model, prompt, max_tokens=3)


def test_sequences_arrive_and_leave_while_others_run(model) -> None:
    texts = prompts(5)
    expected = {i: dense(tokens_of, model, text, max_tokens=20) for i, text in enumerate(texts)}
    batch = generator(model, max_tokens=20)
    answers: Answers = {}
    for i, text in enumerate(texts):
        assert batch.insert([text]) == [i]
        for _ in range(3):
            for r in batch.next()[1]:
                answers.setdefault(r.uid, []).append(r.token)
        if i == 2:
            batch.remove([1])
    rest, _ = run(batch)
    for uid, tokens in rest.items():
        answers.setdefault(uid, []).extend(tokens)
    assert 0 < len(answers.pop(1)) < 20
    expected.pop(1)
    assert answers == expected
    integrity(model)


def test_samplers_processors_and_stops_of_their_own(model) -> None:
    text = prompts(1)[0]
    stop = mlx_lm_generate.StopSequences([[11, 12]])
    processors = make_logits_processors({77: 1000.0})

    def answers() -> tuple[Answers, dict[int, str]]:
        mx.random.seed(3)
        batch = generator(model, max_tokens=6)
        batch.insert(
            [text] * 4,
            samplers=[None, make_sampler(0.8), lambda _: mx.array([11]), alternating()],
            logits_processors=[None, None, None, None],
            stop_sequences=[mlx_lm_generate.StopSequences()] * 3 + [stop],
        )
        batch.insert([text], logits_processors=[processors])
        found, last = run(batch)
        return found, {uid: r.finish_reason for uid, r in last.items()}

    def alternating() -> Any:
        state = [12]

        def sampler(_: mx.array) -> mx.array:
            state[0] = 23 - state[0]
            return mx.array([state[0]])

        return sampler

    found, reasons = answers()
    assert found[2] == [11] * 6
    assert found[3] == [11, 12]
    assert found[4] == [77] * 6
    assert reasons == {0: "length", 1: "length", 2: "length", 3: "stop", 4: "length"}
    assert found[0] == dense(tokens_of, model, text, max_tokens=6)


def test_processors_see_prompt_and_answer(model) -> None:
    text = prompts(1)[0]
    seen: list[list[int]] = []

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        return logits

    for _ in range(2):
        seen.clear()
        batch = generator(model, max_tokens=3, logits_processors=[processor])
        batch.insert([text])
        answer = run(batch)[0][0]
        assert seen[:3] == [text, [*text, answer[0]], [*text, *answer[:2]]]


def test_a_generator_goes_on_after_a_sampler_has_raised(model) -> None:
    texts = prompts(2, None)
    expected = {i: dense(tokens_of, model, text, max_tokens=6) for i, text in enumerate(texts)}
    calls = []

    def sampler(logprobs: mx.array) -> mx.array:
        calls.append(None)
        if len(calls) in (1, 4):
            raise ZeroDivisionError
        return mx.argmax(logprobs, axis=-1)

    batch = generator(model, max_tokens=6)
    batch.insert(texts, samplers=[sampler, None])
    answers: Answers = {0: [], 1: []}
    num_raised = 0
    while True:
        try:
            pieces, tokens = batch.next()
        except ZeroDivisionError:
            num_raised += 1
            continue
        for r in tokens:
            answers[r.uid].append(r.token)
        if not pieces and not tokens:
            break
    assert answers == expected
    assert num_raised == 2
    integrity(model)


def test_log_probabilities_are_those_of_mlx_lm(model) -> None:
    texts = prompts(3, None)

    def logprobs() -> dict[int, Any]:
        batch = generator(model, max_tokens=1)
        batch.insert(texts)
        return {r.uid: r.logprobs for r in batch.next_generated()}

    expected, actual = dense(logprobs), logprobs()
    for uid in expected:
        assert actual[uid].shape == expected[uid].shape
        assert mx.allclose(actual[uid], expected[uid], rtol=1e-4, atol=1e-4)


# --- Segments and caches --------------------------------------------------------------------------


@pytest.mark.parametrize("seen_before", [False, True])
@pytest.mark.parametrize("prefill_step_size", [2048, 40])
def test_a_segment_ends_where_it_should_and_its_cache_can_be_had(
    model, seen_before, prefill_step_size
) -> None:
    text = prompts(1)[0][:150]
    segments = [text[:70], text[70:130], text[130:]]
    if seen_before:
        tokens_of(model, text, max_tokens=40)
    batch = generator(model, max_tokens=4, prefill_step_size=prefill_step_size)
    [uid] = batch.insert_segments([segments])
    ends, progress, answer = {}, [], []
    while True:
        prompt_responses, token_responses = batch.next()
        if not prompt_responses and not token_responses:
            break
        for r in prompt_responses:
            progress.append(r.progress)
            if r.end_of_segment and not r.end_of_prompt:
                cache, tokens = batch.extract_cache([uid])[uid]
                ends[len(tokens)] = cache
                assert tokens == text[: len(tokens)]
                assert cache[0].offset == len(tokens)
        answer += [r.token for r in token_responses]
    assert list(ends) == [70, 130, 149]
    assert progress[-1] == (150, 150)
    assert progress == sorted(progress)
    assert answer == dense(tokens_of, model, text, max_tokens=4)
    for length, cache in ends.items():
        rest = text[length:]
        assert tokens_of(model, rest, prompt_cache=cache, max_tokens=4) == answer
    integrity(model)


def test_every_segment_takes_what_is_stored(model) -> None:
    text = prompts(1)[0][:150]
    tokens_of(model, text)
    before = drop_in.stats(model).num_cached_tokens
    batch = generator(model, max_tokens=4)
    [uid] = batch.insert_segments([[text[:70], text[70:130], text[130:]]])
    answers, _ = run(batch)
    # A segment ends within a block, so the rest of that block is computed.
    assert drop_in.stats(model).num_cached_tokens - before == 70 + (128 - 70)
    integrity(model)
    assert answers[uid] == dense(tokens_of, model, text, max_tokens=4)


def test_caches_go_in_and_come_out(model) -> None:
    text, more = prompts(1)[0], chat(CHATS[1])
    batch = generator(model, max_tokens=5)
    [first] = batch.insert([text])
    answers, last = run(batch)
    cache = last[first].prompt_cache
    assert isinstance(cache[0], PagedKVCache)
    assert last[first].all_tokens == [*text, *answers[first]]
    assert cache[0].offset == len(text) + 5
    whole = [*text, *answers[first], *more]
    expected = dense(tokens_of, model, whole, max_tokens=5)
    # Twice from the same cache: what goes in is not changed.
    uids = batch.insert(
        [more, more], caches=[cache, copy.deepcopy(cache)], all_tokens=[whole[: -len(more)]] * 2
    )
    answers, last = run(batch)
    assert [answers[uid] for uid in uids] == [expected] * 2
    assert last[uids[0]].all_tokens == [*whole, *expected]
    assert cache[0].offset == len(text) + 5
    integrity(model)


def test_dense_caches_are_taken_in(model, tmp_path) -> None:
    text, more = prompts(1)[0][:90], chat(CHATS[1])
    expected = dense(tokens_of, model, [*text, *more], max_tokens=6)
    cache = mlx_lm_cache.make_prompt_cache(model)
    tokens_of(model, text, prompt_cache=cache, max_tokens=0)
    mlx_lm_cache.save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
    loaded = mlx_lm_cache.load_prompt_cache(str(tmp_path / "cache.safetensors"))
    assert type(loaded[0]) is mlx_lm_cache.KVCache
    batch = generator(model, max_tokens=6)
    uids = batch.insert([more, more], caches=[loaded, None])
    answers, last = run(batch)
    assert answers[uids[0]] == expected
    # Its tokens are not known, so nobody may find them, at their place or at another.
    assert last[uids[0]].prompt_cache[0].sequence.is_known is False
    assert answers[uids[1]] == dense(tokens_of, model, more, max_tokens=6)


def test_caches_of_other_kinds_run_beside_it(model) -> None:
    text = prompts(1, None)[0]
    rotating = [mlx_lm_cache.RotatingKVCache(max_size=512, keep=4) for _ in model.layers]
    batch = generator(model, max_tokens=5)
    uids = batch.insert([text, text], caches=[rotating, None])
    answers, last = run(batch)
    expected = dense(tokens_of, model, text, max_tokens=5)
    assert [answers[uid] for uid in uids] == [expected, expected]
    assert type(last[uids[0]].prompt_cache[0]) is mlx_lm_cache.RotatingKVCache
    assert batch.prompt_cache_nbytes == 0


@pytest.mark.parametrize("kind", ["paged", "dense", "rotated"])
def test_an_exact_hit_is_answered(model, kind) -> None:
    text = prompts(1, None)[0]
    expected = dense(tokens_of, model, text, max_tokens=5)
    cache = mlx_lm_cache.make_prompt_cache(model)
    if kind == "rotated":
        cache = [mlx_lm_cache.RotatingKVCache(max_size=16, keep=4) for _ in model.layers]
    tokens_of(model, text, prompt_cache=cache, max_tokens=0)
    if kind == "dense":
        cache = [c.dense() for c in cache]
    batch = generator(model, max_tokens=5)
    [uid] = batch.insert_segments([[]], caches=[cache], all_tokens=[text])
    answers, last = run(batch)
    assert answers[uid] == expected
    assert last[uid].all_tokens == [*text, *expected]
    assert cache[0].offset == len(text)


def test_an_empty_prompt_is_refused_as_by_mlx_lm(model) -> None:
    batch = generator(model)
    for empty in ([[]], [[]]):
        with pytest.raises(ValueError, match="empty prompt"):
            batch.insert(empty)
    with pytest.raises(ValueError, match="max_tokens"):
        batch.insert([[1]], max_tokens=[1, 2])
    assert batch.insert([[1]]) == [0]


def test_remove_gives_caches_back_at_every_stage(model) -> None:
    text = prompts(1)[0]
    batch = generator(model, max_tokens=50, prefill_batch_size=1, prefill_step_size=64)
    answering, in_prompt, waiting = batch.insert([text[:20], text, text[40:]])
    for _ in range(4):
        batch.next()
    found = {uid: stage for uid, (stage, _) in batch._find_uids([0, 1, 2]).items()}
    assert found == {answering: 2, in_prompt: 1, waiting: 0}
    assert batch.prompt_cache_nbytes > 0
    caches = batch.remove([answering, in_prompt, waiting], return_prompt_caches=True)
    for uid in (answering, in_prompt):
        cache, tokens = caches[uid]
        assert cache[0].offset == len(tokens)
    assert caches[waiting][0][0].empty()
    assert batch.next() == ([], [])
    assert batch.prompt_cache_nbytes == 0
    batch.close()


def test_nothing_is_held_once_all_have_gone(model) -> None:
    batch = generator(model, max_tokens=5)
    batch.insert(prompts(4))
    run(batch)
    assert drop_in.stats(model).num_used_blocks == 0
    del batch
    stats = drop_in.stats(model)
    assert stats.num_used_blocks == 0
    assert stats.num_cached_blocks > 0


def test_a_generator_that_is_dropped_lets_go_of_its_blocks(model) -> None:
    batch = generator(model, max_tokens=50, prefill_batch_size=1)
    batch.insert(prompts(3))
    for _ in range(3):
        batch.next()
    assert drop_in.stats(model).num_used_blocks > 0
    gc.disable()  # references alone keep nothing
    try:
        del batch
        assert drop_in.stats(model).num_used_blocks == 0
    finally:
        gc.enable()
    integrity(model)


def test_caches_of_a_given_size_are_mlx_lms_own() -> None:
    model = tiny_model(tiny_config("qwen2"))
    texts = [[i % 90 for i in range(start, start + n)] for start, n in [(0, 40), (3, 90), (5, 9)]]

    def answers() -> Answers:
        batch = generator(model, max_tokens=8, max_kv_size=50)
        batch.insert(texts)
        answers, last = run(batch)
        caches = [c for r in last.values() for c in r.prompt_cache]
        assert {(type(c), c.max_size) for c in caches} == {(mlx_lm_cache.RotatingKVCache, 50)}
        return answers

    expected = dense(answers)
    assert answers() == expected


def test_windows(recwarn) -> None:
    model = tiny_model(tiny_config("mistral", sliding_window=20))
    model.make_cache = lambda: [mlx_lm_cache.RotatingKVCache(max_size=20) for _ in model.layers]
    texts = [[(7 * i + j) % 90 for i in range(n)] for j, n in enumerate((5, 19, 21, 60))]

    def answers() -> Answers:
        batch = generator(model, max_tokens=30, prefill_step_size=16)
        batch.insert(texts)
        return run(batch)[0]

    expected = dense(answers)
    assert answers() == expected
    assert drop_in.stats(model) is not None
    [_, last] = (lambda b: (b.insert([texts[-1]]), run(b)[1]))(generator(model, max_tokens=30))
    rotating = last[0].prompt_cache[0]
    assert isinstance(rotating, mlx_lm_cache.RotatingKVCache)
    assert rotating.keys.shape[2] == rotating.size() == 20
    # As a dense cache it goes on with the same tokens.
    more = [3, 1, 4]
    own = [c.dense() for c in last[0].prompt_cache]
    assert tokens_of(model, more, prompt_cache=own) == tokens_of(
        model, more, prompt_cache=last[0].prompt_cache
    )
    assert not [w for w in recwarn if "mlx_paged" in str(w.message)]


def test_weights_are_looked_over_once_for_all_that_are_inserted(model, monkeypatch) -> None:
    batch = generator(model, max_tokens=2)
    looked: list[int] = []
    weights = weight_identity.weights_of
    monkeypatch.setattr(weight_identity, "weights_of", lambda m: looked.append(1) or weights(m))
    batch.insert(prompts(5))
    assert len(looked) == 1
    assert len(run(batch)[0]) == 5
    found, expected = weights(model), tree_flatten(model.parameters())
    assert [id(array) for _, array in found] == [id(array) for _, array in expected]
