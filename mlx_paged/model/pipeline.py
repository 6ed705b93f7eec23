"""Stage: the consecutive layers of a model that one pipeline rank runs.

A step goes through the ranks in turn. Rank 0 computes logits from the last rank's hidden states:

    rank 0    embedding ─ layers 0..k ─┐               ┌─ norm ─ logits
    rank 1                             └─ layers k..n ─┘

Every rank runs the model's own code. The layers of other ranks return their inputs. Between two
ranks' layers, a collective sends the first one's hidden states to all ranks, so every rank has the
same collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import CacheList
from mlx_lm.utils import dequantize_model

from mlx_paged.errors import UnsupportedModelError
from mlx_paged.model.caches import KVHandle, StepContext
from mlx_paged.model.layout import UnusedSpec
from mlx_paged.model.overrides import Overrides
from mlx_paged.model.sharding import Division, linear_layers
from mlx_paged.model.takes_media import TakesMedia

if TYPE_CHECKING:
    from mlx_paged.model.paged_model import PagedModel


class Stage:
    """The layers of this rank: ``model.layers[first:end]``.

    Args:
        group: The ranks, in the order of their layers.
    """

    def __init__(self, group: mx.distributed.Group, first: int, end: int) -> None:
        self.group, self.first, self.end = group, first, end
        self._last: mx.array | None = None  # the newest result of `_exchanged`

    @classmethod
    def of(cls, model: nn.Module) -> Stage | None:
        """Returns the stage of any model; None if it has all its layers."""
        found = getattr(model, "stage", None)
        return found if isinstance(found, Stage) else None

    def exchange(self, x: mx.array, owner: int) -> mx.array:
        """Returns the array of the rank `owner`; it has the same shape on all ranks."""
        parts = mx.distributed.all_gather(x, group=self.group)
        return parts[owner * len(x) : (owner + 1) * len(x)]

    def take(self) -> mx.array:
        """Returns the first row ``[1, hidden_size]`` after the model's last layer, of the latest
        step. Every rank must evaluate it, because the others wait in its collectives."""
        last, self._last = self._last, None
        assert last is not None, "the forward did not reach the last layer of this rank"
        return last.reshape(-1, last.shape[-1])[:1]

    def limit(self, model: nn.Module, context: StepContext) -> None:
        """Makes steps run the layers of this rank only."""
        overrides = Overrides()
        for index, layer in enumerate(model.layers):
            overrides.replace(layer, "__call__", self._staged_call(type(layer), index, context))

    def _staged_call(self, base: type, index: int, context: StepContext) -> Callable[..., Any]:
        stage, rank, size = self, self.group.rank(), self.group.size()

        def call(self: Any, x: mx.array, *args: Any, **options: Any) -> Any:
            if not context.active:
                return base.__call__(self, x, *args, **options)
            if not stage.first <= index < stage.end:
                return x
            if index == stage.first:
                x = stage._exchanged(x, range(rank))
            x = base.__call__(self, x, *args, **options)
            if index == stage.end - 1:
                x = stage._exchanged(x, range(rank, size))
            return x

        return call

    def _exchanged(self, x: mx.array, owners: range) -> mx.array:
        for owner in owners:
            x = self.exchange(x, owner)
        self._last = x
        return x


def divide_layers(model: nn.Module, config: Mapping[str, Any], group: mx.distributed.Group) -> None:
    """Keeps the weights of this rank's layers and of everything outside layers; evaluates none.

    Where layers cannot be divided evenly, the first ranks have one more.

    Args:
        model: An mlx-lm model, or this rank's part of each of its layers. Its modules are changed
            in place.
        config: Its ``config.json``.

    Raises:
        UnsupportedModelError: The model has no list of layers, or fewer than there are ranks, or
            features of media are added between them.
    """
    layers, rank, size = getattr(model, "layers", None), group.rank(), group.size()
    if not isinstance(layers, list) or len(layers) < size:
        count = f"{len(layers)} layers" if isinstance(layers, list) else "no list of layers"
        raise _unsupported(config.get("model_type"), f"it has {count}", size)
    if isinstance(model, TakesMedia) and model.adds_to_layers:
        reason = "features of media are added between its layers"
        raise _unsupported(config.get("model_type"), reason, size)
    per_stage, more = divmod(len(layers), size)
    first = rank * per_stage + min(rank, more)
    stage = Stage(group, first, first + per_stage + (rank < more))
    others = [layer for i, layer in enumerate(layers) if not stage.first <= i < stage.end]
    for layer in others:
        _drop_weights(layer)
    dropped = {id(module) for layer in others for module in layer.modules()}
    paths = (path for path, module in linear_layers(model).items() if id(module) in dropped)
    model.division = replace(Division.of(model), elsewhere=frozenset(paths))
    model.stage = stage


def _drop_weights(layer: nn.Module) -> None:
    """Puts a single zero in place of each weight, repeated to the same shape without memory."""
    dequantize_model(layer)  # lazily; done later, it would allocate the weights
    layer.update(
        tree_map(lambda a: mx.broadcast_to(mx.zeros((), a.dtype), a.shape), layer.parameters())
    )


# --- Checking a family ----------------------------------------------------------------------------


class _Call(NamedTuple):
    """A layer's call in an observed step."""

    layer: int  # its index
    x: mx.array
    result: Any
    leaves: frozenset[int]  # of the cache tree
    reads_others: bool  # reads keys and values of other layers


def enter_stage(paged: PagedModel, model_type: str, build_step: Callable[[], object]) -> None:
    """Limits a paged model to the layers of its stage; does nothing if it has none.

    Call it before the first `allocate` that counts.

    Args:
        model_type: Its name in errors.
        build_step: Allocates pools, and builds a step that is never evaluated.

    Raises:
        UnsupportedModelError: Its layers pass on more than one array of hidden states.
    """
    stage = Stage.of(paged.model)
    if stage is None:
        return
    try:
        calls = _observed(paged, build_step)
        _check_chain(calls, len(paged.model.layers))
        others = (*calls[: stage.first], *calls[stage.end :])
        elsewhere = frozenset[int]().union(*(call.leaves for call in others))
        # Caches of no layer belong to the embedding, which every rank has.
        kept = frozenset(range(len(paged.layout.specs))) - elsewhere
        specs = [paged.layout.specs[leaf] for leaf in kept]
        if all(isinstance(spec, UnusedSpec) for spec in specs):
            raise ValueError(f"its layers {stage.first} to {stage.end - 1} have no cache")
        paged.enter_stage(stage, kept)
        build_step()  # raises if the model reads more of the caches of other ranks' layers
    except (RuntimeError, ValueError) as error:
        raise _unsupported(model_type, str(error), stage.group.size()) from error


def _observed(paged: PagedModel, build_step: Callable[[], object]) -> list[_Call]:
    if paged.layout.mode.is_gathered:
        raise ValueError(f"it runs {paged.layout.mode}")
    calls: list[_Call] = []

    def recorded(base: type, index: int) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **options: Any) -> Any:
            if not args:
                raise ValueError("its layers take hidden states by name")
            result = base.__call__(self, *args, **options)
            indices = {id(leaf): i for i, leaf in enumerate(_leaves(paged.caches))}
            given = list(_leaves([*args[1:], *options.values()]))
            leaves = frozenset(indices[id(leaf)] for leaf in given if id(leaf) in indices)
            reads_others = any(isinstance(each, KVHandle) for each in given)
            calls.append(_Call(index, args[0], result, leaves, reads_others))
            return result

        return call

    overrides = Overrides()
    for index, layer in enumerate(paged.model.layers):
        overrides.replace(layer, "__call__", recorded(type(layer), index))
    try:
        build_step()
    finally:
        overrides.undo()
    return calls


def _check_chain(calls: Sequence[_Call], num_layers: int) -> None:
    """Raises ValueError unless each layer gets what the one before it returned, and its caches."""
    if [call.layer for call in calls] != list(range(num_layers)):
        raise ValueError("it does not call each of its layers once, in their order")
    for call in calls:
        if not isinstance(call.result, mx.array):
            raise ValueError("its layers return more than hidden states")
        if (call.result.shape, call.result.dtype) != (call.x.shape, call.x.dtype):
            raise ValueError("its layers change the shape of hidden states")
        if call.reads_others:
            raise ValueError("its layers read keys and values of other layers")
    for before, after in pairwise(calls):
        if after.x is not before.result:
            raise ValueError("it changes hidden states between layers")
    leaves = [leaf for call in calls for leaf in call.leaves]
    if len(set(leaves)) < len(leaves):
        raise ValueError("its layers share caches")


def _leaves(values: Any) -> Iterator[Any]:
    if isinstance(values, CacheList):
        values = values.caches
    if isinstance(values, (list, tuple)):
        for each in values:
            yield from _leaves(each)
    else:
        yield values


def _unsupported(model_type: Any, reason: str, size: int) -> UnsupportedModelError:
    return UnsupportedModelError(
        str(model_type or ""), f"{reason}, so its layers cannot be divided among {size} ranks"
    )
