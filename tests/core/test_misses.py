"""Why a prompt was not in the prefix cache."""

from __future__ import annotations

from array import array
from typing import Any

from support.fake_model import FakeEngine

from mlx_paged.core import KVManager, MissReason, PromptHistory, Request, Scheduler, SchedulerConfig

A, B = list(range(40)), list(range(100, 140))


def note(history: PromptHistory, tokens: list[int], cached: int = 0, **options: Any) -> Any:
    options = {"salt": None, "adapter": None, **options}
    return history.note(array("I", tokens), num_cached=cached, block_size=8, **options)


def test_every_reason() -> None:
    history = PromptHistory()
    assert note(history, A).reason is MissReason.NEVER_SEEN
    assert note(history, A, cached=32) is None  # all full blocks before the last token
    assert note(history, A[:8], cached=0) is None  # less than a block could be cached
    miss = note(history, [*A[:30], *B], cached=24)
    assert (miss.reason, miss.num_shared_tokens) == (MissReason.NEVER_SEEN, 30)
    assert miss.given == tuple(B[:8]) and miss.earlier == tuple(A[30:38])
    miss = note(history, [*A[:30], *B], cached=16)
    assert (miss.reason, miss.num_shared_tokens) == (MissReason.EVICTED, 70)
    assert note(history, A, salt="a").reason is MissReason.SALT
    assert note(history, A, adapter="lora").reason is MissReason.ADAPTER
    # A match under the same salt explains more.
    assert note(history, A, salt="a").reason is MissReason.EVICTED
    history.has_other_formats = True
    assert note(history, [7] * 40).reason is MissReason.FORMAT
    assert note(history, [*A[:20], 999, *B], cached=16).reason is MissReason.NEVER_SEEN
    assert history.counts == {
        MissReason.NEVER_SEEN: 3, MissReason.EVICTED: 2, MissReason.SALT: 1,
        MissReason.ADAPTER: 1, MissReason.FORMAT: 1,
    }  # fmt: skip


def test_another_picture_in_the_same_place() -> None:
    history, cat, dog = PromptHistory(), [1 << 31] * 20, [(1 << 31) + 100] * 20
    note(history, [*A, *cat, *B])
    miss = note(history, [*A, *dog, *B], cached=40)
    assert (miss.reason, miss.num_shared_tokens) == (MissReason.MEDIA, 40)
    # A text in place of the picture.
    assert note(history, [*A, *B, *A], cached=40).reason is MissReason.MEDIA


def test_what_a_client_is_told_has_no_other_prompts() -> None:
    history = PromptHistory()
    note(history, [*A, *B])
    miss = note(history, [*A, *A], cached=40)
    assert str(miss) == (
        "never_seen: shares the first 40 of 80 tokens with an earlier prompt; differs at 40: "
        "[0, 1, 2, 3, 4, 5, 6, 7] instead of [100, 101, 102, 103, 104, 105, 106, 107]; "
        "40 came from the cache"
    )
    assert "100" not in str(miss.for_client()) and miss.for_client().num_shared_tokens == 40
    other = note(history, [*A, *B], salt="mine").for_client()
    assert (other.reason, other.num_shared_tokens) == (MissReason.NEVER_SEEN, 0)
    assert str(other) == "never_seen: 80 tokens, unlike any prompt before"


def test_a_client_is_told_nothing_about_other_machines() -> None:
    prompt = array("I", A)
    miss = PromptHistory().note(
        prompt, None, None, num_cached=8, transfer_failure="10.0.0.7 is gone", block_size=8
    )
    assert miss is not None and miss.reason is MissReason.TRANSFER
    assert str(miss) == "transfer: 10.0.0.7 is gone; 8 came from the cache"
    assert str(miss.for_client()) == (
        "transfer: another server was to compute it; 8 came from the cache"
    )


def test_answers_count_and_the_oldest_is_forgotten() -> None:
    history, tokens = PromptHistory(), array("I", A)
    history.note(tokens, None, None, num_cached=0, block_size=8)
    tokens.extend(B)  # the answer
    assert note(history, [*A, *B, 1, 2], cached=16).num_shared_tokens == 80
    for i in range(200):
        note(history, [1000 + i] * 20)
    assert note(history, [*A, *B, 1, 2]).reason is MissReason.NEVER_SEEN
    assert len(history._seen) == 64


def test_the_scheduler_asks_once_for_a_request() -> None:
    history = PromptHistory()
    kv = KVManager(12, 4)
    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4), kv, history=history
    )
    engine = FakeEngine(scheduler)
    requests = [
        Request(str(i), tokens, n=n) for i, (tokens, n) in enumerate(((A[:20], 3), (A[:20], 1)))
    ]
    for request in requests:
        scheduler.add(request)
        engine.run()
    assert requests[0].cache_miss is not None and requests[1].cache_miss is None
    assert history.counts == {MissReason.NEVER_SEEN: 1}
