"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_paged.server.body import read_body
from mlx_paged.server.errors import bad_request
from mlx_paged.server.routing import context_of
from mlx_paged.server.schemas.requests import DetokenizeBody, TokenizeBody


async def tokenize(request: Request) -> Response:
    """Tokens of a prompt, or of messages by the chat template."""
    context = context_of(request)
    context.check_takes_requests()
    body = await read_body(request, TokenizeBody, context.config)
    context.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("prompt", "either prompt or messages must be given")
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        tokens = await context.text.encode(body.prompt, add_special_tokens=special)
    else:
        tokens = await context.text.render_chat(body)
    strings = context.text.token_strings(tokens) if body.return_token_strs else None
    return JSONResponse(
        {
            "count": len(tokens),
            "max_model_len": context.text.max_model_len,
            "tokens": tokens,
            "token_strs": strings,
        }
    )


async def detokenize(request: Request) -> Response:
    """The text of tokens."""
    context = context_of(request)
    context.check_takes_requests()
    body = await read_body(request, DetokenizeBody, context.config)
    context.check_model(body.model)
    return JSONResponse({"prompt": await context.text.decode(body.tokens)})
