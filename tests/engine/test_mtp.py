"""MTP heads: answers do not change, and drafts are those of transformers' layers in float64."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from support.draft_oracle import Oracle, chooser, recorded
from support.mixed_requests import assert_same
from support.models import random_tokens
from support.mtp import CASES, MtpReference
from support.oracle_torch import MISSING
from support.reference import ON_GPU

from mlx_paged import LLM, SamplingParams
from mlx_paged.engine.loading import load
from mlx_paged.engine.speculation.chained_heads import ChainedHeadsDrafter
from mlx_paged.errors import InvalidParameterError, ModelLoadError
from mlx_paged.model.draft_heads.mtp import load_mtp
from mlx_paged.model.draft_heads.mtp_formats import FORMATS, REFUSED

pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.skipif(ON_GPU, reason="heads of 16 dims have no kernel on a GPU"),
]


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Oracle]:
    yield recorded(monkeypatch, 0.8)


def llm_of(path: Path, *, drafts: bool, num_blocks: int = 60, **more: Any) -> LLM:
    config = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False, **more}
    return LLM(
        load(path, dtype="float32"),
        block_size=8,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        num_gpu_blocks_override=num_blocks,
        typical_context_len=60,
        speculative_config=config if drafts else None,
    )


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.one_in(7)
def test_drafts_are_those_of_the_reference(name: str, tmp_path: Path, oracle: Oracle) -> None:
    reference = MtpReference(CASES[name], tmp_path)
    rng = np.random.default_rng(3)
    prompts = [random_tokens(rng, int(count)) for count in rng.integers(3, 40, 6)]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=20, ignore_eos=True)
        for i in range(len(prompts))
    ]
    expected = llm_of(tmp_path, drafts=False).generate(prompts, params)
    oracle.tell(expected)
    llm = llm_of(tmp_path, drafts=True)
    assert_same(llm.generate(prompts, params), expected)
    stats = llm.stats().spec_decoding
    assert stats is not None and stats.num_accepted_tokens > 40
    llm.engine.check_integrity()

    made = random.Random(2).sample(oracle.made, 16)
    num_same = 0
    for tokens, row, draft in made:
        found = reference.drafts(tokens, chooser(row), len(draft.tokens))
        num_same += tuple(found) == draft.tokens
    # An expert may be chosen by the last bit.
    assert num_same >= len(made) - 1


@pytest.mark.one_in(3)
def test_a_head_for_each_draft(tmp_path: Path, oracle: Oracle) -> None:
    """Prefixes are shared, sequences are preempted, answers have penalties."""
    MtpReference(CASES["step3p5"], tmp_path)
    with pytest.raises(InvalidParameterError, match=r"at most 3 .* has a head for each draft"):
        llm_of(tmp_path, drafts=True, num_speculative_tokens=4)
    rng = np.random.default_rng(4)
    shared = random_tokens(rng, 21)
    prompts = [[*shared, *random_tokens(rng, n)] for n in (1, 2, 5, 9, 14, 20)]
    params = [
        SamplingParams(
            temperature=0.8 * (i % 2), seed=i, max_tokens=24, ignore_eos=True, presence_penalty=0.9
        )
        for i in range(len(prompts))
    ]
    expected = llm_of(tmp_path, drafts=False).generate(prompts, params)
    oracle.tell(expected)
    llm = llm_of(tmp_path, drafts=True, num_blocks=20)
    for _ in range(2):
        assert_same(llm.generate(prompts, params), expected)
    stats = llm.stats()
    assert stats.spec_decoding is not None and stats.spec_decoding.num_accepted_tokens > 40
    assert stats.num_preemptions > 0
    assert {len(draft.tokens) for _, _, draft in oracle.made} >= {1, 2, 3}
    llm.engine.check_integrity()


def test_states_of_aborted_sequences_are_dropped(tmp_path: Path) -> None:
    MtpReference(CASES["step3p5"], tmp_path)
    engine = llm_of(tmp_path, drafts=True).engine
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for name in ("a", "b"):
        engine.add_request(name, [1, 2, 3], params)
    speculator = engine._speculator
    assert speculator is not None and isinstance(speculator._drafter, ChainedHeadsDrafter)
    while not any(len(kept) == 2 for kept in speculator._drafter._kept):
        assert engine.has_unfinished
        engine.step()
    engine.abort("a")
    while engine.has_unfinished:
        engine.step()
    engine.add_request("c", [4, 5, 6], params)
    for _ in range(3):
        engine.step()
    kept = {seq_id for each in speculator._drafter._kept for seq_id in each}
    assert kept == {seq.seq_id for seq in engine.request_states()[0].request.sequences}


def test_a_checkpoint_without_a_head_is_refused(tmp_path: Path) -> None:
    MtpReference(CASES["glm4_moe"], tmp_path)
    file = tmp_path / "model.safetensors"
    weights: dict[str, mx.array] = mx.load(str(file))  # type: ignore[assignment]
    kept = {name: w for name, w in weights.items() if not name.startswith("model.layers.4.")}
    mx.eval(kept)
    mx.save_safetensors(str(file), kept)
    with pytest.raises(ModelLoadError, match=r"no weights model.layers.4.\*, .*conversions"):
        llm_of(tmp_path, drafts=True)


def test_a_family_without_heads_is_refused() -> None:
    with pytest.raises((InvalidParameterError, ModelLoadError), match="MTP"):
        LLM(speculative_config={"method": "mtp"}, num_gpu_blocks_override=20)


def test_heads_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    assert not FORMATS.keys() & REFUSED.keys()
    for module, reason in REFUSED.items():
        with pytest.raises(
            ModelLoadError, match=re.escape(f"{module!r} is not supported: {reason}")
        ):
            load_mtp(tmp_path, {"model_type": module}, "float32")


def test_layers_of_nemotron_that_keep_a_state_are_refused(tmp_path: Path) -> None:
    MtpReference(CASES["nemotron_h"], tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text()) | {"mtp_hybrid_override_pattern": "*M"}
    file.write_text(json.dumps(fields))
    with pytest.raises(ModelLoadError, match=r"attention, experts and MLPs but are \*M"):
        llm_of(tmp_path, drafts=True)


def test_lists_of_step_that_end_with_the_models_layers_are_refused() -> None:
    config = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    with pytest.raises(ValueError, match="layer_types must name its layer, number 4"):
        FORMATS["step3p5"].fields(config)
