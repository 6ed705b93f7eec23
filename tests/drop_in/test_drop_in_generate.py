"""mlx-lm's functions for one sequence, paged: the same tokens, and no prompt computed twice."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.models import embedded, embedded_twin, rms, tiny_config, tiny_model
from support.plain import plain_mlx_lm

# isort: split
import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm import generate as generate_text
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlx_paged
from mlx_paged import drop_in
from mlx_paged.demo.prompts import CHATS, SYSTEM_PROMPT
from mlx_paged.drop_in import caches as drop_in_caches
from mlx_paged.drop_in.registry import stores_of
from mlx_paged.drop_in.sequence import PagedSequence
from mlx_paged.errors import InvalidParameterError
from mlx_paged.model import families
from mlx_paged.model.graph_runner import GraphRunner, Repeat
from mlx_paged.model.step_output import StepOutput

mlx_lm_generate = sys.modules["mlx_lm.generate"]  # (the package has a function of that name)
# Chats that begin with it have some 180 tokens: five blocks and a part of one.
SYSTEM = SYSTEM_PROMPT[:500]


@pytest.fixture
def model() -> nn.Module:
    """The embedded model, of which the drop-in has seen nothing."""
    return embedded_twin().model


def chat(request: str, system: str | None = None) -> list[int]:
    messages = [{"role": "system", "content": system}] if system else []
    return embedded().tokenizer.apply_chat_template(
        [*messages, {"role": "user", "content": request}], add_generation_prompt=True
    )


def tokens_of(model: nn.Module, prompt: list[int], **options: Any) -> list[int]:
    """Tokens of `generate_step`, imported the way a program does."""
    options.setdefault("max_tokens", 24)
    return [t for t, _ in mlx_lm_generate.generate_step(mx.array(prompt), model, **options)]


def dense(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The same call without the drop-in; it is in place again afterwards, and its stores empty."""
    with plain_mlx_lm():
        return function(*args, **kwargs)


def integrity(*models: nn.Module) -> None:
    for model in models:
        for store in stores_of(model):
            store.check_integrity()


# --- The same tokens ------------------------------------------------------------------------------


@pytest.mark.one_in(7)
@pytest.mark.usefixtures("paged")
@pytest.mark.parametrize("prefill_step_size", [2048, 100, 7])
def test_prompts_of_many_lengths_are_answered_as_by_mlx_lm(model, prefill_step_size) -> None:
    text = chat(CHATS[0], SYSTEM)
    for length in (1, 2, 31, 32, 33, 64, 65, len(text)):
        options = {"prefill_step_size": prefill_step_size, "max_tokens": 12}
        expected = dense(tokens_of, model, text[:length], **options)
        assert tokens_of(model, text[:length], **options) == expected, length
    integrity(model)


@pytest.mark.usefixtures("paged")
def test_a_prompt_is_computed_once(model) -> None:
    prompt = chat(CHATS[0], SYSTEM_PROMPT)
    first = tokens_of(model, prompt)
    assert drop_in.stats(model).num_cached_tokens == 0
    assert tokens_of(model, prompt) == first
    # Only the last token of a cached prompt is computed again.
    assert drop_in.stats(model).num_cached_tokens == len(prompt) - 1
    assert tokens_of(model, prompt, max_tokens=40)[:24] == first
    assert tokens_of(model, prompt) == first
    assert drop_in.stats(model).num_cached_tokens == 3 * (len(prompt) - 1)
    integrity(model)


@pytest.mark.usefixtures("paged")
def test_a_prompt_that_begins_like_another_is_computed_from_where_it_differs(model) -> None:
    one, other = chat(CHATS[0], SYSTEM), chat(CHATS[1], SYSTEM)
    common = next(i for i, (a, b) in enumerate(zip(one, other)) if a != b)
    expected = dense(tokens_of, model, other)
    tokens_of(model, one)
    assert tokens_of(model, other) == expected
    # In blocks, and the head of the block in which they part.
    assert drop_in.stats(model).num_cached_tokens == common
    assert common % 32


@pytest.mark.usefixtures("paged")
def test_answers_are_found_again_too(model) -> None:
    prompt = chat(CHATS[0], SYSTEM)
    answer = tokens_of(model, prompt, max_tokens=100)
    longer = [*prompt, *answer, *chat(CHATS[1])]
    tokens_of(model, longer, max_tokens=1)
    full_blocks = (len(prompt) + len(answer)) // 32 * 32
    assert drop_in.stats(model).num_cached_tokens >= full_blocks


@pytest.mark.usefixtures("paged")
def test_generate_and_stream_generate(model) -> None:
    tokenizer = embedded().tokenizer
    for prompt in (chat(CHATS[2]), "def fibonacci(n):"):
        expected = dense(generate_text, model, tokenizer, prompt, max_tokens=40)
        for _ in range(2):
            assert generate_text(model, tokenizer, prompt, max_tokens=40) == expected
        streamed = list(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=40))
        assert "".join(r.text for r in streamed) == expected
        assert streamed[-1].prompt_tokens == (
            len(prompt) if isinstance(prompt, list) else len(tokenizer.encode(prompt))
        )


@pytest.mark.usefixtures("paged")
def test_seeded_sampling_and_penalties_see_the_whole_prompt(model) -> None:
    prompt = chat(CHATS[0], SYSTEM)

    def sampled() -> list[int]:
        mx.random.seed(7)
        return tokens_of(
            model,
            prompt,
            sampler=make_sampler(0.9, top_p=0.95),
            logits_processors=make_logits_processors(repetition_penalty=1.3),
        )

    expected = dense(sampled)
    assert sampled() == expected
    assert sampled() == expected  # from the cache


@pytest.mark.usefixtures("paged")
def test_processors_and_progress_see_the_prompt_that_was_not_computed(model) -> None:
    prompt = chat(CHATS[0], SYSTEM)
    tokens_of(model, prompt, max_tokens=1)
    seen: list[list[int]] = []
    progress: list[tuple[int, int]] = []

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        return logits

    answer = tokens_of(
        model,
        prompt,
        max_tokens=3,
        logits_processors=[processor],
        prompt_progress_callback=lambda done, total: progress.append((done, total)),
    )
    assert seen[0] == prompt
    assert seen[1] == [*prompt, answer[0]]
    total = len(prompt)
    assert progress == [(0, total), (total - 1, total), (total, total)]


@pytest.mark.usefixtures("paged")
def test_a_generator_that_is_left_early_leaves_a_cache_that_goes_on(model) -> None:
    prompt = chat(CHATS[0])
    expected = dense(tokens_of, model, prompt, max_tokens=12)
    caches = mlx_lm_cache.make_prompt_cache(model)
    steps = mlx_lm_generate.generate_step(mx.array(prompt), model, prompt_cache=caches)
    head = [next(steps)[0] for _ in range(5)]
    steps.close()
    assert caches[0].offset == len(prompt) + 5
    # The next token of the answer was already being computed: start from the last one returned.
    mlx_lm_cache.trim_prompt_cache(caches, 1)
    rest = tokens_of(model, head[-1:], prompt_cache=caches, max_tokens=7)
    assert head + rest == expected
    integrity(model)


@pytest.mark.usefixtures("paged")
def test_input_embeddings_share_nothing(model) -> None:
    prompt = chat(CHATS[0], SYSTEM)[:100]
    other = model.model.embed_tokens(mx.array(chat(CHATS[1], "Be brief. " * 40)[:100]))
    expected = dense(tokens_of, model, prompt)
    expected_of_other = dense(tokens_of, model, prompt, input_embeddings=other)
    assert expected != expected_of_other
    # KV computed from embeddings never matches tokens, nor the other way round.
    for _ in range(2):
        assert tokens_of(model, prompt, input_embeddings=other) == expected_of_other
        assert tokens_of(model, prompt) == expected


@pytest.mark.usefixtures("paged")
def test_a_step_of_embeddings_never_repeats_one_of_tokens(model, monkeypatch) -> None:
    """A graph that was made of a step with tokens would ignore the embeddings."""
    run, repeats = GraphRunner.run, []

    def watched(self: GraphRunner, *args: Any) -> StepOutput:
        repeats.append(args[-1])
        return run(self, *args)

    mlx_lm_cache.make_prompt_cache(model)  # makes the store, which runs a step
    monkeypatch.setattr(GraphRunner, "run", watched)
    tokens = chat(CHATS[1])[:9]
    embeddings = model.model.embed_tokens(mx.array(tokens))
    prompt = mx.array(tokens)
    steps = mlx_lm_generate.generate_step(prompt, model, input_embeddings=embeddings, max_tokens=3)
    next(steps)
    # All embeddings but the last, the last one, and the first token, whose step may repeat.
    assert repeats[:2] == [Repeat.NOT] * 2 and repeats[2] is Repeat.AS_GRAPH


@pytest.mark.usefixtures("paged")
def test_quantized_caches_of_eight_bits_are_paged(model) -> None:
    prompt = chat(CHATS[0], SYSTEM)[:100]
    options = {"kv_bits": 8, "quantized_kv_start": 50}
    expected = dense(tokens_of, model, prompt)
    assert tokens_of(model, prompt, kv_bits=8, max_tokens=0) == []  # (it is never quantized)
    [plain] = stores_of(model)
    assert tokens_of(model, prompt, **options) == expected
    [_, quantized] = stores_of(model)
    assert 3.8 < plain.flat.bytes_per_token / quantized.flat.bytes_per_token < 4
    # Prefixes are shared with texts of the same format alone.
    assert drop_in.stats(model).num_cached_tokens == 0
    assert tokens_of(model, prompt, **options) == expected
    assert drop_in.stats(model).num_cached_tokens == 99
    long = chat(CHATS[1], SYSTEM_PROMPT)
    num_blocks = quantized.stats().num_blocks
    assert len(tokens_of(model, long * 3, max_tokens=2, **options)) == 2
    assert quantized.stats().num_blocks > num_blocks, "the pools have grown"
    assert tokens_of(model, prompt, **options) == expected
    integrity(model)
    keys, values = quantized.read(0, [PagedSequence(quantized).handles[0]], 0, 0)
    assert keys.dtype == values.dtype == mx.float32


@pytest.mark.usefixtures("paged")
def test_drafts_on_quantized_caches(model) -> None:
    prompt = chat(CHATS[0], SYSTEM)[:100]
    options = {"kv_bits": 8, "quantized_kv_start": 0}
    steps = mlx_lm_generate.speculative_generate_step(
        mx.array(prompt), model, embedded_twin().model, max_tokens=24, **options
    )
    assert [token for token, _, _ in steps] == tokens_of(model, prompt, **options)
    integrity(model)


@pytest.mark.usefixtures("paged")
def test_other_quantized_caches_are_mlx_lms_own(model) -> None:
    prompt = chat(CHATS[0], SYSTEM)[:100]
    for options in (
        {"kv_bits": 4, "quantized_kv_start": 0},
        {"kv_bits": 4, "quantized_kv_start": 50},
        {"max_kv_size": 64},
    ):
        expected = dense(tokens_of, model, prompt, **options)
        assert tokens_of(model, prompt, **options) == expected


@pytest.mark.usefixtures("paged")
def test_caches_of_a_given_size_are_mlx_lms_own(recwarn) -> None:
    model = tiny_model(tiny_config("qwen2"))  # (Llama has caches of its own and ignores the size)
    prompt = [i % 90 for i in range(100)]
    expected = dense(tokens_of, model, prompt, max_kv_size=32)
    assert tokens_of(model, prompt, max_kv_size=32) == expected
    assert type(mlx_lm_cache.make_prompt_cache(model, 32)[0]) is mlx_lm_cache.RotatingKVCache
    assert isinstance(mlx_lm_cache.make_prompt_cache(model)[0], drop_in_caches.PagedKVCache)
    assert not list(recwarn)  # it is what was asked for


@pytest.mark.one_in(6)
@pytest.mark.usefixtures("paged")
@pytest.mark.parametrize("max_tokens", [12, -1])
@pytest.mark.parametrize("size", [52, 51, 53, 60])
def test_a_size_that_is_not_reached_changes_nothing(size, max_tokens) -> None:
    model = tiny_model(tiny_config("qwen2"))
    prompt = [i % 90 for i in range(40)]

    def answer() -> list[int]:
        steps = mlx_lm_generate.generate_step(
            mx.array(prompt), model, max_tokens=max_tokens, max_kv_size=size
        )
        return [token for (token, _), _ in zip(steps, range(30))]

    expected = dense(answer)
    for _ in range(2):
        assert answer() == expected
    is_paged = max_tokens == 12 and size >= 52
    stats = drop_in.stats(model)
    assert (stats is not None and stats.num_cached_tokens) == (39 if is_paged else False)


# --- Empty prompts and exact hits -----------------------------------------------------------------


@pytest.mark.usefixtures("paged")
def test_an_empty_prompt_is_refused_and_one_whose_cache_has_all_is_answered(model) -> None:
    with pytest.raises(ValueError, match="prompt"):
        tokens_of(model, [])
    prompt = chat(CHATS[0])
    expected = dense(tokens_of, model, prompt)
    caches = mlx_lm_cache.make_prompt_cache(model)
    list(mlx_lm_generate.generate_step(mx.array(prompt), model, max_tokens=0, prompt_cache=caches))
    assert caches[0].offset == len(prompt)
    copied = copy.deepcopy(caches)
    assert tokens_of(model, [], prompt_cache=caches) == expected
    draft_caches = mlx_lm_cache.make_prompt_cache(model)
    tokens_of(model, prompt, max_tokens=0, prompt_cache=draft_caches)
    steps = mlx_lm_generate.speculative_generate_step(
        mx.array([]), model, model, max_tokens=24, prompt_cache=copied + draft_caches
    )
    assert [int(t) for t, *_ in steps] == expected


# --- Speculative decoding -------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("paged")
@pytest.mark.parametrize("num_draft_tokens", [1, 3])
@pytest.mark.parametrize("draft", ["a random model", "the same model"])
def test_speculative_decoding(model, draft, num_draft_tokens) -> None:
    draft_model = model if draft == "the same model" else random_draft()
    prompt = chat(CHATS[0], SYSTEM)

    def speculated(**options: Any) -> tuple[list[int], list[bool]]:
        steps = mlx_lm_generate.speculative_generate_step(
            mx.array(prompt),
            model,
            draft_model,
            num_draft_tokens=num_draft_tokens,
            max_tokens=30,
            **options,
        )
        tokens, drafted = [], []
        for token, _, from_draft in steps:
            tokens.append(int(token))
            drafted.append(from_draft)
        return tokens, drafted

    expected = dense(speculated)
    assert speculated() == expected
    assert speculated() == expected
    cached = 2 * (len(prompt) - 1) if draft_model is model else len(prompt) - 1
    assert drop_in.stats(model).num_cached_tokens >= cached
    caches = mlx_lm_cache.make_prompt_cache(model) + mlx_lm_cache.make_prompt_cache(draft_model)
    assert speculated(prompt_cache=caches) == expected
    integrity(model, draft_model)
    # Rejected drafts leave nothing behind.
    assert tokens_of(model, prompt, max_tokens=30) == expected[0]


def random_draft() -> nn.Module:
    return tiny_model(tiny_config("llama", vocab_size=embedded().vocab_size))


# --- Models that change ---------------------------------------------------------------------------


@pytest.mark.usefixtures("paged")
def test_new_weights_do_not_meet_old_keys(model) -> None:
    prompt = chat(CHATS[0], SYSTEM)[:80]
    caches = mlx_lm_cache.make_prompt_cache(model)
    tokens_of(model, prompt, prompt_cache=caches)
    twin = embedded_twin().model
    for m in (model, twin):
        layer = m.layers[0].self_attn.k_proj
        layer.weight = layer.weight * 1.5
    other = [*prompt, *prompt[40:]]
    # Whoever goes on with the old cache has old keys, as with mlx-lm; nobody else gets them.
    tokens_of(model, prompt[40:], prompt_cache=caches)
    assert tokens_of(model, prompt) == tokens_of(twin, prompt)
    assert tokens_of(model, other) == tokens_of(twin, other)
    assert drop_in.stats(model) == drop_in.stats(twin)
    assert tokens_of(model, prompt) == dense(tokens_of, twin, prompt)


@pytest.fixture
def own_weights(model) -> nn.Module:
    """The model with arrays of its own, which a test may write to."""
    model.update(tree_map(lambda w: w + 0, model.parameters()))
    mx.eval(model.parameters())
    return model


def subtract(w: mx.array) -> None:
    w -= 1.7 * w


def multiply(w: mx.array) -> None:
    w *= 1.5


def assign(w: mx.array) -> None:
    w[...] = -w


def assign_a_part(w: mx.array) -> None:
    w[: len(w) // 2] = 0


@pytest.mark.usefixtures("paged")
@pytest.mark.parametrize(
    ("part", "update"),
    [
        ("self_attn.k_proj", subtract),
        pytest.param("self_attn.k_proj", assign, marks=pytest.mark.long),
        pytest.param("input_layernorm", multiply, marks=pytest.mark.long),
        ("input_layernorm", assign_a_part),
    ],
)
def test_updates_in_place_do_not_meet_old_keys(own_weights, part, update) -> None:
    prompt = chat(CHATS[0], SYSTEM)[:80]
    weights = dict(tree_flatten(own_weights.layers[0].parameters()))
    for _ in range(2):
        tokens_of(own_weights, prompt, max_tokens=2)
        update(weights[f"{part}.weight"])
        found = tokens_of(own_weights, prompt, max_tokens=8)
        assert found == dense(tokens_of, own_weights, prompt, max_tokens=8)


@pytest.mark.usefixtures("paged")
def test_a_weight_that_is_not_changed_in_place_keeps_the_store(own_weights) -> None:
    prompt = chat(CHATS[0], SYSTEM)[:80]
    tokens_of(own_weights, prompt, max_tokens=4)
    [store] = stores_of(own_weights)
    weight = own_weights.layers[0].input_layernorm.weight
    weight *= 1  # the same values, and few of them
    other = weight - 1  # another array
    other -= 1
    mx.eval(own_weights.parameters(), other)
    tokens_of(own_weights, prompt, max_tokens=4)
    assert stores_of(own_weights) == [store]


@pytest.mark.usefixtures("paged")
def test_a_program_can_say_that_weights_have_changed(own_weights) -> None:
    prompt = chat(CHATS[0], SYSTEM)[:80]
    tokens_of(own_weights, prompt, max_tokens=4)
    [store] = stores_of(own_weights)
    view = np.array(own_weights.layers[0].input_layernorm.weight, copy=False)
    view[:] = view[::-1].copy()  # MLX does not see this
    drop_in.weights_changed(own_weights)
    found = tokens_of(own_weights, prompt, max_tokens=8)
    assert found == dense(tokens_of, own_weights, prompt, max_tokens=8)
    tokens_of(own_weights, prompt, max_tokens=4)
    assert stores_of(own_weights) != [store]
    drop_in.weights_changed(tiny_model(tiny_config("llama")))  # has no store: nothing to forget
    with pytest.raises(InvalidParameterError, match=r"model must be a model as mlx_lm\.load"):
        drop_in.weights_changed([])


@pytest.mark.usefixtures("paged")
def test_a_model_of_another_type_is_left_to_mlx_lm_with_one_warning(recwarn, monkeypatch) -> None:
    monkeypatch.delitem(families.PROVEN, "qwen2")  # as if nobody had proven it
    other = tiny_model(tiny_config("qwen2"))
    expected = dense(tokens_of, other, [1, 2, 3])
    for _ in range(3):
        assert tokens_of(other, [1, 2, 3]) == expected
    named = [w for w in recwarn if "qwen2" in str(w.message)]
    assert len(named) == 1
    assert drop_in.stats(other) is None


@pytest.fixture(autouse=True)
def forget_warnings() -> Iterator[None]:
    from mlx_paged.drop_in import registry

    registry._warned.clear()
    yield


@pytest.mark.usefixtures("paged")
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_differs_from_mlx_lm_by_rounding_only(dtype) -> None:
    model = embedded_twin().model
    model.set_dtype(dtype)
    prompt = mx.array(chat(CHATS[0]))
    [(_, expected)] = dense(
        lambda: list(mlx_lm_generate.generate_step(prompt, model, max_tokens=1))
    )
    [(_, actual)] = list(mlx_lm_generate.generate_step(prompt, model, max_tokens=1))
    assert actual.dtype == expected.dtype
    expected, actual = (np.array(x.astype(mx.float32)) for x in (expected, actual))
    assert rms(actual - expected) / rms(expected) < 8 * mx.finfo(dtype).eps


def test_the_engine_works_beside_it(paged) -> None:
    from mlx_paged import LLM, SamplingParams

    prompt = chat(CHATS[0])
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    loaded = embedded_twin()
    expected = tokens_of(loaded.model, prompt)
    llm = LLM(loaded, num_gpu_blocks_override=64)
    assert llm.generate([prompt], params)[0].outputs[0].token_ids == expected
    assert tokens_of(loaded.model, prompt) == expected
    mlx_paged.unpatch()
    assert llm.generate([prompt], params)[0].outputs[0].token_ids == expected
    mlx_paged.patch()


# --- Threads --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("paged")
def test_threads_take_turns(model) -> None:
    """Each thread has streams of its own; the store goes from one to the next."""
    prompt = chat(CHATS[0], SYSTEM)
    expected = dense(tokens_of, model, prompt)

    def in_a_thread(work: Callable[[], Any]) -> Any:
        def run() -> Any:
            mx.set_default_stream(mx.new_stream(mx.default_device()))
            return work()

        with ThreadPoolExecutor(max_workers=1) as pool:
            return pool.submit(run).result(timeout=300)

    def left_unasked() -> None:
        """Logits that nobody evaluates, in a thread that is gone."""
        model(mx.array([prompt[:40]]), cache=mlx_lm_cache.make_prompt_cache(model))

    def left_early() -> None:
        next(mlx_lm_generate.generate_step(mx.array(prompt[:90]), model))

    for disturb in (left_unasked, left_early, lambda: in_a_thread(left_unasked), left_early):
        assert in_a_thread(lambda: tokens_of(model, prompt)) == expected
        disturb()
        in_a_thread(disturb)
        assert tokens_of(model, prompt) == expected
    assert drop_in.stats(model).num_cached_tokens > 7 * (len(prompt) // 32 * 32)
    integrity(model)
