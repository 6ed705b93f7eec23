"""PrefixIndex: estimates what a replica has cached, without tokenizing.

A request's text is cut into chunks, and every prefix that ends at a chunk gets a digest. An index
holds the digests of all requests sent to one replica: a prefix tree whose nodes are looked up by
digest. It is approximate, because the replica may have evicted a prefix.
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
# A chunk grows to 1/_GROWTH of the text before it, so a long conversation has a few hundred.
_GROWTH = 64
_DIGEST_BYTES = 8
# Body fields that form the prompt, in the order in which chat templates render them.
_FIELDS = (
    *("model", "cache_salt", "chat_template_kwargs", "tools", "system", "instructions"),
    *("prompt", "input", "messages"),
)


@dataclass(frozen=True)
class Prefix:
    """The chunked text of one request.

    Attributes:
        digests: Digest of each prefix that ends at a chunk, shortest first.
        ends: Length of each of these prefixes in bytes.
        num_bytes: Length of the whole text in bytes.
    """

    digests: Sequence[bytes]
    ends: Sequence[int]
    num_bytes: int

    def share(self, num_chunks: int) -> float:
        """Returns the share of the text, from 0 to 1, that its first `num_chunks` chunks cover."""
        return self.ends[num_chunks - 1] / self.num_bytes if num_chunks else 0.0


def prefix_of(body: dict[str, Any]) -> Prefix:
    """Chunks the text of a request.

    Args:
        body: The body of any API. Model and salt are part of the text, because KV blocks depend on
            them too.
    """
    parts = []
    for name in _FIELDS:
        value = body.get(name)
        if value is not None:
            # A longer list of messages continues where the bracket would be.
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
        capacity: Maximum chunks; evicts the tails of the least recently used prefixes first.
    """

    def __init__(self, capacity: int = 1 << 16) -> None:
        self._capacity = capacity
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._digests)

    def match(self, prefix: Prefix) -> int:
        """Returns the number of leading chunks of a text that are known."""
        for index, digest in enumerate(prefix.digests):
            if digest not in self._digests:
                return index
        return len(prefix.digests)

    def add(self, prefix: Prefix) -> None:
        """Adds a text that the replica is about to compute."""
        for digest in reversed(prefix.digests):  # Shorter prefixes are evicted last.
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > self._capacity:
            self._digests.popitem(last=False)

    def clear(self) -> None:
        """Forgets everything."""
        self._digests.clear()
