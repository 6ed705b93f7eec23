"""OpenTelemetry spans of requests, sent to a collector by OTLP over HTTP.

A request of the engine is a span ``llm_request`` with vLLM's attributes, a child of the span that
the client's ``traceparent`` header names. Importing this needs the extra `otel`. The SDK's own
variables hold, such as OTEL_SERVICE_NAME, OTEL_EXPORTER_OTLP_HEADERS and OTEL_TRACES_SAMPLER.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers

from mlx_paged import __version__
from mlx_paged.core import FinishReason
from mlx_paged.engine.outputs import RequestOutput
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import InvalidParameterError

#: Headers that name the span of a client.
CARRIED = ("traceparent", "tracestate")
_SPAN = "llm_request"
_PATH = "/v1/traces"
# Seconds that the last spans have at the server's end.
_GOODBYE = 3.0
_FAILED = frozenset({FinishReason.ERROR, FinishReason.TIMEOUT, FinishReason.ABORT})


def checked_endpoint(endpoint: str) -> str:
    """Returns the URL that spans are sent to.

    Raises:
        InvalidParameterError: It is none, or another protocol is asked for.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidParameterError(
            "otlp_traces_endpoint",
            "a URL of a collector for OTLP over HTTP, such as http://localhost:4318/v1/traces",
            endpoint,
        )
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = os.environ.get(name, "http/protobuf")
        if protocol != "http/protobuf":
            raise InvalidParameterError(name, "'http/protobuf', the protocol served", protocol)
    return parts._replace(path=_PATH if parts.path in ("", "/") else parts.path).geturl()


class Tracing:
    """Makes spans, and sends them from its own thread.

    Args:
        endpoint: URL of the collector.
        model_name: The model's name in answers.
    """

    def __init__(self, endpoint: str, model_name: str) -> None:
        resource = Resource.create(
            {
                SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "mlx-paged"),
                SERVICE_VERSION: __version__,
            }
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=checked_endpoint(endpoint))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("mlx_paged.server", __version__)
        self._context = TraceContextTextMapPropagator()
        self._model_name = model_name

    def record(
        self,
        output: RequestOutput,
        reason: FinishReason,
        headers: Headers,
        params: SamplingParams | None,
    ) -> None:
        """Makes the span of a request that has ended.

        Args:
            reason: Why it ended.
            headers: Headers of the client's request.
            params: Its sampling parameters; None if it was pooled.
        """
        now, wall = time.monotonic(), time.time_ns()
        times = output.metrics
        end = now if times.finished_time is None else times.finished_time
        carried = {name: headers[name] for name in CARRIED if name in headers}

        def nanoseconds(moment: float) -> int:
            return wall - int((now - moment) * 1e9)

        span = self._tracer.start_span(
            _SPAN,
            context=self._context.extract(carried),
            kind=SpanKind.SERVER,
            start_time=nanoseconds(times.arrival_time),
        )
        span.set_attributes(self._attributes(output, reason, params, end))
        if reason in _FAILED:
            span.set_status(Status(StatusCode.ERROR, reason.value))
        span.end(nanoseconds(end))

    def _attributes(
        self,
        output: RequestOutput,
        reason: FinishReason,
        params: SamplingParams | None,
        end: float,
    ) -> dict[str, Any]:
        times = output.metrics
        arrival, scheduled, first = (
            times.arrival_time, times.scheduled_time, times.first_token_time,
        )  # fmt: skip
        found: dict[str, Any] = {
            "gen_ai.request.id": output.request_id,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.finish_reasons": [
                (answer.finish_reason or reason).value for answer in output.outputs
            ],
            "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids),
            "gen_ai.usage.completion_tokens": sum(len(a.token_ids) for a in output.outputs),
            "gen_ai.usage.num_sequences": len(output.outputs),
            "gen_ai.latency.e2e": end - arrival,
        }
        if params is not None:
            found |= {
                f"gen_ai.request.{name}": getattr(params, name)
                for name in (
                    "n", "max_tokens", "temperature", "top_p", "top_k", "min_p",
                    "repetition_penalty", "presence_penalty", "frequency_penalty",
                )
                if getattr(params, name) is not None
            }  # fmt: skip
        if scheduled is not None:
            found["gen_ai.latency.time_in_queue"] = scheduled - arrival
            found["gen_ai.latency.time_in_model_inference"] = end - scheduled
        if scheduled is not None and first is not None:
            found["gen_ai.latency.time_to_first_token"] = first - arrival
            found["gen_ai.latency.time_in_model_prefill"] = first - scheduled
            found["gen_ai.latency.time_in_model_decode"] = end - first
        return found

    async def close(self) -> None:
        """Sends the remaining spans, for at most a few seconds."""
        # A daemon thread, because a collector that does not answer must not delay the exit.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, _GOODBYE)
