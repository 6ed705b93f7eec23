"""The messages from rank 0 to the others, as bytes.

A message is a kind, a few JSON fields, and columns of numbers. A step's message holds only the
inputs of the model's forward pass; the other ranks receive sampled tokens from rank 0 through a
collective. Decoding trusts nothing: every length is checked before it is used.

    header length (uint32) | header (JSON) | columns, one after another
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from mlx_paged.core import BlockCopy, StateMove, StepBatch, StepTable
from mlx_paged.core.kv.tree import TOKEN_TYPE
from mlx_paged.errors import MlxPagedError

_LENGTH = struct.Struct("<I")
_MAX_HEADER = 1 << 20
_TYPES = ("b", "i", "q", TOKEN_TYPE, "f")  # of columns: int8, int32, int64, uint32, float32

READY, JOIN = "ready", "join"  # from another rank to rank 0, and the answer to the first one
START, ALLOCATE, STEP, RESET = "start", "allocate", "step", "reset"
ADAPTER_SLOTS, ADAPTER_LAYER, ADAPTER = "adapter slots", "adapter layer", "adapter"
ALL_ROWS, LIMITS = "all rows", "limits"
KINDS = (
    *(READY, JOIN, START, ALLOCATE, STEP, RESET),
    *(ADAPTER_SLOTS, ADAPTER_LAYER, ADAPTER, ALL_ROWS, LIMITS),
)


class MessageError(MlxPagedError, ValueError):
    """Bytes that are not a valid message."""


@dataclass(frozen=True)
class Message:
    """A message.

    Attributes:
        kind: One of `KINDS`.
        fields: Values that JSON can represent.
        columns: Arrays of numbers, by name.
    """

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, array[Any]] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Returns the message as bytes."""
        shapes = {name: [a.typecode, len(a)] for name, a in self.columns.items()}
        fields = {"kind": self.kind, "fields": self.fields, "columns": shapes}
        header = json.dumps(fields, separators=(",", ":")).encode()
        parts = (a.tobytes() for a in self.columns.values())
        return b"".join((_LENGTH.pack(len(header)), header, *parts))

    @classmethod
    def decode(cls, data: bytes) -> Message:
        """Parses a message.

        Raises:
            MessageError: The bytes are not a valid message.
        """
        view = memoryview(data)
        try:
            [length] = _LENGTH.unpack_from(view)
            at = _LENGTH.size + length
            if length > _MAX_HEADER or at > len(view):
                raise MessageError(f"a message of {len(view)} bytes has a header of {length}")
            header = json.loads(bytes(view[_LENGTH.size : at]))
            kind, fields, shapes = header["kind"], header["fields"], header["columns"]
            if kind not in KINDS or not isinstance(fields, dict):
                raise MessageError(f"unknown message {kind!r}")
            columns: dict[str, array[Any]] = {}
            for name, (typecode, count) in shapes.items():
                if typecode not in _TYPES or not isinstance(count, int):
                    raise MessageError(f"column {name!r} has {count!r} values of type {typecode!r}")
                column = array(typecode)
                end = at + count * column.itemsize
                if not at <= end <= len(view):
                    raise MessageError(f"column {name!r} ends at byte {end} of {len(view)}")
                column.frombytes(view[at:end])
                columns[name], at = column, end
        except (AttributeError, KeyError, TypeError, ValueError, struct.error) as error:
            if isinstance(error, MessageError):
                raise
            raise MessageError(f"not a message: {error}") from error
        if at != len(view):
            raise MessageError(f"{len(view) - at} bytes follow a message")
        return cls(kind, fields, columns)


# --- Steps ----------------------------------------------------------------------------------------


# Columns of a step with one value per sequence.
_BY_SEQUENCE = ("starts", "query_lens", "samples", "input_from", "num_drafts", "adapter_ids")
# Replaces the length of a table that has not changed since the previous step.
_SAME = -1


class StepWriter:
    """Encodes steps as messages, in launch order.

    Most block tables have not changed since the previous step, so only changed ones are sent.
    """

    def __init__(self) -> None:
        self._before: dict[int, tuple[StepTable, ...]] = {}  # of the previous step, by sequence

    def message(self, batch: StepBatch) -> Message:
        """Returns the message of a step, without sampling parameters and media."""
        lengths, blocks = array("i"), array("i")
        for seq_id, tables in zip(batch.seq_ids, batch.tables):
            before = self._before.get(seq_id, ())
            for i, table in enumerate(tables):
                if i < len(before) and before[i].blocks is table.blocks:
                    lengths.append(_SAME)
                else:
                    lengths.append(len(table.blocks))
                    blocks.extend(table.blocks)
        self._before = dict(zip(batch.seq_ids, batch.tables))
        dirty = (table.dirty_from for table in chain.from_iterable(batch.tables))
        columns = {
            "seq_ids": array("q", batch.seq_ids),
            "token_ids": batch.token_ids,
            "starts": batch.starts,
            "query_lens": batch.query_lens,
            "samples": array("b", batch.samples),
            "input_from": batch.input_from,
            "num_drafts": batch.num_drafts,
            "adapter_ids": batch.adapter_ids,
            "table_lens": lengths,
            "dirty_from": array("i", dirty),
            "blocks": blocks,
            "slots": array("i", chain.from_iterable(batch.slots)),
            "copy_lens": array("i", map(len, batch.block_copies)),
            "copies": array("i", chain.from_iterable(chain.from_iterable(batch.block_copies))),
            "targets": array("i", _pairs_of(batch.prompt_targets)),
        }
        return Message(STEP, {"step": batch.step, "is_decode": batch.is_decode}, columns)


class ReportedRows(NamedTuple):
    """Stands in for `PromptTargets` on ranks that report nothing: only the count matters."""

    token_ids: range


def _pairs_of(targets: Iterable[tuple[int, Any]]) -> Iterable[int]:
    return chain.from_iterable((index, len(each.token_ids)) for index, each in targets)


class StepReader:
    """Decodes the messages of a `StepWriter`. It must see all of them, in order."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[StepTable, ...]] = {}

    def step(self, message: Message) -> StepBatch:
        """Returns the step of a message.

        Raises:
            MessageError: The columns are missing or inconsistent.
        """
        columns = message.columns
        try:
            count = len(columns["seq_ids"])
            lengths = {len(columns[name]) for name in _BY_SEQUENCE}
            if lengths != {count} or sum(columns["query_lens"]) != len(columns["token_ids"]):
                raise MessageError(f"a step of {count} sequences has columns of other lengths")
            tables = self._tables_of(columns)
            slots = _pairs(columns["slots"])
            if len(slots) not in (0, count):
                raise MessageError(f"a step of {count} sequences has {len(slots)} slots")
            targets = _pairs(columns["targets"])
            if any(not 0 <= index < count or length < 0 for index, length in targets):
                raise MessageError(f"prompt targets must be in [0, {count}) but are {targets}")
            return StepBatch(
                step=int(message.fields["step"]),
                seq_ids=list(columns["seq_ids"]),
                token_ids=columns["token_ids"],
                starts=columns["starts"],
                query_lens=columns["query_lens"],
                samples=[value != 0 for value in columns["samples"]],
                is_decode=message.fields["is_decode"] is True,
                input_from=columns["input_from"],
                num_drafts=columns["num_drafts"],
                adapter_ids=columns["adapter_ids"],
                adapters={slot: None for slot in columns["adapter_ids"] if slot},
                tables=tables,
                slots=[StateMove(*pair) for pair in slots],
                block_copies=_copies_of(columns),
                prompt_targets=[(i, ReportedRows(range(n))) for i, n in targets],
            )
        except MessageError:
            raise
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise MessageError(f"a step has a missing or invalid column: {error}") from error

    def _tables_of(self, columns: Mapping[str, array[int]]) -> list[tuple[StepTable, ...]]:
        seq_ids, lengths = columns["seq_ids"], columns["table_lens"]
        dirty, blocks = columns["dirty_from"], columns["blocks"]
        _check_parts("blocks", [0 if n == _SAME else n for n in lengths], len(blocks))
        num_groups, rest = divmod(len(lengths), len(seq_ids) or 1)
        if rest or len(dirty) != len(lengths) or (num_groups and not seq_ids):
            raise MessageError(f"{len(seq_ids)} sequences have {len(lengths)} tables")
        tables, at = [], 0
        for seq_id, first in zip(seq_ids, range(0, len(lengths), num_groups or 1)):
            before, own = self._before.get(seq_id, ()), []
            for i in range(num_groups):
                length = lengths[first + i]
                if length == _SAME and i >= len(before):
                    raise MessageError(f"sequence {seq_id} repeats a table that it never had")
                if length == _SAME:
                    found = before[i].blocks
                else:
                    found, at = tuple(blocks[at : at + length]), at + length
                own.append(StepTable(found, dirty[first + i]))
            tables.append(tuple(own))
        self._before = dict(zip(seq_ids, tables))
        return tables


def _copies_of(columns: Mapping[str, array[int]]) -> tuple[tuple[BlockCopy, ...], ...]:
    copies = [BlockCopy(*pair) for pair in _pairs(columns["copies"])]
    _check_parts("copies", columns["copy_lens"], len(copies))
    groups, at = [], 0
    for length in columns["copy_lens"]:
        groups.append(tuple(copies[at : at + length]))
        at += length
    return tuple(groups)


def _check_parts(name: str, lengths: Sequence[int], total: int) -> None:
    if min(lengths, default=0) < 0 or sum(lengths) != total:
        raise MessageError(f"{total} {name} are divided into {sum(lengths)}")


def _pairs(column: array[int]) -> list[tuple[int, int]]:
    if len(column) % 2:
        raise MessageError(f"a column of pairs has {len(column)} values")
    return list(zip(column[::2], column[1::2]))
