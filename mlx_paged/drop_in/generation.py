"""Replacements for mlx-lm's functions: prompt caches, and generation for one sequence.

mlx-lm's own loops do the work. They get the part of the prompt that is not in the store yet, and
caches that write to the store.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import wraps
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from mlx_paged.core import PrefixQuery
from mlx_paged.drop_in.caches import dense_copy, prompt_cache, sequence_of, working_caches
from mlx_paged.drop_in.registry import store_for
from mlx_paged.drop_in.sequence import PagedSequence
from mlx_paged.engine.guard import check_process, is_forked
from mlx_paged.model.kv_formats import INT8

Function = Callable[..., Any]


def make_prompt_cache(original: Function) -> Function:
    """Replaces `mlx_lm.models.cache.make_prompt_cache`."""

    @wraps(original)
    def make_prompt_cache(model: Any, max_kv_size: int | None = None) -> list[Any]:
        dense: list[Any] = original(model, max_kv_size)
        store = store_for(model, dense)
        return dense if store is None else prompt_cache(PagedSequence(store))

    return make_prompt_cache


def save_prompt_cache(original: Function) -> Function:
    """Replaces `mlx_lm.models.cache.save_prompt_cache`: writes the same files as plain mlx-lm."""

    @wraps(original)
    def save_prompt_cache(
        file_name: str, cache: list[Any], metadata: dict[str, str] | None = None
    ) -> None:
        original(file_name, [dense_copy(c) for c in cache], metadata)

    return save_prompt_cache


def generate_step(original: Function) -> Function:
    """Replaces `mlx_lm.generate.generate_step`."""
    signature = inspect.signature(original)

    @wraps(original)
    def generate_step(*args: Any, **kwargs: Any) -> Iterator[Any]:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        arguments = call.arguments
        sequences = _sequences_of(arguments, arguments["model"])
        if sequences is None:
            yield from original(*args, **kwargs)
            return
        [sequence] = sequences
        arguments["prompt_cache"] = working_caches(sequence)
        if arguments["input_embeddings"] is not None or not sequence.is_known:
            # The tokens behind these keys are unknown, so the keys cannot be shared.
            yield from _in_one_process(original(*call.args, **call.kwargs))
            return
        prompt = _prompt_or_last_token(arguments["prompt"], sequences)
        tokens = [*sequence.tokens, *prompt]
        num_cached = sequence.attach_prefix(tokens) - (len(tokens) - len(prompt))
        sequence.plan_snapshots(tokens)
        sequence.expect(list(tokens))
        sequence.store.count(len(prompt), num_cached)
        # An empty prompt may have any dtype, for example float32.
        dtype = arguments["prompt"].dtype if arguments["prompt"].size else mx.uint32
        arguments["prompt"] = mx.array(prompt[num_cached:], dtype=dtype)
        if num_cached:
            _hide_the_cut(arguments, prompt[:num_cached], len(prompt))
        steps = _in_one_process(original(*call.args, **call.kwargs))
        yield from _learning(steps, sequence, tokens)

    return generate_step


def speculative_generate_step(original: Function) -> Function:
    """Replaces `mlx_lm.generate.speculative_generate_step`."""
    signature = inspect.signature(original)

    @wraps(original)
    def speculative_generate_step(*args: Any, **kwargs: Any) -> Iterator[Any]:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        arguments = call.arguments
        sequences = _sequences_of(arguments, arguments["model"], arguments["draft_model"])
        if sequences is None or any(s.store.has_states or not s.is_known for s in sequences):
            yield from original(*args, **kwargs)  # recurrent state cannot roll back drafts
            return
        arguments["prompt_cache"] = [c for s in sequences for c in working_caches(s)]
        prompt = _prompt_or_last_token(arguments["prompt"], sequences)
        texts = [[*s.tokens, *prompt] for s in sequences]
        num_cached = _attach_equally(sequences, texts, len(prompt))
        for sequence in sequences:
            sequence.store.count(len(prompt), num_cached)
            sequence.expect_drafts(arguments["num_draft_tokens"])
        arguments["prompt"] = mx.array(prompt[num_cached:], dtype=mx.uint32)
        answer: list[int] = []
        steps = _in_one_process(original(*call.args, **call.kwargs))
        may_end = _may_end
        try:
            for token, logprobs, from_draft in steps:
                answer.append(int(token))
                yield token, logprobs, from_draft
        finally:
            steps.close()  # trims rejected drafts
            for sequence, text in zip(sequences, texts) if may_end() else []:
                sequence.expect_drafts(0)
                sequence.learn(text + answer)

    return speculative_generate_step


def tokenize(original: Function) -> Function:
    """Replaces `mlx_lm.server.ResponseGenerator._tokenize`.

    An empty prompt stops the generation thread of mlx-lm's server, and with it the server. This
    replaces it with the model's BOS or EOS token.
    """

    @wraps(original)
    def _tokenize(self: Any, tokenizer: Any, request: Any, args: Any) -> Any:
        prompt, segments, types, state, vision = original(self, tokenizer, request, args)
        if not prompt:
            first = tokenizer.bos_token_id
            if first is None:
                first = tokenizer.eos_token_id  # models without BOS are trained this way
            if first is None:
                # The server sends this message to the client.
                raise ValueError("the prompt is empty, and this model has no token to begin with")
            prompt, segments, types = [first], [[first]], ["assistant"]
        return prompt, segments, types, state, vision

    return _tokenize


def _sequences_of(arguments: dict[str, Any], *models: Any) -> list[PagedSequence] | None:
    """Returns the sequence of each model in a call, or None to leave the call to mlx-lm."""
    caches = arguments["prompt_cache"]
    if arguments["kv_bits"] is not None:
        if caches is not None or arguments["kv_bits"] != 8 or arguments.get("max_kv_size"):
            return None  # mlx-lm replaces the caches with quantized ones on the way
        sequences = _quantized_sequences(arguments, models)
        if sequences is not None:
            arguments["kv_bits"] = None
        return sequences
    if caches is None:
        size = _limit_that_is_reached(arguments)
        each = [mlx_lm_cache.make_prompt_cache(model, size) for model in models]
    elif len(models) == 1:
        each = [caches]
    else:  # target first, then draft
        num_layers = len(models[0].layers)
        each = [caches[:num_layers], caches[num_layers:]]
    found = []
    for model, own in zip(models, each):
        sequence = sequence_of(own)
        if sequence is None:
            return None
        if caches is not None:  # created earlier: check for changed weights
            store_for(model, inspect.unwrap(mlx_lm_cache.make_prompt_cache)(model))
        found.append(sequence)
    return found


def _quantized_sequences(
    arguments: dict[str, Any], models: Sequence[Any]
) -> list[PagedSequence] | None:
    """Returns new int8 sequences for `kv_bits=8`, or None if a model has no store.

    mlx-lm quantizes from `quantized_kv_start` on. All blocks of a paged sequence have one format,
    so this quantizes from the first token, or not at all if the text ends before that point.
    """
    most = _num_prompt_tokens(arguments) + arguments["max_tokens"]
    is_never = arguments["max_tokens"] >= 0 and most <= arguments["quantized_kv_start"]
    dense_caches = inspect.unwrap(mlx_lm_cache.make_prompt_cache)
    stores = [store_for(m, dense_caches(m), None if is_never else INT8) for m in models]
    found = [PagedSequence(store) for store in stores if store is not None]
    return found if len(found) == len(stores) else None


def _num_prompt_tokens(arguments: dict[str, Any]) -> int:
    embeddings = arguments.get("input_embeddings")
    return len(arguments["prompt"] if embeddings is None else embeddings)


def _limit_that_is_reached(arguments: dict[str, Any]) -> int | None:
    """Returns `max_kv_size` if prompt plus output may exceed it, else None.

    Up to that size a rotating cache is no different from a plain one.
    """
    size: int | None = arguments.get("max_kv_size")
    if size is None:
        return None  # always so in speculative decoding
    max_tokens = arguments["max_tokens"]
    fits = max_tokens >= 0 and _num_prompt_tokens(arguments) + max_tokens <= size
    return None if fits else size


def _prompt_or_last_token(prompt: mx.array, sequences: list[PagedSequence]) -> list[int]:
    """Returns the prompt's tokens.

    An empty prompt means that the cache holds all tokens. The last one is then recomputed, to get
    its logits.
    """
    tokens: list[int] = prompt.tolist()  # type: ignore[assignment]
    if tokens or not all(len(s.tokens) for s in sequences):
        return tokens
    if not all(s.can_trim_all(1) for s in sequences):
        tokens, *_ = [s.restart() for s in sequences]
        return tokens
    tokens = [sequences[0].tokens[-1]]
    for sequence in sequences:
        sequence.trim_all(1)
    return tokens


def _attach_equally(
    sequences: list[PagedSequence], texts: list[list[int]], num_prompt_tokens: int
) -> int:
    """Takes the same number of prompt tokens from each store; returns that number.

    mlx-lm gives both models the same rest of the prompt.
    """
    heads = [len(text) - num_prompt_tokens for text in texts]
    least, number = -1, max(0, num_prompt_tokens - 1)
    while least != number:  # windows may not reach back from where the other model's match ends
        least = number
        for sequence, text, head in zip(sequences, texts, heads):
            number = min(number, sequence.cached_tokens(text, head + number) - head)
    for sequence, text, head in zip(sequences, texts, heads):
        sequence.attach_prefix(text, PrefixQuery(text, limit=head + number))
    return number


def _hide_the_cut(arguments: dict[str, Any], cached: list[int], num_tokens: int) -> None:
    """Makes callbacks and logits processors see the whole prompt, including the cached part."""
    report = arguments["prompt_progress_callback"]
    if report is not None:
        report(0, num_tokens)  # mlx-lm's first report
        arguments["prompt_progress_callback"] = lambda done, _: report(
            done + len(cached), num_tokens
        )
    processors = arguments["logits_processors"]
    if processors:
        head = mx.array(cached, dtype=arguments["prompt"].dtype)
        arguments["logits_processors"] = [
            lambda tokens, logits, p=p: p(mx.concatenate([head, tokens]), logits)
            for p in processors
        ]


def _may_end(
    is_finalizing: Callable[[], bool] = sys.is_finalizing,
    is_forked: Callable[[], bool] = is_forked,
) -> bool:
    """True if a generator that is dropped may still use MLX: not in a forked child, nor when the
    interpreter drops all objects.

    Then globals of modules are None. Therefore it uses its defaults, and generators keep this
    function in a local variable.
    """
    return not is_finalizing() and not is_forked()


def _in_one_process(steps: Generator[Any, None, None]) -> Generator[Any, None, None]:
    """Passes steps on; raises `ForkedProcessError` in a forked child instead of hanging."""
    may_end = _may_end
    try:
        for step in steps:
            yield step
            check_process()
    finally:
        if may_end():
            steps.close()


def _learning(
    steps: Generator[Any, None, None], sequence: PagedSequence, tokens: list[int]
) -> Iterator[tuple[int, mx.array]]:
    """Passes on the tokens of `generate_step`, and records them in the sequence."""
    block_size = sequence.store.block_size
    prompt_is_learnt = False
    may_end = _may_end
    try:
        for token, logprobs in steps:
            # mlx-lm has already built the step that computes this token's keys.
            tokens.append(int(token))
            if not prompt_is_learnt or len(tokens) % block_size == 0:
                sequence.learn(tokens)
                prompt_is_learnt = True
            yield token, logprobs
    finally:
        steps.close()
        if may_end():
            sequence.learn(tokens)
            sequence.finish()
