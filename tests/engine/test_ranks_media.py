"""Models with media in a pipeline: the answers of one rank, and other divisions refused."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import numpy as np
import pytest

pytest.importorskip("support.vlm", reason="mlx-vlm is not installed: make test installs it")

from support import media_checkpoints
from support.media_files import picture
from support.media_models import CASES
from support.pipelined import OneOf

from mlx_paged import LLM, SamplingParams
from mlx_paged.engine.ranks.media import media_columns, media_of
from mlx_paged.engine.ranks.messages import STEP, Message, MessageError
from mlx_paged.errors import UnsupportedModelError
from mlx_paged.model.media import StepMedia
from mlx_paged.model.pipeline import divide_layers
from mlx_paged.model.sharding import shard
from mlx_paged.multimodal.families import MEDIA_FAMILIES
from mlx_paged.multimodal.model import MultiModalModel


def answers(path: Path, **options: Any) -> list[dict[int, float]]:
    """The log-probability of each token of each answer."""
    llm = LLM(path, block_size=8, kv_cache_memory=4 << 20, max_num_batched_tokens=24, **options)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    pictures = [{"type": "image", "image": picture(width, 60)} for width in (60, 90)]
    text = {"type": "text", "text": "what?"}
    chats = [[{"role": "user", "content": content}] for content in ([text, *pictures], [text])]
    found = [output.outputs[0] for output in llm.chat(chats, params)]
    return [
        {token: report[token].logprob for token, report in zip(answer.token_ids, answer.logprobs)}
        for answer in found
        if answer.logprobs is not None
    ]


@pytest.mark.parametrize("name", ["qwen2_vl", pytest.param("gemma3", marks=pytest.mark.one_in(3))])
def test_answers_in_a_pipeline_are_those_of_one_rank(name: str, tmp_path: Path) -> None:
    """With RoPE in three dimensions, or with positions that see each other; in parts of prompts."""
    path = media_checkpoints.write(tmp_path / "model", media_checkpoints.checkpoint(name))
    wanted, found = answers(path), answers(path, pipeline_parallel_size=2)
    assert len(wanted) == 2
    for one, several in zip(wanted, found, strict=True):
        assert several == pytest.approx(one, abs=1e-4)


def test_other_divisions_are_refused() -> None:
    case = CASES["qwen3_vl"]()
    model = MultiModalModel(case.model, MEDIA_FAMILIES[case.module], case.module)
    config, group = {"model_type": case.module}, OneOf(2)
    with pytest.raises(UnsupportedModelError, match="features of media are added between its lay"):
        divide_layers(model, config, group)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="no shard"):
        shard(model, config, group)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_media_of_a_step_are_read_as_they_were_written(kind: type) -> None:
    rope = np.arange(12, dtype=kind).reshape(3, 4) / kind(2)
    given = StepMedia(
        np.array([1, 3], np.int32), None, rope.astype(kind), np.ones((2, 4), np.int32)
    )
    message = Message(STEP, {}, media_columns(given))
    found = media_of(Message.decode(message.encode()))
    assert found is not None
    found.check(4)
    for name in ("rows", "rope_positions", "bounds"):
        assert np.array_equal(getattr(found, name), getattr(given, name)), name
    assert found.rope_positions is not None and found.rope_positions.dtype == kind
    assert media_of(Message(STEP)) is None
    with pytest.raises(MessageError, match="the media of a step: cannot reshape"):
        media_of(Message(STEP, {}, {**message.columns, "rope_positions": array("i", [1, 2])}))
