"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_paged.server.answers import Gathered, head, until_disconnect, usage
from mlx_paged.server.body import read_body
from mlx_paged.server.context import Context
from mlx_paged.server.job import Job
from mlx_paged.server.logprobs import chat_logprobs, prompt_logprobs
from mlx_paged.server.params import chat_params
from mlx_paged.server.routing import context_of, trace_of
from mlx_paged.server.schemas.requests import ChatBody
from mlx_paged.server.sse import EventStream, TextEvent, event


async def chat_completions(request: Request) -> Response:
    """Answers a conversation, at once or as a stream."""
    context, trace = context_of(request), trace_of(request)
    context.check_takes_requests()
    body = await read_body(request, ChatBody, context.config)
    context.check_model(body.model)
    trace.note_body(body)
    params = chat_params(body, context.config, context.defaults)
    context.text.check_tokens("stop_token_ids", params.stop_token_ids or ())
    prompt = await context.text.render_chat(body)
    prompt = context.text.truncate(prompt, body.truncate_prompt_tokens)
    job = Job(
        context, trace, [prompt], params, priority=body.priority or 0, cache_salt=body.cache_salt
    )
    if not body.stream:
        return JSONResponse(
            await until_disconnect(request, _whole(context, body, job, trace.request_id))
        )
    await job.submit()
    return EventStream(
        _stream(context, body, job, trace.request_id), trace, context.config.read_timeout
    )


async def _whole(context: Context, body: ChatBody, job: Job, request_id: str) -> dict[str, Any]:
    gathered = [Gathered() for _ in range(job.params.n)]
    async with job:
        async for _, delta in job.deltas():
            gathered[delta.index].add(delta)
    choices = []
    for index, answer in enumerate(gathered):
        message = {
            "role": "assistant",
            "content": _echoed(body) + answer.text,
            "refusal": None,
        }
        choices.append({"index": index, "message": message, **_ending(body, answer)})
    kind = "chat.completion"
    return {
        **head(request_id, "chatcmpl", kind, body.model or context.config.model_name),
        "choices": choices,
        "usage": usage(job, sum(len(answer.token_ids) for answer in gathered)),
        **_of_the_prompt(body, job),
    }


async def _stream(
    context: Context, body: ChatBody, job: Job, request_id: str
) -> AsyncIterator[bytes]:
    model = body.model or context.config.model_name
    chunk = head(request_id, "chatcmpl", "chat.completion.chunk", model)
    interval = context.config.stream_interval
    gathered = [Gathered() for _ in range(job.params.n)]

    def usage_so_far() -> dict[str, Any]:
        return usage(job, sum(answer.num_sent for answer in gathered))

    def part(choice: dict[str, Any]) -> bytes:
        if body.wants_continuous_usage:
            return event({**chunk, "choices": [choice], "usage": usage_so_far()})
        if body.wants_usage:
            return event({**chunk, "choices": [choice], "usage": None})
        return event({**chunk, "choices": [choice]})

    def text_event(index: int) -> TextEvent:
        choice = {
            "index": index,
            "delta": {"content": TextEvent.TEXT},
            "logprobs": None,
            "finish_reason": None,
        }
        parts: dict[str, Any] = {**chunk, "choices": [choice]}
        return TextEvent({**parts, "usage": None} if body.wants_usage else parts)

    # What nearly all events are: the next piece of a text.
    tells_more = body.wants_continuous_usage or body.return_token_ids or body.logprobs
    plain = [] if tells_more else [text_event(index) for index in range(job.params.n)]
    async with job:
        for index in range(job.params.n):
            first = {"role": "assistant", "content": _echoed(body)}
            yield part({"index": index, "delta": first, "logprobs": None, "finish_reason": None})
        async for _, delta in job.deltas():
            waiting = gathered[delta.index]
            waiting.add(delta)
            if not waiting.is_due(interval):
                continue
            news = waiting.take()
            text = news.text
            if plain and news.is_plain:
                if text:
                    yield plain[delta.index](text)
                continue
            if not (text or news.logprobs or news.finish_reason or body.return_token_ids):
                continue  # a character is not whole yet
            content = {"content": text} if text or news.finish_reason is None else {}
            yield part({"index": delta.index, "delta": content, **_ending(body, news)})
        if body.wants_usage:
            yield event({**chunk, "choices": [], "usage": usage_so_far()})


def _ending(body: ChatBody, answer: Gathered) -> dict[str, Any]:
    """What a choice tells besides its text."""
    logprobs = None
    if body.logprobs:
        as_ids = bool(body.return_tokens_as_token_ids)
        logprobs = chat_logprobs(
            answer.token_ids, answer.logprobs, body.top_logprobs or 0, as_ids=as_ids
        )
    reason = answer.finish_reason
    ending: dict[str, Any] = {
        "logprobs": logprobs,
        "finish_reason": None if reason is None else reason.value,
    }
    if reason is not None:
        ending["stop_reason"] = answer.stop_reason
    if body.return_token_ids:
        ending["token_ids"] = answer.token_ids
    return ending


def _of_the_prompt(body: ChatBody, job: Job) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if body.prompt_logprobs is not None:
        told["prompt_logprobs"] = prompt_logprobs(job.outputs[0].prompt_logprobs)
    if body.return_token_ids:
        told["prompt_token_ids"] = job.prompts[0]
    return told


def _echoed(body: ChatBody) -> str:
    """The last message, where the answer is asked to begin with it."""
    last = body.messages[-1]
    if not body.echo or last.role != "assistant" or last.content is None:
        return ""
    if isinstance(last.content, str):
        return last.content
    return "\n".join(part.text or "" for part in last.content)
