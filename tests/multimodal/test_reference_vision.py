"""Multimodal checkpoints that transformers saves give transformers' answers, family by family."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("support.vlm", reason="mlx-vlm is not installed: make test installs it")

from PIL import Image
from support.more_reference_vision import ALL_REFERENCES
from support.oracle_torch import MISSING
from support.reference_answers import kind_of, log_probabilities, save

from mlx_paged import LLM, SamplingParams, load
from mlx_paged.multimodal.corrections import DEVIATIONS, VERSIONS
from mlx_paged.multimodal.families import MEDIA_FAMILIES
from mlx_paged.multimodal.mlx_vlm import MLX_VLM_VERSION

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

COUNT = 3  # tokens of an answer
ONE = [(90, 60), "What is this?"]
TALL = ["Look: ", (61, 133), " What?"]
TWO = [(90, 60), "and", (200, 40), "compare"]
LARGE = [(640, 480), "x"]
TINY = [(1, 1), "x"]


def picture(seed: int, width: int, height: int) -> Image.Image:
    shape = (max(1, height // 7 + 1), max(1, width // 7 + 1), 3)
    pixels = np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def prompts(name: str) -> dict[str, list[Any]]:
    reference = ALL_REFERENCES[name]
    found: dict[str, list[Any]] = {"text": ["What is this?"]}
    sizes = {"one": ONE, "tall": TALL, "two": TWO, "large": LARGE, "tiny": TINY}
    for label, parts in sizes.items():
        if label in reference.without:
            continue
        filled = [picture(i, *p) if isinstance(p, tuple) else p for i, p in enumerate(parts)]
        if reference.pictures_first:
            pictures = [part for part in filled if not isinstance(part, str)]
            filled = [*pictures, "".join(part for part in filled if isinstance(part, str))]
        found[label] = filled
    if reference.videos:
        # (Wider than it is long: transformers 5 goes on from a video's width, where its versions
        # before, and the models' own code, went on from its largest position.)
        frames = np.random.default_rng(0).integers(0, 255, (3, 64, 160, 3), dtype=np.uint8)
        video = (frames, {"fps": 4.0})
        found["video"] = [video, "what happens?"]
        found["video and image"] = [video, "and", picture(3, 90, 60), "compare"]
    if reference.sounds:
        samples = np.random.default_rng(1).normal(0, 0.1, 6_000).astype(np.float32)
        found["sound"] = [(samples, 16_000), "what is said?"]
        found["sound and image"] = [(samples, 16_000), "and", picture(4, 60, 90), "compare"]
    return found


@pytest.mark.one_in(13)
@pytest.mark.parametrize("name", sorted(ALL_REFERENCES))
def test_answers_are_those_of_transformers(name: str, tmp_path: Path, record_property: Any) -> None:
    reference = ALL_REFERENCES[name]
    with reference.running():
        differences = compared(name, tmp_path)
    record_property("differences", differences)
    assert all(value < reference.tolerance for value in differences.values()), differences


def compared(name: str, path: Path) -> dict[str, float]:
    """By prompt: the largest difference of log-probabilities."""
    model = save(name, path)
    loaded = load(path, dtype="float32")
    assert loaded.media is not None
    llm = LLM(loaded, kv_cache_memory=32 << 20, block_size=16)
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=1)
    differences = {}
    for label, parts in prompts(name).items():
        content = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": kind_of(part), kind_of(part): part}
            for part in parts
        ]
        [output] = llm.chat([{"role": "user", "content": content}], params)
        [answer] = output.outputs
        tokens, expected = log_probabilities(
            name, model, loaded.media, parts, list(output.prompt_token_ids), COUNT
        )
        assert list(answer.token_ids) == tokens, label
        assert answer.logprobs is not None
        differences[label] = max(
            abs(float(answer.logprobs[i][token].logprob) - float(expected[i, token]))
            for i, token in enumerate(tokens)
        )
    return differences


def test_the_page_lists_what_is_compared_and_what_deviates() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/models.md").read_text()
    section = page.split("### Multimodal models and transformers")[1].split("\n## ")[0]
    table = section.split("<!-- media reference: end -->")[0]
    for name in ALL_REFERENCES:
        assert f"`{name}`" in table
    compared_packages = {reference.checkpoint for reference in ALL_REFERENCES.values()}
    compared_packages |= {"qwen3_vl_moe", "qwen3_5_moe"}  # (with the processor of another)
    named = set(re.findall(r"\w+", section.split("<!-- media reference: end -->")[1]))
    assert MEDIA_FAMILIES.keys() - compared_packages <= named
    for deviation in DEVIATIONS:
        assert f"| {', '.join(deviation.packages)} | {deviation.what} |" in section
    assert ", ".join(f"{name} {version}" for name, version in VERSIONS.items()) in section
    assert VERSIONS["mlx-vlm"] == MLX_VLM_VERSION
