"""OpenTelemetry spans: what a collector gets."""

from __future__ import annotations

import http.server
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.proto.trace.v1.trace_pb2 import Status as SpanStatus
from support.server_helpers import running
from typer.testing import CliRunner
from websockets.sync.client import connect

from mlx_paged.cli.main import app
from mlx_paged.errors import InvalidParameterError, MlxPagedError
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.tracing import checked_endpoint

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CARRIED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
LATENCIES = {
    f"gen_ai.latency.{name}"
    for name in ("e2e", "time_in_queue", "time_to_first_token", "time_in_model_prefill",
                 "time_in_model_decode", "time_in_model_inference")
}  # fmt: skip


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """A collector's address, and what it gets."""
    got: list[ExportTraceServiceRequest] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", got
        server.shutdown()


def attributes(found: Any) -> dict[str, Any]:
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in found.attributes
    }


def test_each_request_is_a_span_with_vllms_attributes(monkeypatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    with collector() as (endpoint, got):
        config = ServerConfig(otlp_traces_endpoint=endpoint, served_model_names=("demo",))
        with running(config) as server, server.client(headers=CARRIED) as client:
            body = {"prompt": ["x", "def f():"], "max_tokens": 5, "n": 2, "ignore_eos": True,
                    "temperature": 0.5, "request_id": "mine"}  # fmt: skip
            usage = client.post("/v1/completions", json=body).json()["usage"]
            with client.stream(
                "POST", "/v1/completions",
                json={"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True},
            ) as response:  # fmt: skip
                next(response.iter_lines())
            server.wait_idle()
            url = f"ws://127.0.0.1:{server.port}/v1/responses"
            with connect(url, additional_headers=CARRIED) as connection:
                connection.send('{"type": "response.create", "input": "x", "generate": false}')
                while "response.completed" not in connection.recv(60):
                    pass
            httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 1})
        # The server has ended, and has sent all of them.
        resources = [r for request in got for r in request.resource_spans]
        spans = [s for r in resources for scope in r.scope_spans for s in scope.spans]
    assert all(attributes(r.resource)["service.name"] == "mine" for r in resources)
    first, second, left, turn, alone = sorted(spans, key=lambda s: s.start_time_unix_nano)
    for span in (first, second, left, turn):
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert alone.trace_id.hex() != TRACE and not alone.parent_span_id
    for span in spans:
        assert span.name == "llm_request" and span.kind == Span.SPAN_KIND_SERVER
        assert span.start_time_unix_nano < span.end_time_unix_nano
        found = attributes(span)
        assert LATENCIES - {"gen_ai.latency.time_in_model_decode"} <= found.keys() or span is left
        assert found["gen_ai.response.model"] == "demo"
    found = [attributes(span) for span in (first, second)]
    assert sum(f["gen_ai.usage.prompt_tokens"] for f in found) == usage["prompt_tokens"]
    for each in found:
        assert each["gen_ai.request.id"].startswith("mine-")
        assert each["gen_ai.usage.completion_tokens"] == 10 and each["gen_ai.request.n"] == 2
        assert each["gen_ai.request.temperature"] == 0.5 and each["gen_ai.request.max_tokens"] == 5
        reasons = [v.string_value for v in each["gen_ai.response.finish_reasons"].values]
        assert reasons == ["length"] * 2
        parts = each["gen_ai.latency.time_in_queue"], each["gen_ai.latency.time_in_model_inference"]
        assert sum(parts) == pytest.approx(each["gen_ai.latency.e2e"])
        assert each["gen_ai.latency.time_to_first_token"] <= each["gen_ai.latency.e2e"]
    assert left.status.code == SpanStatus.STATUS_CODE_ERROR and left.status.message == "abort"
    assert first.status.code == SpanStatus.STATUS_CODE_UNSET


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", "http://"])
def test_an_endpoint_must_speak_http(endpoint) -> None:
    with pytest.raises(InvalidParameterError, match="otlp_traces_endpoint must be a URL"):
        checked_endpoint(endpoint)


def test_endpoints(monkeypatch) -> None:
    assert checked_endpoint("http://a:4318") == "http://a:4318/v1/traces"
    assert checked_endpoint("https://a/b?c=d") == "https://a/b?c=d"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    with pytest.raises(InvalidParameterError, match="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"):
        checked_endpoint("http://a:4318")


def test_without_the_packages_the_extra_is_named(monkeypatch) -> None:
    monkeypatch.setattr("mlx_paged.server.run.serve", lambda *_, **__: 0)
    monkeypatch.setattr("mlx_paged.server.logs.configure", lambda *_: None)
    monkeypatch.delitem(sys.modules, "mlx_paged.server.tracing")
    missing = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, missing, None)
    done = CliRunner().invoke(app, ["serve", "--otlp-traces-endpoint", "http://localhost:4318"])
    assert isinstance(done.exception, MlxPagedError)
    assert "--otlp-traces-endpoint needs" in str(done.exception)
    assert "pip install 'mlx-paged[otel]'" in str(done.exception)
