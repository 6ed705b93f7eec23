"""`mlx-paged serve --data-parallel-size 2`: same tokens, placement, sums, and a killed replica."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any
from unittest import mock

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.routers import Router, running_router
from support.server_helpers import events, process, until
from typer.testing import CliRunner
from websockets.sync.client import connect

from mlx_paged import LLM, SamplingParams
from mlx_paged.cli.main import app
from mlx_paged.demo import model_path
from mlx_paged.server.generation import Generation, Piece
from mlx_paged.server.router import endpoints
from mlx_paged.server.router.replicas import ReplicaSet
from mlx_paged.server.router.routing import Replica

PATH = "/v1/completions"
LONG = {"max_tokens": 2000, "ignore_eos": True, "temperature": 0, "stream": True}


def prompt_of(number: int) -> str:
    """A prompt of some 100 tokens whose beginning no other number shares."""
    name = NAMES[number]
    return f"def {name}(items):\n" + f"    {name}s = items[{number}] + {name}\n" * 8


NAMES = ("average", "total", "reversed", "maximum", "word", "joined")
PROMPTS = [prompt_of(number) for number in range(len(NAMES))]


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """Serves two replicas of a model, and another model on demand."""
    file = tmp_path_factory.mktemp("models") / "models.yaml"
    other = {"model": str(model_path()), "name": "other", "options": {"data-parallel-size": 1}}
    file.write_text(json.dumps([{"model": str(model_path()), "name": "first"}, other]))
    options = ("--data-parallel-size", "2", "--block-size", "8", "--models-config", str(file))
    with running_router(*options, "--num-gpu-blocks-override", "1000") as found:
        until(lambda: httpx.get(f"{found.url}/ready").status_code == 200)
        yield found


@pytest.fixture
def client(router: Router) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=router.url, timeout=300) as client:
        assert client.post("/reset_prefix_cache").status_code == 200
        yield client


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """What one engine answers."""
    llm = LLM(num_gpu_blocks_override=200)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    texts = [output.outputs[0].text for output in llm.generate(PROMPTS, params)]
    assert len(set(texts)) == len(texts)
    return texts


def complete(client: httpx.Client, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields}
    answer = client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return int(details["cached_tokens"])


def replicas_of(router: Router) -> list[Replica]:
    return list(router.pool.models[0].replicas)


def own_metrics(replica: Replica) -> dict[tuple[str, str], float]:
    """What a replica counts itself."""
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(replica.socket))) as client:
        return samples(client.get("http://replica/metrics").text)


def own_info(replica: Replica) -> dict[str, Any]:
    """Returns `/server_info` of one replica."""
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(replica.socket))) as client:
        info: dict[str, Any] = client.get("http://replica/server_info").json()
        return info


def samples(text: str) -> dict[tuple[str, str], float]:
    """Values of the replicated model by name and labels, without the model's name."""
    return {
        (s.name, json.dumps({k: v for k, v in s.labels.items() if k != "model_name"})): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if s.labels.get("model_name") != "other"
    }


def answered(router: Router) -> list[float]:
    """Tokens that each replica has generated."""
    name = ("vllm:generation_tokens_total", '{"engine": "0"}')
    return [own_metrics(replica)[name] for replica in replicas_of(router)]


def test_two_replicas_answer_as_one_and_share_the_load(
    router: Router, client: httpx.Client, expected: list[str]
) -> None:
    before = answered(router)
    found = [complete(client, prompt)["choices"][0]["text"] for prompt in PROMPTS]
    assert found == expected
    gained = [now - then for now, then in zip(answered(router), before, strict=True)]
    assert gained == [36, 36]


def test_turns_of_a_conversation_find_their_cache(router: Router, client: httpx.Client) -> None:
    talks = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:3]]
    for turn in range(3):
        for messages in talks:
            body = {"messages": messages, "max_tokens": 8, "temperature": 0}
            answer = client.post("/v1/chat/completions", json=body).json()
            if turn:
                before = answer["usage"]["prompt_tokens"] - 60
                assert cached(answer) > max(50, before), (turn, answer["usage"])
            messages.append(answer["choices"][0]["message"])
            messages.append({"role": "user", "content": "and then?"})


def test_a_response_is_continued_where_it_is_stored(router: Router, client: httpx.Client) -> None:
    made = []
    for prompt in PROMPTS[:4]:
        body = {"input": prompt, "max_output_tokens": 8, "temperature": 0}
        made.append(client.post("/v1/responses", json=body).json())
    for replica in replicas_of(router):
        replica.prefixes.clear()
    before = placements(client)["stored"]
    for first in made:
        body = {"previous_response_id": first["id"], "input": "and then?", "max_output_tokens": 8}
        second = client.post("/v1/responses", json=body)
        assert second.status_code == 200, second.text
        assert cached(second.json()) > 50
        assert client.get(f"/v1/responses/{first['id']}").json()["output"] == first["output"]
    assert placements(client)["stored"] == before + 4
    unknown = {"previous_response_id": "resp_unknown", "input": "x"}
    assert client.post("/v1/responses", json=unknown).status_code == 400
    assert client.get("/v1/responses/resp_unknown").status_code == 404
    for each in made:
        assert client.delete(f"/v1/responses/{each['id']}").status_code == 200


def test_a_websocket_continues_a_response(router: Router, client: httpx.Client) -> None:
    made = [
        client.post("/v1/responses", json={"input": prompt, "max_output_tokens": 4}).json()
        for prompt in PROMPTS[:2]
    ]
    for first in made:
        with connect(router.url.replace("http", "ws") + "/v1/responses") as socket:
            given = {"previous_response_id": first["id"], "input": "x", "max_output_tokens": 4}
            socket.send(json.dumps({"type": "response.create", **given}))
            kinds = [json.loads(socket.recv(60))["type"]]
            while kinds[-1] not in ("response.completed", "response.incomplete", "error"):
                kinds.append(json.loads(socket.recv(60))["type"])
            assert kinds[-1] == "response.incomplete", kinds


def placements(client: httpx.Client) -> dict[str, float]:
    found = samples(client.get("/metrics").text)
    return {
        json.loads(labels)["reason"]: value
        for (name, labels), value in found.items()
        if name == "mlx_paged:replica_placements_total"
    }


def test_a_session_stays_where_it_is(router: Router, client: httpx.Client) -> None:
    before = placements(client)
    for prompt in PROMPTS[:3]:
        answer = client.post(PATH, json={"prompt": prompt, "max_tokens": 1, "user": "me"})
        assert answer.status_code == 200
    assert placements(client)["session"] == before["session"] + 2


def test_concurrent_requests_with_one_prefix_spill_over(
    router: Router, client: httpx.Client
) -> None:
    """Seven streams of one prompt: the sixth finds its replica overloaded."""
    body = {**LONG, "prompt": PROMPTS[0]}
    with contextlib.ExitStack() as streams:
        lines = []
        for _ in range(7):
            answer = streams.enter_context(client.stream("POST", PATH, json=body))
            lines.append(answer.iter_lines())
            next(lines[-1])
        loads = [replica.num_requests for replica in replicas_of(router)]
        assert sorted(loads) == [2, 5]
        found = samples(client.get("/metrics").text)
        shown = [found["mlx_paged:replica_requests", f'{{"replica": "{n}"}}'] for n in (0, 1)]
        assert shown == loads
    until(lambda: not any(replica.num_requests for replica in replicas_of(router)))


def test_responses_in_the_background_count_as_load(
    router: Router, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces, ending = Generation.pieces, threading.Event()

    async def held(generation: Generation) -> AsyncIterator[Piece]:
        await asyncio.to_thread(ending.wait, 300)
        async for piece in pieces(generation):
            yield piece

    monkeypatch.setattr(Generation, "pieces", held)
    model = router.pool.models[0]
    with contextlib.ExitStack() as stack:
        stack.callback(ending.set)
        for prompt in PROMPTS[:3]:
            body = {"input": prompt, "background": True, "max_output_tokens": 4}
            assert client.post("/v1/responses", json=body).json()["status"] == "queued"
        until(lambda: sorted(each.num_requests for each in replicas_of(router)) == [1, 2])
        until(lambda: model.num_requests == 3)
        assert not model.is_idle
    until(lambda: not any(replica.num_requests for replica in replicas_of(router)))
    until(lambda: model.is_idle)


def test_server_info_has_the_statistics_of_both(router: Router, client: httpx.Client) -> None:
    complete(client, PROMPTS[0])
    own = [own_info(replica)["stats"] for replica in replicas_of(router)]
    info = client.get("/server_info?model=first").json()
    assert [each["replica"] for each in info["replicas"]] == [0, 1]
    assert [each["stats"]["num_steps"] for each in info["replicas"]] == [
        stats["num_steps"] for stats in own
    ]
    assert info["stats"]["num_steps"] == sum(stats["num_steps"] for stats in own) > 0
    assert info["stats"]["usage"]["num_usable_blocks"] == 2 * own[0]["usage"]["num_usable_blocks"]
    assert info["engine_config"]["block_size"] == 8
    complete(client, PROMPTS[0], model="other")
    assert "replicas" not in client.get("/server_info?model=other").json()


def test_a_replica_that_answers_with_an_error_is_left_out(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does whose engine has died, or that ends."""
    ask, failing = endpoints._ask, {0}

    async def ask_or_fail(model: Any, replica: Replica, *given: Any) -> Any:
        if replica.number in failing:
            return endpoints._Answer(model, replica, 503, b'{"error": {"message": "no"}}')
        return await ask(model, replica, *given)

    monkeypatch.setattr(endpoints, "_ask", ask_or_fail)
    info = client.get("/server_info?model=first").json()
    assert [each["replica"] for each in info["replicas"]] == [1]
    failing.add(1)
    answer = client.get("/server_info?model=first")
    assert answer.status_code == 200 and "memory_budget" in answer.json()  # the router's own


def test_metrics_are_those_of_both(router: Router, client: httpx.Client) -> None:
    for prompt in PROMPTS[:4]:
        complete(client, prompt)
    both = [own_metrics(replica) for replica in replicas_of(router)]
    found = samples(client.get("/metrics").text)
    checked = 0
    for (name, labels), value in both[0].items():
        if name.startswith("vllm:") and name.endswith(("_total", "_bucket", "_sum", "_count")):
            assert found[name, labels] == pytest.approx(value + both[1][name, labels]), name
            checked += 1
    assert checked > 100
    name, label = "vllm:request_success_total", '{"engine": "0", "finished_reason": "length"}'
    assert all(each[name, label] > 0 for each in both)
    assert [found["mlx_paged:replica_up", f'{{"replica": "{n}"}}'] for n in (0, 1)] == [1, 1]


def test_another_model_has_a_process_of_its_own(
    router: Router, client: httpx.Client, expected: list[str]
) -> None:
    answer = complete(client, PROMPTS[0], model="other")
    assert answer["model"] == "other" and answer["choices"][0]["text"] == expected[0]
    assert [len(model.replicas) for model in router.pool.models] == [2, 1]
    families = text_string_to_metric_families(client.get("/metrics").text)
    up = [s for family in families for s in family.samples if s.name == "mlx_paged:replica_up"]
    assert [(s.labels["model_name"], s.labels["replica"], s.value) for s in up] == [
        ("first", "0", 1), ("first", "1", 1)
    ]  # fmt: skip
    assert client.post("/models/unload", json={"model": "other"}).status_code == 200


def test_without_a_running_replica_the_server_is_not_ready(client: httpx.Client) -> None:
    with mock.patch.object(ReplicaSet, "replicas", ()):
        assert client.get("/ready").status_code == 503
        answer = client.post(PATH, json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_failed")
        assert int(answer.headers["Retry-After"]) >= 1
    assert client.get("/ready").status_code == 200


def test_operations_reach_all_replicas(router: Router, client: httpx.Client) -> None:
    for prompt in PROMPTS[:2]:
        complete(client, prompt)
    assert client.post("/reset_prefix_cache").json()["num_blocks"] >= 2 * 10
    assert not any(len(replica.prefixes) for replica in replicas_of(router))
    ended: list[int] = []

    def ask(number: int) -> None:
        body = {**LONG, "stream": False, "prompt": PROMPTS[number], "request_id": f"r{number}"}
        ended.append(httpx.post(f"{router.url}{PATH}", json=body, timeout=300).status_code)

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    for thread in asking:
        thread.start()
    waiting = {"r0", "r1"}

    def aborted() -> bool:
        body = {"request_ids": sorted(waiting)}
        waiting.difference_update(client.post("/abort_requests", json=body).json()["aborted"])
        return not waiting

    until(aborted)
    for thread in asking:
        thread.join(300)
    assert ended == [499, 499]


def test_a_killed_replica_fails_its_requests_and_comes_back(expected: list[str]) -> None:
    """kill -9 under load: its streams get an error, the others end with the right tokens."""
    with (
        process("--data-parallel-size", "2") as (server, url),
        httpx.Client(base_url=url, timeout=300) as client,
    ):
        children = psutil.Process(server.pid).children()
        assert len(children) == 2
        for number in range(2):  # A session on each replica
            complete(client, PROMPTS[1 + number], user=f"u{number}")
        whole = complete(client, PROMPTS[0], max_tokens=600)["choices"][0]["text"]
        found: dict[int, list[str]] = {number: [] for number in range(4)}

        def read(number: int) -> None:
            body = {**LONG, "max_tokens": 600, "prompt": PROMPTS[0], "user": f"u{number % 2}"}
            with httpx.stream("POST", f"{url}{PATH}", json=body, timeout=300) as answer:
                for line in answer.iter_lines():
                    found[number].append(line)

        readers = [threading.Thread(target=read, args=(number,)) for number in found]
        for reader in readers:
            reader.start()
        until(lambda: all(found.values()))
        children[0].kill()
        for reader in readers:
            reader.join(300)
        texts = ["\n".join(lines).rstrip() for lines in found.values()]
        failed = [text for text in texts if "model_failed" in text]
        assert len(failed) == 2 and all(t.endswith("data: [DONE]") for t in texts)
        for text in texts:
            if text not in failed:
                told = events(httpx.Response(200, text=text))
                assert "".join(event["choices"][0]["text"] for event in told) == whole
        until(lambda: ups_and_restarts(client) != ([1, 1], 0))
        found_now = [complete(client, prompt)["choices"][0]["text"] for prompt in PROMPTS]
        assert found_now == expected
        until(lambda: ups_and_restarts(client) == ([1, 1], 1))
        new = psutil.Process(server.pid).children()
        assert len(new) == 2 and children[1] in new and children[0] not in new
        server.kill()  # The router's own end ends its replicas.
        until(lambda: not any(each.is_running() for each in new))


def ups_and_restarts(client: httpx.Client) -> tuple[list[float], float]:
    """Whether each replica runs, and how many have been started again."""
    found = samples(client.get("/metrics").text)
    ups, restarts = (
        [found[f"mlx_paged:{name}", f'{{"replica": "{number}"}}'] for number in (0, 1)]
        for name in ("replica_up", "replica_restarts_total")
    )
    return ups, sum(restarts)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--data-parallel-size", "0"], "data-parallel-size"),
        (["--data-parallel-size", "two"], "data-parallel-size"),
        (["--data-parallel-size", "2", "--allow-runtime-lora-updating"], "runtime-lora-updating"),
        (["--data-parallel-size", "2", "--memory-budget", "4"], "several models"),
    ],
)
def test_wrong_options(options: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["serve", *options])
    assert result.exit_code != 0
    assert said in " ".join((result.output + str(result.exception)).split())
