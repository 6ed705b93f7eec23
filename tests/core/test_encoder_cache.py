"""The book of features: what a step may encode, what is kept, and what goes."""

from __future__ import annotations

import os
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from support.fake_model import FakeEngine
from support.scheduling_helpers import OVERLAP, check_outputs, make, request, rows

from mlx_paged.core import (
    MediaSpan,
    PromptMedia,
    Request,
    SchedulerConfig,
    StopPolicy,
    WindowGroupSpec,
)
from mlx_paged.core.encoder_cache import EncoderCache
from mlx_paged.errors import IntegrityError, InvalidParameterError

# Requests of `test_budgets_hold_over_many_requests`; 2000 of 500 pictures take a minute.
NUM_REQUESTS = int(os.environ.get("MLX_PAGED_MEDIA_REQUESTS", "60"))


def key(name: str) -> bytes:
    return sha256(name.encode()).digest()


def media(*items: tuple[str, int]) -> PromptMedia:
    """Items of (name, rows), one behind another."""
    spans, offset = [], 0
    for name, num_rows in items:
        spans.append(MediaSpan(offset, num_rows, key(name), num_rows))
        offset += num_rows
    return PromptMedia(spans, offset, None)


class Book:
    """A cache with steps that are built, launched and committed."""

    def __init__(self, capacity: int = 10, max_rows: int = 8) -> None:
        self.cache = EncoderCache(capacity, max_rows)
        self.step = self.committed = 0
        self.pins: list[Any] = []

    def build(self, *chunks: PromptMedia, whole: bool = False) -> tuple[list[int], list[bytes]]:
        """A step of these chunks; returns how many items of each it takes, and what it encodes."""
        self.step += 1
        counts = []
        for chunk in chunks:
            items = range(len(chunk.spans))
            self.cache.begin(self.step, self.committed)
            count = self.cache.num_affordable(chunk, items, whole=whole)
            if count:
                self.cache.use(chunk, items[:count], None)
            counts.append(count)
            self.cache.check_integrity(self.pins)
        found = self.cache.end()
        self.gone = [name for name in "abcdefgh" if key(name) in found.evicted]
        return counts, [name for name in "abcdefgh" if key(name) in found.encoded]

    def commit(self) -> None:
        self.committed = self.step


def test_a_step_encodes_within_its_budget() -> None:
    book = Book(capacity=100)
    assert book.build(media(("a", 4), ("b", 4), ("c", 1)), media(("d", 1))) == ([2, 0], ["a", "b"])
    # Items that are cached, or encoded in this very step, cost nothing.
    book.commit()
    assert book.build(media(("a", 4), ("c", 8)), media(("c", 8), ("b", 4))) == ([2, 2], ["c"])
    stats = book.cache.stats
    assert (stats.num_queries, stats.num_hits) == (6, 3)
    assert (stats.num_encoded_items, stats.num_encoded_rows) == (3, 16)


def test_an_item_larger_than_a_step_is_encoded_alone() -> None:
    book = Book(capacity=100)
    assert book.build(media(("a", 1), ("b", 9))) == ([1], ["a"])
    assert book.build(media(("b", 9), ("c", 1)), media(("d", 1))) == ([1, 0], ["b"])


def test_an_item_twice_in_a_chunk_is_encoded_once() -> None:
    book = Book()
    assert book.build(media(("a", 5), ("a", 5), ("b", 3))) == ([3], ["a", "b"])


def test_the_least_recently_used_go_first() -> None:
    book = Book(capacity=6)
    for names in ("ab", "c", "a", "d"):
        book.build(media(*((name, 2) for name in names)))
        book.commit()
    assert book.gone == ["b"]
    assert book.build(media(("e", 4))) == ([1], ["e"])
    assert book.gone == ["a", "c"] and book.cache.stats.num_evictions == 3
    assert book.cache.num_bytes == book.cache.stats.max_bytes == 6


def test_what_a_step_in_flight_uses_stays() -> None:
    book = Book(capacity=4)
    book.build(media(("a", 4)))
    assert book.build(media(("b", 4))) == ([0], [])
    book.commit()
    assert book.build(media(("b", 4))) == ([1], ["b"]) and book.gone == ["a"]


def test_idle_features_go_and_those_in_use_stay() -> None:
    book = Book(capacity=100)
    book.build(media(("a", 4)))
    book.commit()
    book.build(media(("b", 4)))
    assert book.cache.evict_idle(book.committed) == [key("a")]
    book.cache.check_integrity([])
    book.commit()
    book.build(media(("c", 4)))
    assert book.gone == ["a"]
    book.commit()
    book.pins.append(book.cache.pin(key("c")))
    assert book.cache.evict_idle(book.committed) == [key("b")]
    book.cache.check_integrity(book.pins)
    assert book.cache.num_bytes == 4 and book.cache.stats.num_evictions == 2
    assert book.build(media(("b", 4))) == ([1], ["b"]) and book.gone == ["b"]


def test_what_is_released_after_a_step_that_became_none_is_not_in_use_by_it() -> None:
    book = Book(capacity=2)
    assert book.build(media(("a", 2))) == ([1], ["a"])
    pin = book.cache.pin(key("a"))
    book.commit()
    book.cache.begin(book.step + 1, book.committed)
    book.cache.cancel(book.step)
    book.cache.unpin(pin)
    assert book.build(media(("b", 2))) == ([1], ["b"])


def test_what_a_sequence_is_in_the_middle_of_stays() -> None:
    book = Book(capacity=4)
    book.build(media(("a", 4)))
    pins = [book.cache.pin(key("a")), book.cache.pin(key("a"))]
    book.pins = pins.copy()
    book.commit()
    assert book.build(media(("b", 1))) == ([0], [])
    book.cache.unpin(book.pins.pop())
    assert book.build(media(("b", 1))) == ([0], [])
    book.cache.unpin(book.pins.pop())
    book.commit()
    assert book.build(media(("b", 1))) == ([1], ["b"]) and book.gone == ["a"]


def test_an_item_larger_than_the_cache_is_held_alone() -> None:
    book = Book(capacity=4)
    book.build(media(("a", 2)))
    book.commit()
    assert book.build(media(("b", 6), ("c", 1))) == ([1], ["b"]) and book.gone == ["a"]
    assert book.cache.num_bytes == 6
    book.commit()
    assert book.build(media(("c", 1))) == ([1], ["c"]) and book.gone == ["b"]


def test_what_comes_later_in_a_chunk_does_not_keep_an_item_out() -> None:
    """(Both do not fit; were the second one protected, the sequence would wait for itself.)"""
    book = Book(capacity=4)
    book.build(media(("b", 3)))
    book.commit()
    assert book.build(media(("a", 3), ("b", 3))) == ([1], ["a"]) and book.gone == ["b"]


def test_a_prompt_that_is_not_cut_has_all_its_items() -> None:
    book = Book(capacity=4, max_rows=3)
    many = media(("a", 2), ("b", 3), ("c", 2))
    assert book.build(many, whole=True) == ([3], ["a", "b", "c"])
    assert book.cache.num_bytes == 7
    book.commit()
    book.build(media(("d", 1)))
    assert book.cache.num_bytes <= 4, "what was too much is gone with the next step"


def test_sizes_are_corrected() -> None:
    book = Book(capacity=10)
    book.build(media(("a", 2)), media(("b", 2)))
    book.cache.resize(key("a"), 7)
    book.cache.resize(key("gone"), 7)
    book.cache.check_integrity([])
    assert book.cache.num_bytes == 9
    # From here on every row counts as much as the largest one that was made.
    book.commit()
    book.build(media(("c", 2)))
    assert book.gone == ["a"] and book.cache.num_bytes == 2 + 8


def test_a_pin_of_what_was_cleared_does_no_harm() -> None:
    book = Book()
    book.build(media(("a", 2)))
    old = book.cache.pin(key("a"))
    book.cache.clear()
    book.cache.check_integrity([old])
    assert book.build(media(("a", 2))) == ([1], ["a"])
    book.cache.unpin(old)
    book.cache.check_integrity([])


def test_the_check_finds_damage() -> None:
    book = Book()
    book.build(media(("a", 2)))
    book.cache.num_bytes += 1
    with pytest.raises(IntegrityError, match="bytes"):
        book.cache.check_integrity([])
    book.cache.num_bytes -= 1
    pinned = book.cache.pin(key("a"))
    with pytest.raises(IntegrityError, match="pins"):
        book.cache.check_integrity([])
    book.cache.check_integrity([pinned])


@pytest.mark.parametrize(
    "name", ["max_num_encoder_tokens", "encoder_cache_bytes", "encoder_bytes_per_row"]
)
def test_limits_are_checked(name: str) -> None:
    with pytest.raises(InvalidParameterError, match=name):
        SchedulerConfig(**{name: 0})  # type: ignore[arg-type]


# In the scheduler.

P = 1


def asked(name: str, *pictures: tuple[str, int], before: int = 3, **options: Any) -> Request:
    tokens, spans = [4] * before, []
    for picture, num_rows in pictures:
        spans.append(MediaSpan(len(tokens), num_rows, key(picture), num_rows))
        tokens += [P] * num_rows
    return request(name, [*tokens, 5, 6], media=spans, **options)


def encoded(engine: FakeEngine, step: int = -1) -> int:
    """Items that a step encodes."""
    media = engine.batches[step].media
    return 0 if media is None else len(media.encoded)


@OVERLAP
def test_a_chunk_stops_before_the_first_item_that_is_too_much(overlap: bool) -> None:
    engine = make(overlap=overlap, max_num_encoder_tokens=8)
    many = asked("many", ("a", 5), ("b", 3), ("c", 4), ("d", 8), ("e", 9))
    text = request("text", [7] * 9)
    for each in (many, text):
        engine.scheduler.add(each)
    engine.run()
    check_outputs(engine, many, text)
    # (a and b, c, d, e, which is larger than the budget, and the rest)
    chunks = [n for i in range(len(engine.batches)) for name, n in rows(engine, i) if n > 1]
    assert chunks == [3 + 5 + 3, 9, 4, 8, 9 + 2]
    assert [encoded(engine, i) for i in range(4)] == [2, 1, 1, 1]


@OVERLAP
def test_decodes_and_texts_go_on_while_pictures_wait_for_the_tower(overlap: bool) -> None:
    engine = make(overlap=overlap, max_num_encoder_tokens=6, max_num_seqs=16)
    talking = request("talking", [7, 7, 8], max_tokens=30)
    engine.scheduler.add(talking)
    engine.step()
    engine.step()
    pictures = [asked(f"{i}", (f"{i}", 6), max_tokens=2) for i in range(8)]
    text = request("text", [9, 8, 7], max_tokens=2)
    for each in (*pictures, text):
        engine.scheduler.add(each)
    begin = len(engine.batches)
    engine.step()
    assert ("text", 3) in rows(engine), "a text waits for pictures"
    while not all(each.is_finished for each in pictures):
        engine.step()
        assert ("talking", 1) in rows(engine)
        assert encoded(engine) <= 1
    assert [encoded(engine, begin + i) for i in range(8)] == [1] * 8
    engine.run()
    check_outputs(engine, talking, text, *pictures)


@OVERLAP
def test_a_step_that_decodes_encodes_few_items(overlap: bool) -> None:
    engine = make(overlap=overlap, max_encoder_items_with_decodes=2, max_num_seqs=16)
    talking = request("talking", [7, 7, 8], max_tokens=12)
    many = asked("many", *((f"{i}", 2) for i in range(7)), max_tokens=1)
    alone = asked("alone", *((f"a{i}", 2) for i in range(7)), max_tokens=1)
    engine.scheduler.add(talking)
    engine.step()
    engine.step()
    begin = len(engine.batches)
    engine.scheduler.add(many)
    while not many.is_finished:
        engine.step()
    assert [encoded(engine, begin + i) for i in range(4)] == [2, 2, 2, 1]
    assert all(("talking", 1) in rows(engine, begin + i) for i in range(4))
    engine.run()
    begin = len(engine.batches)
    engine.scheduler.add(alone)  # nobody waits for a token
    engine.run()
    assert encoded(engine, begin) == 7
    check_outputs(engine, talking, many, alone)


@OVERLAP
def test_the_copy_of_a_sequence_that_waits_for_the_tower_is_made_with_its_first_chunk(
    overlap: bool,
) -> None:
    """Its prompt is shared up to the picture, in the middle of a block."""
    engine = make(overlap=overlap, max_num_encoder_tokens=4)
    first = request("first", [4] * 6, max_tokens=1)
    engine.scheduler.add(first)
    engine.run()
    pictures = [asked(f"{i}", (f"{i}", 4), before=6) for i in range(3)]
    for each in pictures:
        engine.scheduler.add(each)
    for _ in range(3):
        engine.step()
        engine.scheduler.check_integrity()
        [copies] = engine.batches[-1].block_copies
        assert len(copies) == 1
    engine.run()
    check_outputs(engine, first, *pictures)
    assert all(each.sequences[0].num_cached_tokens == 6 for each in pictures)


def test_a_request_that_ends_within_a_picture_keeps_out_no_other() -> None:
    """Its second chunk found no block of its window, and its picture fills the cache."""
    windows = [
        WindowGroupSpec(2, 1, lambda position: position),
        WindowGroupSpec(9, 8, lambda position: max(0, position - 7)),
    ]
    engine = make(4, 1, overlap=True, windows=windows, max_num_seqs=1, encoder_cache_bytes=1)
    long, short = MediaSpan(0, 3, key("a"), 2), MediaSpan(0, 1, key("b"), 1)
    engine.scheduler.add(Request("ended", [P] * 3, StopPolicy(max_tokens=1), media=[long]))
    engine.step()
    engine.step()
    assert engine.scheduler.abort("ended")
    other = Request("other", [P, 0], StopPolicy(max_tokens=1), media=[short])
    engine.scheduler.add(other)
    engine.run()
    assert len(engine.outputs[other.sequences[0].seq_id]) == 1


@OVERLAP
def test_a_running_sequence_writes_on_in_a_block_that_another_will_copy(overlap: bool) -> None:
    """The copy waits with an item that is too much for the share of a background request."""
    engine = make(6, overlap=overlap, max_num_batched_tokens=8, long_prefill_token_threshold=0)
    engine.scheduler.max_parked_tokens = 1
    picture = MediaSpan(5, 2, key("a"), 2, is_atomic=True)
    prompt = [2, 0, 1, 2, 2]
    talking = request("talking", prompt, max_tokens=6)
    behind = Request(
        "behind", [*prompt, P, P], StopPolicy(max_tokens=1), media=[picture], background=True
    )
    engine.scheduler.add(behind)
    engine.scheduler.add(talking)
    while engine.scheduler.has_unfinished:
        engine.step()
        engine.scheduler.check_integrity()
    engine.run()
    check_outputs(engine, talking, behind)


@OVERLAP
def test_a_full_prefix_hit_runs_no_tower(overlap: bool) -> None:
    engine = make(overlap=overlap, encoder_cache_bytes=1)
    for i in range(3):
        each = asked(f"{i}", ("a", 9), ("b", 4))
        engine.scheduler.add(each)
        engine.run()
        check_outputs(engine, each)
    stats = engine.scheduler.encoder_cache.stats
    assert (stats.num_encoded_items, stats.num_queries, stats.num_prefix_hits) == (2, 2, 4)


@OVERLAP
def test_a_prompt_that_ends_with_a_picture_of_one_row(overlap: bool) -> None:
    """Its last token alone may be left to a step, which is then not a decode."""
    engine = make(overlap=overlap, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    spans = [MediaSpan(4, 1, key("a"), 1), MediaSpan(8, 1, key("b"), 1)]
    each = request("r", [4] * 4 + [P] + [5] * 3 + [P], media=spans)
    engine.scheduler.add(each)
    engine.run()
    check_outputs(engine, each)
    assert len(engine.device.encoded) == 2


@OVERLAP
def test_prompts_that_are_not_cut_have_all_their_pictures(overlap: bool) -> None:
    engine = make(
        overlap=overlap, enable_chunked_prefill=False, max_num_batched_tokens=40, max_model_len=40,
        max_num_encoder_tokens=4, encoder_cache_bytes=6, encoder_bytes_per_row=1,
    )  # fmt: skip
    requests = [asked(f"{i}", *((f"{i}{j}", 4) for j in range(4))) for i in range(4)]
    for each in requests:
        engine.scheduler.add(each)
    engine.run()
    check_outputs(engine, *requests)
    assert [encoded(engine, i) for i in range(4)] == [4] * 4


@OVERLAP
def test_prompts_that_are_not_cut_wait_for_the_tower_before_they_are_admitted(
    overlap: bool,
) -> None:
    """Later there may be more decodes, which would leave too few tokens for a whole prompt."""
    engine = make(
        overlap=overlap, enable_chunked_prefill=False, max_num_batched_tokens=40, max_model_len=40,
        max_num_encoder_tokens=1,
    )  # fmt: skip
    texts = [request(f"t{i}", [i, 7], max_tokens=30) for i in range(4)]
    for each in texts:
        engine.scheduler.add(each)
    engine.step()
    engine.step()
    short = request("a", [P], media=[MediaSpan(0, 1, key("a"), 1)], max_tokens=30)
    long = [
        request(name, [ord(name)] * 31 + [P] * 4, media=[MediaSpan(31, 4, key(name), 4)])
        for name in "bc"
    ]
    for each in (short, *long):
        engine.scheduler.add(each)
    engine.run()
    check_outputs(engine, *texts, short, *long)
    chunks = [n for i in range(len(engine.batches)) for name, n in rows(engine, i) if name in "bc"]
    assert [n for n in chunks if n > 1] == [35, 35]


@OVERLAP
def test_budgets_hold_over_many_requests(overlap: bool) -> None:
    """`MLX_PAGED_MEDIA_REQUESTS=2000` takes a quarter as many pictures."""
    capacity, max_rows = 64, 24
    engine = make(
        200, overlap=overlap, max_num_batched_tokens=48, encoder_cache_bytes=capacity,
        encoder_bytes_per_row=1, max_num_encoder_tokens=max_rows,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    num_rows = rng.integers(1, 21, NUM_REQUESTS // 4).tolist()
    requests, queried = [], 0
    for i in range(NUM_REQUESTS):
        chosen = rng.integers(0, len(num_rows), rng.integers(1, 4)).tolist()
        each = asked(f"{i}", *((f"{n}", num_rows[n]) for n in chosen), before=i % 3, max_tokens=2)
        engine.scheduler.add(each)
        requests.append(replace(each, request_id="checked"))
        queried += len(chosen)
        for _ in range(rng.integers(0, 4)):
            engine.step()
            assert engine.scheduler.encoder_cache.num_bytes <= capacity
            media = engine.batches[-1].media
            if media is not None:
                engine.scheduler.check_integrity()
                made = {s.key: s.num_rows for b in engine.batches[-1].sequences
                        for s in b.sequence.request.media}  # fmt: skip
                assert sum(made[k] for k in media.encoded) <= max_rows
        if i == 0:
            first = each
    engine.run()
    assert first.is_finished
    stats = engine.scheduler.encoder_cache.stats
    assert stats.max_bytes <= capacity
    # Counts are exact: each item was needed, or came from the prefix cache.
    assert stats.num_queries + stats.num_prefix_hits == queried
    assert stats.num_queries - stats.num_hits == stats.num_encoded_items
    assert stats.num_encoded_items == len(engine.device.encoded)
    assert stats.num_encoded_items - stats.num_evictions == stats.num_items
    assert stats.num_items == len(engine.device.features)
