"""Measures the memory that encoders need for the largest items."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged.content import Kind
from mlx_paged.model.media import MediaFeatures, MediaInputs
from mlx_paged.multimodal.items import VideoFrames
from mlx_paged.multimodal.options import IoOptions, MediaOptions

logger = logging.getLogger(__name__)

Encode = Callable[[MediaInputs], MediaFeatures]

_GIB = 1 << 30
# Pixels of each side of the larger item that measures an encoder's memory.
_PROFILED: dict[Kind, int] = {"image": 1024, "video": 256}
# Pixels of a frame to reserve memory for; processors take seconds for clips at the limits.
_PROFILED_FRAME_PIXELS = 512 * 512


def feature_bytes(config: Mapping[str, Any]) -> int | None:
    """Estimates the bytes of one row's features before any are made; None: unknown.

    Args:
        config: The model's ``config.json``.
    """
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) and "hidden_size" in inner else config
    hidden_size = text.get("hidden_size")
    return hidden_size * 4 if isinstance(hidden_size, int) and hidden_size > 0 else None


def with_media(
    activations: int,
    encode: Encode,
    media: Any,
    options: MediaOptions,
    *,
    max_num_seqs: int,
    step_tokens: int,
    model_len: int | None = None,
    room: int | None = None,
) -> int:
    """Returns the bytes that the largest step of a multimodal model needs.

    Args:
        activations: Bytes of the largest step of text.
        encode: Encodes an item, lazily.
        media: Processor of the model's media (`processor.MediaModel`).
        options: The limits of media.
        max_num_seqs: Maximum sequences of a step.
        step_tokens: Maximum tokens of a step, see `max_num_batched_tokens`.
        model_len: Maximum tokens of a prompt, including its items; None means no limit.
        room: Maximum bytes for encoders; None means no limit.
    """
    if any(media.is_atomic(kind) for kind in media.kinds):
        # A chunk that is not cut may exceed max_num_batched_tokens by the number of decodes.
        activations += activations * max_num_seqs // step_tokens
    # A step encodes before its forward pass, and frees the encoders' memory by then.
    for kind in _PROFILED:
        if kind not in media.kinds or not options.max_items(kind):
            continue
        needed = tower_bytes(encode, media, kind, options, model_len)
        if room is not None and needed > room:
            logger.warning(
                "the tower may need %.1f GiB for the largest %s, and %.1f GiB are reserved: "
                "large ones may run out of memory. Limit their size by mm_processor_kwargs (for "
                "many models max_pixels) or media_limits",
                needed / _GIB,
                kind,
                room / _GIB,
            )
            needed = room
        activations = max(activations, needed)
    return activations


def tower_bytes(
    encode: Encode, media: Any, kind: Kind, options: MediaOptions, model_len: int | None
) -> int:
    """Returns the bytes to encode the largest item of a kind that limits, processor and context
    allow.

    It runs two smaller items and extrapolates: an encoder's memory grows with the rows of an item,
    or with their square if it masks all pairs. If the processor or the encoder refuses both items,
    nothing is measured, and the model is served anyway.
    """
    side, measured = _PROFILED[kind], dict[int, int]()  # bytes by rows
    try:
        for each in (side // 2, side):
            inputs, _ = _profile_item(media, kind, each, options)
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            mx.eval(*encode(inputs).arrays())
            measured[inputs.num_rows] = max(0, mx.get_peak_memory() - before)
            del inputs
        if len(measured) == 1:  # The processor resizes all items to one size.
            return max(measured.values())
        return int(_extrapolated(measured, _max_rows(media, kind, options, model_len)))
    except Exception as error:  # from the processor or the encoder
        logger.warning("the memory of the tower for a %s was not measured: %s", kind, error)
        return max(measured.values(), default=0)


def _extrapolated(measured: dict[int, int], rows: int) -> float:
    """Extrapolates the bytes for a number of rows from those of one or two other numbers."""
    (small, small_bytes), (large, large_bytes) = min(measured.items()), max(measured.items())
    if rows <= large:
        return large_bytes
    # bytes = (linear + quadratic * rows) * rows
    quadratic = 0.0
    if small != large:
        quadratic = (large_bytes / large - small_bytes / small) / (large - small)
    # Growth is at most quadratic, and at least linear.
    quadratic = min(max(quadratic, 0.0), large_bytes / large**2)
    return (large_bytes / large + quadratic * (rows - large)) * rows


def _max_rows(media: Any, kind: Kind, options: MediaOptions, model_len: int | None) -> int:
    """Returns the rows of the largest item that a prompt can have; a clip has usual frames."""
    pixels, found = options.limits.max_image_pixels, 0
    if kind == "video":
        pixels = min(
            pixels, options.limits.max_video_pixels // _frames(options), _PROFILED_FRAME_PIXELS
        )
    side, max_side = _PROFILED[kind], max(1, math.isqrt(pixels))
    while True:
        side = min(side, max_side)
        inputs, num_tokens = _profile_item(media, kind, side, options)
        if model_len is not None and num_tokens >= model_len:
            return model_len
        # Processors reduce large items.
        if inputs.num_rows <= found or side == max_side:
            return max(found, inputs.num_rows)
        found = inputs.num_rows
        side *= 2


def _frames(options: MediaOptions) -> int:
    return options.io.num_frames if options.io.num_frames > 0 else IoOptions().num_frames


def _profile_item(
    media: Any, kind: Kind, side: int, options: MediaOptions
) -> tuple[MediaInputs, int]:
    """Returns the processor's output for a gray square, and the tokens of its prompt."""
    from PIL import Image

    item: Any = Image.new("RGB", (side, side), (127, 127, 127))
    if kind == "video":
        shape = (_frames(options), side, side, 3)  # a view of one pixel
        item = VideoFrames(np.broadcast_to(np.uint8(127), shape))
    prompt = media.process(media.placeholder(kind, 1), **{f"{kind}s": [item]})
    return prompt.inputs[0], len(prompt.token_ids)
