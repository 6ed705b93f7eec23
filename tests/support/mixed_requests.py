"""Requests with all kinds of parameters, and the comparison of their answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from mlx_paged import RequestOutput, SamplingParams
from support.embedded_llm import PROMPTS

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["function", "class"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "count"],
    "additionalProperties": False,
}
# What `tool_choice` "required" makes of two functions.
TOOL_CALL = {
    "structural_tag": {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<call="],
            "tags": [
                {
                    "begin": f"<call={name}>",
                    "content": {"type": "json_schema", "json_schema": SCHEMA},
                    "end": "</call>",
                }
                for name in ("find", "sort")
            ],
            "at_least_one": True,
            "stop_after_first": True,
        },
    }
}


def params_of(rng: random.Random) -> dict[str, Any]:
    """Parameters of a request, with all that depends on the tokens before."""
    fields: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.0, 0.6, 1.0, 1.3]),
        "seed": rng.randrange(1 << 40),
        "max_tokens": rng.randint(1, 40),
    }
    for name, choices, chance in (
        ("top_p", [0.5, 0.9], 0.3),
        ("top_k", [5, 40], 0.3),
        ("min_p", [0.05], 0.2),
        ("repetition_penalty", [1.2, 0.8], 0.25),
        ("presence_penalty", [0.9], 0.2),
        ("frequency_penalty", [0.7, -0.5], 0.2),
        ("logprobs", [0, 3], 0.3),
        ("stop", [["return"], ["\n\n", "self"]], 0.2),
        ("stop_token_ids", [[12, 40, 77]], 0.2),
        ("min_tokens", [1], 0.2),
        ("ignore_eos", [True], 0.3),
        ("bad_words", [["self", " return x"], ["for i in"]], 0.25),
        ("n", [2, 3], 0.2),
        ("logit_bias", [{17: 4.0, 300: -3.0}], 0.2),
        ("structured_outputs", [{"json": SCHEMA}, {"regex": r"[a-z]{3,9}( = [0-9]+){1,4}"}], 0.25),
    ):
        if rng.random() < chance:
            fields[name] = rng.choice(choices)
    if "structured_outputs" in fields:
        fields["max_tokens"] = 60
        fields.pop("stop_token_ids", None)
    return fields


def requests_of(seed: int, count: int) -> tuple[list[str], list[SamplingParams]]:
    rng = random.Random(seed)
    prompts = [rng.choice(PROMPTS) * rng.choice([1, 1, 2]) for _ in range(count)]
    return prompts, [SamplingParams(**params_of(rng)) for _ in range(count)]


def streams(outputs: Sequence[RequestOutput]) -> list[Any]:
    """All that a caller sees of answers, apart from log-probabilities."""
    return [
        [(a.token_ids, a.text, a.finish_reason, a.stop_reason) for a in output.outputs]
        for output in outputs
    ]


def assert_same(outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    assert streams(outputs) == streams(expected)
    for output, other in zip(outputs, expected, strict=True):
        for answer, wanted in zip(output.outputs, other.outputs, strict=True):
            assert (answer.logprobs is None) == (wanted.logprobs is None)
            if answer.logprobs is not None and wanted.logprobs is not None:
                found = [report.logprob for report in answer.logprobs]
                # A prompt's last bits depend on the number of rows that it was computed with.
                assert found == pytest.approx([r.logprob for r in wanted.logprobs], abs=1e-3)
