"""Checkpoints of multimodal models: how they are loaded, and the prompts of their processors."""

from __future__ import annotations

import importlib
import json
import logging
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("support.vlm", reason="mlx-vlm is not installed: make test installs it")

from PIL import Image
from support.media_checkpoints import CHECKPOINTS, PROCESSORS, Checkpoint, write
from support.more_media_checkpoints import ALL_CHECKPOINTS, MORE_PROCESSORS

from mlx_paged import LLM, SamplingParams
from mlx_paged.engine.loading import load
from mlx_paged.errors import ModelLoadError, UnsupportedModelError
from mlx_paged.model.loader import LoadedModel
from mlx_paged.model.media import MediaPrompt
from mlx_paged.multimodal import loading, mlx_vlm
from mlx_paged.multimodal.families import MEDIA_FAMILIES
from mlx_paged.multimodal.processor import MediaModel

QUESTION: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "look:"},
            {"type": "image"},
            {"type": "text", "text": " and\n"},
            {"type": "image"},
        ],
    }
]


def picture(seed: int, width: int = 90, height: int = 60) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    folder, models = tmp_path_factory.mktemp("checkpoints"), {}

    def get(name: str) -> LoadedModel:
        if name not in models:
            models[name] = load(write(folder / name, ALL_CHECKPOINTS[name]()))
        return models[name]

    return get


def media_of(model: LoadedModel) -> MediaModel:
    assert model.media is not None
    return model.media


# (These have tests of their own.)
OTHERWISE = {"llava_bunny", "llava_next", "molmo", "paligemma", "phi3_v"}
# mlx-vlm takes one picture a prompt of these.
ONE_BY_ONE = {
    "deepseekocr",
    "deepseekocr_2",
    "fastvlm",
    "granite4_vision",
    "paddleocr_vl",
    "phi4mm",
}
# Their models put the rows in the place of one placeholder.
SHORT = {"fastvlm", "phi4mm"}


# Inputs that are lists of an array per image; these models take no others.
_MINICPM = {"pixel_values", "tgt_sizes", "image_bound"}
RAGGED = {
    "minicpmo": _MINICPM,
    "minicpmv4_6": _MINICPM,
    "deepseekocr": {"pixel_values", "images_seq_mask", "images_spatial_crop"},
    "deepseekocr_2": {"pixel_values", "images_seq_mask", "images_spatial_crop"},
}


def _on_device(value: Any, *, ragged: bool) -> Any:
    if ragged and isinstance(value, list):
        return [_on_device(part, ragged=True) for part in value]
    return value if isinstance(value, (mx.array, int)) else mx.array(np.array(value))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", sorted(set(ALL_CHECKPOINTS) - OTHERWISE))
def test_a_prompt_is_what_the_processor_makes_of_it_as_a_whole(
    name: str, loaded: Callable[[str], LoadedModel]
) -> None:
    model = loaded(name)
    media = media_of(model)
    # (Of one size: processors pad several pictures to the largest of them.)
    images = [picture(1), picture(2)][: 1 if name in ONE_BY_ONE else 2]
    content = QUESTION[0]["content"][: 2 * len(images)]
    question = [{"role": "user", "content": content}]
    prompt = media.process(question, images=images)
    text = media._rendered(question)
    if name == "dots_ocr":  # (its processor has the id of the published tokenizer)
        media._processor.image_token_id = media._config.image_token_id
    if name in ("deepseekocr", "deepseekocr_2"):
        # (It takes the last token away.)
        found = media._processor(text=text + "?", images=images)
        whole = {key: found[key] for key in ("images_seq_mask", "images_spatial_crop")}
        whole |= {"input_ids": found["input_ids"], "pixel_values": found["images"]}
    elif name == "deepseek_vl_v2":
        found = media._processor(text=text, images=images)
        whole = {key: found[key] for key in ("input_ids", "images_seq_mask")}
        whole["pixel_values"] = found["images"]
        whole["images_spatial_crop"] = mx.pad(
            found["images_spatial_crop"], [(0, 0), (0, 9), (0, 0)]
        )
    else:
        whole = media._processor(text=[text], images=images)
    made = np.array(whole["input_ids"]).reshape(-1).tolist()
    if name in SHORT:
        [at] = [i for i, token in enumerate(made) if token == -200]
        rows = prompt.inputs[0].num_rows
        assert prompt.token_ids == [*made[:at], *[0] * rows, *made[at + 1 :]]
    else:
        assert prompt.token_ids == made
    # The model's own merge of all pictures into the whole prompt, against item for item.
    arrays = {
        key: _on_device(value, ragged=name in RAGGED)
        for key, value in whole.items()
        if key not in ("input_ids", "attention_mask", "mm_token_type_ids")
        and key in RAGGED.get(name, {key})
    }
    pixels = arrays.pop("pixel_values")
    tokens = mx.array([made])
    vlm = model.model.vlm
    expected = vlm.get_input_embeddings(tokens, pixels, mask=mx.ones_like(tokens), **arrays)
    for span, item in zip(prompt.spans, prompt.inputs):
        assert span.offset == span.rows[0]
        assert span.length == span.rows[-1] - span.rows[0] + 1
        if name not in SHORT:
            own = item.token_ids[item.rows[0] : item.rows[-1] + 1].tolist()
            assert prompt.token_ids[span.offset : span.offset + span.length] == own
        features = model.model.encode(item)
        assert media.is_atomic("image") == (name == "gemma3")
        rows = expected.inputs_embeds[0][mx.array(span.rows)]
        assert mx.allclose(features.embeds, rows, atol=1e-5).item()
        if expected.deepstack_visual_embeds is not None and name == "granite4_vision":
            for part, whole_part in zip(features.deepstack, expected.deepstack_visual_embeds):
                assert mx.allclose(part, whole_part[mx.array(span.rows)], atol=1e-5).item()
    assert len(prompt.spans) == len(images)
    if media.uses_rope_positions:
        positions, deltas = vlm.language_model.get_rope_index(tokens, arrays["image_grid_thw"])
        assert np.array_equal(prompt.rope_positions, np.array(positions)[:, 0])
        assert prompt.rope_delta == deltas.item()
    else:
        assert prompt.rope_positions is None


# (PaliGemma's prompts see themselves as a whole; without a picture they are causal here. mlx-vlm
# leaves a scale out for Gemma 3n. What its generation of Qwen 3 Omni calls is replaced.)
NO_REFERENCE = {"gemma3n", "paligemma", "qwen3_omni_moe"}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", sorted(set(ALL_CHECKPOINTS) - NO_REFERENCE))
def test_a_text_alone_is_served_by_the_engine(
    name: str, loaded: Callable[[str], LoadedModel]
) -> None:
    from mlx_vlm.generate import generate_step

    model = loaded(name)
    llm = LLM(model, kv_cache_memory=4 << 20, block_size=16)
    prompt = "what is this?"
    [output] = llm.generate([prompt], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    tokens = mx.array([output.prompt_token_ids])
    vlm = model.model.vlm
    steps = generate_step(tokens, vlm, None, None, max_tokens=3, temperature=0)
    expected = [int(np.array(token).reshape(-1)[0]) for (token, _), _ in zip(steps, range(3))]
    for state in ("_rope_deltas", "_position_ids"):
        if hasattr(vlm.language_model, state):
            setattr(vlm.language_model, state, None)
    assert list(output.outputs[0].token_ids) == expected


def clip(frames: int = 5, fps: float = 2.0) -> Any:
    pixels = np.random.default_rng(0).integers(0, 255, (frames, 64, 96, 3), dtype=np.uint8)
    return SimpleNamespace(frames=pixels, fps=fps)


def video_prompt(media: MediaModel, video: Any) -> MediaPrompt:
    messages = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "?"}]}]
    return media.process(messages, videos=[video])


def test_a_video_is_one_item_in_a_grid_of_time(loaded: Callable[[str], LoadedModel]) -> None:
    model = loaded("qwen2_vl")
    prompt = video_prompt(media_of(model), clip())
    [span], [item] = prompt.spans, prompt.inputs
    frames, height, width = item.arrays["video_grid_thw"][0]
    assert frames == 3  # of two pictures each
    assert len(span.rows) == span.length == frames * height * width // 4
    assert model.model.encode(item).embeds.shape == (span.length, 32)
    tokens = mx.array([prompt.token_ids])
    positions, deltas = model.model.language_model.get_rope_index(
        tokens, None, mx.array(item.arrays["video_grid_thw"])
    )
    assert np.array_equal(prompt.rope_positions, np.array(positions)[:, 0])
    assert prompt.rope_delta == deltas.item()


def test_frames_of_qwen2_5_lie_as_far_apart_as_in_time(
    loaded: Callable[[str], LoadedModel],
) -> None:
    """Two positions a second (its config), as Hugging Face has it; mlx-vlm leaves it out."""
    model = loaded("qwen2_5_vl")
    prompt = video_prompt(media_of(model), clip(frames=6, fps=1.0))
    [span] = prompt.spans
    assert prompt.rope_positions is not None
    times = np.unique(prompt.rope_positions[0, span.rows])
    assert (times - times[0]).tolist() == [0, 4, 8]  # of two pictures each
    assert model.model.encode(prompt.inputs[0]).embeds.shape[0] == len(span.rows)


def test_frames_of_qwen3_have_their_times_between_them(
    loaded: Callable[[str], LoadedModel],
) -> None:
    model = loaded("qwen3_vl")
    prompt = video_prompt(media_of(model), clip(frames=4, fps=2.0))
    [span], [item] = prompt.spans, prompt.inputs
    assert len(span.rows) < span.length
    text = model.tokenizer.decode(prompt.token_ids)
    assert "<0.2 seconds><|vision_start|>" in text or "<0.3 seconds><|vision_start|>" in text
    assert text.count("seconds>") == 2
    assert model.model.encode(item).embeds.shape[0] == len(span.rows)
    tokens = mx.array([prompt.token_ids])
    positions, deltas = model.model.language_model.get_rope_index(
        tokens, None, mx.array(item.arrays["video_grid_thw"])
    )
    assert np.array_equal(prompt.rope_positions, np.array(positions)[:, 0])
    assert prompt.rope_delta == deltas.item()


def test_a_prompt_that_sees_itself_as_a_whole_is_one_span(
    loaded: Callable[[str], LoadedModel],
) -> None:
    model = loaded("paligemma")
    media = media_of(model)
    prompt = media.process("<image>what is this", images=[picture(1)])
    whole = media._processor(text=["<image>what is this"], images=[picture(1)])
    assert prompt.token_ids == np.array(whole["input_ids"]).reshape(-1).tolist()
    [span] = prompt.spans
    assert (span.offset, span.length) == (0, len(prompt.token_ids))
    assert len(span.rows) == 16
    assert media.is_atomic("image")
    assert model.model.encode(prompt.inputs[0]).embeds.shape == (16, 32)
    text, images = "<image><image>compare", [picture(1), picture(2)]
    prompt = media.process(text, images=images)
    whole = media._processor(text=[text], images=images)
    assert prompt.token_ids == np.array(whole["input_ids"]).reshape(-1).tolist()
    [span] = prompt.spans
    assert (span.num_items, len(span.rows), span.length) == (2, 32, len(prompt.token_ids))
    assert model.model.encode(prompt.inputs[0]).embeds.shape == (32, 32)


def test_tiles_of_llava_next_are_as_many_rows_as_its_processor_counts(
    loaded: Callable[[str], LoadedModel],
) -> None:
    model = loaded("llava_next")
    media = media_of(model)
    sizes = [(90, 60), (60, 90), (56, 56), (200, 50), (40, 160), (113, 97), (30, 31)]
    pictures = [picture(i, *size) for i, size in enumerate(sizes)]
    prompt = media.process("<image>" * len(sizes), images=pictures)
    whole = media._processor(text=["<image>" * len(sizes)], images=pictures)
    assert prompt.token_ids == np.array(whole["input_ids"]).reshape(-1).tolist()
    grids = {tuple(item.arrays["tile_grid"].tolist()) for item in prompt.inputs}
    assert {(1, 2), (3, 1), (2, 2)} <= grids
    for item in prompt.inputs:  # (it compares the numbers of rows)
        assert model.model.encode(item).embeds.shape == (item.num_rows, 32)


def test_a_model_that_puts_the_rows_in_by_itself_has_all_of_them_in_its_prompt(
    loaded: Callable[[str], LoadedModel],
) -> None:
    model = loaded("llava_bunny")
    media = media_of(model)
    prompt = media.process("a<image>b<image>", images=[picture(1), picture(2)])
    [a, b] = model.tokenizer.encode("ab")
    assert prompt.token_ids == [a, *[0] * 729, b, *[0] * 729]
    for span, item in zip(prompt.spans, prompt.inputs):
        assert (span.length, len(span.rows)) == (729, 729)
        tokens = mx.array([[a, -200, b]])
        pixels = mx.array(item.arrays["pixel_values"])
        expected = model.model.vlm.get_input_embeddings(tokens, pixels).inputs_embeds
        assert expected.shape[1] == 731
        assert mx.allclose(model.model.encode(item).embeds, expected[0, 1:-1], atol=1e-5)


def test_a_processor_that_puts_its_picture_first_makes_the_prompt(
    loaded: Callable[[str], LoadedModel],
) -> None:
    model = loaded("molmo")
    media = media_of(model)
    prompt = media.process("User: <|image|>what?", images=[picture(1)])
    whole = media._processor(text=["User: what?"], images=[picture(1)])
    # (The model's own processor begins with the end token, where there is no start token.)
    start = model.tokenizer.eos_token_id
    made = np.array(whole["input_ids"]).reshape(-1).tolist()
    assert prompt.token_ids == [start, *made]
    arrays = {key: mx.array(np.array(value)) for key, value in whole.items()}
    tokens = arrays.pop("input_ids")
    expected = model.model.vlm.get_input_embeddings(tokens, arrays.pop("pixel_values"), **arrays)
    features = model.model.encode(prompt.inputs[0])
    rows = mx.array(prompt.spans[0].rows) - 1
    assert mx.allclose(features.embeds, expected.inputs_embeds[0][rows])
    # Several come one after another, each with its own tokens.
    images = [picture(1), picture(2, 60, 150)]
    two = media.process("User: <|image|>or<|image|>?", images=images)
    first, second = (media.process("<|image|>", images=[each]).token_ids[1:] for each in images)
    text = media.process("User: or?").token_ids
    assert two.token_ids == [start, *first, *second, *text[1:]]
    for span, item in zip(two.spans, two.inputs):
        assert len(span.rows) == model.model.encode(item).embeds.shape[0]


def test_pictures_are_not_cut_where_there_are_many(loaded: Callable[[str], LoadedModel]) -> None:
    """As the processor does it from three on."""
    model = loaded("deepseek_vl_v2")
    media = media_of(model)
    images = [picture(i, 200, 60) for i in range(3)]
    for count in (1, 2, 3):
        text = "<image>" * count + "compare"
        prompt = media.process(text, images=images[:count])
        whole = media._processor(text=text, images=images[:count])
        assert prompt.token_ids == np.array(whole["input_ids"]).reshape(-1).tolist()
        crops = [item.arrays["images_spatial_crop"].reshape(-1, 2)[0] for item in prompt.inputs]
        assert [crop.tolist() for crop in crops] == [[1, 1] if count == 3 else [2, 1]] * count
        for span, item in zip(prompt.spans, prompt.inputs):
            assert model.model.encode(item).embeds.shape[0] == len(span.rows)


def test_a_clip_of_gemma4_has_frames_with_their_times(
    loaded: Callable[[str], LoadedModel],
) -> None:
    model = loaded("gemma4")
    media = media_of(model)
    frames = np.random.default_rng(0).integers(0, 255, (3, 96, 64, 3), dtype=np.uint8)
    prompt = media.process("a<|video|>b", videos=[SimpleNamespace(frames=frames, fps=2.0)])
    pictures = np.ascontiguousarray(frames.transpose(0, 3, 1, 2))
    whole = dict(media._processor(text=["a<|video|>b"], videos=[pictures], fps=[2.0]))
    assert prompt.token_ids == np.array(whole.pop("input_ids")).reshape(-1).tolist()
    tokens = mx.array([prompt.token_ids])
    arrays = {name: mx.array(np.array(whole[name])) for name in whole if "video" in name}
    expected = model.model.vlm.get_input_embeddings(tokens, None, **arrays)
    [span], [item] = prompt.spans, prompt.inputs
    assert len(span.rows) < span.length  # (text between frames)
    assert np.count_nonzero(np.diff(span.rows) > 1) == len(frames) - 1
    features = model.model.encode(item)
    assert mx.allclose(features.embeds, expected.inputs_embeds[0][mx.array(span.rows)], atol=1e-5)


def test_a_sound_is_as_long_as_its_rows(loaded: Callable[[str], LoadedModel]) -> None:
    model = loaded("gemma4")
    media = media_of(model)
    assert media.sampling_rate == 16_000
    samples = np.random.default_rng(0).standard_normal(8_000).astype(np.float32)
    clips = [SimpleNamespace(samples=samples[:n], rate=16_000) for n in (8_000, 4_000)]
    prompt = media.process("a<|audio|>b<|audio|>", audios=clips)
    assert [len(span.rows) for span in prompt.spans] == [13, 7]  # 40 ms each
    for span, item in zip(prompt.spans, prompt.inputs):
        features = model.model.encode(item)
        assert features.embeds.shape == (len(span.rows), 32)
        assert features.per_layer_inputs is not None


def test_a_sound_of_phi4_is_as_long_as_its_rows(loaded: Callable[[str], LoadedModel]) -> None:
    model = loaded("phi4mm")
    media = media_of(model)
    samples = np.random.default_rng(0).standard_normal(16_000).astype(np.float32)
    clips = [SimpleNamespace(samples=samples[:n], rate=16_000) for n in (16_000, 8_000)]
    text = "a<|audio_1|>b<|image_1|><|audio_2|>"
    prompt = media.process(text, audios=clips, images=[picture(1)])
    assert [span.kind for span in prompt.spans] == ["audio", "image", "audio"]
    assert [len(span.rows) for span in prompt.spans][::2] == [13, 6]  # 80 ms each
    for item in prompt.inputs:  # (it compares the numbers of rows)
        assert model.model.encode(item).embeds.shape == (item.num_rows, 32)


def test_weights_for_pictures_and_sounds_apart_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_vlm import utils

    path = write(tmp_path / "phi4mm", ALL_CHECKPOINTS["phi4mm"]())
    load_model = utils.load_model

    def with_adapters(path: Path, lazy: bool) -> Any:
        model = load_model(path, lazy)
        model._base_weights = {"language_model.model.layers.0.mlp.down_proj": mx.zeros(1)}
        return model

    monkeypatch.setattr(utils, "load_model", with_adapters)
    with pytest.raises(UnsupportedModelError, match=r"separate weights \(LoRA\) of its language"):
        load(path)


@pytest.fixture(scope="module")
def processors(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], MediaModel]:
    folder = tmp_path_factory.mktemp("processors")

    def get(name: str) -> MediaModel:
        path = write(folder / name, (PROCESSORS | MORE_PROCESSORS)[name](), weights=False)
        importlib.import_module(f"mlx_vlm.models.{name}")
        config = SimpleNamespace(
            **json.loads((path / "config.json").read_text())
            | {"vision_config": SimpleNamespace(spatial_merge_size=2)}
        )
        return MediaModel(loading._processor(path), config, MEDIA_FAMILIES[name])

    return get


@pytest.mark.parametrize("name", ["gemma3n", "qwen3_omni_moe"])
def test_pictures_and_sounds_of_a_prompt_are_what_its_processor_makes(
    name: str, processors: Callable[[str], MediaModel]
) -> None:
    media = processors(name)
    image, sound = media.placeholder("image"), media.placeholder("audio")
    pictures = [picture(1), picture(2)]
    prompt = media.process(f"a\n{image}\n{image}b", images=pictures)
    whole = media._processor(text=[f"a\n{image}\n{image}b"], images=pictures)
    assert prompt.token_ids == np.array(whole["input_ids"]).reshape(-1).tolist()
    samples = np.random.default_rng(0).standard_normal(16_000).astype(np.float32)
    clips = [SimpleNamespace(samples=samples[:n], rate=16_000) for n in (16_000, 8_000)]
    prompt = media.process(f"a{sound}b{sound}", audios=clips)
    whole = media._processor(
        text=[f"a{sound}b{sound}"],
        audio=[each.samples for each in clips],
        padding=True,
        return_attention_mask=True,
    )
    assert prompt.token_ids == np.array(whole["input_ids"]).reshape(-1).tolist()
    assert [span.kind for span in prompt.spans] == ["audio", "audio"]
    lengths = [item.arrays["input_features"].size for item in prompt.inputs]
    assert lengths[0] > lengths[1]  # (not padded to the longest of the prompt)


def test_tiles_of_a_picture_come_before_it(processors: Callable[[str], MediaModel]) -> None:
    media = processors("step3p7")
    prompt = media.process("a<im_patch>b<im_patch>", images=[picture(1, 900, 700), picture(2)])
    tiled, whole = prompt.spans
    found = media._processor(text=["a<im_patch>b"], images=[picture(1, 900, 700)])
    made = np.array(found["input_ids"]).reshape(-1).tolist()
    assert prompt.token_ids[: len(made)] == made
    assert len(tiled.rows) == 81 * prompt.inputs[0].arrays["num_patches"][0] + 169
    assert len(whole.rows) == whole.length == 169


def test_text_behind_numbered_placeholders_is_complete(
    processors: Callable[[str], MediaModel],
) -> None:
    """mlx-vlm's processor of Phi 3 leaves out the token behind a picture."""
    media = processors("phi3_v")
    prompt = media.process("a<|image_1|>bc<|image_2|>d", images=[picture(1), picture(2)])
    tokens = media.tokenizer("abcd")["input_ids"]
    first, second = prompt.spans
    assert prompt.token_ids[: first.offset] == tokens[:1]
    assert prompt.token_ids[first.offset + first.length : second.offset] == tokens[1:3]
    assert prompt.token_ids[second.offset + second.length :] == tokens[3:]
    assert min(prompt.token_ids) >= 0  # (the rows' ids are negative for its tower only)
    assert prompt.inputs[0].token_ids.max() < 0
    assert media.placeholder("image", 2) == "<|image_2|>"


def test_placeholders_must_be_as_many_as_items(loaded: Callable[[str], LoadedModel]) -> None:
    media = media_of(loaded("llava"))
    with pytest.raises(ValueError, match="placeholders for 1 images but there are 0"):
        media.process("<image> what?")
    with pytest.raises(ValueError, match="placeholders for 0 images but there are 1"):
        media.process("what?", images=[picture(1)])
    with pytest.raises(ValueError, match="takes image but got video"):
        media.process("what?", videos=[clip()])
    with pytest.raises(ValueError, match="takes image but got audio"):
        media.placeholder("audio")


def test_the_side_from_which_on_pictures_are_made_smaller(
    loaded: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_paged.multimodal.processor._PROBED_SIDES", (512, 256, 128, 64))
    media = media_of(loaded("qwen2_vl"))
    assert media.with_options({"max_pixels": 128 * 128}).sufficient_side() == 128
    assert media.with_options({"max_pixels": 1024 * 1024}).sufficient_side() is None
    assert media_of(loaded("llava")).sufficient_side() == 64, "a processor with one size"


def test_text_alone_makes_no_spans(loaded: Callable[[str], LoadedModel]) -> None:
    model = loaded("qwen2_vl")
    prompt = media_of(model).process("what?")
    assert prompt.token_ids == model.tokenizer.encode("what?")
    assert (prompt.spans, prompt.inputs, prompt.rope_positions) == ([], [], None)


def test_equal_pictures_have_equal_arrays_whatever_else_the_prompt_holds(
    loaded: Callable[[str], LoadedModel],
) -> None:
    media = media_of(loaded("idefics3"))
    alone = media.process("<image>", images=[picture(1, 50, 50)])
    beside = media.process("<image><image>", images=[picture(2, 200, 90), picture(1, 50, 50)])
    for name, array in alone.inputs[0].arrays.items():
        assert np.array_equal(array, beside.inputs[1].arrays[name]), name


def test_what_a_checkpoint_says_of_its_pictures_reaches_the_processor(
    loaded: Callable[[str], LoadedModel],
) -> None:
    """mlx-vlm puts one of the defaults in the place of Kimi's, and of MiniCPM's."""
    media = media_of(loaded("kimi_k25"))
    prompt = media.process(media.placeholder("image"), images=[picture(1, 400, 400)])
    assert len(prompt.spans[0].rows) <= 64 // 4 + 9  # (patches are 64 before it is padded)


@pytest.mark.parametrize("name", ["kimi_vl", "kimi_k25"])
def test_pixels_are_not_made_a_list(
    name: str, loaded: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other thread would run for as long as that takes."""
    images = media_of(loaded(name))._processor.image_processor
    expected = type(images).to_mlx(images, picture(1))
    monkeypatch.delattr(Image.Image, "getdata")
    assert np.array_equal(images.to_mlx(picture(1)), expected)
    assert images.preprocess([picture(1)])["pixel_values"].shape[1:] == (3, 14, 14)


def test_options_reach_the_processor_and_the_digest(loaded: Callable[[str], LoadedModel]) -> None:
    media = media_of(loaded("qwen2_vl"))
    smaller = media.with_options({"max_pixels": 4 * 28 * 28})
    mark = media.placeholder("image")
    many, few = (m.process(mark, images=[picture(1, 200, 200)]) for m in (media, smaller))
    assert len(few.spans[0].rows) < len(many.spans[0].rows)
    assert media.settings_digest == media.with_options({}).settings_digest
    assert media.settings_digest != smaller.settings_digest
    assert len(media.settings_digest) == 32


def test_threads_share_a_processor(loaded: Callable[[str], LoadedModel]) -> None:
    media = media_of(loaded("smolvlm"))

    def process(seed: int) -> MediaPrompt:
        return media.process("a<image>b", images=[picture(seed, 40 + seed, 60)])

    expected = [process(seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(process, range(8)))
    for a, b in zip(expected, found):
        assert a.token_ids == b.token_ids
        for name, array in a.inputs[0].arrays.items():
            assert np.array_equal(array, b.inputs[0].arrays[name])


# --- Loading --------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path / "gemma3", CHECKPOINTS["gemma3"]())


def test_without_mlx_vlm_a_model_of_mlx_lm_is_served_for_text_only(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "installed_version", lambda: None)
    reason = loading.Checkpoint(checkpoint, "gemma3").why_text_only()
    assert reason == mlx_vlm.INSTALL
    assert "pip install --no-deps mlx-vlm==0.7.10" in reason


def test_mlx_vlm_without_what_it_imports_says_what_to_install(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = mlx_vlm.importlib.util.find_spec

    def without_requests(name: str, *args: Any) -> Any:
        return None if name == "requests" else find_spec(name, *args)

    assert mlx_vlm.installed_version() is not None
    monkeypatch.setattr(mlx_vlm.importlib.util, "find_spec", without_requests)
    assert mlx_vlm.installed_version() is None
    assert loading.Checkpoint(checkpoint, "gemma3").why_text_only() == mlx_vlm.INSTALL


def test_without_mlx_vlm_other_models_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "smolvlm", CHECKPOINTS["smolvlm"]())
    monkeypatch.setattr(loading, "installed_version", lambda: None)
    with pytest.raises(UnsupportedModelError, match="pip install --no-deps mlx-vlm"):
        load(path)


def test_a_checkpoint_without_its_tower_is_served_for_text_only(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """mlx-lm's conversions keep the section of the tower in the config, and not its weights."""
    weights = mx.load(str(checkpoint / "model.safetensors"))
    text = {k: v for k, v in weights.items() if k.startswith("language_model.")}
    (checkpoint / "model.safetensors").unlink()
    mx.save_safetensors(str(checkpoint / "model.safetensors"), text, {"format": "mlx"})
    with caplog.at_level(logging.WARNING):
        model = load(checkpoint)
    assert model.media is None
    assert model.media_reason == "its files have no weights of a tower"
    assert "served for text only: its files have no weights of a tower" in caplog.text


def test_refused_families_say_why(tmp_path: Path) -> None:
    for name, reason in (("mllama", "cross-attention"), ("florence2", "encoder-decoder")):
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": name, "vision_config": {"hidden_size": 8}})
        )
        with pytest.raises(UnsupportedModelError, match=reason):
            load(tmp_path)


def test_a_checkpoint_without_a_processor_is_refused(checkpoint: Path) -> None:
    (checkpoint / "preprocessor_config.json").unlink()
    with pytest.raises(ModelLoadError, match="mlx-vlm could not make a processor of its files"):
        load(checkpoint)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    def with_code(made: Checkpoint) -> Checkpoint:
        made.more["tokenizer_config.json"] = {
            "tokenizer_class": "Mine",
            "auto_map": {"AutoTokenizer": ["code.Mine", None]},
        }
        return made

    path = write(tmp_path / "model", CHECKPOINTS["llava"]())
    made = with_code(CHECKPOINTS["llava"]())
    (path / "tokenizer_config.json").write_text(json.dumps(made.more["tokenizer_config.json"]))
    mark = tmp_path / "ran"
    (path / "code.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Mine: pass\n")
    (path / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError):
        load(path)
    assert not mark.exists()
    shutil.rmtree(path)


def test_an_item_that_comes_again_is_not_processed_again(
    loaded: Callable[[str], LoadedModel],
) -> None:
    media = media_of(loaded("qwen2_vl"))
    old, new = picture(1), picture(2)
    mark = media.placeholder("image")
    first = media.process(f"a {mark}", images=[old])
    before = media._processed.num_made
    second = media.process(f"a {mark} b {mark}", images=[old, new])
    assert media._processed.num_made == before + 1
    assert second.inputs[0] is first.inputs[0]
    assert second.token_ids[: len(first.token_ids)] == first.token_ids


# --- Chats ----------------------------------------------------------------------------------------


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", sorted(set(ALL_CHECKPOINTS) - {"paligemma"}))
def test_a_chat_about_a_picture_is_answered(
    name: str, loaded: Callable[[str], LoadedModel]
) -> None:
    """From a picture to an answer; other pictures have other answers' probabilities."""
    llm = LLM(loaded(name), kv_cache_memory=16 << 20, block_size=16)
    chats = [
        [{"role": "user", "content": [{"type": "image", "image": picture(seed, *size)}, "what?"]}]
        for seed, size in ((1, (90, 60)), (2, (60, 150)), (1, (90, 60)))
    ]
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, logprobs=1)
    one, other, again = (output.outputs[0] for output in llm.chat(chats, params))
    assert len(one.token_ids) == 2
    assert one.token_ids == again.token_ids
    assert one.logprobs is not None
    assert one.cumulative_logprob == pytest.approx(again.cumulative_logprob, abs=1e-4)
    assert one.cumulative_logprob != pytest.approx(other.cumulative_logprob, abs=1e-6)
    stats = llm.stats().encoder_cache
    assert stats is not None
    assert stats.num_encoded_items == 2


def _of_kind(kind: str) -> list[str]:
    return sorted(name for name in ALL_CHECKPOINTS if kind in MEDIA_FAMILIES[name].kinds)


@pytest.mark.parametrize("name", _of_kind("video"))
def test_a_chat_about_a_video_is_answered(name: str, loaded: Callable[[str], LoadedModel]) -> None:
    llm = LLM(loaded(name), kv_cache_memory=16 << 20, block_size=16)
    video = (clip().frames, {"fps": 2.0})
    content = [{"type": "video", "video": video}, "what?"]
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    [output] = llm.chat([{"role": "user", "content": content}], params)
    assert len(output.outputs[0].token_ids) == 2


@pytest.mark.parametrize("name", _of_kind("audio"))
def test_a_chat_about_a_sound_is_answered(name: str, loaded: Callable[[str], LoadedModel]) -> None:
    llm = LLM(loaded(name), kv_cache_memory=16 << 20, block_size=16)
    samples = np.random.default_rng(0).standard_normal(8_000).astype(np.float32)
    content = [{"type": "audio", "audio": (samples, 16_000)}, "what?"]
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    [output] = llm.chat([{"role": "user", "content": content}], params)
    assert len(output.outputs[0].token_ids) == 2
