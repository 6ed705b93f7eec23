"""`POST /api/embed` and `POST /api/embeddings`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_paged.engine.pooling.params import PoolingParams
from mlx_paged.server.context import context_of
from mlx_paged.server.embeddings import Embeddings
from mlx_paged.server.errors import context_exceeded
from mlx_paged.server.lazy_json import Lazy
from mlx_paged.server.ollama.answers import EmbedAnswer, EmbeddingsAnswer
from mlx_paged.server.ollama.bodies import EmbedBody, EmbeddingsBody, ModelRequest
from mlx_paged.server.ollama.endpoints import nanoseconds
from mlx_paged.server.pooling import check_embeds
from mlx_paged.server.pooling_bodies import PoolingRequest
from mlx_paged.server.requests import read_body
from mlx_paged.server.served_model import ServedModel
from mlx_paged.server.streaming import json_response, unless_disconnected


async def embed(request: Request) -> Response:
    """Embeds texts as vectors of length 1."""
    started = time.monotonic()
    body = await read_body(request, EmbedBody)
    model = context_of(request).models.of(body.model)
    loaded = time.monotonic()
    texts = [body.input] if isinstance(body.input, str) else body.input or []
    params = PoolingParams(normalize=True, dimensions=body.dimensions or None)
    run = await _embedded(
        request, model, body, "input", [text for text in texts if text], params,
        cuts=body.truncate is not False,
    )  # fmt: skip
    answer: EmbedAnswer = {
        "model": body.model or model.name,
        "embeddings": Lazy.list(vector.tolist() for vector in run.vectors),
        "total_duration": nanoseconds(started, time.monotonic()),
        "load_duration": nanoseconds(started, loaded),
        "prompt_eval_count": run.num_tokens,
    }
    return await json_response(answer)


async def embeddings(request: Request) -> Response:
    """Embeds one text without normalizing the vector."""
    body = await read_body(request, EmbeddingsBody)
    model = context_of(request).models.of(body.model)
    texts = [body.prompt] if body.prompt else []
    params = PoolingParams(normalize=False)
    run = await _embedded(request, model, body, "prompt", texts, params, cuts=True)
    answer: EmbeddingsAnswer = {"embedding": run.vectors[0].tolist() if texts else []}
    return JSONResponse(answer)


async def _embedded(
    request: Request,
    model: ServedModel,
    body: ModelRequest,
    field: str,
    texts: Sequence[str],
    params: PoolingParams,
    *,
    cuts: bool,
) -> Embeddings:
    """Embeds texts.

    Args:
        field: Their field in the body, for errors.
        cuts: Cut the ends of long texts instead of refusing them.

    Raises:
        ApiError: 400 for a text that is too long; see also `Embeddings`.
    """
    check_embeds(model)
    limit = model.info.max_request_len
    if body.options is not None and body.options.num_ctx is not None:
        limit = min(limit, body.options.num_ctx)
    common = PoolingRequest.model_validate(
        {
            "model": body.model,
            "truncate_prompt_tokens": limit if cuts else None,
            "truncation_side": "right",
        }
    )
    run = Embeddings(request, model, common, params)
    # A text is at least this long in characters if any of its tokens is cut.
    longest = model.renderer.max_characters if cuts else None
    await run.add(field, [text[:longest] for text in texts])
    for index, count in enumerate(run.lengths):
        if count > limit:
            raise context_exceeded(limit, f"text {index} of {field} has {count}", field)
    await unless_disconnected(request, run.finish())
    return run
