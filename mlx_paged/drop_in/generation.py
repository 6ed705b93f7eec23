"""Replacements for mlx-lm's functions: prompt caches, and generation for one sequence.

mlx-lm's own loops do the work. They are given what is not in the store yet, and caches that put it
there.
"""

from __future__ import annotations

import inspect
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
    """For `mlx_lm.models.cache.make_prompt_cache`."""

    @wraps(original)
    def make_prompt_cache(model: Any, max_kv_size: int | None = None) -> list[Any]:
        dense: list[Any] = original(model, max_kv_size)
        store = store_for(model, dense)
        return dense if store is None else prompt_cache(PagedSequence(store))

    return make_prompt_cache


def save_prompt_cache(original: Function) -> Function:
    """For `mlx_lm.models.cache.save_prompt_cache`: files are those that plain mlx-lm writes."""

    @wraps(original)
    def save_prompt_cache(
        file_name: str, cache: list[Any], metadata: dict[str, str] | None = None
    ) -> None:
        original(file_name, [dense_copy(c) for c in cache], metadata)

    return save_prompt_cache


def generate_step(original: Function) -> Function:
    """For `mlx_lm.generate.generate_step`."""
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
            # Nobody knows which tokens these keys belong to: they are nobody else's.
            yield from _in_one_process(original(*call.args, **call.kwargs))
            return
        prompt = _prompt_or_last_token(arguments["prompt"], sequences)
        tokens = [*sequence.tokens, *prompt]
        num_cached = sequence.adopt(tokens) - (len(tokens) - len(prompt))
        sequence.plan_snapshots(tokens)
        sequence.expect(list(tokens))
        sequence.store.count(len(prompt), num_cached)
        # (An empty array, of an empty prompt, may well be of a type that is no token's.)
        dtype = arguments["prompt"].dtype if arguments["prompt"].size else mx.uint32
        arguments["prompt"] = mx.array(prompt[num_cached:], dtype=dtype)
        if num_cached:
            _hide_the_cut(arguments, prompt[:num_cached], len(prompt))
        steps = _in_one_process(original(*call.args, **call.kwargs))
        yield from _learning(steps, sequence, tokens)

    return generate_step


def speculative_generate_step(original: Function) -> Function:
    """For `mlx_lm.generate.speculative_generate_step`."""
    signature = inspect.signature(original)

    @wraps(original)
    def speculative_generate_step(*args: Any, **kwargs: Any) -> Iterator[Any]:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        arguments = call.arguments
        sequences = _sequences_of(arguments, arguments["model"], arguments["draft_model"])
        if sequences is None or any(s.store.has_states or not s.is_known for s in sequences):
            yield from original(*args, **kwargs)  # (recurrent state cannot take drafts back)
            return
        arguments["prompt_cache"] = [c for s in sequences for c in working_caches(s)]
        prompt = _prompt_or_last_token(arguments["prompt"], sequences)
        texts = [[*s.tokens, *prompt] for s in sequences]
        num_cached = _adopt_equally(sequences, texts, len(prompt))
        for sequence in sequences:
            sequence.store.count(len(prompt), num_cached)
            sequence.expect_drafts(arguments["num_draft_tokens"])
        arguments["prompt"] = mx.array(prompt[num_cached:], dtype=mx.uint32)
        answer: list[int] = []
        steps = _in_one_process(original(*call.args, **call.kwargs))
        try:
            for token, logprobs, from_draft in steps:
                answer.append(int(token))
                yield token, logprobs, from_draft
        finally:
            steps.close()  # forgets the drafts that were not accepted
            for sequence, text in [] if is_forked() else zip(sequences, texts):
                sequence.expect_drafts(0)
                sequence.learn(text + answer)

    return speculative_generate_step


def tokenize(original: Function) -> Function:
    """For `mlx_lm.server.ResponseGenerator._tokenize`.

    An empty prompt ends the generation thread of mlx-lm's server, and with it the server. Here it
    begins where every text begins: with the model's first token.
    """

    @wraps(original)
    def _tokenize(self: Any, tokenizer: Any, request: Any, args: Any) -> Any:
        prompt, segments, types, state, vision = original(self, tokenizer, request, args)
        if not prompt:
            first = tokenizer.bos_token_id
            if first is None:
                first = tokenizer.eos_token_id  # as models without one are trained
            if first is None:
                # The server sends its client the message of an exception that is raised here.
                raise ValueError("the prompt is empty, and this model has no token to begin with")
            prompt, segments, types = [first], [[first]], ["assistant"]
        return prompt, segments, types, state, vision

    return _tokenize


def _sequences_of(arguments: dict[str, Any], *models: Any) -> list[PagedSequence] | None:
    """The sequences that a call is about, one for each model; None: mlx-lm's code does it alone."""
    caches = arguments["prompt_cache"]
    if arguments["kv_bits"] is not None:
        if caches is not None or arguments["kv_bits"] != 8 or arguments.get("max_kv_size"):
            return None  # mlx-lm replaces the caches of the list by quantised ones as it goes
        sequences = _quantised_sequences(arguments, models)
        if sequences is not None:
            arguments["kv_bits"] = None
        return sequences
    if caches is None:
        size = _limit_that_is_reached(arguments)
        each = [mlx_lm_cache.make_prompt_cache(model, size) for model in models]
    elif len(models) == 1:
        each = [caches]
    else:  # of the target first, then of the draft
        num_layers = len(models[0].layers)
        each = [caches[:num_layers], caches[num_layers:]]
    found = []
    for model, own in zip(models, each):
        sequence = sequence_of(own)
        if sequence is None:
            return None
        if caches is not None:  # made earlier: notices that weights have changed since
            store_for(model, inspect.unwrap(mlx_lm_cache.make_prompt_cache)(model))
        found.append(sequence)
    return found


def _quantised_sequences(
    arguments: dict[str, Any], models: Sequence[Any]
) -> list[PagedSequence] | None:
    """New sequences in int8, for `kv_bits=8`; None: a model has no store.

    Mlx-lm's caches are quantised from `quantized_kv_start` on, and these from their first token, as
    blocks of one sequence are of one kind; a text that ends before that is not quantised.
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
    """`max_kv_size` where prompt and answer may exceed it: until then a rotating cache holds what
    any other does.
    """
    size: int | None = arguments.get("max_kv_size")
    if size is None:
        return None  # (speculative decoding knows no such limit)
    max_tokens = arguments["max_tokens"]
    fits = max_tokens >= 0 and _num_prompt_tokens(arguments) + max_tokens <= size
    return None if fits else size


def _prompt_or_last_token(prompt: mx.array, sequences: list[PagedSequence]) -> list[int]:
    """The prompt's tokens. Where it is empty, the cache has all of them: the last is computed anew,
    because what follows it is known only then.
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


def _adopt_equally(
    sequences: list[PagedSequence], texts: list[list[int]], num_prompt_tokens: int
) -> int:
    """Takes the same number of the prompt's tokens from each store, and returns it: mlx-lm gives
    both models the same rest of the prompt.
    """
    heads = [len(text) - num_prompt_tokens for text in texts]
    least, number = -1, max(0, num_prompt_tokens - 1)
    while least != number:  # (a window may not reach back from where the other model's ends)
        least = number
        for sequence, text, head in zip(sequences, texts, heads):
            number = min(number, sequence.cached_tokens(text, head + number) - head)
    for sequence, text, head in zip(sequences, texts, heads):
        sequence.adopt(text, PrefixQuery(text, limit=head + number))
    return number


def _hide_the_cut(arguments: dict[str, Any], cached: list[int], num_tokens: int) -> None:
    """Callbacks and logits processors see the whole prompt, whatever of it need not be computed."""
    report = arguments["prompt_progress_callback"]
    if report is not None:
        report(0, num_tokens)  # as mlx-lm begins
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


def _in_one_process(steps: Generator[Any, None, None]) -> Generator[Any, None, None]:
    """Passes steps on; raises `ForkedProcessError` where the next one would wait for ever."""
    try:
        for step in steps:
            yield step
            check_process()
    finally:
        if not is_forked():
            steps.close()


def _learning(
    steps: Generator[Any, None, None], sequence: PagedSequence, tokens: list[int]
) -> Iterator[tuple[int, mx.array]]:
    """Passes on what `generate_step` yields, and makes the tokens known to the sequence."""
    block_size = sequence.store.block_size
    prompt_is_learnt = False
    try:
        for token, logprobs in steps:
            # mlx-lm has built the step that computes this token's keys before it yields it.
            tokens.append(int(token))
            if not prompt_is_learnt or len(tokens) % block_size == 0:
                sequence.learn(tokens)
                prompt_is_learnt = True
            yield token, logprobs
    finally:
        steps.close()
        if not is_forked():
            sequence.learn(tokens)
            sequence.finish()
