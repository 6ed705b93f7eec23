"""Recipes: how each family's processor is used, where families differ."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mlx_paged.content import Kind

#: An option of this package: the item is not cut into tiles.
WHOLE = "_whole"
# The processor, the kind, the placeholder, the item, options -> the processor's output.
Call = Callable[[Any, Kind, str, Any, Mapping[str, Any]], Mapping[str, Any]]


class Placeholder(NamedTuple):
    """A placeholder in the text of a prompt.

    Attributes:
        begin, end: Its range of characters.
        kind: Kind of the item that it stands for.
    """

    begin: int
    end: int
    kind: Kind


def one_row(token_ids: Any) -> list[int]:
    """Returns the tokens of a processor's output, which is a batch of one row."""
    found = np.array(token_ids)
    return found.reshape(-1).tolist()


def _attribute_marker(processor: Any, kind: Kind, index: int) -> str:
    found = getattr(processor, f"{kind}_token", None)
    if found is None:
        found = getattr(getattr(processor, "tokenizer", None), f"{kind}_token", None)
    return str(found) if found is not None else f"<{kind}>"


def _gemma3_marker(processor: Any, kind: Kind, index: int) -> str:
    return str(processor.boi_token)


def _phi_marker(processor: Any, kind: Kind, index: int) -> str:
    return f"<|{kind}_{index}|>"


def _negative(tokens: Sequence[int], arrays: Mapping[str, Any]) -> np.ndarray:
    return np.flatnonzero(np.array(tokens) < 0)


def _qwen3_marker(processor: Any, kind: Kind, index: int) -> str:
    if kind == "video":  # Frames with their times replace all three.
        return f"{processor.vision_start_token}{processor.video_token}{processor.vision_end_token}"
    return str(processor.image_token)


def _call_processor(
    processor: Any, kind: Kind, marker: str, item: Any, options: Mapping[str, Any]
) -> Mapping[str, Any]:
    given: dict[str, Any] = {"text": [marker], "return_tensors": "np", **options}
    if kind == "image":
        given["images"] = [item]
    elif kind == "video":
        # [num_frames, 3, height, width], as mlx-vlm loads a video.
        given["videos"] = [np.ascontiguousarray(np.transpose(item.frames, (0, 3, 1, 2)))]
        accepted = inspect.signature(type(processor).__call__).parameters
        if "fps" in accepted:
            given["fps"] = [float(item.fps)]
    else:
        given["audio"] = [item.samples]
    return processor(**given)


def _call_qwen2_5(
    processor: Any, kind: Kind, marker: str, item: Any, options: Mapping[str, Any]
) -> Mapping[str, Any]:
    output = dict(_call_processor(processor, kind, marker, item, options))
    if kind == "video":  # mlx-vlm's processor omits it.
        seconds = processor.video_processor.temporal_patch_size / float(item.fps)
        output["second_per_grid_ts"] = np.array([seconds])
    return output


def _call_omni(
    processor: Any, kind: Kind, marker: str, item: Any, options: Mapping[str, Any]
) -> Mapping[str, Any]:
    if kind == "audio":  # It needs the mask, and would pad to half a minute.
        options = {"padding": True, "return_attention_mask": True, **options}
    elif kind == "video":
        options = {"fps": float(item.fps), **options}
    return _call_processor(processor, kind, marker, item, options)


def _minicpmo_marker(processor: Any, kind: Kind, index: int) -> str:
    return f"<{kind}>./</{kind}>"


def _in_bounds(tokens: Sequence[int], arrays: Mapping[str, Any]) -> np.ndarray:
    """Rows between the marks of MiniCPM-o, of a picture's slices or of a sound."""
    found = [
        np.arange(begin, end)
        for name in ("image_bound", "audio_bounds")
        if name in arrays
        for begin, end in np.array(arrays[name][0]).reshape(-1, 2)
    ]
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def _pad_marker(processor: Any, kind: Kind, index: int) -> str:
    return f"<|{kind}_pad|>"


def _minicpmv_number(processor: Any, index: int) -> str:
    images = processor.image_processor
    if not images.use_image_id:
        return ""
    return f"{images.im_id_start}{index - 1}{images.im_id_end}"


def _call_dots(
    processor: Any, kind: Kind, marker: str, item: Any, options: Mapping[str, Any]
) -> Mapping[str, Any]:
    # Its processor uses one id for placeholders, regardless of the tokenizer.
    images = processor.image_processor
    output = dict(images(images=[item], return_tensors="np", **options))
    num = int(np.prod(output["image_grid_thw"])) // images.merge_size**2
    [token] = processor.tokenizer(marker, add_special_tokens=False)["input_ids"]
    return {"input_ids": [token] * num, **output}


def _call_deepseekocr(
    processor: Any, kind: Kind, marker: str, item: Any, options: Mapping[str, Any]
) -> Mapping[str, Any]:
    # It removes the last token as if that were an end token.
    output = dict(processor(text=f"{marker}\n", images=[item], **options))
    output["pixel_values"] = output.pop("images")
    output.pop("num_image_tokens", None)
    return output


def _sequence_mask(tokens: Sequence[int], arrays: Mapping[str, Any]) -> np.ndarray:
    return np.flatnonzero(np.array(arrays["images_seq_mask"]).reshape(-1))


def _call_fastvlm(
    processor: Any, kind: Kind, marker: str, item: Any, options: Mapping[str, Any]
) -> Mapping[str, Any]:
    # The model itself replaces one placeholder with all rows.
    output = dict(processor.image_processor([item], return_tensors="np", **options))
    return {"input_ids": [-200], **output}


def _call_phi4mm(
    processor: Any, kind: Kind, marker: str, item: Any, options: Mapping[str, Any]
) -> Mapping[str, Any]:
    if kind == "image":
        return {"input_ids": [-200], **processor.image_processor([item], **options)}
    output = processor.audio_processor([(item.samples, item.rate)])
    token = processor.tokenizer.convert_tokens_to_ids("<|endoftext11|>")
    return {"input_ids": [token] * int(output["audio_embed_sizes"][0]), **output}


def _phi4mm_rows(tokens: Sequence[int], arrays: Mapping[str, Any]) -> np.ndarray:
    shape = arrays.get("spatial_shapes")
    return np.arange(len(tokens) if shape is None else int(np.prod(shape)))


# Pixels of a side that FastVLM's tower makes a row and column of.
_FASTVLM_PATCH = 64


def _fastvlm_rows(tokens: Sequence[int], arrays: Mapping[str, Any]) -> np.ndarray:
    *_, height, width = np.array(arrays["pixel_values"]).shape
    return np.arange((height // _FASTVLM_PATCH) * (width // _FASTVLM_PATCH))


def _call_deepseek(
    processor: Any, kind: Kind, marker: str, item: Any, options: Mapping[str, Any]
) -> Mapping[str, Any]:
    if WHOLE in options:  # A choice of one size leaves a picture in one piece.
        options = {name: value for name, value in options.items() if name != WHOLE}
        processor = copy(processor)
        processor.candidate_resolutions = ((processor.image_size, processor.image_size),)
    output = dict(processor(text=marker, images=[item], **options))
    output["pixel_values"] = output.pop("images")
    for name in ("sft_format", "seq_lens"):
        output.pop(name, None)
    return output


def _call_molmo(
    processor: Any, kind: Kind, marker: str, item: Any, options: Mapping[str, Any]
) -> Mapping[str, Any]:
    # The text follows the picture's tokens.
    output = dict(processor(text=[""], images=[item], **options))
    tokens = one_row(output["input_ids"])
    end = processor.tokenizer.convert_tokens_to_ids(processor.image_end_token)
    last = max(i for i, token in enumerate(tokens) if token == end)
    return {**output, "input_ids": tokens[: last + 1]}


_MOLMO = "<|image|>"


def _indexed(tokens: Sequence[int], arrays: Mapping[str, Any]) -> np.ndarray:
    indices = np.array(arrays["image_input_idx"]).reshape(-1)
    return np.unique(indices[indices >= 0])


def _call_llava_next(
    processor: Any, kind: Kind, marker: str, item: Any, options: Mapping[str, Any]
) -> Mapping[str, Any]:
    from transformers.image_processing_utils import select_best_resolution

    output = dict(_call_processor(processor, kind, marker, item, options))
    sizes = processor.image_processor.image_grid_pinpoints
    best = select_best_resolution(np.array(output["image_sizes"]).reshape(-1).tolist(), sizes)
    size = output["pixel_values"].shape[-1]
    # Rows and columns of tiles, which do not follow from the number of tiles.
    return {**output, "tile_grid": np.array([best[0] // size, best[1] // size])}


def _paligemma_text(processor: Any, text: str, placeholders: Sequence[Placeholder]) -> str:
    """Replaces placeholders by the rows of their pictures; adds the start token after the last."""
    parts, done = [], 0
    for begin, end, _ in placeholders:
        parts += [text[done:begin], processor.image_token * processor.image_seq_length]
        done = end
    return "".join(parts) + processor.tokenizer.bos_token + text[done:] + "\n"


def _call_bunny(
    processor: Any, kind: Kind, marker: str, item: Any, options: Mapping[str, Any]
) -> Mapping[str, Any]:
    [pixels] = processor.image_processor.preprocess(images=[item], **options)
    # The model itself replaces one placeholder with 729 rows.
    return {"input_ids": [-200], "pixel_values": np.array(pixels, dtype=np.float32)[None]}


@dataclass(frozen=True)
class Recipe:
    """How a family's processor is used.

    Attributes:
        marker: The placeholder of an item in a text.
        call: Runs the processor for one item.
        text: The processor's text for a placeholder, if it makes one text of the prompt and tokens
            join across borders; None if tokens replace a placeholder.
        rows: Finds the rows among the processor's tokens; None: they have the placeholder's id.
        joins: The processor's text for a whole prompt, given its text and the placeholders in it;
            all items make one span.
        leads: True if items come before all text, after the start token.
        number: The processor's numbering before an item; "" if there is none.
        adds_start: True if the processor begins prompts with the start token (or the end token, if
            there is none), regardless of the tokenizer.
        whole_from: With this many items or more, none is cut into tiles; None: always the same.
    """

    marker: Callable[[Any, Kind, int], str] = _attribute_marker
    call: Call = _call_processor
    text: Callable[[Any, Kind], str] | None = None
    rows: Callable[[Sequence[int], Mapping[str, Any]], np.ndarray] | None = None
    joins: Callable[[Any, str, Sequence[Placeholder]], str] | None = None
    leads: bool = False
    number: Callable[[Any, int], str] | None = None
    adds_start: bool = False
    whole_from: int | None = None


RECIPES: dict[str, Recipe] = {
    "gemma3": Recipe(_gemma3_marker, text=lambda processor, kind: processor.full_image_sequence),
    "gemma3n": Recipe(
        text=lambda processor, kind: getattr(processor, f"full_{kind}_sequence"),
    ),
    "qwen2_5_vl": Recipe(call=_call_qwen2_5),
    "phi3_v": Recipe(_phi_marker, rows=_negative),
    "qwen3_omni_moe": Recipe(call=_call_omni),
    "minicpmo": Recipe(_minicpmo_marker, rows=_in_bounds),
    "deepseek_vl_v2": Recipe(call=_call_deepseek, adds_start=True, whole_from=3),
    "llava_next": Recipe(call=_call_llava_next),
    "llava_bunny": Recipe(lambda *_: "<image>", _call_bunny, rows=lambda *_: np.arange(729)),
    "molmo": Recipe(lambda *_: _MOLMO, _call_molmo, rows=_indexed, leads=True, adds_start=True),
    "paligemma": Recipe(joins=_paligemma_text),
    "phi4mm": Recipe(_phi_marker, _call_phi4mm, rows=_phi4mm_rows),
    "dots_ocr": Recipe(call=_call_dots),
    **dict.fromkeys(
        ("deepseekocr", "deepseekocr_2"),
        Recipe(call=_call_deepseekocr, rows=_sequence_mask, adds_start=True),
    ),
    "fastvlm": Recipe(call=_call_fastvlm, rows=_fastvlm_rows),
    "minicpmv4_6": Recipe(_pad_marker, rows=_in_bounds, number=_minicpmv_number),
    "internvl": Recipe(lambda *_: "<IMG_CONTEXT>"),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "indic_ocr"),
        Recipe(_qwen3_marker),
    ),
}
