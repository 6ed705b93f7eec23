"""Media in the state half: positions of images, video and audio in a prompt, and their ids in the
prefix tree.

All images have the same tokens: one placeholder per position. The prefix tree therefore gets ids
that depend on the content::

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

#: First media id in the prefix tree; above any vocabulary.
FIRST_MEDIA_ID = 1 << 31

#: Maximum number of items whose ids are remembered.
MAX_MEDIA_KEYS = 1 << 14

_KEY_BYTES = 32


@dataclass(frozen=True)
class MediaSpan:
    """The positions of one media item in a prompt.

    Attributes:
        offset: First position.
        length: Positions through the last row; may include text.
        key: 32-byte digest of source bytes, processor settings and grid. Equal keys mean equal
            content.
        num_rows: Positions that the tower writes; the cost of encoding the item.
        is_atomic: True if the positions attend to each other. One step must then compute all of
            them, and the prefix cache provides all or none.
    """

    offset: int
    length: int
    key: bytes
    num_rows: int
    is_atomic: bool = False

    def __post_init__(self) -> None:
        for name, minimum in (("offset", 0), ("length", 1), ("num_rows", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
                expected = f"an integer of at least {minimum}"
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
        """One past the last position."""
        return self.offset + self.length


class RejectedItem(Exception):
    """The encoder refuses an item; the message gives the reason.

    Args:
        key: Key of the item's features.
        reason: Message for the sender of the item.
    """

    def __init__(self, key: bytes, reason: str) -> None:
        super().__init__(reason)
        self.key = key


class PromptMedia:
    """The media items of a prompt.

    Args:
        spans: Ascending and disjoint.
        num_prompt_tokens: Length of the prompt; no span may exceed it.
        salt: Cache salt of the request. Requests with different salts share no features.

    Attributes:
        spans: The items.
        keys: Key of each item's features.
        atomic: (start, end) of each atomic item.

    Raises:
        InvalidParameterError: The spans overlap, are out of order or exceed the prompt.
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
        """Items with positions in ``[start, end)``."""
        return range(bisect_right(self._ends, start), bisect_left(self._offsets, end))

    def num_before(self, position: int) -> int:
        """Returns the number of items that end at or before `position`."""
        return bisect_right(self._ends, position)


def outside(atomic: Sequence[tuple[int, int]], position: int) -> int:
    """Returns the start of the atomic span that `position` splits, or `position` itself."""
    if not atomic:
        return position
    index = bisect_left(atomic, (position,)) - 1  # the last span that begins before it
    return atomic[index][0] if index >= 0 and position < atomic[index][1] else position


class MediaIdsExhaustedError(Exception):
    """All media ids are used up."""


class MediaIds:
    """Assigns each item's content a range of ids that is never reused.

    The least recently used content is forgotten. If it comes back it gets new ids, so its blocks
    are not found, but they never match another item either.

    Args:
        max_keys: Maximum number of remembered items.
        num_ids: Total number of ids.
    """

    def __init__(self, max_keys: int = MAX_MEDIA_KEYS, num_ids: int = 1 << 31) -> None:
        self._max_keys = max_keys
        self._num_ids = num_ids
        self._next = 0
        self._bases: OrderedDict[tuple[bytes, int], int] = OrderedDict()
        self._items: list[tuple[int, int, bytes]] = []  # (first id, length, key), ascending

    def __len__(self) -> int:
        """Returns the number of remembered items."""
        return len(self._bases)

    def base(self, key: bytes, length: int) -> int:
        """Returns the first id of an item with `length` positions.

        Raises:
            MediaIdsExhaustedError: No ids are left.
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
        self._items.append((base, length, key))
        if len(self._bases) > self._max_keys:
            _, forgotten = self._bases.popitem(last=False)
            del self._items[bisect_left(self._items, (forgotten,))]
        return base

    def content(self, token: int) -> tuple[bytes, int] | None:
        """Returns (key, position in the item) of an id; None if the item is forgotten."""
        index = bisect_right(self._items, token, key=lambda item: item[0]) - 1
        if index < 0:
            return None
        base, length, key = self._items[index]
        return (key, token - base) if token < base + length else None

    def clear(self) -> None:
        """Starts over. No earlier id may still be in use."""
        self._bases.clear()
        self._items.clear()
        self._next = 0

    def prompt_ids(self, token_ids: Sequence[int], spans: Sequence[MediaSpan]) -> array[int]:
        """Returns the tokens of a prompt with media ids, for the prefix tree.

        Raises:
            MediaIdsExhaustedError: No ids are left.
        """
        ids = array(TOKEN_TYPE, token_ids)
        for span in spans:
            base = self.base(span.key, span.length)
            ids[span.offset : span.end] = array(TOKEN_TYPE, range(base, base + span.length))
        return ids


class TreeTokens(Sequence[int]):
    """Live view of a sequence's tokens with media ids, for the prefix tree.

    Args:
        prompt: `MediaIds.prompt_ids` of the request.
        tokens: The real tokens, prompt and output.
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
            position = index if index >= 0 else index + len(tokens)
            return prompt[position] if 0 <= position < len(prompt) else tokens[index]
        start, stop, step = index.indices(len(tokens))
        assert step == 1
        if start >= len(prompt):
            return tokens[start:stop]
        if stop <= len(prompt):
            return prompt[start:stop]
        return prompt[start:] + tokens[len(prompt) : stop]
