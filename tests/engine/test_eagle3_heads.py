"""EAGLE-3 heads for other models than Llama and of newer formats, against a float64 reference."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import numpy as np
import pytest
from support.draft_oracle import Oracle, chooser, recorded
from support.eagle3 import CONFIG as HEAD
from support.eagle3 import Reference, make_eagle3, states_of
from support.mixed_requests import assert_same
from support.models import embedded, random_tokens, tiny_config, tiny_model
from support.reference import ON_GPU

from mlx_paged import LLM, SamplingParams
from mlx_paged.errors import ModelLoadError
from mlx_paged.model.loader import LoadedModel

pytestmark = pytest.mark.skipif(ON_GPU, reason="heads of 16 dims have no kernel on a GPU")

PLACES = (2, 4, 5)  # the defaults for eight layers
NUM_DRAFTS = 3
WINDOW = 20
TARGETS: dict[str, dict[str, Any]] = {
    "llama": tiny_config("llama", num_hidden_layers=8),
    "qwen2": tiny_config("qwen2", num_hidden_layers=8),
    "qwen3": tiny_config("qwen3", num_hidden_layers=8, tied=False),
    "mistral": tiny_config("ministral3", num_hidden_layers=8, layer_types=None, rope_parameters={
        "rope_theta": 1e4, "rope_type": "default", "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 64,
    }),
    "gpt_oss": tiny_config(
        "gpt_oss", num_hidden_layers=8, num_local_experts=4, num_experts_per_tok=2,
        rope_scaling=None, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 4,
    ),
}  # fmt: skip


class Case(NamedTuple):
    """A model and a head."""

    target: str
    head: dict[str, Any]
    reference: dict[str, Any]


SPECULATORS: dict[str, Any] = {"model_type": "llama", "rope_theta": 5e5}
RESIDUAL = {"norm_before_residual": True}
CASES = {
    "Qwen 2, SafeAILab": Case("qwen2", {}, {}),
    "Qwen 3, Llama's layer": Case(
        "qwen3", {"nested": SPECULATORS, **RESIDUAL}, {"rope_theta": 5e5, **RESIDUAL}
    ),
    "Qwen 3, its own layer, states after the norm": Case(
        "qwen3",
        {"nested": {"model_type": "qwen3"}, "norm_before_fc": True, "norm_output": True},
        {**RESIDUAL, "norm_output": True},
    ),
    "gpt-oss, joined states normed": Case(
        "gpt_oss", {"eagle_config": {"norm_before_fc": True}, "norm_before_fc": True}, {}
    ),
    "gpt-oss, each state normed, a window": Case(
        "gpt_oss",
        {
            "nested": {
                "model_type": "llama", "layer_types": ["sliding_attention"], "sliding_window": 12,
            },
            "fc_norm": True,
        },
        {**RESIDUAL, "window": 12},
    ),
    "Mistral, the model's output": Case("mistral", {"has_output": False}, {}),
    "Llama, one state of the head's own size": Case(
        "llama", {"eagle_aux_hidden_state_layer_ids": [4]}, {}
    ),
}  # fmt: skip


def target_of(name: str) -> LoadedModel:
    config = TARGETS[name]
    return LoadedModel(tiny_model(config), embedded().tokenizer, config, "tiny")


def llm_of(name: str, path: Path | None) -> LLM:
    options: dict[str, Any] = {}
    if path is not None:
        options["speculative_config"] = {
            "method": "eagle3",
            "model": str(path),
            "num_speculative_tokens": NUM_DRAFTS,
            "adaptive": False,
        }
    return LLM(
        target_of(name), block_size=8, max_num_seqs=8, max_num_batched_tokens=24,
        num_gpu_blocks_override=60, **options,
    )  # fmt: skip


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Oracle]:
    yield recorded(monkeypatch, 0.8)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", list(CASES))
def test_drafts_are_those_of_the_reference(tmp_path: Path, oracle: Oracle, name: str) -> None:
    case = CASES[name]
    weights = make_eagle3(tmp_path, **case.head)
    rng = np.random.default_rng(3)
    prompts = [random_tokens(rng, int(count)) for count in rng.integers(3, 40, 6)]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=16, ignore_eos=True)
        for i in range(len(prompts))
    ]
    expected = llm_of(case.target, None).generate(prompts, params)
    oracle.tell(expected)
    llm = llm_of(case.target, tmp_path)
    assert_same(llm.generate(prompts, params), expected)
    found = llm.stats().spec_decoding
    assert found is not None and found.num_accepted_tokens > 20
    assert found.num_accepted_tokens < found.num_draft_tokens

    model = target_of(case.target).model
    embeddings = np.array(model.model.embed_tokens.weight)
    output = embeddings if "lm_head" not in model else np.array(model.lm_head.weight)
    reference = Reference(weights, embeddings, output=output, **case.reference)
    chosen = random.Random(2).sample(oracle.made, 25)
    for tokens, row, draft in chosen:
        places = case.head.get("eagle_aux_hidden_state_layer_ids", PLACES)
        states = states_of(model, tokens[:-1], places)
        drafts = reference.drafts(tokens, states, chooser(row), len(draft.tokens))
        assert tuple(drafts) == draft.tokens
    assert len({draft.tokens for *_, draft in chosen}) > 5, "drafts depend on the text"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nested": {"model_type": "deepseek_v3"}}, "model_type must be 'llama' or 'qwen3'"),
        ({"nested": {}, "speculators_model_type": "peagle"}, "speculators_model_type must be"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm must be False but is"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu' but is 'gelu'"),
        ({"has_output": False, "vocab_size": 96, "norm_before_fc": True}, None),
    ],
)
def test_other_heads_are_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], message: str | None
) -> None:
    make_eagle3(tmp_path, **fields)
    if message is None:
        assert llm_of("llama", tmp_path).stats().spec_decoding is not None
        return
    with pytest.raises(ModelLoadError, match=message):
        llm_of("llama", tmp_path)


def test_a_head_without_an_output_of_its_vocabulary_is_refused(tmp_path: Path) -> None:
    make_eagle3(tmp_path, has_output=False)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        config.replace('"draft_vocab_size": null', '"draft_vocab_size": 60')
    )
    with pytest.raises(ModelLoadError, match=r"lm_head.weight is missing"):
        llm_of("llama", tmp_path)
    assert HEAD["draft_vocab_size"] == 60
