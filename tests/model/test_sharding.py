"""Models divided among ranks: every family of mlx-lm that has a `shard()`, and the refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import _get_classes
from support.interpreters import python_path
from support.models import tiny_config, tiny_model
from support.pipelined import OneOf
from support.ports import free_ports

from mlx_paged.errors import UnsupportedModelError
from mlx_paged.model.families import PROVEN
from mlx_paged.model.linear_parts import LinearPart
from mlx_paged.model.sharding import REFUSED, Division, Summed, shard
from mlx_paged.model.wrap import build_paged_model

TESTS = Path(__file__).parents[1]
TOLERANCE = 1e-4
# One of each kind of attention and of experts; the others take `make test-long`.
SOME = ["gpt_oss", "deepseek_v3", "qwen3_5"]


def shardable() -> list[str]:
    """The families of docs/models.md that mlx-lm can divide."""
    return [
        name
        for name in sorted(PROVEN)
        if name not in REFUSED and hasattr(_get_classes(config={"model_type": name})[0], "shard")
    ]


@cache
def ranks_compare(families: tuple[str, ...], folder: Path) -> list[dict[str, Any]]:
    """The results of both ranks of `support.sharded_families`."""
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
    processes = [
        subprocess.Popen(
            [sys.executable, TESTS / "support/sharded_families.py", json.dumps(families)],
            env={
                **os.environ,
                "MLX_RANK": str(rank),
                "MLX_HOSTFILE": str(hosts),
                "MLX_PAGED_NUM_THREADS": "1",
                "PYTHONPATH": python_path(TESTS, TESTS.parent),
            },
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate() for process in processes]
    results = []
    for process, (output, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
        [line] = [line for line in output.splitlines() if line.startswith("RESULT ")]
        results.append(json.loads(line.removeprefix("RESULT ")))
    return results


def check(families: list[str], folder: Path) -> None:
    first, second = ranks_compare(tuple(families), folder)
    assert first == second, "both ranks have the same logits, to the bit"
    for family, found in first.items():
        assert "refused" not in found, (family, found)
        assert found["difference"] < TOLERANCE, family
        assert found["foreign"].get("CustomTransforms") is None, family


def test_sharded_families_match_whole_ones(tmp_path: Path) -> None:
    check(SOME, tmp_path)


@pytest.mark.long
def test_all_other_families(tmp_path: Path) -> None:
    check([*(f for f in shardable() if f not in SOME), "llama 4 bit", "qwen3_moe 4 bit"], tmp_path)


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_differ_are_refused_with_the_reason(family: str) -> None:
    model = tiny_model(tiny_config("llama"))
    with pytest.raises(UnsupportedModelError) as caught:
        shard(model, {"model_type": family}, OneOf(2))  # type: ignore[arg-type]
    assert f"{REFUSED[family]}, so it cannot run on 2 ranks" in str(caught.value)


def test_a_family_without_shard_is_refused_by_name() -> None:
    model = tiny_model(tiny_config("gemma"))
    with pytest.raises(UnsupportedModelError) as caught:
        shard(model, {"model_type": "gemma"}, OneOf(2))  # type: ignore[arg-type]
    assert str(caught.value) == (
        "model_type 'gemma' is not supported: mlx-lm has no shard() for it, so it cannot run on "
        "2 ranks"
    )


@pytest.mark.parametrize(
    ("fields", "size", "reason"),
    [
        ({}, 3, "4 heads"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "3 heads of keys and values"),
        ({"intermediate_size": 130}, 4, "cannot be sharded|Cannot shard"),
    ],
)
def test_sizes_that_cannot_be_divided(fields: dict[str, Any], size: int, reason: str) -> None:
    config = tiny_config("llama", **fields)
    with pytest.raises(UnsupportedModelError, match=f"divided among {size} ranks: .*({reason})"):
        shard(tiny_model(config), config, OneOf(size))  # type: ignore[arg-type]


def test_kv_heads_are_repeated_in_the_order_of_their_queries() -> None:
    """Two KV heads on four ranks: the first two have the first one."""
    config = tiny_config("llama")
    rows = []
    for rank in range(4):
        model = tiny_model(config)
        whole = model.layers[0].self_attn.k_proj.weight
        shard(model, config, OneOf(4, rank))  # type: ignore[arg-type]
        attention = model.layers[0].self_attn
        assert (attention.n_heads, attention.n_kv_heads) == (1, 1)
        assert isinstance(attention.o_proj, Summed)
        rows.append([mx.array_equal(attention.k_proj.weight, w).item() for w in whole.split(2)])
    assert rows == [[True, False], [True, False], [False, True], [False, True]]


def test_the_number_of_families_in_the_documentation() -> None:
    """docs/distributed.md says how many there are."""
    page = (TESTS.parent / "docs/distributed.md").read_text()
    assert f"{len(shardable())} families" in page


def test_weights_of_tokens_that_other_ranks_have() -> None:
    config = tiny_config("llama", tie_word_embeddings=False)
    model = tiny_model(config)
    paged = build_paged_model(model, config, block_size=8)
    paged.keep_hidden_states()
    assert paged.output_weights([1, 2])[0].shape == (2, config["hidden_size"])
    rows = np.arange(config["vocab_size"] // 2)
    shape = (config["hidden_size"], config["vocab_size"])
    model.division = Division(2, {"lm_head": LinearPart(shape, slice(0, shape[0]), rows)})
    with pytest.raises(ValueError, match="its output projection 'lm_head' is divided among ranks"):
        paged.output_weights([1, 2])
