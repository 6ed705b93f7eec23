"""The embedded model: its directory, its tokenizer, and that it writes Python."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path

import pytest

from mlx_paged.demo import model_path
from mlx_paged.demo.prompts import CHATS, REQUESTS, SYSTEM_PROMPT

SIZE_LIMIT = 12_000_000
FIBONACCI = "Return the n-th Fibonacci number"


@pytest.fixture(scope="module")
def config() -> dict:
    return json.loads((model_path() / "config.json").read_text())


@pytest.fixture(scope="module")
def loaded():
    """The model in float32, the CPU's fast type, and its tokenizer."""
    mx = pytest.importorskip("mlx.core")
    mlx_lm = pytest.importorskip("mlx_lm")
    from mlx_lm.utils import dequantize_model

    model, tokenizer = mlx_lm.load(str(model_path()))[:2]
    model = dequantize_model(model)
    model.set_dtype(mx.float32)
    return model, tokenizer


def test_directory_is_small_and_complete():
    files = {path.name: path.stat().st_size for path in model_path().iterdir()}
    assert sum(files.values()) <= SIZE_LIMIT
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    } <= files.keys()


def test_architecture_exercises_the_real_thing(config):
    assert config["model_type"] == "llama"
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert config["num_attention_heads"] > config["num_key_value_heads"]
    assert config["head_dim"] == 64
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] >= 2048
    assert config["quantization"]["bits"] == 8
    assert config["quantization"]["group_size"] == 64


def test_log_holds_the_figures():
    log = json.loads((model_path() / "training_log.json").read_text())
    figures = log["evaluation"]
    assert figures["sampled_parse_share"] >= 0.8
    assert figures["source_loss"] < log["untrained"]["source"] / 2


@pytest.mark.parametrize(
    "text",
    ["def f(x):\n    return x\n", "naïve café — 日本語 🙂", "\t\x00\r\n  \n", "<p>1 + 1 == 2</p>"],
)
def test_tokenizer_round_trips_any_bytes(loaded, text):
    _, tokenizer = loaded
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_chat_template(loaded):
    _, tokenizer = loaded
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Reverse a string"},
        {"role": "assistant", "content": "pass"},
        {"role": "user", "content": "Again"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nReverse a string<|im_end|>\n"
        "<|im_start|>assistant\npass<|im_end|>\n<|im_start|>user\nAgain<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert tokenizer.decode(ids) == text
    ends = {tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")}
    assert set(tokenizer.eos_token_ids) == ends


def test_demo_prompts(loaded):
    _, tokenizer = loaded
    length = len(tokenizer.encode(SYSTEM_PROMPT))
    assert 600 <= length <= 1000
    assert len(CHATS) >= 8
    assert len(REQUESTS) >= 60
    assert len({*CHATS, *REQUESTS}) == len(CHATS) + len(REQUESTS)


def test_greedy_fibonacci_is_right_and_stops(loaded):
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from support.plain import plain_caches

    model, tokenizer = loaded
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": FIBONACCI}], add_generation_prompt=True
    )
    answer: list[int] = []
    caches = plain_caches(model)
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=120, prompt_cache=caches):
        answer.append(int(token))
        if answer[-1] in tokenizer.eos_token_ids:
            break
    assert answer[-1] in tokenizer.eos_token_ids
    text = tokenizer.decode(answer[:-1])
    names = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    namespace: dict = {}
    exec(text, namespace)
    assert [namespace[names[-1]](n) for n in range(8)] == [0, 1, 1, 2, 3, 5, 8, 13]


def test_unseen_code_is_far_likelier_than_chance(loaded):
    import mlx.core as mx
    import mlx.nn as nn

    model, tokenizer = loaded
    sample = Path(__file__).with_name("held_out_sample.txt").read_text()
    ids = mx.array([tokenizer.encode(sample, add_special_tokens=False)])
    loss = nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:], reduction="mean").item()
    assert loss < 0.35 * math.log(len(tokenizer.get_vocab()))
