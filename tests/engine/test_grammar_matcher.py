"""GrammarMatcher, for one answer: a function of its tokens, wherever they come from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.models import embedded
from support.thinking import tokenizer_with

from mlx_paged.engine.grammar import StructuredOutputs
from mlx_paged.engine.grammar.compiler import GrammarCompiler
from mlx_paged.engine.grammar.matcher import GrammarMatcher, GrammarRules, Words, fill_masks
from mlx_paged.parsing.reasoning import Reasoning, ReasoningFormat, format_of

PROMPT = [9, 9, 9]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    model = embedded()
    return GrammarCompiler(model.tokenizer, model.vocab_size, model.tokenizer.eos_token_ids)


def rules(compiler: GrammarCompiler, wanted: StructuredOutputs | None, **more: Any) -> GrammarRules:
    return GrammarRules(
        None if wanted is None else compiler.compile(wanted),
        eos_token_ids=compiler.eos_token_ids,
        num_words=compiler.num_words,
        **more,
    )


def mask_of(matcher: GrammarMatcher) -> Words:
    words = np.empty((1, matcher.num_words), np.int32)
    fill_masks([matcher], words)
    return words[0]


def tokens_in(words: Words) -> list[int]:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return [int(i) for i in np.flatnonzero(bits)]


def encode(compiler: GrammarCompiler, text: str) -> list[int]:
    return compiler.tokenizer.tokenize_str(text)


def fresh(shared: GrammarRules, answer: Sequence[int]) -> GrammarMatcher:
    matcher = GrammarMatcher(shared, len(PROMPT))
    matcher.follow([*PROMPT, *answer])
    return matcher


def test_its_state_is_a_function_of_the_tokens(compiler: GrammarCompiler) -> None:
    """Random walks in which tokens are taken back, changed and given ahead of time."""
    shared = rules(compiler, StructuredOutputs(json=SCHEMA))
    choose = random.Random(5)
    num_ended = 0
    for _ in range(20):
        matcher, answer = GrammarMatcher(shared, len(PROMPT)), []
        for _ in range(40):
            newest = None
            kind = choose.random()
            if kind < 0.1 and answer:
                del answer[choose.randrange(len(answer)) :]
            elif kind < 0.15:
                matcher.start_over()
            matcher.follow([*PROMPT, *answer])
            if matcher.is_complete:
                num_ended += 1
                break
            permitted = tokens_in(mask_of(matcher))
            token = choose.choice(permitted)
            if kind < 0.7:  # in flight: known one step later, perhaps as another
                newest = token
                matcher.follow([*PROMPT, *answer], [newest])
                if kind > 0.6:
                    token = choose.choice(permitted)
            answer.append(token)
            expected = fresh(shared, answer)
            if newest == token:
                assert matcher.is_complete == expected.is_complete
            matcher.follow([*PROMPT, *answer])
            assert matcher.failed is None
            assert (mask_of(matcher) == mask_of(expected)).all()
            assert matcher.is_complete == expected.is_complete
    assert num_ended > 2


def test_an_answer_that_is_complete_takes_what_is_discarded(compiler: GrammarCompiler) -> None:
    matcher = GrammarMatcher(rules(compiler, StructuredOutputs(regex="ab")), len(PROMPT))
    answer = encode(compiler, "ab")
    matcher.follow([*PROMPT, *answer], [17])
    assert matcher.is_complete
    matcher.follow([*PROMPT, *answer])  # the token in flight did not come
    assert matcher.is_complete
    matcher.follow(PROMPT)
    assert not matcher.is_complete and mask_of(matcher).any()


def test_a_token_that_the_grammar_does_not_allow(compiler: GrammarCompiler) -> None:
    shared = rules(compiler, StructuredOutputs(regex="ab"))
    matcher = fresh(shared, encode(compiler, "x"))
    assert matcher.failed is not None and "\n" not in matcher.failed
    assert not matcher.is_complete and not mask_of(matcher).any()
    matcher.follow(PROMPT)
    assert matcher.failed is None and mask_of(matcher).any()


def test_ends_come_where_the_grammar_is_complete(compiler: GrammarCompiler) -> None:
    eos, [stop] = set(compiler.eos_token_ids), encode(compiler, "{")
    wanted = StructuredOutputs(regex="[a-z]{2,5}")
    shared = rules(compiler, wanted, stop_token_ids=[stop])
    matcher = fresh(shared, encode(compiler, "a"))
    assert not (eos | {stop}) & set(tokens_in(mask_of(matcher)))
    answer = encode(compiler, "ab")
    matcher.follow([*PROMPT, *answer])
    assert eos | {stop} <= set(tokens_in(mask_of(matcher)))
    for end in (*eos, stop):
        assert fresh(shared, [*answer, end]).is_complete
    # With ignore_eos they come where nothing else can.
    ignoring = rules(compiler, wanted, ignore_eos=True)
    assert not eos & set(tokens_in(mask_of(fresh(ignoring, answer))))
    assert fresh(ignoring, encode(compiler, "abcde")).is_complete
    empty = rules(compiler, StructuredOutputs(regex="()"), ignore_eos=True)
    assert set(tokens_in(mask_of(fresh(empty, [])))) == eos


def test_masks_are_the_same_in_parallel(compiler: GrammarCompiler) -> None:
    shared = [
        rules(compiler, StructuredOutputs(**fields))
        for fields in ({"json": SCHEMA}, {"regex": "[0-9]+x"}, {"choice": ["yes", "no"]})
    ]
    answers = ["", "12", "y", '{"name": ', "3", "n", '{"name": "ab"']
    matchers = [fresh(shared[i % 3], encode(compiler, a)) for i, a in enumerate(answers)]
    words = np.empty((len(matchers), matchers[0].num_words), np.int32)
    fill_masks(matchers, words)
    assert [f.failed for f in matchers] == [None] * len(matchers)
    for matcher, row in zip(matchers, words):
        assert (row == mask_of(matcher)).all()


# --- Reasoning, by formats whose markers are text or several tokens -------------------------------


def thinking(
    name: str, special: Sequence[str], *, budget: int | None = None, begins: Reasoning
) -> tuple[GrammarCompiler, GrammarRules, ReasoningFormat]:
    tokenizer = tokenizer_with([], special)
    size = tokenizer._tokenizer.backend_tokenizer.get_vocab_size()
    compiler = GrammarCompiler(tokenizer, size, tokenizer.eos_token_ids)
    format = format_of(name, tokenizer)
    assert format is not None
    wanted = StructuredOutputs(json=SCHEMA)
    return (
        compiler,
        rules(compiler, wanted, reasoning=format.tokens, begins=begins, budget=budget),
        format,
    )


HARMONY = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"]


@pytest.mark.parametrize(
    ("name", "special", "reasoning"),
    [
        ("granite", [], "I think. Here is my response:"),
        ("deepseek_r1", [], "Well < think </think>"),
        ("gemma4", ["<|channel>", "<channel|>"], "thought <channel|>"),
        ("openai_gptoss", HARMONY,
         "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"),
        ("openai_gptoss", HARMONY, "<|channel|>final <|constrain|>json<|message|>"),
    ],
)  # fmt: skip
def test_the_grammar_follows_the_end_marker(name: str, special: list[str], reasoning: str) -> None:
    compiler, shared, _ = thinking(name, special, begins=Reasoning.INSIDE)
    tokens = compiler.tokenizer.tokenize_str(reasoning, parse_special=True)
    matcher = GrammarMatcher(shared, len(PROMPT))
    brace = encode(compiler, "{")[0]
    for i in range(len(tokens)):
        matcher.follow([*PROMPT, *tokens[:i]])
        permitted = tokens_in(mask_of(matcher))
        if tokens[i:] and "response" not in reasoning:
            assert len(permitted) > 1000, i  # anything but the end of the answer
        assert not set(compiler.eos_token_ids) & set(permitted)
    matcher.follow([*PROMPT, *tokens])
    permitted = tokens_in(mask_of(matcher))
    assert brace in permitted and len(permitted) < 100
    answer = encode(compiler, '{"name": "x", "n": 1}')
    matcher.follow([*PROMPT, *tokens, *answer])
    assert matcher.is_complete


def test_a_forced_end_continues_what_is_written_of_it() -> None:
    compiler, shared, format = thinking("openai_gptoss", HARMONY, begins=Reasoning.INSIDE, budget=4)
    assert format.tokens is not None
    forced = list(format.tokens.forced_end)
    for written in (0, 1, 3):
        answer = [*encode(compiler, "x") * (4 - written), *forced[:written]]
        assert len(answer) == 4
        matcher = GrammarMatcher(shared, len(PROMPT))
        for token in forced[written:]:
            matcher.follow([*PROMPT, *answer])
            assert tokens_in(mask_of(matcher)) == [token]
            answer.append(token)
        matcher.follow([*PROMPT, *answer])
        assert encode(compiler, "{")[0] in tokens_in(mask_of(matcher))


def test_a_start_marker_that_is_text(compiler: GrammarCompiler) -> None:
    """Its first token may also be the answer's: both are followed until one of them ends."""
    format = format_of("granite", embedded().tokenizer)
    assert format is not None and format.tokens is not None
    shared = rules(
        compiler,
        StructuredOutputs(regex="Here is (my answer|my thought)[.]"),
        reasoning=format.tokens,
        begins=Reasoning.MAY_FOLLOW,
    )
    start = list(format.tokens.start)
    assert len(start) > 3
    assert fresh(shared, encode(compiler, "Here is my answer.")).is_complete
    matcher = fresh(shared, start)
    assert len(tokens_in(mask_of(matcher))) > 1000  # it reasons
    matcher.follow([*PROMPT, *start, *encode(compiler, " Hm. Here is my response:")])
    assert tokens_in(mask_of(matcher)) == tokens_in(mask_of(fresh(shared, [])))
    matcher.follow(
        [*PROMPT, *start, *encode(compiler, " Hm. Here is my response:Here is my thought.")]
    )
    assert matcher.is_complete
    matcher = fresh(shared, start[:2])
    assert start[2] in tokens_in(mask_of(matcher))
