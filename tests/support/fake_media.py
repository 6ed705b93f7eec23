"""A fake multimodal model: the embedded model with a processor of a few lines. Tests see the media
that the engine gets; the engine computes only the text."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from mlx_paged.content import KINDS
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.model.media import MediaInputs, MediaPrompt, Span
from mlx_paged.multimodal.marks import marked, unmarked
from mlx_paged.multimodal.prepared import PreparedMedia
from support.models import embedded_twin

ROW = 7  # token id of an item's rows


class FakeMediaModel:
    """A processor: an item has one row per pixel of width, per frame, or per tenth of a second.

    Attributes:
        calls: The text of each prompt, with its items.
    """

    def __init__(self, tokenizer: Any, kinds: tuple[Any, ...] = KINDS) -> None:
        self.kinds = kinds
        self.settings_digest = b"settings"
        self.uses_rope_positions = False
        self.sampling_rate = 16_000
        self.calls: list[tuple[str, dict[str, list[Any]]]] = []
        self._tokenizer = tokenizer

    def is_atomic(self, kind: str) -> bool:
        return kind == "image"

    def placeholder(self, kind: str, index: int = 1) -> str:
        return f"<{kind}>"

    def literal(self, value: Any, counts: Any) -> Any:
        return marked(value, [f"<{kind}>" for kind in KINDS])

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        return list(self._tokenizer.encode(unmarked(text), add_special_tokens=False))

    def process(
        self, text: str, images: Any, videos: Any, audios: Any, add_special_tokens: Any = None
    ) -> MediaPrompt:
        given = {"image": list(images), "video": list(videos), "audio": list(audios)}
        self.calls.append((text, given))
        items = {kind: iter(found) for kind, found in given.items()}
        prompt = MediaPrompt([])
        while text:
            places = [(text.find(f"<{kind}>"), kind) for kind in KINDS if f"<{kind}>" in text]
            at, kind = min(places, default=(len(text), ""))
            prompt.token_ids.extend(self.encode(text[:at]))
            if not kind:
                break
            text = text[at + len(kind) + 2 :]
            item = next(items[kind], None)
            if item is None:
                raise ValueError(f"there is no {kind} for a placeholder")
            count = self._num_rows(kind, item)
            rows = np.arange(count, dtype=np.int32)
            prompt.spans.append(
                Span(len(prompt.token_ids), count, rows + len(prompt.token_ids), kind)
            )
            arrays = {"grid": np.array([count])}
            prompt.inputs.append(MediaInputs(kind, arrays, np.full(count, ROW), rows))
            prompt.token_ids.extend([ROW] * count)
        return prompt

    @staticmethod
    def _num_rows(kind: str, item: Any) -> int:
        if kind == "image":
            if item.width > 2000 or item.height > 2000:
                raise ValueError("the picture is too long for the processor")
            return item.width
        return len(item.frames) if kind == "video" else max(1, 10 * len(item.samples) // item.rate)


class NotingEngine(Engine):
    """Records the media of each request, and computes its tokens.

    Attributes:
        given: The media of each request; None for a text.
    """

    def __init__(self, kinds: tuple[Any, ...] = KINDS, **options: Any) -> None:
        super().__init__(
            embedded_twin(),
            EngineConfig(**{"block_size": 8, "num_gpu_blocks_override": 400, **options}),
        )
        self.media = FakeMediaModel(self.tokenizer, kinds)  # type: ignore[assignment]
        self.intake.media_prompts.processor = self.media
        self.given: list[PreparedMedia | None] = []
        check = self.intake.check

        def noting(*args: Any, media: Any = None, **options: Any) -> Any:
            self.given.append(media)
            return check(*args, **options)

        self.intake.check = noting  # type: ignore[method-assign]


def noting_async_engine(**options: Any) -> AsyncEngine:
    """An `AsyncEngine` with a `NotingEngine`."""
    return AsyncEngine(lambda: NotingEngine(**options))


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 300))
