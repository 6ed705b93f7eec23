"""Lines of a batch with structured outputs and forced calls, through the engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema

from mlx_paged.cli import batch

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
ASK = [{"role": "user", "content": "Describe something."}]
SHAPE = {
    "type": "object",
    "properties": {"kind": {"enum": ["circle", "square"]}, "filled": {"type": "boolean"}},
    "required": ["kind", "filled"],
    "additionalProperties": False,
}
NOT_ENFORCED = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": True}


def schema(of: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": of, **more}}


def test_lines_say_what_their_answers_are(tmp_path: Path) -> None:
    chat = {"messages": ASK, "seed": 1, "max_tokens": 200}
    plain = {"prompt": "x = ", "seed": 1, "max_tokens": 100}
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "format": (CHAT, {**chat, "n": 3, "response_format": schema(SHAPE, strict=True)}),
        "object": (CHAT, {**chat, "response_format": {"type": "json_object"}, "n": 3}),
        "json": (CHAT, {**chat, "structured_outputs": {"json": SHAPE}}),
        "regex": (PLAIN, {**plain, "structured_outputs": {"regex": "[0-9]{3}"}}),
        "choice": (PLAIN, {**plain, "guided_choice": ["yes", "no"]}),
        "grammar": (CHAT, {**chat, "structured_outputs": {"grammar": 'start: "a"+ "b"'}}),
        "relaxed": (CHAT, {**chat, "response_format": schema(NOT_ENFORCED)}),
        "strict": (CHAT, {**chat, "response_format": schema(NOT_ENFORCED, strict=True)}),
        "no schema": (CHAT, {**chat, "response_format": schema({"type": "shape"})}),
        "two": (CHAT, {**chat, "response_format": schema(SHAPE), "guided_regex": "a"}),
        "unknown": (PLAIN, {**plain, "structured_outputs": {"jsn": SHAPE}}),
    }  # fmt: skip
    source, output = tmp_path / "in", tmp_path / "out"
    lines = [
        {"custom_id": name, "method": "POST", "url": url, "body": body}
        for name, (url, body) in bodies.items()
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {"num_gpu_blocks_override": 200}
    num_failed = batch.run(batch.Batch(source, output, progress=False, engine_options=options))
    answers = {a["custom_id"]: a["response"] for a in map(json.loads, output.open())}
    assert answers.keys() == bodies.keys()
    refused = {
        name: answer["body"]["error"]["param"]
        for name, answer in answers.items()
        if answer["status_code"] == 400
    }
    assert num_failed == len(refused)
    assert refused == {
        "strict": "response_format.json_schema.schema.uniqueItems",
        "no schema": "response_format.json_schema.schema.type",
        "two": "guided_json, guided_regex, ...",
        "unknown": "structured_outputs.jsn",
    }

    def texts(name: str) -> list[str]:
        """Counts answers that were not cut."""
        choices = answers[name]["body"]["choices"]
        ended = [choice for choice in choices if choice["finish_reason"] == "stop"]
        return [c["text"] if "text" in c else c["message"]["content"] for c in ended]

    for name in ("format", "json"):
        assert texts(name)
        for text in texts(name):
            jsonschema.validate(json.loads(text), SHAPE)
    assert all(isinstance(json.loads(text), dict) for text in texts("object"))
    assert all(json.loads(text) in ([], [1], [2], [1, 2], [2, 1], [1, 1], [2, 2])
               for text in texts("relaxed"))  # fmt: skip
    for name, pattern in (("regex", "[0-9]{3}"), ("choice", "yes|no"), ("grammar", "a+b")):
        [text] = texts(name)
        assert re.fullmatch(pattern, text), (name, text)
