"""Interfaces of models that take media.

`mlx_paged.multimodal` implements them: its `model` runs encoders and language models, its
`processor` makes prompts with spans.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

from mlx_paged.content import Kind
from mlx_paged.model.families import Family
from mlx_paged.model.media import MediaFeatures, MediaInputs


class TakesMedia(ABC):
    """A model whose steps take `MediaRows`, and which encodes items.

    Attributes:
        model_type: Names it in errors.
    """

    model_type: str

    @property
    @abstractmethod
    def paged_family(self) -> Family:
        """The possible modes of its language model."""

    @property
    @abstractmethod
    def language_model(self) -> Any:
        """The module that its steps run; towers run outside of them."""

    @property
    @abstractmethod
    def uses_rope_positions(self) -> bool:
        """True if its RoPE uses time, height and width."""

    @property
    @abstractmethod
    def uses_bounds(self) -> bool:
        """True if some of its items' positions see each other."""

    @property
    @abstractmethod
    def sees_within_windows(self) -> bool:
        """True if they do so only in layers with a window, and within it; all other layers are
        causal."""

    @property
    @abstractmethod
    def adds_to_layers(self) -> bool:
        """True if features are added to the outputs of layers, too."""

    @abstractmethod
    def encode(self, item: MediaInputs) -> MediaFeatures:
        """Encodes an item, lazily.

        Raises:
            ValueError: The model or its encoder does not take this item.
        """


class MediaProcessor(Protocol):
    """Makes the tokens of prompts with media, and their encoder inputs. Any thread may use it.

    This is the part that code for text uses.
    """

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The media that prompts may have."""

    @property
    def uses_rope_positions(self) -> bool:
        """True if RoPE uses time, height and width."""

    def with_options(self, options: Mapping[str, Any]) -> MediaProcessor:
        """Returns a copy that passes these keyword arguments to the checkpoint's processor."""

    def encode(self, text: str, *, add_special_tokens: bool | None = None) -> list[int]:
        """Returns the tokens of a prompt without media."""

    def literal(self, value: Any, counts: Mapping[Kind, int]) -> Any:
        """Marks the placeholders in users' texts, which stay text.

        Args:
            value: A text, or lists and mappings with texts.
            counts: Items of the prompt by kind.
        """
