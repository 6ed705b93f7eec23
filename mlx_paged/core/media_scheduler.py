"""MediaScheduler: fits a step's prompt chunks to the images, videos and audio in prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mlx_paged.core.config import SchedulerConfig
from mlx_paged.core.encoder_cache import EncoderCache
from mlx_paged.core.kv.manager import KVManager
from mlx_paged.core.media import PromptMedia, outside
from mlx_paged.core.request import Request, Sequence
from mlx_paged.errors import InvalidParameterError


class MediaScheduler:
    """Ends chunks where media items allow it, and keeps features until their rows are computed.

    Args:
        begin: Prepares `encoder_cache` for the step being built. Called only for steps with items.

    Attributes:
        encoder_cache: Bookkeeping for features on the device.
    """

    def __init__(self, config: SchedulerConfig, kv: KVManager, begin: Callable[[], None]) -> None:
        self.encoder_cache = EncoderCache(
            config.encoder_cache_bytes,
            config.max_num_encoder_tokens or config.max_num_batched_tokens,
            config.encoder_bytes_per_row,
        )
        self._config = config
        self._kv = kv
        self._begin = begin

    # Requests.

    def check_atomic(self, media: PromptMedia) -> None:
        """Rejects atomic items that do not fit in one step.

        Raises:
            InvalidParameterError: An item is too long.
        """
        longest = max((end - start for start, end in media.atomic), default=0)
        name, limit = "max_num_batched_tokens", self._config.max_num_batched_tokens
        of_windows = self._kv.max_atomic_tokens()
        if of_windows is not None and of_windows < limit:
            name, limit = "the KV cache of its sliding windows", of_windows
        if longest > limit:
            expected = (
                f"items of at most {limit} positions, which are computed in one step ({name})"
            )
            raise InvalidParameterError("media", expected, longest)

    def name_items(self, request: Request) -> None:
        """Assigns prefix tree ids to the media of a request.

        Raises:
            MediaIdsExhaustedError: No ids are left. Empty the prefix cache and call `rename_items`.
        """
        media = request.prompt_media
        if media is not None:
            ids = self._kv.media_ids.prompt_ids(request.prompt_token_ids, media.spans)
            request.tree_prompt = ids

    def rename_items(self, requests: Iterable[Request]) -> None:
        """Restarts the ids, and assigns new ones to the media of these requests."""
        self._kv.media_ids.clear()
        for request in requests:
            media = request.prompt_media
            if media is not None and request.tree_prompt is not None:
                ids = self._kv.media_ids.prompt_ids(request.prompt_token_ids, media.spans)
                request.tree_prompt[:] = ids

    def release(self, seq: Sequence) -> None:
        """Gives up the item that a sequence has begun."""
        assert seq.pinned_features is not None
        self.encoder_cache.unpin(seq.pinned_features)
        seq.pinned_features = None

    # Steps.

    def fits_whole(self, media: PromptMedia) -> bool:
        """True if the step may encode all items of a prompt."""
        self._begin()
        items = range(len(media.spans))
        return self.encoder_cache.num_affordable(media, items, whole=True) == len(items)

    def chunk(self, seq: Sequence, num_tokens: int, budget: int, prompt_budget: int) -> int:
        """Returns the tokens of a chunk that the step can compute.

        The chunk ends before the first item that the step may not encode, and never splits an
        atomic item. An atomic item at the start of the step's first chunk may exceed the budget
        that the decodes leave.

        Args:
            budget: Tokens left in the step.
            prompt_budget: Tokens that the decodes left.
        """
        media = seq.request.prompt_media
        assert media is not None
        if num_tokens <= 0:
            return 0
        start = seq.num_scheduled_tokens
        end = outside(media.atomic, start + num_tokens)
        if end <= start < start + num_tokens:
            end = next(end for _, end in media.atomic if end > start)
            if end - start > budget and budget < prompt_budget:
                return 0
        items = media.between(start, end)
        if not items:
            return end - start
        self._begin()
        whole = not self._config.enable_chunked_prefill
        num_items = self.encoder_cache.num_affordable(media, items, whole=whole)
        if num_items < len(items):
            if whole:
                return 0
            end = max(start, media.spans[items[num_items]].offset)
        return end - start

    def use(self, seq: Sequence, start: int, end: int) -> None:
        """Uses the features of items in ``[start, end)``, and pins one that continues past it."""
        media, cache, pinned_features = (
            seq.request.prompt_media,
            self.encoder_cache,
            seq.pinned_features,
        )
        assert media is not None and seq.tables is not None
        self._kv.resume_copy(seq.tables)
        items = media.between(start, end)
        if items:
            self._begin()
            cache.use(media, items, pinned_features)
        seq.pinned_features = None
        if items and media.spans[items[-1]].end > end:
            seq.pinned_features = cache.pin(media.keys[items[-1]])
        if pinned_features is not None:
            cache.unpin(pinned_features)
