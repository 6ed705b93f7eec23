"""Reasoning: the formats, where it begins and ends, where a grammar begins, and its budget."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from support.embedded_llm import check_at_rest, make
from support.thinking import VOCAB_SIZE, thinking_model, tokenizer_with

from mlx_paged import LLM, SamplingParams
from mlx_paged.core import FinishReason
from mlx_paged.engine.config import EngineConfig
from mlx_paged.errors import InvalidParameterError
from mlx_paged.parsing.reasoning import REASONING_FORMATS, Reasoning, detect, format_of

# --- Formats --------------------------------------------------------------------------------------

IM = ["<|turn|>"]  # a special token of turns, which is no marker
INSIDE, MAY_FOLLOW, OVER = Reasoning.INSIDE, Reasoning.MAY_FOLLOW, Reasoning.OVER


@pytest.mark.parametrize(
    ("added", "special", "template", "name"),
    [
        ([], [], "", None),
        (["<think>", "</think>"], [], "<|im_start|>", "qwen3"),
        (["<think>", "</think>"], [], "", "deepseek_r1"),
        (["<think>", "</think>"], [], "<arg_key>", "glm45"),
        (["<think>", "</think>"], [], "<minimax:tool_call>", "minimax_m2"),
        (["<think>", "</think>"], [], "<|tool_calls_section_begin|>", "kimi_k2"),
        ([], [], "<think>\n...</think>", "deepseek_r1"),
        (["◁think▷", "◁/think▷"], [], "", "kimi"),
        (["<seed:think>", "</seed:think>"], [], "", "seed_oss"),
        ([], ["[THINK]", "[/THINK]"], "", "mistral"),
        ([], ["<|channel>", "<channel|>"], "", "gemma4"),
        ([], ["<|channel|>", "<|message|>", "<|start|>", "<|end|>"], "analysis", "openai_gptoss"),
        ([], [], "Here is my thought process:", "granite"),
        (["<longcat_think>", "</longcat_think>"], [], "", "longcat"),
        ([], ["<|START_THINKING|>", "<|END_THINKING|>"], "", "cohere"),
        (["<mm:think>", "</mm:think>"], [], "", "minimax_m3"),
        ([], ["<|open|>", "<|close|>", "<|sep|>"], "{{ '<|open|>' + tag }}", "kimi_k3"),
        ([], [], "{{ '<|open|>think<|sep|>' }}<|close|>", "kimi_k3"),
        (["<think:opensource>", "</think:opensource>"], [], "", "hy_v3"),
        (["[BEGIN FINAL RESPONSE]"], [], "after [BEGIN FINAL RESPONSE].", "apriel"),
        ([], ["<|inner_prefix|>", "<|inner_suffix|>"], "", "apertus"),
        ([], ["<|think|>", "<|content|>"], "<|begin|>assistant<|content|>", "solar_open"),
        ([], ["<|content_thinking|>"], "", "inkling"),
        ([], ["<|eom|>"], "'<|start|>assistant to=self<|message|>'", "muse_glimmer"),
        ([], [], "<|plamo:begin_think:plamo|>", "plamo3"),
        ([], [], "<beginning_of_sentence>ai name=MiniMax AI", "minimax_m1"),
    ],
)
def test_a_format_is_detected(
    added: list[str], special: list[str], template: str, name: str | None
) -> None:
    found = detect(tokenizer_with(added, special, template))
    assert (found and found.name) == name


def test_tags_may_have_a_suffix() -> None:
    tokenizer = tokenizer_with(["<think:opensource>", "</think:opensource>"], IM)
    format = format_of("hy_v3", tokenizer)
    assert format is not None
    assert (format.start, format.end) == ("<think:opensource>", "</think:opensource>")
    prompt = tokenizer.encode("<|turn|>assistant\n<think:opensource>", add_special_tokens=False)
    assert format.begins(prompt) is INSIDE


def test_a_format_is_chosen_by_name() -> None:
    tokenizer = tokenizer_with(["<think>", "</think>"])
    assert format_of("", tokenizer) is format_of("none", tokenizer) is None
    assert format_of("mistral", tokenizer).start == "[THINK]"  # type: ignore[union-attr]
    assert format_of("auto", tokenizer).name == "deepseek_r1"  # type: ignore[union-attr]
    with pytest.raises(InvalidParameterError, match="reasoning_parser"):
        format_of("nonsense", tokenizer)
    with pytest.raises(InvalidParameterError, match="reasoning_parser"):
        EngineConfig(reasoning_parser="nonsense")
    assert {"deepseek_r1", "qwen3", "glm45", "openai_gptoss", "gpt_oss", "kimi_k2", "minimax_m2",
            "gemma4", "granite", "mistral", "seed_oss"} <= set(REASONING_FORMATS)  # fmt: skip


SOLAR = ["<|begin|>", "<|end|>", "<|think|>", "<|content|>"]
K3 = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"]
HARMONY = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"]


@pytest.mark.parametrize(
    ("name", "added", "prompt", "begins"),
    [
        ("qwen3", ["<think>", "</think>"], "<|turn|>user\nHi<|turn|>assistant\n", MAY_FOLLOW),
        ("qwen3", ["<think>", "</think>"], "<|turn|>assistant\n<think>\n", INSIDE),
        ("qwen3", ["<think>", "</think>"], "<|turn|>assistant\n<think>\nWell,", INSIDE),
        ("qwen3", ["<think>", "</think>"], "<|turn|>assistant\n<think>\n\n</think>\n\n", OVER),
        ("qwen3", ["<think>", "</think>"], "<|turn|>assistant\n<think>a</think>Well", MAY_FOLLOW),
        # Markers in other turns mean nothing.
        ("qwen3", ["<think>", "</think>"], "<|turn|>user\nA <think>!<|turn|>assistant\n",
         MAY_FOLLOW),
        ("qwen3", ["<think>", "</think>"], "<|turn|>bot\n<think>a</think>b<|turn|>assistant\n",
         MAY_FOLLOW),
        ("deepseek_r1", [], "<|turn|>assistant\n<think>\n", INSIDE),  # spelled by other tokens
        ("deepseek_r1", [], "<|turn|>assistant\n<think>a</think>\n", OVER),
        ("granite", [], "<|turn|>Here is my thought process: I", INSIDE),
        ("granite", [], "<|turn|>Here is my thought process: I. Here is my response: ", OVER),
        ("gemma4", ["<|channel>", "<channel|>"], "<|turn|>model\n", MAY_FOLLOW),
        ("gemma4", ["<|channel>", "<channel|>"], "<|turn|>model\n<|channel>thought\n", INSIDE),
        ("gemma4", ["<|channel>", "<channel|>"], "<|turn|>m\n<|channel>thought\n<channel|>", OVER),
        ("openai_gptoss", HARMONY, "<|start|>user<|message|>Hi<|end|><|start|>assistant", INSIDE),
        ("openai_gptoss", HARMONY, "<|start|>assistant<|channel|>analysis<|message|>Hm", INSIDE),
        ("openai_gptoss", HARMONY, "<|start|>assistant<|channel|>final<|message|>", OVER),
        # An answer before.
        ("openai_gptoss", HARMONY, "<|start|>assistant<|channel|>final<|message|>Yes.<|end|>"
         "<|start|>user<|message|>Hi<|end|><|start|>assistant", INSIDE),
        ("solar_open", SOLAR, "<|begin|>user<|content|>Hi<|end|><|begin|>assistant", INSIDE),
        ("solar_open", SOLAR, "<|begin|>assistant<|content|>", OVER),
        ("kimi_k3", K3, '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>', INSIDE),
        ("kimi_k3", K3, "<|open|>think<|sep|>a<|close|>think<|sep|>", OVER),
        ("apriel", [], "Answer after [BEGIN FINAL RESPONSE].<|turn|>Here are my reasoning steps:\n",
         INSIDE),
        ("apriel", [], "Answer after [BEGIN FINAL RESPONSE].\n", MAY_FOLLOW),
    ],
)  # fmt: skip
def test_how_an_answer_begins(name: str, added: list[str], prompt: str, begins: Reasoning) -> None:
    markers = added if added in (HARMONY, SOLAR, K3) else []
    tokenizer = tokenizer_with([t for t in added if t not in markers], [*IM, *markers])
    format = format_of(name, tokenizer)
    assert format is not None
    tokens = tokenizer.encode(prompt, add_special_tokens=False)
    assert format.begins(tokens) is begins
    assert format.begins_inside(tokens) is (begins is INSIDE)


# --- Generation -----------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 22, 333]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
THINK = {"structured_outputs": {"json": SCHEMA}, "max_tokens": 80, "temperature": 1.0}


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no overlap"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return make(thinking_model(), async_scheduling=request.param)


@pytest.fixture(scope="module")
def markers(llm: LLM) -> tuple[int, int]:
    format = llm.engine.reasoning_format
    assert format is not None and format.tokens is not None
    [start], end = format.tokens.start, format.tokens.end_token
    assert end is not None and end < VOCAB_SIZE - 9
    return start, end


def answer(llm: LLM, prompt: str, **fields: Any) -> list[int]:
    [output] = llm.generate(prompt, SamplingParams(**{**THINK, **fields}))
    check_at_rest(llm)
    [only] = output.outputs
    assert only.finish_reason is FinishReason.STOP, only
    return only.token_ids


def valid(llm: LLM, tokens: Sequence[int]) -> bool:
    value = json.loads(llm.tokenizer.decode(list(tokens)))
    return set(value) == {"ok", "n"} and value["n"] in (1, 22, 333)


OUTSIDE = "<|im_end|><|im_start|>assistant\n"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_grammar_begins_where_the_reasoning_ends(
    llm: LLM, markers: tuple[int, int], seed: int
) -> None:
    start, end = markers
    # (The bias makes it end after some tokens.)
    tokens = answer(llm, OUTSIDE + "<think>\n", seed=seed, logit_bias={end: 7.0, start: -100})
    at = tokens.index(end)
    assert valid(llm, tokens[at + 1 :])
    eos = set(llm.engine.intake.grammar_compiler.eos_token_ids)
    assert not eos.intersection(tokens)


def test_a_prompt_that_ended_its_reasoning_begins_with_the_grammar(llm: LLM) -> None:
    assert valid(llm, answer(llm, OUTSIDE + "<think>\n\n</think>\n\n", seed=1))


def test_an_answer_may_begin_with_reasoning_or_not(llm: LLM, markers: tuple[int, int]) -> None:
    start, end = markers
    assert valid(llm, answer(llm, OUTSIDE, seed=1, logit_bias={start: -100}))
    tokens = answer(llm, OUTSIDE, seed=1, logit_bias={start: 100}, thinking_token_budget=3)
    assert tokens[:5] == [start, start, start, start, end] and valid(llm, tokens[5:])


def test_no_answer_ends_in_its_reasoning(llm: LLM, markers: tuple[int, int]) -> None:
    _, end = markers
    [eos, *_] = llm.engine.intake.grammar_compiler.eos_token_ids
    bias = {eos: 100}
    tokens = answer(llm, OUTSIDE + "<think>", seed=1, logit_bias=bias, thinking_token_budget=9)
    assert tokens[9] == end and eos not in tokens and valid(llm, tokens[10:])


def test_a_grammar_may_hold_in_the_reasoning(llm: LLM) -> None:
    outputs = {"json": SCHEMA, "enable_in_reasoning": True}
    assert valid(llm, answer(llm, OUTSIDE + "<think>", seed=1, structured_outputs=outputs))


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("stop", [None, "never this"])
def test_a_budget_forces_the_end(
    llm: LLM, markers: tuple[int, int], budget: int, stop: str | None
) -> None:
    start, end = markers
    params = SamplingParams(
        max_tokens=20, thinking_token_budget=budget, temperature=1.0, seed=3, ignore_eos=True,
        logit_bias={end: -100}, stop=stop,
    )  # fmt: skip
    free = SamplingParams(
        max_tokens=20, temperature=1.0, seed=3, ignore_eos=True, logit_bias={end: -100}, stop=stop
    )
    prompt = OUTSIDE + "<think>"
    [limited], [other] = (llm.generate(prompt, p) for p in (params, free))
    tokens = limited.outputs[0].token_ids
    assert tokens[:budget] == other.outputs[0].token_ids[:budget]
    assert tokens[budget] == end and tokens.count(end) == 1 and len(tokens) == 20
    # The budget counts from the start of the reasoning.
    begun = SamplingParams(
        max_tokens=20, thinking_token_budget=budget, seed=3, logit_bias={start: 100},
        ignore_eos=True,
    )  # fmt: skip
    [late] = llm.generate(OUTSIDE, begun)
    assert late.outputs[0].token_ids[: budget + 2] == [start] * (budget + 1) + [end]


def test_reasoning_that_ends_before_its_budget(llm: LLM, markers: tuple[int, int]) -> None:
    _, end = markers
    bias = {end: 100}
    tokens = answer(llm, OUTSIDE + "<think>", seed=1, logit_bias=bias, thinking_token_budget=4)
    assert tokens[0] == end and valid(llm, tokens[1:])


def test_a_budget_needs_a_format() -> None:
    llm = make(thinking_model(), reasoning_parser="none")
    with pytest.raises(InvalidParameterError, match="thinking_token_budget"):
        llm.generate("x", SamplingParams(thinking_token_budget=3))
    outputs = {"regex": "a", "enable_in_reasoning": True}
    llm = make(thinking_model())
    with pytest.raises(InvalidParameterError, match="thinking_token_budget"):
        llm.generate("x", SamplingParams(thinking_token_budget=3, structured_outputs=outputs))
