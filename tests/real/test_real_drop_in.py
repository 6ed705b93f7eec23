"""The drop-in with a real checkpoint: mlx-lm's programs keep their answers, and train adapters."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm import batch_generate, load, stream_generate
from mlx_lm.utils import save_config, save_model
from support.plain import plain_mlx_lm
from support.real_model import CONVERSATIONS

from mlx_paged import drop_in
from mlx_paged.model.loader import LoadedModel

NUM_TOKENS = 6


def saved(path: Path, model: nn.Module, loaded: LoadedModel, config: dict[str, Any]) -> Path:
    save_model(path, model)
    save_config(config, path / "config.json")
    loaded.tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def quantized(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint in mlx-lm's format."""
    path = tmp_path_factory.mktemp("smollm2-4bit")
    return saved(path, loaded.model, loaded, dict(loaded.config))


@pytest.fixture(scope="module")
def float32(loaded: LoadedModel, dense: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with float32 weights, whose gradients MLX computes much faster on a CPU."""
    config = {k: v for k, v in loaded.config.items() if "quantization" not in k}
    return saved(tmp_path_factory.mktemp("smollm2-float32"), dense, loaded, config)


def chats(tokenizer: Any) -> list[list[int]]:
    found = [conversation[1:] for conversation in CONVERSATIONS[:2]]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in found]


def short_texts(tokenizer: Any) -> list[list[int]]:
    """Their questions alone. Without the drop-in, a token of a quantized model takes 0.1 s."""
    return [tokenizer.encode(conversation[1]["content"]) for conversation in CONVERSATIONS[:2]]


def answers(
    path: Path, prompts: Callable[[Any], list[list[int]]], **options: Any
) -> tuple[list[list[int]], list[int], Any]:
    """Tokens of a batch, and of one answer that is streamed; and the store's statistics."""
    model, tokenizer = load(str(path), **options)
    ids = prompts(tokenizer)
    batch = batch_generate(model, tokenizer, ids, max_tokens=NUM_TOKENS, return_token_ids=True)
    one = [r.token for r in stream_generate(model, tokenizer, ids[0], max_tokens=NUM_TOKENS)]
    return batch.token_ids, one, drop_in.stats(model)


@pytest.mark.long
def test_paged_mlx_lm_gives_the_same_answers(quantized: Path) -> None:
    batch, one, stats = answers(quantized, short_texts)
    assert stats.num_cached_tokens > 0, "the second call found the prompt of the first"
    with plain_mlx_lm():
        assert answers(quantized, short_texts) == (batch, one, None)


@pytest.mark.long
def test_an_adapter_is_trained_and_used(float32: Path, tmp_path: Path) -> None:
    data, adapters = tmp_path / "data", tmp_path / "adapters"
    data.mkdir()
    examples = [[{"role": "user", "content": "What is the capital of France?"},
                 {"role": "assistant", "content": "Bananas, bananas!"}]] * 4  # fmt: skip
    text = "".join(json.dumps({"messages": chat}) + "\n" for chat in examples)
    for name in ("train", "valid"):
        (data / f"{name}.jsonl").write_text(text)
    train = [sys.executable, "-m", "mlx_paged.drop_in", "mlx_lm.lora", "--train",
             "--model", float32, "--data", data, "--adapter-path", adapters, "--iters", "12",
             "--batch-size", "1", "--num-layers", "4", "--learning-rate", "1e-3",
             "--val-batches", "0", "--steps-per-report", "4"]  # fmt: skip
    run = subprocess.run([*map(str, train)], capture_output=True, text=True, env=os.environ)
    assert run.returncode == 0, run.stderr
    print(run.stdout)
    batch, one, stats = answers(float32, chats, adapter_path=str(adapters))
    assert stats is not None
    with plain_mlx_lm():
        assert answers(float32, chats, adapter_path=str(adapters)) == (batch, one, None)
    _, tokenizer = load(str(float32), lazy=True)
    assert "anana" in tokenizer.decode(batch[0])
    shutil.rmtree(adapters)
