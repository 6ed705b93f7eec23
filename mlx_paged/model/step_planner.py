"""StepPlanner: builds a step's inputs besides its tokens: plans, rows, and adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from mlx_paged.model import dense_prefill
from mlx_paged.model.caches import LastLayerPruning, PagedLayerCache, Step
from mlx_paged.model.gathered import GatheredLayerCache
from mlx_paged.model.graph_runner import Repeat, Repetition, padded_decodes
from mlx_paged.model.layerwise import layerwise_submit
from mlx_paged.model.layout import FULL, CacheLayout, KVCacheGroupSpec
from mlx_paged.model.media import MediaRows
from mlx_paged.model.plan import (
    PaddedTables,
    StepInputs,
    Tables,
    build_chunk_plan,
    build_plan,
    build_state_plan,
    int32,
)
from mlx_paged.ops import AttentionPlan
from mlx_paged.platform import Platform

_MAX_FIRST_ROWS = 1024  # cached arrays of logit rows: as many as steps may have rows
# Minimum unsampled rows for which the last layer is pruned. Steps of up to 64 rows are executables,
# and pruning fewer rows saves hardly any time.
_MIN_UNSELECTED = 64


class StepPlanner:
    """Builds the `Step` of `StepInputs`.

    Args:
        layout: Contents of the model's caches.
        attention: Its attention caches, once they are allocated.
        pools: Returns the arrays of all pools as they are now, see `PagedModel.pools`.
        sees_within_windows: Tokens of a media item see each other only within a window.
        platform: The device of the steps.
    """

    def __init__(
        self,
        layout: CacheLayout,
        attention: Sequence[PagedLayerCache | GatheredLayerCache] = (),
        *,
        pools: Callable[[], list[mx.array]],
        block_size: int,
        sees_within_windows: bool,
        platform: Platform,
    ) -> None:
        self.platform = platform
        self.block_size = block_size
        self._layout = layout
        self._attention = attention
        self._pools = pools
        self._sees_within_windows = sees_within_windows
        self._dense_chunks = dense_prefill.choice_for(
            [cache.spec for cache in attention if cache.spec.group_spec == FULL], block_size
        )
        self._known_shared_rows: dict[KVCacheGroupSpec, int] = {}
        # The first n rows of a step, by n: as numbers, and [n] int32 on the device.
        self.first_rows: dict[int, tuple[bytes, mx.array]] = {}

    def plan(
        self,
        inputs: StepInputs,
        repetition: Repetition,
        *,
        parts_ahead: int = 1,
        prunes_last_layer: bool = True,
    ) -> Step:
        """Plans a step.

        Args:
            repetition: How it repeats, which determines its padding.
            parts_ahead, prunes_last_layer: See `PagedModel`.
        """
        states = None
        if self._layout.has_states:
            states = build_state_plan(inputs.query_lens, inputs.own_slots)
        repeat, group_specs = repetition.repeat, self._layout.group_specs
        # Positions count in the whole sequence, whichever part of it a layer sees.
        by_group = inputs.tables
        if not isinstance(by_group, Mapping):
            by_group = dict.fromkeys(group_specs, by_group)
        some = by_group[group_specs[0]] if group_specs else self._no_blocks(inputs)
        tables = by_group.get(FULL, some)
        alone = len(group_specs) == 1 and group_specs[0].chunk is None
        lens: list[int] = inputs.query_lens.tolist()  # faster than NumPy for a few
        longest, total = max(lens, default=0), sum(lens)
        num_rows: int | None = repetition.num_rows
        if repeat is not Repeat.WITH_PROMPTS and num_rows == total:
            num_rows = None
        stays = self.platform.pinned_uploads and repetition.reads_once
        has_bounds = inputs.media is not None and inputs.media.bounds is not None
        plans = {
            group_spec: self._plan(inputs, own, group_spec, (group_spec,), num_rows, stays)
            for group_spec, own in by_group.items()
            if group_spec.chunk is not None
            or own is not tables
            or (has_bounds and self._bounds(inputs, group_spec) is not self._bounds(inputs, FULL))
        }
        others = [group_spec for group_spec in group_specs if group_spec not in plans]
        plan = self._plan(
            inputs, tables, group_specs[0] if alone else FULL, others, num_rows, stays
        )
        prefill = None
        if repeat is Repeat.NOT and FULL in group_specs and longest >= dense_prefill.MIN_ROWS:
            prefill = dense_prefill.plan_dense_prefill(
                tables,
                inputs.context_lens,
                inputs.query_lens,
                block_size=self.block_size,
                bounds=self._bounds(inputs, FULL),
                choice=self._dense_chunks,
                platform=self.platform,
            )
        layerwise = None
        if self.platform.has_cuda and longest > 1:
            layerwise = layerwise_submit(total, parts_ahead)
        media = None if inputs.media is None else MediaRows.of(inputs.media)
        wanted = inputs.logit_rows
        if layerwise is not None and inputs.may_pad and repeat is Repeat.NOT and len(wanted):
            wanted = _padded_rows(wanted)
        logit_rows = self._logit_rows(wanted, stays)
        selected = None
        if prunes_last_layer and 0 < len(wanted) <= total - _MIN_UNSELECTED:
            selected = self._selected(inputs, wanted, logit_rows)
        adapters = None
        if inputs.adapters is not None:
            padded = np.full(repetition.num_rows, -1)  # padding has no adapter
            padded[: len(inputs.adapters)] = inputs.adapters - 1
            adapters = int32(padded)
        return Step(
            plan,
            logit_rows,
            plans,
            states,
            prefill,
            layerwise,
            media,
            selected,
            inputs.num_ordered_rows,
            inputs.features,
            adapters,
        )

    def plan_reading(self, inputs: StepInputs) -> Step:
        """Plans a step for `PagedModel.reading`.

        The keys of its tokens are not in the pools. A row has the position before its token's. A
        window includes the token, so it covers one key less.
        """
        num_sequences, num_rows = len(inputs.query_lens), int(inputs.query_lens.sum())
        step = self.plan(inputs, Repetition(Repeat.NOT, num_rows, num_sequences, False))
        plans = {
            spec: self._plan(
                inputs,
                inputs.tables_of(spec),
                replace(spec, window=spec.window - 1),
                (),
                None,
                False,
            )
            for spec in self._layout.group_specs
            if spec.window is not None
        }
        return replace(step, plans={**step.plans, **plans})

    def _selected(
        self, inputs: StepInputs, wanted: np.ndarray, logit_rows: mx.array
    ) -> LastLayerPruning | None:
        """Plans the last layer for the sampled rows only; None if that is impossible.

        It is possible where each of these rows is the last one of its sequence.
        """
        if not self._attention:
            return None
        ends = np.cumsum(inputs.query_lens)
        sequences = np.searchsorted(ends, wanted, side="right")
        group_spec = self._attention[-1].spec.group_spec
        if (
            group_spec.chunk is not None
            or self._bounds(inputs, group_spec) is not None
            or not np.array_equal(ends[sequences] - 1, wanted)
        ):
            return None
        tables = inputs.tables_of(group_spec)
        if not isinstance(tables, PaddedTables):
            tables = PaddedTables.of(tables)
        plan = build_plan(
            PaddedTables(tables.blocks[sequences], tables.lengths[sequences]),
            inputs.context_lens[sequences],
            np.ones(len(sequences), dtype=np.int64),
            block_size=self.block_size,
            window=group_spec.window,
            platform=self.platform,
        )
        return LastLayerPruning(logit_rows, plan, len(self._attention) - 1, self._pools)

    def _logit_rows(self, wanted: np.ndarray, stays: bool) -> mx.array:
        """Uploads row indices; caches leading rows, as in all decodes."""
        count, numbers = len(wanted), wanted.tobytes()
        kept = self.first_rows.get(count)
        if kept is not None and kept[0] == numbers:
            return kept[1]
        is_first = count == 0 or wanted[0] == 0  # a fast check; false for prompts
        if kept is not None or not (is_first and np.array_equal(wanted, np.arange(count))):
            return int32(wanted, stays=stays)
        rows = int32(wanted)
        mx.eval(rows)  # It must not belong to a step, which may fail.
        if len(self.first_rows) >= _MAX_FIRST_ROWS:
            self.first_rows.clear()
        self.first_rows[count] = numbers, rows
        return rows

    def _plan(
        self,
        inputs: StepInputs,
        tables: Tables,
        group_spec: KVCacheGroupSpec,
        used_by: Sequence[KVCacheGroupSpec],
        num_rows: int | None,
        stays: bool,
    ) -> AttentionPlan:
        rows = (inputs.context_lens, inputs.query_lens)
        bounds = self._bounds(inputs, group_spec)
        if group_spec.chunk is not None:
            if bounds is not None:
                raise ValueError("[step media] bounds must be None for layers with chunks")
            return build_chunk_plan(
                tables,
                *rows,
                chunk=group_spec.chunk,
                block_size=self.block_size,
                platform=self.platform,
            )
        return build_plan(
            tables,
            *rows,
            block_size=self.block_size,
            window=group_spec.window,
            bounds=bounds,
            stays_on_host=stays,
            num_rows=num_rows,
            shared_rows=self._shared_rows(group_spec, used_by) if inputs.splits_drafts else 1,
            platform=self.platform,
        )

    def _shared_rows(
        self, group_spec: KVCacheGroupSpec, used_by: Sequence[KVCacheGroupSpec]
    ) -> int:
        """Returns how many drafts of a sequence may share a pass over its context; see
        `build_plan`.

        Args:
            group_spec: The window of the plan.
            used_by: The groups whose layers use it. Kernels begin at the window of their layer, but
                the plan has one window.
        """
        if any(each != group_spec for each in used_by):
            return 1
        known = self._known_shared_rows.get(group_spec)
        if known is None:
            counts = [
                cache.shared_rows
                for cache in self._attention
                if isinstance(cache, PagedLayerCache) and cache.spec.group_spec == group_spec
            ]
            found = [count for count in counts if count is not None]
            if not found or len(found) < len(counts):
                return 1  # No step has been built yet.
            known = self._known_shared_rows[group_spec] = min(found)
        return known

    def _bounds(self, inputs: StepInputs, group_spec: KVCacheGroupSpec) -> np.ndarray | None:
        """Returns the first and last position that each row sees as a whole; see `build_plan`."""
        if inputs.bounds is not None:
            return inputs.bounds
        if inputs.media is None or inputs.media.bounds is None:
            return None
        bounds = inputs.media.bounds
        if not self._sees_within_windows:
            return bounds
        if group_spec.window is None:
            return None
        lens = inputs.query_lens
        own = np.arange(lens.sum()) + np.repeat(inputs.context_lens - np.cumsum(lens), lens)
        return np.stack([own, bounds[1]])

    def _no_blocks(self, inputs: StepInputs) -> Tables:
        """Returns tables for models without attention, whose plan only holds positions."""
        lengths = -(-inputs.context_lens // self.block_size)
        return PaddedTables(
            np.zeros((len(lengths), max(1, int(lengths.max(initial=1)))), dtype=np.int32), lengths
        )


def _padded_rows(wanted: np.ndarray) -> np.ndarray:
    """Repeats the last row, up to a number of rows that the warm-up has prepared.

    A library loads another kernel for nearly every number of rows. A step would wait up to 30 ms
    for those of its last layer.
    """
    return np.pad(wanted, (0, padded_decodes(len(wanted)) - len(wanted)), mode="edge")
