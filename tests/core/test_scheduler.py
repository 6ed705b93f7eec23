"""Scheduler: order, budgets, sharing, pressure, ends; on a device that checks every batch."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_model import FakeEngine, generate, next_token
from support.scheduling_helpers import OVERLAP, Clock, check_outputs, make, request, rows
from support.step_rows import IN_FLIGHT_TOKEN

from mlx_paged.core import (
    ElasticKVManager,
    FinishReason,
    ForkingKVManager,
    KVManager,
    Scheduler,
    SchedulerConfig,
    SequenceStatus,
    StateGroupSpec,
    StopPolicy,
    WindowGroupSpec,
)
from mlx_paged.errors import (
    DuplicateRequestError,
    EngineOverloadedError,
    InvalidParameterError,
    RequestTooLargeError,
)

# The shape of steps.


@OVERLAP
def test_one_request_is_a_prefill_and_then_decodes(overlap):
    engine = make(overlap=overlap)
    r = request("a", [1, 2, 3, 4, 5])
    engine.scheduler.add(r)
    engine.run()
    assert [rows(engine, i) for i in range(len(engine.batches))] == [[("a", 5)]] + 3 * [[("a", 1)]]
    assert [b.step for b in engine.batches] == [1, 2, 3, 4]
    awaited = [b.sequences[0].token_ids == (IN_FLIGHT_TOKEN,) for b in engine.batches]
    assert awaited == [False, overlap, overlap, overlap]
    assert all(b.sequences[0].samples for b in engine.batches)
    check_outputs(engine, r)


def test_a_prompt_over_the_budget_goes_in_chunks_and_only_the_last_one_samples():
    engine = make(max_num_batched_tokens=8, long_prefill_token_threshold=0)
    engine.scheduler.add(request("a", list(range(20)), 1))
    engine.run()
    assert [(b.sequences[0].start, b.sequences[0].num_tokens) for b in engine.batches] == [
        (0, 8),
        (8, 8),
        (16, 4),
    ]
    assert [b.sequences[0].samples for b in engine.batches] == [False, False, True]


@OVERLAP
def test_a_step_ends_at_each_stop_of_a_request(overlap):
    engine = make(overlap=overlap)
    r = request("a", list(range(20)), 2, boundaries=[6, 13])
    engine.scheduler.add(r)
    engine.run()
    steps = [(b.sequences[0].start, b.sequences[0].num_tokens) for b in engine.batches]
    assert steps == [(0, 6), (6, 7), (13, 7), (20, 1)]
    check_outputs(engine, r)


@OVERLAP
def test_cached_tokens_are_looked_up_from_stop_to_stop(overlap):
    engine = make(overlap=overlap)
    first = request("a", list(range(40)), 1)
    engine.scheduler.add(first)
    engine.run()
    r = request("b", [*range(38), 50, 51], 2, boundaries=[8, 14, 30])
    [seq] = engine.scheduler.add(r)
    reached = []
    while engine.scheduler.has_unfinished or engine.running:
        engine.step()
        reached.append(seq.num_scheduled_tokens)
    # 14 and 30 are in the middle of blocks, whose rest is computed.
    assert reached[:4] == [8, 14, 30, 40]
    computed = [(b.sequences[0].start, b.sequences[0].num_tokens) for b in engine.batches]
    assert [c for c in computed if c[1] > 1][1:] == [(12, 2), (28, 2), (36, 4)]
    check_outputs(engine, first, r)


def test_prompts_have_their_own_budget_and_places():
    engine = make(max_num_prompt_tokens=6, max_num_prefills=1, long_prefill_token_threshold=0)
    for name in "abc":
        engine.scheduler.add(request(name, [ord(name), *range(9)], 9))
    for _ in range(6):
        engine.step()
    steps = [rows(engine, i) for i in range(6)]
    assert steps[:4] == [
        [("a", 6)],
        [("a", 4)],
        [("a", 1), ("b", 6)],
        [("a", 1), ("b", 4)],
    ]
    assert steps[4] == [("a", 1), ("b", 1), ("c", 6)]
    engine.run()
    for name in ("max_num_prompt_tokens", "max_num_prefills"):
        with pytest.raises(InvalidParameterError, match=name):
            SchedulerConfig(**{name: 0})


@pytest.mark.parametrize("states", [None, StateGroupSpec(30)], ids=["blocks", "states"])
@pytest.mark.parametrize("length", [5, 8])
def test_a_request_continues_from_the_blocks_of_a_parent(states, length):
    kv = ForkingKVManager(65, 4, states=states, enable_prefix_caching=False)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, watermark=0)
    engine = FakeEngine(Scheduler(config, kv))
    first = request("a", list(range(length)), 3)
    [seq] = engine.scheduler.add(first)
    while seq.num_computed_tokens < length:
        engine.step()
    parent = kv.fork(seq.tables, seq.tokens[:length])
    engine.run()
    computed = engine.device.num_tokens_computed
    more = [*range(length), 40, 41]
    both = [
        request(name, more, 3, parent=parent, num_parent_tokens=length, read_prefix_cache=False)
        for name in "bc"
    ]
    for r in both:
        engine.scheduler.add(r)
    engine.run()
    assert engine.device.num_tokens_computed - computed == 2 * (2 + 2)
    kv.free(parent)
    check_outputs(engine, first, *both)


def test_no_sequence_waits_for_one_of_another_scheduler():
    class Pools:
        def wait(self) -> None:
            pass

        def resize(self, number: int, num_blocks: int, copies: Any) -> None:
            pass

        def drop_state(self, slot: int) -> None:
            pass

    kv = ElasticKVManager(Pools(), 4)
    for _ in range(2):
        scheduler = Scheduler(SchedulerConfig(), kv)
        scheduler.add(request("a", list(range(40))))  # the same id
        assert scheduler.schedule() is not None
        assert not scheduler.num_waiting


def test_decodes_come_first_and_chunks_fill_the_rest():
    engine = make(max_num_batched_tokens=8, long_prefill_token_threshold=0)
    engine.scheduler.add(request("a", [1, 2, 3]))
    engine.step()
    engine.scheduler.add(request("b", list(range(10, 30))))
    engine.step()
    assert rows(engine) == [("a", 1), ("b", 7)]


def test_requests_are_served_in_order_of_arrival_up_to_max_num_seqs():
    engine = make(max_num_seqs=2)
    requests = [request(name, [i, i, i]) for i, name in enumerate("abcd")]
    for r in requests:
        engine.scheduler.add(r)
    engine.step()
    assert rows(engine) == [("a", 3), ("b", 3)]
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (2, 2)
    engine.run()
    check_outputs(engine, *requests)


def test_a_long_prompt_leaves_short_ones_their_share():
    engine = make(max_num_batched_tokens=16, long_prefill_token_threshold=12)
    engine.scheduler.add(request("long", list(range(100))))
    engine.step()
    assert rows(engine) == [("long", 12)]  # its chunks are bounded
    engine.scheduler.add(request("short", [1, 2, 3, 4, 5, 6]))
    engine.step()
    assert rows(engine) == [("long", 10), ("short", 6)]
    engine.step()
    assert rows(engine) == [("short", 1), ("long", 12)]


def test_a_long_prompt_gets_whole_steps_while_it_is_alone():
    engine = make(max_num_batched_tokens=16)
    engine.scheduler.add(request("long", list(range(100, 150))))
    engine.step()
    engine.step()
    assert [rows(engine, i) for i in (0, 1)] == [[("long", 16)]] * 2
    engine.scheduler.add(request("next", list(range(200, 230))))
    engine.step()
    assert rows(engine) == [("long", 8), ("next", 8)]
    own = make(max_num_batched_tokens=16, long_prefill_token_threshold=8)
    own.scheduler.add(request("long", list(range(100, 150))))
    own.step()
    assert rows(own) == [("long", 8)]
    for e in (engine, own):
        e.run()


def test_a_prompt_beside_decodes_alone_gets_small_chunks():
    """Larger ones would only delay the decodes; where other prompts wait, they pass sooner."""
    engine = make(num_blocks=8000, max_num_batched_tokens=8192)
    engine.scheduler.add(request("answer", [1, 2, 3], 5))
    engine.step()
    engine.scheduler.add(request("long", list(range(5000)), 1))
    engine.step()
    engine.step()
    assert rows(engine) == [("answer", 1), ("long", 1376)]
    engine.scheduler.add(request("longer", list(range(6000, 11500)), 1))
    engine.step()
    assert rows(engine) == [("answer", 1), ("long", 2248), ("longer", 4096)]
    own = make(num_blocks=8000, max_num_batched_tokens=8192, long_prefill_token_threshold=2048)
    own.scheduler.add(request("answer", [1, 2, 3], 5))
    own.step()
    own.scheduler.add(request("long", list(range(5000)), 1))
    own.step()
    assert rows(own) == [("answer", 1), ("long", 2048)]
    for e in (engine, own):
        e.run()


def test_short_prompts_beyond_half_of_a_step_leave_the_rest_to_a_long_one():
    engine = make(max_num_batched_tokens=16, long_prefill_token_threshold=12)
    for name, length in [("a", 7), ("b", 7), ("long", 100)]:
        engine.scheduler.add(request(name, [ord(name[0])] * length))
    engine.step()
    assert rows(engine) == [("a", 7), ("b", 7), ("long", 2)]
    engine.run()


def test_a_long_prompt_that_would_get_no_tokens_takes_no_place():
    engine = make(max_num_batched_tokens=16, max_num_seqs=2, long_prefill_token_threshold=12)
    engine.scheduler.add(request("long", list(range(100))))
    engine.step()
    engine.scheduler.add(request("next", list(range(200, 300))))
    engine.scheduler.add(request("short", [1, 2, 3, 4]))
    engine.step()
    assert rows(engine) == [("long", 12), ("short", 4)]
    engine.run()


def test_long_prompts_cannot_starve_short_ones_nor_the_reverse():
    engine = make(num_blocks=400, max_num_batched_tokens=16, long_prefill_token_threshold=8)
    for i in range(4):
        engine.scheduler.add(request(f"long{i}", [i] * 200, 1))
    engine.step()
    for i in range(4):
        engine.scheduler.add(request(f"short{i}", [10 + i] * 8, 1))
    for _ in range(4):
        engine.step()
        assert any(name.startswith("short") for name, _ in rows(engine))
        assert any(name.startswith("long") for name, _ in rows(engine))
    engine.run()


def test_the_schedule_depends_on_nothing_but_the_requests():
    def batches() -> list[Any]:
        engine = make(num_blocks=9, max_num_batched_tokens=12, overlap=True)
        for i in range(12):
            engine.scheduler.add(request(f"r{i}", [1, 2, 3, 4, i % 3], 6, n=1 + i % 2))
        engine.run()
        return [[s[1:] for s in output.sequences] for output in engine.batches]

    assert batches() == batches()


# Sharing.


@OVERLAP
def test_a_shared_system_prompt_is_computed_once(overlap):
    system = list(range(100, 132))
    engine = make(overlap=overlap, max_num_batched_tokens=64)
    requests = [request(f"r{i}", [*system, i], 3) for i in range(4)]
    for r in requests:
        engine.scheduler.add(r)
    engine.run()
    check_outputs(engine, *requests)
    # Prompts: 32 + 4 x 1; answers: two computed tokens each.
    assert engine.device.num_tokens_computed == 32 + 4 + 4 * 2
    assert engine.scheduler.kv.counters.num_cached_tokens == 3 * 32
    assert [r.sequences[0].num_cached_tokens for r in requests] == [0, 32, 32, 32]


def test_who_waits_for_a_block_does_not_hold_up_others():
    engine = make(max_num_batched_tokens=16, long_prefill_token_threshold=8)
    for name, prompt in [("a", list(range(32))), ("b", list(range(32))), ("c", [90, 91])]:
        engine.scheduler.add(request(name, prompt))
    engine.step()
    assert rows(engine) == [("a", 8), ("c", 2)]
    engine.run()


def test_nobody_waits_for_a_block_of_a_lower_class():
    def second_step(first: int, second: int) -> list[tuple[str, int]]:
        engine = make(policy="priority", max_num_batched_tokens=32, long_prefill_token_threshold=8)
        engine.scheduler.add(request("first", list(range(40)), priority=first))
        engine.step()
        engine.scheduler.add(request("second", list(range(40)), priority=second))
        engine.step()
        computed = rows(engine)
        engine.run()
        return computed

    assert second_step(0, 5) == second_step(5, 5) == [("first", 8)]
    assert second_step(5, 0) == [("first", 8), ("second", 8)]


def test_an_aborted_request_leaves_its_blocks_for_the_retry():
    engine = make(max_num_batched_tokens=16, long_prefill_token_threshold=0)
    engine.scheduler.add(request("a", list(range(40))))
    engine.step()
    engine.step()
    assert engine.scheduler.abort("a") and not engine.scheduler.abort("a")
    retry = request("a", list(range(40)))
    engine.scheduler.add(retry)
    engine.run()
    assert retry.sequences[0].num_cached_tokens == 32
    check_outputs(engine, retry)


@OVERLAP
@pytest.mark.parametrize("caching", [True, False])
def test_n_answers_share_one_prompt(overlap, caching):
    engine = make(overlap=overlap, caching=caching)
    r = request("a", list(range(10)), 6, n=4)
    sequences = engine.scheduler.add(r)
    assert [s.index for s in sequences] == [0, 1, 2, 3]
    while len(engine.batches) < 3 + overlap:
        engine.step()
    assert engine.scheduler.kv.usage.num_shared_blocks == 2
    engine.run()
    check_outputs(engine, r)
    # The prompt once, and for each sibling its last token again.
    assert engine.device.num_tokens_computed == 10 + 3 + 4 * 5
    copies = [copy for batch in engine.batches for copy in batch.block_copies[0]]
    assert len(copies) == 3


def test_the_next_turn_of_a_chat_reuses_the_answer():
    engine = make()
    first = request("a", list(range(9)), 12)
    engine.scheduler.add(first)
    engine.run()
    history = [*range(9), *engine.outputs[first.sequences[0].seq_id]]
    second = request("b", [*history, 50, 51, 52])
    engine.scheduler.add(second)
    engine.run()
    assert second.sequences[0].num_cached_tokens == 20
    check_outputs(engine, first, second)


# Refusals.


def test_requests_that_can_never_fit_are_refused_with_the_numbers():
    engine = make(num_blocks=4)
    with pytest.raises(RequestTooLargeError) as error:
        engine.scheduler.add(request("a", [1] * 10, 4))
    assert (error.value.num_prompt_tokens, error.value.max_tokens, error.value.limit) == (10, 4, 13)
    assert "10 prompt + 4 generated = 14 tokens" in str(error.value)
    assert isinstance(error.value, ValueError)
    engine.scheduler.add(request("b", [1] * 10, 3))  # the last token needs no slot
    engine.run()
    bounded = make(max_model_len=12)
    with pytest.raises(RequestTooLargeError, match="max_model_len"):
        bounded.scheduler.add(request("a", [1] * 12, None))


def test_without_max_tokens_an_answer_may_fill_the_model():
    engine = make(max_model_len=12)
    r = request("a", [1] * 5, None)
    engine.scheduler.add(r)
    engine.run()
    assert r.sequences[0].num_output_tokens == 7
    assert r.sequences[0].finish_reason is FinishReason.LENGTH


def test_a_full_queue_refuses_work():
    engine = make(max_num_waiting=2)
    engine.scheduler.add(request("a", [1], n=2))
    with pytest.raises(EngineOverloadedError) as error:
        engine.scheduler.add(request("b", [1]))
    assert (error.value.num_waiting, error.value.max_num_waiting) == (2, 2)
    engine.step()
    engine.scheduler.add(request("b", [1]))
    engine.run()


# Ends.


@OVERLAP
def test_stop_tokens_end_a_sequence_and_the_row_in_flight_is_discarded(overlap):
    prompt = [3, 1, 4]
    answer = generate(prompt, 8, frozenset())
    eos = answer[3]
    expected = answer[: answer.index(eos) + 1]
    engine = make(overlap=overlap)
    r = request("a", prompt, 8, stop={"eos_token_ids": frozenset([eos])})
    engine.scheduler.add(r)
    engine.run()
    assert list(r.sequences[0].tokens[r.num_prompt_tokens :]) == expected
    assert r.sequences[0].finish_reason is FinishReason.STOP
    assert len(engine.batches) == len(expected) + overlap


def test_stop_policies():
    stop = StopPolicy(
        max_tokens=9, eos_token_ids=frozenset([1]), stop_token_ids=frozenset([2]), min_tokens=3
    )
    assert stop.reason_to_stop(1, 2, 9) is None
    assert stop.reason_to_stop(1, 3, 9) is FinishReason.STOP
    assert stop.reason_to_stop(2, 3, 9) is FinishReason.STOP
    assert stop.reason_to_stop(5, 9, 9) is FinishReason.LENGTH
    ignoring = StopPolicy(
        eos_token_ids=frozenset([1]), stop_token_ids=frozenset([2]), ignore_eos=True
    )
    assert ignoring.reason_to_stop(1, 1, 9) is None
    assert ignoring.reason_to_stop(2, 1, 9) is FinishReason.STOP


@OVERLAP
def test_a_stop_string_found_outside_ends_one_sequence(overlap):
    engine = make(overlap=overlap)
    r = request("a", [1, 2, 3], 20, n=2)
    engine.scheduler.add(r)
    for _ in range(5):
        engine.step()
    assert engine.scheduler.finish("a", FinishReason.STOP, index=0)
    engine.scheduler.check_integrity()
    engine.run()
    first, second = r.sequences
    assert first.finish_reason is FinishReason.STOP and first.num_output_tokens < 20
    assert list(second.tokens[3:]) == generate([1, 2, 3], 20, frozenset(), 1)
    with pytest.raises(InvalidParameterError, match="index must be"):
        engine.scheduler.add(request("b", [1]))
        engine.scheduler.finish("b", FinishReason.STOP, index=1)


@OVERLAP
@pytest.mark.parametrize("num_steps", range(5))
def test_abort_at_any_moment(overlap, num_steps):
    engine = make(overlap=overlap, max_num_batched_tokens=8)
    other = request("b", [7, 7], 6)
    engine.scheduler.add(request("a", list(range(12)), 6, n=2))
    engine.scheduler.add(other)
    for _ in range(num_steps):
        engine.step()
    assert engine.scheduler.abort("a")
    assert engine.scheduler.request("a") is None
    engine.scheduler.check_integrity()
    engine.run()
    check_outputs(engine, other)


@OVERLAP
def test_deadlines_end_requests_running_or_waiting(overlap):
    clock = Clock()
    kv = KVManager(65, 4)
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64)
    engine = FakeEngine(Scheduler(config, kv, clock=clock), overlap=overlap)
    running, waiting = request("a", [1], 50, timeout=2.0), request("b", [2], 3, timeout=1.0)
    last = request("c", [3], 3)
    for r in (running, waiting, last):
        engine.scheduler.add(r)
    engine.step()
    clock.now = 1.0
    engine.step()
    assert waiting.is_finished and not running.is_finished
    clock.now = 2.5
    engine.run()
    assert engine.reasons[running.sequences[0].seq_id] is FinishReason.TIMEOUT
    assert engine.reasons[waiting.sequences[0].seq_id] is FinishReason.TIMEOUT
    assert engine.outputs[last.sequences[0].seq_id] == generate([3], 3, frozenset())


# Misuse.


def test_ids_are_unique_among_unfinished_requests():
    engine = make()
    a = request("a", [1])
    engine.scheduler.add(a)
    with pytest.raises(DuplicateRequestError, match="'a' is already in use"):
        engine.scheduler.add(request("a", [2]))
    engine.run()
    with pytest.raises(DuplicateRequestError):
        engine.scheduler.add(a)  # the very same object, used up
    engine.scheduler.add(request("a", [2]))


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: request("a", []), "prompt_token_ids must be at least one token"),
        (lambda: request("a", [1, -1]), "prompt_token_ids must be token ids >= 0 but got -1"),
        (lambda: request("a", [1 << 32]), r"token ids below 2\*\*32 but got 4294967296"),
        (lambda: request("a", [1], n=0), "n must be at least 1 but got 0"),
        (lambda: request("a", [1], timeout=-1.0), "timeout must be at least 0 seconds"),
        (lambda: StopPolicy(max_tokens=0), "max_tokens must be at least 1 but got 0"),
        (lambda: StopPolicy(min_tokens=-1), "min_tokens must be at least 0"),
        (
            lambda: StopPolicy(max_tokens=2, min_tokens=3),
            r"min_tokens must be at most max_tokens \(2\)",
        ),
        (
            lambda: SchedulerConfig(policy="lifo"),
            "policy must be 'fcfs' or 'priority' but got 'lifo'",
        ),  # type: ignore[arg-type]
        (lambda: SchedulerConfig(max_num_seqs=0), "max_num_seqs"),
        (lambda: SchedulerConfig(max_num_seqs=9, max_num_batched_tokens=8), r"max_num_seqs \(9\)"),
        (lambda: SchedulerConfig(watermark=1.0), "watermark"),
        (lambda: SchedulerConfig(max_model_len=0), "max_model_len"),
        (lambda: SchedulerConfig(max_num_waiting=0), "max_num_waiting"),
        (lambda: SchedulerConfig(long_prefill_token_threshold=-1), "long_prefill_token_threshold"),
    ],
)
def test_bad_parameters_are_named(make_it, message):
    with pytest.raises(InvalidParameterError, match=message):
        make_it()


def test_steps_are_committed_in_order_and_complete():
    engine = make()
    engine.scheduler.add(request("a", [1]))
    first = engine.scheduler.schedule()
    second = engine.scheduler.schedule()
    assert first is not None and second is not None
    with pytest.raises(AssertionError):
        engine.scheduler.schedule()  # two in flight are enough
    with pytest.raises(AssertionError):
        engine.scheduler.update_from_output(second, [[]])
    with pytest.raises(InvalidParameterError, match=r"token_ids must be one entry .* \[1\]"):
        engine.scheduler.update_from_output(first, [[]])
    with pytest.raises(InvalidParameterError, match=r"one entry for each of 1 sequences"):
        engine.scheduler.update_from_output(first, [])
    engine.scheduler.finish("a", FinishReason.ERROR)
    engine.scheduler.update_from_output(first, [[]])
    engine.scheduler.update_from_output(second, late := [[5]])
    assert late == [[]], "it had ended"


def test_the_model_of_these_tests_depends_on_every_token():
    assert len({next_token([1, 2, i]) for i in range(50)}) > 25
    assert len({next_token([i, 2, 3]) for i in range(50)}) > 25


def test_without_chunked_prefill_a_prompt_is_never_cut() -> None:
    engine = make(200, caching=False, max_model_len=64, enable_chunked_prefill=False)
    prompts = [list(range(length)) for length in (40, 60, 3, 50, 30)]
    for i, prompt in enumerate(prompts):
        engine.scheduler.add(request(str(i), prompt))
    engine.run()
    first_rows: dict[str, int] = {}
    for batch in engine.batches:
        for row in batch.sequences:
            first_rows.setdefault(row.request_id, len(row.token_ids))
    assert [first_rows[str(i)] for i in range(5)] == [len(p) for p in prompts]


def test_without_chunked_prefill_a_step_must_hold_the_longest_prompt() -> None:
    with pytest.raises(InvalidParameterError, match="at least the context length"):
        SchedulerConfig(max_model_len=4096, enable_chunked_prefill=False)


# Another scheduler takes over.


def test_requests_go_on_in_another_scheduler() -> None:
    """As after an exception out of a step: nothing of the first scheduler or its store is used."""
    engine = make()
    one, many = request("one", [1, 2, 3], 6), request("many", [4] * 9, 6, n=3, timeout=50)
    for r in (one, many):
        engine.scheduler.add(r)
    engine.step()
    engine.scheduler.schedule()  # (and this step is lost)
    assert many.prompt_source is not None and any(s.tables for s in many.sequences)
    many.sequences[0].status = SequenceStatus.FINISHED  # its answer has an end already
    del one.sequences[0].tokens[one.num_prompt_tokens :]

    after = make()
    after.scheduler.restore([many, one])
    assert all(s.tables is s.waits_for is None for r in (one, many) for s in r.sequences)
    assert many.num_unfinished == 2
    after.scheduler.check_integrity()
    newest = request("newest", [7], 2)
    after.scheduler.add(newest)
    assert newest.arrival > many.arrival > one.arrival
    after.run()
    assert [s.finish_reason for s in many.sequences[1:]] == [FinishReason.LENGTH] * 2
    for r in (one, many):
        for seq in r.sequences[r is many :]:
            expected = generate(r.prompt_token_ids, 6, r.stop.eos_token_ids, seq.index)
            assert list(seq.tokens[r.num_prompt_tokens :]) == expected
    assert many.is_finished and not after.scheduler.has_unfinished
    after.scheduler.check_integrity()


def test_copies_of_a_step_do_not_read_what_others_write() -> None:
    """A sequence back from its preemption has the whole prompt, but not yet its copy."""
    window = WindowGroupSpec(8, 8, lambda position: max(0, position - 7))
    engine = make(13, windows=[window], max_num_batched_tokens=8, watermark=0.1)
    engine.scheduler.max_parked_tokens = 1
    several = request("several", [0, 1, 0, 1, 0, 1, 0, 0, 1, 1], max_tokens=5, n=7)
    short = request("short", [0], max_tokens=1)
    engine.scheduler.add(several)
    engine.scheduler.add(short)
    engine.run()
    for batch in engine.batches:
        for copies in batch.block_copies:
            assert not {copy.src for copy in copies} & {copy.dst for copy in copies}
    check_outputs(engine, several, short)
