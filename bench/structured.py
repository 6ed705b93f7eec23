"""Costs of grammars: a decode step, the first token of a new schema, and compile times.

python bench/structured.py                  # the embedded model's layers, on a CPU; ten minutes
python bench/structured.py --model 3b       # Llama-3.2-3B's shape in bfloat16, on a GPU

32 answers follow 16 schemas. Their JSON is written in advance, and a model with random weights is
forced to generate it: its last hidden state selects the next token of the text. Steps with and
without grammars alternate in one process and generate the same tokens. Vocabularies are learned
from the texts of the installation (`vocabularies.py`) and kept in build/vocabularies; learning 152k
tokens takes minutes.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx_paged.extension  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
from harness import print_table, save
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import llama
from mlx_lm.tokenizer_utils import TokenizerWrapper
from numpy.typing import NDArray
from vocabularies import FOLDER, tokenizer_of

from mlx_paged.demo import model_path
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.grammar import StructuredOutputs
from mlx_paged.engine.grammar.compiler import GrammarCompiler
from mlx_paged.engine.sampling import masks
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.model.loader import LoadedModel

ROWS = 32
PROMPT_TOKENS = 64  # 32 x 64: one step of prefill
MAX_STEPS = 400
LLAMA_3B = {
    "model_type": "llama",
    "hidden_size": 3072,
    "num_hidden_layers": 28,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}

# --- Schemas --------------------------------------------------------------------------------------


TEXT = {"type": "string"}
INTEGER, NUMBER, BOOLEAN = {"type": "integer"}, {"type": "number"}, {"type": "boolean"}
PERCENT = {"type": "integer", "minimum": 0, "maximum": 100}


def record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def several(items: dict[str, Any], least: int = 0, most: int = 4) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


SCHEMAS: dict[str, dict[str, Any]] = {
    "person": record(name=TEXT, age=PERCENT, email=TEXT),
    "order": record(
        id=PERCENT,
        customer=record(name=TEXT, city=TEXT, zip={"type": "string", "pattern": "^[0-9]{5}$"}),
        lines=several(record(sku=TEXT, quantity=PERCENT, price=PERCENT), 1),
    ),
    "enums": record(color={"enum": ["red", "green", "blue"]}, size={"enum": ["S", "M", None, 3]}),
    "union": record(value={"anyOf": [TEXT, PERCENT, {"type": "null"}]}),
    "tagged": {
        "anyOf": [
            record(kind={"const": "circle"}, radius=PERCENT),
            record(kind={"const": "label"}, text={**TEXT, "maxLength": 120}),
        ]
    },
    "references": {
        **record(home={"$ref": "#/$defs/place"}, work={"$ref": "#/$defs/place"}),
        "$defs": {"place": record(city=TEXT, street=TEXT)},
    },
    "tree": record(
        value=PERCENT, children=several(record(value=PERCENT, children=several(PERCENT)))
    ),
    "phone": record(number={"type": "string", "pattern": r"^\+?[0-9]{3}-[0-9]{4}$"}),
    "formats": record(
        day={"type": "string", "format": "date"},
        at={"type": "string", "format": "date-time"},
        id={"type": "string", "format": "uuid"},
    ),
    "numbers": record(x={"type": "number", "minimum": 0, "maximum": 1}, n=PERCENT, flag=BOOLEAN),
    "tuple": record(t={"type": "array", "prefixItems": [PERCENT, TEXT, BOOLEAN], "items": False}),
    "map": {"type": "object", "additionalProperties": PERCENT, "maxProperties": 6},
    "optional": {
        "type": "object",
        "properties": dict.fromkeys("abcdefghij", TEXT),
        "required": ["c"],
        "additionalProperties": False,
    },
    "countries": record(code={"enum": [f"COUNTRY_{i:03d}" for i in range(250)]}),
    "steps": record(steps=several(record(why=TEXT, result=TEXT), 1), answer=TEXT),
    "tool": record(
        location={**TEXT, "description": "City"},
        unit={"enum": ["celsius", "fahrenheit"]},
        days={"type": "integer", "minimum": 1, "maximum": 14},
    ),
}
assert len(SCHEMAS) == 16


def endless(schema: dict[str, Any]) -> dict[str, Any]:
    """A list too long for the answers of a measurement to contain all of it."""
    definitions = schema.get("$defs", {})
    items = {key: value for key, value in schema.items() if key != "$defs"}
    return {"type": "array", "items": items, "minItems": 2000, "$defs": definitions}


WORDS = [
    "the",
    "a",
    "quick",
    "answer",
    "of",
    "every",
    "model",
    "is",
    "list",
    "that",
    "holds",
    "long",
]
BY_FORMAT = {
    "date": "2026-11-{:02d}",
    "date-time": "2026-11-{:02d}T10:30:00Z",
    "uuid": "123e4567-e89b-12d3-a456-4266141740{:02d}",
}


def value_of(schema: dict[str, Any], root: dict[str, Any], rng: random.Random) -> Any:
    """A random value for a schema of `SCHEMAS`."""
    if "$ref" in schema:
        return value_of(root["$defs"][schema["$ref"].rpartition("/")[2]], root, rng)
    if "anyOf" in schema:
        return value_of(rng.choice(schema["anyOf"]), root, rng)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    match schema["type"]:
        case "integer":
            return rng.randint(schema.get("minimum", 0), schema.get("maximum", 10_000))
        case "number":
            return round(rng.random(), 3)
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
        case "string" if "format" in schema:
            return BY_FORMAT[schema["format"]].format(rng.randint(10, 28))
        case "string" if "pattern" in schema:
            return "12345" if "5" in schema["pattern"] else "555-1234"
        case "string":
            return " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))
        case "array":
            if "prefixItems" in schema:
                return [value_of(each, root, rng) for each in schema["prefixItems"]]
            count = rng.randint(schema["minItems"], schema["maxItems"])
            return [value_of(schema["items"], root, rng) for _ in range(count)]
    if "properties" not in schema:
        names = [f"{rng.choice(WORDS)}_{i}" for i in range(rng.randint(1, 6))]
        return {name: value_of(schema["additionalProperties"], root, rng) for name in names}
    return {
        name: value_of(each, root, rng)
        for name, each in schema["properties"].items()
        if name in schema["required"] or rng.random() < 0.5
    }


def scripts_of(tokenizer: TokenizerWrapper, length: int) -> NDArray[np.int32]:
    """``[ROWS, length]``: the tokens that each row generates, starting with a bracket."""
    rng = random.Random(0)
    [bracket] = tokenizer.encode("[", add_special_tokens=False)
    scripts = []
    for i in range(ROWS):
        schema = list(SCHEMAS.values())[i % len(SCHEMAS)]
        tokens: list[int] = []
        values: list[Any] = []
        while len(tokens) < length:
            values += [value_of(schema, schema, rng) for _ in range(20)]
            tokens = tokenizer.encode(json.dumps(values)[1:], add_special_tokens=False)
        scripts.append([bracket, *tokens[: length - 1]])
    return np.array(scripts, dtype=np.int32)


# --- Models ---------------------------------------------------------------------------------------


class Replaying(llama.LlamaModel):
    """Hidden states that make the output projection (the tied embedding) select the next token of a
    script. The rows of a step are the sequences in order."""

    def __call__(self, inputs: mx.array, cache: Any = None, *args: Any) -> mx.array:
        positions = cache[0].offset if cache else 0
        hidden = super().__call__(inputs, cache, *args)
        if not isinstance(positions, mx.array):  # a dense call, which only asks for cache layouts
            return hidden
        rows = mx.arange(hidden.shape[0]) % ROWS
        place = mx.clip(positions - (PROMPT_TOKENS - 1), 0, self._scripts.shape[1] - 1)
        return hidden + 4 * self.embed_tokens(self._scripts[rows, place])[:, None]


def random_model(kind: str, vocab_size: int, folder: Path) -> LoadedModel:
    """A random model with the embedded model's or a 3B Llama's layers and another vocabulary."""
    config = dict(LLAMA_3B)
    if kind == "embedded":
        config = json.loads((model_path() / "config.json").read_text())
        config = {key: value for key, value in config.items() if "quantization" not in key}
    config |= {"vocab_size": vocab_size, "eos_token_id": [0]}
    model = llama.Model(llama.ModelArgs.from_dict(config))
    dtype = mx.float32 if kind == "embedded" else mx.bfloat16
    mx.random.seed(0)
    weights = []
    for path, array in tree_flatten(model.parameters()):
        weight = (0.02 * mx.random.normal(array.shape)).astype(dtype)
        mx.eval(weight)  # one at a time, because the random numbers are float32
        weights.append((path, weight))
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters())
    model.eval()
    tokenizer = tokenizer_of(vocab_size, folder)
    model.model.__class__ = Replaying
    model.model._scripts = mx.array(scripts_of(tokenizer, MAX_STEPS))
    return LoadedModel(model, tokenizer, config, f"random {kind}")


def engine_of(model: LoadedModel) -> Engine:
    options = {"num_gpu_blocks_override": 2048, "max_model_len": 2048, "max_num_seqs": ROWS}
    engine = Engine(model, EngineConfig(**options))  # type: ignore[arg-type]
    _ = engine.intake.grammar_compiler.tokenizer  # waits for it; a background thread makes it
    return engine


def prompt(rng: np.random.Generator, engine: Engine) -> list[int]:
    return rng.integers(300, engine.vocab_size, PROMPT_TOKENS).tolist()  # type: ignore[no-any-return]


# --- A decode step --------------------------------------------------------------------------------


@contextmanager
def timed(owner: Any, name: str, into: list[float]) -> Iterator[None]:
    """Appends the milliseconds of each call of a function to a list."""
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            into.append((time.perf_counter() - start) * 1e3)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, function)


def engine_scripts(engine: Engine) -> list[list[int]]:
    """Tokens that each row generates."""
    return scripts_of(engine.tokenizer, MAX_STEPS).tolist()  # type: ignore[no-any-return]


def run_steps(engine: Engine, with_grammars: bool, steps: int, seed: int) -> dict[str, list[float]]:
    """Milliseconds per step while all rows decode, and the part spent on masks."""
    rng = np.random.default_rng(seed)
    requests: list[str] = []
    generated: dict[str, list[int]] = {}

    def step() -> None:
        for update in engine.step():
            generated.setdefault(update.request_id, []).extend(update.token_ids)

    for i in range(ROWS):
        schema = endless(list(SCHEMAS.values())[i % len(SCHEMAS)])
        wanted = StructuredOutputs(json=schema, strict=True) if with_grammars else None
        params = SamplingParams(
            temperature=0.0, max_tokens=1500, ignore_eos=True, structured_outputs=wanted
        )
        requests.append(str((seed, i)))
        engine.add_request(requests[-1], prompt(rng, engine), params)
    while engine.stats().num_waiting:
        step()
    for _ in range(5 + 20 * (seed % 10)):  # each round measures a different part of the texts
        step()
    times: dict[str, list[float]] = {"step": [], "follow": [], "fill": [], "cpu": []}
    gc.collect()
    gc.disable()
    with (
        timed(masks.SequenceMasks, "grammar_masks", times["follow"]),
        timed(masks, "fill_masks", times["fill"]),
    ):
        began = time.process_time()
        for _ in range(steps):
            start = time.perf_counter()
            step()
            times["step"].append((time.perf_counter() - start) * 1e3)
        times["cpu"].append((time.process_time() - began) / steps * 1e3)
    gc.enable()
    assert engine.stats().num_running == ROWS
    for request, script in zip(requests, engine_scripts(engine)):
        assert generated[request] == script[: len(generated[request])], "another text than planned"
        engine.abort(request)
    while engine.has_unfinished:
        engine.step()
    return times


def decode(engine: Engine, steps: int, rounds: int) -> dict[str, Any]:
    """Steps with and without grammars, in turns."""
    run_steps(engine, True, 5, 0)  # warm-up: compiles grammars and the first step of each shape
    of: dict[bool, list[dict[str, list[float]]]] = {False: [], True: []}
    for turn in range(rounds):
        for with_grammars in (False, True):
            of[with_grammars].append(run_steps(engine, with_grammars, steps, 1 + turn))

    def medians(which: bool, name: str) -> list[float]:
        return [statistics.median(times[name]) for times in of[which] if times[name]]

    def compared(name: str) -> dict[str, float]:
        free, masked = medians(False, name), medians(True, name)
        return {
            "free": round(statistics.median(free), 3),
            "grammars": round(statistics.median(masked), 3),
            "added": round(statistics.median(b - a for a, b in zip(free, masked)), 3),
            "ratio": round(statistics.median(b / a for a, b in zip(free, masked)), 4),
        }

    fill = [t for times in of[True] for t in times["fill"]]
    return {
        "rows": ROWS,
        "step_ms": compared("step"),
        # CPU time of all threads, which does not depend on other load.
        "cpu_ms": compared("cpu"),
        # On another thread, while the host builds and encodes the forward pass.
        "follow_and_fill_ms": round(statistics.median(medians(True, "follow")), 3),
        "fill_ms": {
            "median": round(statistics.median(fill), 3),
            "p99": round(float(np.percentile(fill, 99)), 3),
            "max": round(max(fill), 3),
        },
    }


# --- A new schema ---------------------------------------------------------------------------------


def first_token_ms(engine: Engine, wanted: StructuredOutputs | None, seed: int) -> float:
    """Time from a request's arrival at an idle engine to its first token."""
    params = SamplingParams(temperature=0.0, max_tokens=1, structured_outputs=wanted)
    tokens = prompt(np.random.default_rng((9, seed)), engine)
    start = time.perf_counter()
    engine.add_request(f"first {seed}", tokens, params)
    while not any(update.token_ids for update in engine.step()):
        pass
    spent = (time.perf_counter() - start) * 1e3
    while engine.has_unfinished:
        engine.step()
    return spent


def first_tokens(engine: Engine, rounds: int) -> dict[str, Any]:
    """Each schema under a new title, so that it is not cached, and as many requests without one."""
    free, new = [], []
    seed = 0
    for turn in range(rounds):
        for schema in SCHEMAS.values():
            seed += 1
            free.append(first_token_ms(engine, None, 2 * seed))
            named = {"title": f"round {turn}", **schema}
            wanted = StructuredOutputs(json=named, strict=True)
            new.append(first_token_ms(engine, wanted, 2 * seed + 1))
    added = sorted(b - a for a, b in zip(free, new))
    return {
        "free_ms": round(statistics.median(free), 2),
        "new_schema_ms": round(statistics.median(new), 2),
        "added_ms": {
            "median": round(statistics.median(added), 2),
            "p90": round(float(np.percentile(added, 90)), 2),
            "max": round(added[-1], 2),
        },
    }


def compile_times(model: LoadedModel) -> dict[str, Any]:
    """Milliseconds to compile each schema, and to set up the tokenizer."""
    start = time.perf_counter()
    eos = model.tokenizer.eos_token_ids
    compiler = GrammarCompiler(model.tokenizer, model.vocab_size, eos)
    _ = compiler.tokenizer
    setup = time.perf_counter() - start
    times = {}
    for name, schema in SCHEMAS.items():
        start = time.perf_counter()
        compiler.compile(StructuredOutputs(json=schema, strict=True))
        times[name] = round((time.perf_counter() - start) * 1e3, 3)
    return {
        "tokenizer_s": round(setup, 2),
        "total_ms": round(sum(times.values()), 2),
        "max_ms": max(times.values()),
        "ms": times,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("embedded", "3b"), default="embedded")
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[32_000, 151_936])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vocabularies", type=Path, default=FOLDER)
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    mx.set_default_device(mx.cpu if args.model == "embedded" else mx.gpu)
    results = []
    for vocab_size in args.vocab_sizes:
        model = random_model(args.model, vocab_size, args.vocabularies)
        compiled = compile_times(model)
        engine = engine_of(model)
        result = {
            "vocab_size": vocab_size,
            "decode": decode(engine, args.steps, args.rounds),
            "first_token": first_tokens(engine, max(1, args.rounds // 2)),
            "compile": compiled,
        }
        results.append(result)
        print(json.dumps({k: v for k, v in result.items() if k != "compile"}), flush=True)
        del engine, model
        gc.collect()
        mx.clear_cache()
    print_table(
        [
            "vocabulary",
            "free step",
            "with grammars",
            "ratio",
            "of CPU time",
            "fill",
            "first token +",
            "compile 16",
        ],
        [
            [
                str(r["vocab_size"]),
                f"{r['decode']['step_ms']['free']:.2f} ms",
                f"{r['decode']['step_ms']['grammars']:.2f} ms",
                f"{r['decode']['step_ms']['ratio']:.3f}",
                f"{r['decode']['cpu_ms']['ratio']:.3f}",
                f"{r['decode']['fill_ms']['median']:.2f} ms",
                f"{r['first_token']['added_ms']['median']:.1f} ms",
                f"{r['compile']['total_ms']:.0f} ms",
            ]
            for r in results
        ],
    )
    if not args.no_save:
        name = "structured-cpu" if args.model == "embedded" else "structured-gpu"
        print("\n", save(name, {"model": args.model, "results": results}))


if __name__ == "__main__":
    main()
