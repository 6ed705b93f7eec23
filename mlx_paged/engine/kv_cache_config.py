"""KVCacheConfig: the KV cache groups of a model, and the split of memory between them."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from mlx_paged.core import StateGroupSpec, WindowGroupSpec
from mlx_paged.core.kv.specs import SLOTS_PER_SEQUENCE
from mlx_paged.engine.config import EngineConfig
from mlx_paged.model.layout import CacheLayout, KVCacheGroupSpec

# Assumed length of a sequence, or a few windows, if the configuration has none.
_TYPICAL_CONTEXT_LEN = 4096
_TYPICAL_WINDOWS = 4
_MIN_SNAPSHOTS = 4
# Maximum blocks of full attention, with and without layers of full attention. Without layers, they
# cost no pool memory, but every cached prefix has nodes in the prefix tree.
_MAX_BLOCKS = 1 << 20
_MAX_BLOCKS_WITHOUT_LAYERS = 1 << 14


@dataclass(frozen=True)
class PoolSizes:
    """Blocks of each group's pools and slots of the states, block and slot 0 included."""

    num_blocks: int
    window_blocks: tuple[int, ...] = ()
    num_state_slots: int = 0


class KVCacheConfig:
    """The groups of a model's layers.

    Layers with full attention are the *full group*. Layers with the same shorter span are a *window
    group* with their own tables, unless the window is as long as any sequence. Recurrent layers
    have state slots. The pools are sized for sequences of `typical_context_len` tokens: each
    group can hold equally many such sequences.

    Args:
        companion_bytes: Bytes of a token in further pools that have the blocks of the full group.
    """

    def __init__(
        self,
        layout: CacheLayout,
        config: EngineConfig,
        model_len: int | None,
        companion_bytes: int = 0,
    ) -> None:
        self._companion_bytes = companion_bytes
        self._layout = layout
        self._config = config
        self._block_size = config.block_size
        # Dense copies are made of whole tables.
        is_one = layout.mode.is_gathered or config.disable_hybrid_kv_cache_manager
        group_specs = () if is_one else layout.group_specs
        self.windows = tuple(
            group_spec
            for group_spec in group_specs
            if (span := _span(group_spec)) is not None and (model_len is None or span < model_len)
        )
        typical = config.typical_context_len
        if typical is None:
            longest = max((_span(group_spec) or 0 for group_spec in self.windows), default=0)
            typical = max(_TYPICAL_CONTEXT_LEN, _TYPICAL_WINDOWS * longest)
            typical = typical if model_len is None else min(typical, model_len)
        self._typical_blocks = self._blocks_for(typical)
        self._max_blocks = _MAX_BLOCKS
        if set(layout.group_specs) <= set(self.windows):
            whole = 0 if model_len is None else self._blocks_for(model_len)
            self._max_blocks = 1 + max(_MAX_BLOCKS_WITHOUT_LAYERS, whole)

    def sizes(self, num_blocks: int) -> PoolSizes:
        """Returns the sizes that go with a full group of `num_blocks` blocks."""
        if not self.windows and not self._layout.has_states:
            return PoolSizes(num_blocks)
        num_sequences = -(-num_blocks // self._typical_blocks)
        step = self._blocks_for(self._config.step_tokens)  # at least those of one prompt
        views = [self._view_blocks(group_spec) for group_spec in self.windows]
        windows = tuple(
            min(num_blocks, 1 + max(view, step + self._typical_share(num_blocks, view)))
            for view in views
        )
        num_slots = 0
        if self._layout.has_states:
            running = min(self._config.max_num_seqs, max(2, num_sequences))
            num_slots = 1 + SLOTS_PER_SEQUENCE * running + max(_MIN_SNAPSHOTS, running)
        return PoolSizes(num_blocks, windows, num_slots)

    def num_bytes(self, num_blocks: int) -> int:
        """Returns the bytes of all pools that go with a full group of `num_blocks` blocks."""
        sizes = self.sizes(num_blocks)
        blocks = self.blocks_by_group(sizes)
        of_blocks = sum(
            n * self._layout.bytes_per_token(group_spec) for group_spec, n in blocks.items()
        )
        of_blocks += sizes.num_blocks * self._companion_bytes
        of_slots = sizes.num_state_slots * self._layout.bytes_per_slot
        return of_blocks * self._block_size + of_slots

    def max_blocks(self, num_bytes: int) -> int:
        """Returns the blocks of the full group so that all pools take at most `num_bytes` bytes."""
        return bisect_right(range(1 + self._max_blocks), num_bytes, key=self.num_bytes) - 1

    def blocks_by_group(self, sizes: PoolSizes) -> dict[KVCacheGroupSpec, int]:
        """Returns the blocks of the pools of each group."""
        blocks = dict.fromkeys(self._layout.group_specs, sizes.num_blocks)
        blocks.update(zip(self.windows, sizes.window_blocks, strict=True))
        return blocks

    def window_specs(self, sizes: PoolSizes) -> list[WindowGroupSpec]:
        """Returns the window groups, as the KV manager takes them."""
        return [
            WindowGroupSpec(num_blocks, _span(group_spec) or 0, group_spec.first_visible)
            for group_spec, num_blocks in zip(self.windows, sizes.window_blocks, strict=True)
        ]

    def state_spec(self, sizes: PoolSizes) -> StateGroupSpec | None:
        """Returns the state slots, as the KV manager takes them."""
        return StateGroupSpec(sizes.num_state_slots) if sizes.num_state_slots else None

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _view_blocks(self, group_spec: KVCacheGroupSpec) -> int:
        """Maximum blocks that a row sees."""
        return self._blocks_for((_span(group_spec) or 0) - 1) + 1

    def _typical_share(self, num_blocks: int, per_sequence: int) -> int:
        per_sequence = min(per_sequence, self._typical_blocks)
        return -(-num_blocks * per_sequence // self._typical_blocks)


def _span(group_spec: KVCacheGroupSpec) -> int | None:
    """Returns the maximum tokens that a row sees; None means all."""
    return group_spec.window if group_spec.window is not None else group_spec.chunk
