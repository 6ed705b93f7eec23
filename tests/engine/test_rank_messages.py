"""The messages between ranks: nothing that a forward needs is lost, and bad bytes are refused."""

from __future__ import annotations

import json
import random
import socket
import struct
from array import array
from typing import Any

import numpy as np
import pytest

from mlx_paged.core import BlockCopy, StateMove, StepBatch, StepTable
from mlx_paged.core.kv.tree import TOKEN_TYPE
from mlx_paged.engine.ranks import launch
from mlx_paged.engine.ranks.adapters import AdapterReader, adapter_messages, slots_of
from mlx_paged.engine.ranks.channel import Channel
from mlx_paged.engine.ranks.messages import (
    ADAPTER,
    ADAPTER_LAYER,
    ADAPTER_SLOTS,
    START,
    STEP,
    Message,
    MessageError,
    ReportedRows,
    StepReader,
    StepWriter,
)
from mlx_paged.model.lora_slots import LowRank


def batch() -> StepBatch:
    """Three sequences of two groups: a decode, drafts, and a chunk of a prompt."""
    return StepBatch(
        step=7,
        seq_ids=[4, 1 << 40, 9],
        token_ids=array(TOKEN_TYPE, [0, 5, 6, 7, (1 << 32) - 1, 8]),
        starts=array("q", [31, 10, 0]),
        query_lens=array("q", [1, 3, 2]),
        samples=[True, True, False],
        input_from=array("i", [2, -1, -1]),
        num_drafts=array("i", [0, 2, 0]),
        adapter_ids=array("i", [0, 2, 1]),
        adapters={1: None, 2: None},
        tables=[
            (StepTable((1, 2), 1), StepTable((0, 3), 2)),
            (StepTable((4,), 1), StepTable((5,), 0)),
            (StepTable((), 0), StepTable((6,), 0)),
        ],
        slots=[StateMove(1, 2), StateMove(0, 3), StateMove(4, -1)],
        block_copies=((BlockCopy(8, 9),), ()),
        prompt_targets=[(2, ReportedRows(range(2)))],
    )


def step_message(batch: StepBatch) -> Message:
    return StepWriter().message(batch)


def step_of(message: Message) -> StepBatch:
    return StepReader().step(message)


def test_a_step_survives_its_message() -> None:
    sent = step_message(batch()).encode()
    assert step_of(Message.decode(sent)) == batch()
    assert step_of(Message.decode(step_message(StepBatch()).encode())).num_seqs == 0


def test_a_table_is_sent_once() -> None:
    """Until its blocks change, or its sequence misses a step."""
    writer, reader = StepWriter(), StepReader()
    first, again = batch(), batch()
    again.tables = list(first.tables)  # the same blocks, as the scheduler exports them
    again.tables[1] = (StepTable((4, 10), 1), first.tables[1][1]._replace(dirty_from=1))
    only = StepBatch(
        seq_ids=[9],
        token_ids=array(TOKEN_TYPE, [1]),
        starts=array("q", [2]),
        query_lens=array("q", [1]),
        samples=[True],
        input_from=array("i", [-1]),
        num_drafts=array("i", [0]),
        adapter_ids=array("i", [0]),
        tables=[first.tables[2]],
        block_copies=((), ()),
    )
    sizes = []
    for each in (first, again, only, again):
        sent = writer.message(each)
        sizes.append(len(sent.columns["blocks"]))
        assert reader.step(Message.decode(sent.encode())) == each
    assert sizes == [7, 2, 0, 7]
    with pytest.raises(MessageError, match="sequence 4 repeats a table that it never had"):
        StepReader().step(writer.message(again))


def test_a_message_needs_no_code_to_be_read() -> None:
    """Columns are numbers, and the header is JSON: no pickle, whose bytes could run anything."""
    sent = step_message(batch()).encode()
    [length] = struct.unpack_from("<I", sent)
    assert json.loads(sent[4 : 4 + length])["kind"] == STEP


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"starts": array("q", [1])}, "columns of other lengths"),
        ({"query_lens": array("q", [1, 3, 9])}, "columns of other lengths"),
        ({"table_lens": array("i", [9] * 6)}, "blocks are divided into 54"),
        ({"table_lens": array("i", [-2, 2, 1, 1, 3, 1])}, "blocks are divided"),
        ({"table_lens": array("i", [-1, 2, 1, 1, 0, 3])}, "repeats a table"),
        ({"dirty_from": array("i", [0])}, "3 sequences have 6 tables"),
        ({"slots": array("i", [1])}, "a column of pairs has 1 values"),
        ({"slots": array("i", [1, 2])}, "has 1 slots"),
        ({"copy_lens": array("i", [5])}, "1 copies are divided into 5"),
        ({"targets": array("i", [3, 1])}, "prompt targets must be in"),
    ],
)
def test_columns_that_do_not_belong_together(change: dict[str, Any], reason: str) -> None:
    message = step_message(batch())
    changed = Message(STEP, message.fields, {**message.columns, **change})
    with pytest.raises(MessageError, match=reason):
        step_of(Message.decode(changed.encode()))


def test_a_step_without_a_column() -> None:
    message = step_message(batch())
    for name in message.columns:
        rest = {other: a for other, a in message.columns.items() if other != name}
        with pytest.raises(MessageError, match=name):
            step_of(Message(STEP, message.fields, rest))


def test_any_damage_is_refused_or_harmless() -> None:
    """A message with other bytes is an error of ours, or another message; never anything else."""
    sent, rng, refused = step_message(batch()).encode(), random.Random(1), 0
    for _ in range(2000):
        damaged = bytearray(sent)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        damaged = damaged[: rng.choice([len(damaged), rng.randrange(len(damaged))])]
        try:
            step_of(Message.decode(bytes(damaged)))
        except MessageError:
            refused += 1
    assert refused > 1000


@pytest.mark.parametrize(
    "header",
    [
        {"kind": "other", "fields": {}, "columns": {}},
        {"kind": START, "fields": [], "columns": {}},
        {"kind": START, "fields": {}, "columns": {"a": ["u", 1]}},
        {"kind": START, "fields": {}, "columns": {"a": ["q", -1]}},
        {"kind": START, "fields": {}, "columns": {"a": ["q", 1 << 60]}},
        {"kind": START, "fields": {}, "columns": [1]},
        [],
    ],
)
def test_headers_that_lie(header: Any) -> None:
    text = json.dumps(header).encode()
    with pytest.raises(MessageError):
        Message.decode(struct.pack("<I", len(text)) + text)


def test_an_adapter_survives_its_messages() -> None:
    def change(rank: int, width: int, out_features: int) -> LowRank:
        rng = np.random.default_rng(width)
        sizes = (rank, width), (rank, out_features)
        return LowRank(*(rng.standard_normal(size).astype(np.float32) for size in sizes))

    sent = {"layers.0.q_proj": change(3, 8, 16), "layers.1.o_proj": change(5, 16, 8)}
    *layers, last = [Message.decode(m.encode()) for m in adapter_messages(2, sent)]
    reader = AdapterReader()
    for message in layers:
        reader.read(message)
    assert (last.kind, last.fields) == (ADAPTER, {"slot": 2})
    found = reader.take()
    assert found.keys() == sent.keys() and not reader.take()
    for path, halves in sent.items():
        for ours, theirs in zip(halves, found[path], strict=True):
            np.testing.assert_array_equal(ours, theirs)
    [whole, *_] = layers
    for fields, columns in (
        ({"rank": 0}, whole.columns),
        ({"rank": 5}, whole.columns),
        ({"rank": 3}, {"a": whole.columns["a"]}),
        ({"rank": 3}, {"a": whole.columns["a"], "b": array("i", [1, 2, 3])}),
    ):
        with pytest.raises(MessageError, match="rank"):
            reader.read(Message(ADAPTER_LAYER, fields, columns))


@pytest.mark.parametrize("fields", [{}, {"num_slots": 1, "rank": 8, "dtype": 3}])
def test_slots_that_are_none(fields: dict[str, Any]) -> None:
    with pytest.raises(MessageError, match="slots"):
        slots_of(Message(ADAPTER_SLOTS, fields))


def test_a_channel_refuses_a_length_before_it_reads() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    with theirs:
        theirs.sendall(struct.pack("<I", (1 << 32) - 1))
        with pytest.raises(MessageError, match="at most"):
            channel.receive()
        theirs.sendall(struct.pack("<I", 8) + b"half")
    with pytest.raises(EOFError):
        channel.receive()
    channel.close()


def test_only_ranks_that_know_the_secret_may_connect() -> None:
    secret = bytes(range(32))
    for greeting, expected in (
        ((secret, 1, 0), (1, 0)),
        ((secret, 1, 1), (1, 1)),
        ((bytes(32), 1, 0), None),
        ((secret, 0, 0), None),
        ((secret, 2, 0), None),
        ((secret, 1, 2), None),
    ):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(struct.pack("<32sIB", *greeting))
            assert launch.greeted(ours, secret, 2) == expected
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        assert launch.greeted(ours, secret, 2) is None
