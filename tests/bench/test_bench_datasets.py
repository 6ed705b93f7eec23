"""The data sets of the benchmarks: what is asked is what the options say."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from typer.testing import CliRunner

from mlx_paged.bench.datasets import Dataset, Prompt, Workload, random_prompts, tokenizer_of
from mlx_paged.cli.main import app
from mlx_paged.demo.prompts import CHATS, REQUESTS, SYSTEM_PROMPT
from mlx_paged.errors import InvalidParameterError, ModelLoadError


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_of(None)


def lens(prompts: list[Prompt]) -> list[int]:
    return [prompt.num_tokens for prompt in prompts]


def test_random_prompts_have_the_lengths_asked_and_share_their_prefix(tokenizer) -> None:
    prompts = random_prompts(tokenizer, 5, 20, 7, prefix_len=12)
    assert lens(prompts) == [32] * 5
    assert [p.max_tokens for p in prompts] == [7] * 5
    assert len({p.token_ids[:12] for p in prompts}) == 1
    assert len({p.token_ids[12:] for p in prompts}) == 5
    special = set(tokenizer.all_special_ids)
    assert not special & {token for p in prompts for token in p.token_ids}
    assert prompts[0].text == tokenizer.decode(list(prompts[0].token_ids))


def test_a_seed_makes_prompts_and_another_makes_others(tokenizer) -> None:
    def made(seed: int) -> list[Prompt]:
        return random_prompts(tokenizer, 3, 8, 4, seed=seed)

    assert made(1) == made(1)
    assert made(1) != made(2)


def test_random_lengths_vary_within_their_range(tokenizer) -> None:
    prompts = random_prompts(tokenizer, 200, 20, 10, prefix_len=5, range_ratio=0.5)
    assert {n - 5 for n in lens(prompts)} == set(range(10, 31))
    assert {p.max_tokens for p in prompts} == set(range(5, 16))


def test_text_is_counted_as_who_gets_it_would(tokenizer) -> None:
    prompt = Prompt((1, 2, 3), 4, "def add(a, b):")
    again = prompt.as_text(tokenizer)
    assert list(again.token_ids) == tokenizer.encode("def add(a, b):")
    assert (again.text, again.max_tokens) == (prompt.text, 4)


def test_repeated_prefixes(tokenizer) -> None:
    workload = Workload(
        Dataset.PREFIX_REPETITION,
        12,
        output_len=3,
        repeated_prefix_len=16,
        repeated_suffix_len=8,
        num_prefixes=4,
    )
    prompts = workload.sample(tokenizer, 0)
    assert lens(prompts) == [24] * 12 and {p.max_tokens for p in prompts} == {3}
    assert sorted(Counter(p.token_ids[:16] for p in prompts).values()) == [3] * 4
    assert len({p.token_ids[16:] for p in prompts}) == 12
    in_order = [p.token_ids[:16] for p in prompts[:4]]
    assert len({*in_order}) < 4, "the prompts should be shuffled"


def test_embedded_chats(tokenizer) -> None:
    prompts = Workload(Dataset.EMBEDDED, 6).sample(tokenizer, 3)
    for prompt in prompts:
        assert prompt.messages is not None
        system, user = prompt.messages
        assert system == {"role": "system", "content": SYSTEM_PROMPT}
        assert user["content"] in {*CHATS, *REQUESTS}
        rendered = tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True)
        assert list(prompt.token_ids) == rendered
        assert tokenizer.decode(rendered) == prompt.text
    assert len({p.text for p in prompts}) == 6
    short = Workload(Dataset.EMBEDDED, 6, output_len=9, system_prompt=False).sample(tokenizer, 3)
    assert all(p.messages and len(p.messages) == 1 and p.max_tokens == 9 for p in short)
    assert max(lens(short)) < 40 < min(lens(prompts))


# --- conversations --------------------------------------------------------------------------------


def conversation(*texts: str) -> dict[str, Any]:
    names = ("human", "gpt")
    turns = [{"from": names[i % 2], "value": text} for i, text in enumerate(texts)]
    return {"id": "x", "conversations": turns}


def test_conversations_that_are_usable(tokenizer, tmp_path) -> None:
    long = " list" * 1100
    entries = [
        conversation("Write a function that adds two numbers", "def add(a, b): return a + b", "x"),
        conversation("a", "def add(a, b): return a + b"),  # the prompt is too short
        conversation("Write a function that adds two numbers"),  # nobody answered
        conversation("Write a function that adds three", "No"),  # the answer is too short
        conversation(long, "def add(a, b): return a + b"),  # the prompt is too long
        conversation("Write a list of many", long * 2),  # too long together
        conversation("Return the sum of all even numbers", "def total(numbers): return 0"),
    ]
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps(entries))
    prompts = Workload(Dataset.SHAREGPT, 2, path).sample(tokenizer, 0)
    by_text = {p.text: p for p in prompts}
    assert by_text.keys() == {e["conversations"][0]["value"] for e in (entries[0], entries[6])}
    first = by_text["Write a function that adds two numbers"]
    assert list(first.token_ids) == tokenizer.encode(first.text)
    assert first.max_tokens == len(tokenizer.encode("def add(a, b): return a + b"))
    assert first.messages == ({"role": "user", "content": first.text},)
    # With a length of their own, answers may have been short or long.
    prompts = Workload(Dataset.SHAREGPT, 4, path, output_len=5).sample(tokenizer, 0)
    assert {p.max_tokens for p in prompts} == {5} and len(prompts) == 4
    with pytest.raises(InvalidParameterError, match="at most 2, the number of conversations"):
        Workload(Dataset.SHAREGPT, 3, path).sample(tokenizer, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "dataset_path must be JSON"),
        ("{}", r"dataset_path must be a JSON list of .* but got 'dict'"),
        ('[{"conversations": []}, {"conversation": []}]', r"\(entry 1 is not\)"),
        ('[{"conversations": [{"text": "x"}]}]', r"\(entry 0 is not\)"),
        ('[{"conversations": [{"value": 3}]}]', r"\(entry 0 is not\)"),
        ("[7]", r"\(entry 0 is not\)"),
        (None, "dataset_path must be a readable file"),
    ],
)
def test_files_that_hold_something_else(tokenizer, tmp_path, content, message) -> None:
    path = tmp_path / "conversations.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidParameterError, match=message):
        Workload(Dataset.SHAREGPT, 1, path).sample(tokenizer, 0)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--dataset-name", "embedded", "--input-len", "9"], "input_len"),
        (["--dataset-name", "sharegpt"], "dataset_path"),
        (["--dataset-name", "sharegpt", "--prefix-len", "0"], "prefix_len"),
        (["--dataset-path", "x.json"], "dataset_path"),
        (["--random-range-ratio", "1"], "random_range_ratio"),
        (["--dataset-name", "embedded", "--random-range-ratio", "0.5"], "random_range_ratio"),
        (["--prefix-repetition-prefix-len", "8"], "prefix_repetition_prefix_len"),
        (["--prefix-repetition-suffix-len", "8"], "prefix_repetition_suffix_len"),
        (["--prefix-repetition-num-prefixes", "8"], "prefix_repetition_num_prefixes"),
        (["--dataset-name", "prefix_repetition", "--num-prompts", "9"],
         "prefix_repetition_num_prefixes"),
        (["--no-system-prompt"], "system_prompt"),
        (["--dataset-name", "embedded", "--num-prompts", "75"], "num_prompts"),
        (["--metric-percentiles", "50,101"], "metric_percentiles"),
        (["--metric-percentiles", "median"], "metric_percentiles"),
        (["--input-len", "4096"], "max_model_len"),
        (["--block-size", "9"], "block_size"),
        (["--engine", "mlx-paged", "--engine", "mlx-paged"], "engine"),
        (["--output-json", "/nowhere/at/all.json"], "output_json"),
    ],
)  # fmt: skip
def test_refused_options_are_named(flags, field) -> None:
    done = CliRunner().invoke(app, ["bench", "throughput", *flags])
    assert isinstance(done.exception, InvalidParameterError), done.output
    assert done.exception.field == field


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(ModelLoadError, match="'/nowhere': no tokenizer"):
        tokenizer_of("/nowhere")
