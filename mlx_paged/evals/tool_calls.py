"""tool_calls: the share of valid calls for single-turn questions of the Berkeley leaderboard.

`bfcl-eval` (Apache-2.0) has questions with the functions that may answer them, and the answers.
Each question is asked twice: with `tool_choice` "auto", where the model decides, and "required",
where the server's grammar holds every call to the schemas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from jsonschema import Draft202012Validator

from mlx_paged.evals.service import OnReply, Service
from mlx_paged.wheels import OnBytes, Wheel

#: Categories of questions: one function and one call, several functions, several calls, both.
CATEGORIES = ("simple_python", "multiple", "parallel", "parallel_multiple")
Choice = Literal["auto", "required"]

# Python's names in the questions, and JSON Schema's.
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}
# Keywords that the questions use with other meanings than JSON Schema.
_NOT_KEYWORDS = ("optional", "required")


def _files(category: str) -> tuple[str, str]:
    """Questions and answers, in the wheel."""
    name = f"BFCL_v4_{category}.json"
    return f"bfcl_eval/data/{name}", f"bfcl_eval/data/possible_answer/{name}"


_WHEEL = Wheel(
    "bfcl-eval",
    "2026.3.23",
    "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a",
    tuple(file for category in CATEGORIES for file in _files(category)),
    "The questions about tools",
)


@dataclass(frozen=True)
class Question:
    """A question with its tools.

    Attributes:
        tools: OpenAI's format.
        answers: The expected calls: a function's name, and the accepted values of each argument.
            An empty text among them means that the argument may be left out.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    answers: list[dict[str, dict[str, list[Any]]]]


@dataclass(frozen=True)
class Shares:
    """Results for one `tool_choice`, as shares of the questions.

    Attributes:
        called: There is at least one call.
        valid: There is, and all calls name a tool and have arguments valid for its schema.
        right: These are exactly the expected calls, in any order.
    """

    called: float
    valid: float
    right: float


def questions(
    category: str, limit: int | None = None, on_bytes: OnBytes | None = None
) -> list[Question]:
    """Reads the questions of one of `CATEGORIES`, and downloads them if necessary.

    Raises:
        DownloadError: See `wheels.Wheel`.
    """
    directory = _WHEEL.files(on_bytes)
    lines = [
        (directory / file).read_text(encoding="utf-8").splitlines()[:limit]
        for file in _files(category)
    ]
    found = []
    for question, answer in zip(*([json.loads(line) for line in each] for each in lines)):
        assert question["id"] == answer["id"]
        expected = [
            {_legal(function): values for function, values in call.items()}
            for call in answer["ground_truth"]
        ]
        tools = [tool_of(function) for function in question["function"]]
        found.append(Question(question["question"][0], tools, expected))
    return found


def tool_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a function of the questions in OpenAI's format."""
    described = {
        "name": _legal(function["name"]),
        "description": function["description"],
        "parameters": schema_of(function["parameters"]),
    }
    return {"type": "function", "function": described}


def schema_of(described: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON schema that a description with Python's types means."""
    schema = {
        key: value
        for key, value in described.items()
        if key not in _NOT_KEYWORDS or isinstance(value, list)
    }
    kind = _TYPES.get(described.get("type", ""), described.get("type"))
    schema.pop("type", None)
    if kind is not None:
        schema["type"] = kind
    if "properties" in described:
        properties = described["properties"]
        schema["properties"] = {name: schema_of(each) for name, each in properties.items()}
    if isinstance(described.get("items"), Mapping):
        schema["items"] = schema_of(described["items"])
    return schema


def _legal(name: str) -> str:
    """OpenAI's names have no dots."""
    return name.replace(".", "_")


def evaluate(
    service: Service,
    asked: Sequence[Question],
    choice: Choice,
    *,
    max_tokens: int = 512,
    on_reply: OnReply | None = None,
) -> dict[str, float]:
    """Asks all questions, and returns the fields of `Shares`."""
    bodies = [
        {
            "messages": question.messages,
            "tools": question.tools,
            "tool_choice": choice,
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        for question in asked
    ]
    replies = service.ask("/v1/chat/completions", bodies, on_reply)
    called = valid = right = 0
    for question, reply in zip(asked, replies):
        calls = [
            (call["function"]["name"], call["function"]["arguments"])
            for call in reply["choices"][0]["message"].get("tool_calls") or ()
        ]
        called += bool(calls)
        if calls and all(is_valid(question.tools, *call) for call in calls):
            valid += 1
            right += is_right(question.answers, calls)
    count = max(1, len(asked))
    return asdict(Shares(called / count, valid / count, right / count))


def is_valid(tools: Sequence[Mapping[str, Any]], name: str, arguments: str) -> bool:
    """True if a tool has this name, and the arguments are valid for its schema."""
    schemas = [t["function"]["parameters"] for t in tools if t["function"]["name"] == name]
    try:
        values = json.loads(arguments)
    except ValueError:
        return False
    return bool(schemas) and Draft202012Validator(schemas[0]).is_valid(values)


def is_right(
    answers: Sequence[Mapping[str, Mapping[str, list[Any]]]], calls: Sequence[tuple[str, str]]
) -> bool:
    """True if the calls are the expected ones, in any order."""
    if len(calls) != len(answers):
        return False
    rest = list(calls)
    for answer in answers:
        [(name, accepted)] = answer.items()
        found = next(
            (c for c in rest if c[0] == name and _matches(accepted, json.loads(c[1]))), None
        )
        if found is None:
            return False
        rest.remove(found)
    return True


def _matches(accepted: Mapping[str, list[Any]], arguments: Mapping[str, Any]) -> bool:
    if not arguments.keys() <= accepted.keys():
        return False
    return all(
        _plain(arguments[name]) in map(_plain, values) if name in arguments else "" in values
        for name, values in accepted.items()
    )


def _plain(value: Any) -> Any:
    """A value to compare: texts without case, spaces and punctuation, as the leaderboard does."""
    if isinstance(value, str):
        return "".join(c for c in value.lower() if c not in " ,./-_*^")
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        # An accepted object lists the accepted values of each key; the first stands for them.
        return {
            key: _plain(each[0] if isinstance(each, list) and each else each)
            for key, each in value.items()
        }
    return value
