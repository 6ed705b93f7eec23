"""Digests: names of prefixes that mean the same in every process.

A block's digest covers everything that its content depends on: the model and the layout of its
cache, the salt (and in it the adapter), and all tokens up to its end. Media count by their content.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from hashlib import blake2b

DIGEST_BYTES = 16

#: Token id -> (key of a media item, position in it), for ids of media; None if it is unknown.
MediaContent = Callable[[int], tuple[bytes, int] | None]

# Ids from here on stand for media, and mean nothing in another process.
_FIRST_MEDIA_ID = 1 << 31


def root_digest(identity: bytes, salt: str | None) -> bytes:
    """The digest of the empty prefix.

    Args:
        identity: Of the model and its cache.
        salt: The salt of a request; names the format of the cache and the adapter, too.
    """
    text = b"-" if salt is None else b"+" + salt.encode("utf-8", "surrogatepass")
    return blake2b(identity + text, digest_size=DIGEST_BYTES).digest()


def next_digest(before: bytes, tokens: bytes, media_content: MediaContent) -> bytes | None:
    """The digest after one more block; None if it has media whose content is unknown.

    Args:
        before: The digest of the prefix before the block.
        tokens: The tokens of the block, 4 bytes each.
    """
    ids = array("I", tokens)
    if max(ids) < _FIRST_MEDIA_ID:
        return blake2b(before + tokens, digest_size=DIGEST_BYTES).digest()
    state = blake2b(before, digest_size=DIGEST_BYTES)
    for token in ids:
        if token < _FIRST_MEDIA_ID:
            state.update(b"t%d" % token)
            continue
        content = media_content(token)
        if content is None:
            return None
        key, position = content
        state.update(b"m%d:%d:" % (position, len(key)) + key)
    return state.digest()
