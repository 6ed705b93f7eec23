"""Runs a step of a model on dense copies of its blocks, once for each group of sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_paged.model.caches import PagedLayerCache, Step, StepContext
from mlx_paged.model.gathered import GatheredGroup, GatheredLayerCache, groups_of
from mlx_paged.model.layout import CacheLayout, Mode
from mlx_paged.model.plan import SequenceGroup, StepInputs, build_plan, int32
from mlx_paged.model.recurrent import RecurrentCache
from mlx_paged.platform import Platform


class GatheredOutput(NamedTuple):
    """The lazy output of a model for the rows of one group, or of a step."""

    logits: mx.array  # [number of wanted rows, vocab_size]
    taps: tuple[mx.array, ...] = ()  # each [num_rows, hidden_size]; see `model.taps`


class GatheredLayers(NamedTuple):
    """The caches of a model's layers."""

    layout: CacheLayout
    attention: Sequence[PagedLayerCache | GatheredLayerCache]  # all of them gather
    states: Sequence[RecurrentCache]
    block_size: int


#: (``[num_seqs, length]`` tokens, features of their rows or None) -> what the model computes.
GatheredForward = Callable[[mx.array, mx.array | None], GatheredOutput]


def run_in_groups(
    forward: GatheredForward,
    tokens: mx.array,
    inputs: StepInputs,
    layers: GatheredLayers,
    context: StepContext,
    platform: Platform,
) -> GatheredOutput:
    """Runs the groups one after another; returns all their rows in the order of the step."""
    # The caches have their own groups, so the plan has no sequences. Nor media, because
    # `wrap.convert_to_paged` runs no multimodal model this way.
    no_plan = build_plan([], [], [], block_size=layers.block_size, platform=platform)
    parts: list[mx.array] = []
    wanted: list[np.ndarray] = []
    taps: list[tuple[mx.array, ...]] = []
    tapped: list[np.ndarray] = []
    first_rows = np.cumsum(inputs.query_lens) - inputs.query_lens
    uniform = layers.layout.mode is Mode.UNIFORM
    for members in groups_of(inputs, uniform=uniform):
        group = GatheredGroup.of(
            inputs,
            members,
            layers.layout.group_specs,
            block_size=layers.block_size,
            uniform=uniform,
        )
        rows = (first_rows[members][:, None] + np.arange(group.length)).reshape(-1)
        mine = np.flatnonzero(np.isin(inputs.logit_rows, rows))
        within = np.searchsorted(rows, inputs.logit_rows[mine])
        indices = int32(rows)
        grouped = tokens[indices].reshape(len(members), group.length)
        adapters = None if inputs.adapters is None else int32(inputs.adapters[rows] - 1)
        features = None if inputs.features is None else inputs.features[indices]
        context.enter(Step(no_plan, int32(within), adapters=adapters))
        try:
            with ExitStack() as stack:
                for cache in layers.attention:
                    assert isinstance(cache, GatheredLayerCache)
                    stack.enter_context(cache.grouped(group))
                if layers.layout.has_states:
                    states = _state_group(inputs, members, group.length)
                    for state in layers.states:
                        stack.enter_context(state.grouped(states))
                output = forward(grouped, features)
        finally:
            context.leave()
        taps.append(output.taps)
        tapped.append(rows)
        parts.append(output.logits[: len(mine)])  # A model may return some if none is wanted.
        wanted.append(mine)
    in_order = [_in_order(each, tapped) for each in zip(*taps)]
    return GatheredOutput(_in_order(parts, wanted), tuple(in_order))


def _in_order(parts: Sequence[mx.array], indices: Sequence[np.ndarray]) -> mx.array:
    """Joins the rows of groups in the order of `indices`, their rows in the step."""
    return mx.concatenate(list(parts))[int32(np.argsort(np.concatenate(indices)))]


def _state_group(inputs: StepInputs, members: np.ndarray, length: int) -> SequenceGroup:
    slots = inputs.own_slots
    reads, writes = (np.asarray(s)[members] for s in (slots.reads, slots.writes))
    begins = bool(reads[0] == 0)  # the same for all, see `groups_of`
    return SequenceGroup(None, members, length, int32(reads), int32(writes), begins)
