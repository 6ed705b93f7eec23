"""Keeps the block tables of running sequences as one array, and updates what changed.

A table grows by one block in `block_size` steps; turning all of them from tuples into an array in
every step would cost more than the rest of the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PaddedTables:
    """The block tables of one step."""

    blocks: np.ndarray  # [num_seqs, max_blocks] int32; padding is block 0, never handed out
    lengths: np.ndarray  # [num_seqs]

    @classmethod
    def of(cls, tables: Sequence[Sequence[int]]) -> PaddedTables:
        """Pads plain lists."""
        lengths = np.array([len(table) for table in tables], dtype=np.int64)
        blocks = np.zeros((len(tables), max(1, lengths.max(initial=0))), dtype=np.int32)
        for row, table in zip(blocks, tables):
            row[: len(table)] = table
        return cls(blocks, lengths)


class BlockTableCache:
    """One row a sequence; rows of sequences that are not seen any more are used again."""

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}  # seq_id -> row
        self._seq_ids: tuple[int, ...] = ()  # of the step before,
        self._places = np.zeros(0, dtype=np.intp)  # and their rows
        self._free: list[int] = []
        self._blocks = np.zeros((0, 0), dtype=np.int32)
        self._lengths = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def update(
        self,
        seq_ids: Sequence[int],
        tables: Sequence[Sequence[int]],
        dirty_from: Sequence[int],
    ) -> PaddedTables:
        """Takes in the tables of a step.

        Args:
            seq_ids: the sequences.
            tables: for each its blocks.
            dirty_from: for each the first of its blocks that may differ from what it had the last
                time.
        """
        fresh: list[int] = []
        seq_ids = tuple(seq_ids)  # (a copy, where it is a list that may change)
        if seq_ids != self._seq_ids:
            rows, fresh = self._rows_of(seq_ids)
            self._seq_ids, self._places = seq_ids, np.array(rows, dtype=np.intp)
        places = self._places
        for i, (table, first) in enumerate(zip(tables, dirty_from)):
            if first < len(table):
                self._write(places[i], table, first)
        for i in fresh:
            self._write(places[i], tables[i], 0)
        lengths = self._lengths[places]
        return PaddedTables(self._blocks[:, : lengths.max(initial=1)].take(places, axis=0), lengths)

    def _write(self, row: int, table: Sequence[int], dirty_from: int) -> None:
        known, length = int(self._lengths[row]), len(table)
        if length > self._blocks.shape[1]:
            wider = np.zeros((len(self._blocks), 2 * length), dtype=np.int32)
            wider[:, : self._blocks.shape[1]] = self._blocks
            self._blocks = wider
        first = min(dirty_from, known)  # (a row that is new here has nothing to keep)
        self._blocks[row, first:length] = table[first:]
        self._blocks[row, length:known] = 0
        self._lengths[row] = length

    def _rows_of(self, seq_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """The row of each sequence, and which of them are new here."""
        fresh = [i for i, seq_id in enumerate(seq_ids) if seq_id not in self._rows]
        if len(fresh) > len(self._free):
            self._collect(set(seq_ids))
        if len(fresh) > len(self._free):
            self._enlarge(len(self._rows) + len(fresh))
        for i in fresh:
            row = self._free.pop()
            self._rows[seq_ids[i]] = row
            self._lengths[row] = 0
        return [self._rows[seq_id] for seq_id in seq_ids], fresh

    def _collect(self, seen: set[int]) -> None:
        """Frees the rows of all who are not in this step: they ended, or are written anew."""
        for seq_id in self._rows.keys() - seen:
            row = self._rows.pop(seq_id)
            self._blocks[row] = 0
            self._free.append(row)

    def _enlarge(self, num_rows: int) -> None:
        old = len(self._blocks)
        num_rows = max(num_rows, 2 * old)
        blocks = np.zeros((num_rows, self._blocks.shape[1]), dtype=np.int32)
        blocks[:old] = self._blocks
        lengths = np.zeros(num_rows, dtype=np.int64)
        lengths[:old] = self._lengths
        self._blocks, self._lengths = blocks, lengths
        self._free += range(num_rows - 1, old - 1, -1)
