"""PrefixSharing: lets waiting sequences reuse prefixes that running ones are computing."""

from __future__ import annotations

from collections.abc import Mapping

from mlx_paged.core.kv.manager import KVManager
from mlx_paged.core.kv.tables import BlockTables
from mlx_paged.core.kv.tree import PrefixQuery
from mlx_paged.core.request import Request, Sequence


class PrefixSharing:
    """Finds the running sequence that a waiting one should fork, or wait for.

    Args:
        requests: The scheduler's unfinished requests, by id. Others may use its KV manager, too.
    """

    def __init__(self, kv: KVManager, requests: Mapping[str, Request]) -> None:
        self._kv = kv
        self._requests = requests

    def query(self, seq: Sequence) -> PrefixQuery:
        """Returns a waiting sequence's prefix cache search; it resumes where it stopped."""
        limit = seq.request.next_boundary(seq.request.num_parent_tokens) or len(seq.tokens) - 1
        if seq.query is None or seq.query.num_tokens != limit:
            media = seq.request.prompt_media
            seq.query = PrefixQuery(
                seq.tree_tokens,
                seq.request.cache_salt,
                limit=limit,
                atomic=() if media is None else media.atomic,
            )
        return seq.query

    def extend(self, seq: Sequence, stop: int | None) -> int:
        """Gives a running sequence cached tokens past its scheduled ones.

        Args:
            stop: End of the search; None means all tokens but the last.

        Returns:
            Number of tokens that need no computation, scheduled ones included.
        """
        assert seq.tables is not None
        query = PrefixQuery(seq.tree_tokens, seq.request.cache_salt, limit=stop)
        return self._kv.extend_cached(seq.tables, query, seq.num_scheduled_tokens)

    def is_still_blocked(self, seq: Sequence) -> bool:
        """True if nothing changed since the sequence last found no room."""
        if seq.blocked_at != self._kv.num_freed:
            return False
        query = self.query(seq)
        before = query.depth
        self._kv.match(query)
        return query.depth <= before  # otherwise more of its prompt is now cached

    def awaited(self, seq: Sequence) -> tuple[BlockTables, int] | None:
        """Returns (tables, num_tokens) of the running sequence that `seq` should wait for, or None.

        That sequence computes the tokens that `seq` needs next; the two diverge after `num_tokens`.
        """
        request = seq.request
        num_prompt_tokens = request.num_prompt_tokens
        reads_cache = request.read_prefix_cache and self._kv.enable_prefix_caching
        source = self._prompt_source(request)
        if source is not None:
            assert source.tables is not None
            if source.num_computed_tokens >= num_prompt_tokens:
                return None  # it can fork the sibling now
            # One sibling computes the prompt and the others fork it, unless the whole prompt is
            # cached. Without the cache, a sibling that outputs one token ends before it can be
            # forked.
            if not reads_cache:
                is_worthwhile = request.max_output_tokens > 1
            else:
                found = self._kv.match(self.query(seq)).num_tokens(self._kv.block_size)
                is_worthwhile = found < num_prompt_tokens - 1
            return (source.tables, num_prompt_tokens) if is_worthwhile else None
        if not reads_cache:
            return None
        query = self.query(seq)
        tables = self._kv.prefixes.computing_next_block(seq.tree_tokens, query)
        # A sequence of a lower class may starve, and one of another user of the KV manager gives no
        # notice when it ends; do not wait for these.
        if tables is None or not self._owns(tables) or tables.owner.order[0] > seq.order[0]:
            return None
        return tables, self._kv.prefixes.part_after(tables, query)

    def _owns(self, tables: BlockTables) -> bool:
        """True if a sequence of the scheduler has these tables."""
        owner = tables.owner
        if not isinstance(owner, Sequence):
            return False
        return self._requests.get(owner.request.request_id) is owner.request

    def fork_source(self, request: Request) -> Sequence | None:
        """Returns a running sibling whose committed blocks hold the whole prompt."""
        source = self._prompt_source(request)
        # A source admitted in this very step has a pending copy. It can hold a whole prompt only if
        # the tree does; the manager then prefers the tree.
        if source is None or source.num_computed_tokens < request.num_prompt_tokens:
            return None
        return source

    def _prompt_source(self, request: Request) -> Sequence | None:
        """Returns the running sibling to fork, now or once it has computed the prompt."""
        if request.n == 1 or not self._kv.prefixes.keeps_last_token_forkable(
            request.num_prompt_tokens
        ):
            return None
        source = request.prompt_source
        if source is None or not self._may_be_forked(source):
            # Rare: the previous source ended, was preempted, or its window slid past the prompt.
            candidates = [s for s in request.sequences if self._may_be_forked(s)]
            source = max(candidates, key=lambda s: s.num_computed_tokens, default=None)
            request.prompt_source = source
        return source

    def _may_be_forked(self, seq: Sequence) -> bool:
        """True if a sequence runs and its windows still cover the end of the prompt."""
        return seq.tables is not None and (
            self._kv.prefixes.can_fork(seq.tables, seq.request.num_prompt_tokens - 1)
        )
