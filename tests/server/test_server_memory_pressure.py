"""A server on a system that is critically short of memory: 503, metrics, and batches that wait."""

from __future__ import annotations

import pytest
from support.pressure import FakeSource, fake_source
from support.server_helpers import ENGINE, running, until

from mlx_paged.engine.pressure_sources import PressureLevel

BODY = {"messages": [{"role": "user", "content": "def f("}], "max_tokens": 2}


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> FakeSource:
    return fake_source(monkeypatch)


def test_new_requests_get_503_until_there_is_memory_again(source) -> None:
    with running(**ENGINE) as server, server.client() as client:
        assert client.post("/v1/chat/completions", json=BODY).status_code == 200
        source.level = PressureLevel.CRITICAL
        refused = client.post("/v1/chat/completions", json=BODY)
        assert refused.status_code == 503 and int(refused.headers["Retry-After"]) >= 0
        error = refused.json()["error"]
        assert error["code"] == "memory_pressure" and "short of memory" in error["message"]
        stream = client.post("/v1/chat/completions", json=BODY | {"stream": True})
        assert stream.status_code == 503
        ready = client.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "short_of_memory"})
        assert client.get("/health").status_code == client.get("/live").status_code == 200
        message = client.post("/v1/messages", json=BODY)
        assert message.status_code == 529
        assert message.json()["error"]["details"] == {"error_code": "memory_pressure"}
        metrics = client.get("/metrics").text
        assert 'requests_rejected_total{reason="memory_pressure"} 3.0' in metrics
        assert 'requests_rejected_total{reason="queue_full"} 0.0' in metrics
        [level] = [x for x in metrics.splitlines() if x.startswith("mlx_paged:memory_pressure{")]
        assert level.endswith(" 2.0")
        counts = {
            line.partition("{")[0]: float(line.split()[-1])
            for line in metrics.splitlines()
            if line.startswith("mlx_paged:") and "given_back" in line
        }
        assert counts["mlx_paged:memory_given_back_bytes_total"] > 0
        assert counts["mlx_paged:blocks_given_back_total"] > 0
        source.level = PressureLevel.NORMAL
        until(lambda: client.post("/v1/chat/completions", json=BODY).status_code == 200)
        assert client.get("/ready").json() == {"status": "ready"}


def test_texts_to_embed_get_503(source) -> None:
    with running(runner="pooling", **ENGINE) as server, server.client() as client:
        source.level = PressureLevel.CRITICAL
        refused = client.post("/v1/embeddings", json={"input": ["a", "b"]})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "memory_pressure"
