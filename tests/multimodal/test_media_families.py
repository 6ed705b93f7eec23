"""Families of mlx-vlm with pictures in mixed steps, held to mlx-vlm's own generation."""

from __future__ import annotations

import inspect
import itertools
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("support.vlm", reason="mlx-vlm is not installed: make test installs it")

from mlx.utils import tree_flatten
from mlx_lm.models import gemma3n as gemma3n_of_mlx_lm
from mlx_lm.models.cache import make_prompt_cache
from support.media_cases import Case, Prompt, vary
from support.media_models import gemma3, gemma3n
from support.media_parity import (
    MediaDriver,
    difference,
    differences,
    generated,
    paged,
)
from support.more_media_models import ALL_CASES as CASES
from support.reference import ON_GPU
from support.simulated import needs_sim_extension, sim_ext, simulated_extension

from mlx_paged.errors import UnsupportedModelError
from mlx_paged.model.layout import Mode
from mlx_paged.model.media import MediaFeatures, MediaRows, StepMedia
from mlx_paged.model.plan import StepInputs, build_plan
from mlx_paged.model.prepare import prepare_kernels
from mlx_paged.model.wrap import convert_to_paged
from mlx_paged.multimodal.families import (
    MEDIA_FAMILIES,
    MEDIA_REFUSED,
)
from mlx_paged.multimodal.mlx_vlm import MLX_VLM_VERSION, installed_version
from mlx_paged.multimodal.model import MultiModalModel
from mlx_paged.multimodal.packages import package_of

# RMS of the log-probabilities' difference over theirs, float32
TOLERANCE = 1e-4 if ON_GPU else 1e-5


def case_of(name: str) -> Case:
    case = CASES[name]()
    vary(case.model)
    return case


def test_importing_mlx_vlm_does_not_silence_child_processes() -> None:
    assert "mlx_vlm" in sys.modules and os.environ.get("TRANSFORMERS_VERBOSITY") is None


@pytest.mark.one_in(15)
@pytest.mark.parametrize("name", sorted(CASES))
def test_mixed_steps_with_pictures_give_what_mlx_vlm_generates(
    name: str, record_property: Any
) -> None:
    case = case_of(name)
    bounded = case.only_pictures or case.sees_pictures
    if bounded and "bounds" not in inspect.signature(build_plan).parameters:
        pytest.skip("plans have no bounds of rows yet, which this family's prompts need")
    found = differences(case)
    record_property("difference", max(found.values()))
    assert all(d < TOLERANCE for d in found.values()), found


# Packages of text models whose files name a section of multimodal ones.
TEXT_ONLY = {"qwen3_5_text"}


def test_every_multimodal_package_of_mlx_vlm_is_proven_or_refused() -> None:
    import mlx_vlm.models

    [root] = mlx_vlm.models.__path__
    named = re.compile(r"(Vision|Audio)(Model|Config)|(vision|audio)_config")
    found = {
        folder.name
        for folder in Path(root).iterdir()
        if any(named.search(file.read_text()) for file in folder.glob("*.py"))
    }
    assert found - TEXT_ONLY == MEDIA_FAMILIES.keys() | MEDIA_REFUSED.keys()
    assert not MEDIA_FAMILIES.keys() & MEDIA_REFUSED.keys()


def test_names_of_configs_are_those_of_mlx_vlm() -> None:
    from mlx_vlm.utils import MODEL_REMAPPING

    known = MEDIA_FAMILIES.keys() | MEDIA_REFUSED.keys()
    theirs = {name: package for name, package in MODEL_REMAPPING.items() if package in known}
    section = {"vision_config": {"hidden_size": 8}}
    for name, package in theirs.items():
        assert package_of({"model_type": name, **section}) == package


def test_every_family_in_the_table_has_a_case() -> None:
    assert {case().module for case in CASES.values()} == MEDIA_FAMILIES.keys()


def test_layers_of_gemma3n_that_share_keys_are_those_of_mlx_lm() -> None:
    """mlx-vlm's own turn queries by positions behind the chunk, unlike Hugging Face's."""
    case = gemma3n(num_shared=2)
    vary(case.model)
    language = case.model.language_model
    config = {**vars(case.model.config.text_config), "rope_scaling": None}
    model = gemma3n_of_mlx_lm.Model(
        gemma3n_of_mlx_lm.ModelArgs(model_type="gemma3n", text_config=config)
    )
    weights = [
        (f"model.language_model.{name.removeprefix('model.')}", weight)
        for name, weight in tree_flatten(language.parameters())
    ]
    model.load_weights(weights, strict=True)
    model.eval()
    prompt = Prompt([list(range(11, 40))])
    logits = model(mx.array([prompt.token_ids]), cache=make_prompt_cache(model))[0, -1]
    driver = MediaDriver(paged(case))
    found = driver.add(prompt)
    driver.step([(found, 10)])
    driver.step([(found, 19)])
    expected = np.array(logits - mx.logsumexp(logits))
    assert difference(found.logprobs[-1], expected) < TOLERANCE
    assert difference(generated(case, prompt, 1)[1][0], expected) > 1e-3


@pytest.fixture(scope="module")
def qwen3() -> Case:
    return case_of("qwen3_vl")


def test_a_picture_changes_what_is_generated(qwen3: Case) -> None:
    """Parity would also hold if neither side looked at the picture."""
    one, other = (generated(qwen3, qwen3.prompt(seed), 1)[1] for seed in (1, 3))
    assert difference(one, other) > 1e-3


def test_features_of_equal_pictures_are_equal_and_of_others_are_not(qwen3: Case) -> None:
    model = paged(qwen3)
    first, again, other = (model.encode(qwen3.picture(seed).inputs()) for seed in (1, 1, 3))
    for a, b, c in zip(first.arrays(), again.arrays(), other.arrays()):
        assert mx.array_equal(a, b).item()
        assert not mx.array_equal(a, c).item()
    assert len(first.deepstack) == 2
    assert first.nbytes == 3 * first.embeds.nbytes


def test_features_can_be_used_again(qwen3: Case) -> None:
    """No step changes the features that it is given: gemma3 scales embeddings in place."""
    for case in (qwen3, case_of("gemma3")):
        driver = MediaDriver(paged(case))
        prompt = case.prompt(1)
        first = driver.add(prompt)
        kept = [np.array(array) for array in first.features[0].arrays()]
        driver.step([(first, len(prompt.token_ids))])
        again = driver.add(prompt)
        again.features = first.features
        driver.step([(again, len(prompt.token_ids))])
        assert difference(again.logprobs[0], first.logprobs[0]) < 1e-6
        for array, before in zip(first.features[0].arrays(), kept):
            assert np.array_equal(np.array(array), before)


def test_positions_of_one_request_are_not_kept_for_the_next(qwen3: Case) -> None:
    driver = MediaDriver(paged(qwen3))
    picture, text = qwen3.prompt(1), Prompt([list(range(11, 24))])
    alone = driver.add(text)
    driver.step([(alone, 13)])
    before = driver.add(picture)
    driver.step([(before, len(before.tokens))])
    after = driver.add(text)
    driver.step([(after, 13)])
    assert difference(after.logprobs[0], alone.logprobs[0]) < 1e-6
    assert qwen3.model.language_model._rope_deltas is None
    assert qwen3.model.language_model._position_ids is None


def test_building_a_step_reads_nothing_from_the_device(
    qwen3: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx-vlm's own deepstack reads its mask for every row of every layer."""
    driver = MediaDriver(paged(qwen3))
    text, picture = Prompt([list(range(11, 24))]), qwen3.prompt(1, 2)
    sequences = [driver.add(text), driver.add(picture)]
    mx.eval([array for seq in sequences for f in seq.features for array in f.arrays()])

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a step was evaluated while it was built")

    forward = driver.model.forward

    def watched(tokens: mx.array, inputs: StepInputs) -> mx.array:
        with monkeypatch.context() as patch:
            patch.setattr(mx, "eval", refuse)
            patch.setattr(np, "where", refuse)
            before = mx.get_active_memory()
            logits = forward(tokens, inputs)
            assert mx.get_active_memory() - before < 1 << 16
        return logits

    monkeypatch.setattr(driver.model, "forward", watched)
    driver.step([(seq, len(seq.tokens)) for seq in sequences])


def test_positions_are_not_read_on_the_host(qwen3: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-vlm's helper reads the highest of them where a cache names no column."""
    from mlx_vlm.models.base import cache_position_offset

    class Unread(mx.array):  # type: ignore[misc]
        def max(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("positions were read")

    cache = MediaDriver(paged(qwen3)).model.attention_caches[0]
    monkeypatch.setattr(type(cache), "offset", property(lambda self: Unread([1, 2])))
    assert cache_position_offset(cache) == 0


def test_arrays_that_do_not_belong_to_the_step_are_refused(qwen3: Case) -> None:
    driver = MediaDriver(paged(qwen3))
    features = MediaFeatures(mx.zeros((2, 64)))
    rope = np.zeros((3, 4), dtype=np.int32)

    def forward(media: StepMedia) -> None:
        inputs = StepInputs(np.array([4]), np.array([4]), [[1]], np.array([3]), media=media)
        driver.model.forward(mx.zeros((4,), dtype=mx.int32), inputs)

    for rows in ([0, 4], [1, 0], [1, 1], [-1, 0]):
        with pytest.raises(ValueError, match="rows must be"):
            forward(StepMedia(np.array(rows), features, rope))
    with pytest.raises(ValueError, match="features must be of 1 rows but are of 2"):
        forward(StepMedia(np.array([1]), features, rope))
    with pytest.raises(ValueError, match="features must be of 1 rows but are of 0"):
        forward(StepMedia(np.array([1]), None, rope))
    with pytest.raises(ValueError, match=r"rope_positions must be of shape \(3, 4\)"):
        forward(StepMedia(np.array([0, 1]), features, rope[:, :3]))
    with pytest.raises(ValueError, match=r"bounds must be of shape \(2, 4\)"):
        forward(StepMedia(np.array([0, 1]), features, rope, rope))


def test_what_a_model_does_not_take_is_refused(qwen3: Case) -> None:
    plain = paged(case_of("llava"))
    inputs = StepInputs(
        np.array([1]),
        np.array([1]),
        [[1]],
        np.array([0]),
        media=StepMedia(np.zeros(0, np.int32), None, np.zeros((3, 1), np.int32)),
    )
    plain.allocate(4)
    with pytest.raises(ValueError, match="rope_positions must be None for model_type 'llava'"):
        plain.forward(mx.zeros((1,), dtype=mx.int32), inputs)
    item = qwen3.picture(1)
    item.kind = "audio"
    with pytest.raises(ValueError, match="takes image, video but got audio"):
        paged(qwen3).encode(item.inputs())
    item = qwen3.picture(1)
    item.rows = item.rows[1:]
    with pytest.raises(ValueError, match=r"made 12 rows for an item .* that has 11"):
        paged(qwen3).encode(item.inputs())


def test_contexts_end_where_long_rope_would_change_for_all_rows_of_a_step() -> None:
    """mlx-vlm takes the factors of a batch's longest context for all of it."""
    assert paged(case_of("phi4mm")).layout.max_context_len == 4096
    assert paged(case_of("llava")).layout.max_context_len is None


def test_a_text_of_paligemma_is_causal() -> None:
    """As with Hugging Face's model, where no token types say what is a prompt; not mlx-vlm's."""
    case = case_of("paligemma")
    prompt = Prompt([list(range(11, 40))])
    tokens = mx.array([prompt.token_ids])
    size = tokens.shape[1]
    mask = mx.where(mx.tri(size, size) > 0, 0.0, -mx.inf)[None, None]
    logits = case.model.language_model(tokens, mask=mask).logits[0, -1]
    driver = MediaDriver(paged(case), whole=True)
    found = driver.add(prompt)
    driver.step([(found, 10)])
    driver.step([(found, 19)])
    assert difference(found.logprobs[-1], np.array(logits - mx.logsumexp(logits))) < TOLERANCE


@pytest.mark.parametrize("mode", [Mode.GATHERED, Mode.UNIFORM])
def test_no_multimodal_model_runs_in_groups_of_sequences(mode: Mode) -> None:
    """There the rows of a step are computed in parts, and would lack what its media bring."""
    case = case_of("gemma3")
    model = MultiModalModel(case.model, MEDIA_FAMILIES["gemma3"], "gemma3")
    with pytest.raises(UnsupportedModelError, match=f"{mode}: its media bring what belongs to"):
        convert_to_paged(model, "gemma3", modes=(mode,), block_size=8)
    assert not [f.module for f in MEDIA_FAMILIES.values() if f.mode.is_gathered]


@needs_sim_extension
@pytest.mark.parametrize("has_bounds", [True, False])
def test_kernels_with_bounds_are_compiled_at_the_start(
    has_bounds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_bounds:
        causal = replace(MEDIA_FAMILIES["gemma3"], atomic=lambda config: ())
        monkeypatch.setitem(MEDIA_FAMILIES, "gemma3", causal)
    model = paged(gemma3(head_dim=64))
    model.allocate(4)
    prepared: list[tuple[str, tuple[bool, ...]]] = []
    monkeypatch.setattr(sim_ext, "prepare_pipeline", lambda *pipeline: prepared.append(pipeline))
    with simulated_extension():
        sim_ext.forget_attention_layers()
        assert prepare_kernels(model) == len(prepared) > 0
    of_attention = [constants for name, constants in prepared if name.startswith("paged_")]
    # (For layers with a window, and for those without.)
    expected = set(itertools.product((False, True), {False, has_bounds}))
    has_window_at, has_bounds_at = 4, 7  # metal/attention_variant.h
    found = {(constants[has_window_at], constants[has_bounds_at]) for constants in of_attention}
    assert found == expected


def test_a_step_without_media_uploads_nothing() -> None:
    media = MediaRows.of(StepMedia(np.zeros(0, np.int32), None, None))
    assert media == MediaRows(None, None, None)


def test_one_version_of_mlx_vlm_is_named_everywhere() -> None:
    root = Path(__file__).resolve().parents[2]
    assert f"\nMLX_VLM := {MLX_VLM_VERSION}\n" in (root / "Makefile").read_text()
    pyproject = (root / "pyproject.toml").read_text()
    assert f"pip install --no-deps mlx-vlm=={MLX_VLM_VERSION}`" in pyproject
    assert installed_version() == MLX_VLM_VERSION


def test_mlx_vlm_is_not_imported_before_a_multimodal_model_is_loaded() -> None:
    code = (
        "import sys, mlx_paged\n"
        "from mlx_paged.multimodal import loading, processor, model\n"
        "found = [m for m in ('mlx_vlm', 'av') if m in sys.modules]\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
