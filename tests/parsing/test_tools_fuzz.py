"""Random schemas of tools in every format: a grammar is compiled and can be followed, or refused.

MLX_PAGED_FUZZ sets how many (as in `tests/engine/test_grammar_fuzz.py`).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from random import Random
from typing import Any

from support.grammar_walks import Walks
from support.models import embedded
from support.random_schemas import RandomSchemas
from support.tool_reading import read

from mlx_paged.engine.grammar.compiler import GrammarCompiler
from mlx_paged.errors import InvalidParameterError
from mlx_paged.parsing.definitions import Tool, ToolChoice
from mlx_paged.parsing.registry import FORMATS
from mlx_paged.server.conversation import Conversation
from mlx_paged.server.turn import Turn
from mlx_paged.server.turn_preparation import _constraint

COUNT = int(os.environ.get("MLX_PAGED_FUZZ", "75")) // 2
FIELD = "tools[0].function.parameters"
# Those whose arguments are JSON, which any name of a parameter can be written in.
IN_JSON = ("hermes", "json", "llama3_json", "mistral", "xlam", "phi4_mini_json")


def test_random_tools() -> None:
    model = embedded()
    eos = model.tokenizer.eos_token_ids
    compiler = GrammarCompiler(model.tokenizer, model.vocab_size, eos, timeout=300, cache_size=4)
    outcomes: Counter[str] = Counter()
    rng, schemas, walks = Random(0), RandomSchemas(77), Walks(compiler, 0)
    for i in range(COUNT):
        schema = schemas.schema()
        if i % 50 == 49:
            print(f"{i + 1}: {dict(outcomes)}", flush=True)
        if not isinstance(schema, dict) or schema.get("type", "object") != "object":
            continue
        format = FORMATS[i % len(FORMATS)]({}, "")
        tool = Tool("f", None, {**schema, "type": "object"}, rng.random() < 0.2, field=FIELD)
        named = ToolChoice("named", ("f",), parallel=False)
        turn = Turn(Conversation([]), (tool,), rng.choice((ToolChoice("required"), named)))
        found: Any = None
        for prune in (False, True):
            try:
                found = _constraint(turn, (tool,), format, [(FIELD, None)], prune=prune)
                grammar = compiler.compile(found.outputs)
                break
            except InvalidParameterError as refusal:
                allowed = (FIELD, "tools", "structured_outputs.grammar")
                assert refusal.field.startswith(allowed), (json.dumps(schema), str(refusal))
                found = None
        if found is None:
            outcomes["refused"] += 1
            continue
        [text] = walks.run([grammar])
        if text is None:
            outcomes["cut"] += 1
            continue
        outcomes["followed"] += 1
        if format.names[0] in IN_JSON:
            answer, _ = read(format, (tool,), {}, [(1, text)])
            assert answer.calls and answer.content == "", text
            assert isinstance(json.loads(answer.calls[0].arguments), dict), text
    assert outcomes["followed"] > COUNT / 4
