"""Trains the embedded model with PyTorch for a given time (a few minutes on one data-center GPU).

    python -m scripts.demo_model.train --data DATA --out OUT --minutes 8

DATA is the output of `prepare.py`. OUT receives bfloat16 weights in two safetensors files and
`training_log.json`; `convert.py` makes the MLX model directory from them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .batches import Mixture, RowMaker, load_code
from .tokenizer import END, START

LENGTH = 2048
PEAK_RATE, FINAL_SHARE, WARMUP_STEPS = 3e-3, 0.02, 150
SWITCH = 0.55  # fraction of the time after which the share of plain source changes


def _produce(
    data: Path,
    code: np.ndarray,
    rows: int,
    shares: list[float],
    seed: int,
    progress: Any,
    queue: Any,
) -> None:
    """Worker: queues tokens [rows, LENGTH + 1] int16 and mask [rows, LENGTH] uint8, forever."""
    maker = RowMaker(data, code, LENGTH, seed)
    while True:
        share = shares[0] if progress.value < SWITCH else shares[1]
        made = [maker.row(Mixture(code=share)) for _ in range(rows)]
        tokens, masks = zip(*made, strict=True)
        queue.put((np.stack(tokens).astype(np.int16), np.stack(masks).astype(np.uint8)))


def batches(options: argparse.Namespace, progress: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields batches made by worker processes."""
    workers, data = options.workers, options.data
    context = multiprocessing.get_context("fork")
    code = load_code(data)
    queue = context.Queue(maxsize=4 * workers)
    for index in range(workers):
        seed = options.seed * 1000 + index
        arguments = (data, code, options.rows, options.code_shares, seed, progress, queue)
        context.Process(target=_produce, args=arguments, daemon=True).start()
    while True:
        yield queue.get()


def rate(progress: float, step: int, peak: float) -> float:
    """Learning rate: linear warm-up, then linear decay to a small fraction of the peak."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return peak * warm * (1 - (1 - FINAL_SHARE) * progress)


def held_out_loss(model: Any, data: Path, device: str) -> dict[str, float]:
    """Returns the mean loss in nats per token, on held-out files and held-out requests."""
    import torch
    import torch.nn.functional as F
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(data / "tokenizer" / "tokenizer.json"))
    held_out = json.loads((data / "held_out.json").read_text())
    texts = [("source", "", text[:6000]) for text in held_out["sources"][:40]]
    for pair in held_out["pairs"][:150]:
        head = f"{START}user\n{pair['description']}{END}\n{START}assistant\n"
        texts.append(("answers", head, pair["source"].strip() + END))
    sums = {"source": [0.0, 0], "answers": [0.0, 0]}
    for kind, head, body in texts:
        skip = len(tokenizer.encode(head).ids)
        ids = (tokenizer.encode(head).ids + tokenizer.encode(body).ids)[: LENGTH + 1]
        tokens = torch.tensor([ids], device=device)
        with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
        losses = F.cross_entropy(logits[0].float(), tokens[0, 1:], reduction="none")[
            max(skip - 1, 0) :
        ]
        sums[kind][0] += losses.sum().item()
        sums[kind][1] += len(losses)
    return {kind: round(total / count, 4) for kind, (total, count) in sums.items()}


def save(model: Any, out: Path, log: dict[str, Any]) -> None:
    """Writes the weights as bfloat16 in two files, and the log."""
    import torch
    from safetensors.torch import save_file

    weights = {
        k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.state_dict().items()
    }
    names = sorted(weights)
    for index in range(2):
        save_file(
            {name: weights[name] for name in names[index::2]},
            str(out / f"weights{index}.safetensors"),
        )
    (out / "training_log.json").write_text(json.dumps(log, indent=1))


def train(options: argparse.Namespace) -> None:
    """Runs the training loop until the time is up."""
    import torch
    import torch.nn.functional as F
    from safetensors.torch import load_file

    from .network import CONFIG, Llama

    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    progress = multiprocessing.get_context("fork").Value("d", 0.0, lock=False)
    feed = batches(options, progress)
    first: tuple[np.ndarray, np.ndarray] | None = next(feed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Llama(CONFIG).to(device)
    if options.resume:
        for path in sorted(options.resume.glob("weights*.safetensors")):
            model.load_state_dict({k: v.float() for k, v in load_file(path).items()}, strict=False)
    count = sum(p.numel() for p in model.parameters())
    log: dict[str, Any] = {
        "parameters": count,
        "config": CONFIG,
        "start": held_out_loss(model, options.data, device),
    }
    print(log["parameters"], log["start"], flush=True)
    decayed = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=device == "cuda"
    )

    def loss_of(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
        losses = F.cross_entropy(
            logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none"
        )
        return (losses * mask.flatten()).sum() / mask.sum()

    step_loss = torch.compile(loss_of) if device == "cuda" else loss_of
    began = None
    losses: list[list[float]] = []
    step, budget, recent = 0, options.minutes * 60, torch.zeros((), device=device)
    while True:
        tokens, mask = (
            torch.from_numpy(a).to(device, non_blocking=True) for a in (first or next(feed))
        )
        first = None
        for group in optimizer.param_groups:
            group["lr"] = rate(progress.value, step, options.rate)
        loss = step_loss(tokens.long(), mask.float())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent += loss.detach()
        step += 1
        if began is None:
            recent.item()  # waits for the compilation, which the schedule must not count
            began = time.perf_counter()
        if step % options.every == 0:
            value, elapsed = recent.item() / options.every, time.perf_counter() - began
            recent.zero_()
            progress.value = min(1.0, elapsed / budget)
            losses.append([step, round(value, 4)])
            if len(losses) % 10 == 0:
                speed = options.rows * LENGTH * step / elapsed
                print(
                    f"step {step} loss {value:.4f} {speed / 1e6:.2f}M tok/s, {elapsed:.0f} s",
                    flush=True,
                )
            if progress.value >= 1.0:
                break
            if len(losses) % 200 == 0:
                save(model, options.out, log | {"steps": step, "losses": losses})
    log |= {
        "steps": step,
        "tokens": step * options.rows * LENGTH,
        "seconds": round(time.perf_counter() - began),
    }
    log |= {
        "end": held_out_loss(model, options.data, device),
        "losses": losses[:: max(1, len(losses) // 200)],
    }
    save(model, options.out, log)
    print(log["steps"], log["tokens"], log["end"], flush=True)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train the embedded model.")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="folder with weights to start from")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--rows", type=int, default=64, help="rows of 2048 tokens in a batch")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--rate", type=float, default=PEAK_RATE)
    parser.add_argument(
        "--code-shares",
        type=float,
        nargs=2,
        default=[0.55, 0.25],
        help="plain source, early and late",
    )
    parser.add_argument("--every", type=int, default=10, help="steps between looks at the clock")
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
