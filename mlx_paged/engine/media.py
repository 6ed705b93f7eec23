"""The engine's interface to media: turns contents with media into prompts, and builds steps' media.

The rest of the engine, the server and the command line use only contents (`mlx_paged.content`) and
this module. Code that loads, decodes and processes items is imported with the first item.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from mlx_paged.content import MediaSource, check_kinds
from mlx_paged.core import StepBatch
from mlx_paged.model.media import StepMedia
from mlx_paged.multimodal.options import IoOptions, MediaOptions
from mlx_paged.multimodal.prepared import PreparedMedia, SequenceMedia, check_prepared

if TYPE_CHECKING:
    from mlx_paged.multimodal.loader import MediaLoader

__all__ = [
    "IoOptions",
    "MediaPrompts",
    "PreparedMedia",
    "SequenceMedia",
    "StepMediaBuilder",
    "TextWithMedia",
    "check_prepared",
    "data_sources",
    "image_types",
    "rendered",
    "source_of",
]

Messages = Sequence[Mapping[str, Any]]


# --- Contents -------------------------------------------------------------------------------------


def source_of(
    part: Mapping[str, Any], where: str, io: IoOptions | None = None, *, objects: bool = False
) -> MediaSource:
    """Returns the source that a part of a message names; see `multimodal.parts.source_of`."""
    from mlx_paged.multimodal import parts

    return parts.source_of(part, where, io, objects=objects)


def data_sources(given: Any, field: str) -> list[MediaSource]:
    """Returns the items of a prompt's `multi_modal_data`; see `multimodal.parts.data_sources`."""
    from mlx_paged.multimodal import parts

    return parts.data_sources(given, field)


def image_types() -> list[str]:
    """Returns the media types of images that can be decoded; none without Pillow."""
    from mlx_paged.multimodal import decode

    return decode.image_types()


def rendered(
    messages: Messages,
    processor: Any,
    render: Callable[[Any], str],
    variants: Callable[[Messages], Iterable[tuple[Messages, Sequence[str]]]],
    tell: Callable[[Sequence[str]], None],
) -> str:
    """Returns the text of a conversation with media; see `multimodal.rendering.rendered`."""
    from mlx_paged.multimodal import rendering

    return rendering.rendered(messages, processor, render, variants, tell)


# --- Prompts --------------------------------------------------------------------------------------


class TextWithMedia(NamedTuple):
    """A prompt with the media for its placeholders, not loaded yet.

    Attributes:
        text: The text with the model's placeholders. Placeholders that users wrote are marked
            (`multimodal.marks`).
        sources: The media, in the order of the placeholders of their kind.
    """

    text: str
    sources: list[MediaSource]

    @classmethod
    def of(cls, text: str, sources: list[MediaSource]) -> TextWithMedia:
        """Returns a prompt whose placeholders all stand for media."""
        from mlx_paged.multimodal.marks import marked

        return cls(marked(text, ()), sources)

    @property
    def unmarked(self) -> str:
        """The text as the users wrote it."""
        from mlx_paged.multimodal.marks import unmarked

        return unmarked(self.text)


class MediaPrompts:
    """Turns texts with media into prompts for one engine. Any thread may call it.

    Args:
        processor: The model's media processor; None if it takes only text.
        options: How to read media.
        reason: Why it takes only text, if the checkpoint is multimodal.
    """

    def __init__(self, processor: Any | None, options: MediaOptions, reason: str | None) -> None:
        self.processor = processor
        self._options = options
        self._reason = reason
        self._lock = threading.Lock()
        self._loader: MediaLoader | None = None

    @property
    def loader(self) -> MediaLoader:
        """Loads the items. It is made with the first prompt, and keeps decoded items."""
        with self._lock:
            if self._loader is None:
                from mlx_paged.multimodal.loader import loader_of

                self._loader = loader_of(self._options, self.processor)
            return self._loader

    @property
    def has_loaded(self) -> bool:
        """True once there was a prompt with media."""
        return self._loader is not None

    def prepare(
        self, text: str, sources: Sequence[MediaSource], where: str, **options: Any
    ) -> PreparedMedia:
        """Loads the media of a text, and combines both into a prompt. It takes a while.

        Args:
            text: The text, see `TextWithMedia`.
            where: Field to name in errors that concern no single item.
            options: `add_special_tokens`, see `MediaProcessor.encode`.

        Raises:
            InvalidMediaError: An item is unusable, or the model does not support its kind.
        """
        from mlx_paged.multimodal.prompt import prepare

        self._check(sources)
        return prepare(self.processor, text, self.loader.load(sources), where, **options)

    async def prepare_async(
        self, text: str, sources: Sequence[MediaSource], where: str, **options: Any
    ) -> PreparedMedia:
        """Like `prepare`, on its own threads."""
        from mlx_paged.multimodal.prompt import prepare

        self._check(sources)
        items = await self.loader.load_async(sources)
        processor = self.processor
        return await self.loader.run(lambda: prepare(processor, text, items, where, **options))

    def close(self) -> None:
        """Ends its threads and processes."""
        if self._loader is not None:
            self._loader.close()

    def _check(self, sources: Sequence[MediaSource]) -> None:
        processor = self.processor
        check_kinds(sources, None if processor is None else processor.kinds, self._reason)


# --- Steps ----------------------------------------------------------------------------------------


class FeatureStore(Protocol):
    """The features on the device; see `multimodal.feature_store.FeatureStore`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all features."""

    def drop(self, keys: Iterable[bytes]) -> None:
        """Drops features."""

    def made(self) -> list[mx.array]:
        """Returns features made by the current step, for evaluation with it."""

    def take_sizes(self) -> list[tuple[bytes, int]]:
        """Returns (key, bytes) of features made since the last call."""

    def abandon_launch(self) -> None:
        """The step being launched failed."""

    def abandon(self) -> None:
        """A step in flight failed, and so did the one launched after it."""


class StepMediaBuilder(Protocol):
    """Makes the media of steps; see `multimodal.step_media.StepMediaBuilder`."""

    @property
    def store(self) -> FeatureStore:
        """The features."""

    def build(
        self,
        batch: StepBatch,
        context_lens: np.ndarray,
        num_rows: np.ndarray,
        *,
        overlaps: bool,
    ) -> StepMedia | None:
        """Returns the inputs of a step's rows besides tokens, or None if there are none.

        Args:
            context_lens: ``[num_seqs]`` tokens of each sequence after the step.
            num_rows: ``[num_seqs]`` tokens of each sequence in the step.
            overlaps: True if the step before has not been read yet.
        """

    def forget(self) -> None:
        """Drops caches between steps, and all features."""
