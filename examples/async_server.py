"""The engine in an application of one's own, here of Starlette: it streams answers as plain text.

$ uvicorn --app-dir examples async_server:app --port 8001
$ curl -N 'http://127.0.0.1:8001/write?what=Reverse+a+string'

The variable MODEL names another model than the embedded one.
"""

import contextlib
import os
from collections.abc import AsyncIterator

from mlx_paged import AsyncEngine, SamplingParams
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route


async def write(request: Request) -> StreamingResponse:
    """Streams the answer. A client that leaves ends its request, and its blocks are free again."""
    engine: AsyncEngine = request.app.state.engine
    messages = [{"role": "user", "content": request.query_params["what"]}]
    prompt = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    stream = await engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=200))

    async def text() -> AsyncIterator[str]:
        async with stream:
            async for delta in stream:
                yield delta.text

    return StreamingResponse(text(), media_type="text/plain")


async def load(request: Request) -> JSONResponse:
    stats = await request.app.state.engine.stats()
    return JSONResponse({"running": stats.num_running, "waiting": stats.num_waiting})


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with AsyncEngine.from_model(os.environ.get("MODEL"), max_num_seqs=64) as engine:
        app.state.engine = engine
        yield


app = Starlette(routes=[Route("/write", write), Route("/load", load)], lifespan=lifespan)
