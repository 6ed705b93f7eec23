"""PrefixNames: names the blocks of a KV manager so that other processes can find them."""

from __future__ import annotations

from mlx_paged.core import PrefixNode, PrefixQuery
from mlx_paged.core.kv.tier import TierOwner
from mlx_paged.core.kv.tree import TOKEN_BYTES
from mlx_paged.offload.digests import next_digest, root_digest


class PrefixNames:
    """Makes the digests of prefixes, see `mlx_paged.offload.digests`.

    Args:
        identity: Digest of the model and its cache.
    """

    def __init__(self, identity: bytes, block_size: int, owner: TierOwner) -> None:
        self._identity = identity
        self._key_bytes = block_size * TOKEN_BYTES
        self._owner = owner
        self._roots: dict[str | None, bytes] = {}

    def of_query(self, query: PrefixQuery, index: int) -> bytes | None:
        """Returns the digest after block `index` of a query; None if it is unknown."""
        digests, size = query.digests, self._key_bytes
        while len(digests) <= index:
            before = digests[-1] if digests else self._root(query.salt)
            begin = len(digests) * size
            tokens = query.tokens[begin : begin + size]
            digest = next_digest(before, tokens, self._owner.media_content)
            if len(tokens) < size or digest is None:
                return None
            digests.append(digest)
        return digests[index]

    def name(self, tip: PrefixNode) -> int:
        """Gives the nodes up to `tip` their digests; returns how many have one."""
        unnamed, node = [], tip
        while node.parent is not None and node.digest is None:
            unnamed.append(node)
            node = node.parent
        digest = node.digest if node.parent is not None else self._root(tip.salt)
        for each in reversed(unnamed):
            assert digest is not None
            digest = next_digest(digest, each.key, self._owner.media_content)
            if digest is None:
                return each.depth - 1
            each.digest = digest
        return tip.depth

    def _root(self, salt: str | None) -> bytes:
        if salt not in self._roots:
            if len(self._roots) > 1024:  # salts of many users
                self._roots.clear()
            self._roots[salt] = root_digest(self._identity, salt)
        return self._roots[salt]
