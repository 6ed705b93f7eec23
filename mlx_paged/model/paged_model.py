"""PagedModel: runs one step of ragged sequences and returns the logits of some rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from mlx_paged import ops
from mlx_paged.errors import InvalidParameterError
from mlx_paged.model import option_costs, pages, patches
from mlx_paged.model.caches import (
    ElsewhereCache,
    KVPools,
    LatentLayerCache,
    PagedLayerCache,
    Step,
    StepContext,
    UnusedCache,
    copy_blocks,
)
from mlx_paged.model.compilation import Compilation
from mlx_paged.model.gathered import GatheredLayerCache
from mlx_paged.model.gathered_steps import GatheredLayers, GatheredOutput, run_in_groups
from mlx_paged.model.graph_runner import GraphRunner, Repeat, Repetition
from mlx_paged.model.layout import (
    CacheLayout,
    KVCacheGroupSpec,
    LayerSpec,
    StateSpec,
    UnusedSpec,
    assemble,
)
from mlx_paged.model.linear_parts import EXPERTS
from mlx_paged.model.lora import AdapterLayers, AdapterTargets, seen_apart
from mlx_paged.model.lora_slots import LowRank
from mlx_paged.model.media import MediaFeatures, MediaInputs
from mlx_paged.model.output_rows import OutputProjection, OutputRows
from mlx_paged.model.pipeline import Stage
from mlx_paged.model.plan import StepInputs
from mlx_paged.model.recurrent import RecurrentCache
from mlx_paged.model.sharding import Division
from mlx_paged.model.step_output import StepOutput
from mlx_paged.model.step_planner import StepPlanner
from mlx_paged.model.takes_media import TakesMedia
from mlx_paged.model.taps import Taps
from mlx_paged.platform import Platform


class PagedModel:
    """A model with its pools and state slots.

    Args:
        model: An mlx-lm model. Its modules are changed in place, so this object owns it.
        layout: Contents of its caches and its mode, see `mlx_paged.model.wrap`.
        block_size: Tokens of a block.
        platform: The device; None means MLX's default device.

    Attributes:
        platform: The device of the steps.
        repeats_steps: True if repeating decode steps may become graphs, in pools allocated later.
        runs_in_order: True if a step starts on the device before anything else uses the pools, in
            pools allocated later. Then only the last pool's handle waits for an executable on the
            CPU, because new handles for all pools cost the host much time.
        adapter_layers: The slots for adapters; None before `enable_adapters`.
        prunes_last_layer: True if the last layer of a step with prompts may leave out rows that are
            not sampled. All ranks must do the same.
        parts_ahead: Layers of a large step that the host may build ahead of the GPU.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: CacheLayout,
        *,
        context: StepContext,
        output_rows: OutputRows,
        block_size: int,
        platform: Platform | None = None,
    ) -> None:
        self.model = model
        self.platform = platform or Platform.current()
        self.layout = layout
        self._is_gathered = layout.mode.is_gathered
        # Padding belongs to no sequence, so it has neither a state nor a chunk.
        has_chunks = any(group_spec.chunk is not None for group_spec in layout.group_specs)
        self._may_pad = not layout.has_states and not has_chunks
        self._has_experts = any(isinstance(module, EXPERTS) for module in model.modules())
        self.block_size = block_size
        self._layers_apart: set[str] = set()  # see `seen_apart`
        self._context = context
        self._output_rows = output_rows
        self._attention: list[PagedLayerCache | GatheredLayerCache] = []
        self._states: list[RecurrentCache] = []
        self.caches: list[object] = []
        self._allocated: list[mx.array] = []  # the first handles of the pools
        self.repeats_steps = True
        self.runs_in_order = False
        self.prunes_last_layer = True
        self._taps: Taps | None = None
        self._stage: Stage | None = None
        self._activations = "float32"
        self._attention_activations = "float32"
        self.parts_ahead = 1
        self.adapter_layers: AdapterLayers | None = None
        self._graph_runner = self._make_graph_runner()
        self._planner = self._make_planner()

    def _make_graph_runner(self) -> GraphRunner:
        name = getattr(self.model, "model_type", "this model")
        return GraphRunner(
            self._run,
            platform=self.platform,
            enabled=self.repeats_steps,
            chooses=self._chooses,
            in_order=self.runs_in_order,
            model_name=str(name),
        )

    def _make_planner(self) -> StepPlanner:
        model = self.model
        return StepPlanner(
            self.layout,
            self._attention,
            pools=self.pools,
            block_size=self.block_size,
            sees_within_windows=isinstance(model, TakesMedia) and model.sees_within_windows,
            platform=self.platform,
        )

    @property
    def compilation(self) -> Compilation:
        """The current `Compilation` of its steps."""
        return self._graph_runner.compilation

    def limit_contexts(self, longest: int | None) -> None:
        """Sets the maximum length of a sequence. Call it before the first step.

        LongRoPE uses its short factors if no context can be longer than the original one.

        Args:
            longest: Tokens; None means the model's maximum.
        """
        self._context.limit.longest = longest

    def round_activations(self, activations: str) -> None:
        """Rounds the inputs of linear layers, and in a model that has such layers those of
        attention: see `ops.activations` and `ops.paged_attention`. Takes effect in steps after the
        next `allocate`.

        Raises:
            InvalidParameterError: The default device or the processor does not support this.
        """
        if activations != "float32" and not self.platform.on_cpu:
            expected = "'float32' where the model does not run on the CPU"
            raise InvalidParameterError("cpu_activations", expected, activations)
        if activations not in self.platform.activations:
            expected = f"one of {', '.join(self.platform.activations)} on this processor"
            raise InvalidParameterError("cpu_activations", expected, activations)
        self._activations = activations
        has_effect = option_costs.of_activations(self.model, activations) is None
        self._attention_activations = activations if has_effect else "float32"

    def allocate(
        self,
        num_blocks: int | Mapping[KVCacheGroupSpec, int],
        num_state_slots: int = 0,
        *,
        state_cache: Callable[[StateSpec], RecurrentCache] | None = None,
    ) -> None:
        """Allocates new pools. The contents of the old ones are lost.

        Args:
            num_blocks: Blocks of the pools, including block 0, for all layers or for each group.
            num_state_slots: Includes slot 0, the initial state.
            state_cache: Makes the cache of a recurrent layer whose states are not in slots.
        """
        self.release()
        # Compiled graphs must not keep the old pools alive.
        self._graph_runner = self._make_graph_runner()
        leaves: list[object] = []
        for i, spec in enumerate(self.layout.specs):
            if not self.layout.keeps(i):
                leaves.append(ElsewhereCache(self._context))
            elif isinstance(spec, LayerSpec):
                count = num_blocks if isinstance(num_blocks, int) else num_blocks[spec.group_spec]
                cache = self._cache_type(spec)(
                    self._context, spec, num_blocks=count, block_size=self.block_size
                )
                cache.layer = len(self._attention)
                self._attention.append(cache)
                leaves.append(cache)
            elif isinstance(spec, UnusedSpec):
                leaves.append(UnusedCache())
            elif state_cache is not None:
                self._states.append(state_cache(spec))
                leaves.append(self._states[-1])
            else:
                if num_state_slots < 2:
                    raise ValueError(
                        "a model with recurrent state needs at least 2 state slots but got "
                        f"{num_state_slots}"
                    )
                self._states.append(RecurrentCache(spec, num_slots=num_state_slots))
                leaves.append(self._states[-1])
        self.caches = assemble(self.layout.tree, leaves)
        self._allocated = self.pools()
        self._planner = self._make_planner()

    def release(self) -> None:
        """Drops the pools."""
        self.caches, self._attention, self._states, self._allocated = [], [], [], []
        self._planner = self._make_planner()

    def _cache_type(self, spec: LayerSpec) -> type[PagedLayerCache | GatheredLayerCache]:
        if self._is_gathered:
            return GatheredLayerCache
        return LatentLayerCache if spec.latent else PagedLayerCache

    def _chooses(self) -> bool:
        return not self._output_rows.keeps_hidden

    def keep_hidden_states(self) -> int:
        """Makes `forward` return hidden states from now on; see `OutputRows.keep_hidden_states`."""
        return self._output_rows.keep_hidden_states()

    @property
    def output_projection(self) -> OutputProjection | None:
        """The module that makes its logits; None if none does."""
        return self._output_rows.projection

    def tap(self, layer_ids: Sequence[int]) -> None:
        """Makes `run` return hidden states of all rows. Call it once, before `allocate`.

        Args:
            layer_ids: See `Taps`.

        Raises:
            ValueError: The model has no such layer.
        """
        self._taps = Taps(
            self.model, layer_ids, context=self._context, output_rows=self._output_rows
        )
        if self._taps.reads_end:
            self.prunes_last_layer = False

    def enter_stage(self, stage: Stage, kept: frozenset[int]) -> None:
        """Limits the model to the layers of one rank; see `model.pipeline`. Call it before
        `allocate`.

        Args:
            kept: The leaves of its caches.

        Raises:
            ValueError: See `keep_hidden_states`; only rank 0 computes logits.
        """
        if stage.group.rank():
            self.keep_hidden_states()
        self.layout = replace(self.layout, kept=kept)
        self._stage = stage
        self.prunes_last_layer = False  # All ranks get the hidden states of all rows.
        stage.limit(self.model, self._context)

    def output_weights(self, token_ids: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Returns the output projection's weights for some tokens; see `OutputRows.weights_of`.

        Raises:
            ValueError: The projection is divided among ranks.
        """
        path = next(p for p, m in self.model.named_modules() if m is self._output_rows.module)
        part = Division.of(self.model).parts.get(path)
        if part is not None and len(part.outputs) < part.whole[1]:
            raise ValueError(f"its output projection {path!r} is divided among ranks")
        return self._output_rows.weights_of(token_ids)

    # Adapters.

    @contextmanager
    def watching_layers(self) -> Iterator[None]:
        """Within it, a step with adapters shows which layers they can change."""
        with seen_apart(self.model, self._context) as found:
            yield
        self._layers_apart = found

    def adapter_targets(self) -> AdapterTargets:
        """Returns the layers that adapters may change."""
        return AdapterTargets.of(self.model, self._output_rows.module, self._layers_apart)

    def enable_adapters(self, num_slots: int, rank: int, dtype: str = "auto") -> None:
        """Prepares slots for adapters. Their memory is allocated as adapters are loaded.

        Args:
            num_slots: Maximum different adapters of a step.
            rank: Maximum rank, a multiple of `lora.RANK_STEP`.
            dtype: Dtype of the slots; "auto" is the dtype of the model's rows.

        Raises:
            InvalidParameterError: Another dtype on a GPU, whose kernels take only the model's.
        """
        own = self.layout.compute_dtype
        chosen: mx.Dtype = own if dtype == "auto" else getattr(mx, dtype)
        if chosen != own and not self.platform.on_cpu:
            raise InvalidParameterError("lora_dtype", f"'auto' on a GPU ({own})", dtype)
        self.adapter_layers = AdapterLayers(
            self.model,
            self.adapter_targets(),
            self._context,
            num_slots=num_slots,
            rank=rank,
            dtype=chosen,
            platform=self.platform,
        )

    @property
    def num_adapter_slots(self) -> int:
        """Maximum different adapters of a step; 0 before `enable_adapters`."""
        return 0 if self.adapter_layers is None else self.adapter_layers.num_slots

    @property
    def adapter_bytes(self) -> int:
        """Maximum bytes of the slots, if adapters change every layer."""
        return 0 if self.adapter_layers is None else self.adapter_layers.max_bytes

    def load_adapter(self, slot: int, layers: Mapping[str, LowRank]) -> None:
        """Writes an adapter to a slot, and waits for it.

        Args:
            slot: From 1, as in `StepInputs.adapters`. No later step may use the slot's previous
                adapter.
            layers: Updates of layers, by their paths in `adapter_targets`.
        """
        assert self.adapter_layers is not None
        if self.adapter_layers.load(slot - 1, layers):
            self._graph_runner.forget()

    # Pools.

    @property
    def attention_caches(self) -> Sequence[KVPools]:
        """The caches that have blocks."""
        return self._attention

    def pools(self) -> list[mx.array]:
        """Returns the pools' arrays, which are available once every write has run."""
        pools = [pool for c in self._attention for pool in (c.key_pool, c.value_pool)]
        return pools + [p.pool for c in self._states for p in c.pools if p is not None]

    @property
    def allocated_pools(self) -> Sequence[mx.array]:
        """The pools' original handles, in the order of `pools`: the same memory without pending
        work."""
        return self._allocated

    def restore(self, pools: Sequence[mx.array]) -> None:
        """Restores the arrays from `pools`: the same memory, because writes are in place."""
        kept = iter(pools)
        for cache in self._attention:
            cache.key_pool, cache.value_pool = next(kept), next(kept)
        for state in (p for c in self._states for p in c.pools if p is not None):
            state.pool = next(kept)

    def reset(self) -> None:
        """Discards a step that was interrupted while it was built.

        Call it when the device is idle. The pools get their original handles, which have the same
        memory and no pending work.
        """
        self._context.leave()
        patches.leave_native_ops()
        self.restore(self._allocated)
        for state in (p for c in self._states for p in c.pools if p is not None):
            state.reset()

    def copy_blocks(
        self, block_pairs: mx.array, group_spec: KVCacheGroupSpec | None = None
    ) -> None:
        """Copies blocks in the pools of all layers, or of one group's.

        Args:
            block_pairs: ``[num_pairs, 2]`` int32 of (src, dst).
        """
        caches = [c for c in self._attention if group_spec in (None, c.spec.group_spec)]
        if caches:  # A rank may have no layer of a group.
            copy_blocks(caches, block_pairs)

    def resize(self, num_blocks: int, group_spec: KVCacheGroupSpec) -> None:
        """Changes the number of blocks of a group; keeps the contents of the first ones."""
        self._graph_runner.forget()
        for index, cache in enumerate(self._attention):
            if cache.spec.group_spec != group_spec:
                continue
            names = ("key_pool", "value_pool")
            for at, (name, dim) in enumerate(zip(names, cache.spec.pool_dims), 2 * index):
                pool: mx.array = getattr(cache, name)
                if num_blocks > len(pool):
                    block_size, num_heads = pool.shape[1:3]
                    larger = ops.allocate_pool(num_blocks, block_size, num_heads, dim, pool.dtype)
                    larger[: len(pool)] = pool  # in place, so the other blocks take no memory yet
                    pool = larger
                else:
                    pool = mx.contiguous(pool[:num_blocks])
                mx.eval(pool)  # one pool at a time, so that only one exists twice
                # `reset` must not bring the old pool back, nor keep its memory.
                self._allocated[at] = pool
                setattr(cache, name, pool)
        mx.clear_cache()  # MLX would keep the freed memory

    def discard_blocks(self, runs: Sequence[tuple[int, int]], group_spec: KVCacheGroupSpec) -> None:
        """Gives memory of a group's blocks back to the system, where `pages.can_discard` allows.

        Args:
            runs: (first, end) of the blocks, which no step in flight touches.
        """
        handles = iter(self._allocated)
        for cache in self._attention:
            pair = next(handles), next(handles)
            if cache.spec.group_spec == group_spec:
                for pool in pair:
                    pages.discard_rows(pool, pool.shape[0], runs)

    def discard_slots(self, runs: Sequence[tuple[int, int]]) -> None:
        """Gives the memory of state slots back, as `discard_blocks` does."""
        for pool in self._allocated[2 * len(self._attention) :]:
            pages.discard_rows(pool, pool.shape[0] * pool.shape[1], runs)

    def allow_huge_pages(self, allowed: bool) -> None:
        """Allows or forbids huge pages for the pools; see `pages`."""
        for pool in self._allocated:
            pages.allow_huge_pages(pool, allowed)

    # Steps.

    def forward(self, tokens: mx.array, inputs: StepInputs, *, may_repeat: bool = True) -> mx.array:
        """Returns just the logits of `run`.

        Args:
            may_repeat: False if the result depends on more than the arguments, such as on input
                embeddings.
        """
        repetition = self.repetition_of(inputs, tokens.shape[0])
        if not may_repeat:
            num_sequences = len(inputs.query_lens)
            repetition = Repetition(Repeat.NOT, tokens.shape[0], num_sequences, False)
        return self.run(tokens, inputs, repetition).logits

    def run(self, tokens: mx.array, inputs: StepInputs, repetition: Repetition) -> StepOutput:
        """Builds the graph of a step.

        Args:
            tokens: ``[num_rows]`` int32.
            repetition: The result of `repetition_of`. It may have more rows than `inputs`; their
                tokens do not matter.

        Returns:
            ``[len(logit_rows), vocab_size]`` logits, lazily. A step with padding sequences has
            `Repetition.num_rows` rows of logits, and with CUDA, any step with prompts has extra
            ones if `StepInputs.may_pad`. After `keep_hidden_states`, these are
            ``[len(logit_rows), hidden_size]`` last hidden states, after the model's final norm.

        Raises:
            ValueError: A context exceeds `CacheLayout.max_context_len`, or the model does not take
                the media, or they do not belong to these rows.
        """
        limit = self.layout.max_context_len
        if limit is not None and inputs.context_lens.max(initial=0) > limit:
            raise ValueError(
                f"context_lens must be at most {limit}, beyond which this model's RoPE changes "
                f"with the context, but got {inputs.context_lens.max()}"
            )
        if inputs.media is not None:
            _check_media(self.model, inputs)
        if self._is_gathered:
            return self._run_in_groups(tokens, inputs)
        if repetition.num_sequences > len(inputs.query_lens):
            inputs = inputs.padded(repetition.num_sequences)
        step = self._planner.plan(
            inputs,
            repetition,
            parts_ahead=self.parts_ahead,
            prunes_last_layer=self.prunes_last_layer,
        )
        before = self.pools()
        output = self._graph_runner.run(tokens, step, before, repetition.repeat)
        if output.pools is not before:  # A GPU's executable leaves the handles unchanged.
            self.restore(output.pools)
        return output

    def reading_step(self, inputs: StepInputs) -> Step:
        """Returns a step for `reading`, see `StepPlanner.plan_reading`."""
        return self._planner.plan_reading(inputs)

    @contextmanager
    def reading(self, step: Step) -> Iterator[None]:
        """Lets another model attend to the pools meanwhile, as the rows of a step that writes
        nothing."""
        patches.ensure_installed()
        self._context.enter(step)
        try:
            yield
        finally:
            self._context.leave()

    def encode(self, item: MediaInputs) -> MediaFeatures:
        """Encodes an image, video or audio item, lazily.

        Raises:
            ValueError: The model or its encoder does not take this item.
        """
        if not isinstance(self.model, TakesMedia):
            raise ValueError(f"the model takes text only but got {item.kind}")
        patches.ensure_installed()
        with patches.native_tower(self.platform):
            return self.model.encode(item)

    def runs_program(self, num_rows: int) -> bool:
        """True if a step of this many decodes will probably become a GPU executable."""
        return self._graph_runner.reads_once(num_rows)

    @property
    def padded_from(self) -> int | None:
        """Minimum number of plain decodes that are padded to one of a few shapes; None if none are.

        Each shape is compiled once. With few rows, padding rows would read the weights of experts
        that no other row needs.
        """
        if not self.platform.has_cuda:
            return None
        return ops.max_product_rows() + 1 if self._has_experts else 1

    def _run(self, tokens: mx.array, step: Step, pools: list[mx.array]) -> StepOutput:
        """Runs the model's own code on these pools; the caches keep theirs. See
        `graph_runner.Forward`."""
        patches.ensure_installed()  # Unpatching mlx-lm uninstalls them.
        before = self.pools()
        self.restore(pools)
        self._context.enter(step, self._attention_activations)
        try:
            # Rounding can turn a difference in the last bits of a sum into a visible one.
            by_rows: bool | int = step.num_ordered_rows
            if self.layout.has_quantized_pools or self._activations == "int8":
                by_rows = True
            with patches.native_ops(
                step.plan.positions, self._activations, by_rows=by_rows, platform=self.platform
            ):
                more: dict[str, object] = {} if step.media is None else {"media": step.media}
                if step.features is not None:
                    more["features"] = step.features
                logits = self.model(tokens[:, None], cache=self.caches, **more)
                taps = () if self._taps is None else self._taps.take()
                if self._stage is not None:
                    taps = (*taps, self._stage.take())
                return StepOutput(self._output_rows.finish(logits), self.pools(), None, taps)
        finally:
            self._context.leave()
            self.restore(before)

    def repetition_of(self, inputs: StepInputs, num_rows: int | None = None) -> Repetition:
        """Decides how a step repeats. The caller pads its tokens to `Repetition.num_rows`.

        Args:
            num_rows: Tokens of the step if they are already padded; None decides their number.
        """
        media = inputs.media
        may_pad = num_rows is None and media is None and self._may_pad
        if num_rows is None:
            num_rows = sum(inputs.query_lens.tolist())  # faster than NumPy for a few
        if self._is_gathered:
            return Repetition(Repeat.NOT, num_rows, len(inputs.query_lens), False)
        padded_from = self.padded_from
        is_padded = padded_from is not None and num_rows >= padded_from
        return self._graph_runner.repetition_of(
            num_rows,
            len(inputs.query_lens),
            len(inputs.logit_rows),
            # The number of features depends on a step's images, so such a step does not repeat.
            is_of_arrays=not self.layout.has_states
            and inputs.bounds is None
            and not self._adapts_experts_on_gpu(inputs)
            and (media is None or (not len(media.rows) and media.bounds is None)),
            may_pad_prompts=may_pad and inputs.features is None,
            may_pad_decodes=may_pad and inputs.may_pad and (inputs.splits_drafts or is_padded),
        )

    def _adapts_experts_on_gpu(self, inputs: StepInputs) -> bool:
        """True for steps whose adapters change experts, which no GPU's executable serves."""
        layers = self.adapter_layers
        changes = layers is not None and layers.change_experts and inputs.adapters is not None
        return changes and not self.platform.on_cpu

    def _run_in_groups(self, tokens: mx.array, inputs: StepInputs) -> StepOutput:
        patches.ensure_installed()

        def forward(tokens: mx.array, features: mx.array | None) -> GatheredOutput:
            more = {} if features is None else {"features": features}
            logits = self._output_rows.finish(self.model(tokens, cache=self.caches, **more))
            return GatheredOutput(logits, () if self._taps is None else self._taps.take())

        layers = GatheredLayers(self.layout, self._attention, self._states, self.block_size)
        logits, taps = run_in_groups(forward, tokens, inputs, layers, self._context, self.platform)
        return StepOutput(logits, self.pools(), taps=taps)


def _check_media(model: nn.Module, inputs: StepInputs) -> None:
    assert inputs.media is not None
    if not isinstance(model, TakesMedia):
        raise ValueError("[step media] the model takes text only")
    inputs.media.check(int(inputs.query_lens.sum()))
    if inputs.media.rope_positions is not None and not model.uses_rope_positions:
        raise ValueError(
            f"[step media] rope_positions must be None for model_type {model.model_type!r}"
        )
