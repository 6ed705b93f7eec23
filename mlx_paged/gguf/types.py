"""Tensor types of GGUF: their ids, names and block sizes, and arrays of blocks.

A test checks that the table equals the `gguf` package's. Repeating it here means that loading a
model needs no package besides numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TensorType:
    """A tensor type. Each row of a tensor is a sequence of blocks.

    Attributes:
        block: Number of elements in a block.
        nbytes: Number of bytes of a block.
    """

    name: str
    block: int
    nbytes: int

    @property
    def is_quantized(self) -> bool:
        """True if a block holds several elements."""
        return self.block > 1


#: Types by id.
TYPES: dict[int, TensorType] = {
    number: TensorType(name, block, nbytes)
    for number, name, block, nbytes in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (9, "Q8_1", 32, 40),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
        (41, "Q1_0", 128, 18),
    )
}


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file, as it is stored.

    Attributes:
        rows: ``[*shape[:-1], row_bytes]`` uint8, a view of the mapped file. Reordering rows is
            possible in every type; a row itself is only readable as blocks.
    """

    name: str
    type: TensorType
    rows: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Numbers of elements, outermost dimension first."""
        return (*self.rows.shape[:-1], self.columns)

    @property
    def columns(self) -> int:
        """Number of elements in a row."""
        return self.rows.shape[-1] // self.type.nbytes * self.type.block

    @property
    def blocks(self) -> np.ndarray:
        """The blocks: ``[*shape[:-1], columns / type.block, type.nbytes]`` uint8."""
        return self.rows.reshape(*self.rows.shape[:-1], -1, self.type.nbytes)

    def with_rows(self, rows: np.ndarray, name: str | None = None) -> Tensor:
        """Returns a tensor of the same type with other rows."""
        return Tensor(self.name if name is None else name, self.type, rows)


def row_bytes(kind: TensorType, shape: Sequence[int]) -> int | None:
    """Returns the bytes of one row; None if a row does not consist of whole blocks."""
    blocks, rest = divmod(shape[-1], kind.block)
    return None if rest else blocks * kind.nbytes


def num_bytes(kind: TensorType, shape: Sequence[int]) -> int | None:
    """Returns the bytes of a tensor; None if its rows do not consist of whole blocks."""
    row = row_bytes(kind, shape)
    return None if row is None else math.prod(shape[:-1]) * row
