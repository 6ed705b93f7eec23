"""Media in the state half: where a prompt holds pictures, clips and sounds, and the ids that stand
for them in the prefix tree.

The tokens of all pictures are alike: a placeholder for each position. So the prefix tree is given
other ids for them, which belong to the content::

      prompt     [ 9  4 | P  P  P  P  P | 7 | P  P  P  P  P ]     P: the placeholder
      media              cat, 5 positions      dog, 5 positions
      the tree   [ 9  4 | c c+1 .... c+4 | 7 | d d+1 .... d+4 ]   c, d >= 2**31
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from mlx_paged.core.kv.tree import TOKEN_TYPE
from mlx_paged.errors import InvalidParameterError

#: Ids of media in the prefix tree begin here; no vocabulary is so large.
FIRST_MEDIA_ID = 1 << 31

#: Contents whose ids are remembered.
MAX_MEDIA_KEYS = 1 << 14

_KEY_BYTES = 32


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

    def __post_init__(self) -> None:
        for name, least in (("offset", 0), ("length", 1), ("num_rows", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                expected = f"an integer of at least {least}"
                raise InvalidParameterError(f"media.{name}", expected, value)
        if self.num_rows > self.length:
            expected = f"at most its length ({self.length})"
            raise InvalidParameterError("media.num_rows", expected, self.num_rows)
        if not isinstance(self.key, bytes) or len(self.key) != _KEY_BYTES:
            raise InvalidParameterError("media.key", f"{_KEY_BYTES} bytes", self.key)
        if not isinstance(self.is_atomic, bool):
            raise InvalidParameterError("media.is_atomic", "True or False", self.is_atomic)

    @property
    def end(self) -> int:
        """The position after its last one."""
        return self.offset + self.length


class PromptMedia:
    """The media items of a prompt.

    Args:
        spans: ascending and disjoint.
        num_prompt_tokens: they lie within these.
        salt: of the request; requests of different salts share no features either.

    Attributes:
        spans: The items.
        keys: For each the key of its features.
        atomic: (first position, the one after the last) of the atomic ones.

    Raises:
        InvalidParameterError: the spans are not as they must be.
    """

    def __init__(self, spans: Sequence[MediaSpan], num_prompt_tokens: int, salt: str | None):
        self.spans = tuple(spans)
        end = 0
        for span in self.spans:
            if not isinstance(span, MediaSpan):
                raise InvalidParameterError("media", "MediaSpans", span)
            if span.offset < end:
                expected = f"at least {end}, where the item before it ends"
                raise InvalidParameterError("media.offset", expected, span.offset)
            end = span.end
        if end > num_prompt_tokens:
            expected = f"within the prompt's {num_prompt_tokens} tokens"
            raise InvalidParameterError("media", expected, self.spans[-1])
        suffix = b"" if salt is None else salt.encode("utf-8", "surrogatepass")
        self.keys = tuple(span.key + suffix for span in self.spans)
        self.atomic = tuple((span.offset, span.end) for span in self.spans if span.is_atomic)
        self._offsets = [span.offset for span in self.spans]
        self._ends = [span.end for span in self.spans]

    def between(self, start: int, end: int) -> range:
        """The items that have positions in ``[start, end)``."""
        return range(bisect_right(self._ends, start), bisect_left(self._offsets, end))

    def num_before(self, position: int) -> int:
        """Leading items that end before a position, or at it."""
        return bisect_right(self._ends, position)


def outside(atomic: Sequence[tuple[int, int]], position: int) -> int:
    """A position, or the first one of the atomic span that it is in the middle of."""
    if not atomic:
        return position
    place = bisect_left(atomic, (position,)) - 1  # the last span that begins before it
    return atomic[place][0] if place >= 0 and position < atomic[place][1] else position


class MediaIdsExhaustedError(Exception):
    """All ids have been given out."""


class MediaIds:
    """Gives each content a range of ids that no other content has or had.

    The least recently used content is forgotten. It gets other ids when it comes again: its blocks
    are not found any more, but never taken for those of another one.

    Args:
        most_keys: contents that are remembered.
        num_ids: ids that there are.
    """

    def __init__(self, most_keys: int = MAX_MEDIA_KEYS, num_ids: int = 1 << 31) -> None:
        self._most_keys = most_keys
        self._num_ids = num_ids
        self._next = 0
        self._bases: OrderedDict[tuple[bytes, int], int] = OrderedDict()

    def __len__(self) -> int:
        """Contents that are remembered."""
        return len(self._bases)

    def base(self, key: bytes, length: int) -> int:
        """The first id of a content of so many positions.

        Raises:
            MediaIdsExhaustedError: there are no more.
        """
        base = self._bases.get((key, length))
        if base is not None:
            self._bases.move_to_end((key, length))
            return base
        if self._next + length > self._num_ids:
            raise MediaIdsExhaustedError
        base = FIRST_MEDIA_ID + self._next
        self._next += length
        self._bases[key, length] = base
        if len(self._bases) > self._most_keys:
            self._bases.popitem(last=False)
        return base

    def clear(self) -> None:
        """Begins anew; nothing may hold ids of before."""
        self._bases.clear()
        self._next = 0

    def prompt_ids(self, token_ids: Sequence[int], spans: Sequence[MediaSpan]) -> array[int]:
        """The tokens of a prompt as the prefix tree is given them.

        Raises:
            MediaIdsExhaustedError: there are no more ids.
        """
        ids = array(TOKEN_TYPE, token_ids)
        for span in spans:
            base = self.base(span.key, span.length)
            ids[span.offset : span.end] = array(TOKEN_TYPE, range(base, base + span.length))
        return ids


class TreeTokens(Sequence[int]):
    """The live tokens of a sequence with media, as the prefix tree is given them.

    Args:
        prompt: `MediaIds.prompt_ids` of its request.
        tokens: the real tokens, prompt and answer.
    """

    __slots__ = ("_prompt", "_tokens")

    def __init__(self, prompt: array[int], tokens: array[int]) -> None:
        self._prompt = prompt
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> array[int]: ...
    def __getitem__(self, index: int | slice) -> int | array[int]:
        prompt, tokens = self._prompt, self._tokens
        if not isinstance(index, slice):
            place = index if index >= 0 else index + len(tokens)
            return prompt[place] if 0 <= place < len(prompt) else tokens[index]
        start, stop, step = index.indices(len(tokens))
        assert step == 1
        if start >= len(prompt):
            return tokens[start:stop]
        if stop <= len(prompt):
            return prompt[start:stop]
        return prompt[start:] + tokens[len(prompt) : stop]
