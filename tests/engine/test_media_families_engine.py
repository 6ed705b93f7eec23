"""mlx-vlm's models in the engine: RoPE in three dimensions, deepstack, recurrent states.

Their steps are held to mlx-vlm in `tests/multimodal/test_media_families.py`. The engine adds
chunks, prefix hits, several requests, decoding past a picture.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import numpy as np
import pytest

pytest.importorskip("support.vlm", reason="mlx-vlm is not installed: make test installs it")

from mlx_lm.utils import load_tokenizer
from support.fake_vlm import FakeMediaModel
from support.media_cases import Prompt, V, vary
from support.media_models import CASES
from support.media_parity import generated

from mlx_paged.core import MediaSpan
from mlx_paged.demo import model_path
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.model.loader import LoadedModel
from mlx_paged.model.media import MediaPrompt, Span
from mlx_paged.multimodal.families import MEDIA_FAMILIES
from mlx_paged.multimodal.model import MultiModalModel

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@dataclass
class Prepared:
    prompt: MediaPrompt
    spans: tuple[MediaSpan, ...]


def prepared(prompt: Prompt, rope: bool) -> Prepared:
    spans, core, inputs = [], [], []
    for offset, item in prompt.items:
        length = len(item.token_ids)
        spans.append(Span(offset, length, item.rows + offset, "image"))
        digest = sha256(b"".join(item.arrays[name].tobytes() for name in sorted(item.arrays)))
        core.append(MediaSpan(offset, length, digest.digest(), len(item.rows)))
        inputs.append(item.inputs())
    positions, delta = prompt.rope() if rope else (None, 0)
    return Prepared(MediaPrompt(prompt.token_ids, spans, inputs, positions, delta), tuple(core))


@lru_cache(maxsize=1)
def tokenizer() -> Any:
    return load_tokenizer(model_path())


@pytest.mark.parametrize(
    ("name", "overlap"),
    [("qwen2_vl", False), ("qwen3_vl", True), ("qwen3_5", True), ("smolvlm", True)],
)
def test_requests_with_pictures(name: str, overlap: bool) -> None:
    case = CASES[name]()
    vary(case.model)
    family = MEDIA_FAMILIES[case.module]
    prompts = [case.prompt(*seeds) for seeds in ((1,), (2,), (1, 2), (), (1,))]
    expected = [generated(case, prompt, GREEDY.max_tokens or 0)[0] for prompt in prompts]
    model = MultiModalModel(case.model, family, case.module)
    media: Any = FakeMediaModel(("image",), family.uses_rope_positions)
    config = {"model_type": case.module, "vocab_size": V}
    engine = Engine(
        LoadedModel(model, tokenizer(), config, case.module, {}, media),
        EngineConfig(
            kv_cache_memory=16 << 20,
            block_size=8,
            max_num_batched_tokens=13,
            max_num_seqs=4,
            async_scheduling=overlap,
        ),
    )
    for again in range(2):
        outputs = []
        for i, prompt in enumerate(prompts):
            given = prepared(prompt, family.uses_rope_positions)
            more = {"media": given} if given.spans else {}
            outputs.append(engine.add_request(f"{i}", prompt.token_ids, GREEDY, **more))
        while engine.has_unfinished:
            engine.step()
            engine.check_integrity()
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert engine.stats().encoder_cache.num_encoded_items == 2, "one for each picture"
        if again:
            assert np.mean([output.num_cached_tokens for output in outputs]) > 8
    assert engine.stats().num_faults == 0
