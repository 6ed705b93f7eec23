"""`bench/fleet`: the simulator counts as the engine's scheduler and KV store do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.fleet import metrics
from bench.fleet.arrivals import sessions
from bench.fleet.real import RealReplica
from bench.fleet.replica import Limits, Replica, Request
from bench.fleet.routing import POLICIES, CountingTree, Tree
from bench.fleet.simulation import Failure, Simulation
from bench.fleet.step_times import StepTimes, fitted, h200_3b
from bench.fleet.traffic import Recording, Session, Turn, grouped, load, save

RECORDINGS = Path(__file__).resolve().parents[2] / "bench/fleet/recordings.json"
TIMES = StepTimes(base=2e-3, row=1e-5, context=2e-8, prompt=9e-6, prompt_context=5e-10)
SECONDS = 12.0
KINDS = (Replica, RealReplica)
TREES = {"tree": Tree, "counting tree": CountingTree}


def recordings(seed: int) -> list[Recording]:
    """16 random conversations of 4 groups that share 0, 96, 192 and 288 tokens."""
    rng = random.Random(seed)

    def turn(shared: int) -> Turn:
        return Turn(shared + rng.randint(2, 200), rng.randint(1, 60))

    return [
        Recording(group, 96 * group,
                  (turn(96 * group), *(turn(0) for _ in range(rng.randrange(6)))))
        for group in range(4)
        for _ in range(4)
    ]  # fmt: skip


def run(
    policy: str, seed: int = 0, tokens: int = 4096, kind: Any = Replica,
    failures: Sequence[Failure] = (),
) -> tuple[list[Request], list[Any]]:  # fmt: skip
    played = sessions(
        recordings(seed), live=24, turn_seconds=1.0, seconds=SECONDS, bursts=True, seed=seed
    )
    limits = Limits(tokens, max_num_seqs=16, max_num_batched_tokens=512)
    replicas = [kind(number, limits, TIMES) for number in range(4)]
    chosen = TREES[policy](seed, rack=2) if policy in TREES else POLICIES[policy](seed)
    simulation = Simulation(
        replicas, chosen, played, think_seconds=0.3, seconds=SECONDS, seed=seed, failures=failures
    )
    requests = simulation.run()
    for replica in replicas:
        replica.check() if kind is RealReplica else replica.cache.check()
    return requests, replicas


def by_prompt(requests: list[Request]) -> dict[tuple[int, int], Request]:
    return {(each.session.key, each.turn): each for each in requests}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("policy", ["random", "sticky", "cache-aware", "tree"])
@pytest.mark.parametrize("tokens", [3072, 100_000])
def test_hits_and_times_are_those_of_the_engines_scheduler(policy, tokens) -> None:
    requests, replicas = run(policy, tokens=tokens)
    found, real = by_prompt(requests), by_prompt(run(policy, 0, tokens, RealReplica)[0])
    assert found.keys() == real.keys() and len(found) > 150
    for key, request in found.items():
        assert request.num_cached_tokens == real[key].num_cached_tokens, key
        assert request.first_token == pytest.approx(real[key].first_token)
        assert request.end == pytest.approx(real[key].end)
    has_evicted = any(replica.cache.num_evicted for replica in replicas)
    assert has_evicted == (tokens == 3072)


def test_full_replicas_preempt_as_often() -> None:
    figures = []
    for kind in KINDS:
        requests, replicas = run("random", 0, 1536, kind)
        hit_rate = metrics.summary(requests, 0, SECONDS)["hit_rate"]
        figures.append((hit_rate, sum(each.num_preemptions for each in replicas)))
    (hit_rate, preemptions), (real_hit_rate, real_preemptions) = figures
    assert preemptions > 0 and real_preemptions > 0
    assert hit_rate == pytest.approx(real_hit_rate, abs=0.02)


def test_each_token_is_cached_or_computed_once() -> None:
    requests, replicas = run("cache-aware")
    assert not any(replica.num_preemptions for replica in replicas)
    wanted = sum(each.num_prompt_tokens + each.max_tokens - 1 for each in requests)
    cached = sum(each.num_cached_tokens or 0 for each in requests)
    assert cached > 0 and sum(each.num_computed_tokens for each in replicas) == wanted - cached


def test_a_seed_gives_the_same_again_and_another_one_does_not() -> None:
    def ends(seed: int) -> list[float | None]:
        return [each.end for each in run("tree", seed)[0]]

    assert ends(3) == ends(3) != ends(4)


def test_a_lost_replica_loses_its_cache_and_its_requests_are_sent_again() -> None:
    failure = Failure(at=5.0, seconds=3.0, replicas=[0, 1])
    requests, replicas = run("sticky", failures=[failure])
    assert any(each.num_retries for each in requests)
    assert 0.1 < max(replica.busy_seconds for replica in replicas) < SECONDS + 5
    assert all(each.is_alive for each in replicas)
    for request in requests:
        assert request.num_retries == 0 or request.end > 5.0
    found, real = (
        {key: each.num_cached_tokens for key, each in by_prompt(requests).items()}
        for requests in (run("random", 2, 100_000, kind, [failure])[0] for kind in KINDS)
    )
    assert found == real  # replicas that are back have empty caches
    before, after = (
        metrics.summary(each, 5.0, 8.0)["hit_rate"] for each in (run("sticky")[0], requests)
    )
    assert after < before - 0.02


def test_sessions_stay_where_a_policy_says() -> None:
    homes: dict[int, set[int]] = {}

    class Noted(Replica):
        def add(self, request: Request, now: float) -> None:
            homes.setdefault(request.session.key, set()).add(self.number)
            super().add(request, now)

    run("own prefix", kind=Noted, tokens=100_000)
    assert {len(each) for each in homes.values()} == {1}
    homes.clear()
    run("sticky", kind=Noted, tokens=100_000)
    assert {len(each) for each in homes.values()} == {1}
    homes.clear()
    for policy in TREES:
        run(policy, kind=Noted, tokens=100_000)
        racks = [{number // 2 for number in each} for each in homes.values()]
        assert {len(each) for each in racks} == {1} and len(set.union(*racks)) == 2
        homes.clear()
    run("round robin", kind=Noted, tokens=100_000)
    assert max(map(len, homes.values())) > 1


def test_a_counting_tree_counts_the_sessions_of_each_rack() -> None:
    tree = CountingTree(0, rack=2)
    replicas = [Replica(number, Limits(4096), TIMES) for number in range(6)]
    played = [Session(key, Recording(0, 0, (Turn(9, 9),) * 2), 0.0) for key in range(300)]

    def choose(turn: int, alive: list[Replica]) -> None:
        for session in played:
            tree.choose(Request(session, turn, 0.0, 9, 9), alive)

    choose(0, replicas)
    assert sum(tree._num_sessions.values()) == 300
    assert max(tree._num_sessions.values()) - min(tree._num_sessions.values()) < 10
    choose(0, replicas[2:])
    assert tree._num_sessions[0] == 0 and sum(tree._num_sessions.values()) == 300
    choose(1, replicas[2:])
    assert set(tree._num_sessions.values()) == {0}


def test_step_times_are_fitted_and_add_up() -> None:
    decodes = [(rows, rows * context, TIMES.decodes(rows, rows * context, 1))
               for rows, context in ((1, 64), (8, 1024), (32, 4096), (256, 512))]  # fmt: skip
    prompts = [(count, length, TIMES.base + count * TIMES.prefill(0, length))
               for count, length in ((1, 8192), (16, 1024), (1, 64))]  # fmt: skip
    found = fitted(decodes, prompts)
    for name, value in vars(TIMES).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-6), name
    one_by_one = sum(TIMES.decodes(3, 3000 + 3 * step, 1) for step in range(50))
    assert TIMES.decodes(3, 3000, 50) == pytest.approx(one_by_one)
    parts = TIMES.chunk(0, 500) + TIMES.chunk(500, 700)
    assert TIMES.prefill(0, 1200) == pytest.approx(parts)


def test_measured_steps_are_within_5_percent_of_the_fit() -> None:
    times = h200_3b()
    for rows, context, milliseconds in (
        (1, 1024, 2.05),
        (32, 131_072, 5.595),
        (256, 262_144, 11.514),
    ):
        assert 1000 * times.decodes(rows, context, 1) == pytest.approx(milliseconds, rel=0.05)


def test_conversations_that_begin_alike_are_a_group(tmp_path) -> None:
    alike = [[[*range(100), own], [1, 2], [3]] for own in (500, 501)]
    other = [[list(range(70, 90)), [7], [8, 9], [5]]]
    found = grouped([*alike, *other])
    assert found[0] == found[1] == Recording(0, 96, (Turn(101, 2),))
    assert found[2] == Recording(1, 0, (Turn(20, 1), Turn(2, 1)))
    assert found[2].prompts == [20, 23]
    save(tmp_path / "traffic.json", {"some": found})
    assert load(tmp_path / "traffic.json") == {"some": found}


def test_the_recorded_traffic() -> None:
    traffic = load(RECORDINGS)
    assert len(traffic["agents"]) == 48 and len(traffic["chats"]) == 2000
    for recording in (*traffic["agents"], *traffic["chats"]):
        assert recording.turns[0].new_tokens > recording.shared_tokens
        assert all(turn.new_tokens > 0 < turn.answer_tokens for turn in recording.turns)
    assert max(each.prompts[-1] for each in traffic["agents"]) > 200_000


def test_a_prompt_that_fits_nowhere_is_an_error() -> None:
    replica = Replica(0, Limits(64), TIMES)
    recording = Recording(0, 0, (Turn(100, 1),))
    replica.add(Request(Session(0, recording, 0.0), 0, 0.0, 100, 1), 0.0)
    with pytest.raises(AssertionError, match="100 tokens fits nowhere"):
        replica.start(0.0)


def test_a_prefix_that_many_wait_for_is_computed_once() -> None:
    recording = Recording(0, 960, (Turn(1000, 20),))
    played = [Session(key, recording, 0.0) for key in range(5)]
    hits = []
    for kind in KINDS:
        replica = kind(0, Limits(16_000, max_num_batched_tokens=256), TIMES)
        simulation = Simulation(
            [replica], POLICIES["sticky"](0), played, think_seconds=1.0, seconds=1.0
        )
        hits.append([each.num_cached_tokens for each in simulation.run()])
        assert replica.num_computed_tokens == 960 + 5 * (40 + 19)
    assert hits == [[0, 960, 960, 960, 960]] * 2
