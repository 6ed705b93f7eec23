"""lm_eval's questions to a model: the probabilities and texts are the engine's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install '.[eval]'")

from lm_eval.api.instance import Instance
from support.server_helpers import running

from mlx_paged import LLM, SamplingParams
from mlx_paged.evals.language_model import ServedLM
from mlx_paged.evals.service import LocalService, RemoteService, Service
from mlx_paged.server.config import ServerConfig

PAIRS = [
    ("def add(a, b):\n", "    return a + b\n"),
    ("def add(a, b):\n    ", "return a - b\n"),
    ("import ", "os"),
    ("", "for i in range(10):"),
]
MAX_MODEL_LEN = 512


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(kv_cache_memory=1 << 26)


@pytest.fixture(scope="module", params=["in process", "at a URL"])
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    if request.param == "in process":
        found: Service = LocalService(None, max_model_len=MAX_MODEL_LEN, kv_cache_memory=1 << 26)
        yield found
        found.close()
        return
    with running(ServerConfig(), max_model_len=MAX_MODEL_LEN) as server:
        found = RemoteService(f"{server.url}/v1", None)
        yield found
        found.close()


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


def expected(llm: LLM, tokens: list[int], start: int) -> tuple[float, bool]:
    """The sum of log-probabilities from a token on, and whether all of them are the likeliest."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    [output] = llm.generate([tokens], params)
    assert output.prompt_logprobs is not None
    reports = [report for report in output.prompt_logprobs[start:] if report is not None]
    return sum(r.logprob for r in reports), all(r.rank == 1 for r in reports)


def test_probabilities_of_continuations(service: Service, llm: LLM) -> None:
    found = ServedLM(service).loglikelihood(instances("loglikelihood", PAIRS))
    for (context, continuation), (score, is_greedy) in zip(PAIRS, found, strict=True):
        tokens = llm.tokenizer.encode(context + continuation)
        start = max(1, len(llm.tokenizer.encode(context.rstrip())))
        sure, greedy = expected(llm, tokens, start)
        assert score == pytest.approx(sure, abs=1e-3)
        assert is_greedy is greedy


def test_what_the_model_would_write_is_greedy(service: Service, llm: LLM) -> None:
    context = "def fibonacci(n):"
    [output] = llm.generate(context, SamplingParams(temperature=0, max_tokens=8))
    pair = (context, output.outputs[0].text)
    [(_, is_greedy)] = ServedLM(service).loglikelihood(instances("loglikelihood", [pair]))
    assert is_greedy


def test_a_context_that_is_too_long_loses_its_beginning(service: Service, llm: LLM) -> None:
    context, continuation = "x = 1\n" * 400, "y = 2"
    tokens = llm.tokenizer.encode(context + continuation)
    assert len(tokens) > MAX_MODEL_LEN
    pair = (context, continuation)
    [(score, _)] = ServedLM(service).loglikelihood(instances("loglikelihood", [pair]))
    kept = tokens[-(MAX_MODEL_LEN - 1) :]
    scored = len(tokens) - len(llm.tokenizer.encode(context.rstrip()))
    assert score == pytest.approx(expected(llm, kept, len(kept) - scored)[0], abs=1e-3)


def test_a_text_is_scored_in_windows(service: Service, llm: LLM) -> None:
    short, long = "a = [1, 2, 3]\n", "value = compute(first, second)\n" * 120
    texts = [(short,), (long,), ("",)]
    scores = ServedLM(service).loglikelihood_rolling(instances("loglikelihood_rolling", texts))
    tokens = llm.tokenizer.encode(short)
    assert scores[0] == pytest.approx(expected(llm, tokens, 1)[0], abs=1e-3)
    assert len(llm.tokenizer.encode(long)) > MAX_MODEL_LEN
    assert math.isfinite(scores[1]) and scores[1] < scores[0]
    assert scores[2] == 0


def test_texts_end_where_the_task_says(service: Service, llm: LLM) -> None:
    prompts = ["def add(a, b):\n", "def mean(values):\n"]
    options = {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False}
    found = ServedLM(service).generate_until(
        instances("generate_until", [(prompt, dict(options)) for prompt in prompts])
    )
    params = SamplingParams(temperature=0, max_tokens=24, stop=["\n\n"])
    assert found == [output.outputs[0].text for output in llm.generate(prompts, params)]


def test_chats_go_through_the_template(service: Service, llm: LLM) -> None:
    model = ServedLM(service)
    messages = [{"role": "user", "content": "Return the n-th Fibonacci number"}]
    context = model.apply_chat_template(messages)
    asked = instances("generate_until", [(context, {"max_gen_toks": 16})])
    [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=16))
    assert model.generate_until(asked) == [output.outputs[0].text]

    pair = (context, "def fibonacci")
    [(score, _)] = model.loglikelihood(instances("loglikelihood", [pair]))
    prompt = output.prompt_token_ids
    tokens = [*prompt, *llm.tokenizer.encode("def fibonacci", add_special_tokens=False)]
    assert score == pytest.approx(expected(llm, tokens, len(prompt))[0], abs=1e-3)
