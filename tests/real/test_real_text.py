"""Constraints and stop strings with a real vocabulary of 49,152 tokens, in byte-level BPE."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from jsonschema import validate

from mlx_paged import LLM, SamplingParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["poet", "painter", "singer"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMAR = """
root ::= move (", " move){2}
move ::= [a-h] [1-8] " to " [a-h] [1-8]
"""


def asked(llm: LLM, question: str, **options: Any) -> list[str]:
    """Texts of answers to one question: a greedy one, and three that are sampled."""
    messages = [{"role": "user", "content": question}]
    sampled = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=96, **options) for seed in range(3)
    ]
    greedy = SamplingParams(temperature=0, max_tokens=96, **options)
    outputs = llm.chat([messages] * 4, [greedy, *sampled])
    assert all(output.outputs[0].finish_reason == "stop" for output in outputs)
    return [output.outputs[0].text for output in outputs]


def test_every_answer_follows_a_json_schema(llm: LLM) -> None:
    question = "Describe a person as JSON with name, age and tags."
    for text in asked(llm, question, structured_outputs={"json": PERSON}):
        validate(json.loads(text), PERSON)


def test_every_answer_matches_a_regular_expression(llm: LLM) -> None:
    pattern = r"[A-Z][a-zé]{2,12} [0-9]{1,2}, (19|20)[0-9]{2}"
    for text in asked(llm, "When was the moon landing?", structured_outputs={"regex": pattern}):
        assert re.fullmatch(pattern, text)


def test_every_answer_is_one_of_the_choices(llm: LLM) -> None:
    choices = ["größer", "kleiner", "gleich groß", "比較不能"]
    for text in asked(llm, "Is 2 more than 1?", structured_outputs={"choice": choices}):
        assert text in choices


def test_every_answer_follows_a_grammar(llm: LLM) -> None:
    for text in asked(llm, "Play chess.", structured_outputs={"grammar": GRAMMAR}):
        assert re.fullmatch(r"([a-h][1-8] to [a-h][1-8](, |$)){3}", text)


@pytest.mark.parametrize("stop", ["Paris", "s Par", "is.", "ital of Fr"])
@pytest.mark.parametrize("included", [False, True])
def test_an_answer_ends_at_a_stop_string(stop: str, included: bool, llm: LLM) -> None:
    # "s Par" and "ital of Fr" begin and end within tokens.
    whole = "The capital of France is Paris."
    params = SamplingParams(
        temperature=0, max_tokens=32, stop=stop, include_stop_str_in_output=included
    )
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    [output] = llm.chat([messages], params)
    [answer] = output.outputs
    assert answer.text == whole[: whole.index(stop) + (len(stop) if included else 0)]
    assert answer.stop_reason == stop


@pytest.mark.parametrize(
    "text", ["naïve café", "日本語のテキスト", "🙂🙃", "def f(x):\n\treturn x ** 2\n", "a  b   c"]
)
def test_texts_survive_tokens(text: str, llm: LLM) -> None:
    prompt = f"Repeat: {text}\n"
    tokens = llm.tokenizer.encode(prompt)
    assert llm.tokenizer.decode(tokens) == prompt
    streamed = "".join(
        update.text
        for update in llm.stream(
            prompt,
            SamplingParams(temperature=0, max_tokens=64, structured_outputs={"choice": [text]}),
        )
    )
    assert streamed == text
