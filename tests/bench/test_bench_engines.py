"""`bench latency`, `bench throughput`: both engines do the same work, and it is counted right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mlx_paged.bench import engines, figures
from mlx_paged.bench.datasets import Dataset, Prompt, Workload, random_prompts, tokenizer_of
from mlx_paged.bench.engines import Settings, open_runner
from mlx_paged.bench.figures import Answer, Run, latency_figures, percentile
from mlx_paged.cli.bench import offline
from mlx_paged.cli.bench.options import EngineName
from mlx_paged.errors import MlxPagedError, RequestTooLargeError

BOTH = list(EngineName)
SMALL = Settings(
    engine_options={"max_model_len": 256, "max_num_batched_tokens": 64}, max_num_seqs=4
)


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
    assert figures.rates(RUN) == {
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
    made = figures.token_latencies([RUN, RUN], [50])
    assert made["mean_ttft_ms"] == pytest.approx(750)
    assert made["mean_tpot_ms"] == pytest.approx(1000 * np.mean([1.0, 3.0, 2.5 / 3]))
    assert made["mean_itl_ms"] == pytest.approx(1000 * np.mean([0.5, 1.5, 3.0, 0.5, 0.5, 1.5]))
    assert made["p50_e2el_ms"] == pytest.approx(1000 * np.percentile([2.5, 0.5, 4.0, 3.5], 50))


def test_the_median_run_and_the_comparison_of_turns() -> None:
    ours = [replace(RUN, seconds=s) for s in (2.0, 1.0, 4.0)]
    other = [*RUN.answers[:3], Answer([7, 8, 9, 1], RUN.answers[3].times)]
    theirs = [replace(RUN, seconds=s, answers=other) for s in (3.0, 4.0, 4.0)]
    assert figures.median_run(ours).seconds == 2.0
    assert figures.median_run(ours[:2]).seconds == 2.0
    assert figures.compare(ours, theirs) == {
        "ratios": [1.5, 4.0, 1.0],
        "speedup": 1.5,
        "same_answers": 3,
        "num_answers": 4,
    }


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([2.0], "a is 2.00x as fast as b; 3 of 4"),
        ([1.5, 3.0], "a is 2.25x as fast as b (median of 2 turns, 1.50 to 3.00); 3 of 4"),
        ([0.8, 1.2], "1.20), but turns disagree on which is faster; 3 of 4"),
    ],
)
def test_the_verdict_tells_how_sure_it_is(ratios, expected) -> None:
    found = {"ratios": ratios, "speedup": sum(ratios) / len(ratios)}
    said = offline._verdict("a", "b", {**found, "same_answers": 3, "num_answers": 4})
    assert expected in said


def test_the_peak_of_this_process_is_seen() -> None:
    before = engines.peak_resident_bytes()
    held = np.ones(before + (64 << 20), dtype=np.uint8)  # more than it ever had
    assert engines.peak_resident_bytes() >= before + (64 << 20)
    del held
    seen = engines.measure_footprint()
    assert 0 < seen.system_used < seen.system_total
    assert seen.process_peak >= before + (64 << 20) and seen.pool is None


def test_the_pool_has_room_for_the_work_and_no_more(prompts) -> None:
    sized = offline.sized(
        Settings(engine_options={"max_model_len": None, "block_size": 16}), prompts
    )
    assert sized.engine_options == {"max_model_len": 94, "block_size": 16}
    assert sized.max_num_seqs == len(prompts)
    assert offline.sized(Settings(num_answers=3), prompts).max_num_seqs == 3 * len(prompts)
    assert offline.sized(SMALL, prompts).engine_options["max_model_len"] == 256
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
    assert runner.run(prompts).num_cached_tokens == 2 * 69  # all but the last token


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
    made = engines.take_turns(
        {name: Recorder(name) for name in "ab"},  # type: ignore[misc]
        prompts,
        3,
        on_done=lambda: done.append(None),
    )
    assert calls == list("abbaab") and len(done) == 6
    assert {name: len(runs) for name, runs in made.items()} == {"a": 3, "b": 3}


def test_another_process_tells_what_it_raised_and_that_it_died(prompts) -> None:
    with pytest.raises(MlxPagedError, match="engine mlx-paged: block_size must be 8"):
        engines.RemoteRunner(EngineName.MLX_PAGED, Settings(engine_options={"block_size": 9}))
    with engines.opened(BOTH, SMALL) as runners:
        assert {name: r.run(prompts).num_output_tokens for name, r in runners.items()} == {
            "mlx-paged": 23,
            "mlx-lm": 23,
        }
        remote = runners["mlx-lm"]
        assert isinstance(remote, engines.RemoteRunner)
        remote._remote._process.kill()
        with pytest.raises(MlxPagedError, match="engine mlx-lm ended with status -9"):
            remote.run(prompts)
