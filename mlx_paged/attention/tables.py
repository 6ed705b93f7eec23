"""Keeps the block tables of running sequences as one array, and updates what changed.

A table grows by one block in `block_size` steps; turning all of them from tuples into an array in
every step would cost more than the rest of the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        self._free: list[int] = []
        self._blocks = np.zeros((0, 0), dtype=np.int32)
        self._lengths = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def update(self, tables: Iterable[tuple[int, Sequence[int], int]]) -> PaddedTables:
        """Takes in the tables of a step.

        Args:
            tables: for each sequence its id, its blocks, and the first of them that may differ from
                what it had the last time.
        """
        tables = list(tables)
        rows = self._rows_of([seq_id for seq_id, _, _ in tables])
        for row, (_, table, dirty_from) in zip(rows, tables):
            if dirty_from < len(table) or self._lengths[row] == 0:
                self._write(row, table, dirty_from)
        lengths = self._lengths[rows]
        return PaddedTables(self._blocks[rows, : lengths.max(initial=1)], lengths)

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

    def _rows_of(self, seq_ids: list[int]) -> list[int]:
        missing = [seq_id for seq_id in seq_ids if seq_id not in self._rows]
        if len(missing) > len(self._free):
            self._collect(set(seq_ids))
        if len(missing) > len(self._free):
            self._enlarge(len(self._rows) + len(missing))
        for seq_id in missing:
            row = self._free.pop()
            self._rows[seq_id] = row
            self._lengths[row] = 0
        return [self._rows[seq_id] for seq_id in seq_ids]

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
