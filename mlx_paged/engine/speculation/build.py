"""Builds the drafters and the speculator of an engine from its options."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.runner import ModelRunner
from mlx_paged.engine.sampling.masks import SequenceMasks
from mlx_paged.engine.speculation import costs
from mlx_paged.engine.speculation.assistant_drafter import AssistantDrafter
from mlx_paged.engine.speculation.config import SpeculativeConfig
from mlx_paged.engine.speculation.draft_model import (
    make_assistant,
    make_dflash,
    make_eagle3,
    make_model_drafter,
    make_mtp,
)
from mlx_paged.engine.speculation.drafter import Drafter
from mlx_paged.engine.speculation.head_drafter import HeadDrafter
from mlx_paged.engine.speculation.learned_costs import LearnedCosts
from mlx_paged.engine.speculation.lookup import LookupDrafter
from mlx_paged.engine.speculation.model_drafter import ModelDrafter
from mlx_paged.engine.speculation.speculator import Speculator
from mlx_paged.errors import InvalidParameterError, ModelLoadError, UnsupportedModelError
from mlx_paged.model.directory import model_directory
from mlx_paged.model.draft_heads.mtp import has_mtp
from mlx_paged.model.loader import LoadedModel
from mlx_paged.model.paged_model import PagedModel

logger = logging.getLogger(__name__)


def build_assistant(
    target: LoadedModel,
    paged: PagedModel,
    config: EngineConfig,
    masks: SequenceMasks,
    max_model_len: int | None,
) -> AssistantDrafter | None:
    """Creates the drafter if the method has an assistant model; None for other methods.

    Raises:
        InvalidParameterError: The assistant does not fit the target.
    """
    options = config.speculative_config
    if not isinstance(options, SpeculativeConfig) or config.runner != "generate":
        return None
    return make_assistant(options, target, paged, masks, max_model_len=max_model_len)


def build_draft_model(
    target: LoadedModel,
    paged: PagedModel,
    config: EngineConfig,
    masks: SequenceMasks,
    max_model_len: int | None,
    make_paged: Callable[[LoadedModel, EngineConfig], PagedModel],
) -> ModelDrafter | HeadDrafter | None:
    """Creates the drafter if the method has a draft model or a head; None for other methods.

    Args:
        make_paged: Builds the paged model of a draft model, with these options.

    Raises:
        InvalidParameterError: The draft model or head does not fit the target.
    """
    options = config.speculative_config
    if not isinstance(options, SpeculativeConfig) or config.runner != "generate":
        return None
    if options.method == "eagle3":
        return make_eagle3(options, target, paged, masks, max_model_len=max_model_len)
    if options.method == "dflash":
        return make_dflash(options, target, paged, masks, max_model_len=max_model_len)
    if options.method == "auto":
        if config.pipeline_parallel_size > 1:
            return None  # A head reads hidden states of layers that rank 0 does not hold.
        return _own_head(options, target, paged, masks, max_model_len)
    if options.method == "mtp":
        return make_mtp(options, target, paged, masks, max_model_len=max_model_len)
    if options.method != "draft_model":
        return None
    # The skipped layers are numbered as in the target.
    own = replace(config, kv_cache_dtype_skip_layers=())
    return make_model_drafter(
        options,
        target,
        masks,
        make_paged=lambda draft: make_paged(draft, own),
        max_model_len=max_model_len,
        max_rows=config.step_tokens,
    )


def _own_head(
    options: SpeculativeConfig,
    target: LoadedModel,
    paged: PagedModel,
    masks: SequenceMasks,
    max_model_len: int | None,
) -> HeadDrafter | None:
    """Creates the drafter of the checkpoint's own MTP head; None if it has no supported one."""
    path = model_directory(target.name)
    if path is None or not has_mtp(path, target.config):
        return None
    try:
        return make_mtp(options, target, paged, masks, max_model_len=max_model_len)
    except (InvalidParameterError, ModelLoadError, UnsupportedModelError) as error:
        logger.warning("the head of %s is not used: %s", target.name, error)
        return None


def build_speculator(
    runner: ModelRunner,
    config: EngineConfig,
    max_model_len: int | None,
    draft_model: ModelDrafter | HeadDrafter | None,
    vocab_size: int,
    assistant: AssistantDrafter | None,
) -> Speculator | None:
    """Creates the speculator and measures steps for it; None without speculation."""
    options = config.speculative_config
    if options is None or config.runner != "generate":
        return None
    assert isinstance(options, SpeculativeConfig)
    drafter: Drafter = draft_model or assistant or LookupDrafter(options)
    lookup = None
    if options.looks_up_all and draft_model is not None:
        lookup = LookupDrafter(options)
    make = partial(
        Speculator,
        options,
        drafter,
        lookup=lookup,
        max_rows=runner.model.platform.max_exact_rows,
        # Other ranks get the drafts with the rest of a step.
        reads_drafts=runner.share_tokens is not None,
    )
    if not options.adaptive:
        return make(None)

    def measure(
        runner: ModelRunner, longest: int | None, num_tokens: int
    ) -> costs.StepCosts | None:
        return costs.measure(
            runner,
            max_num_seqs=min(config.max_num_seqs, config.step_tokens),
            max_context_len=longest,
            num_tokens=num_tokens,
        )

    step_costs: costs.Costs | None
    if draft_model is not None:
        num_tokens = min(draft_model.num_tokens, vocab_size)
        draft_model.rounds = measure(draft_model.runner, draft_model.max_model_len, num_tokens)
        step_costs = measure(runner, max_model_len, num_tokens)
    else:
        step_costs = LearnedCosts(measure(runner, max_model_len, vocab_size))
    return make(step_costs)
