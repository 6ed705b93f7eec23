"""Pictures in the engine's steps: right answers whatever is shared, cut, evicted or broken off.

The model is a tiny Llama with a stand-in for a tower (`support.fake_vlm`); the oracle is mlx-lm's
own cache over the whole prompt.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from support.fake_vlm import (
    HAS_BOUNDS,
    PLACEHOLDER,
    Picture,
    Prepared,
    dense_answer,
    fake_vlm,
    prepared,
)
from support.interrupts import Interrupter
from support.models import embedded_twin
from support.pressure import fake_source
from support.step_rows import rows_of

# isort: split
import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import ops
from mlx_paged.core import FinishReason, MediaSpan, PromptMedia, Request, StepBatch
from mlx_paged.core import Sequence as CoreSequence
from mlx_paged.core.encoder_cache import ScheduledMedia
from mlx_paged.engine import memory
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.outputs import RequestOutput
from mlx_paged.engine.pressure_sources import PressureLevel
from mlx_paged.engine.runner import LaunchedStep
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import InvalidMediaError, InvalidParameterError, StepError
from mlx_paged.model.media import MediaFeatures, MediaInputs, MediaPrompt, Span
from mlx_paged.model.step_output import StepOutput
from mlx_paged.multimodal import memory as media_memory
from mlx_paged.multimodal import step_media
from mlx_paged.multimodal.prepared import SequenceMedia
from mlx_paged.multimodal.step_media import StepMediaBuilder

OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
# As in `test_interrupts.py`, and in `tests/core/test_encoder_cache.py`.
NUM_INTERRUPTS = int(os.environ.get("MLX_PAGED_INTERRUPTS", "10"))
NUM_REQUESTS = int(os.environ.get("MLX_PAGED_MEDIA_REQUESTS", "24"))
BOUNDS = step_media._bounds


@pytest.fixture(autouse=True)
def no_pool_is_copied() -> Iterator[None]:
    before = ops.pool_copies()
    yield
    assert ops.pool_copies() == before


def make(**options: Any) -> tuple[Engine, Any]:
    """An engine and its tower."""
    model, tower = fake_vlm()
    defaults = {
        "kv_cache_memory": 4 << 20,
        "block_size": 8,
        "max_num_batched_tokens": 24,
        "max_num_seqs": 8,
    }
    engine = Engine(model, EngineConfig(**{**defaults, **options}))
    tower.calls.clear()
    return engine, tower


@pytest.fixture(autouse=True)
def bounds_where_plans_have_them(monkeypatch: Any) -> None:
    if not HAS_BOUNDS:
        monkeypatch.setattr(step_media, "_bounds", lambda *_: None)


_answers: dict[tuple[Any, ...], list[int]] = {}


def expected(prompt: Prepared, num_tokens: int = 6) -> list[int]:
    """`dense_answer`, computed once for each prompt."""
    pictures = tuple((p.key, p.is_atomic) for p in prompt.pictures)
    known = (tuple(prompt.token_ids), pictures, num_tokens)
    if known not in _answers:
        _answers[known] = dense_answer(prompt, num_tokens)
    return _answers[known]


def add(
    engine: Engine, name: str, prompt: Prepared, params: SamplingParams = GREEDY, **options: Any
) -> RequestOutput:
    media = prompt if prompt.spans else None
    return engine.add_request(name, prompt.token_ids, params, media=media, **options)


def run(
    engine: Engine, prompts: Sequence[Prepared], params: SamplingParams = GREEDY
) -> list[RequestOutput]:
    outputs = [add(engine, f"{i}", prompt, params) for i, prompt in enumerate(prompts)]
    finish(engine)
    return outputs


def finish(engine: Engine) -> None:
    while engine.has_unfinished:
        engine.step()
        engine.check_integrity()
        check_store(engine)


def check_store(engine: Engine) -> None:
    """The device holds nothing that the book does not know of."""
    assert engine._runner.media is not None
    store, book = engine._runner.media.store, engine._scheduler.encoder_cache
    pending = set(book._evicted)
    held = {k: f.nbytes for k, f in store._features.items() if k not in pending}
    assert held.keys() <= book._held.keys()
    untold = {key for key, _ in store._sizes}  # (of a step in flight)
    assert all(book._held[k].num_bytes == size for k, size in held.items() if k not in untold)


def check(outputs: Sequence[RequestOutput], prompts: Sequence[Prepared], num: int = 6) -> None:
    for output, prompt in zip(outputs, prompts, strict=True):
        for answer in output.outputs:
            assert answer.error is None and answer.finish_reason is FinishReason.LENGTH
            assert answer.token_ids == expected(prompt, num)


@cache
def mixed() -> tuple[Prepared, ...]:
    """Pictures of one size, with and without text in between, texts, and equal ones."""
    return (
        prepared([3, 4, 5], Picture(1, 20), [9, 8]),
        prepared([3, 4, 5], Picture(2, 20), [9, 8]),
        prepared([3, 4, 5], Picture(1, 20), [9, 8, 7]),
        prepared([1], Picture(3, 9, gaps=(2, 5)), [9], Picture(1, 20), [4]),
        prepared([5, 6, 7, 8]),
        prepared(Picture(4, 30)),
        prepared([3, 4, 5], Picture(2, 20), [9, 8], Picture(2, 20), [6]),
        prepared([5], Picture(5, 11, is_atomic=True), Picture(6, 11, is_atomic=True), [4, 3]),
    )


@pytest.fixture(scope="module")
def engines() -> dict[bool, tuple[Engine, Any]]:
    return {overlap: make(async_scheduling=overlap) for overlap in (False, True)}


# Answers.


@OVERLAP
def test_pictures_in_mixed_batches(engines: Any, overlap: bool) -> None:
    engine, tower = engines[overlap]
    engine.reset_prefix_cache()
    tower.calls.clear()
    before = engine.stats().encoder_cache
    check(run(engine, mixed()), mixed())
    # Each picture was encoded once, whoever asked for it.
    assert len(tower.calls) == 6 - before.num_items
    after = engine.stats().encoder_cache
    assert after.num_encoded_items - before.num_encoded_items == len(tower.calls)
    assert after.num_bytes == sum(
        4 * 64 * rows for rows in (20, 20, 9, 30, 11, 11)
    )  # float32, of hidden size 64


@pytest.mark.parametrize("tokens", [8, 9, 13, 64])
def test_every_way_to_cut_a_prompt(tokens: int) -> None:
    """Chunks begin and end inside of pictures and beside them, one row or all of it."""
    prompts = mixed()[:7] if tokens < 11 else mixed()
    engine, _ = make(max_num_batched_tokens=tokens, max_num_seqs=4)
    check(run(engine, prompts), prompts)


@OVERLAP
def test_the_previous_pictures_answer(engines: Any, overlap: bool) -> None:
    """Equal tokens, equal sizes: only the pixels differ. In one batch, one by one, and again."""
    engine, _ = engines[overlap]
    engine.reset_prefix_cache()
    prompts = [prepared([3, 4], Picture(number, 17), [9]) for number in range(30, 36)]
    assert len({tuple(prompt.token_ids) for prompt in prompts}) == 1
    assert len({tuple(expected(prompt)) for prompt in prompts}) > 3
    check(run(engine, prompts), prompts)
    for prompt in [*prompts[::-1], prepared([3, 4], [PLACEHOLDER] * 17, [9]), *prompts]:
        [output] = run(engine, [prompt])
        check([output], [prompt])
    assert output.num_cached_tokens == len(prompt.token_ids) - 1


@OVERLAP
def test_several_answers_of_one_picture(engines: Any, overlap: bool) -> None:
    engine, tower = engines[overlap]
    engine.reset_prefix_cache()
    tower.calls.clear()
    prompts = [prepared([3, 4, 6], Picture(40 + overlap, 18), [9, 2])] * 2
    check(run(engine, prompts, replace(GREEDY, n=3)), prompts)
    assert len(tower.calls) == 1


@OVERLAP
def test_a_second_turn_runs_no_tower(engines: Any, overlap: bool) -> None:
    engine, tower = engines[overlap]
    first = prepared([8, 4, 6], Picture(50, 18), [9, 2])
    [output] = run(engine, [first])
    tower.calls.clear()
    engine._scheduler.encoder_cache.clear()
    answer = output.outputs[0].token_ids
    second = prepared([8, 4, 6], Picture(50, 18), [9, 2, *answer, 5, 5])
    check(run(engine, [second]), [second])
    assert tower.calls == [] and engine.stats().encoder_cache.num_items == 0


@OVERLAP
def test_features_go_under_memory_pressure(overlap: bool, monkeypatch: Any) -> None:
    source = fake_source(monkeypatch)
    engine, tower = make(async_scheduling=overlap)
    store, prompts = engine._runner.media.store, mixed()
    check(run(engine, prompts), prompts)
    assert len(store) > 3
    source.level = PressureLevel.WARNING
    engine.follow_pressure()
    assert len(store) == 0 and engine.stats().encoder_cache.num_items == 0
    assert engine.stats().pressure.num_bytes > 0
    tower.calls.clear()
    check(run(engine, prompts), prompts)  # it goes on in the middle of pictures
    assert tower.calls
    engine.follow_pressure()
    check_store(engine)
    assert len(store) == 0


@OVERLAP
def test_pictures_and_salts(engines: Any, overlap: bool) -> None:
    engine, tower = engines[overlap]
    prompt = prepared([3, 4], Picture(60, 12), [9])
    tower.calls.clear()
    salts = ["a", "b", None, "a"]
    outputs = [add(engine, f"{i}", prompt, cache_salt=salt) for i, salt in enumerate(salts)]
    finish(engine)
    check(outputs, [prompt] * 4)
    assert len(tower.calls) == 3


def test_a_pool_too_small_for_all() -> None:
    engine, _ = make(
        num_gpu_blocks_override=9, max_num_batched_tokens=12, mm_encoder_cache_bytes=9000,
        max_num_encoder_tokens=10,
    )  # fmt: skip
    prompts = [p for p in mixed() if len(p.token_ids) < 40] * 2
    check(run(engine, prompts), prompts)
    assert engine.stats().num_preemptions > 0


def test_budgets_hold_over_many_requests() -> None:
    """`MLX_PAGED_MEDIA_REQUESTS=2000` takes a quarter as many pictures."""
    budget = 20 * 64 * 4 * 3
    engine, tower = make(mm_encoder_cache_bytes=budget, max_num_encoder_tokens=24)
    assert engine._runner.media is not None
    store, rng = engine._runner.media.store, random.Random(0)
    live: list[int] = []
    for i in range(NUM_REQUESTS):
        number = rng.randrange(NUM_REQUESTS // 4)
        prompt = prepared([2 + i % 7, 4], Picture(100 + number, 4 + number % 17), [9])
        output = add(engine, f"{i}", prompt, replace(GREEDY, max_tokens=2))
        while engine.has_unfinished and rng.random() < 0.8:
            engine.step()
            assert store.num_bytes <= budget and engine.stats().encoder_cache.num_bytes <= budget
        if i % 100 == 99:
            live.append(mx.get_active_memory())
    finish(engine)
    assert output.outputs[0].token_ids == expected(prompt, 2)
    stats = engine.stats().encoder_cache
    assert stats.max_bytes <= budget and stats.num_encoded_items == len(tower.calls)
    assert stats.num_queries + stats.num_prefix_hits == NUM_REQUESTS
    assert all(abs(n - live[-1]) < 2 * budget for n in live[len(live) // 2 :])


# Faults.


@OVERLAP
def test_a_tower_that_fails_ends_its_own_request(overlap: bool) -> None:
    engine, tower = make(async_scheduling=overlap)
    tower.fails = 7.0
    bad = prepared([3, 4, 5], Picture(7, 20), [9, 8])
    prompts = [*mixed()[:3], bad, *mixed()[4:6]]
    outputs = run(engine, prompts)
    check(outputs[:3] + outputs[4:], prompts[:3] + prompts[4:])
    [answer] = outputs[3].outputs
    assert answer.finish_reason is FinishReason.ERROR and isinstance(answer.error, StepError)
    assert "the tower cannot see this" in answer.error.reason
    # (It is a matter of the picture, which is not tried again.)
    assert isinstance(answer.error, InvalidMediaError)
    assert sum(abs(total - bad.pictures[0].pixels.sum()) < 1e-3 for _, total in tower.calls) <= 2
    assert engine.stats().num_faults == 0
    # It is not remembered as something that is there.
    tower.fails = None
    check(run(engine, [bad]), [bad])


@OVERLAP
@pytest.mark.parametrize("fault", ["launch", "read", "memory"])
def test_steps_that_fail_and_run_in_parts(overlap: bool, fault: str, monkeypatch: Any) -> None:
    """Parts find features that the step made, or make them again; atomic pictures are not cut."""
    engine, _ = make(async_scheduling=overlap)
    runner, calls, sizes = engine._runner, [], []
    launch, read = runner.launch, runner.read

    def failing_launch(batch: StepBatch, previous: Any) -> LaunchedStep:
        for row, media in zip(rows_of(batch), batch.media_inputs):
            for start, end in () if media is None else media.media.atomic:
                assert not start < row.start < end and not start < row.context_len < end
        calls.append(batch)
        sizes.append(batch.num_tokens)
        if fault == "memory" and batch.num_tokens > 11:
            raise MemoryError
        launched = launch(batch, previous)
        if fault == "launch" and len(calls) % 3 == 0 and batch.num_seqs > 1:
            runner.abandon(launched)
            raise RuntimeError("injected")
        return launched

    def failing_read(launched: LaunchedStep) -> Any:
        calls.append(launched)
        if fault == "read" and len(calls) % 3 == 0:
            raise RuntimeError("injected")
        return read(launched)

    monkeypatch.setattr(runner, "launch", failing_launch)
    monkeypatch.setattr(runner, "read", failing_read)
    check(run(engine, mixed()), mixed())
    assert engine.stats().num_faults >= 1
    assert fault != "memory" or 11 in sizes, "an atomic picture has 11 rows"


def test_features_of_steps_that_failed_are_not_trusted(monkeypatch: Any) -> None:
    """They were to be made by the step's own graph."""
    engine, tower = make()
    runner, forward, failed = engine._runner, engine._runner.model.run, []
    assert runner.media is not None
    store = runner.media.store

    def fails(*args: Any) -> StepOutput:
        if not failed:
            assert len(store) == 1, "encoded before the forward"
            failed.append("build")
            raise RuntimeError("injected")
        return forward(*args)

    def read(launched: LaunchedStep) -> Any:
        if len(failed) == 1:
            failed.append("read")
            raise RuntimeError("injected")
        return type(runner).read(launched)

    abandon = runner.abandon

    def abandoned(launched: LaunchedStep) -> None:
        assert len(store) == 1
        abandon(launched)
        assert len(store) == 0

    monkeypatch.setattr(runner.model, "run", fails)
    monkeypatch.setattr(runner, "read", read)
    monkeypatch.setattr(runner, "abandon", abandoned)
    prompt = prepared([3, 4, 5], Picture(1, 12), [9, 8])
    add(engine, "r", prompt)
    finish(engine)
    # (In the step that could not be built, in the one that could not be read, and at last.)
    assert failed == ["build", "read"] and len(tower.calls) == 3


def test_sizes_of_features_are_the_arrays() -> None:
    engine, _ = make()
    book = engine._scheduler.encoder_cache
    book._bytes_per_row = 1  # whatever it was taken for
    check(run(engine, mixed()[:3]), mixed()[:3])
    stats = engine.stats().encoder_cache
    assert stats.num_bytes == stats.max_bytes == 2 * 20 * 64 * 4 and book._bytes_per_row == 64 * 4


@OVERLAP
def test_nans_of_a_tower_are_not_kept(overlap: bool, monkeypatch: Any) -> None:
    engine, tower = make(async_scheduling=overlap)
    weights, tower.weights = tower.weights, mx.full((6, 64), mx.nan)
    prompt = prepared([3, 4, 5], Picture(1, 20), [9, 8])
    [output] = run(engine, [prompt])
    assert "NaN" in output.outputs[0].error.reason
    tower.weights = weights
    check(run(engine, [prompt]), [prompt])


@OVERLAP
def test_interrupts(overlap: bool) -> None:
    """After an exception at any line all answers are right but for one that ended with an error."""
    engine, _ = make(
        async_scheduling=overlap, max_num_batched_tokens=16, num_gpu_blocks_override=16,
        mm_encoder_cache_bytes=9000,
    )  # fmt: skip
    prompts = mixed()[:5]
    with Interrupter().watching() as counter:
        run(engine, prompts)
    rng = random.Random(overlap)
    num_steps = engine.stats().num_steps
    for attempt in range(10 * NUM_INTERRUPTS):
        # (Some lines need no recovery, and which ones are drawn depends on Python's version.)
        if attempt >= NUM_INTERRUPTS and engine.stats().num_recoveries > 0:
            break
        interrupter = Interrupter(rng.randint(1, counter.num_lines), RuntimeError("injected"))
        outputs = []
        try:
            with interrupter.watching():
                for i, prompt in enumerate(prompts):
                    outputs.append(add(engine, f"{i}", prompt))
                while engine.has_unfinished:
                    engine.step()
        except RuntimeError:
            pass
        while engine.has_unfinished:
            engine.step()
        engine.check_integrity()
        check_store(engine)
        failed = [o for o in outputs if o.outputs[0].finish_reason is FinishReason.ERROR]
        assert len(failed) <= 1
        for output, prompt in zip(outputs, prompts, strict=False):
            if output not in failed:
                check([output], [prompt])
    assert engine.stats().num_steps > num_steps and engine.stats().num_recoveries > 0
    stats = engine.stats().encoder_cache
    assert stats.num_queries - stats.num_hits == stats.num_encoded_items


# Requests that are refused.


def test_a_text_model_takes_no_media_and_pays_nothing_for_them() -> None:
    config = EngineConfig(kv_cache_memory=4 << 20, block_size=8)
    engine = Engine(embedded_twin(), config)
    prompt = prepared([3], Picture(1, 4), [9])
    with pytest.raises(InvalidParameterError, match="text only"):
        engine.add_request("r", prompt.token_ids, GREEDY, media=prompt)
    assert engine._runner.media is None and engine.media is None and not engine.has_unfinished


def _spoiled(**changes: Any) -> Prepared:
    good = prepared([3], Picture(1, 4, gaps=(2,)), [9])
    prompt, spans = good.prompt, good.spans
    if "prompt" in changes:
        prompt = replace(prompt, **changes["prompt"])
    if "span" in changes:
        spans = (replace(spans[0], **changes["span"]),)
    return Prepared(prompt, changes.get("spans", spans))


@pytest.mark.parametrize(
    ("media", "named"),
    [
        ("a picture", "media"),
        (_spoiled(prompt={"token_ids": [1, 2]}), "media"),
        (_spoiled(spans=()), "media.spans"),
        (_spoiled(spans=[]), "media"),
        (_spoiled(spans=("a span",)), "media.spans"),
        (_spoiled(prompt={"inputs": []}), "media.spans"),
        (_spoiled(span={"offset": 2}), "media.spans"),
        (_spoiled(span={"num_rows": 3}), "media.spans"),
        (
            _spoiled(prompt={"spans": [Span(1, 5, np.array([1, 2, 4, 9]), "image")]}),
            "media.spans",
        ),
        (
            _spoiled(prompt={"spans": [Span(1, 5, np.array([2, 1, 4, 5]), "image")]}),
            "media.spans",
        ),
        (
            _spoiled(
                prompt={"inputs": [MediaInputs("audio", {}, np.zeros(5), np.array([0, 1, 3, 4]))]}
            ),
            "media",
        ),
    ],
)
def test_media_that_are_not_the_prompts(engines: Any, media: Any, named: str) -> None:
    engine, _ = engines[True]
    tokens = prepared([3], Picture(1, 4, gaps=(2,)), [9]).token_ids
    with pytest.raises(InvalidParameterError) as caught:
        engine.add_request("r", tokens, GREEDY, media=media)
    assert caught.value.field == named
    assert not engine.has_unfinished and not engine.needs_recovery


def test_an_atomic_item_larger_than_any_step_is_refused(engines: Any) -> None:
    engine, _ = engines[True]
    with pytest.raises(InvalidParameterError, match=r"24 positions.*max_num_batched_tokens"):
        add(engine, "r", prepared([3], Picture(1, 25, is_atomic=True), [9]))
    assert not engine.has_unfinished and not engine.needs_recovery


@pytest.mark.parametrize("name", ["max_num_encoder_tokens", "mm_encoder_cache_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_options_are_checked(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError, match=name):
        EngineConfig(**{name: value})


# The media of a step.


def _sequence(seq_id: int, prompt: MediaPrompt, spans: list[MediaSpan]) -> CoreSequence:
    request = Request("r", prompt.token_ids, media=spans)
    sequence = CoreSequence(seq_id, request, 0, ((False, 0), 0, 0))
    if spans:
        sequence.media = SequenceMedia(prompt, PromptMedia(spans, len(prompt.token_ids), None))
    return sequence


def test_rows_positions_and_bounds_of_random_steps(monkeypatch: Any) -> None:
    """Against a loop over all rows."""
    monkeypatch.setattr(step_media, "_bounds", BOUNDS)
    rng = np.random.default_rng(1)
    sequences = []
    for number in range(4):
        spans, core, inputs, length = [], [], [], 0
        for which in range(number):  # (the first is text)
            offset = length + int(rng.integers(0, 5))
            rows = offset + np.flatnonzero(np.r_[1, rng.integers(0, 2, 7), number % 2])
            rows = rows.astype(np.int32)
            spans.append(Span(offset, 9, rows, "image"))
            key = bytes([number, which]) * 16
            core.append(MediaSpan(offset, 9, key, len(rows), is_atomic=which == 1))
            made = np.array([number * 100 + which * 30 + i for i in range(len(rows))])
            inputs.append(
                MediaInputs("image", {"made": made}, np.zeros(9, np.int32), rows - offset)
            )
            length = offset + 9
        length += 3
        rope = rng.integers(0, 50, (3, length)).astype(np.int32) if number else None
        prompt = MediaPrompt([5] * length, spans, inputs, rope, -number)
        sequences.append(_sequence(number, prompt, core))

    def encode(item: MediaInputs) -> MediaFeatures:
        return MediaFeatures(mx.array(item.arrays["made"].astype(np.float32))[:, None])

    builders = [StepMediaBuilder(encode, uses_rope_positions=rope) for rope in (True, False)]
    seen_bounds = 0
    for trial in range(200):
        owners = tuple(rng.permutation(np.array(sequences, dtype=object))[: rng.integers(1, 5)])
        counts, contexts = [], []
        for s in owners:
            atomic = s.request.prompt_media.atomic if s.request.prompt_media else ()
            ends = [i for i in range(len(s.tokens) + 4) if not any(a < i < b for a, b in atomic)]
            start, end = sorted(rng.choice(ends, 2, replace=False).tolist())
            counts.append(end - start)
            contexts.append(end)
        tokens: list[Any] = []
        for s, count, context in zip(owners, counts, contexts, strict=True):
            tokens += [(s, position) for position in range(context - count, context)]
        found = [_row(s, position) for s, position in tokens]
        has_items = any(made is not None for made, _, _ in found)
        media = ScheduledMedia((), ()) if has_items or trial % 2 else None
        batch = StepBatch(
            seq_ids=[s.seq_id for s in owners], media=media, media_inputs=[s.media for s in owners]
        )
        for builder, rope in zip(builders, (True, False), strict=True):
            step = builder.build(batch, np.array(contexts), np.array(counts), overlaps=False)
            if not any(s.media for s in owners) or not (rope or media):
                assert step is None
                continue
            step.check(len(tokens))
            made = [(i, each[0]) for i, each in enumerate(found) if each[0] is not None]
            assert step.rows.tolist() == [i for i, _ in made]
            if made:
                assert step.features.embeds[:, 0].tolist() == [value for _, value in made]
            else:
                assert step.features is None
            if rope:
                assert step.rope_positions.T.tolist() == [each[1] for each in found]
            else:
                assert step.rope_positions is None
            bounds = [each[2] for each in found]
            own = [[position, position] for _, position in tokens]
            if bounds == own:
                assert step.bounds is None
            else:
                assert step.bounds.T.tolist() == bounds
                seen_bounds += 1
    assert seen_bounds > 20


def _row(s: CoreSequence, position: int) -> tuple[float | None, list[int], list[int]]:
    """(feature, RoPE positions, bounds) of one row."""
    made, rope, bounds = None, [position] * 3, [position, position]
    if s.media is None:
        return made, rope, bounds
    rope = [position + s.media.rope_delta] * 3
    if position < s.media.num_prompt_tokens:
        rope = s.media.rope_positions[:, position].tolist()
    for i, rows in enumerate(s.media.rows):
        if position in rows:
            made = float(s.media.inputs[i].arrays["made"][rows.tolist().index(position)])
    for span, rows in zip(s.request.prompt_media.spans, s.media.rows, strict=True):
        if not span.is_atomic or not span.offset <= position < span.end:
            continue
        bounds = [span.offset, span.end - 1]
        if rows[-1] + 1 == span.end:  # (what is between its rows is text, which sees no further)
            bounds = [position, position]
            while position in rows and bounds[0] - 1 in rows:
                bounds[0] -= 1
            while position in rows and bounds[1] + 1 in rows:
                bounds[1] += 1
    return made, rope, bounds


def test_kinds_with_and_without_deepstack_in_one_step() -> None:
    picture = MediaFeatures(mx.ones((2, 4)), (mx.ones((2, 4)), 2 * mx.ones((2, 4))))
    sound = MediaFeatures(3 * mx.ones((3, 4)))
    both = MediaFeatures.concatenate([sound, picture])
    assert both.embeds[:, 0].tolist() == [3, 3, 3, 1, 1]
    assert [layer[:, 0].tolist() for layer in both.deepstack] == [[0, 0, 0, 1, 1], [0, 0, 0, 2, 2]]


# Memory.


def test_the_pool_leaves_room_for_features_and_towers(monkeypatch: Any) -> None:
    config = EngineConfig(gpu_memory_utilization=0.5)
    monkeypatch.setattr(memory, "available_memory", lambda: 1 << 40)
    monkeypatch.setattr(memory, "device_memory", lambda: 8 << 30)
    # Engines of other tests may be alive.
    monkeypatch.setattr(memory.mx, "get_active_memory", lambda: 1 << 30)
    without = memory.left_for_pool(config, lambda: 1000, on_cpu=True)
    with_features = memory.left_for_pool(config, lambda: 1000, kept=1 << 20, on_cpu=True)
    assert without[0] is not None and with_features[0] is not None
    assert without[0] - with_features[0] == 1 << 20


class Processor:
    """A row for each square of 32 pixels, up to `most` of them."""

    kinds = ("image",)
    most = 1500

    def is_atomic(self, kind: str) -> bool:
        return False

    def placeholder(self, kind: str, index: int) -> str:
        return f"<{kind}>"

    def process(self, text: str, images: Any = (), videos: Any = ()) -> MediaPrompt:
        [item] = [*images, *(video.frames for video in videos)]
        pixels = item.width * item.height if images else item.size // 3
        assert text == ("<image>" if images else "<video>")
        return prepared(Picture(1, min(self.most, max(1, pixels >> 10)))).prompt


def test_a_tower_is_given_what_it_needs_for_the_largest_item(monkeypatch: Any) -> None:
    pytest.importorskip("PIL", reason="Pillow is not installed")
    engine, _ = make()
    runner, wide = engine._runner, EngineConfig(max_num_batched_tokens=1000, max_num_seqs=100)

    def with_media(activations: int, config: EngineConfig, **more: Any) -> int:
        return media_memory.with_media(
            activations,
            runner.model.encode,
            Processor(),
            config.media_options,
            max_num_seqs=config.max_num_seqs,
            step_tokens=config.step_tokens,
            **more,
        )

    assert with_media(1 << 40, wide) == 1 << 40
    # (64 float32 numbers a row, at least. 1024 rows are measured, 1500 are let in.)
    assert with_media(0, wide) >= 1500 * 64 * 4
    assert with_media(0, wide, room=99) == 99
    monkeypatch.setattr(Processor, "is_atomic", lambda *_: True)
    assert with_media(10 << 40, wide) == 11 << 40
    none = EngineConfig(limit_mm_per_prompt={"image": 0})
    assert with_media(0, none) == 0

    def tower_bytes() -> int:
        options = wide.media_options
        return media_memory.tower_bytes(runner.model.encode, Processor(), "image", options, None)

    def encode(item: MediaInputs) -> Any:
        if item.num_rows > 1000:
            raise RuntimeError("no memory")
        return MediaFeatures(mx.ones((1 << 10, 1 << 10)))

    monkeypatch.setattr(runner.model, "encode", encode)
    assert tower_bytes() >= 4 << 20  # what is known of a smaller one
    monkeypatch.setattr(Processor, "process", lambda *_, **__: 1 / 0)
    assert tower_bytes() == 0


def test_memory_of_larger_items_follows_from_that_of_smaller_ones() -> None:
    found = media_memory._extrapolated
    assert found({256: 256 * 7, 1024: 1024 * 7}, 16384) == 16384 * 7
    need = lambda rows: 1000 * rows + 3 * rows**2  # noqa: E731
    assert found({256: need(256), 1024: need(1024)}, 16384) == pytest.approx(need(16384))
    # Memory that every item needs is no growth, and memory of larger items is no cube.
    assert found({256: 10_000, 1024: 10_100}, 2048) == pytest.approx(20_200)
    assert found({256: 0, 1024: 1024}, 2048) == pytest.approx(4096)
    assert found({576: 99}, 5000) == pytest.approx(99 * 5000 / 576)
    assert found({576: 99}, 576) == found({576: 99}, 100) == 99


def test_the_largest_item_is_what_limits_processor_and_context_let_in(monkeypatch: Any) -> None:
    pytest.importorskip("PIL", reason="Pillow is not installed")

    def most(kind: Any, model_len: int | None = None, **limits: Any) -> int:
        options = EngineConfig(media_limits=limits).media_options
        return media_memory._max_rows(Processor(), kind, options, model_len)

    assert most("image") == 1500
    monkeypatch.setattr(Processor, "most", 1 << 40)
    monkeypatch.setattr(
        Processor, "process", lambda self, text, images=(), videos=(): _sized(images, videos)
    )
    assert most("image") == (64 << 20) >> 10
    assert most("image", 5000) == 5000
    assert most("image", max_image_pixels=1 << 20) == 1 << 10
    assert most("image", max_image_pixels=1) == 1
    assert most("video") == 32 * 512 * 512 >> 10
    assert most("video", max_video_pixels=32 * 300 * 300) == 32 * 300 * 300 >> 10
    assert most("video", max_video_pixels=1) == 1


def _sized(images: Any, videos: Any) -> MediaPrompt:
    pixels = sum(image.width * image.height for image in images)
    pixels += sum(video.frames.size // 3 for video in videos)
    count = max(1, pixels >> 10)
    rows = np.zeros(count, np.int32)
    inputs = MediaInputs("image", {}, rows, rows)
    return MediaPrompt([0] * count, [], [inputs])
