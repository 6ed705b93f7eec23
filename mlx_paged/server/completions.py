"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_paged.engine.outputs import PositionReport
from mlx_paged.server.answers import Gathered, head, until_disconnect, usage
from mlx_paged.server.body import read_body
from mlx_paged.server.context import Context
from mlx_paged.server.errors import bad_request
from mlx_paged.server.job import Job
from mlx_paged.server.logprobs import CompletionLogprobs, prompt_logprobs
from mlx_paged.server.params import completion_params
from mlx_paged.server.routing import context_of, trace_of
from mlx_paged.server.schemas.requests import CompletionBody
from mlx_paged.server.sse import EventStream, TextEvent, event


async def completions(request: Request) -> Response:
    """Goes on with prompts, at once or as a stream."""
    context, trace = context_of(request), trace_of(request)
    context.check_takes_requests()
    body = await read_body(request, CompletionBody, context.config)
    context.check_model(body.model)
    trace.note_body(body)
    prompts = _prompts(body)
    params = completion_params(body, context.config, context.defaults, len(prompts))
    context.text.check_tokens("stop_token_ids", params.stop_token_ids or ())
    special = body.add_special_tokens is not False
    tokens = []
    for prompt in prompts:
        encoded = await context.text.prompt_of(prompt, add_special_tokens=special)
        tokens.append(context.text.truncate(encoded, body.truncate_prompt_tokens))
    job = Job(
        context, trace, tokens, params, priority=body.priority or 0, cache_salt=body.cache_salt
    )
    answer = _Answer(context, body, job, await _echoes(context, body, prompts, tokens))
    if not body.stream:
        return JSONResponse(await until_disconnect(request, answer.whole(trace.request_id)))
    await job.submit()
    return EventStream(answer.stream(trace.request_id), trace, context.config.read_timeout)


class _Answer:
    """The answers to all prompts of a body, `n` for each; a choice's index counts through."""

    def __init__(
        self, context: Context, body: CompletionBody, job: Job, echoes: Sequence[str]
    ) -> None:
        self._body = body
        self._job = job
        self._echoes = echoes
        self._text = context.text
        self._model = body.model or context.config.model_name
        self._interval = context.config.stream_interval
        self._n = body.n or 1
        self._wants_logprobs = body.logprobs is not None

    async def whole(self, request_id: str) -> dict[str, Any]:
        body, job = self._body, self._job
        per_prompt = job.params.n
        gathered = [[Gathered() for _ in range(per_prompt)] for _ in job.prompts]
        async with job:
            async for place, delta in job.deltas():
                gathered[place][delta.index].add(delta)
        choices: list[dict[str, Any]] = []
        for place, answers in enumerate(gathered):
            for answer in _likeliest(answers, self._n):
                choice = self._choice(place, len(choices), answer, self._new_logprobs(place))
                if body.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = prompt_logprobs(job.outputs[place].prompt_logprobs)
                choices.append(choice)
        count = sum(len(answer.token_ids) for answers in gathered for answer in answers)
        return {
            **head(request_id, "cmpl", "text_completion", self._model),
            "choices": choices,
            "usage": usage(job, 0 if self._drops_answer else count),
        }

    async def stream(self, request_id: str) -> AsyncIterator[bytes]:
        body, job = self._body, self._job
        chunk = head(request_id, "cmpl", "text_completion", self._model)
        gathered = {(p, i): Gathered() for p in range(len(job.prompts)) for i in range(self._n)}
        logprobs = {key: self._new_logprobs(key[0]) for key in gathered}

        def usage_so_far() -> dict[str, Any]:
            count = sum(answer.num_sent for answer in gathered.values())
            return usage(job, 0 if self._drops_answer else count)

        # What nearly all events are: the next piece of a text.
        tells_more = body.wants_continuous_usage or body.return_token_ids or self._drops_answer
        plain = {} if tells_more else {key: self._text_event(chunk, *key) for key in gathered}
        async with job:
            async for place, delta in job.deltas():
                key = place, delta.index
                waiting = gathered[key]
                waiting.add(delta)
                if not waiting.is_due(self._interval):
                    continue
                news = waiting.take()
                if news.is_plain and key in plain:
                    if text := news.text:  # (else a character is not whole yet)
                        yield plain[key](text)
                    continue
                choice = self._choice(place, place * self._n + delta.index, news, logprobs[key])
                told = choice["text"] or choice["logprobs"] or choice["finish_reason"]
                if not (told or body.return_token_ids):
                    continue  # a character is not whole yet
                parts: dict[str, Any] = {**chunk, "choices": [choice]}
                if body.wants_continuous_usage:
                    parts["usage"] = usage_so_far()
                elif body.wants_usage:
                    parts["usage"] = None
                yield event(parts)
            if body.wants_usage:
                yield event({**chunk, "choices": [], "usage": usage_so_far()})

    def _text_event(self, chunk: dict[str, Any], place: int, index: int) -> TextEvent:
        choice = {
            "index": place * self._n + index,
            "text": TextEvent.TEXT,
            "logprobs": None,
            "finish_reason": None,
        }
        parts: dict[str, Any] = {**chunk, "choices": [choice]}
        return TextEvent({**parts, "usage": None} if self._body.wants_usage else parts)

    @property
    def _drops_answer(self) -> bool:
        """Whether only the prompt is wanted; the engine generates one token all the same."""
        return self._body.max_tokens == 0

    def _new_logprobs(self, place: int) -> CompletionLogprobs:
        as_ids = bool(self._body.return_tokens_as_token_ids)
        first = self._text.tokenizer.decode(self._job.prompts[place][:1])
        return CompletionLogprobs(self._body.logprobs or 0, as_ids=as_ids, first=first)

    def _choice(
        self, place: int, index: int, answer: Gathered, logprobs: CompletionLogprobs
    ) -> dict[str, Any]:
        """A choice, or the next part of one; the first part begins with the prompt if asked for."""
        body = self._body
        begins = bool(body.echo) and answer.num_sent == 0
        text, token_ids = answer.text, list(answer.token_ids)
        reports: list[PositionReport | None] = list(answer.logprobs)
        if self._drops_answer:
            text, token_ids, reports = "", [], []
        if begins:
            text = self._echoes[place] + text
        told = None
        if self._wants_logprobs:
            if begins:
                token_ids = self._job.prompts[place] + token_ids
                reports = [*(self._job.outputs[place].prompt_logprobs or ()), *reports]
            told = logprobs.piece(token_ids, reports)
        reason = answer.finish_reason
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": told,
            "finish_reason": None if reason is None else reason.value,
        }
        if reason is not None:
            choice["stop_reason"] = answer.stop_reason
        if body.return_token_ids:
            choice["token_ids"] = [] if self._drops_answer else answer.token_ids
            if answer.num_sent == 0:
                choice["prompt_token_ids"] = self._job.prompts[place]
        return choice


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("prompt", "prompt must not be empty")
    if isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]
    return prompt  # type: ignore[return-value]


async def _echoes(
    context: Context,
    body: CompletionBody,
    prompts: Sequence[str | list[int]],
    tokens: Sequence[list[int]],
) -> list[str]:
    """The prompts' texts, where they are asked for."""
    if not body.echo:
        return []
    return [
        prompt
        if isinstance(prompt, str) and body.truncate_prompt_tokens is None
        else await context.text.decode(encoded)
        for prompt, encoded in zip(prompts, tokens)
    ]


def _likeliest(answers: list[Gathered], n: int) -> list[Gathered]:
    """The n answers with the highest log-probability per token."""
    if len(answers) == n:
        return answers

    def mean(answer: Gathered) -> float:
        chosen = zip(answer.token_ids, answer.logprobs)
        return sum(r[token].logprob for token, r in chosen) / max(1, len(answer.token_ids))

    return sorted(answers, key=mean, reverse=True)[:n]
