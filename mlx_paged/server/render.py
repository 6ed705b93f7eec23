"""`/v1/chat/completions/render` and `/v1/completions/render`: a request as the model gets it.

The answer is vLLM's `GenerateRequest`: token ids and sampling parameters. Nothing is generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12.

from mlx_paged.engine.media import PreparedMedia
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import RequestTooLargeError
from mlx_paged.server.bodies import GenerationBody
from mlx_paged.server.chat import prepared_chat
from mlx_paged.server.completions import prepared_completion
from mlx_paged.server.context import context_of, request_log_of
from mlx_paged.server.lazy_json import Lazy
from mlx_paged.server.streaming import json_response


class Placeholder(TypedDict):
    """The positions of an item in a prompt."""

    offset: int
    length: int


class Features(TypedDict):
    """Images, videos and sounds of a prompt by kind: digests of their content, and positions."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[Placeholder]]
    kwargs_data: None
    mm_metadata: None


class GenerateRequest(TypedDict):
    """A prompt as the model gets it."""

    request_id: str
    token_ids: list[int]
    features: Features | None
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    stream_options: dict[str, Any] | None
    cache_salt: str | None
    priority: int
    kv_transfer_params: None


async def render_chat(request: Request) -> Response:
    """The prompt of a conversation."""
    body, turn, prompt = await prepared_chat(request)
    name = f"chatcmpl-{request_log_of(request).request_id}"
    return await json_response(_rendered(request, body, turn.params, name, prompt, turn.media))


async def render_completion(request: Request) -> Response:
    """The prompts of a completion, in a list."""
    body, params, _, prompts = await prepared_completion(request)
    name = f"cmpl-{request_log_of(request).request_id}"
    found = (
        _rendered(request, body, params, f"{name}-{i}", prompt) for i, prompt in enumerate(prompts)
    )
    return await json_response(Lazy.list(list(found)))


def _rendered(
    request: Request,
    body: GenerationBody,
    params: SamplingParams,
    request_id: str,
    prompt: Sequence[int],
    media: PreparedMedia | None = None,
) -> GenerateRequest:
    """One prompt.

    Raises:
        RequestTooLargeError: It does not fit.
    """
    model = context_of(request).models.of(body.model)
    options = body.stream_options
    return {
        "request_id": request_id,
        "token_ids": list(prompt),
        "features": None if media is None else _features(media),
        "sampling_params": _parameters(params, len(prompt), model.renderer.max_model_len),
        "model": body.model or model.name,
        "stream": bool(body.stream),
        "stream_options": None if options is None else options.model_dump(exclude_none=True),
        "cache_salt": body.cache_salt,
        "priority": body.priority or 0,
        "kv_transfer_params": None,
    }


def _parameters(params: SamplingParams, num_prompt: int, limit: int | None) -> dict[str, Any]:
    """Returns how an answer would be generated, with the room that the context has for it."""
    given = params.structured_outputs
    found = {**asdict(params), "structured_outputs": None}
    if given is not None:
        fields = given if isinstance(given, Mapping) else asdict(given)
        found["structured_outputs"] = {
            name: value for name, value in fields.items() if value not in (None, False)
        }
    if limit is not None:
        wanted = params.max_tokens or max(1, params.min_tokens)
        if num_prompt + wanted > limit:
            raise RequestTooLargeError(
                "", num_prompt_tokens=num_prompt, max_tokens=wanted, limit=limit,
                limited_by="max_model_len",
            )  # fmt: skip
        found["max_tokens"] = params.max_tokens or limit - num_prompt
    return found


def _features(media: PreparedMedia) -> Features:
    hashes: dict[str, list[str]] = {}
    placeholders: dict[str, list[Placeholder]] = {}
    for span, key in zip(media.prompt.spans, media.spans, strict=True):
        kind = str(span.kind)
        hashes.setdefault(kind, []).append(key.key.hex())
        placeholders.setdefault(kind, []).append({"offset": span.offset, "length": span.length})
    return {
        "mm_hashes": hashes,
        "mm_placeholders": placeholders,
        "kwargs_data": None,
        "mm_metadata": None,
    }
