"""The embedded vision model answers what is true of pictures, through the engine."""

from __future__ import annotations

import contextlib
import json
import pickle

import numpy as np
import pytest
from typer.testing import CliRunner

from mlx_paged import LLM, SamplingParams
from mlx_paged.cli.main import app
from mlx_paged.demo import vision_model_path
from mlx_paged.demo.pictures import SAMPLES, Sample, draw
from mlx_paged.engine.media import MediaPrompts
from mlx_paged.engine.request_options import media_prompt_of
from mlx_paged.multimodal import loading
from mlx_paged.multimodal.families import MEDIA_FAMILIES

GREEDY = SamplingParams(temperature=0, max_tokens=40)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(vision_model_path()), num_gpu_blocks_override=512, max_model_len=1024)


def asked(sample: Sample, question: str) -> list[dict[str, object]]:
    picture = draw(sample.shapes, sample.background)
    content = [
        {"type": "image_pil", "image_pil": picture},
        {"type": "text", "text": question},
    ]
    return [{"role": "user", "content": content}]


def test_all_samples_in_one_batch(llm: LLM) -> None:
    outputs = llm.chat([asked(s, s.question) for s in SAMPLES], GREEDY)
    assert [o.outputs[0].text for o in outputs] == [s.answer for s in SAMPLES]


def test_questions_about_one_picture_run_the_tower_once(llm: LLM) -> None:
    before = llm.stats().encoder_cache
    sample = Sample("new", (*SAMPLES[0].shapes[:2],), "How many circles are there?", "")
    questions = ["How many circles are there?", "What is in this picture?"] * 4
    outputs = llm.chat([asked(sample, question) for question in questions], GREEDY)
    answers = {o.outputs[0].text for o in outputs}
    assert answers == {"There are two circles.", "Two red circles."}
    after = llm.stats().encoder_cache
    assert before is not None and after is not None
    assert after.num_encoded_items == before.num_encoded_items + 1


def test_the_card_says_how_often_it_is_right() -> None:
    card = (vision_model_path() / "README.md").read_text()
    assert "Apache" in card and "held" in card
    size = sum(path.stat().st_size for path in vision_model_path().iterdir())
    assert size <= 6_000_000
    assert json.loads((vision_model_path() / "config.json").read_text())["model_type"] == "idefics3"


def test_the_demo_asks_about_all_pictures() -> None:
    result = CliRunner().invoke(app, ["demo", "--vision"])
    assert result.exit_code == 0, result.output
    assert "Three red circles." in result.output
    assert "the vision tower ran for 4" in " ".join(result.output.split())


def test_loading_says_nothing_that_no_user_can_change(caplog: pytest.LogCaptureFixture) -> None:
    from transformers.models.auto import image_processing_auto
    from transformers.utils import logging

    logger = image_processing_auto.logger
    logger.warning_once.cache_clear()
    logging.enable_propagation()
    try:
        loading.load(vision_model_path(), MEDIA_FAMILIES["idefics3"], "idefics3")
        assert not [r.getMessage() for r in caplog.records if r.name.startswith("transformers")]
        logger.warning("something else")
        logger.warning("The `use_fast` parameter is deprecated")  # by a program that gives it
    finally:
        logging.disable_propagation()
    assert {record.getMessage() for record in caplog.records} == {
        "something else",
        "The `use_fast` parameter is deprecated",
    }


def test_the_demo_refuses_a_model_beside_its_own() -> None:
    result = CliRunner().invoke(app, ["demo", "--vision", "--model", "x"])
    assert result.exit_code == 2 and "--model" in result.output


def test_its_processor_and_its_prompts_go_to_another_process(llm: LLM) -> None:
    picture = draw(SAMPLES[0].shapes, SAMPLES[0].background)
    given = media_prompt_of(
        "prompt", {"prompt": "<image>\nWhat is it?", "multi_modal_data": {"image": picture}}
    )
    options, media = llm.engine.config.media_options, llm.engine.media
    prepared = []
    for processor in (media, pickle.loads(pickle.dumps(media))):
        with contextlib.closing(MediaPrompts(processor, options, None)) as prompts:
            prepared.append(pickle.loads(pickle.dumps(prompts.prepare(*given, "prompt"))).prompt)
    own, copied = prepared
    assert copied.token_ids == own.token_ids and len(own.inputs) == 1
    for name, array in own.inputs[0].arrays.items():
        assert np.array_equal(array, copied.inputs[0].arrays[name])
