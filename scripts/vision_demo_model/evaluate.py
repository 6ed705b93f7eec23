"""Measures the embedded vision model through mlx-vlm, on held-out pictures drawn by Pillow.

    python -m scripts.vision_demo_model.evaluate --out FIGURES.json --pictures 400

The pictures come from seeds that training never used, and from another renderer: Pillow draws them
in many sizes, half of them pass through JPEG, and the model's own processor resizes them. Decoding
is greedy, and an answer must match the true one exactly.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from random import Random
from typing import Any

from .batches import TURN_KINDS, label
from .questions import Turn, ask, ask_two, chat
from .scenes import Scene, sample_scene


def picture(random: Random, scene: Scene) -> Any:
    """Returns the scene as a Pillow image of a random size."""
    from PIL import Image

    from mlx_paged.demo.pictures import Shape, draw

    side = random.choice((128, 192, 256, 320, 480, 640))
    width, height = round(side * scene.width), round(side * scene.height)
    shapes = [
        Shape(t.kind, t.rgb, t.x / scene.width, t.y / scene.width, t.radius / scene.width, t.angle)
        for t in scene.things
    ]
    image = draw(shapes, scene.shades[0], width, height)
    if random.random() < 0.5:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=random.randint(60, 95))
        image = Image.open(file).convert("RGB")
    return image


def questions(random: Random) -> tuple[list[Scene], list[Turn]]:
    """Returns the pictures of one chat's first turn and questions about them."""
    draw = random.random()
    if draw < 0.06:
        return [], [chat(random, False)]
    scenes = [sample_scene(random) for _ in range(2 if draw < 0.16 else 1)]
    for scene in scenes:
        if scene.background is None:  # Pillow draws no gradients here
            scene.shades = (scene.shades[0], scene.shades[0])
    if len(scenes) == 2:
        return scenes, [ask_two(random, scenes[0], scenes[1]) for _ in range(3)]
    turns = [ask(random, scenes[0]) for _ in range(8)]
    return scenes, list({turn.question: turn for turn in turns}.values())


class Answerer:
    """The model on MLX's current device, in float32."""

    def __init__(self, model: Path) -> None:
        import mlx.core as mx
        from mlx_lm.utils import dequantize_model
        from mlx_vlm.utils import load_model, load_processor

        self.model = dequantize_model(load_model(model))  # same values, but faster on a CPU
        self.model.set_dtype(mx.float32)
        self.processor = load_processor(model, True)
        self.tokenizer = self.processor.tokenizer

    def answer(self, images: list[Any], question: str, limit: int = 60) -> str:
        """Returns the greedy answer to a question about the images."""
        from mlx_vlm.generate import stream_generate

        parts = [*({"type": "image"} for _ in images), {"type": "text", "text": question}]
        prompt = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        pieces = stream_generate(
            self.model,
            self.processor,
            prompt,
            image=images or None,
            max_tokens=limit,
            temperature=0.0,
        )
        return "".join(piece.text for piece in pieces).removesuffix("<end_of_utterance>").strip()


def measure(model: Path, pictures: int, seed: str = "evaluation") -> dict[str, Any]:
    """Returns the numbers of correct answers and of questions by kind, and some wrong answers."""
    answerer = Answerer(model)
    counts: dict[str, list[int]] = {kind: [0, 0] for kind in TURN_KINDS}
    wrong: list[dict[str, str]] = []
    for index in range(pictures):
        random = Random(f"{seed}.{index}")
        scenes, turns = questions(random)
        images = [picture(random, scene) for scene in scenes]
        for turn in turns:
            got = answerer.answer(images, turn.question)
            tally = counts[TURN_KINDS[label(turn)]]
            tally[0] += got == turn.answer
            tally[1] += 1
            if got != turn.answer and len(wrong) < 60:
                wrong.append({"question": turn.question, "true": turn.answer, "answer": got})
    shares = {k: round(a / b, 4) for k, (a, b) in counts.items() if b}
    total = [sum(column) for column in zip(*counts.values(), strict=True)]
    return {
        "accuracy": shares | {"all": round(total[0] / total[1], 4)},
        "questions": {k: b for k, (_, b) in counts.items()},
        "wrong": wrong,
    }


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Evaluate the embedded vision model.")
    parser.add_argument("--model", type=Path, default=Path("mlx_paged/demo/vision_model"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pictures", type=int, default=400)
    options = parser.parse_args()
    figures = measure(options.model, options.pictures)
    options.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures["accuracy"], indent=1))


if __name__ == "__main__":
    main()
