"""PrefixIndex: what a replica has probably cached, known without tokenizing.

A request's text is cut into chunks, and each beginning that ends with a chunk has a digest. A
replica's index remembers the digests of the requests that were sent to it, so it is a prefix tree
whose nodes are found by their digests. It is approximate: the replica may have evicted a prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from pydantic_core import to_json

# Minimum bytes of a chunk: about a block of tokens.
_MIN_CHUNK = 64
# A chunk has this part of the text before it, so a long conversation has a few hundred chunks.
_GROWTH = 64
_DIGEST_BYTES = 8
# Fields of a body that its prompt begins with, in the order in which templates render them.
_FIELDS = (
    *("model", "cache_salt", "chat_template_kwargs", "tools", "system", "instructions"),
    *("prompt", "input", "messages"),
)


@dataclass(frozen=True)
class Prefix:
    """The beginnings of one request's text.

    Attributes:
        digests: Digest of each beginning that ends with a chunk, from the shortest to the longest.
        ends: Bytes of each of these beginnings.
        num_bytes: Bytes of the whole text.
    """

    digests: Sequence[bytes]
    ends: Sequence[int]
    num_bytes: int

    def share(self, num_chunks: int) -> float:
        """Returns the share of the text, from 0 to 1, that its first chunks have."""
        return self.ends[num_chunks - 1] / self.num_bytes if num_chunks else 0.0


def prefix_of(body: dict[str, Any]) -> Prefix:
    """Returns the beginnings of a request's text.

    Args:
        body: A request of any API. Its model and salt are part of the text, as they are of the
            identity of KV blocks.
    """
    parts = []
    for name in _FIELDS:
        value = body.get(name)
        if value is not None:
            # A longer list of messages goes on where the bracket would be.
            parts.append(name.encode() + to_json(value).removesuffix(b"]"))
    return _cut(b"\0".join(parts))


def _cut(text: bytes) -> Prefix:
    running = blake2b(digest_size=_DIGEST_BYTES)
    digests: list[bytes] = []
    ends: list[int] = []
    start = 0
    while (end := start + max(_MIN_CHUNK, start // _GROWTH)) <= len(text):
        running.update(text[start:end])
        digests.append(running.copy().digest())
        ends.append(end)
        start = end
    return Prefix(digests, ends, len(text))


class PrefixIndex:
    """The prefixes that one replica has computed.

    Args:
        capacity: Maximum chunks; the ends of the least recently used prefixes go first.
    """

    def __init__(self, capacity: int = 1 << 16) -> None:
        self._capacity = capacity
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._digests)

    def match(self, prefix: Prefix) -> int:
        """Returns how many chunks at the beginning of a text are known."""
        for index, digest in enumerate(prefix.digests):
            if digest not in self._digests:
                return index
        return len(prefix.digests)

    def add(self, prefix: Prefix) -> None:
        """Remembers a text that the replica computes."""
        for digest in reversed(prefix.digests):  # A beginning is used later than what follows it.
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > self._capacity:
            self._digests.popitem(last=False)

    def clear(self) -> None:
        """Forgets everything."""
        self._digests.clear()
