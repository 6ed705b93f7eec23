"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlx_paged.engine.outputs import CompletionOutput
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.server import requests, responses
from mlx_paged.server.config import GenerationDefaults, ServerConfig
from mlx_paged.server.context import context_of
from mlx_paged.server.errors import bad_request
from mlx_paged.server.generation import Generation, Piece
from mlx_paged.server.responses import Lazy
from mlx_paged.server.streaming import OpenAIAdapter, respond


async def chat_completions(request: Request) -> Response:
    """Answers a conversation, at once or as a stream."""
    body = await requests.read_body(request, requests.ChatBody)
    context = context_of(request)
    params = chat_params(body, context.config, context.defaults)
    prompt = await context.renderer.render(requests.conversation_of(body))
    prompt = context.renderer.truncate(prompt, body.truncate_prompt_tokens, params.max_tokens)
    generation = Generation(
        request,
        [prompt],
        params,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
    )
    return await respond(request, ChatAdapter(generation, body), stream=bool(body.stream))


def chat_params(
    body: requests.ChatBody, config: ServerConfig, defaults: GenerationDefaults
) -> SamplingParams:
    """The sampling parameters of a body."""
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs", "top_logprobs needs logprobs to be true")
    requests.check_logprobs("top_logprobs", body.top_logprobs, config)
    return requests.sampling_params(
        body,
        config,
        defaults,
        max_tokens=requests.max_tokens_of(body),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


class ChatAdapter(OpenAIAdapter):
    """Each of the n sequences is a choice, and its text the content of a message."""

    def __init__(self, generation: Generation, body: requests.ChatBody) -> None:
        super().__init__(generation, body, "chatcmpl")
        self._body = body
        self._echo = _echo(body)

    def whole(self) -> responses.ChatAnswer:
        [output] = self.generation.outputs
        whole: responses.ChatAnswer = {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": responses.FINGERPRINT,
            "choices": Lazy.list(map(self._whole_choice, output.outputs)),
            "usage": self.whole_usage(),
        }
        if self._body.prompt_logprobs is not None:
            whole["prompt_logprobs"] = responses.prompt_logprobs(output.prompt_logprobs)
        if self.return_token_ids:
            whole["prompt_token_ids"] = self.generation.prompts[0]
        return whole

    def _whole_choice(self, answer: CompletionOutput) -> responses.ChatChoice:
        piece = Piece.whole(0, answer)
        assert piece.finish_reason is not None
        choice: responses.ChatChoice = {
            "index": piece.index,
            "message": {
                "role": "assistant",
                "content": self._echo + piece.text,
                "refusal": None,
            },
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
        }
        self.add_ending(choice, piece)
        return choice

    def begin(self) -> Iterable[bytes]:
        for index in range(self.generation.params.n):
            yield self.event(
                {
                    "index": index,
                    "delta": {"role": "assistant", "content": self._echo},
                    "logprobs": None,
                    "finish_reason": None,
                }
            )

    def choice(self, piece: Piece) -> responses.ChunkChoice:
        text = piece.text
        choice: responses.ChunkChoice = {
            "index": piece.index,
            "delta": {"content": text} if text or piece.finish_reason is None else {},
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
        }
        self.add_ending(choice, piece)
        return choice

    def chunk(self, choices: list[Any]) -> responses.ChatChunk:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": responses.FINGERPRINT,
            "choices": choices,
        }

    def _logprobs(self, piece: Piece) -> responses.ChatLogprobs | None:
        body = self._body
        if not body.logprobs:
            return None
        as_ids = bool(body.return_tokens_as_token_ids)
        content = responses.chat_logprobs(piece.logprobs, body.top_logprobs or 0, as_ids=as_ids)
        return {"content": Lazy.list(content), "refusal": None}


def _echo(body: requests.ChatBody) -> str:
    """The last message, where the answer is to begin with it (`echo`)."""
    last = body.messages[-1]
    if not body.echo or last.role != "assistant" or last.content is None:
        return ""
    if isinstance(last.content, str):
        return last.content
    return "\n".join(part.text or "" for part in last.content)
