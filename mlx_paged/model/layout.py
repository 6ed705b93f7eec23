"""How a model's caches lie: what each of them holds, and how model code wants them put together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mlx_lm.models.cache import CacheList

from mlx_paged.model.specs import CacheSpec, LayerSpec, Reach, StateSpec

# A leaf's index in `CacheLayout.specs`, or the entries of a layer that has several caches.
Shape = int | tuple["Shape", ...]


class Mode(StrEnum):
    """How a family's forward is run."""

    NATIVE = "native paged"  # all rows at once, attention reads blocks
    REGROUPED = "regrouped"  # likewise; layers with recurrent state run on equal-length groups
    GATHERED = "gathered"  # once for each length of rows, attention reads dense copies
    UNIFORM = "gathered alone"  # once for each length and position: positions are host integers

    @property
    def is_gathered(self) -> bool:
        """Whether attention reads dense copies of the blocks."""
        return self in (Mode.GATHERED, Mode.UNIFORM)


@dataclass(frozen=True)
class CacheLayout:
    """The leaves of a model's cache tree, in order, and the tree."""

    mode: Mode
    specs: tuple[CacheSpec, ...]
    tree: tuple[Shape, ...]
    max_context_len: int | None = None  # tokens up to which the forward is right; None: any number

    @property
    def attention(self) -> tuple[LayerSpec, ...]:
        """The leaves that have blocks."""
        return tuple(s for s in self.specs if isinstance(s, LayerSpec))

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The leaves that have state slots."""
        return tuple(s for s in self.specs if isinstance(s, StateSpec))

    @property
    def reaches(self) -> tuple[Reach, ...]:
        """How far layers see; each needs block tables of its own, once blocks are freed."""
        return tuple(dict.fromkeys(spec.reach for spec in self.attention))

    @property
    def has_states(self) -> bool:
        """Whether sequences need state slots."""
        return bool(self.states)

    def bytes_per_token(self, reach: Reach | None = None) -> int:
        """K and V of one token in all attention layers, or in those of one reach."""
        return sum(s.bytes_per_token for s in self.attention if reach in (None, s.reach))

    @property
    def bytes_per_slot(self) -> int:
        """The recurrent state of one sequence, in all layers."""
        return sum(spec.bytes_per_slot for spec in self.states)

    def assemble(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves as model code takes them: one entry a layer."""

        def build(shape: Shape) -> Any:
            if isinstance(shape, int):
                return leaves[shape]
            return CacheList(*(build(part) for part in shape))

        return [build(shape) for shape in self.tree]


def flatten(caches: Sequence[Any]) -> tuple[list[Any], tuple[Shape, ...]]:
    """The leaves of mlx-lm's caches, and the tree to put them together again."""
    leaves: list[Any] = []

    def walk(cache: Any) -> Shape:
        if isinstance(cache, CacheList):
            return tuple(walk(child) for child in cache.caches)
        leaves.append(cache)
        return len(leaves) - 1

    tree = tuple(walk(cache) for cache in caches)
    return leaves, tree


def leaves_of(caches: Any, is_leaf: Callable[[Any], bool]) -> Iterator[Any]:
    """Leaves among a module's arguments, however deep in lists they are."""
    if is_leaf(caches):
        yield caches
    elif isinstance(caches, CacheList):
        yield from leaves_of(caches.caches, is_leaf)
    elif isinstance(caches, (list, tuple)):
        for child in caches:
            yield from leaves_of(child, is_leaf)
