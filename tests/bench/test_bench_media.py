"""`mlx-paged bench media` on the embedded vision model, as small as it can be."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mlx_paged.cli.main import app
from mlx_paged.errors import InvalidParameterError, MlxPagedError

pytest.importorskip("support.vlm", reason="mlx-vlm is not installed: make test installs it")

import mlx.core as mx

from mlx_paged.bench import media_engines, media_runs, media_shapes, media_text
from mlx_paged.bench.media_engines import Ask, PagedEngines, VlmEngine
from mlx_paged.bench.media_runs import PAGED, VLM, Pictures, Settings
from mlx_paged.bench.media_shapes import Shape, write_checkpoint
from mlx_paged.demo import vision_model_path
from mlx_paged.engine.loading import load
from mlx_paged.model import patches


class Here:
    """An engine in this process."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def ask(self, method: str, *args: Any, **options: Any) -> Any:
        return getattr(self.engine, method)(*args, **options)


@pytest.fixture(scope="module")
def engines() -> dict[str, Any]:
    path = str(vision_model_path())
    return {PAGED: Here(PagedEngines(path, "auto", 700, 16)), VLM: Here(VlmEngine(path, "auto"))}


def test_tables_and_figures(engines: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(media_runs, "_QUESTIONS", media_runs._QUESTIONS[:3])
    pictures, settings = Pictures(tmp_path), Settings(4, 1)
    rows = media_runs.picture_rows(engines, pictures, [64], settings)
    assert [(row["engine"], row["caches"]) for row in rows] == [
        (PAGED, "all"), (PAGED, "encoder"), (PAGED, "none"), (VLM, "none"),
    ]  # fmt: skip
    # New pictures are encoded once, and again only where nothing is kept.
    assert [row["towers_run"] for row in rows] == [1, 1, 1, 0]
    assert [row["towers_run_again"] for row in rows] == [0, 0, 1, 0]
    for row in rows:
        assert row["ttft_ms"] > 0 and row["ttft_again_ms"] > 0 and row["tokens_per_second"] > 0
        assert (row["peak_bytes"] or 0) > (row["pool_bytes"] or 0)
    text = media_runs.rows_text(rows, "size", "Pictures")
    assert "again ms" in text and "mlx-vlm" in text

    found = media_runs.figures(engines, pictures, 64, settings, 2)
    eight = found["eight_questions"]
    assert eight["towers_run"] == 1
    assert eight["same_answers"] == eight["num_answers"] == 3
    assert found["second_turn"]["towers_run_in_second_turns"] == 0
    assert found["text_alone"]["text_model"] > 0 and len(found["text_alone"]["ratios"]) == 1
    beside = found["text_beside"]
    assert beside["ratio"] == pytest.approx(
        beside["beside_pictures"]["tokens_per_second"] / beside["beside_texts"]["tokens_per_second"]
    )
    said = media_runs.figures_text(found)
    assert "the tower ran 1 times" in said and "3 of 3 answers are the same" in said


def test_both_count_the_same_tokens(engines: Any, tmp_path: Path) -> None:
    ask = Ask(("What is this?",), images=(Pictures(tmp_path).image(48),))
    ask = media_runs._with_prompt(engines, ask)
    theirs = engines[VLM].ask("answer", ask, 3)
    ours = engines[PAGED].ask("answer", ask, 3)
    assert engines[PAGED].ask("num_tokens", ask) == theirs.num_prompt_tokens
    assert ours.token_ids == theirs.token_ids and len(theirs.times) == 3


def test_an_engine_that_fails_is_told_in_its_row(engines: Any, tmp_path: Path) -> None:
    class Failing(Here):
        def ask(self, method: str, *args: Any, **options: Any) -> Any:
            if method == "answer":
                raise MlxPagedError("engine mlx-vlm: IndexError: list index out of range")
            return super().ask(method, *args, **options)

    both = {**engines, VLM: Failing(engines[VLM].engine)}
    rows = media_runs.picture_rows(both, Pictures(tmp_path), [32], Settings(2, 1))
    assert rows[-1]["error"].endswith("list index out of range") and "ttft_ms" in rows[0]
    assert "failed: engine mlx-vlm" in media_runs.rows_text(rows, "size", "Pictures")


def test_pictures_are_all_different(tmp_path: Path) -> None:
    pictures = Pictures(tmp_path)
    files = [Path(pictures.image(32)) for _ in range(8)]
    assert len({file.read_bytes() for file in files}) == 8


@pytest.mark.one_in(4)
@pytest.mark.parametrize("shape", Shape)
def test_shapes_are_models_with_processors(shape: Shape, tmp_path: Path, monkeypatch: Any) -> None:
    """Narrow ones, as the published widths take seconds to make."""
    recipe = media_shapes._RECIPES[shape]

    def narrow(ids: dict[str, int], layers: int | None) -> dict[str, Any]:
        config = recipe.config(ids, layers)
        text = config.get("text_config", config)
        text |= {"hidden_size": 48, "intermediate_size": 32, "vocab_size": 600, "head_dim": 16}
        text |= {"num_attention_heads": 3, "num_key_value_heads": 1}
        vision = config["vision_config"]
        vision |= {"num_attention_heads": 2, "intermediate_size": 16, "num_heads": 2}
        if shape is Shape.SMOLVLM_256M:
            vision["hidden_size"] = 32
        else:
            text["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
            vision |= {"hidden_size": 48, "embed_dim": 32}
        return {**config, "vocab_size": 600}

    small = replace(recipe, config=narrow, vocab_size=600)
    monkeypatch.setitem(media_shapes._RECIPES, shape, small)
    path = write_checkpoint(tmp_path / "model", shape, num_layers=1, dtype="float32")
    ours = PagedEngines(str(path), "auto", 700, 2)
    both = {PAGED: Here(ours), VLM: Here(VlmEngine(str(path), "auto"))}
    ask = media_runs._with_prompt(both, Ask(("Hello?",), images=(Pictures(tmp_path).image(56),)))
    found = [each.ask("answer", ask, 4).token_ids for each in both.values()]
    assert found[0] == found[1] and len(found[0]) == 4
    assert media_text.text_twin(ours.model) is not None


def test_text_twins_have_the_same_logits(engines: Any) -> None:
    model = engines[PAGED].engine.model
    twin = media_text.text_twin(model)
    assert twin is not None and twin.media is None
    tokens = mx.array([[5, 9, 30, 41]])
    patches.uninstall()
    ours = load(str(vision_model_path())).model.vlm.language_model(tokens).logits
    assert mx.allclose(twin.model(tokens), ours, rtol=1e-3, atol=1e-3).item()


def test_servers_say_what_is_missing(monkeypatch: Any) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in ("fastapi", "mlx_audio") else find(name),
    )
    expected = "needs fastapi and mlx-audio: pip install fastapi mlx-audio"
    with pytest.raises(MlxPagedError, match=expected):
        media_engines.check_server_packages()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "x", "--shape", "smolvlm-256m"], "shape"),
        (["--num-layers", "2"], "num_layers"),
        (["--shape", "gpt"], "shape"),
        (["--image-size", "0"], "image_size"),
        (["--no-tables"], "tables"),
        (["--output", "/nowhere/x.json"], "output_json"),
    ],
)
def test_options_that_cannot_be(arguments: list[str], named: str) -> None:
    done = CliRunner().invoke(app, ["bench", "media", *arguments])
    assert isinstance(done.exception, InvalidParameterError)
    assert done.exception.field == named


def test_the_verb_writes_what_it_prints(engines: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """With the engines of this module in the place of processes."""
    media = sys.modules["mlx_paged.cli.bench.media"]  # (the package has the verb under that name)

    @contextlib.contextmanager
    def opened(*_: Any) -> Any:
        yield {PAGED: engines[PAGED]}

    monkeypatch.setattr(media, "_opened", opened)
    file = tmp_path / "media.json"
    arguments = ["--image-size", "32", "--frames", "2", "--frame-size", "32", "--num-iters", "1"]
    done = CliRunner().invoke(
        app, ["bench", "media", *arguments, "--output-len", "2", "--output", str(file)]
    )
    assert done.exit_code == 0, done.output + repr(done.exception)
    saved = json.loads(file.read_text())
    assert saved["environment"]["machine"] and saved["mlx_vlm_version"]
    assert [row["caches"] for row in saved["pictures"]] == list(media_engines.CACHES)
    assert "Frames, as pictures of one prompt" in done.stdout
    [frames, *_] = saved["videos"]
    assert frames["frames"] == frames["towers_run"] == 2 and not frames["as_video"]


def test_a_missing_package_is_named(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    done = CliRunner().invoke(app, ["bench", "media"])
    assert isinstance(done.exception, MlxPagedError)
    assert "mlx_vlm" in str(done.exception)
