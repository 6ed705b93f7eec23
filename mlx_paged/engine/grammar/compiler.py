"""GrammarCompiler: compiles grammars for one tokenizer off the engine's thread, and caches them."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from copy import copy
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from mlx_paged.engine.grammar import lark, probe
from mlx_paged.engine.grammar.jobs import Job, Jobs
from mlx_paged.engine.grammar.limits import LIMITS, MAX_FIRST_MASK, is_limit
from mlx_paged.engine.grammar.schema import prepare_schema
from mlx_paged.engine.grammar.schema_errors import one_line
from mlx_paged.engine.grammar.structured_outputs import StructuredOutputs
from mlx_paged.errors import InvalidParameterError
from mlx_paged.parsing.special_tokens import added_tokens

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Maximum grammars compiling at the same time. A grammar that was refused for taking too long counts
# until its thread ends.
_MAX_COMPILING = 8
_FIELD = "structured_outputs"


class CompiledGrammar:
    """A grammar compiled for a model's tokens; answers share it.

    Attributes:
        relaxed: Paths of keywords that are not enforced, such as
            ``structured_outputs.json.properties.a.not``.
        first_mask: Tokens that may come first, ``[num_words]`` int32 with 32 tokens each, lowest
            bit first.
        is_spent: True if an answer exceeded a limit. All answers share the states of one lexer, so
            new answers then need a new copy of the grammar.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer: LLTokenizer,
        relaxed: tuple[str, ...],
        num_words: int,
    ) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self.relaxed = relaxed
        self.is_spent = False
        self.first_mask: npt.NDArray[np.int32] = np.zeros(num_words, np.int32)
        matcher.unsafe_compute_mask_ptr(self.first_mask.ctypes.data, self.first_mask.nbytes)

    def matcher(self) -> LLMatcher:
        """Returns a matcher at the grammar's beginning, for one answer."""
        return self._matcher.deep_copy()

    def tokenize(self, text: str) -> list[int]:
        """Returns the tokens of a text, for a matcher."""
        return self._tokenizer.tokenize_str(text)


class GrammarCompiler:
    """Compiles the grammars of `StructuredOutputs`. Any thread may call it.

    Args:
        tokenizer: mlx-lm's wrapper of the model's tokenizer.
        vocab_size: The model's, including padding; token ids are below it.
        eos_token_ids: Tokens that end an answer. They may follow when the grammar is complete.
        timeout: Maximum CPU seconds for one grammar.
        cache_size: Maximum compiled grammars to keep.

    Attributes:
        added_tokens: Tokens that the tokenizer never splits, by text.
        num_words: int32 words of a mask, for the larger of the model's and the tokenizer's
            vocabulary.
        eos_token_ids: Tokens that end an answer.
        num_compiled: Grammars that were compiled, without cache hits.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: Collection[int],
        *,
        timeout: float = 5.0,
        cache_size: int = 256,
    ) -> None:
        self.added_tokens = added_tokens(tokenizer)
        size = max(vocab_size, _size_of(tokenizer))
        self.num_words = -(-size // 32)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.num_compiled = 0
        self._timeout = timeout
        self._cache_size = cache_size
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, Job[CompiledGrammar]] = OrderedDict()
        self._jobs = Jobs(_MAX_COMPILING)
        # This takes seconds for a large vocabulary and holds the interpreter's lock, so it runs
        # now, while the model is loaded, and not with the first request.
        self._tokenizer = _shared_tokenizer(tokenizer, size, self.eos_token_ids)

    @property
    def tokenizer(self) -> LLTokenizer:
        """llguidance's form of the tokenizer. Waits until it is built.

        Raises:
            InvalidParameterError: llguidance does not support the model's tokenizer.
        """
        return self._tokenizer.result()

    def compile(self, outputs: StructuredOutputs) -> CompiledGrammar:
        """Compiles a grammar, or returns it from the cache. Waits for it.

        Raises:
            GrammarsBusyError: Slow grammars are ahead of it.
            InvalidParameterError: It is invalid, cannot be enforced, or takes too long.
        """
        self._tokenizer.result()  # Building it does not count against the grammar's timeout.
        too_slow = partial(self._too_slow, f"{_FIELD}.{outputs.kind}", outputs.canonical_text)
        return self._jobs.wait(self._job_for(outputs), self._timeout, too_slow)

    async def compile_async(self, outputs: StructuredOutputs) -> CompiledGrammar:
        """Like `compile`, without blocking a thread."""
        await asyncio.shield(asyncio.wrap_future(self._tokenizer))
        too_slow = partial(self._too_slow, f"{_FIELD}.{outputs.kind}", outputs.canonical_text)
        return await self._jobs.wait_async(self._job_for(outputs), self._timeout, too_slow)

    async def prepare_async(self, work: Callable[[], T], about: Callable[[], tuple[str, Any]]) -> T:
        """Runs `work`, which prepares schemas for compilation, within the same limits.

        Args:
            about: Returns the current field and its value, for errors.

        Raises:
            GrammarsBusyError: See `compile`.
            InvalidParameterError: It takes too long, or `work` raises it.
        """

        def too_slow() -> Exception:
            return self._too_slow(*about())

        job = self._jobs.start(lambda: self._within_limit(work, too_slow))
        return await self._jobs.wait_async(job, self._timeout, too_slow)

    def _job_for(self, outputs: StructuredOutputs) -> Job[CompiledGrammar]:
        """Returns the cached job that compiles a grammar, or starts one."""
        key = outputs.canonical_text
        with self._lock:
            job = self._cache.get(key)
            is_new = job is None or _is_spent(job.future)
            if job is None or is_new:
                self.num_compiled += 1
                too_slow = partial(self._too_slow, f"{_FIELD}.{outputs.kind}", key)
                job = self._cache[key] = self._jobs.start(
                    lambda: self._within_limit(lambda: self._compile(outputs), too_slow)
                )
            self._cache.move_to_end(key)
            while len(self._cache) > self._cache_size:
                # Requests that wait for an evicted job still get its result.
                self._cache.popitem(last=False)
        if is_new:
            job.future.add_done_callback(lambda done: self._drop_failure(key, job))
        return job

    def _drop_failure(self, key: str, job: Job[CompiledGrammar]) -> None:
        if job.future.exception() is not None:
            with self._lock:
                if self._cache.get(key) is job:
                    del self._cache[key]

    def _within_limit(self, work: Callable[[], T], too_slow: Callable[[], Exception]) -> T:
        """Returns the result of `work`; refuses it if it took too long, even if no caller noticed.

        So a grammar at the limit is not refused once and accepted the next time.
        """
        start = time.thread_time()
        result = work()
        if time.thread_time() - start > self._timeout:
            raise too_slow()
        return result

    def _too_slow(self, field: str, given: Any) -> InvalidParameterError:
        expected = (
            f"a grammar that compiles within {self._timeout:g} CPU seconds "
            "(structured_outputs_timeout)"
        )
        return InvalidParameterError(field, expected, given)

    def _compile(self, outputs: StructuredOutputs) -> CompiledGrammar:
        text, relaxed, schemas = self._grammar_of(outputs)
        matcher = LLMatcher(self.tokenizer, text, log_level=0, limits=LIMITS)
        _require_no_error(matcher, outputs)
        start = time.thread_time()
        compiled = CompiledGrammar(matcher, self.tokenizer, relaxed, self.num_words)
        seconds = time.thread_time() - start
        if matcher.get_error().startswith("NoExtension") or not compiled.first_mask.any():
            is_schema = outputs.kind == "json"
            expected = (
                "a schema for which there is a value"
                if is_schema
                else "a grammar that some answer follows"
            )
            raise InvalidParameterError(f"{_FIELD}.{outputs.kind}", expected, _given(outputs))
        _require_no_error(matcher, outputs)  # The first mask may be too complex.
        if seconds > MAX_FIRST_MASK:
            expected = "a grammar within the limits of this server (too many parts may come first)"
            raise InvalidParameterError(f"{_FIELD}.{outputs.kind}", expected, _given(outputs))
        prober = probe.Prober()
        for pattern in probe.counting_patterns(schemas):
            # A probe of the whole grammar may not reach the texts with this pattern.
            alone = self._grammar_of_pattern(pattern)
            if alone is not None:
                _require_no_error(
                    prober.run(alone.matcher(), alone.first_mask, 0, max(probe.LENGTHS)), outputs
                )
        for seed, length in enumerate(probe.LENGTHS):
            _require_no_error(
                prober.run(compiled.matcher(), compiled.first_mask, seed, length), outputs
            )
            if prober.is_endless:
                expected = (
                    "a grammar within the limits of this server (each token takes longer than the "
                    "one before: make it less ambiguous)"
                )
                raise InvalidParameterError(f"{_FIELD}.{outputs.kind}", expected, _given(outputs))
        if relaxed:
            logger.warning("structured outputs are not enforced in %s", ", ".join(relaxed))
        return compiled

    def _grammar_of_pattern(self, pattern: str) -> CompiledGrammar | None:
        """Returns a grammar of texts that match a pattern; None if it cannot be compiled alone."""
        schema = {"type": "string", "pattern": pattern}
        text = LLMatcher.grammar_from_json_schema(json.dumps(schema, ensure_ascii=False))
        matcher = LLMatcher(self.tokenizer, text, log_level=0, limits=LIMITS)
        compiled = CompiledGrammar(matcher, self.tokenizer, (), self.num_words)
        return None if matcher.is_error() else compiled

    def _grammar_of(self, outputs: StructuredOutputs) -> tuple[str, tuple[str, ...], list[Any]]:
        """Returns llguidance's grammar, the relaxed paths, and the schemas in it."""
        kind, field = outputs.kind, f"{_FIELD}.{outputs.kind}"
        json_options: dict[str, Any] = {
            "whitespace_pattern": outputs.whitespace_pattern,
            "disable_any_whitespace": outputs.disable_any_whitespace,
            "disable_additional_properties": outputs.disable_additional_properties,
        }
        if kind in ("json", "json_object"):
            schema = {"type": "object"} if kind == "json_object" else outputs.json_schema
            assert schema is not None
            prepared = prepare_schema(schema, strict=outputs.strict, field=field, **json_options)
            text = json.dumps(prepared.schema, ensure_ascii=False)
            return LLMatcher.grammar_from_json_schema(text), prepared.relaxed, [prepared.schema]
        if outputs.regex is not None:
            return LLMatcher.grammar_from_regex(outputs.regex), (), []
        if outputs.choice is not None:
            return LLMatcher.grammar_from_lark(lark.choice(outputs.choice)), (), []
        if outputs.grammar is not None:
            text, relaxed, schemas = lark.with_prepared_schemas(
                lark.lark_of(outputs.grammar, field), strict=outputs.strict, field=field
            )
            return LLMatcher.grammar_from_lark(lark.without_forcing(text)), relaxed, schemas
        assert isinstance(outputs.structural_tag, dict)
        grammars = json.loads(lark.structural_tag(outputs.structural_tag, self.added_tokens, field))
        all_relaxed: tuple[str, ...] = ()
        all_schemas: list[Any] = []
        for each in grammars["grammars"]:
            each["lark_grammar"], relaxed, schemas = lark.with_prepared_schemas(
                each["lark_grammar"], strict=outputs.strict, field=field, prepares=json_options
            )
            all_relaxed += relaxed
            all_schemas += schemas
        return json.dumps(grammars, ensure_ascii=False), all_relaxed, all_schemas


def _require_no_error(matcher: LLMatcher, outputs: StructuredOutputs) -> None:
    if matcher.is_error():
        error = matcher.get_error().partition("<state>")[0]
        expected = f"a valid grammar ({one_line(error)})"
        if error.startswith("NoExtension"):
            expected = "a grammar that every answer can follow to its end"
        elif is_limit(error):
            expected = f"a grammar within the limits of this server ({one_line(error)})"
        raise InvalidParameterError(f"{_FIELD}.{outputs.kind}", expected, _given(outputs))


def _is_spent(compiled: Future[CompiledGrammar]) -> bool:
    return compiled.done() and compiled.exception() is None and compiled.result().is_spent


def _given(outputs: StructuredOutputs) -> Any:
    return getattr(outputs, outputs.kind)


def _backend_of(tokenizer: Any) -> Any:
    """Returns the Rust tokenizer in mlx-lm's wrapper or transformers' tokenizer, or None."""
    return getattr(tokenizer, "backend_tokenizer", None)


def _encoding_of(tokenizer: Any) -> Any:
    """Returns the tiktoken encoding inside a tokenizer (Kimi's); None if it has none."""
    model = getattr(tokenizer, "model", None)
    return model if hasattr(model, "_mergeable_ranks") else None


def _size_of(tokenizer: Any) -> int:
    backend, encoding = _backend_of(tokenizer), _encoding_of(tokenizer)
    if backend is not None:
        return int(backend.get_vocab_size(with_added_tokens=True))
    ids = (
        [*encoding._mergeable_ranks.values(), *encoding._special_tokens.values()]
        if encoding
        else []
    )
    return max(ids, default=-1) + 1


_tokenizers: WeakKeyDictionary[Any, dict[Any, Future[LLTokenizer]]] = WeakKeyDictionary()
_tokenizers_lock = threading.Lock()


def _shared_tokenizer(
    tokenizer: Any, size: int, eos_token_ids: frozenset[int]
) -> Future[LLTokenizer]:
    """Like `_tokenizer_of`, cached for all engines with the same tokenizer."""
    key = size, eos_token_ids
    with _tokenizers_lock:
        made = _tokenizers.setdefault(tokenizer, {})
        if key not in made:
            job = Jobs(1).start(lambda: _tokenizer_of(tokenizer, size, eos_token_ids))
            made[key] = job.future
        return made[key]


def _tokenizer_of(tokenizer: Any, size: int, eos_token_ids: Collection[int]) -> LLTokenizer:
    """Returns llguidance's form of a tokenizer.

    Raises:
        InvalidParameterError: It is neither a fast tokenizer nor one of tiktoken.
    """
    eos = sorted(token for token in eos_token_ids if 0 <= token < size) or None
    backend, encoding = _backend_of(tokenizer), _encoding_of(tokenizer)
    if backend is not None:
        plain = copy(backend)
        plain.no_padding()
        plain.no_truncation()
        return LLTokenizer(plain.to_str(), n_vocab=size, eos_token=eos)
    if encoding is not None:
        return LLTokenizer.from_tiktoken(  # type: ignore[attr-defined, no-any-return]
            encoder=encoding._mergeable_ranks,
            special_tokens=encoding._special_tokens,
            pattern=encoding._pat_str,
            eos_token=eos,
            n_vocab=size,
        )
    name = type(getattr(tokenizer, "_tokenizer", tokenizer)).__name__
    expected = "None: this model's tokenizer is neither a fast one nor tiktoken's"
    raise InvalidParameterError(_FIELD, expected, name)
