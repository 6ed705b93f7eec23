"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_paged.server.body import read_body
from mlx_paged.server.errors import bad_request
from mlx_paged.server.routing import context_of
from mlx_paged.server.schemas.requests import DetokenizeBody, TokenizeBody

_OF_CHATS = (
    "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs",
)  # fmt: skip


async def tokenize(request: Request) -> Response:
    """Tokens of a prompt, or of messages by the chat template."""
    context = context_of(request)
    context.check_takes_requests()
    body = await read_body(request, TokenizeBody, context.config)
    context.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("prompt", "either prompt or messages must be given")
    if body.tools:
        raise bad_request("tools", "tools is not supported yet by this server")
    if body.prompt is not None:
        for name in _OF_CHATS:
            if getattr(body, name) is not None:
                raise bad_request(name, f"{name} is about messages and means nothing to a prompt")
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
