"""Pictures and questions of the embedded vision model: what is drawn is what is said."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from scripts.vision_demo_model import atlas, batches, questions, scenes

pytest.importorskip("PIL", reason="Pillow is not installed (extra: vision)")

from mlx_paged.demo.pictures import SAMPLES, SHAPES, Shape, draw


def scene(*things: tuple[str, str], **places: float) -> scenes.Scene:
    made = scenes.Scene(1.0, 1.0, "white", ((255, 255, 255),) * 2, 0.0)
    for index, (color, kind) in enumerate(things):
        made.things.append(
            scenes.Thing(kind, color, scenes.COLORS[color][0], 0.2 + 0.2 * index, 0.5, 0.1, 0, 0)
        )
    return made


def test_a_description_lists_groups_by_their_number():
    shown = scene(("blue", "square"), ("red", "circle"), ("red", "circle"), ("orange", "cross"))
    assert questions.content(shown) == "two red circles, a blue square and an orange cross"
    assert questions.describe(scene(*[("red", "circle")] * 3)) == (
        "The picture shows three red circles on a white background."
    )


def test_answers_follow_from_the_scene():
    # Every count that is asked about a scene of two red circles and a blue star is recounted here.
    shown = scene(("red", "circle"), ("red", "circle"), ("blue", "star"))
    words = {word: number for number, word in enumerate(questions.NUMBERS)}
    seen = set()
    for seed in range(300):
        turn = questions.ask(Random(seed), shown)
        if turn.kind == "count" and " the number " not in turn.question:
            wanted = [
                (t.color, t.kind)
                for t in shown.things
                if not any(n in turn.question for n in scenes.NAMES) or t.color in turn.question
            ]
            kinds = [k for k in scenes.KINDS if questions.noun(k, 2) in turn.question.lower()]
            number = sum(not kinds or kind in kinds for _, kind in wanted)
            said = turn.answer.removesuffix(".").split()
            assert number == (int(said[0]) if said[0].isdigit() else words[said[2]]), turn
        if turn.kind == "exists" and "yes" in turn.answer.lower():
            assert any(w in turn.question for w in ("red", "circle", "blue", "star")), turn
        seen.add(turn.kind)
    assert {"count", "exists", "color", "content", "describe", "shape"} <= seen


@pytest.mark.parametrize("kind", SHAPES)
def test_both_renderers_draw_the_same_shape(kind):
    image = draw([Shape(kind, "black", 0.5, 0.5, 0.4)], "white", 144)
    drawn = np.array(image.convert("L")) < 128
    textures = atlas.polygon_distance(atlas.outline(kind, 0.4))
    size = round(144 * 0.8 * atlas.EXTENT)
    rows = (np.arange(size) * atlas.SIZE // size)[:, None]
    trained = textures[rows, rows.T] < 0
    start = (144 - size) // 2
    shown = drawn[start : start + size, start : start + size]
    assert (shown & trained).sum() / (shown | trained).sum() > 0.85


def test_the_samples_are_drawn_in_their_colours():
    for sample in SAMPLES:
        image = draw(sample.shapes, sample.background, 64, 48)
        assert image.size == (64, 48)
        assert len(image.getcolors(64 * 48)) > 1


@pytest.mark.parametrize(
    ("shapes", "size", "words"),
    [
        ([Shape("blob", "red", 0.5, 0.5, 0.2)], 16, "'blob'"),
        ([], 0, "at least 1, got 0"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused(shapes, size, words):
    with pytest.raises(ValueError, match=words):
        draw(shapes, width=size)


def test_things_lie_inside_their_picture_and_stand_out():
    for seed in range(150):
        made = scenes.sample_scene(Random(seed))
        assert 1 <= len(made.things) <= scenes.MAX_OBJECTS
        for thing in made.things:
            assert 0 <= thing.x <= made.width and 0 <= thing.y <= made.height
            assert min(scenes.contrast(thing.rgb, tone) for tone in made.shades) > 60


def test_a_batch_has_as_many_image_tokens_as_its_pictures(tmp_path):
    from scripts.vision_demo_model import tokenizer

    tokenizer.train_tokenizer(tmp_path, 100)
    maker = batches.BatchMaker(tmp_path / "tokenizer.json", fonts=12, seed="test")
    batch = maker.batch(64)
    image = maker.tokenizer.token_to_id(tokenizer.IMAGE)
    assert (batch.tokens == image).sum() == 64 * tokenizer.IMAGE_TOKENS
    assert set(np.unique((batch.tokens == image).sum(1))) == {0, 64, 128}
    answers = batch.turns.max(1)
    assert (answers == (batch.kinds >= 0).sum(1)).all()
    assert answers.min() >= 1
