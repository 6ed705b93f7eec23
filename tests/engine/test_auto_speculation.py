"""The method "auto": lookups, and the head of the checkpoint where there is one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import numpy as np
import pytest
from support.mixed_requests import assert_same
from support.models import random_tokens
from support.mtp import CASES, MtpReference
from support.oracle_torch import MISSING
from support.reference import ON_GPU

from mlx_paged import LLM, SamplingParams
from mlx_paged.engine.loading import load
from mlx_paged.engine.speculation.acceptance import Acceptance, Draft, Source
from mlx_paged.engine.speculation.head_drafter import HeadDrafter
from mlx_paged.engine.speculation.lookup import LookupDrafter
from mlx_paged.errors import InvalidParameterError

_KINDS = 7  # of a source


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Counter[Source]:
    """Counts the drafts that were compared with the tokens that came, by their source."""
    counts: Counter[Source] = Counter()
    settle = Acceptance.settle

    def counted(self: Acceptance, draft: Draft, *args: Any) -> None:
        counts[Source(draft.kind // _KINDS)] += 1
        settle(self, draft, *args)

    monkeypatch.setattr(Acceptance, "settle", counted)
    return counts


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.skipif(ON_GPU, reason="heads of 16 dims have no kernel on a GPU")
@pytest.mark.parametrize("adaptive", [False, True])
def test_lookups_and_a_head_together(
    tmp_path: Path, sources: Counter[Source], adaptive: bool
) -> None:
    MtpReference(CASES["mimo"], tmp_path)
    rng = np.random.default_rng(5)
    # Half of the prompts repeat themselves, so that there is something to look up.
    prompts = [random_tokens(rng, 9) * (1 + 3 * (i % 2)) for i in range(6)]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, ignore_eos=True)
        for i in range(len(prompts))
    ]

    def llm_of(config: dict[str, Any] | None) -> LLM:
        model = load(tmp_path, dtype="float32")
        return LLM(
            model, block_size=8, max_num_seqs=6, num_gpu_blocks_override=80,
            speculative_config=config,
        )  # fmt: skip

    expected = llm_of(None).generate(prompts, params)
    llm = llm_of({"method": "auto", "adaptive": adaptive})
    speculator = llm.engine._speculator
    assert speculator is not None
    assert isinstance(speculator._drafter, HeadDrafter)
    assert isinstance(speculator._lookup, LookupDrafter)
    for _ in range(2):
        assert_same(llm.generate(prompts, params), expected)
    found = llm.stats().spec_decoding
    assert found is not None
    if not adaptive:
        assert sources[Source.MODEL] > 20
        # The second time, the answers are known.
        assert sources[Source.SEQUENCE] + sources[Source.SHARED] > 10
        assert found.num_accepted_tokens > 60
    llm.engine.check_integrity()


def test_a_checkpoint_without_a_head_has_lookups(sources: Counter[Source]) -> None:
    llm = LLM(speculative_config={"method": "auto", "adaptive": False})
    speculator = llm.engine._speculator
    assert speculator is not None and speculator._lookup is None
    assert isinstance(speculator._drafter, LookupDrafter)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    first, second = (llm.generate("def add(a, b):", params)[0].outputs[0] for _ in range(2))
    assert first.token_ids == second.token_ids and sources[Source.SHARED] > 0
    with pytest.raises(
        InvalidParameterError, match=r"model must be left out for the method 'auto'"
    ):
        LLM(speculative_config={"method": "auto", "model": "some/model"})
