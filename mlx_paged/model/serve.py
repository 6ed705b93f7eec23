"""From a loaded model to one that runs on paged caches, or to the reason why it does not."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import mlx.nn as nn

from mlx_paged.errors import UnsupportedModelError
from mlx_paged.model.config_fields import vocab_size
from mlx_paged.model.families import require_family
from mlx_paged.model.paged_model import PagedModel
from mlx_paged.model.probe import page
from mlx_paged.model.verify import difference_from_dense, tolerance_of

logger = logging.getLogger(__name__)


def serve(model: nn.Module, config: Mapping[str, Any], *, block_size: int) -> PagedModel:
    """Makes a model of a proven or registered family run on paged caches.

    Args:
        model: its modules are changed in place.
        config: its ``config.json``.
        block_size: tokens of a KV block.

    Raises:
        UnsupportedModelError: for a family that is neither, a model that runs in none of the
            family's modes, and one whose logits are not those of the dense cache.
    """
    family = require_family(config)
    model_type = str(config.get("model_type", family.name))
    paged = page(model, model_type, modes=family.modes, block_size=block_size)
    if family.must_compare(paged.layout.mode):
        difference = difference_from_dense(paged, vocab_size(config))
        if not difference < tolerance_of(paged):
            raise UnsupportedModelError(
                model_type,
                f"its logits on paged caches ({paged.layout.mode}) differ from the dense ones by "
                f"{difference:.1e} of their size",
            )
        logger.warning(
            "model_type %r is not proven as this model runs (%s); it was compared with mlx-lm's "
            "dense cache and differs by %.1e",
            model_type,
            paged.layout.mode,
            difference,
        )
    return paged
