"""Several ranks on one machine, over MLX's ring on loopback: same tokens as one, and one end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.adapters import random_layers, write_mlx, write_peft
from support.eagle3 import make_eagle3
from support.interpreters import python_path
from support.models import embedded, save_tiny, tiny_config, tiny_model
from support.ports import free_ports
from support.rank_driver import answers
from support.waiting import TIMEOUT

from mlx_paged import LLM
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.ranks import launch
from mlx_paged.engine.ranks.channel import Channel
from mlx_paged.engine.ranks.life import Follower
from mlx_paged.engine.ranks.start import make_engine
from mlx_paged.errors import EngineDeadError, InvalidParameterError

TESTS = Path(__file__).parents[1]
# Requests for four ranks, which wait for each other actively, and are more than CI has cores.
FEW = 4
# For events that come within ten seconds, unless other tests take the cores.
OPTIONS: dict[str, Any] = {
    "num_gpu_blocks_override": 24,
    "block_size": 8,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 6,
    "enable_lora": True,  # one slot for two adapters
}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
QUANTIZED = {
    **OPTIONS,
    "kv_cache_dtype": "int8",
    "speculative_config": {"method": "suffix", "adaptive": False},
}


class Driver:
    """Rank 0 in a process, see `support.rank_driver`."""

    def __init__(
        self,
        model: Path,
        options: dict[str, Any],
        num_requests: int | None = None,
        **environment: str,
    ) -> None:
        given = {"model": str(model), "adapters": adapters_of(model), "options": options}
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(TESTS / "support" / "rank_driver.py"),
                json.dumps({**given, "requests": num_requests}),
            ],
            env={
                **os.environ,
                "MLX_PAGED_NUM_THREADS": "1",
                **environment,
                "PYTHONPATH": python_path(TESTS, TESTS.parent),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pids: list[int] = []
        self.answers: dict[str, Any] = {}

    def start(self) -> Driver:
        """Waits for the answers of the workload."""
        self.pids = self._result("PIDS")
        self.answers = self._result("ANSWERS")
        return self

    def _result(self, name: str) -> Any:
        for line in self._lines():
            if line.startswith(name):
                return json.loads(line.removeprefix(name))
        raise AssertionError(self.errors())

    def _lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        return iter(self.process.stdout.readline, "")

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def generate(self) -> None:
        """Waits until it generates without an end."""
        self.say("generate")
        assert next(line for line in self._lines() if line.strip() == "RUNS")

    def errors(self) -> str:
        return self.process.communicate(timeout=TIMEOUT)[1]


def wait_for_end(pids: list[int]) -> None:
    """Waits until processes are gone that are no children of this one."""
    deadline = time.monotonic() + TIMEOUT
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"{alive} are left"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    # A process without a parent that waits for it stays as a zombie in some containers.
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("ranks") / "model")


@pytest.fixture(scope="module")
def one_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("ranks") / "model", num_key_value_heads=1)


def saved(path: Path, **fields: Any) -> Path:
    vocab_size = embedded().config["vocab_size"]
    config = tiny_config("llama", vocab_size=vocab_size, **{"num_hidden_layers": 2, **fields})
    save_tiny(path, config)
    whole = tiny_model(config)
    write_mlx(path.parent / "first", random_layers(whole, 1, names=LINEAR), scale=0.5)
    write_peft(path.parent / "second", random_layers(whole, 2, rank=7))
    make_eagle3(path.parent / "head", has_output=False, vocab_size=vocab_size)
    return path


def with_head(model: Path) -> dict[str, Any]:
    """Options with a draft head, for steps with so long prompts that last layers may be pruned."""
    path = str(model.parent / "head")
    head = {"method": "eagle3", "model": path, "num_speculative_tokens": 2, "adaptive": False}
    return {**OPTIONS, "max_num_batched_tokens": 160, "speculative_config": head}


def adapters_of(model: Path) -> list[str]:
    return [str(model.parent / name) for name in ("first", "second")]


@pytest.fixture(scope="module")
def two(model: Path) -> Iterator[Driver]:
    """An engine of two ranks."""
    with started(model, {**with_head(model), "tensor_parallel_size": 2}) as driver:
        yield driver


@pytest.fixture(scope="module")
def other(one_head: Path) -> Iterator[Driver]:
    """Another one, whose ranks outnumber the KV heads, in processes like those of `mlx.launch`."""
    options = {**QUANTIZED, "tensor_parallel_size": 2}
    hosts = one_head.parent / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
    follower = Driver(one_head, options, MLX_RANK="1", MLX_HOSTFILE=str(hosts))
    try:
        with started(one_head, options, MLX_RANK="0", MLX_HOSTFILE=str(hosts)) as driver:
            assert driver.pids == [], "it started no other"
            driver.pids = [follower.process.pid]
            yield driver
    finally:
        follower.process.kill()
        follower.process.communicate()


@pytest.fixture(scope="module")
def three_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("ranks") / "model", num_hidden_layers=3)


@pytest.fixture(scope="module")
def stages(three_layers: Path) -> Iterator[Driver]:
    """An engine whose ranks have two layers and one."""
    with started(three_layers, {**OPTIONS, "pipeline_parallel_size": 2}) as driver:
        yield driver


@contextlib.contextmanager
def started(model: Path, options: dict[str, Any], *given: Any, **more: Any) -> Iterator[Driver]:
    driver = Driver(model, options, *given, **more)
    try:
        yield driver.start()
    finally:
        driver.process.kill()
        driver.process.wait()


def alone(model: Path, options: dict[str, Any], *given: Any) -> dict[str, Any]:
    """The answers of one rank."""
    found = answers(make_engine(model, EngineConfig(**options)), adapters_of(model), *given)
    assert json.loads(json.dumps(found)) == found
    return found


def test_two_ranks_give_the_tokens_of_one(model: Path, two: Driver) -> None:
    """Greedy and sampled, with shared prefixes, preemption, an abort, a grammar, reports, adapters
    that take each other's slot, a draft head, and an exception that every rank recovers from.

    In float32 with random weights no two tokens are so close that the order of a sum decides.
    """
    wanted, found = alone(model, with_head(model)), two.answers
    check_answers(wanted, found)
    assert found["drafts"] == wanted["drafts"] > 0
    assert found["num_kv_heads"] * 2 == wanted["num_kv_heads"]


def test_layers_on_two_ranks_give_the_tokens_of_one(three_layers: Path, stages: Driver) -> None:
    """The same workload, in a pipeline."""
    wanted, found = alone(three_layers, OPTIONS), stages.answers
    check_answers(wanted, found)
    assert (found["num_pools"], wanted["num_pools"]) == (4, 6)


def check_answers(wanted: dict[str, Any], found: dict[str, Any]) -> None:
    assert wanted["preemptions"] > 0 and wanted["hits"] > 0 and wanted["recoveries"] == 1
    assert wanted["adapter_evictions"] > 0
    for name in ("tokens", "finish_reasons", "preemptions", "hits", "recoveries"):
        assert found[name] == wanted[name], name
    assert found["logprobs"] == pytest.approx(wanted["logprobs"], abs=1e-4)
    assert found["foreign"] == {}, "steps are whole programs, their collectives included"


def test_drafts_and_quantized_keys_on_more_ranks_than_kv_heads(
    one_head: Path, other: Driver
) -> None:
    """One KV head on both ranks, with drafts, and with keys and values in 8 bits."""
    check_quantized(one_head, other.answers)
    assert other.answers["accepted"] > 0


@pytest.mark.parametrize("num_stages", [pytest.param(1, marks=pytest.mark.long), 2])
def test_four_ranks(num_stages: int, three_layers: Path) -> None:
    """Two KV heads on four ranks that share all layers, or on two that share each stage. None
    outlives a killed rank 0."""
    sizes = {"tensor_parallel_size": 4 // num_stages, "pipeline_parallel_size": num_stages}
    with started(three_layers, {**QUANTIZED, **sizes}, FEW) as driver:
        check_quantized(three_layers, driver.answers, FEW)
        assert driver.answers["num_pools"] == (6 if num_stages == 1 else 4)
        assert len(driver.pids) == 3 and all(map(is_alive, driver.pids))
        driver.process.kill()
        wait_for_end(driver.pids)


def check_quantized(model: Path, found: dict[str, Any], *given: Any) -> None:
    wanted = alone(model, QUANTIZED, *given)
    assert wanted["recoveries"] == 1
    for name in ("tokens", "finish_reasons", "recoveries", "accepted"):
        assert found[name] == wanted[name], name
    assert found["num_kv_heads"] == 1
    assert found["foreign"] == {}


@pytest.mark.parametrize("kind", ["two", "stages"])
def test_a_killed_rank_ends_all_with_the_reason(kind: str, request: pytest.FixtureRequest) -> None:
    driver: Driver = request.getfixturevalue(kind)
    driver.generate()
    os.kill(driver.pids[0], signal.SIGKILL)
    assert driver.process.wait(TIMEOUT) != 0
    assert "rank 1 of 2 was ended by SIGKILL" in driver.errors()
    wait_for_end(driver.pids)


def test_no_rank_outlives_a_killed_rank_0(other: Driver) -> None:
    other.generate()
    assert all(map(is_alive, other.pids))
    other.process.kill()
    wait_for_end(other.pids)


@pytest.mark.parametrize(
    ("sizes", "pooling_type"),
    [
        pytest.param({"tensor_parallel_size": 2}, "MEAN", marks=pytest.mark.one_in(2)),
        ({"pipeline_parallel_size": 2}, "LAST"),
    ],
)
def test_embeddings_are_those_of_one_rank(
    sizes: dict[str, int], pooling_type: str, model: Path
) -> None:
    """With chunked prefill, where a step may pool nothing, and with cached prefixes."""
    stem = list(range(10, 50))
    prompts: list[list[int]] = [[5], [*stem, 1], [*stem, 2, 3], list(range(100, 170))]
    found = []
    for more in ({}, sizes):
        pooler = {"pooling_type": pooling_type}
        options = {"max_num_batched_tokens": 24, "block_size": 8, "num_gpu_blocks_override": 40}
        llm = LLM(model, runner="pooling", pooler_config=pooler, **options, **more)
        found.append([output.outputs.embedding for output in llm.embed(prompts)])
        del llm  # The next one may have ranks, too.
    for one, several in zip(*found, strict=True):
        assert several == pytest.approx(one, abs=1e-5)


def test_a_rank_that_is_killed_when_it_connects(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait inside MLX by then. Rank 0 raises, and may start ranks again."""
    monkeypatch.setattr(launch, "_PROCESS", "support.dying_rank")
    others: list[Follower] = []

    def started(*given: Any) -> Follower:
        others.append(Follower(*given))
        return others[-1]

    monkeypatch.setattr(launch, "Follower", started)
    config = EngineConfig(tensor_parallel_size=3)
    with pytest.raises(EngineDeadError, match="rank 1 of 3 was ended by SIGKILL"):
        make_engine(model, config)
    # It did not wait for MLX, which tries to connect for half a minute.
    assert "mlx-paged-join" in {thread.name for thread in threading.enumerate()}
    ended = [other.process.poll() for other in others if other.process is not None]
    assert ended[0] == -signal.SIGKILL and len(ended) == 2 and None not in ended
    assert "MLX_RANK" not in os.environ


@pytest.mark.parametrize("stage", ["import", "load"])
def test_rank_0_sleeps_while_another_rank_starts(
    stage: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective would wait for it in a loop, on a core that it may need."""
    monkeypatch.setattr(launch, "_PROCESS", "support.late_rank")
    monkeypatch.setenv("LATE_RANK_STOPS_AT", stage)
    processes: list[subprocess.Popen[bytes]] = []

    def started(*given: Any) -> Follower:
        follower = Follower(*given)
        assert follower.process is not None
        processes.append(follower.process)
        return follower

    monkeypatch.setattr(launch, "Follower", started)
    config = EngineConfig(**OPTIONS, tensor_parallel_size=2)
    with ThreadPoolExecutor(1) as pool:
        engine = pool.submit(make_engine, model, config)
        deadline, has_stopped = time.monotonic() + TIMEOUT, False
        while not (has_stopped and is_receiving()):
            has_stopped = has_stopped or any(map(is_stopped, processes))
            assert time.monotonic() < deadline and not engine.done(), "rank 0 does not sleep"
            time.sleep(0.02)
        processes[0].send_signal(signal.SIGCONT)
        assert engine.result(TIMEOUT).stats().num_running == 0


def is_stopped(process: subprocess.Popen[bytes]) -> bool:
    done, status = os.waitpid(process.pid, os.WNOHANG | os.WUNTRACED)
    return done != 0 and os.WIFSTOPPED(status)


def is_receiving() -> bool:
    """True if a thread of this process waits for another rank's message."""
    frames = sys._current_frames().values()
    return any(frame.f_code is Channel._read.__code__ for frame in frames)


# --- Refusals -------------------------------------------------------------------------------------


def test_what_does_not_run_on_several_ranks_is_refused_by_name() -> None:
    for name, value in (("kv_offloading_size", 1.0), ("kv_offload_dir", "blocks")):
        with pytest.raises(InvalidParameterError) as caught:
            EngineConfig(tensor_parallel_size=2, **{name: value})
        assert caught.value.field == name
        assert str(caught.value).startswith(
            f"{name} must be None where tensor_parallel_size is above 1"
        )
        EngineConfig(**{name: value})
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        with pytest.raises(InvalidParameterError, match=f"^{name} must be"):
            EngineConfig(**{name: 0})
    product = re.escape("tensor_parallel_size * pipeline_parallel_size must be at most 1024")
    with pytest.raises(InvalidParameterError, match=product):
        EngineConfig(tensor_parallel_size=64, pipeline_parallel_size=32)
    expected = "a method other than eagle3, mtp, dflash where pipeline_parallel_size is above 1"
    with pytest.raises(InvalidParameterError, match=expected):
        EngineConfig(pipeline_parallel_size=2, speculative_config={"method": "mtp"})


def test_a_loaded_model_cannot_be_divided() -> None:
    with pytest.raises(InvalidParameterError, match="1 for a model that is already loaded"):
        LLM(embedded(), tensor_parallel_size=2)
