"""A model in stages: the logits of the whole one, its weights once, and other families refused."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from support.adapters import adapted, random_layers, write_mlx
from support.family_config_parts import VOCAB_SIZE
from support.family_configs import config_of
from support.metal_stand_ins import standing_in
from support.models import embedded, save_tiny, tiny_config, tiny_model
from support.parity import Driver, family_model, relative_difference
from support.pipelined import OneOf, PipelinedModel

from mlx_paged.engine.lora.files import read_adapter
from mlx_paged.errors import UnsupportedModelError
from mlx_paged.model.families import PROVEN
from mlx_paged.model.layout import LayerSpec
from mlx_paged.model.loader import load
from mlx_paged.model.pipeline import Stage, divide_layers

TOLERANCE = 1e-4
# One of each kind: plain, windows, latents, recurrent state of some layers, of all, or of the
# embedding, and experts. The others take `make test-long`.
SOME = [
    *("llama", "gemma3_text", "deepseek_v3", "kimi_linear", "mamba2", "longcat_flash_ngram"),
    "gpt_oss",
]
REFUSED = {
    "afm7": "its layers read keys and values of other layers",
    "baichuan_m1": "it runs gathered",
    "gemma3n": "its layers share caches",
    "gptj": "its layers take hidden states by name",
    "hunyuan": "its layers return more than hidden states",
    "iquestloopcoder": "it does not call each of its layers once, in their order",
}


def check(family: str, size: int = 2) -> None:
    with standing_in(family):
        config = config_of(family)
        whole, stages = family_model(config), PipelinedModel(config, size, block_size=8)
        differences = relative_difference(whole, Driver(stages), VOCAB_SIZE)
    assert max(differences.values()) < TOLERANCE


@pytest.mark.parametrize("family", SOME)
def test_stages_have_the_logits_of_the_whole_model(family: str) -> None:
    check(family)


def test_four_layers_on_three_ranks() -> None:
    check("llama", 3)
    stages = PipelinedModel(config_of("llama"), 3, block_size=8).stages
    assert [(s.first, s.end) for s in map(Stage.of, (p.model for p in stages)) if s] == [
        (0, 2),
        (2, 3),
        (3, 4),
    ]


@pytest.mark.long
@pytest.mark.parametrize("family", sorted(PROVEN.keys() - set(SOME)))
def test_other_families(family: str) -> None:
    """Each has the logits of the whole model, or is refused."""
    try:
        check(family)
    except UnsupportedModelError as error:
        assert "cannot be divided among 2 ranks" in str(error)


@pytest.mark.parametrize("family", REFUSED)
def test_families_whose_layers_hand_on_more_are_refused(family: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        PipelinedModel(config_of(family), 2, block_size=8)
    assert str(caught.value) == (
        f"model_type {family!r} is not supported: {REFUSED[family]}, so its layers cannot be "
        "divided among 2 ranks"
    )


def test_more_ranks_than_layers_are_refused() -> None:
    config = tiny_config("llama", num_hidden_layers=2)
    with pytest.raises(UnsupportedModelError, match="'llama' is not supported: it has 2 layers"):
        divide_layers(tiny_model(config), config, OneOf(3))  # type: ignore[arg-type]


def test_pools_are_those_of_own_layers_and_tables_those_of_all() -> None:
    """Gemma 3's layers without a window are all in one stage here."""
    config = config_of("gemma3_text")
    first, second = PipelinedModel(config, 2, block_size=8).stages
    assert first.layout.group_specs == second.layout.group_specs
    assert len(first.layout.group_specs) == 2
    total = first.layout.bytes_per_token() + second.layout.bytes_per_token()
    specs = [spec for spec in first.layout.specs if isinstance(spec, LayerSpec)]
    assert total == sum(spec.bytes_per_token for spec in specs)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_layers_of_other_ranks_take_no_memory(dtype: str, tmp_path: Path) -> None:
    config = tiny_config("llama", vocab_size=embedded().config["vocab_size"], hidden_size=256)
    save_tiny(tmp_path / "model", config)

    def loaded_bytes(rank: int | None) -> tuple[int, int]:
        """Bytes that a model takes, and those of a layer."""
        for thread in threading.enumerate():
            if thread.name == "huge pages":  # It keeps weights until they have moved.
                thread.join()
        gc.collect()  # Models of other tests must not be freed meanwhile.
        mx.synchronize()
        before = mx.get_active_memory()
        shard = None if rank is None else lambda model, c: divide_layers(model, c, OneOf(2, rank))
        model = load(tmp_path / "model", dtype=dtype, shard=shard).model
        layer = sum(a.nbytes for _, a in tree_flatten(model.layers[0].parameters()))
        return mx.get_active_memory() - before, layer

    (whole, layer), *parts = [loaded_bytes(rank) for rank in (None, 0, 1)]
    for part, _ in parts:
        assert whole - part == pytest.approx(config["num_hidden_layers"] / 2 * layer, rel=0.05)


def test_each_stage_has_its_layers_of_an_adapter(tmp_path: Path) -> None:
    config = config_of("llama")
    whole, stages = family_model(config), PipelinedModel(config, 2, block_size=8)
    path = write_mlx(tmp_path / "adapter", random_layers(whole, 1, names=["q_proj", "down_proj"]))
    driver = Driver(stages)
    for stage in stages.stages:
        adapter = read_adapter("", path, stage.adapter_targets())
        stage.enable_adapters(1, 8)
        stage.load_adapter(1, adapter.layers)
        assert stage.adapter_layers is not None
        assert len(stage.adapter_layers._layers) * 2 == len(adapter.layers)
    driver.adapter_slot = 1
    differences = relative_difference(adapted(whole, path), driver, VOCAB_SIZE)
    assert max(differences.values()) < TOLERANCE
