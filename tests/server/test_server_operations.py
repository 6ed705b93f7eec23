"""Operations: metrics, ids, logs, keys, limits, clients that leave or do not read, and the end."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.server_helpers import RunningServer, events, running, validate

from mlx_paged.demo import model_path
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.loading import load
from mlx_paged.model.compilation import Compilation
from mlx_paged.server import responses
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.context import Phase
from mlx_paged.server.metrics import _EngineCollector

PROMPT = "def is_even(n: int) -> bool:\n"
LONG = {"prompt": PROMPT, "max_tokens": 2000, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(
        ServerConfig(api_keys=("one", "zwei drei"), allowed_origins=("http://a",))
    ) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client(headers={"Authorization": "Bearer one"}) as client:
        yield client


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    return response.json()["error"]


# Metrics, ids and logs.

VLLM_FAMILIES = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "mm_cache_queries": "counter",
    "mm_cache_hits": "counter",
    "num_preemptions": "counter",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "request_success": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "iteration_tokens_total": "histogram",
    "cache_config_info": "gauge",
}


def metrics(client: httpx.Client) -> dict[str, Any]:
    found = text_string_to_metric_families(client.get("/metrics").text)
    return {family.name: family for family in found}


def value(families: dict[str, Any], sample: str, **labels: str) -> float:
    """The value of the one sample with this name and these labels."""
    found = [
        s.value
        for family in families.values()
        for s in family.samples
        if s.name == sample and labels.items() <= s.labels.items()
    ]
    assert len(found) <= 1
    return found[0] if found else 0.0


def test_tokens_that_come_together_are_all_counted(server) -> None:
    """A reader that lags finds several tokens at once, also the first ones."""
    from mlx_paged.engine.outputs import SequenceUpdate
    from mlx_paged.engine.request_stream import SequenceDelta
    from mlx_paged.server.generation import Generation

    observed: list[float] = []
    generation = Generation.__new__(Generation)
    generation._num_received, generation._started, generation._budget = 0, 0.0, None
    generation._first, generation._last = None, {}

    class Metrics:
        time_to_first_token = server.context.metrics.time_to_first_token

        def tokens(self, seconds: float, count: int) -> None:
            observed.extend([seconds / count] * count)

    generation.context = SimpleNamespace(metrics=Metrics())  # type: ignore[assignment]
    for size in (3, 2):
        generation._note(SequenceDelta((SequenceUpdate("r", 0, [5], ["x"]),) * size))
    assert len(observed) == 4 and observed[:2] == [0, 0]


def test_metrics_have_vllms_names_and_right_values(client) -> None:
    before = metrics(client)
    for name, kind in VLLM_FAMILIES.items():
        assert before[f"vllm:{name}"].type == kind, name
        if name != "cache_config_info":
            for sample in before[f"vllm:{name}"].samples:
                assert sample.labels["model_name"] == "mlx-paged-demo"
                assert sample.labels["engine"] == "0"
    body = {"prompt": PROMPT, "max_tokens": 9, "ignore_eos": True, "n": 2}
    usage = client.post("/v1/completions", json=body).json()["usage"]
    after = metrics(client)

    def gained(sample: str, **labels: str) -> float:
        return value(after, sample, **labels) - value(before, sample, **labels)

    assert gained("vllm:prompt_tokens_total") == usage["prompt_tokens"]
    assert gained("vllm:generation_tokens_total") == usage["completion_tokens"] == 18
    assert gained("vllm:request_success_total", finished_reason="length") == 1
    assert gained("vllm:time_to_first_token_seconds_count") == 1
    assert gained("vllm:inter_token_latency_seconds_count") == 16
    for phase in ("queue", "prefill", "decode", "inference"):
        assert gained(f"vllm:request_{phase}_time_seconds_count") == 1
    assert gained("vllm:e2e_request_latency_seconds_count") == 1
    # (Tests before this one may have left the prompt in the cache.)
    num_computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    assert gained("vllm:iteration_tokens_total_sum") >= num_computed + 16
    assert gained("vllm:prefix_cache_queries_total") >= usage["prompt_tokens"]
    assert gained("mlx_paged:http_responses_total", path="/v1/completions", status="200") == 1
    assert gained("mlx_paged:pool_copies_total") == 0
    assert value(after, "mlx_paged:blocks_free") > 0
    assert "mlx_paged:live_arrays" in after
    assert value(after, "vllm:cache_config_info", block_size="8") == 1


def test_steps_that_are_not_compiled_show_in_the_metrics() -> None:
    config = EngineConfig(kv_cache_memory=16 << 20, num_gpu_blocks_override=16)
    stats = Engine(load(model_path()), config).stats()
    found = {}
    for refused, foreign in ((None, {}), ("the operation Sin", {"Sin": 4, "Cumsum": 1})):
        compilation = Compilation(refused, foreign)
        collector = _EngineCollector(("m", "0"), replace(stats, compilation=compilation))
        samples = [sample for family in collector.collect() for sample in family.samples]
        [compiled] = [s.value for s in samples if s.name == "mlx_paged:steps_compiled"]
        counts = {
            s.labels["primitive"]: s.value
            for s in samples
            if s.name == "mlx_paged:foreign_operations"
        }
        found[refused] = (compiled, counts)
    assert found == {None: (1, {}), "the operation Sin": (0, {"Sin": 4, "Cumsum": 1})}


def test_the_dashboard_asks_for_metrics_that_exist(client) -> None:
    path = Path(__file__).parents[2] / "docs/grafana-dashboard.json"
    dashboard = json.loads(path.read_text())
    client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})
    known: dict[str, set[str]] = {}  # the labels of a metric
    for family in metrics(client).values():
        for sample in family.samples:
            known.setdefault(sample.name, set()).update(sample.labels)
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables.keys() == {"datasource", "model", "instance"}
    asked = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    assert len(asked) > 10
    queries = [variables[name]["query"]["query"] for name in ("model", "instance")]
    for expression in (*asked, *queries):
        found = re.findall(r"((?:vllm|mlx_paged|process)[:_]\w+)(?:{(.*?)})?", expression)
        assert found, expression
        for name, selector in found:
            assert name in known, expression
            labels = set(re.findall(r"(\w+)=~", selector))
            assert labels <= known[name] | {"instance"}, expression
            if expression in asked:  # chosen by instance, and by model where it has one
                wanted = {"instance"} | ({"model_name"} & known[name])
                assert wanted <= labels, expression


def test_the_load_is_the_requests_that_are_answered(server, client) -> None:
    assert client.get("/load").json() == {"server_load": 0}
    with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert httpx.get(f"{server.url}/load").json() == {"server_load": 1}
    server.until(lambda: client.get("/load").json() == {"server_load": 0})


def test_paths_that_others_ask_for(client) -> None:
    for method in ("GET", "POST"):
        assert client.request(method, "/ping").json() == {"status": "ready"}
    body = {"prompt": PROMPT}
    tokens = client.post("/v1/tokenize", json=body).json()
    assert tokens == client.post("/tokenize", json=body).json()
    text = client.post("/v1/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert text == {"prompt": PROMPT}


def test_request_ids(client) -> None:
    given = client.get("/v1/models", headers={"X-Request-Id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    made = client.get("/v1/models", headers={"X-Request-Id": "a b"})
    assert re.fullmatch("[0-9a-f]{32}", made.headers["x-request-id"])
    body = {"prompt": PROMPT, "max_tokens": 2, "request_id": "body-7"}
    response = client.post("/v1/completions", json=body)
    assert response.headers["x-request-id"] == "body-7"
    assert response.json()["id"] == "cmpl-body-7"


def test_an_id_may_be_used_twice_at_once(server) -> None:
    def one(results: list[int]) -> None:
        with server.client(headers={"Authorization": "Bearer one"}) as client:
            body = {**LONG, "max_tokens": 60, "request_id": "same"}
            results.append(client.post("/v1/completions", json=body).status_code)

    results: list[int] = []
    threads = [threading.Thread(target=one, args=(results,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [200] * 3


def test_one_log_line_a_request(client, caplog) -> None:
    caplog.set_level("INFO")
    body = {"prompt": PROMPT, "max_tokens": 5, "request_id": "logged", "user": "me\nroot"}
    client.post("/v1/completions", json=body)
    [record] = [r for r in caplog.records if getattr(r, "request_id", "") == "logged"]
    told = vars(record)
    assert told["completion_tokens"] == 5 and told["status"] == 200
    assert told["finish_reason"] == "length" and told["ttft"] > 0
    assert {"prompt_tokens", "cached_tokens", "seconds", "path", "user"} <= told.keys()
    from mlx_paged.server.logs import JsonFormatter, TextFormatter

    assert json.loads(JsonFormatter().format(record))["user"] == "me\nroot"
    assert "\n" not in TextFormatter().format(record)


# Keys.


def test_keys(server) -> None:
    with server.client() as client:
        for path in ("/health", "/ping", "/live", "/ready", "/docs", "/openapi.json", "/metrics",
                     "/load"):  # fmt: skip
            assert client.get(path).status_code == 200, path
        for headers in ({}, {"Authorization": "Bearer two"}, {"Authorization": "one"},
                        {"Authorization": "Basic one"}, {"Authorization": "Bearer"},
                        {"Authorization": "Bearer \xff"}):  # fmt: skip
            for path in ("/v1/models", "/server_info", "/version", "/nothing"):
                found = client.get(
                    path, headers={k: v.encode("latin-1") for k, v in headers.items()}
                )
                assert error(found, 401)["code"] == "invalid_api_key"
        for key in ("one", "zwei drei"):
            headers = {"Authorization": f"Bearer {key}"}
            assert client.get("/v1/models", headers=headers).status_code == 200
        told = client.get("/server_info", headers=headers)
        assert told.json()["config"]["api_keys"] == 2 and "zwei" not in told.text


def test_behind_a_proxy_that_shows_another_path() -> None:
    config = ServerConfig(root_path="/llm", api_keys=("k",), metrics_need_key=True)
    with running(config) as server, server.client() as client:
        for path in ("/health", "/", "/web/page.js", "/openapi.json"):
            assert client.get(path).status_code == 200, path
        assert client.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]
        for path in ("/v1/models", "/models", "/metrics", "/load"):
            assert client.get(path).status_code == 401
            allowed = client.get(path, headers={"Authorization": "Bearer k"})
            assert allowed.status_code == 200, path


def test_cors(server) -> None:
    asks = {"Origin": "http://a", "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization"}  # fmt: skip
    with server.client() as client:
        allowed = client.options("/v1/completions", headers=asks)
        assert allowed.headers["access-control-allow-origin"] == "http://a"
        other = client.options("/v1/completions", headers={**asks, "Origin": "http://b"})
        assert "access-control-allow-origin" not in other.headers


# Limits.


def test_a_body_may_be_too_large() -> None:
    with running(ServerConfig(max_body_size=1000)) as server, server.client() as client:
        big = {"prompt": "a" * 1000}
        assert error(client.post("/v1/completions", json=big), 413)["code"] == "body_too_large"

        def chunks() -> Iterator[bytes]:
            for _ in range(50):
                yield b" " * 100

        with contextlib.suppress(httpx.WriteError, httpx.ReadError):
            sent = client.post(
                "/v1/completions", content=chunks(), headers={"content-type": "application/json"}
            )
            error(sent, 413)


def test_bodies_of_all_requests_share_their_memory() -> None:
    def padded(num_bytes: int, **fields: Any) -> dict[str, Any]:
        return {"content": json.dumps(fields).encode() + b" " * num_bytes,
                "headers": {"content-type": "application/json"}}  # fmt: skip

    short = {"prompt": PROMPT, "max_tokens": 1}
    config = ServerConfig(max_body_memory=1 << 20)
    with running(config) as server, server.client() as client:
        # (Alone, a body may have more, and the first MiB of each does not count.)
        found = client.post("/v1/completions", **padded(3 << 20, **short))
        assert found.status_code == 200, found.text
        server.until(lambda: not server.context._held_bytes)
        large = padded(5 << 18, **short)
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                         b"Content-Length: 3000000\r\n"
                         b"Content-Type: application/json\r\n\r\n" + b" " * 1_900_000)  # fmt: skip
            server.until(lambda: server.context._held_bytes > 3 << 18)
            refused = client.post("/v1/completions", **large)
            assert error(refused, 503)["code"] == "body_memory"
            assert refused.headers["retry-after"] == "1"
            assert client.post("/v1/completions", **padded(1 << 19, **short)).status_code == 200
        # (Clients that go have their bodies given back, while they send and while they read.)
        server.until(lambda: not server.context._held_bytes)
        with client.stream("POST", "/v1/completions", **padded(7 << 18, **LONG, stream=True)) as it:
            assert next(it.iter_lines())
        server.until(lambda: not server.context._held_bytes)
        assert client.post("/v1/completions", **large).status_code == 200


def test_a_body_may_come_too_slowly() -> None:
    with (
        running(ServerConfig(read_timeout=0.5)) as server,
        socket.create_connection(("127.0.0.1", server.port)) as sock,
    ):
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n"
                     b"Content-Type: application/json\r\n\r\n{")  # fmt: skip
        sock.settimeout(300)
        assert sock.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_a_request_may_take_too_long() -> None:
    with running(ServerConfig(request_timeout=0.3)) as server, server.client() as client:
        found = client.post("/v1/completions", json={**LONG, "n": 32})
        assert error(found, 422)["code"] == "request_timeout"
        assert found.headers["x-should-retry"] == "false" and "0.3 s" in found.text
        streamed = client.post("/v1/completions", json={**LONG, "n": 32, "stream": True})
        assert streamed.status_code == 200
        assert events(streamed)[-1]["error"]["code"] == "request_timeout"
        server.wait_idle()


def test_openais_client_does_not_repeat_what_took_too_long() -> None:
    with running(ServerConfig(request_timeout=0.3)) as server, server.client() as client:
        sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        assert sdk.max_retries == 2  # it would, for other statuses
        messages: Any = [{"role": "user", "content": PROMPT}]
        with pytest.raises(openai.APIStatusError, match="not finished"):
            sdk.chat.completions.create(
                model="mlx-paged-demo", messages=messages, n=32, extra_body={"ignore_eos": True}
            )
        found = metrics(client)["mlx_paged:http_responses"].samples
        arrived = [
            (s.labels["status"], s.value)
            for s in found
            if s.name.endswith("_total") and s.labels["path"] == "/v1/chat/completions"
        ]
        assert arrived == [("422", 1.0)]
        server.wait_idle()


def test_a_full_queue_is_429_with_retry_after() -> None:
    with running(max_num_seqs=1, max_num_waiting=2) as server, server.client() as client:
        many = client.post("/v1/completions", json={**LONG, "n": 8})
        found = error(many, 429)
        assert found["code"] == "queue_full" and int(many.headers["retry-after"]) >= 1
        several = {**LONG, "prompt": [PROMPT] * 8, "max_tokens": 50}
        assert client.post("/v1/completions", json=several).status_code == 429
        server.wait_idle()  # those that had been taken were given up
        assert client.post("/v1/completions", json={**LONG, "max_tokens": 5}).status_code == 200
        rejected = value(metrics(client), "mlx_paged:requests_rejected_total", reason="queue_full")
        assert rejected == 2


def test_while_the_model_loads() -> None:
    go = threading.Event()

    def make() -> Engine:
        go.wait(300)
        return Engine(load(), EngineConfig(num_gpu_blocks_override=50))

    with (
        running(make_engine=lambda: AsyncEngine(make), wait=False) as server,
        server.client() as client,
    ):
        assert client.get("/live").status_code == 200
        for path in ("/health", "/ready"):
            assert client.get(path).status_code == 503
            assert client.get(path).json() == {"status": "loading"}
        refused = client.post("/v1/completions", json={"prompt": PROMPT})
        assert error(refused, 503)["code"] == "loading" and refused.headers["retry-after"]
        [model] = client.get("/v1/models").json()["data"]
        assert not model.keys() & {"max_model_len", "input_modalities"}  # not known yet
        validate(responses.ModelList, client.get("/v1/models").json())
        anthropic = client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
        assert not anthropic["data"][0].keys() & {"max_tokens", "max_input_tokens"}
        assert client.get("/server_info").status_code == 200
        found = metrics(client)
        assert value(found, "process_open_fds") > 3 and value(found, "process_start_time_seconds")
        refusals = {
            sample.labels["reason"]: sample.value
            for sample in found["mlx_paged:requests_rejected"].samples
            if sample.name.endswith("_total")
        }
        phases = {phase.value for phase in Phase} - {"ready"}
        assert refusals == {"loading": 1, **dict.fromkeys(refusals.keys() - {"loading"}, 0)}
        assert refusals.keys() == phases | {
            *("queue_full", "body_memory", "memory_pressure", "invalid", "rate_limit"),
        }
        go.set()
        server.wait_ready()
        assert client.post("/v1/completions", json={"prompt": PROMPT}).status_code == 200


# Clients that leave.


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_frees_its_blocks(server, stream) -> None:
    body = json.dumps({**LONG, "stream": stream, "n": 2}).encode()
    head = (f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer one\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n")  # fmt: skip
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(head.encode() + body)
        server.until(lambda: server.stats().num_running == 2)
        if stream:
            sock.recv(4096)
    steps = server.stats().num_steps
    server.until(lambda: server.stats().num_running == 0)
    assert server.stats().num_steps - steps < 1000  # of 2000
    usage = server.wait_idle().usage
    assert usage.num_cached_blocks > 0  # finished prefixes are kept


def test_a_slow_reader_stalls_nobody_and_is_given_up() -> None:
    with running(ServerConfig(read_timeout=1.0)) as server, server.client() as client:
        body = json.dumps({**LONG, "n": 32, "stream": True, "max_tokens": 200, "logprobs": 20})
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall((f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                      f"Content-Type: application/json\r\n"
                      f"Content-Length: {len(body)}\r\n\r\n{body}").encode())  # fmt: skip
        server.until(lambda: server.stats().max_used_blocks)  # it runs, or ran
        other = client.post("/v1/completions", json={**LONG, "max_tokens": 20})
        assert other.status_code == 200
        server.until(lambda: server.stats().num_running == 0)
        server.wait_idle()
        received = b""
        with sock, contextlib.suppress(ConnectionResetError):
            sock.settimeout(300)
            while data := sock.recv(1 << 16):
                received += data
        assert received.startswith(b"HTTP/1.1 200 ") and b"[DONE]" not in received


def test_a_crashed_engine_is_503() -> None:
    with running() as server, server.client() as client:

        def crash(engine: Engine) -> None:
            engine.step = lambda: 1 / 0  # type: ignore[method-assign, assignment]

        server.call(server.engine._call(crash))
        found = client.post("/v1/completions", json=LONG)
        assert found.status_code == 503 and "division" not in found.text
        for path in ("/health", "/live", "/ready"):
            assert client.get(path).status_code == 503
        assert client.get("/metrics").status_code == 200


def test_pages_of_other_origins_may_read_the_headers_of_answers(server) -> None:
    with server.client() as client:
        answer = client.get("/live", headers={"Origin": "http://a"})
    shown = answer.headers["access-control-expose-headers"]
    assert {"X-Request-Id", "X-Structured-Outputs-Relaxed"} <= set(shown.split(", "))
