"""RoPE positions of prompts with pictures, against mlx-vlm's own."""

from __future__ import annotations

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import numpy as np
import pytest

from mlx_paged.multimodal.rope_positions import Grid, rope_positions


def test_text_counts_on_and_a_picture_has_its_grid() -> None:
    positions, delta = rope_positions(9, [Grid(2, 1, 2, 2)])
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 4, 5, 6],
        [0, 1, 2, 2, 3, 3, 4, 5, 6],
        [0, 1, 2, 3, 2, 3, 4, 5, 6],
    ]
    assert delta == 7 - 9


def test_frames_of_a_video_lie_behind_each_other_in_time() -> None:
    positions, delta = rope_positions(5, [Grid(0, 2, 1, 2, seconds=2.5)])
    assert positions[0].tolist() == [0, 0, 2, 2, 3]
    assert delta == 4 - 5


def test_text_alone_has_its_own_positions() -> None:
    positions, delta = rope_positions(4, [])
    assert positions.tolist() == [[0, 1, 2, 3]] * 3
    assert delta == 0


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_they_are_those_of_mlx_vlm(name: str) -> None:
    pytest.importorskip("support.vlm", reason="mlx-vlm is not installed: make test installs it")
    from support.media_models import CASES

    case = CASES[name]()
    rng = np.random.default_rng(0)
    for _ in range(5):
        prompt = case.prompt(*rng.integers(0, 9, rng.integers(0, 4)).tolist())
        tokens, _, more = case.whole(prompt)
        expected, deltas = case.model.language_model.get_rope_index(
            tokens, more.get("image_grid_thw")
        )
        positions, delta = prompt.rope()
        assert np.array_equal(
            positions, np.broadcast_to(np.array(expected)[..., 0, :], positions.shape)
        )
        assert delta == int(np.array(deltas).reshape(-1)[0])
