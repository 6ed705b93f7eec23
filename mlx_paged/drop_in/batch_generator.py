"""What stands in for mlx-lm's `BatchGenerator`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from typing import Any

from mlx_lm.models import cache as mlx_lm_cache

from mlx_paged.drop_in.batch import PagedBatch, row_of
from mlx_paged.drop_in.batch_rows import Choice
from mlx_paged.drop_in.caches import prompt_cache, sequence_of
from mlx_paged.drop_in.registry import store_for


def batch_generator(original: Any) -> Any:
    """For `mlx_lm.generate.BatchGenerator`.

    The class is mlx-lm's own but for the sequences that the model's store takes: those run in a
    `PagedBatch`. Sequences with caches of other kinds, and models without a store, run as ever, in
    the same generator.
    """
    from mlx_lm.generate import GenerationBatch, PromptProcessingBatch

    class BatchGenerator(original):  # type: ignore[misc]
        def __init__(self, model: Any, **options: Any) -> None:
            super().__init__(model, **options)
            own_caches = inspect.unwrap(mlx_lm_cache.make_prompt_cache)(model, self.max_kv_size)
            store = store_for(model, own_caches)
            self._paged = (
                None
                if store is None
                else PagedBatch(
                    store,
                    prompt_response=PromptProcessingBatch.Response,
                    token_response=GenerationBatch.Response,
                    counters=self._counters,
                    max_rows=self.completion_batch_size,
                    max_prompts=self.prefill_batch_size,
                    chunk_size=self.prefill_step_size,
                )
            )

        def insert_segments(
            self,
            segments: list[list[list[int]]],
            max_tokens: list[int] | None = None,
            caches: list[Any] | None = None,
            all_tokens: list[list[int]] | None = None,
            *args: Any,
            **kwargs: Any,
        ) -> list[int]:
            segments, caches, all_tokens = _with_last_tokens(segments, caches, all_tokens)
            uids: list[int] = super().insert_segments(
                segments, max_tokens, caches, all_tokens, *args, **kwargs
            )
            if self._paged is not None:
                queue = self._unprocessed_sequences
                for entry in [queue.pop() for _ in uids][::-1]:
                    uid, prompt, limit, cache, tokens, sampler, processors, stops = entry
                    choice = Choice(limit, sampler, processors, stops)
                    row = row_of(uid, prompt, cache, tokens, choice, self._paged.store)
                    if row is None:
                        queue.append(entry)
                    else:
                        self._paged.add(row)
            return uids

        def _next(self) -> tuple[list[Any], list[Any]]:
            if self._paged is None:
                return super()._next()
            prompts, tokens = self._paged.next()
            if self._unprocessed_sequences or self._prompt_batch or self._generation_batch:
                more_prompts, more_tokens = super()._next()
                return prompts + more_prompts, tokens + more_tokens
            return prompts, tokens

        def _find_uids(self, uids: Iterable[int]) -> dict[int, tuple[int, int]]:
            found = super()._find_uids(uids)
            return {**found, **self._paged.find(uids)} if self._paged is not None else found

        def extract_cache(self, uids: Iterable[int]) -> dict[int, Any]:
            rows = self._paged.rows(uids) if self._paged is not None else []
            found = {row.uid: (prompt_cache(row.sequence.fork()), row.tokens) for row in rows}
            return {**super().extract_cache(set(uids) - set(found)), **found}

        def remove(self, uids: Iterable[int], return_prompt_caches: bool = False) -> Any:
            uids = set(uids)
            caches = self.extract_cache(uids) if return_prompt_caches else {}
            if self._paged is not None:
                ours = self._paged.find(uids)
                self._paged.remove(ours)
                uids -= ours.keys()
            super().remove(uids)
            return caches

        @property
        def prompt_cache_nbytes(self) -> int:
            nbytes = super().prompt_cache_nbytes
            return nbytes + (self._paged.nbytes if self._paged is not None else 0)

    BatchGenerator.__doc__ = original.__doc__
    BatchGenerator.__qualname__ = original.__qualname__
    return BatchGenerator


def _with_last_tokens(
    segments: list[list[list[int]]],
    caches: list[Any] | None,
    all_tokens: list[list[int]] | None,
) -> tuple[list[list[list[int]]], list[Any] | None, list[list[int]] | None]:
    """Gives sequences whose prompt is in their cache to the last token something to compute.

    Only computing a token says what follows it, so the cache gives the last one back.
    """
    if caches is None or len(caches) != len(segments):
        return segments, caches, all_tokens
    if all_tokens is not None and len(all_tokens) != len(segments):
        return segments, caches, all_tokens
    segments, caches = list(segments), list(caches)
    texts = [[] for _ in segments] if all_tokens is None else list(all_tokens)
    for i, (segment, cache) in enumerate(zip(segments, caches)):
        sequence = sequence_of(cache) if cache else None
        is_empty = all(c.empty() for c in cache or ()) if sequence is None else not sequence.offset
        if any(segment) or is_empty:
            continue
        if sequence is not None and len(sequence.trail):
            shorter = sequence.fork()
            segments[i] = [[shorter.trail.last()]]
            shorter.trim_all(1)
            caches[i], texts[i] = prompt_cache(shorter), texts[i][:-1]
        elif texts[i] and mlx_lm_cache.can_trim_prompt_cache(cache):
            caches[i] = copy.deepcopy(cache)
            mlx_lm_cache.trim_prompt_cache(caches[i], 1)
            segments[i], texts[i] = [texts[i][-1:]], texts[i][:-1]
        elif texts[i]:  # what cannot be trimmed is computed again
            segments[i], caches[i], texts[i] = [texts[i]], None, []
    return segments, caches, texts
