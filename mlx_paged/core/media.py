"""Media in the state half: where a prompt holds pictures, clips and sounds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MediaSpan:
    """The positions of one media item in a prompt.

    Attributes:
        offset: First position.
        length: Positions up to its last row; text may be among them.
        key: 32 bytes, the digest of source bytes, processor settings and grid: items of equal keys
            have equal content.
        num_rows: Positions that the tower writes; what encoding it costs a step.
        is_atomic: Its positions see each other, so they are computed in one step, and come from the
            prefix cache all or not at all.
    """

    offset: int
    length: int
    key: bytes
    num_rows: int
    is_atomic: bool = False
