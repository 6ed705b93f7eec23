"""Models that classify texts: the embedded model with a classification layer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest
from support.server_helpers import ENGINE, running, validate

from mlx_paged import LLM, PoolingParams
from mlx_paged.demo import model_path
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.loading import load
from mlx_paged.errors import InvalidParameterError, ModelLoadError
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.pooling_bodies import ClassifyAnswer

TEXTS = ["def is_even(n: int) -> bool:", "class Stack:", "import os"]
LABELS = ["bad", "fair", "good"]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a checkpoint with some classes."""

    def make(num_classes: int, **config: Any) -> Path:
        path = tmp_path_factory.mktemp("classifier")
        shutil.copytree(model_path(), path, dirs_exist_ok=True)
        own = json.loads((path / "config.json").read_text())
        own |= {"architectures": ["LlamaForSequenceClassification"], **config}
        (path / "config.json").write_text(json.dumps(own))
        mx.save_safetensors(
            str(path / "model-head.safetensors"), {"score.weight": rows(num_classes)}
        )
        return path

    return make


def rows(num_classes: int) -> mx.array:
    return mx.random.normal((num_classes, 384), key=mx.random.key(num_classes)) * 0.1


@pytest.fixture(scope="module")
def logits() -> Callable[[int], np.ndarray]:
    """``[len(TEXTS), num_classes]`` of the layer, from the embedded model's states."""
    llm = LLM(load(), runner="pooling", block_size=8, num_gpu_blocks_override=400)
    outputs = llm.embed(TEXTS, PoolingParams(normalize=False))
    states = np.array([output.outputs.embedding for output in outputs], np.float64)
    return lambda num_classes: states @ np.array(rows(num_classes), np.float64).T


def softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))


def post(client: httpx.Client, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_a_server_classifies_texts_and_chats(checkpoint, logits) -> None:
    path = str(checkpoint(3, id2label=dict(enumerate(LABELS))))
    make = lambda: AsyncEngine.from_model(path, **ENGINE)  # noqa: E731
    with running(ServerConfig(("demo",)), make) as server, server.client() as client:
        answer = post(client, "/classify", input=TEXTS)
        validate(ClassifyAnswer, answer)
        wanted = softmax(logits(3))
        found = np.array([entry["probs"] for entry in answer["data"]])
        assert np.abs(found - wanted).max() < TOLERANCE
        chosen = [LABELS[i] for i in wanted.argmax(axis=1)]
        assert [entry["label"] for entry in answer["data"]] == chosen
        assert {entry["num_classes"] for entry in answer["data"]} == {3}
        raw = post(client, "/classify", input=TEXTS, use_activation=False)["data"]
        assert np.abs(np.array([entry["probs"] for entry in raw]) - logits(3)).max() < 1e-3
        chat = [{"role": "user", "content": TEXTS[0]}]
        asked = {"messages": chat, "add_generation_prompt": False, "add_special_tokens": False}
        tokens = post(client, "/tokenize", **asked)["tokens"]
        [one], [same] = (
            post(client, "/classify", **given)["data"]
            for given in ({"messages": chat}, {"input": tokens})
        )
        assert np.abs(np.array(one["probs"]) - same["probs"]).max() < TOLERANCE
        for wrong, param in (({}, "input"), ({"input": ["x", ""]}, "input")):
            assert post(client, "/classify", 400, **wrong)["error"]["param"] == param
        for other, body in (
            ("/v1/embeddings", {"input": "x"}),
            ("/v2/embed", {"texts": ["x"]}),
            ("/score", {"text_1": "x", "text_2": "y"}),
            ("/rerank", {"query": "x", "documents": ["y"]}),
        ):
            error = post(client, other, 400, **body)["error"]
            assert error["code"] == "wrong_runner" and "/classify" in error["message"]


def test_a_model_of_one_class_scores_pairs(checkpoint, logits) -> None:
    llm = LLM(checkpoint(1), block_size=8, num_gpu_blocks_override=400)
    wanted = sigmoid(logits(1))
    found = [output.outputs.probs for output in llm.classify(TEXTS)]
    assert np.abs(np.array(found) - wanted).max() < TOLERANCE
    outputs = llm.score("def is_even(n: int)", [" -> bool:"])
    assert outputs[0].outputs.score == pytest.approx(wanted[0, 0], abs=TOLERANCE)
    with pytest.raises(InvalidParameterError, match="classify"):
        llm.embed("x")


@pytest.mark.parametrize(
    ("problem", "activation"),
    [("multi_label_classification", sigmoid), ("regression", lambda values: values)],
)
def test_the_config_says_what_the_outputs_are(checkpoint, logits, problem, activation) -> None:
    llm = LLM(checkpoint(3, problem_type=problem), block_size=8, num_gpu_blocks_override=400)
    found = np.array([output.outputs.probs for output in llm.classify(TEXTS)])
    assert np.abs(found - activation(logits(3))).max() < 1e-3
    assert llm.engine.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


def test_what_cannot_classify_is_refused(checkpoint) -> None:
    path = checkpoint(2)
    for options, told in (
        ({"runner": "generate"}, "runner must be 'pooling'"),
        ({"pooler_config": {"pooling_type": "MEAN"}}, "pooler_config.pooling_type must be None"),
    ):
        with pytest.raises(InvalidParameterError, match=told):
            LLM(path, **options)
    with pytest.raises(ModelLoadError, match="id2label has 3 labels"):
        load(checkpoint(2, id2label=dict(enumerate(LABELS))))
    with running(runner="pooling") as server, server.client() as client:
        error = post(client, "/classify", 400, input="x")["error"]
        assert error["code"] == "wrong_runner" and "ForSequenceClassification" in error["message"]
