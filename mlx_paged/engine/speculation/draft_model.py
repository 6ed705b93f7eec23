"""Loads a draft model, and checks that it fits the model that it drafts for."""

from __future__ import annotations

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.engine.loading import load
from mlx_paged.engine.speculation.config import SpeculativeConfig
from mlx_paged.errors import InvalidParameterError
from mlx_paged.model.loader import LoadedModel
from mlx_paged.model.paged_model import PagedModel

_FIELD = "speculative_config.model"


def load_draft_model(config: SpeculativeConfig, target: LoadedModel) -> LoadedModel:
    """Loads the draft model of a model, in the same dtype.

    Raises:
        InvalidParameterError: Its vocabulary is another one.
        ModelLoadError, UnsupportedModelError: See `load`.
    """
    model = config.model
    assert model is not None
    loaded = model if isinstance(model, LoadedModel) else load(model, dtype=target.dtype)
    check_vocabulary(loaded, target)
    return loaded


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


def check_layout(paged: PagedModel, draft: LoadedModel) -> None:
    """Refuses a draft model whose past is more than keys and values in blocks.

    Raises:
        InvalidParameterError: It has recurrent layers.
    """
    if paged.layout.has_states:
        expected = f"a model without recurrent layers, which {draft.model_type!r} has"
        raise InvalidParameterError(_FIELD, expected, draft.name)
