"""Builds the parts of an engine from a loaded model and the engine's options."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mlx_paged import kernels
from mlx_paged.core import KVManager, SchedulerConfig
from mlx_paged.engine import memory, pressure_sources, warm_up
from mlx_paged.engine.calibration import prove_kernels
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.grammar.compiler import GrammarCompiler
from mlx_paged.engine.intake import Intake
from mlx_paged.engine.kv_cache_config import KVCacheConfig, PoolSizes
from mlx_paged.engine.lora.files import Adapter, read_adapter
from mlx_paged.engine.lora.request import LoRARequest
from mlx_paged.engine.lora.store import AdapterStore
from mlx_paged.engine.media import StepMediaBuilder
from mlx_paged.engine.offload.build import build_offloading
from mlx_paged.engine.offload.offloading import Offloading
from mlx_paged.engine.pool_memory import PoolMemory
from mlx_paged.engine.pooling.params import check_dimensions_fit, prompts_of
from mlx_paged.engine.pooling.runner import Classifier, PoolingRunner
from mlx_paged.engine.pressure import MemoryPressure
from mlx_paged.engine.ranks.lead import LeadPoolingRunner, LeadRunner, Ranks
from mlx_paged.engine.relief import Relief
from mlx_paged.engine.runner import ModelRunner
from mlx_paged.engine.sampling.logprobs import LogprobReport
from mlx_paged.engine.sampling.masks import MaskSource, SequenceMasks
from mlx_paged.engine.speculation.build import build_assistant, build_draft_model, build_speculator
from mlx_paged.engine.speculation.head_drafter import HeadDrafter
from mlx_paged.engine.speculation.speculator import Speculator
from mlx_paged.engine.step_columns import StepColumns
from mlx_paged.errors import InvalidParameterError, UnsupportedModelError
from mlx_paged.model import option_costs
from mlx_paged.model.directory import model_directory
from mlx_paged.model.loader import LoadedModel
from mlx_paged.model.lora import RANK_STEP
from mlx_paged.model.paged_model import PagedModel
from mlx_paged.model.prepare import prepare_kernels
from mlx_paged.model.wrap import build_paged_model
from mlx_paged.parsing.reasoning import ReasoningFormat, format_of
from mlx_paged.platform import Platform

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineParts:
    """The parts of an engine, and properties of its model.

    Attributes:
        config: The options, resolved for the model.
        relief: Returns memory when the system is short of it. Its `pools` create the KV store.
        make_intake: Creates the intake for a maximum request length.
        cache_limit: Maximum bytes of MLX's buffer cache.
        report: Adds the texts of the tokens to log-probabilities.
        max_model_len, reasoning_format, hidden_size, labels, prompts: See `EngineInfo`.
        media: The model's media processor, with the engine's options.
        speculator: Proposes drafts; None without speculation.
        offloading: Keeps evicted blocks; None if they are dropped.
    """

    config: EngineConfig
    runner: ModelRunner
    relief: Relief
    scheduler_config: SchedulerConfig
    columns: StepColumns
    make_intake: Callable[[int], Intake]
    cache_limit: int | None
    report: LogprobReport
    max_model_len: int | None
    reasoning_format: ReasoningFormat | None
    media: Any | None
    hidden_size: int | None
    labels: tuple[str, ...]
    prompts: Mapping[str, str]
    speculator: Speculator | None
    offloading: Offloading | None


class PreparedModel(NamedTuple):
    """A paged model without pools.

    Attributes:
        model_limit: Maximum context tokens that the model supports; None: no limit.
        max_model_len: Maximum context tokens with the engine's options.
    """

    paged: PagedModel
    model_limit: int | None
    max_model_len: int | None


def resolve(model: LoadedModel, given: EngineConfig) -> EngineConfig:
    """Returns the options that a caller gave, resolved for a model."""
    platform, directory = Platform.current(), model_directory(model.name)
    config = given.for_model(directory, model.config, classifies=model.head is not None)
    return memory.with_step_tokens(config, platform).with_step_time(
        draws_screen=platform.draws_screen
    )


def prepare_model(model: LoadedModel, config: EngineConfig) -> PreparedModel:
    """Builds the paged model; every rank runs this.

    Args:
        config: From `resolve`.

    Raises:
        InvalidParameterError, UnsupportedModelError: See `build_engine`.
    """
    paged = _paged_model(model, config, Platform.current())
    limits = [model.max_model_len, paged.layout.max_context_len]
    model_limit = min((n for n in limits if n is not None), default=None)
    max_model_len = config.model_len(model_limit)
    paged.limit_contexts(max_model_len)
    return PreparedModel(paged, model_limit, max_model_len)


def build_engine(
    model: LoadedModel,
    given: EngineConfig,
    on_kernel: kernels.OnKernel | None,
    ranks: Ranks | None = None,
) -> EngineParts:
    """Builds the model, its pools and its kernels, and warms it up.

    Args:
        given: The options as the caller gave them.
        on_kernel: See `Engine`.
        ranks: The ranks, whose parts of the model are loaded; None: there is only this one.

    Raises:
        InvalidParameterError, UnsupportedModelError: The options do not fit the model or the
            memory.
    """
    platform, tokenizer = Platform.current(), model.tokenizer
    config, media = resolve(model, given), model.media
    if media is not None and config.mm_processor_kwargs:
        media = media.with_options(config.mm_processor_kwargs)
    generates = config.runner == "generate"
    # Created first, because its threads work while the pools are allocated.
    compiler = _grammar_compiler(model, config) if generates else None
    reasoning_format = format_of(config.reasoning_parser, tokenizer)
    paged, model_limit, max_model_len = prepare_model(model, config)
    adapters, default_adapter = _adapters(paged, config)
    # A tokenizer may have more tokens than its model, so masks use the compiler's size.
    masks = SequenceMasks(0 if compiler is None else compiler.num_words)
    assistant = build_assistant(model, paged, config, masks, max_model_len)
    draft_model = None
    if assistant is None:
        draft_model = build_draft_model(
            model,
            paged,
            config,
            masks,
            max_model_len,
            make_paged=lambda draft, own: _paged_model(draft, own, paged.platform),
        )
    companion_bytes = 0 if draft_model is None else draft_model.bytes_per_token
    kv_config = KVCacheConfig(paged.layout, config, max_model_len, companion_bytes)
    runner = _runner(paged, config, kv_config, model, masks, ranks)
    if prove_kernels(paged, config.calibrate) is not None:
        platform = paged.platform
    with_media = _with_media(runner, config, model)
    sizes, activations = memory.allocate_pools(
        runner, kv_config, config, model_limit, with_media, draft_model
    )
    cache_limit = memory.limit_buffer_cache(
        activations,
        sum(pool.nbytes for pool in paged.pools()),
        4 * config.max_num_seqs * model.vocab_size,
    )
    runners = [runner] if draft_model is None else [*draft_model.runners, runner]
    for each in runners:
        prepare_kernels(each.model, on_kernel)
    memory.limit_run_ahead(platform, cache_limit)
    if isinstance(runner, LeadRunner):
        runner.share_limits(cache_limit)
    if warm_up.is_needed(config, platform):
        for each in runners:
            own = (default_adapter, _named_adapters(config, adapters)) if each is runner else ()
            warm_up.warm_up(each, config, max_model_len, on_kernel, *own)
    if assistant is not None:
        assistant.windows = runner.windows
        assistant.measure()
    speculator = build_speculator(
        runner, config, max_model_len, draft_model, model.vocab_size, assistant
    )
    classifier = _classifier(paged, model, config)
    report = LogprobReport(tokenizer)
    hidden_size: int | None = getattr(runner, "hidden_size", None)

    def make_intake(max_request_len: int) -> Intake:
        return Intake(
            config,
            tokenizer,
            model.vocab_size,
            reasoning_format=reasoning_format,
            media=media,
            media_reason=model.media_reason,
            compiler=compiler,
            classifier=classifier,
            hidden_size=hidden_size,
            max_request_len=max_request_len,
            max_model_len=max_model_len,
            report=report,
            adapters=adapters,
            default_adapter=default_adapter,
        )

    # A draft model can recompute missing blocks; a head cannot. With several heads, only the first
    # one's blocks are kept: the others draft worse until the window of their layers has passed.
    head = draft_model.runner.model if isinstance(draft_model, HeadDrafter) else None
    offloading = build_offloading(paged, model, config, kv_config, max_model_len, head)

    new_kv = partial(_new_kv, config, kv_config, sizes, offloading)
    step_blocks = -(-config.step_tokens // config.block_size)
    pools = PoolMemory(
        runner, kv_config, sizes, new_kv, step_blocks=step_blocks, companion=draft_model
    )
    follows = config.memory_pressure == "auto" and not platform.has_cuda and ranks is None
    source = pressure_sources.system_source() if follows else None
    return EngineParts(
        config=config,
        runner=runner,
        relief=Relief(MemoryPressure(source), pools, offloading),
        scheduler_config=config.scheduler_config(
            model_limit, _feature_bytes(model), encodes_slowly=platform.on_cpu
        ),
        columns=StepColumns(masks, samples=generates, has_media=runner.media is not None),
        make_intake=make_intake,
        cache_limit=cache_limit,
        report=report,
        max_model_len=max_model_len,
        reasoning_format=reasoning_format,
        media=media,
        hidden_size=hidden_size,
        labels=() if classifier is None else classifier.head.labels,
        prompts=prompts_of(model_directory(model.name)),
        speculator=speculator,
        offloading=offloading,
    )


def _grammar_compiler(model: LoadedModel, config: EngineConfig) -> GrammarCompiler:
    """Creates the compiler of structured outputs."""
    return GrammarCompiler(
        model.tokenizer,
        model.vocab_size,
        model.tokenizer.eos_token_ids,
        timeout=config.structured_outputs_timeout,
        cache_size=config.structured_outputs_cache_size,
    )


def _new_kv(
    config: EngineConfig,
    kv_config: KVCacheConfig,
    sizes: PoolSizes,
    offloading: Offloading | None,
) -> KVManager:
    """Creates an empty KV store over pools of these sizes."""
    kv = KVManager(
        sizes.num_blocks,
        config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        windows=kv_config.window_specs(sizes),
        states=kv_config.state_spec(sizes),
        tier=None if offloading is None else offloading.new_tier(),
    )
    if offloading is not None:
        offloading.attach(kv)
    return kv


def _paged_model(model: LoadedModel, config: EngineConfig, platform: Platform) -> PagedModel:
    """Builds the paged model with the options' KV format and activations."""
    paged = build_paged_model(
        model.model, model.config, block_size=config.block_size, platform=platform
    )
    _set_kv_format(paged, config)
    paged.round_activations(config.cpu_activations)
    cost = option_costs.of_activations(model.model, config.cpu_activations)
    if cost is not None:
        logger.warning("%s", cost)
    paged.repeats_steps = not config.enforce_eager
    return paged


def _adapters(
    paged: PagedModel, config: EngineConfig
) -> tuple[AdapterStore | None, Adapter | None]:
    """Prepares slots for adapters; returns their store and the default adapter.

    Raises:
        AdapterError: See `read_adapter`.
        InvalidParameterError: The device does not support `lora_dtype`.
    """
    if not config.num_adapter_slots:
        return None, None
    targets, default, rank = paged.adapter_targets(), None, 0
    if config.adapter_path is not None:
        path = Path(config.adapter_path).expanduser().absolute()
        default = read_adapter(path.name, path, targets)
        rank = default.rank
    store = None
    if config.enable_lora:
        rank = max(rank, config.max_lora_rank)
        kept = config.max_cpu_loras or config.max_loras
        store = AdapterStore(targets, max_rank=rank, max_adapters=kept)
    rank = -(-rank // RANK_STEP) * RANK_STEP
    paged.enable_adapters(config.num_adapter_slots, rank, config.lora_dtype)
    return store, default


def _named_adapters(config: EngineConfig, store: AdapterStore | None) -> list[Adapter]:
    """Reads the adapters whose steps the warm-up prepares.

    Raises:
        AdapterError, InvalidParameterError: See `AdapterStore.get`.
    """
    if store is None:
        return []
    paths = dict.fromkeys(config.warm_up_loras)
    return [store.get(LoRARequest(Path(p).name, i, p)) for i, p in enumerate(paths, 1)]


def _set_kv_format(paged: PagedModel, config: EngineConfig) -> None:
    if config.kv_format is None:
        return
    layout = paged.layout.with_kv_format(config.kv_format, config.kv_cache_dtype_skip_layers)
    paged.layout = layout
    name, kept = config.kv_format.name, [spec for spec in layout.attention if not spec.kv_format]
    if any(spec.latent for spec in kept):
        logger.warning("kv_cache_dtype %r: latents (MLA) are kept as the model computes", name)
    if layout.has_states:
        logger.info("kv_cache_dtype %r: recurrent states are kept as the model computes", name)


def _runner(
    paged: PagedModel,
    config: EngineConfig,
    kv_config: KVCacheConfig,
    model: LoadedModel,
    masks: MaskSource,
    ranks: Ranks | None,
) -> ModelRunner:
    """Creates the runner: for generation or pooling, on one rank or several.

    Raises:
        UnsupportedModelError: The model does not support pooling.
        InvalidParameterError: `dimensions` exceeds the size of its hidden states.
    """
    pooler = config.pooler
    if pooler is None:
        make = ModelRunner if ranks is None else partial(LeadRunner, ranks=ranks)
        return make(
            paged,
            windows=kv_config.windows,
            media=_step_media(paged, model),
            masks=masks,
            orders_all=config.speculative_config is not None,
        )
    assert pooler.pooling_type is not None
    pools = PoolingRunner if ranks is None else partial(LeadPoolingRunner, ranks=ranks)
    try:
        runner = pools(paged, pooler.pooling_type, windows=kv_config.windows)
    except ValueError as error:
        raise UnsupportedModelError(model.model_type, str(error)) from error
    check_dimensions_fit("pooler_config.dimensions", pooler.dimensions, runner.hidden_size)
    return runner


def _classifier(paged: PagedModel, model: LoadedModel, config: EngineConfig) -> Classifier | None:
    """Creates the classifier of a model that classifies texts or scores pairs; None for others.

    Raises:
        InvalidParameterError: A token of `classifier_from_token` is not in the vocabulary.
        UnsupportedModelError: Other ranks hold the weights of these tokens.
    """
    if model.head is not None:
        return Classifier(model.head)
    pooler = config.pooler
    if pooler is None or pooler.classifier_from_token is None:
        return None
    vocabulary = model.tokenizer.get_vocab()
    ids = []
    for token in pooler.classifier_from_token:
        if vocabulary.get(token, model.vocab_size) >= model.vocab_size:
            expected = "tokens of the model's vocabulary"
            raise InvalidParameterError("pooler_config.classifier_from_token", expected, token)
        ids.append(vocabulary[token])
    try:
        return Classifier.of(paged, ids)
    except ValueError as error:
        raise UnsupportedModelError(model.model_type, str(error)) from error


# --- Media ----------------------------------------------------------------------------------------


def _step_media(paged: PagedModel, model: LoadedModel) -> StepMediaBuilder | None:
    """Creates the builder of a step's media; None for a text-only model."""
    if model.media is None:
        return None
    from mlx_paged.multimodal import step_media

    rope = model.media.uses_rope_positions
    return step_media.StepMediaBuilder(paged.encode, uses_rope_positions=rope)


def _with_media(
    runner: ModelRunner, config: EngineConfig, model: LoadedModel
) -> memory.WithMedia | None:
    """Makes the function that adds the needs of encoders to those of a step; None without any."""
    if model.media is None:
        return None
    from mlx_paged.multimodal.memory import with_media

    return lambda activations, model_len, room: with_media(
        activations,
        runner.model.encode,
        model.media,
        config.media_options,
        max_num_seqs=config.max_num_seqs,
        step_tokens=config.step_tokens,
        model_len=model_len,
        room=room,
    )


def _feature_bytes(model: LoadedModel) -> int | None:
    """Estimates the bytes of one row's features before any are made; None if unknown."""
    if model.media is None:
        return None
    from mlx_paged.multimodal.memory import feature_bytes

    return feature_bytes(model.config)
