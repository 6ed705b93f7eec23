"""Drafts from the caller's guess of the answer."""

from __future__ import annotations

from array import array
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import pytest
from support.embedded_llm import check_at_rest, make
from support.mixed_requests import SCHEMA, assert_same

from mlx_paged import SamplingParams
from mlx_paged.engine.speculation.predicted import PredictedAnswer
from mlx_paged.errors import InvalidParameterError

PROMPT = [900, 901, 902]


def drafts_after(guess: list[int], answer: list[int], most: int = 3) -> tuple[int, ...]:
    match = PredictedAnswer(guess, len(PROMPT)).find(array("I", PROMPT + answer), most)
    return () if match is None else match.drafts


def test_an_answer_is_followed_through_its_guess() -> None:
    guess = list(range(10, 30))
    assert drafts_after(guess, [10]) == (11, 12, 13)
    assert drafts_after(guess, [10, 11, 12]) == (13, 14, 15)
    assert drafts_after(guess, [11]) == (), "neither the beginning nor a pair"
    assert drafts_after(guess, [10, 99]) == ()
    assert drafts_after(guess, [10, 99, 13]) == (), "one equal token may be anywhere"
    assert drafts_after(guess, [10, 99, 13, 14]) == (15, 16, 17)
    assert drafts_after(guess, [28, 29]) == (), "nothing is left"
    assert drafts_after(PROMPT, [901]) == (), "the prompt is not a part of the answer"


def test_repeated_text_goes_on_behind_the_place_that_was_reached() -> None:
    line = [1, 2, 3]
    guess = [*line, 50, *line, 60, *line, 70]
    predicted = PredictedAnswer(guess, len(PROMPT))
    found = []
    for count in (3, 7, 11):
        match = predicted.find(array("I", PROMPT + guess[:count]), 1)
        assert match is not None
        found.append(match.drafts[0])
    assert found == [50, 60, 70]
    # Another context than the guess has: the next occurrence, not the first one.
    predicted.find(array("I", [*PROMPT, 1, 2, 3, 50]), 1)
    match = predicted.find(array("I", [*PROMPT, 1, 2, 3, 50, 99, 2, 3]), 1)
    assert match is not None and match.drafts == (60,)


@pytest.mark.parametrize("method", ["suffix", "ngram"])
def test_answers_are_the_same_and_take_fewer_steps(method: str) -> None:
    texts = ["def add(a, b):", "class Point:", "import os\n", "for i in range("]
    params = [
        SamplingParams(
            temperature=0.8 * (i % 2),
            seed=i,
            max_tokens=40,
            ignore_eos=True,
            structured_outputs={"json": SCHEMA} if i == 3 else None,
        )
        for i in range(len(texts))
    ]
    expected = make().generate(texts, params)
    hinted = []
    for i, (each, output) in enumerate(zip(params, expected)):
        text = output.outputs[0].text
        guess = (text, text[:30] + " other words " + text[30:], text[20:], text)[i]
        values = {name: getattr(each, name) for name in each.__dataclass_fields__}
        hinted.append(SamplingParams(**{**values, "prediction": guess}))
    config: dict[str, Any] = {"method": method, "adaptive": False, "num_speculative_tokens": 8}
    if method == "suffix":
        config["suffix_decoding_max_cached_requests"] = 0
    llm = make(speculative_config=config)
    steps = []
    for asked in (params, hinted):
        before = llm.stats().num_steps
        assert_same(llm.generate(texts, asked), expected)
        steps.append(llm.stats().num_steps - before)
    assert steps[1] < 0.7 * steps[0], steps
    check_at_rest(llm)


def test_a_guess_that_is_wrong_changes_nothing() -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    [expected] = make().generate(["def f(x):"], params)
    wrong = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, prediction="x" * 50)
    llm = make(speculative_config={"method": "suffix", "adaptive": False})
    [output] = llm.generate(["def f(x):"], wrong)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    with pytest.raises(InvalidParameterError, match=r"prediction must be None or a text .*7"):
        SamplingParams(prediction=7)  # type: ignore[arg-type]
