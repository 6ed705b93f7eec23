"""Trains the embedded vision model with PyTorch for a given time (minutes on one data-center GPU).

    python -m scripts.vision_demo_model.train --out OUT --minutes 8

OUT receives `weights.safetensors` (float32, to resume from), `metrics.json` and `hf/`, a Hugging
Face checkpoint in float16 with its tokenizer. `convert.py` makes the MLX model from `hf/`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue as queues
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .atlas import make_atlas
from .batches import TURN_KINDS, BatchMaker
from .network import CONFIG, Idefics3
from .render import damage, draw, normalize
from .scenes import CHARACTERS, KINDS, NAMES
from .tokenizer import train_tokenizer

WARMUP_STEPS = 200
AUXILIARY, AUXILIARY_UNTIL = 0.5, 0.5  # weight of the cell losses; fraction of time to zero
PICTURE = ("texture", "places", "colors", "stretch", "shades", "direction")


def _produce(file: Path, fonts: int, rows: int, seed: str, queue: Any) -> None:
    """Worker: queues batches forever."""
    torch.set_num_threads(1)
    maker = BatchMaker(file, fonts, seed)
    while True:
        queue.put(maker.batch(rows).arrays())


def feed(options: argparse.Namespace, file: Path, fonts: int, device: str) -> Iterator[Any]:
    """Yields batches of tensors on the device, made by worker processes ahead of time."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue(maxsize=3 * options.workers)
    for index in range(options.workers):
        arguments = (file, fonts, options.rows, f"{options.seed}.{index}", queue)
        context.Process(target=_produce, args=arguments, daemon=True).start()
    ready: queues.Queue[Any] = queues.Queue(maxsize=3)

    def move() -> None:
        while True:
            ready.put(to_device(queue.get(), device))

    threading.Thread(target=move, daemon=True).start()
    while True:
        yield ready.get()


def to_device(arrays: dict[str, np.ndarray], device: str) -> dict[str, Tensor]:
    """Moves a batch to the device; integers become int64, except `turns` and `kinds`."""
    tensors = {}
    for name, array in arrays.items():
        tensor = torch.from_numpy(array)
        if device == "cuda":
            tensor = tensor.pin_memory().to(device, non_blocking=True)
        tensors[name] = tensor if tensor.is_floating_point() else tensor.long()
    return tensors


class Trainer(nn.Module):
    """The model with auxiliary heads that predict the contents of each cell of a picture."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.model = Idefics3(config)
        hidden = config["text_config"]["hidden_size"]
        self.kind_head = nn.Linear(hidden, 1 + len(KINDS) + len(CHARACTERS))
        self.color_head = nn.Linear(hidden, 1 + len(NAMES))

    def forward(
        self, pixels: Tensor, batch: dict[str, Tensor], share: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the training loss and the loss of the answers alone."""
        features = self.model.see(pixels)
        logits = self.model(batch["tokens"], batch["positions"], features)[:, :-1]
        targets = batch["tokens"][:, 1:]
        mask = (batch["turns"][:, 1:] > 0).float()
        losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        answers = (losses * mask.flatten()).sum() / mask.sum()
        cells = sum(
            F.cross_entropy(head(features).flatten(0, 1).float(), batch[name].flatten())
            for head, name in ((self.kind_head, "cell_kinds"), (self.color_head, "cell_colors"))
        )
        return answers + share * cells, answers.detach()


def rate(progress: float, step: int, peak: float) -> float:
    """Learning rate: linear warm-up, then linear decay to almost zero."""
    return peak * min(1.0, (step + 1) / WARMUP_STEPS) * (1 - 0.99 * progress)


@torch.no_grad()
def evaluate(
    model: Idefics3,
    maker: BatchMaker,
    paint: Callable[..., Tensor],
    device: str,
    rows: int,
    count: int,
) -> dict[str, float]:
    """Returns the share of greedy answers that are exactly right, by kind of question."""
    right = np.zeros(len(TURN_KINDS))
    total = np.zeros(len(TURN_KINDS))
    for _ in range(count):
        batch = to_device(maker.batch(rows).arrays(), device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = model(batch["tokens"], batch["positions"], model.see(paint(batch)))
        wrong = (logits[:, :-1].argmax(-1) != batch["tokens"][:, 1:]).cpu().numpy()
        turns, kinds = batch["turns"][:, 1:].cpu().numpy(), batch["kinds"].cpu().numpy()
        for row in range(rows):
            for turn in range(1, turns[row].max(initial=0) + 1):
                kind = kinds[row, turn - 1]
                total[kind] += 1
                right[kind] += not wrong[row][turns[row] == turn].any()
    shares = {k: round(float(right[i] / total[i]), 4) for i, k in enumerate(TURN_KINDS) if total[i]}
    return shares | {"all": round(float(right.sum() / total.sum()), 4)}


def save(trainer: Trainer, out: Path, metrics: dict[str, Any]) -> None:
    """Writes the weights to resume from, the figures, and the Hugging Face checkpoint."""
    weights = {k: v.detach().float().cpu().contiguous() for k, v in trainer.state_dict().items()}
    save_file(weights, str(out / "weights.safetensors"))
    half = {
        k.removeprefix("model."): v.half() for k, v in weights.items() if k.startswith("model.")
    }
    save_file(half, str(out / "hf" / "model.safetensors"), metadata={"format": "pt"})
    config = CONFIG | {"torch_dtype": "float16"}
    (out / "hf" / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": CONFIG["eos_token_id"], "pad_token_id": 0, "do_sample": False}
    (out / "hf" / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")


def train(options: argparse.Namespace) -> None:
    """Runs the training loop until the time is up."""
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    out: Path = options.out
    (out / "hf").mkdir(parents=True, exist_ok=True)
    if options.resume and (options.resume / "hf" / "tokenizer.json").exists():
        for path in (options.resume / "hf").glob("*.json"):
            shutil.copy(path, out / "hf" / path.name)
    else:
        train_tokenizer(out / "hf", options.tokenizer_scenes)
    file = out / "hf" / "tokenizer.json"
    textures, fonts = make_atlas(options.workers)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = feed(options, file, fonts, device)
    first = next(source)
    atlas = torch.from_numpy(textures).to(device)
    trainer = Trainer(CONFIG).to(device)
    if options.resume:
        trainer.load_state_dict(load_file(options.resume / "weights.safetensors"))
    count = sum(p.numel() for p in trainer.model.parameters())
    print(f"{count} parameters, {device}", flush=True)

    def paint(batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return normalize(damage(draw(atlas, *(batch[name] for name in PICTURE))))

    def losses_of(pixels: Tensor, batch: dict[str, Tensor], share: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            return trainer(pixels, batch, share)

    compiled = device == "cuda" and not options.no_compile
    step_losses = torch.compile(losses_of) if compiled else losses_of
    fast_paint = torch.compile(paint) if compiled else paint
    decayed = [p for p in trainer.parameters() if p.dim() >= 2]
    rest = [p for p in trainer.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=device == "cuda")
    held_out = "held out"
    metrics: dict[str, Any] = {"parameters": count, "rows": options.rows, "losses": []}
    began: float | None = None
    step, progress = 0, options.start
    budget = options.minutes * 60
    recent = torch.zeros((), device=device)
    waited = 0.0
    saved = time.perf_counter()
    while True:
        before = time.perf_counter()
        batch = first or next(source)
        waited += time.perf_counter() - before
        first = None
        weight = AUXILIARY * max(0.0, 1 - progress / AUXILIARY_UNTIL)
        share = torch.tensor(weight, device=device)
        for group in optimizer.param_groups:
            group["lr"] = rate(progress, step, options.rate)
        loss, answers = step_losses(fast_paint(batch), batch, share)
        loss.backward()
        nn.utils.clip_grad_norm_(trainer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent += answers
        step += 1
        if began is None:
            recent.item()  # waits for the compilation, which the schedule must not count
            began = time.perf_counter()
        if step % options.every:
            continue
        value, elapsed = recent.item() / options.every, time.perf_counter() - began
        recent.zero_()
        progress = min(1.0, options.start + (1 - options.start) * elapsed / budget)
        metrics["losses"].append([step, round(value, 4)])
        if len(metrics["losses"]) % 10 == 0:
            speed = options.rows * step / elapsed
            print(
                f"step {step} loss {value:.4f} {speed:.0f} rows/s, {elapsed:.0f} s "
                f"(waited {waited:.0f} s)",
                flush=True,
            )
        done = progress >= 1.0
        if done or time.perf_counter() - saved > options.save_every:
            maker = BatchMaker(file, fonts, held_out)
            trainer.eval()
            batches = options.eval_batches if done else max(1, options.eval_batches // 8)
            figures = evaluate(trainer.model, maker, paint, device, options.rows, batches)
            trainer.train()
            print(json.dumps(figures), flush=True)
            metrics |= {"steps": step, "seconds": round(elapsed), "accuracy": figures}
            if done:
                losses = metrics["losses"]
                metrics["losses"] = losses[:: max(1, len(losses) // 200)]
            save(trainer, out, metrics)
            saved = time.perf_counter()
        if done:
            break


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train the embedded vision model.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="the output folder of an earlier run")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--start", type=float, default=0.0, help="where on the schedule to begin")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--every", type=int, default=10, help="steps between looks at the clock")
    parser.add_argument("--save-every", type=float, default=90, help="seconds")
    parser.add_argument("--eval-batches", type=int, default=16)
    parser.add_argument("--tokenizer-scenes", type=int, default=6_000)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
