"""`POST /v1/completions`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlx_paged.engine.outputs import CompletionOutput, PositionReport
from mlx_paged.engine.request_stream import MAX_UPDATES
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.server import logprobs, responses
from mlx_paged.server.bodies import CompletionBody
from mlx_paged.server.config import MAX_SEQUENCES_PER_REQUEST, GenerationDefaults, ServerConfig
from mlx_paged.server.context import context_of
from mlx_paged.server.conversation import Renderer
from mlx_paged.server.conversions import check_logprobs, max_tokens_of, sampling_params
from mlx_paged.server.errors import bad_request
from mlx_paged.server.generation import Generation, Piece
from mlx_paged.server.lazy_json import Lazy
from mlx_paged.server.requests import read_body
from mlx_paged.server.streaming import OpenAIAdapter, respond
from mlx_paged.server.tool_requests import names_of, structured_outputs_of

_MAX_TOKENS = 16


async def completions(request: Request) -> Response:
    """Completes prompts, as a whole or as a stream."""
    body, echoes, generation = await prepared_generation(request, CompletionBody)
    adapter = CompletionAdapter(generation, body, echoes)
    return await respond(request, adapter, stream=bool(body.stream))


async def prepared_generation(
    request: Request, kind: type[CompletionBody]
) -> tuple[CompletionBody, list[str], Generation]:
    """Returns a body, the beginnings of its answers (`echo`), and a generation not submitted yet.

    Args:
        kind: The body's type.

    Raises:
        ApiError, MlxPagedError: See `prepared_completion`.
    """
    body, params, prompts, tokens = await prepared_completion(request, kind)
    model = context_of(request).models.of(body.model)
    generation = Generation(
        request,
        model,
        tokens,
        params,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        stream_interval=body.stream_interval,
        names=names_of(body),
    )
    return body, await _echoes(model.renderer, body, prompts, tokens), generation


async def prepared_completion(
    request: Request, kind: type[CompletionBody] = CompletionBody
) -> tuple[CompletionBody, SamplingParams, list[str | list[int]], list[list[int]]]:
    """Returns the body of a completion, its parameters, its prompts, and their tokens.

    Raises:
        ApiError, MlxPagedError: See `read_body`, `completion_params` and `Renderer.encode`.
    """
    body = await read_body(request, kind)
    context = context_of(request)
    model = context.models.of(body.model)
    prompts = _prompts(body)
    params = completion_params(body, context.config, model.defaults, len(prompts))
    special = body.add_special_tokens is not False
    tokens = []
    for prompt in prompts:
        encoded = await model.renderer.encode(prompt, add_special_tokens=special)
        tokens.append(
            model.renderer.truncate(
                encoded, body.truncate_prompt_tokens, params.max_tokens, body.truncation_side
            )
        )
    return body, params, prompts, tokens


def completion_params(
    body: CompletionBody, config: ServerConfig, defaults: GenerationDefaults, num_prompts: int
) -> SamplingParams:
    """Returns the sampling parameters of a body, the same for all its prompts."""
    if body.suffix:
        raise bad_request(
            "suffix", "suffix is not supported by this server", "unsupported_parameter"
        )
    max_tokens = max_tokens_of(body)
    if max_tokens is None:
        max_tokens = _MAX_TOKENS
    if max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens", "max_tokens must be at least 1, or 0 with echo")
    check_logprobs("logprobs", body.logprobs, config)
    n, best_of = body.n or 1, body.best_of or body.n or 1
    if best_of < n:
        raise bad_request("best_of", f"best_of must be at least n ({n}) but got {best_of}")
    if best_of > n and body.stream:
        raise bad_request("best_of", "best_of above n cannot be streamed")
    if num_prompts * best_of > MAX_SEQUENCES_PER_REQUEST:
        raise bad_request(
            "prompt" if num_prompts > 1 else "best_of" if body.best_of else "n",
            f"a request may have at most {MAX_SEQUENCES_PER_REQUEST} answers, prompts times n (or "
            f"best_of), but asks for {num_prompts * best_of}",
        )
    logprobs = body.logprobs
    if best_of > n and logprobs is None:
        logprobs = 0  # to find the best
    of_prompt = body.prompt_logprobs
    if body.echo and body.logprobs is not None and of_prompt is None:
        of_prompt = body.logprobs
    return sampling_params(
        body,
        config,
        defaults,
        n=best_of,
        max_tokens=max(1, max_tokens),
        logprobs=logprobs,
        prompt_logprobs=of_prompt,
        structured_outputs=structured_outputs_of(body),
    )


class CompletionAdapter(OpenAIAdapter):
    """The answers to all prompts of a body, `n` for each, with consecutive indices of choices.

    Args:
        echoes: Beginnings of the answers to each prompt; empty unless `echo` is set.
    """

    def __init__(self, generation: Generation, body: CompletionBody, echoes: Sequence[str]) -> None:
        super().__init__(generation, body, "cmpl")
        self._body = body
        self._echoes = echoes
        self._n = body.n or 1
        # Only the prompt is requested. The engine generates one token anyway.
        self._drops_answer = body.max_tokens == 0
        self._logprobs: dict[tuple[int, int], logprobs.CompletionLogprobs] = {}

    def whole(self) -> responses.CompletionAnswer:
        whole = self.chunk(Lazy.list(self._whole_choices()))
        whole["usage"] = self.whole_usage()
        return whole

    def _whole_choices(self) -> Iterator[responses.CompletionChoice]:
        count = itertools.count()
        for index, output in enumerate(self.generation.outputs):
            for answer in _likeliest(output.outputs, self._n):
                piece = self._asked(Piece.whole(index, answer))
                reports = self._prompt_reports(index) + list(piece.logprobs)
                choice = self._choice(piece, self._echo(index) + piece.text, reports)
                choice["index"] = next(count)
                if self._body.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = logprobs.prompt_logprobs(output.prompt_logprobs)
                yield choice

    def piece(self, piece: Piece) -> Iterable[bytes]:
        piece = self._asked(piece)
        if self._echoes and not piece.num_before:
            # The log-probabilities of the prompt come first: each has its offset in the text.
            echo = list(self._echo_events(piece))
            return itertools.chain(echo, super().piece(piece))
        return super().piece(piece)

    def keepalive(self) -> Iterable[bytes]:
        choice: responses.CompletionChoice = {
            "index": 0, "text": "", "logprobs": None, "finish_reason": None,
        }  # fmt: skip
        yield self.event(choice)

    def _echo_events(self, piece: Piece) -> Iterator[bytes]:
        """Yields the events of the prompt; its log-probabilities may take several."""
        text, reports = self._echo(piece.prompt), self._prompt_reports(piece.prompt)
        for begin in range(0, max(1, len(reports)), MAX_UPDATES):
            part = Piece(piece.prompt, piece.index, begin)
            yield self.event(self._choice(part, text, reports[begin : begin + MAX_UPDATES]))
            text = ""

    def _asked(self, piece: Piece) -> Piece:
        """Drops a piece's answer if only the prompt is requested."""
        if self._drops_answer:
            piece.texts, piece.token_ids, piece.logprobs = [], [], []
        return piece

    def _echo(self, prompt: int) -> str:
        return self._echoes[prompt] if self._echoes else ""

    def _prompt_reports(self, prompt: int) -> list[PositionReport | None]:
        """Returns log-probabilities of the prompt's tokens, if the answer has them."""
        if not self._body.echo or self._body.logprobs is None:
            return []
        return list(self.generation.outputs[prompt].prompt_logprobs or ())

    def usage(self, num_completion_tokens: int) -> responses.Usage:
        return super().usage(0 if self._drops_answer else num_completion_tokens)

    def choice(self, piece: Piece) -> responses.CompletionChoice:
        return self._choice(piece, piece.text, piece.logprobs)

    def _choice(
        self, piece: Piece, text: str, reports: Sequence[PositionReport | None]
    ) -> responses.CompletionChoice:
        choice: responses.CompletionChoice = {
            "index": piece.prompt * self._n + piece.index,
            "text": text,
            "logprobs": self._logprobs_of(piece, reports),
            "finish_reason": piece.finish_reason,
        }
        self.add_ending(choice, piece)
        if self.return_token_ids and not piece.num_before:
            choice["prompt_token_ids"] = self.generation.prompts[piece.prompt]
        return choice

    def chunk(self, choices: list[Any]) -> responses.CompletionAnswer:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": responses.FINGERPRINT,
            "choices": choices,
        }

    def _logprobs_of(
        self, piece: Piece, reports: Sequence[PositionReport | None]
    ) -> responses.CompletionLogprobsAnswer | None:
        """Returns log-probabilities of the next tokens of a sequence, or of its prompt."""
        body = self._body
        if body.logprobs is None:
            return None
        key = piece.prompt, piece.index
        if key not in self._logprobs:
            first = self.generation.prompts[piece.prompt][0]
            text = self.generation.model.renderer.tokenizer.decode([first])
            self._logprobs[key] = logprobs.CompletionLogprobs(
                body.logprobs, as_ids=bool(body.return_tokens_as_token_ids), first=(first, text)
            )
        return self._logprobs[key].piece(reports)


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
    renderer: Renderer,
    body: CompletionBody,
    prompts: Sequence[str | list[int]],
    tokens: Sequence[list[int]],
) -> list[str]:
    """Returns the prompts' texts, if requested."""
    if not body.echo:
        return []
    return [
        prompt
        if isinstance(prompt, str) and body.truncate_prompt_tokens is None
        else await renderer.decode(encoded)
        for prompt, encoded in zip(prompts, tokens)
    ]


def _likeliest(answers: list[CompletionOutput], n: int) -> list[CompletionOutput]:
    """Returns the n answers with the highest log-probability per token."""
    if len(answers) == n:
        return answers

    def mean(answer: CompletionOutput) -> float:
        assert answer.cumulative_logprob is not None
        return answer.cumulative_logprob / max(1, len(answer.token_ids))

    return sorted(answers, key=mean, reverse=True)[:n]
