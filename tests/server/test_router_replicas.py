"""Replicas of a model: cached prefixes, placement, restarts, metrics. Its processes do nothing."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support.event_loops import turns_during

from mlx_paged.cli.serve import replicas as options_of_replicas
from mlx_paged.cli.serve.model_options import ModelOptions
from mlx_paged.cli.serve.replicas import environments_of, with_shares
from mlx_paged.errors import InvalidParameterError
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.errors import ApiError
from mlx_paged.server.router import replicas, routing
from mlx_paged.server.router.endpoints import _merged
from mlx_paged.server.router.metrics import ReplicaMetrics, merged, parsed
from mlx_paged.server.router.prefixes import Prefix, PrefixIndex, prefix_of
from mlx_paged.server.router.process import LoadedModel, ModelProcess, ProcessFailedError
from mlx_paged.server.router.replicas import ReplicaSet
from mlx_paged.server.router.routing import (
    OVERLOAD_FACTOR,
    OVERLOAD_REQUESTS,
    Placement,
    Reason,
    Replica,
    RoutedRequest,
)
from mlx_paged.server.router.service import RouterService
from mlx_paged.server.router.spec import ModelSpec

# Prefixes.


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    roles = itertools.cycle(("user", "assistant"))
    return {**fields, "messages": [{"role": r, "content": t} for r, t in zip(roles, texts)]}


def test_a_conversation_goes_on_where_it_was() -> None:
    index = PrefixIndex()
    turns = ["a question " * 40, "an answer " * 40, "another question " * 40]
    index.add(prefix_of(chat(turns[0])))
    longer = prefix_of(chat(*turns))
    # All but the last, unfinished chunk of the first turn.
    assert longer.share(index.match(longer)) == pytest.approx(1 / 3, abs=0.1)
    for other in (
        chat("b" + turns[0]),
        chat(turns[0], model="an adapter"),
        chat(turns[0], cache_salt="mine"),
        chat(turns[0], tools=[{"name": "f"}]),
        {"prompt": turns[0]},
        {},
    ):
        assert index.match(prefix_of(other)) == 0, other
    index.clear()
    assert index.match(longer) == 0


def test_the_order_of_fields_does_not_matter() -> None:
    body = chat("hello " * 100, system="be brief", temperature=0.5)
    index = PrefixIndex()
    index.add(prefix_of(body))
    turned = prefix_of({**dict(reversed(body.items())), "temperature": 0.7, "max_tokens": 3})
    assert index.match(turned) == len(turned.digests) > 5


def test_a_long_text_has_few_chunks() -> None:
    long = prefix_of({"prompt": "x" * 10_000_000})
    assert len(long.digests) < 600 and long.share(len(long.digests)) > 0.98


@given(st.lists(st.text("ab", max_size=400), min_size=2, max_size=5), st.integers(64, 200))
def test_matches_are_common_beginnings(texts: list[str], length: int) -> None:
    """Against the texts themselves, compared byte by byte."""
    *added, asked = ("a" * length + text for text in texts)
    index = PrefixIndex()
    for text in added:
        index.add(prefix_of({"prompt": text}))
    prefix = prefix_of({"prompt": asked})
    common = 0
    for text in added:
        equal = sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], zip(text, asked)))
        if text == asked:
            equal += 1  # the quotation mark
        common = max(common, len('prompt"') + equal)
    expected = sum(end <= common for end in prefix.ends)
    assert index.match(prefix) == expected


def test_the_ends_of_old_prefixes_are_dropped_first() -> None:
    index = PrefixIndex(capacity=10)
    old, new = (prefix_of({"prompt": letter * 64 * 8}) for letter in "ab")
    index.add(old)
    index.add(new)
    assert index.match(new) == 8 and index.match(old) == 2 and len(index) == 10


# Placement.


def asked(session: str | None = None, **body: Any) -> RoutedRequest:
    headers = {} if session is None else {"x-session-id": session}
    return RoutedRequest(headers, json.dumps(body).encode())


def running(*loads: int) -> list[Replica]:
    return [Replica(Path(), number, load) for number, load in enumerate(loads)]


def test_new_texts_spread_by_load_and_then_by_what_is_cached() -> None:
    placement, two = Placement(), running(0, 0)
    chosen = [placement.choose(two, asked(prompt=f"{i} " * 200)).number for i in range(6)]
    assert sorted(chosen) == [0, 0, 0, 1, 1, 1]
    assert placement.choose(running(3, 1, 2), asked(prompt="x" * 500)).number == 1
    assert placement.counts == {Reason.LOAD: 7}


def test_the_cache_wins_until_its_replica_is_overloaded() -> None:
    for least in (0, 10):
        bound = int(OVERLOAD_FACTOR * least) + OVERLOAD_REQUESTS
        for load, expected in ((bound, 1), (bound + 1, 0)):
            placement, two = Placement(), running(least, load)
            request = asked(prompt="x" * 500)
            two[1].prefixes.add(request.prefix)
            assert placement.choose(two, request).number == expected, (least, load)
            reason = Reason.PREFIX if expected else Reason.LOAD
            assert placement.counts == {reason: 1}


def test_the_longest_prefix_wins_and_equal_ones_share_the_load() -> None:
    placement, three = Placement(), running(0, 2, 1)
    three[0].prefixes.add(asked(prompt="x" * 500).prefix)
    for number in (1, 2):
        three[number].prefixes.add(asked(prompt="x" * 700).prefix)
    assert placement.choose(three, asked(prompt="x" * 1000)).number == 2


def test_a_small_common_beginning_does_not_decide() -> None:
    placement, two = Placement(), running(0, 0)
    first, second = (asked(prompt="the same " * 20 + letter * 1000) for letter in "ab")
    assert {placement.choose(two, request).number for request in (first, second)} == {0, 1}


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({"x-session-id": "s"}, {"prompt_cache_key": "k"}, "s"),
        ({}, {"prompt_cache_key": "k", "user": "u"}, "k"),
        ({}, {"user": "u"}, "u"),
        ({}, {"metadata": {"user_id": "m"}}, "m"),
        ({}, {"user": 5, "metadata": []}, None),
        ({}, [], None),
    ],
)
def test_sessions_have_names(headers: Any, body: Any, expected: str | None) -> None:
    assert RoutedRequest(headers, json.dumps(body).encode()).session == expected


def test_a_session_stays_on_its_replica() -> None:
    placement, two = Placement(), running(0, 0)
    first = placement.choose(two, asked("mine", prompt="a" * 500))
    other = two[1 - first.number]
    request = asked("mine", prompt="b" * 500)
    other.prefixes.add(request.prefix)
    assert placement.choose(two, request) is first
    first.num_requests = OVERLOAD_REQUESTS + 1
    assert placement.choose(two, request) is other
    first.num_requests = 0
    assert placement.choose(two, request) is other  # It has moved.
    assert placement.counts == {Reason.LOAD: 1, Reason.SESSION: 2, Reason.PREFIX: 1}


def test_stored_state_binds_even_to_an_overloaded_replica() -> None:
    two = running(0, 100)
    assert Placement().choose(two, asked(input="x"), owner=two[1]) is two[1]


def test_a_body_that_is_no_json_is_placed_by_load() -> None:
    assert Placement().choose(running(1, 0), RoutedRequest({}, b"{")).number == 1


# Restarts.


class Process:
    """A process that the test lets load and end."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.replicas = (Replica(Path(f"/nowhere/{number}")),)
        self.report: asyncio.Future[LoadedModel] = asyncio.get_running_loop().create_future()
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.stops: list[float] = []

    async def loaded(self) -> LoadedModel:
        return await asyncio.shield(self.report)

    async def ended(self) -> str:
        return await asyncio.shield(self.end)

    async def stop(self, drain_timeout: float) -> None:
        self.stops.append(drain_timeout)
        if not self.end.done():
            self.end.set_result("SIGTERM")

    def load(self) -> None:
        self.report.set_result(LoadedModel(1000 + self.number))


class Set(ReplicaSet):
    """A set whose processes are at hand."""

    def __init__(self, size: int = 2, **fields: Any) -> None:
        self.processes: list[Process] = []

        async def start(number: int) -> Any:
            await asyncio.sleep(0)
            self.processes.append(Process(number))
            return self.processes[-1]

        super().__init__(ModelSpec("m", None, environments=({},) * size, **fields), start)

    async def run(self) -> LoadedModel:
        await settled()
        for process in self.processes:
            process.load()
        return await self.loaded()

    @property
    def numbers(self) -> list[int]:
        return [replica.number for replica in self.replicas]


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times between an end and a start, which pass at once."""
    found: list[float] = []
    sleep = asyncio.sleep

    async def pass_at_once(seconds: float) -> None:
        if seconds:
            found.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", pass_at_once)
    return found


def test_a_set_is_loaded_when_all_replicas_are() -> None:
    async def run() -> None:
        made = Set(2)
        await settled()
        made.processes[0].load()
        loading = asyncio.ensure_future(made.loaded())
        await settled()
        assert not loading.done() and made.numbers == [0]
        made.processes[1].load()
        assert (await loading).memory == 2001  # They share one memory.
        await made.stop(3.0)
        assert [process.stops for process in made.processes] == [[3.0], [3.0]]
        assert await made.ended() == "it was stopped"
        apart = Set(2, has_own_devices=True)
        assert (await apart.run()).memory == 1001
        await apart.stop(0)

    asyncio.run(run())


def test_a_replica_that_cannot_be_loaded_in_the_beginning_fails_the_set() -> None:
    async def run() -> None:
        made = Set(3)
        await settled()
        for process in made.processes[1:]:
            process.report.set_exception(ProcessFailedError("no memory"))
        with pytest.raises(ProcessFailedError, match=r"replica 1: .*no memory"):
            await made.loaded()
        await made.stop(0)
        assert len(made.processes) == 3 and made.processes[0].stops

    asyncio.run(run())


def test_a_dead_replica_comes_back_without_its_prefixes(delays: list[float]) -> None:
    async def run() -> None:
        made = Set(2)
        await made.run()
        request = asked(prompt="x" * 500)
        first = await made.choose(request)
        assert await made.choose(request) is first
        dead = made.processes[first.number]
        dead.end.set_result("SIGKILL")
        await settled()
        other = await made.choose(request)
        assert other.number == 1 - first.number and dead.stops == [0.0]
        again = made.processes[2]
        assert again.number == first.number and made.numbers == [other.number]
        again.load()
        await settled()
        assert made.numbers == [0, 1] and delays == [1.0]
        assert made.replicas[first.number] is not first
        assert await made.choose(request) is other  # The new one has nothing cached.
        await made.stop(0)

    asyncio.run(run())


def test_the_delay_doubles_until_a_replica_has_run_for_long(
    delays: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        made = Set(1)
        await made.run()
        for failure in range(8):
            process = made.processes[-1]
            if failure % 2:
                process.report.set_exception(ProcessFailedError("no memory"))
            elif failure:
                process.load()
                await settled()
            process.end.set_result("SIGKILL")
            await settled()
            assert len(made.processes) == failure + 2
        assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
        monkeypatch.setattr(replicas, "_STABLE", 0.0)
        made.processes[-1].load()
        made.processes[-1].end.set_result("SIGKILL")
        await settled()
        assert delays[8:] == [1.0]
        await made.stop(0)

    asyncio.run(run())


def test_without_a_running_replica_requests_may_be_sent_again() -> None:
    async def run() -> None:
        made = Set(2)
        await made.run()
        for process in made.processes[:2]:
            process.end.set_result("SIGKILL")
        await settled()
        with pytest.raises(ApiError, match=r"no replica of the model 'm' runs now .*SIGKILL") as no:
            await made.choose(asked())
        assert (no.value.status, no.value.code) == (503, "model_failed")
        assert int(no.value.headers["Retry-After"]) >= 1
        await made.stop(0)  # It ends those that are loading, too.
        assert all(process.stops for process in made.processes)

    asyncio.run(run())


def test_a_server_of_one_model_ends_if_that_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(*_: Any) -> Any:
        raise ProcessFailedError("no memory")

    async def run() -> None:
        spec = ModelSpec("m", None, preload=True, environments=({}, {}))
        service = RouterService([spec], ServerConfig(), "", entry="", budget=1 << 40)
        assert await service.watch("") == 1
        await service.finish(0)

    monkeypatch.setattr(ModelProcess, "start", fail)
    asyncio.run(run())


@pytest.mark.parametrize("length", [1000, 1 << 20])
def test_a_long_body_is_parsed_on_a_thread(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def recorded(body: dict[str, Any]) -> Prefix:
        threads.append(threading.current_thread())
        return prefix_of(body)

    async def run() -> None:
        made = Set(2)
        await made.run()
        await made.choose(asked(prompt="x" * length))
        await made.stop(0)

    monkeypatch.setattr(routing, "prefix_of", recorded)
    asyncio.run(run())
    [parsing] = threads
    assert (parsing is threading.current_thread()) == (length < 10_000)


class Child:
    """A child process that ends at a signal, and whose pipe stays open."""

    pid = 0

    def __init__(self) -> None:
        self.reports = asyncio.StreamReader()
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        await self._ended.wait()
        return 0

    def send_signal(self, _: int) -> None:
        self._ended.set()


def test_a_process_that_was_stopped_runs_nothing_in_the_background() -> None:
    counts: list[int] = []

    async def run() -> None:
        child = Child()
        made = ModelProcess(
            child,  # type: ignore[arg-type]
            child.reports,
            Path("/nowhere/socket"),
            lambda account, num_tokens: None,
            lambda replica, count: counts.append(count),
        )
        child.reports.feed_data(b'{"memory": 1}\n{"background": 2}\n')
        await settled()
        await made.stop(0)
        await settled()

    asyncio.run(run())
    assert counts == [2, 0]


def test_statistics_of_replicas_are_merged() -> None:
    one = {"steps": 3, "share": 0.5, "on": True, "name": "x", "each": [1, {"n": 2}], "no": None}
    other = {**one, "steps": 4, "no": {"n": 1}, "reason": 5}
    assert _merged([one, other]) == {
        "steps": 7, "share": 1.0, "on": True, "name": "x", "each": [2, {"n": 4}], "no": {"n": 1},
        "reason": 5,
    }  # fmt: skip
    # Levels, limits, and a step's operations are not added, and no name is lost.
    assert _merged(
        [
            {"pressure": {"level": level, "seconds": 3.0, "num_bytes": 8},
             "compilation": {"foreign": {"Sort": 2}},
             "lora": {"max_loras": 4, "running": running}}
            for level, running in ((0, ["a"]), (2, ["b", "a"]), (1, []))
        ]
    ) == {
        "pressure": {"level": 2, "seconds": 3.0, "num_bytes": 24},
        "compilation": {"foreign": {"Sort": 2}},
        "lora": {"max_loras": 4, "running": ["a", "b"]},
    }  # fmt: skip


# Metrics.


def text(count: float, gauge: float, seconds: Iterable[float]) -> str:
    """The metrics of one process."""
    registry = CollectorRegistry()
    counter = Counter("vllm:tokens", "Tokens.", ["engine"], registry=registry).labels("0")
    counter.inc(count)
    Gauge("vllm:num_requests_running", "", registry=registry).set(gauge)
    Gauge("vllm:kv_cache_usage_perc", "", registry=registry).set(gauge / 10)
    Gauge("mlx_paged:memory_pressure", "", registry=registry).set(gauge)
    histogram = Histogram("vllm:e2e", "", buckets=(1, 2), registry=registry)
    for each in seconds:
        histogram.observe(each)
    return generate_latest(registry).decode()


def values_of(metrics: ReplicaMetrics) -> dict[str, float]:
    lines = asyncio.run(merged("", [("m", metrics.families())])).decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    found = {name: float(value) for name, value in pairs}
    assert len(found) == len(pairs), "a sample is there twice"
    return found


def test_metrics_are_sums_which_never_fall() -> None:
    metrics, first, second, third = ReplicaMetrics(), object(), object(), object()
    metrics.update(first, text(5, 3, [0.5, 1.5]))
    metrics.update(second, text(7, 1, [3.0]))
    found = values_of(metrics)
    label = '{model_name="m"}'
    assert found['vllm:tokens_total{engine="0",model_name="m"}'] == 12
    assert found[f"vllm:num_requests_running{label}"] == 4
    assert found[f"vllm:kv_cache_usage_perc{label}"] == pytest.approx(0.2)
    assert found[f"mlx_paged:memory_pressure{label}"] == 3
    assert found['vllm:e2e_bucket{le="1.0",model_name="m"}'] == 1
    assert found['vllm:e2e_bucket{le="+Inf",model_name="m"}'] == 3
    assert found[f"vllm:e2e_sum{label}"] == 5
    metrics.end(first)
    metrics.update(third, text(1, 2, []))
    metrics.end(third)
    metrics.update(second, text(8, 1, [3.0]))
    found = values_of(metrics)
    assert found['vllm:tokens_total{engine="0",model_name="m"}'] == 5 + 8 + 1
    assert found[f"vllm:num_requests_running{label}"] == 1
    assert found[f"vllm:e2e_count{label}"] == 3


@given(st.text(), st.text(), st.floats(allow_nan=False))
def test_merged_metrics_differ_only_in_the_label(label: str, model: str, value: float) -> None:
    """Any text may be in a label, also what looks like one: an adapter's name is the client's."""
    registry = CollectorRegistry()
    gauge = Gauge(
        "vllm:lora_requests_info", "Of \\ and \n.", ["a", "my_model_name"], registry=registry
    )
    for each in (label, f'"{label}', f',model_name="{label}"', f"{label},model_name="):
        gauge.labels(each, label).set(value)
    Gauge("vllm:load", "", ["model_name"], registry=registry).labels(label).set(value)
    Counter("vllm:steps", "", registry=registry).inc(3)
    one = generate_latest(registry).decode()
    own = "vllm:load 3.0"
    both = asyncio.run(
        merged(f"# HELP vllm:load \n# TYPE vllm:load gauge\n{own}\n", [(model, parsed(one))])
    )
    found = both.decode()
    assert f"\n{own}\n" in found
    expected, actual = (
        {
            (s.name, tuple(sorted((s.labels | {"model_name": model}).items()))): s.value
            for family in text_string_to_metric_families(text)
            for s in family.samples
        }
        for text in (one, found.replace(f"\n{own}", ""))
    )
    assert actual == expected
    documented = [
        [f.documentation for f in text_string_to_metric_families(t)] for t in (one, found)
    ]
    assert sorted(documented[0]) == sorted(documented[1])


def test_streams_go_on_between_the_metrics_of_two_models() -> None:
    """Eight models took the event loop for 90 ms at once."""
    families = ((str(number), parsed(text(1, 1, []))) for number in range(8))
    num_turns, _ = turns_during(lambda: merged("", families))
    assert num_turns >= 8


# Devices.


class Machine:
    """Stands for the platform."""

    def __init__(self, *, on_cpu: bool = False, has_cuda: bool = False) -> None:
        self.on_cpu, self.has_cuda = on_cpu, has_cuda


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_machine(gpus: str = "", **fields: bool) -> None:
        found = Machine(**fields)
        monkeypatch.setattr(options_of_replicas.Platform, "current", lambda: found)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        monkeypatch.delenv("MLX_PAGED_NUM_THREADS", raising=False)
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
        monkeypatch.setattr("os.cpu_count", lambda: 8)

    return set_machine


def test_each_replica_gets_its_devices(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(on_cpu=True)
    three = ModelOptions(data_parallel_size=3, gpu_memory_utilization=0.6)
    assert environments_of(three) == ({"MLX_PAGED_NUM_THREADS": "2"},) * 3
    assert with_shares(three, has_own_devices=False).gpu_memory_utilization == pytest.approx(0.2)
    assert with_shares(three, has_own_devices=True) is three
    ranks = ModelOptions(data_parallel_size=2, tensor_parallel_size=2)
    assert environments_of(ranks) == ({"MLX_PAGED_NUM_THREADS": "2"},) * 2
    monkeypatch.setenv("MLX_PAGED_NUM_THREADS", "5")
    assert environments_of(ranks) == ({}, {})
    machine("7,3,GPU-a,1", has_cuda=True)
    assert [e["CUDA_VISIBLE_DEVICES"] for e in environments_of(ranks)] == ["7,3", "GPU-a,1"]
    assert environments_of(ModelOptions()) == ({},)


@pytest.mark.parametrize(
    ("fields", "gpus", "options", "said"),
    [
        ({"has_cuda": True}, "0", {}, "at most 1, as 1 GPUs are visible but got 2"),
        ({"has_cuda": True}, "0,1,2", {"tensor_parallel_size": 2}, "at most 1, .* with 2 for"),
        ({"has_cuda": True}, "0,1,2", {"pipeline_parallel_size": 3}, "at most 1, .* with 3 for"),
        ({}, "", {}, "1 on a Mac, whose GPU is one device but got 2"),
        ({"on_cpu": True}, "", {"allow_runtime_lora_updating": True}, "allow-runtime-lora"),
        ({"on_cpu": True}, "", {"role": "prefill"}, "1 with --role prefill, which listens on one"),
    ],
)
def test_replicas_without_devices_are_refused(
    machine: Any, fields: Any, gpus: str, options: Any, said: str
) -> None:
    machine(gpus, **fields)
    with pytest.raises(InvalidParameterError, match=f"data_parallel_size must be .*{said}"):
        environments_of(ModelOptions(data_parallel_size=2, **options))


def test_mlx_launch_starts_no_replicas(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(on_cpu=True)
    monkeypatch.setenv("MLX_RANK", "0")
    with pytest.raises(InvalidParameterError, match=r"data_parallel_size must be 1 under mlx\.l"):
        environments_of(ModelOptions(data_parallel_size=2))
