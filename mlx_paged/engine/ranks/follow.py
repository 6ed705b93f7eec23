"""Runs on every rank but 0: repeats on its own pools whatever rank 0 does, until either ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import mlx.core as mx
import numpy as np

from mlx_paged.core import StepBatch
from mlx_paged.engine.build import prepare_model, resolve
from mlx_paged.engine.calibration import prove_kernels
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.input_tokens import KnownTokens
from mlx_paged.engine.kv_cache_config import KVCacheConfig
from mlx_paged.engine.loading import load
from mlx_paged.engine.memory import limit_buffer_cache, limit_run_ahead
from mlx_paged.engine.pooling.params import PoolerConfig
from mlx_paged.engine.pooling.runner import PoolingRunner
from mlx_paged.engine.ranks.adapters import AdapterReader, slots_of
from mlx_paged.engine.ranks.channel import Channel
from mlx_paged.engine.ranks.media import media_of
from mlx_paged.engine.ranks.messages import (
    ADAPTER,
    ADAPTER_LAYER,
    ADAPTER_SLOTS,
    ALL_ROWS,
    ALLOCATE,
    LIMITS,
    READY,
    RESET,
    START,
    STEP,
    Message,
    MessageError,
    StepReader,
)
from mlx_paged.engine.ranks.parallel_groups import ParallelGroups
from mlx_paged.engine.ranks.peers import shared_tokens
from mlx_paged.engine.runner import Chosen, LaunchedStep, ModelRunner
from mlx_paged.model.media import StepMedia

# Seconds without a message before the newest step is checked for a fault.
_QUIET = 1.0


class FollowRunner(ModelRunner):
    """Runs the model of each step, and receives the tokens that rank 0 sampled.

    Attributes:
        step_media: Media of the step that is launched next, or None.
    """

    def __init__(self, *arguments: object, world: mx.distributed.Group, **options: object):
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self._world = world
        self.step_media: StepMedia | None = None

    def _load_adapters(self, batch: StepBatch) -> None:
        """Does nothing: separate messages loaded the adapters before the step."""

    def _launch(
        self,
        batch: StepBatch,
        previous: LaunchedStep | KnownTokens | None,
        pools_before: list[mx.array],
        features: mx.array | None,
        bounds: np.ndarray | None,
    ) -> LaunchedStep:
        """Runs the model as rank 0 does, then receives the tokens that rank 0 samples."""
        self._copy_blocks(batch)
        rows = self._step_rows(batch)
        before = previous.chosen if isinstance(previous, LaunchedStep) else previous
        logits, pools, _, taps = self._forward(batch, rows, before, media=self.step_media)
        chosen = mx.zeros((rows.num_sampled,), dtype=mx.int32)
        if rows.num_sampled:
            # Ordered after the model's collectives, as on rank 0.
            [chosen] = mx.depends([chosen], [logits])
            chosen = shared_tokens(chosen, self._world)
        wanted = [logits] if len(rows.wanted) else []
        mx.async_eval(*wanted, chosen, *pools, *taps)  # type: ignore[no-untyped-call]
        launched = LaunchedStep(batch, pools[-1], pools_before)
        launched.chosen = Chosen(chosen, chosen)
        return launched


class FollowPoolingRunner(PoolingRunner):
    """Takes part in rank 0's pooling steps. Only rank 0 reads the results."""

    def _load_adapters(self, batch: StepBatch) -> None:
        """See `FollowRunner`."""


def follow(channel: Channel, world: mx.distributed.Group) -> None:
    """Follows rank 0 until it closes the channel.

    Raises:
        Exception: Whatever made this rank fail.
    """
    runner: ModelRunner | None = None
    newest: LaunchedStep | None = None
    reader, layers = StepReader(), AdapterReader()
    while True:
        if newest is not None and not channel.wait(_QUIET):
            ModelRunner.wait(newest)  # raises if it failed
        try:
            message = channel.receive()
        except EOFError:
            return
        if message.kind == START:
            runner = _runner(message.fields, channel, world)
            continue
        if runner is None:
            raise MessageError(f"{message.kind!r} came before {START!r}")
        if message.kind == STEP:
            if isinstance(runner, FollowRunner):
                runner.step_media = media_of(message)
            before, newest = newest, runner.launch(reader.step(message), newest)
            if before is not None:
                ModelRunner.wait(before)
        elif message.kind == ADAPTER_SLOTS:
            runner.model.enable_adapters(*slots_of(message))
        elif message.kind == ALL_ROWS:
            runner.model.prunes_last_layer = False
        elif message.kind == ADAPTER_LAYER:
            layers.read(message)
        elif message.kind == ADAPTER:
            runner.load_adapter(int(message.fields["slot"]), layers.take())
        elif message.kind == RESET:
            newest = None
            runner.reset()
        elif message.kind == ALLOCATE:
            newest = None
            specs = runner.model.layout.group_specs
            counts = dict(zip(specs, message.columns["num_blocks"], strict=True))
            runner.allocate(counts, int(message.fields["num_state_slots"]))
            limit_buffer_cache(None, sum(pool.nbytes for pool in runner.model.pools()), 0)
            limit_run_ahead(runner.model.platform)
        elif message.kind == LIMITS:
            cache_limit = int(message.fields["cache_limit"])
            runner.model.parts_ahead = int(message.fields["parts_ahead"])
            mx.set_cache_limit(cache_limit)
            limit_run_ahead(runner.model.platform, cache_limit)


def start_fields(
    model: object, dtype: str, config: EngineConfig, hosts: Sequence[str]
) -> dict[str, object]:
    """Returns the fields of the `START` message: the options that affect the model and its pools.

    Args:
        hosts: See `launch.ring_hosts`.
    """
    names = (
        *("block_size", "kv_cache_dtype", "kv_cache_dtype_skip_layers", "cpu_activations"),
        *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "typical_context_len"),
        *("disable_hybrid_kv_cache_manager", "enforce_eager", "enable_prefix_caching"),
        *("enable_chunked_prefill", "calibrate", "runner"),
    )
    options = {name: getattr(config, name) for name in names}
    options["kv_cache_dtype_skip_layers"] = list(config.kv_cache_dtype_skip_layers)
    pooler = config.pooler_config
    options["pooler_config"] = asdict(pooler) if isinstance(pooler, PoolerConfig) else None
    path = None if model is None else str(model)
    orders_all = config.speculative_config is not None
    return {
        **{"model": path, "dtype": dtype, "options": options, "orders_all": orders_all},
        **{"tensor_parallel_size": config.tensor_parallel_size, "hosts": list(hosts)},
    }


def _runner(fields: object, channel: Channel, world: mx.distributed.Group) -> ModelRunner:
    assert isinstance(fields, dict)
    groups = ParallelGroups.of(world, fields["tensor_parallel_size"], fields["hosts"])
    model = load(fields["model"], dtype=fields["dtype"], shard=groups.divide)
    channel.send(Message(READY).encode())
    config = resolve(model, EngineConfig(**fields["options"]))
    paged, _, max_model_len = prepare_model(model, config)
    prove_kernels(paged, config.calibrate)
    windows = KVCacheConfig(paged.layout, config, max_model_len).windows
    if config.pooler is not None:
        assert config.pooler.pooling_type is not None  # since `resolve`
        return FollowPoolingRunner(paged, config.pooler.pooling_type, windows=windows)
    return FollowRunner(paged, world=world, windows=windows, orders_all=fields["orders_all"])
