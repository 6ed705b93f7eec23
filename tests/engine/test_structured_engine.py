"""Structured outputs on the embedded model: valid always, and the same in any company."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jsonschema_rs
import numpy as np
import pytest
from support.embedded_llm import check_at_rest, make, tokens_of
from support.models import embedded, embedded_twin

from mlx_paged import LLM, SamplingParams
from mlx_paged.core import FinishReason
from mlx_paged.engine import runner as runner_module
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.grammar.compiler import GrammarCompiler
from mlx_paged.engine.grammar.matcher import GrammarMatcher
from mlx_paged.engine.outputs import RequestOutput
from mlx_paged.engine.runner import LaunchedStep
from mlx_paged.engine.sampling.masks import FilledMasks, MaskKey
from mlx_paged.engine.sampling.sequence_sampler import RequestSampling, SequenceSampler
from mlx_paged.errors import InvalidParameterError

STRING, INTEGER = {"type": "string", "maxLength": 12}, {"type": "integer"}


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties),
            "additionalProperties": False}  # fmt: skip


SCHEMAS: list[dict[str, Any]] = [
    closed(name=STRING, age={"type": "integer", "minimum": 0, "maximum": 120}),
    closed(color={"enum": ["red", "green", None, 3]}, ok={"type": "boolean"}),
    {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 4},
    closed(when={"type": "string", "format": "date"}, id={"type": "string", "format": "uuid"}),
    {"anyOf": [closed(kind={"const": "a"}, x=INTEGER), closed(kind={"const": "b"}, y=STRING)]},
    closed(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
]
# Each with other parameters: masks and what else changes logits go together.
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"repetition_penalty": 1.2, "top_p": 0.95, "logit_bias": {700: 8.0, 0: 50.0}},
    {"presence_penalty": 0.8, "frequency_penalty": 0.4, "top_k": 40, "logprobs": 2},
    {"min_p": 0.02, "temperature": 1.5, "min_tokens": 5, "stop": "never this"},
    {"bad_words": ["return", "if n"], "ignore_eos": True, "logprobs": 0},
]
PROMPTS = ["def fibonacci(n):\n", "Write JSON: ", "x = [", "class Node:\n", "", "while True:\n"]
MAX_TOKENS = 80
PARAMS = [
    SamplingParams(
        **{"temperature": 1.0, "max_tokens": MAX_TOKENS, "seed": 7 * i, **SETTINGS[i % 6]},
        structured_outputs={"json": SCHEMAS[i % len(SCHEMAS)]},
    )
    for i in range(12)
]
# Between them rows without a grammar.
FREE = [SamplingParams(temperature=1.0, max_tokens=30, seed=i, ignore_eos=True) for i in range(6)]
REQUESTS = [
    *zip((PROMPTS[i % 6] + "\n" for i in range(12)), PARAMS),
    *zip((p + "#" for p in PROMPTS), FREE),
]
_expected: list[list[int]] = []


def expected() -> list[list[int]]:
    """Each request alone, without overlap and without a prefix cache."""
    if not _expected:
        llm = make(async_scheduling=False, enable_prefix_caching=False)
        for prompt, params in REQUESTS:
            _expected.append(llm.generate(prompt, params)[0].outputs[0].token_ids)
    return _expected


def tokens_in(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [answer.token_ids for output in outputs for answer in output.outputs]


def assert_valid(output: RequestOutput, schema: Any) -> int:
    """Every answer that ended is valid; returns how many did."""
    num_ended = 0
    for answer in output.outputs:
        assert answer.error is None
        if answer.finish_reason is FinishReason.LENGTH:
            continue
        assert answer.finish_reason is FinishReason.STOP and answer.stop_reason is None
        jsonschema_rs.validate(schema, json.loads(answer.text), validate_formats=True)
        num_ended += 1
    return num_ended


# --- Valid, and the same tokens -------------------------------------------------------------------

STEPS: dict[str, dict[str, Any]] = {
    "overlap": {},
    "no overlap": {"async_scheduling": False},
    "16-token steps": {"max_num_batched_tokens": 16, "max_num_seqs": 16},
    "3 sequences": {"max_num_seqs": 3},
    "preemption": {"num_gpu_blocks_override": 40, "block_size": 8, "watermark": 0.0},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", STEPS)
def test_the_same_valid_answers_in_any_company(name: str) -> None:
    llm = make(**STEPS[name])
    outputs = llm.generate([p for p, _ in REQUESTS], [params for _, params in REQUESTS])
    assert tokens_in(outputs) == expected()
    num_valid = sum(assert_valid(o, SCHEMAS[i % 6]) for i, o in enumerate(outputs[:12]))
    assert num_valid >= 8  # (others are cut by max_tokens)
    if name == "preemption":
        assert llm.stats().num_preemptions > 0
    check_at_rest(llm)


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no overlap"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return make(async_scheduling=request.param)


def one(llm: LLM, prompt: str = "x", **fields: Any) -> Any:
    [output] = llm.generate(prompt, SamplingParams(**{"temperature": 1.0, "seed": 1, **fields}))
    check_at_rest(llm)
    assert len(output.outputs) == fields.get("n", 1)
    return output.outputs[0]


def test_every_answer_of_a_request_has_its_own_place(llm: LLM) -> None:
    params = SamplingParams(
        n=6, temperature=1.3, seed=3, max_tokens=MAX_TOKENS, structured_outputs={"json": SCHEMAS[0]}
    )
    [output] = llm.generate("Write JSON: ", params)
    assert assert_valid(output, SCHEMAS[0]) >= 4
    assert len({a.text for a in output.outputs}) > 2
    check_at_rest(llm)


@pytest.mark.parametrize(
    ("outputs", "texts"),
    [
        ({"choice": ["yes", "no"]}, {"yes", "no"}),
        ({"regex": "(red|green) [0-9]"}, None),
        ({"grammar": 'start: "<" WORD ">"\nWORD: "one" | "two"'}, {"<one>", "<two>"}),
        ({"grammar": 'root ::= "a" ("b" | "c")'}, {"ab", "ac"}),
        ({"structural_tag": {"type": "structural_tag",
                             "format": {"type": "const_string", "value": "fixed"}}}, {"fixed"}),
    ],
)  # fmt: skip
def test_a_complete_grammar_ends_its_answer_at_once(
    llm: LLM, outputs: Any, texts: set[str] | None
) -> None:
    answer = one(llm, structured_outputs=outputs, max_tokens=40)
    assert answer.finish_reason is FinishReason.STOP and answer.stop_reason is None
    assert texts is None or answer.text in texts
    # No token comes after it, not even one that ends texts.
    assert answer.text == llm.tokenizer.decode(answer.token_ids)


def test_any_json_object(llm: LLM) -> None:
    answer = one(llm, structured_outputs={"json_object": True}, max_tokens=200, temperature=0.5)
    if answer.finish_reason is FinishReason.STOP:
        assert isinstance(json.loads(answer.text), dict)


# --- The grammar wins -----------------------------------------------------------------------------

EOS = sorted(embedded().tokenizer.eos_token_ids)


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 10},
        {"ignore_eos": True},
        {"min_tokens": 10, "ignore_eos": True},
        {"logit_bias": dict.fromkeys((0, 5, *EOS), 100.0)},
        {"stop_token_ids": [5]},
        {"temperature": 0, "min_tokens": 12},
        {"repetition_penalty": 2.0, "presence_penalty": 2.0},
    ],
)
def test_a_grammar_that_is_complete_ends_in_spite_of(llm: LLM, fields: dict[str, Any]) -> None:
    """(vLLM #53665: min_tokens and a grammar gave token 0.)"""
    fields = {"max_tokens": 12, **fields}
    answer = one(llm, structured_outputs={"regex": "ab"}, **fields)
    assert (answer.text, answer.finish_reason) == ("ab", FinishReason.STOP)


@pytest.mark.parametrize(
    ("outputs", "fields"),
    [
        ({"regex": "a"}, {"bad_words": ["a"]}),
        ({"choice": ["yes"]}, {"allowed_token_ids": [5, 6]}),
        ({"regex": "()"}, {"min_tokens": 2}),
    ],
)
def test_what_leaves_no_first_token_is_refused(
    llm: LLM, outputs: Any, fields: dict[str, Any]
) -> None:
    with pytest.raises(
        InvalidParameterError, match="the grammar of the answer may begin"
    ) as raised:
        one(llm, structured_outputs=outputs, **fields)
    assert raised.value.field == next(iter(fields))
    assert one(llm, structured_outputs={"regex": "b"}, bad_words=["a"]).text == "b"


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_what_would_leave_no_later_token_gives_way(llm: LLM, temperature: float) -> None:
    outputs = {"regex": "(abc{3}d|[e-g]{2})(?s:.*)"}
    begins = tokens_of("abc")[:1]
    for fields in (
        {"bad_words": ["d", "cd", "ccd", "cccd"], "logit_bias": dict.fromkeys(begins, 100.0)},
        {"allowed_token_ids": begins, "logit_bias": dict.fromkeys(begins, -100.0)},
        {"stop_token_ids": tokens_of("d"), "min_tokens": 9, "bad_words": ["abcccd", "cccd", "d"],
         "logit_bias": dict.fromkeys(begins, 100.0)},
    ):  # fmt: skip
        answer = one(
            llm, temperature=temperature, seed=1, max_tokens=12, structured_outputs=outputs,
            **fields,
        )  # fmt: skip
        assert answer.finish_reason in (FinishReason.LENGTH, FinishReason.STOP), answer.error
        assert answer.text.startswith("abcccd") and answer.error is None, fields
    check_at_rest(llm)


def test_what_leaves_a_token_holds(llm: LLM) -> None:
    """Bans hold within the grammar, those of several tokens and those of the beginning too."""
    outputs = {"regex": "[a-d]{24}"}
    free = one(llm, temperature=1.0, structured_outputs=outputs)
    banned = free.token_ids[1:2]
    words = [embedded().tokenizer.decode(banned), embedded().tokenizer.decode(free.token_ids[2:4])]
    answer = one(llm, temperature=1.0, structured_outputs=outputs, bad_words=words)
    assert banned[0] not in answer.token_ids and words[1] not in answer.text
    allowed = tokens_of("abca")
    answer = one(llm, temperature=1.0, structured_outputs=outputs, allowed_token_ids=allowed)
    assert set(answer.token_ids) <= set(allowed) and len(answer.text) == 24


def test_a_grammar_that_goes_on_ignores_ends(llm: LLM) -> None:
    bias = dict.fromkeys(EOS, 100.0)
    outputs = {"regex": "[a-z ]*"}
    answer = one(llm, structured_outputs=outputs, ignore_eos=True, logit_bias=bias, max_tokens=20)
    assert answer.finish_reason is FinishReason.LENGTH and len(answer.token_ids) == 20
    answer = one(llm, structured_outputs=outputs, min_tokens=7, logit_bias=bias, max_tokens=20)
    assert answer.finish_reason is FinishReason.STOP and len(answer.token_ids) == 8
    answer = one(llm, structured_outputs=outputs, logit_bias=bias)
    assert answer.text == "" and answer.token_ids[0] in EOS


def test_every_end_of_the_model_waits_for_the_grammar(llm: LLM) -> None:
    """(vLLM #42403: a stop token came in the middle of JSON.)"""
    assert len(EOS) > 1
    stops = tokens_of("Q")
    for end in (*EOS, *stops):
        answer = one(
            llm, structured_outputs={"json": SCHEMAS[1]}, logit_bias={end: 100}, max_tokens=60,
            stop_token_ids=stops,
        )  # fmt: skip
        assert answer.finish_reason is FinishReason.STOP
        jsonschema_rs.validate(SCHEMAS[1], json.loads(answer.text))


def test_stops_of_the_request_end_the_answer(llm: LLM) -> None:
    stop = tokens_of("Q")[0]
    answer = one(
        llm, structured_outputs={"regex": "[a-z]+"}, logit_bias={stop: 100}, stop_token_ids=[stop]
    )
    assert answer.finish_reason is FinishReason.STOP and answer.stop_reason == stop
    answer = one(llm, structured_outputs={"regex": "(ab)+"}, stop="baba", max_tokens=40)
    assert answer.finish_reason is FinishReason.STOP
    assert (answer.text, answer.stop_reason) == ("a", "baba") or answer.stop_reason is None


def test_a_token_mask_and_a_grammar(llm: LLM) -> None:
    """A caller's mask and a grammar both hold."""
    engine = llm.engine
    [yes], [no] = (tokens_of(t) for t in ("a", "b"))
    mask = [False] * engine.vocab_size
    mask[no] = True
    output = engine.add_request(
        "r",
        tokens_of("x"),
        SamplingParams(structured_outputs={"choice": ["a", "b"]}, logit_bias={yes: 50}),
        token_mask=lambda index, tokens: np.array(mask),
    )
    while engine.has_unfinished:
        engine.step()
    assert output.outputs[0].text == "b"


# --- While the device runs the forward pass -------------------------------------------------------


def test_masks_are_made_once_the_step_before_is_committed() -> None:
    """The device has the forward pass of a step by then, but not the one of the next step."""
    engine = make().engine
    runner, masks = engine._runner, engine._runner._masks
    assert masks is not None
    launch, make_masks = runner.launch, masks.grammar_masks
    events: list[str] = []

    def launching(*args: Any) -> LaunchedStep:
        launched = launch(*args)
        events.append("launch" if launched.choose else "launch of all")
        return launched

    def making(keys: Sequence[MaskKey], newest: Sequence[int | None]) -> FilledMasks:
        known = (len(masks._sequences[key.seq_id].tokens) == key.position for key in keys)
        events.append("masks" if all(known) else "masks too early")
        return make_masks(keys, newest)

    params = SamplingParams(max_tokens=9, temperature=0, structured_outputs={"regex": "[a-z]{40}"})
    with (
        mock.patch.object(runner, "launch", launching),
        mock.patch.object(masks, "grammar_masks", making),
    ):
        for i in range(3):
            engine.add_request(str(i), tokens_of("x" * (i + 1)), params)
        while engine.has_unfinished:
            engine.step()
    assert len(events) >= 18 and events == ["launch", "masks"] * (len(events) // 2)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_whose_tokens_cannot_be_chosen_runs_again(overlap: bool) -> None:
    llm = make(async_scheduling=overlap)
    calls, apply = itertools.count(), runner_module.apply_edits

    def fails(*args: Any) -> Any:
        if next(calls) in (2, 9):
            raise RuntimeError("no memory for the masks")
        return apply(*args)

    with mock.patch.object(runner_module, "apply_edits", fails):
        outputs = llm.generate([p for p, _ in REQUESTS[:2]], [params for _, params in REQUESTS[:2]])
    assert next(calls) > 10
    assert tokens_in(outputs) == expected()[:2]
    assert llm.stats().num_faults == 2
    check_at_rest(llm)


# --- Exceptions -----------------------------------------------------------------------------------


# Indices of `REQUESTS`: grammars with all kinds of settings, and two requests without.
BROKEN = [*range(0, 6), 12, 13]


def run(engine: Engine) -> list[RequestOutput]:
    """The requests of `BROKEN`; an exception out of a step is followed by another step."""
    outputs = [
        engine.add_request(str(i), tokens_of(REQUESTS[i][0]), REQUESTS[i][1]) for i in BROKEN
    ]
    for _ in range(3000):
        if not engine.has_unfinished:
            return outputs
        with contextlib.suppress(KeyboardInterrupt, ZeroDivisionError):
            engine.step()
    raise AssertionError("it does not end")


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("overlap", "error"),
    [(True, KeyboardInterrupt), (True, ZeroDivisionError), (False, KeyboardInterrupt)],
)
@pytest.mark.parametrize("where", ["launch", "mask", "match", "outcome"])
def test_exceptions_do_not_change_answers(
    overlap: bool, error: type[BaseException], where: str
) -> None:
    engine = make(async_scheduling=overlap).engine
    owner, name = {
        "launch": (engine._runner, "launch"),
        "mask": (GrammarMatcher, "begin_mask"),
        "match": (GrammarMatcher, "_match"),  # (in the middle of a change of its state)
        "outcome": (SequenceSampler, "is_complete"),
    }[where]
    original: Callable[..., Any] = getattr(owner, name)
    # (Ever rarer: what was followed is followed again after each.)
    first = {"launch": 5, "mask": 15, "match": 18, "outcome": 12}[where]
    calls, points = 0, {first, 3 * first, 7 * first, 15 * first}

    def sometimes(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in points:
            raise error
        return original(*args, **options)

    with mock.patch.object(owner, name, sometimes):
        outputs = run(engine)
    assert calls >= 7 * first
    for i, output in zip(BROKEN, outputs):
        [answer] = output.outputs
        tokens = expected()[i]
        if answer.finish_reason is FinishReason.ERROR:
            # A request that was being changed when the exception arrived ends with it.
            assert where in ("match", "outcome")
            assert answer.token_ids == tokens[: len(answer.token_ids)]
            continue
        assert answer.token_ids == tokens, i
    ended = [o for o in outputs if o.outputs[0].finish_reason is not FinishReason.ERROR]
    assert len(ended) > len(outputs) // 2
    engine.check_integrity()


def test_a_grammar_that_fails_ends_its_answer_only(llm: LLM) -> None:
    end_mask = GrammarMatcher.end_mask

    def fails(self: GrammarMatcher, words: Any) -> None:
        end_mask(self, words)
        if self._rules.grammar is broken and len(self._seen) == 3:
            self.failed = "its grammar failed: LexerTooComplex"
            words.fill(0)

    engine = llm.engine
    broken = engine.intake.grammar_compiler.compile(SamplingParams(
        structured_outputs={"json": SCHEMAS[0]}).structured_outputs)  # type: ignore[arg-type]  # fmt: skip
    with mock.patch.object(GrammarMatcher, "end_mask", fails):
        outputs = llm.generate(["a", "b"], [PARAMS[0], PARAMS[1]])
    assert outputs[0].outputs[0].finish_reason is FinishReason.ERROR
    assert "LexerTooComplex" in str(outputs[0].outputs[0].error)
    assert len(outputs[0].outputs[0].token_ids) == 3
    assert outputs[1].outputs[0].error is None
    check_at_rest(llm)


# --- Costs ----------------------------------------------------------------------------------------


class Counted(list[int]):
    """Counts the elements that slices copy."""

    copied = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if isinstance(index, slice):
            Counted.copied += len(found)
        return found


@pytest.mark.parametrize(
    "fields",
    [{"bad_words": ["fibonacci_number"]}, {"structured_outputs": {"regex": ".*"}}, {}],
    ids=["bad words", "grammar", "token mask"],
)
def test_the_tokens_of_an_answer_are_not_copied_for_each(llm: LLM, fields: dict[str, Any]) -> None:
    seen: list[Sequence[int]] = []

    def mask(index: int, tokens: Sequence[int]) -> None:
        seen.append(tokens)

    prompt = tokens_of("x = 1\n")
    params = SamplingParams(**fields)
    sampling = llm.engine.intake.sampling_of(params, prompt, mask if not fields else None)
    assert isinstance(sampling, RequestSampling)
    sampler, tokens = SequenceSampler(sampling, 0), Counted(prompt)
    Counted.copied = 0
    letters = tokens_of("ab")[0], tokens_of("c")[0]
    for i in range(300):
        edits = sampler.edits(tokens, MaskKey(1, len(tokens) + 1))
        newest = letters[i % 2]
        if edits is not None and edits.mask is not None:
            sampler.token_mask(tokens, (newest,))
        if edits is not None and edits.grammar is not None:
            sampler.follow(tokens, (newest,))
        tokens.append(newest)
    assert Counted.copied < 10 * len(tokens)
    # A mask's inputs stay unchanged.
    for i, given in enumerate(seen):
        assert len(given) == i + 1 and list(given) == tokens[len(prompt) :][: i + 1] == given
        assert given[-1] == tokens[len(prompt) + i] and given[1:] == list(given)[1:]
        assert given[:-1] == list(given)[:-1] and given[::-1] == list(given)[::-1]


def test_rows_without_a_grammar_are_not_waited_for(llm: LLM) -> None:
    """Their requests have no edits at all."""
    sampling = llm.engine.intake.sampling_of(SamplingParams(), tokens_of("x"), None)
    assert not sampling.has_edits and not SequenceSampler(sampling, 0).has_grammar


# --- Interfaces -----------------------------------------------------------------------------------


def test_what_is_relaxed_is_said(llm: LLM) -> None:
    schema = {"type": "array", "items": INTEGER, "uniqueItems": True, "maxItems": 3}
    params = SamplingParams(structured_outputs={"json": schema}, max_tokens=50)
    [output] = llm.generate("x", params)
    assert output.relaxed == ("structured_outputs.json.uniqueItems",)
    [other] = llm.generate("x", PARAMS[0])
    assert other.relaxed == ()
    with pytest.raises(InvalidParameterError) as raised:
        one(llm, structured_outputs={"json": schema, "strict": True})
    assert raised.value.field == "structured_outputs.json.uniqueItems"
    check_at_rest(llm)


def test_answers_are_streamed(llm: LLM) -> None:
    params = SamplingParams(structured_outputs={"choice": ["yes", "no"]}, n=2, seed=4)
    updates = list(llm.stream("x", params))
    texts = ["".join(u.text for u in updates if u.index == i) for i in range(2)]
    assert set(texts) <= {"yes", "no"}
    assert [u.finish_reason for u in updates if u.finish_reason] == [FinishReason.STOP] * 2


def test_the_async_engine_compiles_off_its_thread() -> None:
    async def scenario() -> None:
        engine = AsyncEngine(lambda: Engine(embedded_twin(), EngineConfig(kv_cache_memory=1 << 26)))
        async with engine:
            threads: list[str] = []
            compile_grammar = GrammarCompiler._compile

            def noted(self: GrammarCompiler, wanted: Any) -> Any:
                threads.append(threading.current_thread().name)
                return compile_grammar(self, wanted)

            with mock.patch.object(GrammarCompiler, "_compile", noted):
                with pytest.raises(InvalidParameterError) as raised:
                    await engine.add_request("x", SamplingParams(structured_outputs={"regex": "["}))
                assert raised.value.field == "structured_outputs.regex"
                schema = {**SCHEMAS[0], "not": {"const": 1}}
                params = SamplingParams(structured_outputs={"json": schema}, max_tokens=1)
                stream = await engine.add_request("x", params)
                assert stream.relaxed == ("structured_outputs.json.not",)
                await stream.result()
                outputs = await asyncio.gather(
                    *(engine.generate(prompt, params) for prompt, params in REQUESTS)
                )
            assert set(threads) == {"mlx-paged-grammar"} and len(threads) == 2 + len(SCHEMAS)
            assert tokens_in(outputs) == expected()

    asyncio.run(scenario())
