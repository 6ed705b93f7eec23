"""Endpoints that do not generate: models, tokens, health, versions, metrics, a reset."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from datetime import UTC, datetime

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_paged import __version__, extension
from mlx_paged.engine.media import image_types
from mlx_paged.engine.stats import EngineStats
from mlx_paged.errors import EngineDeadError
from mlx_paged.parsing.derived import DerivedFormat
from mlx_paged.server import documents, responses
from mlx_paged.server.bodies import DetokenizeBody, DocumentBody, TokenizeBody
from mlx_paged.server.context import Context, Phase, context_of, server_context_of
from mlx_paged.server.conversions import conversation_of
from mlx_paged.server.errors import bad_request, speaks_anthropic
from mlx_paged.server.messages.answers import ModelInfo, ModelPage
from mlx_paged.server.requests import read_body
from mlx_paged.server.served_model import ServedModel
from mlx_paged.server.streaming import json_response
from mlx_paged.server.turn_preparation import check_takes_tools

# Seconds to wait for the engine's statistics, because a step may be long.
_STATS_TIMEOUT = 2.0
_OF_CHATS = (
    "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs",
    "tools",
)  # fmt: skip


async def models(request: Request) -> Response:
    """All names of the model."""
    context = context_of(request)
    names = context.models.names
    if speaks_anthropic(request.scope):
        return JSONResponse(
            ModelPage(
                data=[_model_info(context, name) for name in names],
                has_more=False,
                first_id=names[0],
                last_id=names[-1],
            )
        )
    data = [_model(context, name) for name in names]
    return JSONResponse(responses.ModelList(object="list", data=data))


async def model(request: Request) -> Response:
    """One name of the model."""
    context = context_of(request)
    name = context.models.find(request.path_params["model"]).name
    if speaks_anthropic(request.scope):
        return JSONResponse(_model_info(context, name))
    return JSONResponse(_model(context, name))


def model_info(name: str, started: float) -> ModelInfo:
    """Returns a model's entry for Anthropic's clients, without its lengths.

    Args:
        started: Unix time of the server's start.
    """
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(int(started), UTC).isoformat(),
        "lifecycle": "active",
    }


def _model_info(context: Context, name: str) -> ModelInfo:
    found = model_info(name, context.started)
    model = context.models.of(name)
    if model.is_loaded:
        found["max_input_tokens"] = found["max_tokens"] = model.renderer.max_model_len
    return found


def _model(context: Context, name: str) -> responses.Model:
    model = context.models.of(name)
    found: responses.Model = {
        "id": name,
        "object": "model",
        "created": int(context.started),
        "owned_by": "mlx-paged",
        "root": model.name,
        "parent": None,
    }
    if model.lora_request is not None:
        found["root"], found["parent"] = model.lora_request.lora_path, model.name
    if model.is_loaded:
        found["max_model_len"] = model.renderer.max_model_len
        # The same field as OpenRouter's.
        found["input_modalities"] = list(model.input_modalities)
    return found


def _media(served: ServedModel) -> responses.MediaInfo:
    """Returns the media the model takes, and their limits; once it is loaded."""
    options = served.info.config.media_options
    return {
        "kinds": {
            kind: {
                "max_items": options.max_items(kind),
                "max_bytes": options.limits.max_bytes(kind),
            }
            for kind in served.media_kinds
        },
        "max_image_pixels": options.limits.max_image_pixels,
        "image_types": image_types(),
        "reason": served.info.media_reason,
        "pdf": {
            "max_bytes": documents.MAX_BYTES,
            "max_pages": documents.MAX_PAGES,
            "reason": documents.missing_pdf(),
        },
    }


async def extract_text(request: Request) -> Response:
    """The text of a PDF."""
    body = await read_body(request, DocumentBody)
    text, num_pages = await server_context_of(request).documents.text_of(
        documents.decoded(body.data, "data"), "data"
    )
    return await json_response(responses.DocumentText(text=text, num_pages=num_pages))


async def tokenize(request: Request) -> Response:
    """Tokens of a prompt, or of messages by the chat template."""
    body = await read_body(request, TokenizeBody)
    model = context_of(request).models.of(body.model)
    renderer = model.renderer
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("prompt", "either prompt or messages must be given")
    if body.prompt is not None:
        for name in _OF_CHATS:
            if getattr(body, name) is not None:
                raise bad_request(name, f"{name} is about messages and means nothing to a prompt")
        special = body.add_special_tokens is not False
        tokens = await renderer.encode(body.prompt, add_special_tokens=special)
    else:
        conversation = conversation_of(body, model.media_io)
        if conversation.tools:
            check_takes_tools(model)
        tokens = await renderer.render(conversation)
    answer: responses.Tokens = {
        "count": len(tokens),
        "max_model_len": renderer.max_model_len,
        "tokens": tokens,
        "token_strs": await renderer.token_strings(tokens) if body.return_token_strs else None,
    }
    return await json_response(answer)


async def detokenize(request: Request) -> Response:
    """The text of tokens."""
    body = await read_body(request, DetokenizeBody)
    renderer = context_of(request).models.of(body.model).renderer
    return JSONResponse(responses.Text(prompt=await renderer.decode(body.tokens)))


async def health(request: Request) -> Response:
    """200 while requests are answered; 503 while the model loads and when the engine is dead."""
    return _status(request, Phase.READY, Phase.DRAINING)


async def live(request: Request) -> Response:
    """200 unless the engine is dead and the process should be replaced."""
    return _status(request, Phase.LOADING, Phase.READY, Phase.DRAINING)


async def ready(request: Request) -> Response:
    """200 while new requests are accepted; 503 also while system memory is critically low."""
    context = context_of(request)
    if context.phase is Phase.READY and context.models.default.engine.refuses_requests:
        return JSONResponse(responses.Status(status="short_of_memory"), 503)
    return _status(request, Phase.READY)


def _status(request: Request, *good: Phase) -> Response:
    phase = server_context_of(request).phase
    return JSONResponse(responses.Status(status=phase.value), 200 if phase in good else 503)


async def version(_: Request) -> Response:
    """Versions of this package and of MLX and mlx-lm."""
    build = extension.build_info()
    answer: responses.Version = {
        "version": __version__,
        "mlx_version": build["mlx_version"],
        "mlx_lm_version": build["mlx_lm_version"],
        "backends": build["backends"],
    }
    return JSONResponse(answer)


async def metrics(request: Request) -> Response:
    """Prometheus's text format."""
    context = context_of(request)
    stats = await _stats(context)
    return Response(context.metrics.render(stats), media_type=CONTENT_TYPE_LATEST)


async def load(request: Request) -> Response:
    """Requests for answers that have not ended, as in vLLM."""
    return JSONResponse(responses.Load(server_load=server_context_of(request).metrics.server_load))


async def server_info(request: Request) -> Response:
    """Options in force, and the state of the engine."""
    context = context_of(request)
    answer: responses.ServerInfo = {
        "version": __version__,
        "status": context.phase.value,
        "uptime_seconds": round(time.time() - context.started, 1),
        # The number of keys, never the keys.
        "config": {**asdict(context.config), "api_keys": len(context.config.api_keys)},
        "build": extension.build_info(),
    }
    stats = await _stats(context)
    if stats is not None:
        model = context.models.default
        answer["generation_defaults"] = asdict(model.defaults)
        answer["engine_config"] = asdict(model.info.config)
        answer["parsing"] = _parsing(model)
        answer["media"] = _media(model)
        # The value in effect: None means that it depends on the model.
        answer["config"]["max_body_size"] = model.max_body_size
        answer["stats"] = asdict(stats)
    return JSONResponse(answer)


def _parsing(model: ServedModel) -> responses.ParsingInfo:
    tools, reasoning = model.tool_format, model.reasoning_format
    return {
        "tool_calls": next(iter(tools.names), "derived") if tools is not None else None,
        "tool_call_syntax": str(tools) if isinstance(tools, DerivedFormat) else None,
        "no_tool_calls": model.no_tool_format or None,
        "reasoning": reasoning.name if reasoning is not None else None,
        "reasoning_markers": [reasoning.start, reasoning.end] if reasoning is not None else None,
    }


async def reset_prefix_cache(request: Request) -> Response:
    """Drops every cached prefix."""
    context = context_of(request)
    context.check_takes_requests()
    try:
        counts = [await model.engine.reset_prefix_cache() for model in context.models]
        return JSONResponse(responses.Reset(num_blocks=sum(counts)))
    except EngineDeadError:
        context.check_takes_requests()
        raise


async def _stats(context: Context) -> EngineStats | None:
    if context.phase is not Phase.READY:
        return None
    try:
        async with asyncio.timeout(_STATS_TIMEOUT):
            return await context.models.default.engine.stats()
    except (TimeoutError, EngineDeadError):
        return None
