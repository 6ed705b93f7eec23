"""Media in the prefix tree: equal pictures share blocks, different ones never do."""

from __future__ import annotations

from array import array
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from typing import Any

import pytest
from support.fake_model import FakeEngine, contents
from support.scheduling_helpers import OVERLAP, Clock, check_outputs, make, request, rows

from mlx_paged.core import (
    KVManager,
    MediaSpan,
    PrefixQuery,
    Request,
    Scheduler,
    SchedulerConfig,
    StateGroupSpec,
    WindowGroupSpec,
)
from mlx_paged.core.kv.tree import TOKEN_TYPE
from mlx_paged.core.media import (
    FIRST_MEDIA_ID,
    MediaIds,
    MediaIdsExhaustedError,
    PromptMedia,
    TreeTokens,
    outside,
)
from mlx_paged.errors import EngineOverloadedError, InvalidParameterError

P = 1  # the placeholder


def key(name: str) -> bytes:
    return sha256(name.encode()).digest()


def picture(name: str, offset: int, length: int = 6, **options: Any) -> MediaSpan:
    return MediaSpan(offset, length, key(name), options.pop("num_rows", length), **options)


def asked(
    name: str, *media: MediaSpan, before: int = 3, after: tuple[int, ...] = (5, 6), **options: Any
) -> Request:
    """A prompt of some text, pictures and a question."""
    tokens = [4] * before
    spans = []
    for span in media:
        spans.append(replace(span, offset=len(tokens)))
        tokens += [P] * span.length
    return request(name, [*tokens, *after], media=spans, **options)


def run(engine: FakeEngine, *requests: Request) -> None:
    for each in requests:
        engine.scheduler.add(each)
    while engine.scheduler.has_unfinished or engine.running:
        engine.step()
        engine.scheduler.check_integrity()


def cached(each: Request) -> list[int]:
    return [seq.num_cached_tokens for seq in each.sequences]


# Spans and ids.


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"offset": -1}, "media.offset"),
        ({"offset": True}, "media.offset"),
        ({"length": 0}, "media.length"),
        ({"num_rows": 0}, "media.num_rows"),
        ({"num_rows": 7}, "media.num_rows"),
        ({"key": b"short"}, "media.key"),
        ({"key": "x" * 32}, "media.key"),
        ({"is_atomic": 1}, "media.is_atomic"),
    ],
)
def test_a_span_that_cannot_be(fields: dict[str, Any], named: str) -> None:
    good = {"offset": 0, "length": 6, "key": key("cat"), "num_rows": 6}
    with pytest.raises(InvalidParameterError, match=named):
        MediaSpan(**{**good, **fields})


@pytest.mark.parametrize(
    "media",
    [
        [picture("cat", 0), picture("dog", 5)],
        [picture("cat", 6), picture("dog", 0)],
        [picture("cat", 5)],
        ["cat"],
    ],
    ids=["overlap", "order", "beyond the prompt", "no span"],
)
def test_spans_that_are_not_of_a_prompt(media: list[Any]) -> None:
    with pytest.raises(InvalidParameterError, match="media"):
        request("r", [P] * 10, media=media)


def test_items_of_a_range_of_positions() -> None:
    spans = [picture("a", 2, 3), picture("b", 5, 1), picture("c", 8, 4)]
    media = PromptMedia(spans, 20, None)
    for start in range(14):
        for end in range(start + 1, 15):
            expected = [i for i, s in enumerate(spans) if s.offset < end and start < s.end]
            assert list(media.between(start, end)) == expected
        assert media.num_before(start) == sum(span.end <= start for span in spans)


def test_positions_outside_of_atomic_spans() -> None:
    atomic = ((2, 5), (5, 6), (9, 12))
    assert [outside(atomic, p) for p in range(14)] == [0, 1, 2, 2, 2, 5, 6, 7, 8, 9, 9, 9, 12, 13]
    assert outside((), 7) == 7


def test_every_content_has_ids_of_its_own() -> None:
    ids = MediaIds(max_keys=2)
    spans = [picture(name, 1, 4) for name in "abcab"]
    found = [ids.prompt_ids([9] + [P] * 4, [span]) for span in spans]
    assert [next(iter(each)) for each in found] == [9] * 5
    # "a" and "b" had been forgotten when they came again.
    ranges = [set(each[1:]) for each in found]
    assert all(not one & other for i, one in enumerate(ranges) for other in ranges[:i])
    assert all(id_ >= FIRST_MEDIA_ID for each in ranges for id_ in each)
    assert all(b == a + 1 for each in found for a, b in pairwise(each[1:]))
    assert ids.prompt_ids([9] + [P] * 4, [spans[4]]) == found[4] and len(ids) == 2
    # The same key of another length is another content: a digest that lies mixes nothing up.
    assert ids.base(key("b"), 5) not in ranges[4]


def test_ids_end() -> None:
    ids = MediaIds(num_ids=10)
    assert ids.base(key("a"), 10) == FIRST_MEDIA_ID
    with pytest.raises(MediaIdsExhaustedError):
        ids.base(key("b"), 1)
    ids.clear()
    assert ids.base(key("b"), 10) == FIRST_MEDIA_ID
    assert max(MediaIds().prompt_ids([P] * 4, [picture("a", 0, 4)])) < 1 << 32


def test_tokens_of_the_tree_follow_the_live_ones() -> None:
    live = array(TOKEN_TYPE, [4, P, P, 5])
    tokens = TreeTokens(array(TOKEN_TYPE, [4, 70, 71, 5]), live)
    live.append(8)
    live.append(9)
    expected = [4, 70, 71, 5, 8, 9]
    assert list(tokens) == expected and len(tokens) == 6
    assert [tokens[i] for i in range(-6, 6)] == expected * 2
    for start in range(7):
        for end in range(start, 8):
            part = tokens[start:end]
            assert isinstance(part, array) and list(part) == expected[start:end]
    del live[5:]
    assert list(tokens) == expected[:5]
    with pytest.raises(IndexError):
        tokens[5]


# Sharing.


@OVERLAP
def test_equal_pictures_share_blocks_and_different_ones_never_do(overlap: bool) -> None:
    """The previous image's answer: equal-sized pictures, whose tokens are all alike."""
    engine = make(overlap=overlap)
    first = asked("first", picture("cat", 0))
    run(engine, first)
    again, other = asked("again", picture("cat", 0)), asked("other", picture("dog", 0))
    # The last one has the same tokens and no picture at all.
    text = request("text", list(first.prompt_token_ids))
    run(engine, again, other, text)
    check_outputs(engine, first, again, other, text)
    assert (cached(again), cached(other), cached(text)) == ([10], [3], [3])
    assert engine.outputs[again.sequences[0].seq_id] == engine.outputs[first.sequences[0].seq_id]
    answers = {tuple(engine.outputs[r.sequences[0].seq_id]) for r in (first, other, text)}
    assert len(answers) == 3


@OVERLAP
@pytest.mark.parametrize("atomic", [False, True])
def test_many_pictures_of_one_size_in_one_batch(overlap: bool, atomic: bool) -> None:
    """All tokens are equal; half of the pictures are, too. Only equal ones share."""
    engine = make(overlap=overlap, num_blocks=120, max_num_seqs=16)
    requests = [
        asked(f"{i}", picture(f"{i % 4}", 0, 9, is_atomic=atomic), n=1 + i % 2) for i in range(12)
    ]
    run(engine, *requests)
    check_outputs(engine, *requests)
    assert len(engine.device.encoded) == 4
    # All of a prompt but its last token was computed once, and nothing of another picture's.
    assert sum(n for r in requests[:4] for n in cached(r)[:1]) <= 4 * 3
    assert all(n == 13 for r in requests[4:] for n in cached(r))


def test_a_second_question_shares_the_picture_and_the_first_is_found_behind_another() -> None:
    engine = make()
    first = asked("first", picture("cat", 0), after=(5, 6))
    run(engine, first)
    question = asked("question", picture("cat", 0), after=(7, 8, 9))
    both = asked("both", picture("cat", 0), picture("dog", 0))
    turned = asked("turned", picture("dog", 0), picture("cat", 0))
    run(engine, question, both, turned)
    check_outputs(engine, first, question, both, turned)
    assert (cached(question), cached(both), cached(turned)) == ([9], [9], [3])


def test_pictures_and_salts() -> None:
    engine = make()
    first = asked("first", picture("cat", 0), cache_salt="a")
    run(engine, first)
    same, other, none = (
        asked(str(salt), picture("cat", 0), cache_salt=salt) for salt in ("a", "b", None)
    )
    run(engine, same, other, none)
    check_outputs(engine, first, same, other, none)
    assert (cached(same), cached(other), cached(none)) == ([10], [0], [0])
    # Nor do they share features: how fast an answer comes would tell who has sent a picture.
    assert len(engine.device.encoded) == len(set(engine.device.encoded)) == 3


@OVERLAP
def test_a_picture_that_was_forgotten_is_computed_again_and_not_mistaken(overlap: bool) -> None:
    engine = make(overlap=overlap)
    engine.scheduler.kv.media_ids = MediaIds(max_keys=1)
    names = ["cat", "dog", "cat", "cat", "cow", "dog"]
    requests = [asked(f"{i}", picture(name, 0)) for i, name in enumerate(names)]
    for each in requests:
        run(engine, each)
    check_outputs(engine, *requests)
    assert [cached(r)[0] for r in requests] == [0, 3, 3, 10, 3, 3]


@OVERLAP
def test_ids_that_are_all_given_out_begin_anew(overlap: bool) -> None:
    engine = make(overlap=overlap, max_num_seqs=2)
    engine.scheduler.kv.media_ids = MediaIds(num_ids=20)
    requests = [asked(f"{i}", picture(f"{i % 5}", 0)) for i in range(15)]
    for each in requests:
        engine.scheduler.add(each)
        engine.step()
        engine.step()
        engine.step()
        engine.scheduler.check_integrity()
    engine.run()
    check_outputs(engine, *requests)
    assert engine.scheduler.kv.counters.num_resets >= 2
    # If unfinished requests hold all ids, new items are refused.
    for i in range(3):
        engine.scheduler.add(asked(f"new{i}", picture(f"new{i}", 0)))
    with pytest.raises(EngineOverloadedError):
        engine.scheduler.add(asked("late", picture("late", 0)))
    engine.run()


@OVERLAP
def test_who_waits_while_ids_begin_anew_gets_new_ones(overlap: bool) -> None:
    engine = make(overlap=overlap, max_num_seqs=1, policy="priority")
    engine.scheduler.kv.media_ids = MediaIds(num_ids=18)
    run(engine, asked("a", picture("a", 0)), asked("b", picture("b", 0)))
    # "c" takes the last ids, "d" makes all begin anew, and "e" is given those that "c" had.
    requests = [asked(name, picture(name, 0), priority=ord("e") - ord(name)) for name in "cde"]
    for each in requests:
        engine.scheduler.add(each)
    engine.run()
    check_outputs(engine, *requests)
    assert [cached(each) for each in requests] == [[3], [3], [0]]


@OVERLAP
def test_answers_of_one_request_fork_a_prompt_that_ends_with_a_picture(overlap: bool) -> None:
    engine = make(overlap=overlap, encoder_cache_bytes=1)
    for atomic in (False, True):
        name = f"{atomic}"
        each = asked(name, picture(name, 0, 7, is_atomic=atomic), after=(), n=3)
        run(engine, each)
        check_outputs(engine, each)
        assert cached(each) == ([3, 3, 3] if atomic else [0, 9, 9])


# Atomic spans.


@pytest.mark.parametrize("length", [3, 5, 9])
@pytest.mark.parametrize("before", range(5))
def test_an_atomic_picture_is_matched_whole_or_not_at_all(before: int, length: int) -> None:
    engine = make(block_size=4)
    first = asked("first", picture("cat", 0, length, is_atomic=True), before=before)
    run(engine, first)
    again = asked("again", picture("cat", 0, length, is_atomic=True), before=before, after=())
    run(engine, again)
    assert cached(again) == [before]  # (its last token is one of the picture's)
    other = asked("other", picture("cat", 0, length, is_atomic=True), before=before, after=(9, 9))
    run(engine, other)
    assert cached(other) == [before + length]
    check_outputs(engine, first, again, other)
    # And where only its first blocks are left.
    kv, ends = engine.scheduler.kv, set()
    for count in range(kv.usage.num_cached_blocks, -1, -1):
        kv.attention[0].limit_cached(count)
        query = PrefixQuery(first.sequences[0].tree_tokens, atomic=first.prompt_media.atomic)
        ends.add(kv.match(query).num_tokens(kv.block_size))
    assert not ends & set(range(before + 1, before + length)) and min(ends) == 0


@OVERLAP
def test_an_atomic_picture_is_computed_in_one_step(overlap: bool) -> None:
    engine = make(overlap=overlap, max_num_batched_tokens=12, long_prefill_token_threshold=4)
    each = asked("r", picture("cat", 0, 12, is_atomic=True), before=10, after=(5,) * 9)
    run(engine, each)
    check_outputs(engine, each)
    chunks = [n for step in range(len(engine.batches)) for _, n in rows(engine, step) if n > 1]
    assert chunks == [4, 4, 2, 12, 4, 4]


@OVERLAP
def test_an_atomic_picture_does_not_wait_for_decodes_to_end(overlap: bool) -> None:
    """It needs all tokens of a step, and decodes never leave them."""
    engine = make(overlap=overlap, max_num_batched_tokens=12)
    texts = [request(f"{i}", [i, 7, 8], max_tokens=40) for i in range(4)]
    for text in texts:
        engine.scheduler.add(text)
    engine.step()
    engine.step()
    each = asked("r", picture("cat", 0, 12, is_atomic=True), before=1, max_tokens=2)
    engine.scheduler.add(each)
    while not each.is_finished:
        engine.step()
        # (Decodes go on in every step.)
        assert sum(n == 1 for _, n in rows(engine)) >= 4
    assert 16 in [batch.num_tokens for batch in engine.batches]
    engine.run()
    check_outputs(engine, *texts, each)


@OVERLAP
def test_an_atomic_picture_does_not_wait_for_a_request_that_waits_for_it(overlap: bool) -> None:
    """It is larger than the share of background requests, and the other one needs its
    adapter's slot."""
    engine = make(overlap=overlap, max_num_batched_tokens=16, max_loras=1)
    cat = picture("cat", 0, 12, is_atomic=True)
    each = asked("r", cat, before=6, background=True, adapter="x")
    engine.scheduler.add(each)
    engine.step()
    other = request("other", [7, 8, 9], adapter="y")
    engine.scheduler.add(other)
    engine.run()
    check_outputs(engine, each, other)


def test_an_atomic_picture_larger_than_any_step_is_refused() -> None:
    engine = make(max_num_batched_tokens=12)
    with pytest.raises(InvalidParameterError, match="max_num_batched_tokens") as caught:
        engine.scheduler.add(asked("r", picture("cat", 0, 13, is_atomic=True)))
    assert caught.value.actual == 13 and not engine.scheduler.has_unfinished
    run(engine, asked("r", picture("cat", 0, 13)))  # (others are cut)


# Failures, preemption, recovery.


@OVERLAP
@pytest.mark.parametrize("atomic", [False, True])
def test_pictures_under_pressure(overlap: bool, atomic: bool) -> None:
    """Sequences lose their blocks in the middle of pictures, and go on with the right ones."""
    engine = make(
        8, overlap=overlap, max_num_batched_tokens=9, encoder_cache_bytes=8,
        encoder_bytes_per_row=1, max_num_encoder_tokens=4, max_num_seqs=4,
    )  # fmt: skip
    requests = [
        asked(f"{i}", picture(f"{i % 3}", 0, 7, is_atomic=atomic), max_tokens=12, n=1 + i % 2)
        for i in range(8)
    ]
    for each in requests:
        engine.scheduler.add(each)
    for _ in range(30):
        engine.step()
        engine.scheduler.check_integrity()
    run(engine)
    check_outputs(engine, *requests)
    assert engine.scheduler.num_preemptions > 5


def test_a_new_scheduler_names_the_pictures_anew() -> None:
    """After an exception: what the sequences have are ids of a tree that is gone."""
    engine = make()
    requests = [asked(f"{i}", picture(f"{i % 2}", 0), max_tokens=6) for i in range(4)]
    for each in requests:
        engine.scheduler.add(each)
    for _ in range(3):
        engine.step()
    old = engine.scheduler
    answers = {r: list(r.sequences[0].tokens[r.num_prompt_tokens :]) for r in requests}
    again = make()
    again.scheduler.kv.media_ids.base(key("someone else's"), 6)
    assert isinstance(old, Scheduler)
    for each in requests:
        if each.is_finished:
            continue
        for seq in each.sequences:
            seq.status = type(seq.status).WAITING
    again.scheduler.restore([r for r in requests if not r.is_finished])
    new, strange = asked("new", picture("0", 0)), asked("strange", picture("someone else's", 0))
    run(again, new, strange)
    check_outputs(again, new, strange)
    assert cached(new) == [10] and cached(strange)[0] <= 3
    for each in requests:
        tokens = list(each.sequences[0].tokens[each.num_prompt_tokens :])
        fresh = make()
        alone = replace(each, request_id="alone", state=None)
        run(fresh, alone)
        assert tokens == list(alone.sequences[0].tokens[each.num_prompt_tokens :])
        assert tokens[: len(answers[each])] == answers[each]


def test_contents_differ_where_tokens_do_not() -> None:
    """(The oracle itself: what it compares would otherwise be blind.)"""
    cat, dog = asked("a", picture("cat", 0)), asked("b", picture("dog", 0))
    assert cat.prompt_token_ids == dog.prompt_token_ids
    assert contents(cat) != contents(dog)


@OVERLAP
def test_an_atomic_picture_in_a_model_with_windows(overlap: bool) -> None:
    """Its window blocks are taken at once, so a pool that never has as many refuses it."""
    window = WindowGroupSpec(1 + 6, 5, lambda position: max(0, position - 4))
    kv = KVManager(40, 4, windows=[window])
    assert kv.max_atomic_tokens() == (6 - 2 - 1) * 4
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, watermark=0.0)
    engine = FakeEngine(Scheduler(config, kv, clock=Clock()), overlap=overlap)
    with pytest.raises(InvalidParameterError, match=r"12 positions.*sliding windows"):
        engine.scheduler.add(asked("large", picture("cat", 0, 13, is_atomic=True)))
    requests = [
        asked(f"{i}", picture(f"{i % 2}", 0, 12, is_atomic=True), before=i, max_tokens=9)
        for i in range(5)
    ]
    run(engine, *requests)
    check_outputs(engine, *requests)


def test_snapshots_are_not_taken_inside_of_atomic_pictures() -> None:
    """Nobody could continue there; and a chunk that ended there would cut the picture."""
    kv = KVManager(60, 4, states=StateGroupSpec(40))
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, watermark=0.0)
    engine = FakeEngine(Scheduler(config, kv, clock=Clock()))
    requests = [
        asked(f"{i}", picture("cat", 0, 11, is_atomic=True), before=before, after=(5, i), n=1)
        for i, before in enumerate((2, 2, 2, 6, 6))
    ]
    for each in requests:
        run(engine, each)
    check_outputs(engine, *requests)
    snapshots = [node.depth * 4 for node in kv.tree.nodes() if node.entries[1]]
    # Behind two tokens all ends of blocks are in the picture; behind six, one is in front of it.
    assert set(snapshots) == {4}
    assert [cached(each)[0] for each in requests] == [0, 0, 0, 0, 4]
