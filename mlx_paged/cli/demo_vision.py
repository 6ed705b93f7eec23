"""`mlx-paged demo --vision`: the embedded vision model answers questions about four pictures."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import Console, Group
from rich.text import Text

from mlx_paged.cli.progress import loading_bar
from mlx_paged.demo import vision_model_path

if TYPE_CHECKING:
    from PIL.Image import Image

_WIDTH = 24  # columns of a picture on the terminal, which takes half as many lines
_QUESTION = "What is in this picture?"


def demo_vision(*, async_scheduling: bool = True) -> None:
    """Asks two questions about each picture, all in one batch."""
    console = Console(highlight=False)
    with loading_bar(4) as begin:
        begin("libraries")
        from mlx_paged.demo.pictures import SAMPLES, draw
        from mlx_paged.engine.llm import LLM
        from mlx_paged.engine.loading import load
        from mlx_paged.engine.sampling_params import SamplingParams

        begin("weights")
        loaded = load(str(vision_model_path()))
        begin("engine")
        on_kernel = partial(begin, "kernels")
        llm = LLM(loaded, async_scheduling=async_scheduling, on_kernel=on_kernel)
        begin("pictures")
        pictures = [draw(sample.shapes, sample.background) for sample in SAMPLES]
    asked = [
        (picture, question)
        for picture, sample in zip(pictures, SAMPLES)
        for question in dict.fromkeys((_QUESTION, sample.question))
    ]
    chats = [
        [
            {
                "role": "user",
                "content": [
                    {"type": "image_pil", "image_pil": picture},
                    {"type": "text", "text": question},
                ],
            }
        ]
        for picture, question in asked
    ]
    begun = time.perf_counter()
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=48))
    seconds = time.perf_counter() - begun
    answers = iter(outputs)
    for picture, sample in zip(pictures, SAMPLES):
        lines = []
        for question in dict.fromkeys((_QUESTION, sample.question)):
            lines += [Text(question, style="bold"), Text(next(answers).outputs[0].text), Text()]
        shown = _blocks(picture) if console.color_system else Text(f"[{sample.name}]")
        console.print(Columns([shown, Group(*lines)], padding=(0, 3)))
    stats = llm.stats()
    assert stats.encoder_cache is not None
    console.print(
        f"{len(asked)} questions about {len(pictures)} pictures at once in {seconds:.2f} s; the "
        f"vision tower ran for {stats.encoder_cache.num_encoded_items} of them"
    )


def _blocks(picture: Image) -> Text:
    """Draws a picture with half blocks: two pixels per character."""
    small = picture.convert("RGB").resize((_WIDTH, _WIDTH))
    text = Text()
    for y in range(0, _WIDTH, 2):
        for x in range(_WIDTH):
            upper, lower = (
                "#{:02x}{:02x}{:02x}".format(*small.getpixel((x, y + i)))  # type: ignore[misc]
                for i in (0, 1)
            )
            text.append("▀", style=f"{upper} on {lower}")
        text.append("\n")
    return text
