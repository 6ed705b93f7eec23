"""PromptHistory: explains prefix cache misses by comparing a prompt with earlier prompts."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from mlx_paged.core.kv.tree import TOKEN_TYPE, common_prefix_len, token_bytes
from mlx_paged.core.media import FIRST_MEDIA_ID

# Maximum prompts to remember, and their total tokens.
_MAX_PROMPTS = 64
_MAX_TOKENS = 1 << 21
# Tokens of each prompt to report where two differ.
_NUM_TOLD = 8


class MissReason(StrEnum):
    """Reason why tokens of a prompt were computed although they could have been cached."""

    NEVER_SEEN = "never_seen"
    EVICTED = "evicted"  # seen, but no longer kept, or not in all groups
    COMPUTED_FASTER = "computed_faster"  # kept, but restoring it would take longer
    SALT = "salt"  # seen under another cache salt
    ADAPTER = "adapter"  # seen with another adapter
    MEDIA = "media"  # the first difference is in an image, video or audio item
    FORMAT = "format"  # kept on disk only in another format of the cache
    TRANSFER = "transfer"  # the prefill engine failed to send it


@dataclass(frozen=True)
class CacheMiss:
    """Explains why part of a prompt was not cached, and where it departs from the closest earlier
    prompt.

    Attributes:
        num_cached_tokens: Its tokens that came from the cache.
        num_shared_tokens: Leading tokens that it shares with the closest earlier prompt and answer.
        given: Its next tokens; ids of media are process-local.
        earlier: The next tokens of the earlier prompt; empty if that ends there.
        detail: Error of a failed transfer.
    """

    reason: MissReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_shared_tokens: int
    given: tuple[int, ...]
    earlier: tuple[int, ...]
    detail: str = ""

    def for_client(self) -> CacheMiss:
        """Returns the explanation for the prompt's sender, without the contents of other prompts
        and the names of other machines.

        Salts separate users, so a prompt under another salt counts as never seen.
        """
        if self.reason is MissReason.SALT:
            return replace(
                self, reason=MissReason.NEVER_SEEN, num_shared_tokens=0, given=(), earlier=()
            )
        return replace(self, earlier=(), detail="")

    def __str__(self) -> str:
        if self.reason is MissReason.TRANSFER:
            why = self.detail or "another server was to compute it"
            return f"{self.reason}: {why}; {self.num_cached_tokens:,} came from the cache"
        if not self.num_shared_tokens:
            return f"{self.reason}: {self.num_prompt_tokens:,} tokens, unlike any prompt before"
        text = (
            f"{self.reason}: shares the first {self.num_shared_tokens:,} of "
            f"{self.num_prompt_tokens:,} tokens with an earlier prompt"
        )
        if self.given:
            text += f"; differs at {self.num_shared_tokens:,}: {list(self.given)}"
        if self.earlier:
            text += f" instead of {list(self.earlier)}"
        return text + f"; {self.num_cached_tokens:,} came from the cache"


@dataclass(frozen=True)
class _Seen:
    tokens: Sequence[int]  # a live list: the answer counts, too
    salt: str | None
    adapter: Hashable | None


class PromptHistory:
    """The latest prompts with their answers, and the number of misses by reason.

    Attributes:
        counts: Number of misses of each reason.
        has_other_formats: True if the disk has blocks of this model, but in other formats.
    """

    def __init__(self) -> None:
        self.counts: Counter[MissReason] = Counter()
        self.has_other_formats = False
        self._seen: deque[_Seen] = deque()

    def note(
        self,
        prompt: Sequence[int],
        salt: str | None,
        adapter: Hashable | None,
        *,
        num_cached: int,
        num_refused: int = 0,
        transfer_failure: str | None = None,
        block_size: int,
    ) -> CacheMiss | None:
        """Remembers an admitted prompt; returns why it was not cached, if it was not.

        Args:
            prompt: The live tokens of its sequence, with ids of media.
            num_cached: Its leading tokens that came from the cache.
            num_refused: Tokens after these that are stored, but computed because that is faster.
            transfer_failure: Why a prefill engine did not send its blocks, if it was asked.
            block_size: Tokens of a block. Fewer tokens are not a miss.
        """
        found = None
        # All full blocks before the last token could have been cached.
        if (len(prompt) - 1) // block_size * block_size > num_cached:
            found = self._explain(prompt, salt, adapter, num_cached, block_size)
            if transfer_failure is not None:
                found = replace(found, reason=MissReason.TRANSFER, detail=transfer_failure)
            elif num_refused:
                found = replace(found, reason=MissReason.COMPUTED_FASTER)
            self.counts[found.reason] += 1
        self._seen.append(_Seen(prompt, salt, adapter))
        num_tokens = sum(len(each.tokens) for each in self._seen)
        while len(self._seen) > _MAX_PROMPTS or (num_tokens > _MAX_TOKENS and len(self._seen) > 1):
            num_tokens -= len(self._seen.popleft().tokens)
        return found

    def _explain(
        self,
        prompt: Sequence[int],
        salt: str | None,
        adapter: Hashable | None,
        num_cached: int,
        block_size: int,
    ) -> CacheMiss:
        own = token_bytes(prompt[: len(prompt)])
        closest: dict[MissReason, tuple[int, _Seen]] = {}
        for each in reversed(self._seen):
            kind = MissReason.EVICTED
            if each.adapter != adapter:
                kind = MissReason.ADAPTER
            elif each.salt != salt:
                kind = MissReason.SALT
            (best, _), tokens = closest.get(kind, (0, None)), each.tokens
            # One token rules out most prompts. Comparing all 64 completely would take longer than
            # scheduling the new one.
            if min(len(prompt), len(tokens)) <= best or tokens[best] != prompt[best]:
                continue
            length = _num_shared(own, tokens)
            if length > best:
                closest[kind] = length, each
        reason, shared, earlier = MissReason.NEVER_SEEN, 0, None
        for kind in (MissReason.EVICTED, MissReason.SALT, MissReason.ADAPTER):
            length, seen = closest.get(kind, (0, None))
            if length > shared:
                shared, earlier = length, seen
                if length // block_size * block_size > num_cached:
                    reason = kind
        if reason is MissReason.NEVER_SEEN:
            given = prompt[shared : shared + 1]
            before = () if earlier is None else earlier.tokens[shared : shared + 1]
            if any(token >= FIRST_MEDIA_ID for token in (*given, *before)):
                reason = MissReason.MEDIA if len(given) and len(before) else reason
            elif self.has_other_formats and not shared:
                reason = MissReason.FORMAT
        end = shared + _NUM_TOLD
        return CacheMiss(
            reason,
            len(prompt),
            num_cached,
            shared,
            tuple(prompt[shared:end]),
            () if earlier is None else tuple(earlier.tokens[shared:end]),
        )


def _num_shared(own: bytes, tokens: Sequence[int]) -> int:
    """Returns the number of leading tokens that two prompts share."""
    other = tokens if isinstance(tokens, array) else array(TOKEN_TYPE, tokens[: len(tokens)])
    # An array does not grow while a view of it exists.
    with memoryview(other) as view, view.cast("B") as content:
        return common_prefix_len(own, content)
