"""Computes RoPE positions in time, height and width for a whole prompt, on the host.

Qwen2-VL's rule (arXiv:2409.12191, section 2.1): text counts up in all three. Patches of a picture
have their position in its grid, after the highest position so far, and later tokens continue after
the highest of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Grid:
    """A run of adjacent rows that lie on a grid.

    Attributes:
        offset: First prompt position.
        frames: Steps in time.
        height: Rows of a frame after merging.
        width: Columns of a frame after merging.
        seconds: Positions in time that a frame lasts.
    """

    offset: int
    frames: int
    height: int
    width: int
    seconds: float = 1.0

    @property
    def length(self) -> int:
        """Prompt positions."""
        return self.frames * self.height * self.width


def rope_positions(
    num_tokens: int, grids: Sequence[Grid], *, fractions: bool = False
) -> tuple[np.ndarray, int | float]:
    """Returns the positions of a prompt, and the offset of generated tokens.

    Args:
        num_tokens: Tokens of the prompt.
        grids: In the order of the prompt.
        fractions: True if frames of a video may lie between two positions.

    Returns:
        ``[3, num_tokens]`` int32 (float32 with `fractions`), and the delta: a token at index
        i >= num_tokens has i + delta.
    """
    number, dtype = (float, np.float32) if fractions else (int, np.int32)
    positions = np.empty((3, num_tokens), dtype=dtype)
    done, following = 0, number(0)  # prompt positions, and the next RoPE position
    for grid in grids:
        text = grid.offset - done
        positions[:, done : grid.offset] = following + np.arange(text)
        following += text
        patch = np.indices((grid.frames, grid.height, grid.width)).reshape(3, -1).astype(np.float64)
        patch[0] *= grid.seconds
        if not fractions:
            patch[0] = np.floor(patch[0])
        done = grid.offset + grid.length
        positions[:, grid.offset : done] = following + patch
        following = number(positions[:, grid.offset : done].max()) + 1
    positions[:, done:] = following + np.arange(num_tokens - done)
    following += num_tokens - done
    return positions, following - num_tokens
