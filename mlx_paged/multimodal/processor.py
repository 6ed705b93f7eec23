"""Processes prompts with pictures, videos and sounds to tokens and encoder inputs.

Each item goes through the checkpoint's own processor alone, so that equal items make equal arrays
regardless of the rest of a prompt. The processor's output for the item's *placeholder* (the text
that stands for it) replaces the placeholder in the prompt. Nothing here touches the device or the
engine's thread.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from mlx_paged.content import KINDS, Kind
from mlx_paged.model.media import MediaInputs, MediaPrompt, Span
from mlx_paged.multimodal.families import MEDIA_FAMILIES, MediaFamily
from mlx_paged.multimodal.marked_text import MarkedText
from mlx_paged.multimodal.marks import MARK, marked
from mlx_paged.multimodal.mlx_vlm import MLX_VLM_VERSION
from mlx_paged.multimodal.processed_items import ProcessedItems
from mlx_paged.multimodal.recipes import RECIPES, WHOLE, Placeholder, Recipe, one_row
from mlx_paged.multimodal.rope_positions import Grid, rope_positions

logger = logging.getLogger(__name__)

# Entries that processors return besides the encoder's arrays.
_TEXT_OUTPUTS = frozenset(
    ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels")
)
_PLURAL = {"image": "images", "video": "videos", "audio": "audios"}
# Names of a placeholder's id in configs.
_PLACEHOLDER_IDS = ("{}_token_id", "{}_token_index", "media_placeholder_token_id")


@dataclass(frozen=True, eq=False)
class _Expanded:
    """The tokens that replace a placeholder.

    Attributes:
        token_ids: Tokens of the item.
        rows: ``[num_rows]`` int32: indices of rows among these.
        inputs: Inputs of the encoder, with all the processor's tokens, including start tokens:
            some of its arrays count them.
    """

    token_ids: list[int]
    rows: np.ndarray
    inputs: MediaInputs


_Items: TypeAlias = Sequence[tuple[Kind, _Expanded]]
# Bytes of processed items kept for later prompts.
_PROCESSED_BYTES = 512 << 20
# Sides of the squares with which `sufficient_side` tests a processor.
_PROBED_SIDES = (4096, 2048, 1024, 512)


def _num_bytes(item: _Expanded) -> int:
    return sum(getattr(array, "nbytes", 0) for array in item.inputs.arrays.values())


class MediaModel:
    """The media that a model takes, and its processor. Any thread may use it.

    Args:
        processor: mlx-vlm's or transformers', for one checkpoint.
        config: mlx-vlm's config of the model.
        family: How the model is run.
        options: Keyword arguments for the processor, such as ``min_pixels``.
    """

    def __init__(
        self,
        processor: Any,
        config: Any,
        family: MediaFamily,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._processor = _with_locked_tokenizer(processor)
        self._config = config
        self._recipe = RECIPES.get(family.module, Recipe())
        # Some processors compute with mlx, whose streams belong to threads.
        self._stream = mx.new_thread_local_stream(mx.cpu)
        self.family = family
        self.options = dict(options or {})
        self._processed = ProcessedItems(_PROCESSED_BYTES, _num_bytes)
        self._processed_whole = ProcessedItems(_PROCESSED_BYTES, _num_bytes)  # for `whole_from`
        self._side_lock = threading.Lock()
        self._side: int | None = None  # see `sufficient_side`
        self._is_side_known = False

    def __reduce__(self) -> tuple[Any, ...]:
        # For another process, which makes its own locks and keeps its own items.
        return _media_model, (self._processor, self._config, self.family.module, self.options)

    def with_options(self, options: Mapping[str, Any]) -> MediaModel:
        """Returns a copy with these keyword arguments for the processor."""
        return MediaModel(self._processor, self._config, self.family, options)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The media that prompts may have."""
        return self.family.kinds

    @property
    def uses_rope_positions(self) -> bool:
        """True if RoPE turns by time, height and width."""
        return self.family.uses_rope_positions

    def is_atomic(self, kind: Kind) -> bool:
        """True if the positions of such an item see each other."""
        return kind in self.family.atomic(self._config)

    @property
    def sampling_rate(self) -> int | None:
        """Samples a second of the sounds that the processor takes; None: it takes none."""
        extractor = getattr(self._processor, "feature_extractor", None)
        if extractor is None:
            extractor = getattr(self._processor, "audio_processor", None)
        rate = getattr(extractor, "sampling_rate", None)
        if rate is None:
            return 16_000 if "audio" in self.kinds else None
        return int(rate)

    @property
    def chat_template(self) -> str | None:
        """The processor's template, for tokenizers without one of their own."""
        template = getattr(self._processor, "chat_template", None)
        return template if isinstance(template, str) else None

    @property
    def settings_digest(self) -> bytes:
        """Returns a digest, 32 bytes, of everything that determines the processor's outputs."""
        parts: dict[str, Any] = {
            "mlx_vlm": MLX_VLM_VERSION,
            "family": self.family.module,
            "options": self.options,
        }
        for name in ("", "image_processor", "video_processor", "feature_extractor"):
            part = getattr(self._processor, name, None) if name else self._processor
            if part is not None:
                settings = {k: v for k, v in vars(part).items() if _is_setting(v)}
                parts[name] = {"type": type(part).__name__, **settings}
        text = json.dumps(parts, sort_keys=True, default=lambda value: type(value).__name__)
        return hashlib.sha256(text.encode()).digest()

    def placeholder(self, kind: Kind, index: int = 1) -> str:
        """The text that stands for the item number `index` of its kind, from 1 on.

        Raises:
            ValueError: The model takes no such items.
        """
        self._require(kind)
        return self._recipe.marker(self._processor, kind, index)

    def _require(self, kind: Kind) -> None:
        if kind not in self.kinds:
            raise ValueError(f"the model takes {', '.join(self.kinds)} but got {kind}")

    def sufficient_side(self) -> int | None:
        """Returns the side of a square picture above which the processor reduces pictures.

        Larger pictures make no more rows, so nothing is lost if a file is decoded at a fraction of
        its size that is well above this. The first call runs the processor on gray squares.

        Returns:
            None if it takes squares of 4096 pixels unchanged, or takes no squares.
        """
        with self._side_lock:
            if not self._is_side_known:
                self._side, self._is_side_known = self._probed_side(), True
            return self._side

    def _probed_side(self) -> int | None:
        from PIL import Image

        sufficient, largest = None, None
        for side in _PROBED_SIDES:
            square = Image.new("RGB", (side, side), (127, 127, 127))
            try:
                inputs = self.process(self.placeholder("image"), images=[square]).inputs[0]
            except Exception as error:  # of a processor
                logger.info("pictures are decoded at their full size: %s", error)
                return None
            shapes = inputs.num_rows, {name: np.shape(a) for name, a in inputs.arrays.items()}
            if largest is None:
                largest = shapes
            elif shapes == largest:
                sufficient = side
            else:
                break
        return sufficient

    def process(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        audios: Sequence[Any] = (),
        *,
        add_special_tokens: bool | None = None,
    ) -> MediaPrompt:
        """Makes the tokens of a prompt, and its items' encoder inputs. It computes for a while.

        Args:
            prompt: Text with a placeholder for each item, with the users' own ones marked
                (`literal`); or messages, whose contents are texts or lists of
                ``{"type": "text", "text": ...}`` and ``{"type": "image"}`` (or "video", "audio")
                parts, for the model's own template.
            images: PIL images, in the order of their placeholders.
            videos: Objects with ``frames`` ``[num_frames, height, width, 3]`` uint8 and ``fps``.
            audios: Objects with ``samples`` ``[num_samples]`` float32 and ``rate``.
            add_special_tokens: See `encode`.

        Raises:
            ValueError: The numbers of placeholders and items differ, or the processor refuses an
                item.
        """
        text = prompt if isinstance(prompt, str) else self._rendered(prompt)
        given = {"image": list(images), "video": list(videos), "audio": list(audios)}
        with mx.stream(self._stream):
            return self._process(text, given, add_special_tokens)

    def _process(
        self, text: str, given: Mapping[str, list[Any]], special: bool | None
    ) -> MediaPrompt:
        placeholders = self._find_placeholders(text, given)
        counts = {kind: [k for _, _, k in placeholders].count(kind) for kind in KINDS}
        for kind in KINDS:
            if given[kind]:
                self._require(kind)
            if counts[kind] != len(given[kind]):
                raise ValueError(
                    f"the prompt has placeholders for {counts[kind]} {_PLURAL[kind]} but there are "
                    f"{len(given[kind])}"
                )
        items: dict[Kind, Iterator[Any]] = {kind: iter(given[kind]) for kind in KINDS}
        whole_from = self._recipe.whole_from
        whole = whole_from is not None and len(placeholders) >= whole_from
        expanded = [
            (kind, self._expand_once(kind, next(items[kind]), whole=whole))
            for _, _, kind in placeholders
        ]
        if self._recipe.joins is not None and placeholders:
            return self._joined(self._recipe.joins(self._processor, text, placeholders), expanded)
        if self._recipe.text is not None:
            tokens, offsets = self._with_texts(text, placeholders, expanded, special)
        else:
            tokens, offsets = self._with_tokens(text, placeholders, expanded, special)
        spans, inputs = [], []
        for offset, (kind, item) in zip(offsets, expanded):
            length = int(item.rows[-1] - item.rows[0]) + 1
            rows = offset + item.rows - item.rows[0]
            spans.append(Span(offset, length, rows.astype(np.int32), kind))
            inputs.append(item.inputs)
        result = MediaPrompt(tokens, spans, inputs)
        if not (self.uses_rope_positions and spans):
            return result
        positions, delta = rope_positions(
            len(tokens), self._grids(spans, inputs), fractions=self.family.has_fractions
        )
        return replace(result, rope_positions=positions, rope_delta=delta)

    def _joined(self, text: str, expanded: _Items) -> MediaPrompt:
        """Makes a prompt whose positions all see each other, with its items encoded together."""
        kind = expanded[0][0]
        tokens = self.encode(text, add_special_tokens=False)
        rows = np.flatnonzero(np.isin(tokens, self._placeholder_ids(kind))).astype(np.int32)
        count = sum(len(item.rows) for _, item in expanded)
        if len(rows) != count:
            raise ValueError(f"the prompt has {len(rows)} rows of its {_PLURAL[kind]}, not {count}")
        arrays = {
            name: np.concatenate([item.inputs.arrays[name] for _, item in expanded])
            for name in expanded[0][1].inputs.arrays
        }
        inputs = MediaInputs(kind, arrays, np.array(tokens, dtype=np.int32), rows)
        first, length = int(rows[0]), int(rows[-1] - rows[0]) + 1
        if self.family.sees_whole_prompt:
            first, length = 0, len(tokens)
        return MediaPrompt(tokens, [Span(first, length, rows, kind, len(expanded))], [inputs])

    # Text.

    @property
    def tokenizer(self) -> Any:
        """The processor's tokenizer."""
        return getattr(self._processor, "tokenizer", self._processor)

    def _rendered(self, messages: Sequence[Mapping[str, Any]]) -> str:
        for processor in (self.tokenizer, self._processor):
            if getattr(processor, "chat_template", None):
                return processor.apply_chat_template(
                    [dict(message) for message in messages],
                    tokenize=False,
                    add_generation_prompt=True,
                )
        raise ValueError("the model has no chat template: give its prompt as text")

    def encode(self, text: str, *, add_special_tokens: bool | None = None) -> list[int]:
        """Returns the tokens of a prompt without media.

        Args:
            text: From a chat template; placeholders that users wrote are marked (`literal`).
            add_special_tokens: Add the tokens that the tokenizer puts around a text; None: unless
                the text begins with the start token. Transformers' processors have this rule for
                any prompt, with or without media.
        """
        if MARK in text:
            return self._marked_pieces(text, add_special_tokens)[0]
        return self._encode(text, begins=True, special=add_special_tokens)

    def _encode(self, text: str, *, begins: bool, special: bool | None = None) -> list[int]:
        adds = begins and self._adds_special(text, special)
        tokens = list(self.tokenizer(text, add_special_tokens=adds)["input_ids"])
        return self._with_start(tokens, special) if begins else tokens

    def _adds_special(self, text: str, special: bool | None) -> bool:
        if special is not None:
            return special
        start = getattr(self.tokenizer, "bos_token", None)
        return not (start and text.startswith(start))

    def _with_start(self, tokens: list[int], special: bool | None) -> list[int]:
        start = self.tokenizer.bos_token_id
        if start is None and self._recipe.adds_start:
            start = self.tokenizer.eos_token_id
        if special is False or not self._recipe.adds_start or tokens[:1] == [start]:
            return tokens
        return [start, *tokens]

    def _marked_pieces(self, text: str, special: bool | None) -> list[list[int]]:
        """Returns the tokens before, between and after the placeholders of a marked text."""
        pieces = self._marked_text.pieces(text)
        if self._adds_special(text, special):
            before, after = self._special()
            pieces[0] = [*before, *pieces[0]]
            pieces[-1] = [*pieces[-1], *after]
        pieces[0] = self._with_start(pieces[0], special)
        return pieces

    @cached_property
    def _marked_text(self) -> MarkedText:
        like = self.placeholder(self.kinds[0])
        return MarkedText(self.tokenizer, self._placeholders({}), like)

    def literal(self, value: Any, counts: Mapping[Kind, int]) -> Any:
        """Marks the placeholders in texts of users, which stay text (see `marks`).

        Args:
            value: A text, or lists and mappings with texts.
            counts: Items of the prompt by kind; some placeholders are numbered.
        """
        return marked(value, self._placeholders(counts))

    def _placeholders(self, counts: Mapping[Kind, int]) -> list[str]:
        """Returns everything that a template may write for items, and the texts of row tokens."""
        found = [
            self.placeholder(kind, i + 1)
            for kind in self.kinds
            for i in range(max(1, counts.get(kind, 1)))
        ]
        ids = [token for kind in self.kinds for token in self._placeholder_ids(kind)]
        return list(dict.fromkeys([*found, *filter(None, map(self._text_of, ids))]))

    def _text_of(self, token: int) -> str | None:
        try:
            found = self.tokenizer.convert_ids_to_tokens(token)
        except (IndexError, OverflowError, TypeError, ValueError):  # an id beyond the vocabulary
            return None
        return found if isinstance(found, str) else None

    def _find_placeholders(self, text: str, given: Mapping[str, list[Any]]) -> list[Placeholder]:
        """Returns the placeholders in a text, in order."""
        markers: dict[str, Kind] = {}
        for kind in self.kinds:
            for i in range(max(1, len(given[kind]))):  # They may be numbered.
                markers[self.placeholder(kind, i + 1)] = kind
        if not markers:
            return []
        longest_first = sorted(markers, key=len, reverse=True)
        pattern = re.compile("|".join(re.escape(marker) for marker in longest_first))
        return [Placeholder(*m.span(), markers[m.group()]) for m in pattern.finditer(text)]

    def _with_tokens(
        self, text: str, placeholders: Sequence[Placeholder], expanded: _Items, special: bool | None
    ) -> tuple[list[int], list[int]]:
        """Returns a prompt's tokens with items in place of placeholders, and the spans' offsets."""
        find = self._before_text if self._recipe.leads else self._between
        between = find(text, placeholders, special)
        tokens, offsets = list(between[0]), []
        for i, ((_, item), following) in enumerate(zip(expanded, between[1:])):
            tokens += self._number(i + 1)
            offsets.append(len(tokens) + int(item.rows[0]))
            tokens += [*item.token_ids, *following]
        return tokens, offsets

    def _before_text(
        self, text: str, placeholders: Sequence[Placeholder], special: bool | None
    ) -> list[list[int]]:
        """Like `_between`, with all placeholders moved to the front, after the start token."""
        tokens = self.encode("".join(_texts_around(text, placeholders)), add_special_tokens=special)
        num_first = 0 if special is False else 1
        if not placeholders:
            return [tokens]
        return [tokens[:num_first], *([] for _ in placeholders[1:]), tokens[num_first:]]

    def _number(self, index: int) -> list[int]:
        if self._recipe.number is None:
            return []
        return self._encode(self._recipe.number(self._processor, index), begins=False)

    def _between(
        self, text: str, placeholders: Sequence[Placeholder], special: bool | None
    ) -> list[list[int]]:
        """Returns the tokens before, between and after placeholders."""
        if MARK in text:
            texts = _texts_around(text, placeholders)
            return self._marked_pieces(self._marked_text.separator.join(texts), special)
        whole = self._encode(text, begins=True, special=special)
        found, done = [], 0
        for begin, end, _ in placeholders:
            marker = self._encode(text[begin:end], begins=False)
            size = len(marker)
            at = next((i for i in range(done, len(whole)) if whole[i : i + size] == marker), None)
            if at is None:
                break
            found.append(whole[done:at])
            done = at + size
        else:
            return [*found, whole[done:]]
        # The placeholder is not a token, so the texts around it are encoded separately.
        return [
            self._encode(part, begins=i == 0, special=special)
            for i, part in enumerate(_texts_around(text, placeholders))
        ]

    def _with_texts(
        self, text: str, placeholders: Sequence[Placeholder], expanded: _Items, special: bool | None
    ) -> tuple[list[int], list[int]]:
        """Like `_with_tokens`, with the recipe's texts for placeholders."""
        assert self._recipe.text is not None
        parts, done = [], 0
        for begin, end, kind in placeholders:
            parts += [text[done:begin], self._recipe.text(self._processor, kind)]
            done = end
        tokens = self.encode("".join(parts) + text[done:], add_special_tokens=special)
        offsets, at = [], 0
        for kind, item in expanded:
            ids = self._placeholder_ids(kind)
            first = next(i for i in range(at, len(tokens)) if tokens[i] in ids)
            length = int(item.rows[-1] - item.rows[0]) + 1
            span = item.token_ids[int(item.rows[0]) :][:length]
            if tokens[first : first + length] != span:
                raise ValueError(f"the processor's {kind} is not as its placeholder is written")
            offsets.append(first)
            at = first + length
        return tokens, offsets

    # Items.

    def _expand_once(self, kind: Kind, item: Any, *, whole: bool = False) -> _Expanded:
        if whole:
            return self._processed_whole.get(item, lambda: self._expand(kind, item, {WHOLE: True}))
        return self._processed.get(item, lambda: self._expand(kind, item, {}))

    def _expand(self, kind: Kind, item: Any, more: Mapping[str, Any]) -> _Expanded:
        """Runs the processor for one item and its placeholder alone."""
        text = self.placeholder(kind)
        output = self._recipe.call(self._processor, kind, text, item, {**self.options, **more})
        made = one_row(output["input_ids"])
        arrays = {
            name: _as_numpy(value)
            for name, value in output.items()
            if name not in _TEXT_OUTPUTS and value is not None
        }
        if self._recipe.rows is not None:
            rows = self._recipe.rows(made, arrays)
        else:
            rows = np.flatnonzero(np.isin(made, self._placeholder_ids(kind)))
        if not len(rows):
            raise ValueError(f"the processor made no rows of this {kind}")
        rows = rows.astype(np.int32)
        inputs = MediaInputs(kind, arrays, np.array(made, dtype=np.int32), rows)
        if rows[-1] >= len(made):  # rows that the model makes of its tokens
            return _Expanded([0] * len(rows), rows, inputs)
        before, after = self._special()
        tokens = made
        start = getattr(self.tokenizer, "bos_token_id", None)
        if not before and start is not None and tokens[0] == start:
            before = [start]  # Some processors add it themselves.
        before = before + self._number(1)
        if before and tokens[: len(before)] == before:
            tokens, rows = tokens[len(before) :], rows - len(before)
        if after and tokens[-len(after) :] == after:
            tokens = tokens[: -len(after)]
        # Phi 3 has negative ids for rows, which nothing else in an engine accepts.
        return _Expanded([max(0, token) for token in tokens], rows, inputs)

    def _placeholder_ids(self, kind: Kind) -> list[int]:
        """Returns the token ids that stand for the rows of such items."""
        names = [name.format(kind) for name in _PLACEHOLDER_IDS]
        found = [getattr(self._config, name, None) for name in names]
        return [token for token in found if isinstance(token, int)]

    def _special(self) -> tuple[list[int], list[int]]:
        """Tokens that the tokenizer puts before and after any text."""
        plain = list(self.tokenizer("a", add_special_tokens=False)["input_ids"])
        whole = list(self.tokenizer("a")["input_ids"])
        for at in range(len(whole) - len(plain) + 1):
            if whole[at : at + len(plain)] == plain:
                return whole[:at], whole[at + len(plain) :]
        return [], []

    def _grids(self, spans: Sequence[Span], inputs: Sequence[MediaInputs]) -> list[Grid]:
        merge = int(self._config.vision_config.spatial_merge_size)
        grids = []
        for span, item in zip(spans, inputs):
            if item.kind == "audio":
                continue
            grid = item.arrays["video_grid_thw" if item.kind == "video" else "image_grid_thw"]
            frames, height, width = np.array(grid).reshape(-1)[:3].tolist()
            # Adjacent rows: all of a picture, or a frame of a video with text between frames.
            runs = np.split(span.rows, np.flatnonzero(np.diff(span.rows) > 1) + 1)
            seconds = self._positions_of_frame(item)
            for run in runs:
                size = (frames // len(runs), height // merge, width // merge)
                grids.append(Grid(int(run[0]), *size, seconds))
        return grids

    def _positions_of_frame(self, item: MediaInputs) -> float:
        """Returns the RoPE time positions per frame (Qwen 2.5 VL and Omni); 1 for other models."""
        a_second = getattr(self._config, "position_id_per_seconds", None) or getattr(
            self._config.vision_config, "tokens_per_second", None
        )
        seconds = item.arrays.get("second_per_grid_ts", item.arrays.get("video_second_per_grid"))
        if item.kind != "video" or not a_second or seconds is None:
            return 1.0
        return float(a_second) * float(np.array(seconds).reshape(-1)[0])


def _texts_around(text: str, placeholders: Sequence[Placeholder]) -> list[str]:
    """Returns the texts before, between and after placeholders."""
    begins = [0, *(placeholder.end for placeholder in placeholders)]
    ends = [*(placeholder.begin for placeholder in placeholders), len(text)]
    return [text[begin:end] for begin, end in zip(begins, ends)]


def _as_numpy(value: Any) -> Any:
    if isinstance(value, mx.array):
        if value.dtype == mx.bfloat16:
            value = value.astype(mx.float32)
        return np.array(value)
    if isinstance(value, (list, tuple)):
        return [_as_numpy(part) for part in value]
    return value


def _is_setting(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_setting(part) for part in value)
    if isinstance(value, dict):
        return all(_is_setting(part) for part in value.values())
    return value is None or isinstance(value, (bool, int, float, str))


class _LockedTokenizer:
    """A tokenizer that one thread uses at a time: Rust's are borrowed for as long as they run."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _LockedTokenizer, (self._tokenizer,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return self._tokenizer(*args, **kwargs)

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return self._tokenizer.encode(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def _media_model(
    processor: Any, config: Any, module: str, options: Mapping[str, Any]
) -> MediaModel:
    return MediaModel(processor, config, MEDIA_FAMILIES[module], options)


def _with_locked_tokenizer(processor: Any) -> Any:
    tokenizer = getattr(processor, "tokenizer", None)
    if tokenizer is not None and not isinstance(tokenizer, _LockedTokenizer):
        processor.tokenizer = _LockedTokenizer(tokenizer)
    return processor
