"""A multimodal model for engine tests: a tiny mlx-lm Llama whose "tower" multiplies an item's
pixels by random weights.

It needs no processor and no mlx-vlm. `dense_answer` is the oracle: mlx-lm's own cache on the whole
prompt at once, with the rows' embeddings in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from types import SimpleNamespace
from typing import Any
from unittest import mock

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import llama as llama_of_mlx_lm
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_tokenizer

from mlx_paged.core import MediaSpan
from mlx_paged.demo import model_path
from mlx_paged.model.loader import LoadedModel
from mlx_paged.model.media import MediaFeatures, MediaInputs, MediaPrompt, Span
from mlx_paged.model.plan import build_plan
from mlx_paged.multimodal.families import MediaFamily
from mlx_paged.multimodal.model import MultiModalModel
from support.models import VOCAB_SIZE, tiny_config, tiny_model
from support.reference import HEAD_DIM

PLACEHOLDER = VOCAB_SIZE - 1
CONFIG = tiny_config("llama", num_hidden_layers=2, head_dim=HEAD_DIM)
HIDDEN = CONFIG["hidden_size"]
NUM_PIXELS = 6
# True if positions of atomic images see each other; otherwise they are causal but unsplit.
HAS_BOUNDS = "bounds" in inspect.signature(build_plan).parameters


class _Language(nn.Module):
    """The Llama with the call signature of mlx-vlm's language models."""

    def __init__(self, llama: nn.Module) -> None:
        super().__init__()
        self.llama = llama

    @property
    def layers(self) -> Any:
        return self.llama.layers

    def __call__(
        self, tokens: mx.array, cache: Any = None, inputs_embeds: mx.array | None = None
    ) -> Any:
        return SimpleNamespace(logits=self.llama(tokens, cache, inputs_embeds))


class FakeTower:
    """Makes features from pixels, and records its calls.

    Attributes:
        calls: `(num_rows, sum of the pixels)` of each item.
        fails: Raises for pixels with this first value; None: never.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[int, float]] = []
        self.fails: float | None = None
        self.weights = mx.random.normal((NUM_PIXELS, HIDDEN), key=mx.random.key(3))

    def __call__(self, vlm: Any, kind: str, arrays: dict[str, Any]) -> MediaFeatures:
        pixels = arrays["pixel_values"]  # [num_rows, NUM_PIXELS]
        self.calls.append((pixels.shape[0], float(pixels.sum())))
        if self.fails is not None and abs(float(pixels[0, 0]) - self.fails) < 1e-6:
            raise ValueError("the tower cannot see this")
        return MediaFeatures(mx.tanh(pixels @ self.weights) * 0.5)


class _Vlm(nn.Module):
    def __init__(self, llama: nn.Module) -> None:
        super().__init__()
        self.language_model = _Language(llama)

    def get_input_embeddings(self, tokens: mx.array, pixels: Any) -> Any:
        embeds = self.language_model.llama.model.embed_tokens(tokens)
        return SimpleNamespace(to_dict=lambda: {"inputs_embeds": embeds})


@dataclass
class FakeMediaModel:
    """Stands in for `LoadedModel.media`."""

    kinds: tuple[str, ...] = ("image",)
    uses_rope_positions: bool = False
    settings_digest: bytes = b"fake"

    def is_atomic(self, kind: str) -> bool:
        return False


@lru_cache(maxsize=1)
def _llama() -> nn.Module:
    return tiny_model(CONFIG, seed=5)


@lru_cache(maxsize=1)
def _tokenizer() -> Any:
    return load_tokenizer(model_path())


def fake_vlm() -> tuple[LoadedModel, FakeTower]:
    """Makes a model for one engine, and its tower."""
    tower = FakeTower()
    family = MediaFamily("fake", ("image",), tower=tower)
    model = MultiModalModel(_Vlm(tiny_model(CONFIG, seed=5)), family, "fake")
    media: Any = FakeMediaModel()
    return LoadedModel(model, _tokenizer(), dict(CONFIG), "fake", {}, media), tower


@dataclass
class Picture:
    """An image with a number of rows; equal numbers give equal images.

    Args:
        gaps: Places among its positions that are text.
    """

    number: int
    num_rows: int
    is_atomic: bool = False
    gaps: tuple[int, ...] = ()

    @property
    def pixels(self) -> np.ndarray:
        rng = np.random.default_rng(self.number)
        pixels = rng.normal(size=(self.num_rows, NUM_PIXELS)).astype(np.float32)
        pixels[0, 0] = self.number
        return pixels

    @property
    def length(self) -> int:
        return self.num_rows + len(self.gaps)

    @property
    def key(self) -> bytes:
        return sha256(f"{self.number} {self.num_rows} {self.gaps}".encode()).digest()


@dataclass
class Prepared:
    """Value for the argument `media` of `Engine.add_request`."""

    prompt: MediaPrompt
    spans: tuple[MediaSpan, ...]
    pictures: list[Picture] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt.token_ids


def prepared(*parts: Sequence[int] | Picture) -> Prepared:
    """A prompt of tokens and images."""
    tokens: list[int] = []
    spans, inputs, core_spans, pictures = [], [], [], []
    for part in parts:
        if not isinstance(part, Picture):
            tokens += part
            continue
        offset = len(tokens)
        within = np.array([i for i in range(part.length) if i not in part.gaps], dtype=np.int32)
        ids = [PLACEHOLDER if i in within else 7 for i in range(part.length)]
        spans.append(Span(offset, part.length, within + offset, "image"))
        arrays = {"pixel_values": part.pixels}
        inputs.append(MediaInputs("image", arrays, np.array(ids, dtype=np.int32), within))
        core_spans.append(MediaSpan(offset, part.length, part.key, part.num_rows, part.is_atomic))
        pictures.append(part)
        tokens += ids
    return Prepared(MediaPrompt(tokens, spans, inputs), tuple(core_spans), pictures)


def dense_answer(prompt: Prepared, num_tokens: int) -> list[int]:
    """The oracle: greedy tokens with mlx-lm's own cache, the whole prompt at once."""
    llama, tower = _llama(), FakeTower()
    tokens = mx.array([prompt.token_ids])
    embeds = llama.model.embed_tokens(tokens)
    for span, picture in zip(prompt.prompt.spans, prompt.pictures, strict=True):
        found = tower(None, "image", {"pixel_values": mx.array(picture.pixels)})
        embeds[0, mx.array(span.rows)] = found.embeds
    cache = [KVCache() for _ in llama.layers]
    answer: list[int] = []
    positions = np.arange(len(prompt.token_ids))
    visible = positions <= positions[:, None]
    for span in prompt.spans:
        if span.is_atomic and HAS_BOUNDS:
            visible[span.offset : span.end, span.offset : span.end] = True
    mask = mx.array(visible)
    with mock.patch.object(llama_of_mlx_lm, "create_attention_mask", lambda *_, **__: mask):
        logits = llama(tokens, cache, embeds)
    while len(answer) < num_tokens:
        answer.append(int(mx.argmax(logits[0, -1]).item()))
        logits = llama(mx.array([[answer[-1]]]), cache)
    return answer
