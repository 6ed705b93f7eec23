"""Request bodies become sampling parameters."""

from __future__ import annotations

from typing import Any

from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.server.config import MAX_SEQUENCES_PER_REQUEST, ServerConfig
from mlx_paged.server.defaults import GenerationDefaults
from mlx_paged.server.errors import bad_request
from mlx_paged.server.schemas.generation import GenerationBody
from mlx_paged.server.schemas.requests import ChatBody, CompletionBody

# Fields that bodies and `SamplingParams` name alike.
_SAME = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "allowed_token_ids", "bad_words", "min_tokens", "stop",
    "include_stop_str_in_output", "stop_token_ids", "ignore_eos", "seed", "n", "prompt_logprobs",
    "skip_special_tokens",
)  # fmt: skip
_COMPLETION_MAX_TOKENS = 16


def chat_params(
    body: ChatBody, config: ServerConfig, defaults: GenerationDefaults
) -> SamplingParams:
    """Of `/v1/chat/completions`."""
    limit = body.max_completion_tokens
    if limit is not None and body.max_tokens not in (None, limit):
        raise bad_request(
            "max_completion_tokens", "max_tokens and max_completion_tokens say different things"
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs", "top_logprobs needs logprobs to be true")
    if body.top_logprobs is not None:
        _check_logprobs("top_logprobs", body.top_logprobs, config)
    return _params(
        body,
        config,
        defaults,
        max_tokens=body.max_tokens if limit is None else limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def completion_params(
    body: CompletionBody, config: ServerConfig, defaults: GenerationDefaults, num_prompts: int
) -> SamplingParams:
    """Of `/v1/completions`."""
    if body.suffix:
        raise bad_request(
            "suffix", "suffix is not supported by this server", "unsupported_parameter"
        )
    max_tokens = _COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens", "max_tokens must be at least 1, or 0 with echo")
    if body.logprobs is not None:
        _check_logprobs("logprobs", body.logprobs, config)
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
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None and prompt_logprobs is None:
        prompt_logprobs = body.logprobs
    return _params(
        body,
        config,
        defaults,
        n=best_of,
        max_tokens=max(1, max_tokens),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _params(
    body: GenerationBody, config: ServerConfig, defaults: GenerationDefaults, **given: Any
) -> SamplingParams:
    if body.prompt_logprobs is not None:
        _check_logprobs("prompt_logprobs", body.prompt_logprobs, config)
        if body.stream:
            raise bad_request("prompt_logprobs", "prompt_logprobs cannot be streamed")
    if body.priority and not config.priority_scheduling:
        raise bad_request(
            "priority", "priority needs a server started with --scheduling-policy priority"
        )
    if body.spaces_between_special_tokens and body.skip_special_tokens is False:
        raise bad_request(
            "spaces_between_special_tokens",
            "spaces_between_special_tokens must be false where special tokens are shown: this "
            "server shows them as they are",
            "unsupported_parameter",
        )
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options", "stream_options needs stream to be true")
    values = {name: getattr(body, name) for name in _SAME}
    if body.logit_bias is not None:
        values["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    values.update(given)
    values["max_tokens"] = defaults.limit(values["max_tokens"])
    unset = {name for name, value in values.items() if value is None} - {"max_tokens"}
    said = {name: values[name] for name in values.keys() - unset}
    return SamplingParams(**{**defaults.sampling, **said})


def _check_logprobs(name: str, value: int, config: ServerConfig) -> None:
    if value > config.max_logprobs:
        raise bad_request(
            name, f"{name} must be at most {config.max_logprobs} (--max-logprobs) but got {value}"
        )
