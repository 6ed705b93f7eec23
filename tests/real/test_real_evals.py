"""Evaluations of a real checkpoint: some questions of each set, and tool calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install '.[eval]'")

from lm_eval.api.instance import Instance
from support.real_model import dense_logits, log_softmax

from mlx_paged.evals.language_model import ServedLM
from mlx_paged.evals.run import run
from mlx_paged.evals.service import LocalService
from mlx_paged.model.loader import LoadedModel
from mlx_paged.wheels import DownloadError


@pytest.fixture(scope="module")
def service(checkpoint: Path) -> Iterator[LocalService]:
    found = LocalService(str(checkpoint), tool_template=True, kv_cache_memory=1 << 29)
    yield found
    found.close()


def metrics(service: LocalService, task: str, limit: int) -> dict[str, float]:
    try:
        found = run(service, [task], limit=limit)[task]
    except DownloadError as error:
        pytest.skip(str(error))
    print(task, found)
    assert found["num_questions"] == limit
    return dict(found["metrics"])


@pytest.mark.long
def test_grade_school_mathematics(service: LocalService) -> None:
    # A model of 135 million parameters solves one question in fifty.
    found = metrics(service, "gsm8k-sample", 8)
    assert 0 <= found["exact_match,last-number"] <= 0.2


@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "num_questions"), [("hellaswag-sample", 4), ("truthfulqa-sample", 10)]
)
def test_multiple_choice(task: str, num_questions: int, service: LocalService) -> None:
    assert 0.1 <= metrics(service, task, num_questions)["acc"] <= 0.8


@pytest.mark.long
def test_completions_of_functions_are_python(service: LocalService) -> None:
    assert metrics(service, "humaneval-sample", 10)["parses"] >= 0.7


@pytest.mark.long
def test_forced_calls_are_valid(service: LocalService) -> None:
    found = metrics(service, "tool-calls:simple_python", 3)
    assert found["called,required"] == 1
    assert found["valid,required"] >= 0.6, "all but those that max_tokens has cut"
    assert 0 <= found["called,auto"] <= 1


@pytest.mark.long
def test_scores_are_those_of_mlx_lms_dense_model(
    service: LocalService, dense: Any, loaded: LoadedModel
) -> None:
    pairs = [
        ("The capital of France is", " Paris."),
        ("The capital of France is", " Berlin, which lies on the Seine."),
        ("A boy runs down a track. He", " lifts his body above the bar."),
    ]
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    for (context, end), (score, _) in zip(pairs, ServedLM(service).loglikelihood(asked)):
        tokens = loaded.tokenizer.encode(context + end)
        start = len(loaded.tokenizer.encode(context))
        logs = log_softmax(dense_logits(dense, tokens))
        expected = sum(logs[i - 1, tokens[i]] for i in range(start, len(tokens)))
        assert score == pytest.approx(float(expected), abs=1e-3)
