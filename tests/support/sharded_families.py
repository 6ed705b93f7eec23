"""One of two ranks that compares sharded families with whole ones; MLX_RANK says which.

Every linear layer has an adapter, whose parts belong to the parts of the layer.

``python sharded_families.py '["qwen2", "qwen3_moe 4 bit"]'`` prints a line with the difference of
each family's logits, or why it was refused, and the operations that MLX runs between phases.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import quantize_model

from mlx_paged.engine.lora.files import read_adapter
from mlx_paged.errors import UnsupportedModelError
from mlx_paged.model.lora import RANK_STEP
from mlx_paged.model.sharding import shard
from mlx_paged.model.wrap import convert_to_paged
from support.adapters import adapted, random_layers, write_mlx
from support.family_config_parts import VOCAB_SIZE
from support.family_configs import config_of
from support.metal_stand_ins import standing_in
from support.parity import Driver, family_model, relative_difference

#: Sizes that two ranks can divide where config_of's cannot be, and that quantize in groups of 32.
WIDE = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}

#: Families whose logits differ more with an adapter, on one rank, too: activations are bfloat16
#: in a float32 model, so sums in another order round to other values.
WITHOUT_ADAPTERS = {"muse_spark"}


def config_for(family: str) -> tuple[dict[str, Any], bool]:
    """A family's config, and whether its weights are quantized: "llama", "llama 4 bit"."""
    name, _, quantized = family.partition(" ")
    config = config_of(name)
    if quantized:
        config |= {key: size for key, size in WIDE.items() if key in config}
    return config, bool(quantized)


def compared(family: str, group: mx.distributed.Group) -> dict[str, Any]:
    with standing_in(family.partition(" ")[0]):
        return _compared(family, group)


def _compared(family: str, group: mx.distributed.Group) -> dict[str, Any]:
    config, is_quantized = config_for(family)
    whole, part = family_model(config), family_model(config)
    if is_quantized:
        whole, part = (quantize_model(m, config, bits=4, group_size=32)[0] for m in (whole, part))
    try:
        shard(part, config, group)
    except UnsupportedModelError as error:
        return {"refused": str(error)}
    paged = convert_to_paged(part, family, block_size=8)
    driver = Driver(paged)
    if family not in WITHOUT_ADAPTERS:
        add_adapter(whole, driver)
    difference = max(relative_difference(whole, driver, VOCAB_SIZE).values())
    return {"difference": difference, "foreign": dict(paged.compilation.foreign)}


def add_adapter(whole: nn.Module, driver: Driver) -> None:
    """Loads one adapter of all linear layers into both models."""
    targets = driver.paged.adapter_targets()
    names = {path.rpartition(".")[2] for path in targets.linear}
    with tempfile.TemporaryDirectory() as folder:
        layers = random_layers(whole, 1, names=names)
        layers = {name: pair for name, pair in layers.items() if name in targets.linear}
        path = write_mlx(Path(folder), layers, scale=0.5)
        driver.paged.enable_adapters(1, RANK_STEP)
        driver.paged.load_adapter(1, read_adapter("all", path, targets).layers)
        adapted(whole, path)
    driver.adapter_slot = 1


def main() -> None:
    group = mx.distributed.init(strict=True, backend="ring")
    found = {family: compared(family, group) for family in json.loads(sys.argv[1])}
    print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
