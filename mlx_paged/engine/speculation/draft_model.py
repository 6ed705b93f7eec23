"""Creates drafters with a model or a head: loads them, and checks that they fit the model.

Errors of options name `speculative_config.model`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.engine.loading import load
from mlx_paged.engine.runner import ModelRunner
from mlx_paged.engine.sampling.masks import SequenceMasks
from mlx_paged.engine.speculation.assistant_drafter import AssistantDrafter
from mlx_paged.engine.speculation.block_drafter import BlockDrafter
from mlx_paged.engine.speculation.chained_heads import ChainedHeadsDrafter
from mlx_paged.engine.speculation.config import SpeculativeConfig
from mlx_paged.engine.speculation.head_drafter import HeadDrafter
from mlx_paged.engine.speculation.model_drafter import ModelDrafter
from mlx_paged.errors import InvalidParameterError
from mlx_paged.model.directory import model_directory
from mlx_paged.model.draft_heads.base import input_embeddings, page_head
from mlx_paged.model.draft_heads.dflash import DFlashConfig, load_dflash
from mlx_paged.model.draft_heads.eagle3 import Eagle3Config, load_eagle3
from mlx_paged.model.draft_heads.gemma4_assistant import (
    AssistantConfig,
    is_assistant,
    load_assistant,
)
from mlx_paged.model.draft_heads.mtp import load_mtp_heads
from mlx_paged.model.layout import Mode
from mlx_paged.model.loader import LoadedModel, local_directory
from mlx_paged.model.paged_model import PagedModel
from mlx_paged.model.taps import FINAL

_FIELD = "speculative_config.model"

# --- Draft models ---------------------------------------------------------------------------------


def make_model_drafter(
    options: SpeculativeConfig,
    target: LoadedModel,
    masks: SequenceMasks,
    *,
    make_paged: Callable[[LoadedModel], PagedModel],
    max_model_len: int | None,
    max_rows: int,
) -> ModelDrafter:
    """Loads a draft model, in the dtype of the model.

    Args:
        make_paged: Converts a loaded model to paged caches.
        max_model_len: Maximum tokens of a sequence; None: no limit.
        max_rows: Maximum rows of a step.

    Raises:
        InvalidParameterError: It does not fit the model.
        ModelLoadError, UnsupportedModelError: See `load`.
    """
    given = options.model
    assert given is not None
    draft = given if isinstance(given, LoadedModel) else load(given, dtype=target.dtype)
    check_vocabulary(draft, target)
    paged = make_paged(draft)
    if paged.layout.has_states:
        expected = f"a model without recurrent layers, which {draft.model_type!r} has"
        raise InvalidParameterError(_FIELD, expected, draft.name)
    limits = [max_model_len, draft.max_model_len, paged.layout.max_context_len]
    longest = min((n for n in limits if n is not None), default=None)
    paged.limit_contexts(longest)
    widen = partial(_of_width, width=target.vocab_size)
    return ModelDrafter(
        ModelRunner(paged, masks=masks, orders_all=True, to_vocabulary=widen),
        masks,
        max_rows=max_rows,
        max_model_len=longest,
        num_tokens=draft.vocab_size,
    )


def check_vocabulary(draft: LoadedModel, target: LoadedModel) -> None:
    """Refuses a draft model whose token ids mean other tokens.

    Models of one family may pad their vocabularies to different sizes, or add tokens at the end.

    Raises:
        InvalidParameterError: It names the first token that differs.
    """
    ours, theirs = _tokens(target.tokenizer), _tokens(draft.tokenizer)
    common = ours.keys() & theirs.keys()
    different = [i for i in common if ours[i] != theirs[i]]
    if different or len(common) < len(ours) // 2:
        expected = f"a model with the vocabulary of {target.name} ({len(ours)} tokens)"
        if different:
            first = min(different)
            expected += f", where token {first} is {ours[first]!r} and not {theirs[first]!r}"
        raise InvalidParameterError(_FIELD, expected, draft.name)


def _tokens(tokenizer: TokenizerWrapper) -> dict[int, str]:
    return {index: token for token, index in tokenizer.get_vocab().items()}


def _of_width(logits: mx.array, *, width: int) -> mx.array:
    """``[num_rows, vocab_size]`` -> ``[num_rows, width]``. Missing tokens are impossible."""
    missing = width - logits.shape[-1]
    if not missing:
        return logits
    if missing < 0:
        return logits[:, :width]
    return mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf)


# --- Draft heads ----------------------------------------------------------------------------------


def make_eagle3(
    options: SpeculativeConfig,
    target: LoadedModel,
    paged: PagedModel,
    masks: SequenceMasks,
    *,
    max_model_len: int | None,
) -> HeadDrafter:
    """Loads an EAGLE-3 head, and taps the model.

    Args:
        paged: The model that it drafts for, before its pools are allocated.
        max_model_len: Maximum tokens of a sequence; None: no limit.

    Raises:
        InvalidParameterError: It does not fit the model.
        ModelLoadError: Its files cannot be read.
    """
    path = local_directory(str(options.model))
    config = Eagle3Config.read(path)
    embeddings, size = input_embeddings(target.model)
    _check_fits(
        target,
        str(options.model),
        ("vocab_size", target.vocab_size, config.layer.vocab_size),
        ("target_hidden_size", size, config.target_hidden_size),
    )
    projection = paged.output_projection
    output = None if projection is None else (projection.module, projection.method)
    head, tokens = load_eagle3(path, config, embeddings, output)
    layers = config.tapped_layers(len(getattr(target.model, "layers", ())))
    _tap(paged, layers, target, str(options.model))
    spread = None if tokens is None else _Spread(tokens, target.vocab_size)
    runner = ModelRunner(
        page_head(head, paged, head.feedback_layer),
        masks=masks,
        orders_all=True,
        to_vocabulary=spread,
    )
    return HeadDrafter(
        runner,
        masks,
        max_model_len=max_model_len,
        num_tokens=config.layer.vocab_size,
        num_features=config.num_features,
    )


def make_assistant(
    options: SpeculativeConfig,
    target: LoadedModel,
    paged: PagedModel,
    masks: SequenceMasks,
    *,
    max_model_len: int | None,
) -> AssistantDrafter | None:
    """Loads a Gemma 4 assistant, and taps the model; None if the options name none.

    Args:
        paged: The model that it drafts for, before its pools are allocated.
        max_model_len: Maximum tokens of a sequence; None: no limit.

    Raises:
        InvalidParameterError: It does not fit the model.
        ModelLoadError: Its files cannot be read.
    """
    if options.method != "mtp" or options.model is None:
        return None
    name = str(options.model)
    path = local_directory(name)
    if not is_assistant(path):
        return None
    config = AssistantConfig.read(path)
    _check_fits(target, name, ("vocab_size", target.vocab_size, config.layer.vocab_size))
    assistant = load_assistant(path, config, target.dtype)
    _tap(paged, [FINAL], target, name)
    try:
        drafter = AssistantDrafter(assistant, paged, masks, max_model_len=max_model_len)
    except ValueError as error:
        raise InvalidParameterError(_FIELD, f"a head for {target.name} ({error})", name) from error
    width = config.backbone_hidden_size
    _check_fits(target, name, ("hidden_size", drafter.target.hidden_size, width))
    return drafter


def make_mtp(
    options: SpeculativeConfig,
    target: LoadedModel,
    paged: PagedModel,
    masks: SequenceMasks,
    *,
    max_model_len: int | None,
) -> HeadDrafter:
    """Loads the MTP head of a model's own checkpoint, or of the directory that the options name.

    Args:
        paged: The model, before its pools are allocated.
        max_model_len: Maximum tokens of a sequence; None: no limit.

    Raises:
        InvalidParameterError: The model has none.
        ModelLoadError: Its files cannot be read.
    """
    path = model_directory(target.name)
    if options.model is not None:
        path = local_directory(str(options.model))
    projection = paged.output_projection
    if path is None or projection is None:
        expected = f"a directory with the MTP head of {target.name}"
        raise InvalidParameterError(_FIELD, expected, options.model)
    heads = load_mtp_heads(path, target.config, target.dtype)
    embeddings, _ = input_embeddings(target.model)
    for head, own_output in heads:
        output = (projection.module, projection.method)
        if own_output is not None:
            output = (own_output, "__call__")
        head.attach(embeddings, *output, norm=lambda: target.model.model.norm)
    num_heads = len(heads)
    if num_heads > 1 and options.method == "mtp" and options.max_drafts > num_heads:
        expected = f"at most {num_heads} for {target.name}, which has a head for each draft"
        field = "speculative_config.num_speculative_tokens"
        raise InvalidParameterError(field, expected, options.max_drafts)
    try:
        paged.tap([heads[0][0].tapped_layer(len(getattr(target.model, "layers", ())))])
    except ValueError as error:
        expected = f"another one for {target.name} ({error})"
        raise InvalidParameterError("speculative_config.method", expected, "mtp") from error
    # Layers that need dense copies in the model need them in its head.
    mode = paged.layout.mode if paged.layout.mode.is_gathered else Mode.NATIVE
    runners = [
        ModelRunner(
            page_head(head, paged, head.feedback_layer, mode),
            masks=masks,
            orders_all=True,
            to_vocabulary=partial(_of_width, width=target.vocab_size),
        )
        for head, _ in heads
    ]
    num_tokens = target.vocab_size
    if num_heads > 1:
        return ChainedHeadsDrafter(
            runners, masks, max_model_len=max_model_len, num_tokens=num_tokens
        )
    return HeadDrafter(runners[0], masks, max_model_len=max_model_len, num_tokens=num_tokens)


def make_dflash(
    options: SpeculativeConfig,
    target: LoadedModel,
    paged: PagedModel,
    masks: SequenceMasks,
    *,
    max_model_len: int | None,
) -> BlockDrafter:
    """Loads a DFlash head, and taps the model.

    Args:
        paged: The model that it drafts for, before its pools are allocated.
        max_model_len: Maximum tokens of a sequence; None: no limit.

    Raises:
        InvalidParameterError: It does not fit the model or the options.
        ModelLoadError: Its files cannot be read.
    """
    path, name = local_directory(str(options.model)), str(options.model)
    config = DFlashConfig.read(path)
    embeddings, size = input_embeddings(target.model)
    _check_fits(
        target,
        name,
        ("vocab_size", target.vocab_size, config.vocab_size),
        ("hidden_size", size, config.hidden_size),
    )
    max_drafts, projection = config.max_drafts, paged.output_projection
    if options.max_drafts > max_drafts:
        expected = f"at most {max_drafts} for {name}, whose blocks have no more drafts"
        field = "speculative_config.num_speculative_tokens"
        raise InvalidParameterError(field, expected, options.max_drafts)
    if projection is None:
        raise InvalidParameterError(_FIELD, f"another method for {target.name}", name)
    head = load_dflash(path, config, target.dtype)
    head.attach(embeddings, projection.module, projection.method)
    _tap(paged, config.tapped_layers, target, name)
    widen = partial(_of_width, width=target.vocab_size)
    runner = ModelRunner(
        page_head(head, paged, FINAL if config.chains else None),
        masks=masks,
        orders_all=True,
        to_vocabulary=widen,
    )
    return BlockDrafter(
        runner,
        masks,
        max_model_len=max_model_len,
        num_tokens=target.vocab_size,
        head=head,
    )


def _tap(paged: PagedModel, layers: Sequence[int], target: LoadedModel, name: str) -> None:
    try:
        paged.tap(layers)
    except ValueError as error:
        expected = f"a head for {target.name} ({error})"
        raise InvalidParameterError(_FIELD, expected, name) from error


def _check_fits(target: LoadedModel, name: str, *pairs: tuple[str, int, int]) -> None:
    """Compares (what, the model's, the head's)."""
    for what, wanted, found in pairs:
        if wanted != found:
            expected = f"a head for {target.name}, whose {what} is {wanted} and not {found}"
            raise InvalidParameterError(_FIELD, expected, name)


class _Spread:
    """Spreads the logits of a head's vocabulary over the model's.

    Args:
        tokens: ``[draft_vocab_size]`` int32: the model's token of each of the head's.
    """

    def __init__(self, tokens: mx.array, vocab_size: int) -> None:
        ids = np.array(tokens)
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            expected = f"a head whose d2t leads to tokens below {vocab_size}"
            raise InvalidParameterError(_FIELD, expected, int(ids.max()))
        columns = np.full(vocab_size, len(ids), dtype=np.int32)
        columns[ids] = np.arange(len(ids), dtype=np.int32)
        self._columns = mx.array(columns)
        mx.eval(self._columns)

    def __call__(self, logits: mx.array) -> mx.array:
        nothing = mx.full((len(logits), 1), -mx.inf, logits.dtype)
        return mx.take(mx.concatenate([logits, nothing], axis=1), self._columns, axis=1)
