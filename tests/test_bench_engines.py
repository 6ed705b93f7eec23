"""`bench latency`, `bench throughput`: both engines do the same work, and it is counted right."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from mlx_paged.cli.bench import footprint, offline, runs, turns
from mlx_paged.cli.bench.datasets import Dataset, Prompt, Workload, random_prompts, tokenizer_of
from mlx_paged.cli.bench.options import EngineName
from mlx_paged.cli.bench.percentiles import latency_figures, percentile
from mlx_paged.cli.bench.runners import Settings, open_runner
from mlx_paged.cli.bench.runs import Answer, Run
from mlx_paged.cli.main import app
from mlx_paged.errors import MlxPagedError, RequestTooLargeError

BOTH = list(EngineName)
SMALL = Settings(engine={"max_model_len": 256, "max_num_batched_tokens": 64}, max_num_seqs=4)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_of(None)


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[Prompt]:
    lengths = [(5, 6), (40, 3), (1, 9), (17, 1), (90, 4)]  # more than run at once
    return [
        random_prompts(tokenizer, 1, input_len, output_len, seed=i)[0]
        for i, (input_len, output_len) in enumerate(lengths)
    ]


# --- figures --------------------------------------------------------------------------------------


def test_percentiles_are_numpys(rng) -> None:
    values = rng.normal(size=37).tolist()
    for share in (0, 10, 33.3, 50, 90, 99, 99.9, 100):
        assert percentile(values, share) == pytest.approx(np.percentile(values, share))


def test_latency_figures_are_numpys(rng) -> None:
    seconds = rng.uniform(size=23).tolist()
    made = latency_figures({"itl": seconds}, [25, 99.5])
    milliseconds = 1000 * np.array(seconds)
    assert made == pytest.approx(
        {
            "mean_itl_ms": milliseconds.mean(),
            "median_itl_ms": np.median(milliseconds),
            "std_itl_ms": milliseconds.std(),
            "p25_itl_ms": np.percentile(milliseconds, 25),
            "p99.5_itl_ms": np.percentile(milliseconds, 99.5),
        }
    )


RUN = Run(  # two prompts of two answers each
    4.0,
    [10, 30],
    [
        Answer([1, 2, 3], [0.5, 1.0, 2.5], 0),
        Answer([4], [0.5], 0),
        Answer([5, 6], [1.0, 4.0], 16),
        Answer([7, 8, 9, 9], [1.0, 1.5, 2.0, 3.5], 16),
    ],
)


def test_rates_count_each_prompt_once_and_every_answer() -> None:
    assert runs.rates(RUN) == {
        "elapsed_time": 4.0,
        "num_requests": 2,
        "total_num_tokens": 50,
        "requests_per_second": 0.5,
        "tokens_per_second": 12.5,
        "total_prompt_tokens": 40,
        "total_output_tokens": 10,
        "total_cached_tokens": 16,
        "output_tokens_per_second": 2.5,
    }


def test_token_latencies_are_over_all_answers_of_all_runs() -> None:
    made = runs.token_latencies([RUN, RUN], [50])
    assert made["mean_ttft_ms"] == pytest.approx(750)
    assert made["mean_tpot_ms"] == pytest.approx(1000 * np.mean([1.0, 3.0, 2.5 / 3]))
    assert made["mean_itl_ms"] == pytest.approx(1000 * np.mean([0.5, 1.5, 3.0, 0.5, 0.5, 1.5]))
    assert made["p50_e2el_ms"] == pytest.approx(1000 * np.percentile([2.5, 0.5, 4.0, 3.5], 50))


def test_the_median_run_and_the_comparison_of_turns() -> None:
    ours = [replace(RUN, seconds=s) for s in (2.0, 1.0, 4.0)]
    other = [*RUN.answers[:3], Answer([7, 8, 9, 1], RUN.answers[3].times)]
    theirs = [replace(RUN, seconds=s, answers=other) for s in (3.0, 4.0, 4.0)]
    assert runs.median_run(ours).seconds == 2.0
    assert runs.median_run(ours[:2]).seconds == 2.0
    assert runs.compare(ours, theirs) == {
        "ratios": [1.5, 4.0, 1.0],
        "speedup": 1.5,
        "same_answers": 3,
        "num_answers": 4,
    }


def test_the_peak_of_this_process_is_seen() -> None:
    before = footprint.peak_resident_bytes()
    held = np.ones(before + (64 << 20), dtype=np.uint8)  # more than it ever had
    assert footprint.peak_resident_bytes() >= before + (64 << 20)
    del held
    seen = footprint.measure_footprint()
    assert 0 < seen.system_used < seen.system_total
    assert seen.process_peak >= before + (64 << 20) and seen.pool is None


def test_the_pool_has_room_for_the_work_and_no_more(prompts) -> None:
    sized = offline.sized(Settings(engine={"max_model_len": None, "block_size": 16}), prompts)
    assert sized.engine == {"max_model_len": 94, "block_size": 16}
    assert sized.max_num_seqs == len(prompts)
    assert offline.sized(Settings(num_answers=3), prompts).max_num_seqs == 3 * len(prompts)
    assert offline.sized(SMALL, prompts).engine["max_model_len"] == 256
    runner = open_runner(EngineName.MLX_PAGED, sized)
    runner.run(prompts)
    seen = runner.footprint()
    # 6 blocks of 16 tokens each, and block 0; 2 KV heads of 64 in 6 layers, K and V, 4 bytes.
    assert seen.pool == (5 * 6 + 1) * 16 * 2 * 64 * 6 * 2 * 4
    assert seen.pool_used is not None and 0 < seen.pool_used <= seen.pool


# --- engines --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOTH)
def test_every_token_is_counted_and_timed(name, prompts) -> None:
    run = open_runner(name, replace(SMALL, num_answers=2)).run(prompts)
    assert run.prompt_lens == [p.num_tokens for p in prompts]
    asked = [p.max_tokens for p in prompts for _ in range(2)]
    assert [len(a.token_ids) for a in run.answers] == asked
    assert [len(a.times) for a in run.answers] == asked
    assert run.num_output_tokens == sum(asked)
    for answer in run.answers:
        moments = [0.0, *answer.times, run.seconds]
        assert moments == sorted(moments)


def test_both_engines_find_the_same_greedy_tokens(prompts) -> None:
    ours, theirs = (open_runner(name, SMALL).run(prompts) for name in BOTH)
    assert [a.token_ids for a in ours.answers] == [a.token_ids for a in theirs.answers]


def test_ends_mean_the_same_to_both_engines(tokenizer) -> None:
    chats = Workload(Dataset.EMBEDDED, 4, output_len=120, system_prompt=False).sample(tokenizer, 1)
    ends = set(tokenizer.eos_token_ids)

    def answers(name: EngineName, ignore_eos: bool) -> list[list[int]]:
        run = open_runner(name, replace(SMALL, ignore_eos=ignore_eos)).run(chats)
        return [answer.token_ids for answer in run.answers]

    stopped = answers(EngineName.MLX_PAGED, False)
    assert stopped == answers(EngineName.MLX_LM, False)
    finished = [tokens for tokens in stopped if len(tokens) < 120]
    assert finished, "an answer should come to its end"
    assert all(tokens[-1] in ends and not ends & {*tokens[:-1]} for tokens in finished)
    whole = answers(EngineName.MLX_PAGED, True)
    assert whole == answers(EngineName.MLX_LM, True)
    assert {len(tokens) for tokens in whole} == {120}
    assert all(long[: len(short)] == short for long, short in zip(whole, stopped))


def test_cold_runs_find_nothing_in_the_prefix_cache(tokenizer) -> None:
    prompts = random_prompts(tokenizer, 2, 70, 2)
    runner = open_runner(EngineName.MLX_PAGED, SMALL)
    assert runner.run(prompts).num_cached_tokens == 0
    assert runner.run(prompts, cold=True).num_cached_tokens == 0
    assert runner.run(prompts).num_cached_tokens == 2 * 64  # the full blocks of 32


def test_a_refused_prompt_leaves_the_engine_fit(tokenizer) -> None:
    runner = open_runner(EngineName.MLX_PAGED, SMALL)
    good, bad = random_prompts(tokenizer, 1, 8, 3), random_prompts(tokenizer, 1, 300, 3)
    with pytest.raises(RequestTooLargeError):
        runner.run([*good, *bad])
    assert runner.run(good).num_output_tokens == 3


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_seed_repeats_sampled_answers(name, temperature, prompts) -> None:
    def answers(seed: int) -> list[list[int]]:
        settings = replace(SMALL, temperature=temperature, seed=seed)
        return [a.token_ids for a in open_runner(name, settings).run(prompts[:1]).answers]

    assert answers(1) == answers(1)
    assert (answers(1) == answers(2)) is (temperature == 0)


def test_turns_alternate(prompts) -> None:
    calls: list[str] = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, prompts, *, cold: bool = False) -> Run:
            calls.append(self.name)
            return RUN

    done: list[None] = []
    made = turns.take_turns(
        {name: Recorder(name) for name in "ab"},  # type: ignore[misc]
        prompts,
        3,
        on_done=lambda: done.append(None),
    )
    assert calls == list("abbaab") and len(done) == 6
    assert {name: len(runs) for name, runs in made.items()} == {"a": 3, "b": 3}


def test_another_process_tells_what_it_raised_and_that_it_died(prompts) -> None:
    with pytest.raises(MlxPagedError, match="engine mlx-paged: block_size must be 8"):
        turns.RemoteRunner(EngineName.MLX_PAGED, Settings(engine={"block_size": 9}))
    with turns.opened(BOTH, SMALL) as runners:
        assert {name: r.run(prompts).num_output_tokens for name, r in runners.items()} == {
            "mlx-paged": 23,
            "mlx-lm": 23,
        }
        remote = runners["mlx-lm"]
        assert isinstance(remote, turns.RemoteRunner)
        remote._process.kill()
        with pytest.raises(MlxPagedError, match="engine mlx-lm ended with status -9"):
            remote.run(prompts)


# --- the verbs ------------------------------------------------------------------------------------

VLLM_LATENCY = {"avg_latency", "std_latency", "latencies", "percentiles"}
VLLM_THROUGHPUT = {
    "elapsed_time", "num_requests", "total_num_tokens", "requests_per_second", "tokens_per_second",
}  # fmt: skip
LATENCIES = {
    f"{kind}_{name}_ms"
    for name in ("ttft", "tpot", "itl", "e2el")
    for kind in ("mean", "median", "std", "p50", "p90")
}
MEMORY = {
    "process_peak", "mlx_peak", "mlx_cache", "pool", "pool_used", "system_used", "system_total",
}  # fmt: skip


def run_verb(tmp_path, *arguments: str) -> tuple[str, dict[str, Any]]:
    file = tmp_path / "results.json"
    flags = ["--metric-percentiles", "50,90", "--output-json", str(file)]
    done = CliRunner().invoke(app, ["bench", *arguments, *flags])
    assert done.exit_code == 0, done.output + repr(done.exception)
    return done.stdout, json.loads(file.read_text())


def test_latency(tmp_path) -> None:
    output, saved = run_verb(
        tmp_path, "latency", "--input-len", "6", "--output-len", "5", "--batch-size", "3",
        "--num-iters", "4", "--num-iters-warmup", "1", "--n", "2",
    )  # fmt: skip
    assert saved.keys() >= VLLM_LATENCY | {"environment", "engine", "options", "engines"}
    latencies = saved["latencies"]
    assert len(latencies) == 4
    assert saved["avg_latency"] == pytest.approx(np.mean(latencies))
    assert saved["std_latency"] == pytest.approx(np.std(latencies))
    shares = [10, 25, 50, 75, 90, 99]
    assert saved["percentiles"] == pytest.approx(
        dict(zip(map(str, shares), np.percentile(latencies, shares)))
    )
    ours = saved["engines"]["mlx-paged"]
    assert ours.keys() >= VLLM_LATENCY | LATENCIES and ours["memory"].keys() == MEMORY
    assert ours["output_tokens_per_second"] * saved["avg_latency"] == pytest.approx(3 * 2 * 5)
    assert ours["tokens_per_second"] * saved["avg_latency"] == pytest.approx(3 * (6 + 2 * 5))
    assert saved["comparison"] == {}
    for line in ("Avg latency: ", "99% percentile latency: ", "Median TTFT (ms):", "P90 ITL (ms):",
                 "Process memory (peak)", "MLX peak memory", "MLX cache memory", "KV pool",
                 "System memory"):  # fmt: skip
        assert line in output


@pytest.mark.parametrize("verb", ["latency", "throughput"])
def test_engines_side_by_side(verb, tmp_path) -> None:
    size = ["--batch-size", "3"] if verb == "latency" else ["--num-prompts", "3"]
    output, saved = run_verb(
        tmp_path, verb, "--input-len", "9", "--output-len", "4", *size,
        "--num-iters", "2", "--num-iters-warmup", "0",
        "--engine", "mlx-lm", "--engine", "mlx-paged",
    )  # fmt: skip
    assert saved["engine"] == "mlx-lm" and list(saved["engines"]) == ["mlx-lm", "mlx-paged"]
    assert saved["engines"]["mlx-lm"]["memory"]["pool"] is None
    found = saved["comparison"]["mlx-paged"]
    assert len(found["ratios"]) == 2 and found["same_answers"] == found["num_answers"] == 3
    assert "x as fast as mlx-paged (median of 2 turns" in output
    assert "3 of 3 answers have the same tokens" in output
    key = "latencies" if verb == "latency" else "elapsed_times"
    theirs, ours = (saved["engines"][name][key] for name in ("mlx-lm", "mlx-paged"))
    assert found["ratios"] == pytest.approx([b / a for a, b in zip(theirs, ours)])


@pytest.mark.parametrize("engine", ["mlx-paged", "mlx-lm"])
def test_throughput(engine, tmp_path) -> None:
    output, saved = run_verb(
        tmp_path, "throughput", "--engine", engine, "--num-prompts", "6", "--num-iters", "3",
        "--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "40",
        "--prefix-repetition-suffix-len", "5", "--prefix-repetition-num-prefixes", "2",
        "--output-len", "3", "--disable-detokenize",
    )  # fmt: skip
    assert saved.keys() >= VLLM_THROUGHPUT | {"environment", "options"}
    assert saved["num_requests"] == 6
    assert saved["total_prompt_tokens"] == 6 * 45 and saved["total_output_tokens"] == 6 * 3
    assert saved["total_num_tokens"] == 6 * 48
    assert saved["elapsed_time"] == np.median(saved["elapsed_times"])
    assert saved["requests_per_second"] == pytest.approx(6 / saved["elapsed_time"])
    assert saved["tokens_per_second"] == pytest.approx(6 * 48 / saved["elapsed_time"])
    assert saved["engines"][engine].keys() >= VLLM_THROUGHPUT | LATENCIES
    # Prompts of a prefix wait for the first of them, and then share it.
    shared = saved["total_cached_tokens"]
    assert shared >= 4 * 32 if engine == "mlx-paged" else shared == 0
    assert saved["options"]["num_prefixes"] == 2 and not saved["options"]["detokenize"]
    assert "Throughput: " in output and "Total num output tokens:  18" in output


def test_a_missing_package_is_named(monkeypatch) -> None:
    for name in ("offline", "turns", "runners", "footprint"):
        monkeypatch.delitem(sys.modules, f"mlx_paged.cli.bench.{name}")
        monkeypatch.delattr(f"mlx_paged.cli.bench.{name}")
    monkeypatch.setitem(sys.modules, "psutil", None)
    done = CliRunner().invoke(app, ["bench", "latency"])
    assert isinstance(done.exception, MlxPagedError)
    assert re.search(r"\(psutil\): pip install 'mlx-paged\[bench\]'", str(done.exception))


def test_a_file_of_conversations(tmp_path) -> None:
    path = tmp_path / "conversations.json"
    turns = [{"value": "Write a function that adds two numbers"}, {"value": "def add(a, b): a"}]
    path.write_text(json.dumps([{"conversations": turns}] * 2))
    _, saved = run_verb(
        tmp_path, "throughput", "--dataset-name", "sharegpt", "--dataset-path", str(path),
        "--num-prompts", "2", "--num-iters-warmup", "0", "--output-len", "3",
    )  # fmt: skip
    assert saved["options"]["dataset_path"] == str(path)
    assert saved["total_output_tokens"] == 6
