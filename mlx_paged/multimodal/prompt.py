"""Makes the prompt of a text and its media items: tokens, spans, and the keys of their content."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlx_paged.content import KINDS, NOUNS, Kind
from mlx_paged.core.media import MediaSpan
from mlx_paged.errors import InvalidMediaError, MlxPagedError
from mlx_paged.model.media import MediaInputs, MediaPrompt, Span
from mlx_paged.multimodal.items import MediaItem
from mlx_paged.multimodal.prepared import PreparedMedia

logger = logging.getLogger(__name__)

# Larger arrays are inputs of the encoder, and follow from the rest of a key.
_MAX_GRID = 4096


def prepare(
    model: Any,
    text: str,
    items: Sequence[MediaItem],
    where: str,
    *,
    add_special_tokens: bool | None = None,
) -> PreparedMedia:
    """Makes the prompt of a text with its items. It computes, so do not call it on an event loop.

    Args:
        model: `LoadedModel.media`.
        text: The chat template's text, with the model's placeholders.
        items: The items of each kind, in the order of its placeholders.
        where: Subject of an error that is about no single item.
        add_special_tokens: See `MediaProcessor.encode`.

    Raises:
        InvalidMediaError: The processor refuses them.
    """
    by_kind = {kind: [item for item in items if item.kind == kind] for kind in KINDS}
    try:
        prompt = _processed(model, text, items, add_special_tokens)
    except MlxPagedError:
        raise
    except Exception as error:
        part = _refused(model, items) or where
        if not isinstance(error, ValueError):  # Processors raise those on purpose.
            logger.warning("the processor failed on %s", part, exc_info=error)
        lines = f"{error}".strip().splitlines()
        reason = lines[0][:200] if lines else type(error).__name__
        message = f"the model's processor does not take it: {reason}"
        raise InvalidMediaError(part, message) from error
    _check_counts(prompt, by_kind, where)
    settings = model.settings_digest
    used = {kind: iter(found) for kind, found in by_kind.items()}
    held = [[next(used[span.kind]) for _ in range(span.num_items)] for span in prompt.spans]
    spans = tuple(
        MediaSpan(
            span.offset,
            span.length,
            _key(found, settings, prompt, span, inputs),
            len(span.rows),
            bool(model.is_atomic(span.kind)),
        )
        for found, span, inputs in zip(held, prompt.spans, prompt.inputs)
    )
    parts = tuple(found[0].part for found in held)
    return PreparedMedia(prompt, spans, parts)


def _processed(
    model: Any, text: str, items: Sequence[MediaItem], special: bool | None = None
) -> MediaPrompt:
    prompt: MediaPrompt = model.process(
        text,
        images=[item.data for item in items if item.kind == "image"],
        videos=[item.data for item in items if item.kind == "video"],
        audios=[item.data for item in items if item.kind == "audio"],
        add_special_tokens=special,
    )
    return prompt


def _refused(model: Any, items: Sequence[MediaItem]) -> str | None:
    """Finds the item that a processor rejects, if it is one of them."""
    for item in items:
        try:
            _processed(model, model.placeholder(item.kind, 1), [item])
        except Exception:
            return item.part
    return None


def _check_counts(
    prompt: MediaPrompt, by_kind: Mapping[Kind, Sequence[MediaItem]], where: str
) -> None:
    """Checks the number of placeholders: a program may write too many, a template too few."""
    for kind, items in by_kind.items():
        count = sum(span.num_items for span in prompt.spans if span.kind == kind)
        if count != len(items):
            raise InvalidMediaError(
                where,
                f"the prompt has placeholders for {count} {NOUNS[kind]} and there are {len(items)}",
            )


def _key(
    items: Sequence[MediaItem],
    settings: bytes,
    prompt: MediaPrompt,
    span: Span,
    inputs: MediaInputs,
) -> bytes:
    """Returns the identity of a span's content: source, processor settings, grid and tokens."""
    hashed = hashlib.sha256(b"mlx-paged media")
    tokens = np.asarray(prompt.token_ids[span.offset : span.offset + span.length], np.int64)
    rows = np.asarray(span.rows, np.int64) - span.offset
    parts = [*(item.digest for item in items), settings, tokens.tobytes(), rows.tobytes()]
    for name, array in sorted(inputs.arrays.items()):
        parts.append(f"{name} {getattr(array, 'shape', None)}".encode())
        if isinstance(array, np.ndarray) and array.size <= _MAX_GRID and array.dtype.kind in "iub":
            parts.append(np.ascontiguousarray(array).tobytes())
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    return hashed.digest()
