"""Attention with AMX tiles, in hardware or in software: bfloat16 pools, and float32 pools rounded
to bfloat16 in steps with int8 activations."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from support.reference import (
    PagedBatch,
    alibi_slopes,
    assert_close,
    make_batch,
    spans_of,
    to_numpy,
)
from support.simd_processes import instruction_sets, run_in_process_of

from mlx_paged import ops

HERE = Path(__file__).parent
needs_emulation = pytest.mark.skipif(  # a string is evaluated when a test needs it
    "'amx_emulated' not in instruction_sets()", reason="this processor has no AVX-512 with BF16"
)


# --- Accuracy -------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize(("group", "rows"), [(1, 1), (3, 40), (4, 5), (9, 33)])
def test_prompts_and_decode_match_the_oracle(rng, head_dim, group, rows) -> None:
    shape = {"num_q_heads": 2 * group, "num_kv_heads": 2, "key_dim": head_dim}
    for block_size in (8, 32):  # a tile spans blocks
        batch = make_batch(
            rng, [rows + 75, rows], [rows, 1], block_size=block_size, dtype=mx.bfloat16, **shape
        )
        found = ops.paged_attention(
            batch.queries, batch.key_pool, batch.value_pool, batch.plan(), scale=0.1
        )
        assert_close(found, batch.expected(scale=0.1), 4e-3)


@pytest.mark.parametrize("option", ["window", "softcap", "alibi_slopes", "sinks"])
def test_each_option_with_bfloat16(rng, option) -> None:
    value = {
        "window": 70,
        "softcap": 2.0,
        "alibi_slopes": alibi_slopes(6),
        "sinks": mx.array([-3.0, 0.0, 2.0, 9.0, 1.0, -1.0]),
    }[option]
    window = value if option == "window" else None
    batch = make_batch(
        rng, [200, 90], [50, 1], num_q_heads=6, key_dim=72, dtype=mx.bfloat16, window=window
    )
    plan = batch.plan(window=window)
    found = ops.paged_attention(
        batch.queries, batch.key_pool, batch.value_pool, plan, scale=0.2, **{option: value}
    )
    assert_close(found, batch.expected(scale=0.2, **{option: value}), 4e-3)


def test_bfloat16_values_are_weighed_with_16_bits(rng) -> None:
    """Values that almost cancel show how weights were rounded: to 8 bits, errors are 4e-4."""
    queries, keys = rng.standard_normal((1, 1, 32)), rng.standard_normal((7, 16, 1, 32))
    rounded = [
        to_numpy(mx.array(x.astype(np.float32)).astype(mx.bfloat16)) for x in (queries, keys)
    ]
    weights = np.exp(0.2 * rounded[1].reshape(112, 32) @ rounded[0].reshape(32))
    values = rng.standard_normal((112, 32))
    values -= weights @ values / weights.sum()
    arrays = (queries, keys, values.reshape(keys.shape))
    given = [mx.array(x.astype(np.float32)).astype(mx.bfloat16) for x in arrays]
    batch = PagedBatch(*given, tables=[list(range(7))], context_lens=[112], query_lens=[1])
    found = ops.paged_attention(*given, batch.plan(), scale=0.2)
    assert np.abs(to_numpy(found) - batch.expected(scale=0.2)).max() < 5e-6


ROUNDED = 8e-3  # errors of a row: queries, keys, values and probabilities have 8 bits


@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (72, 24), (80, 80), (128, 576)])
@pytest.mark.parametrize(("group", "rows"), [(1, 1), (3, 40), (4, 5), (9, 33)])
def test_rounded_prompts_and_decode(rng, head_dim, value_dim, group, rows) -> None:
    shape = {"num_q_heads": 2 * group, "num_kv_heads": 2, "key_dim": head_dim}
    for window, block_size in ((None, 8), (50, 32)):
        batch = make_batch(
            rng, [rows + 75, rows], [rows, 1], value_dim=value_dim, block_size=block_size,
            window=window, **shape,
        )  # fmt: skip
        options = {"scale": 0.1, "window": window}
        found = ops.paged_attention(
            batch.queries, batch.key_pool, batch.value_pool, batch.plan(window=window),
            activations="int8", **options,
        )  # fmt: skip
        assert_close(found, batch.expected(**options), ROUNDED)


@pytest.mark.parametrize("option", ["softcap", "alibi_slopes", "sinks", "bounds"])
def test_each_option_of_rounded_attention(rng, option) -> None:
    options = {
        "softcap": {"softcap": 2.0},
        "alibi_slopes": {"alibi_slopes": alibi_slopes(6)},
        "sinks": {"sinks": mx.array([-3.0, 0.0, 2.0, 9.0, 1.0, -1.0])},
        "bounds": {},
    }[option]
    lens, rows = [200, 90], [50, 1]
    bounds = spans_of(lens, rows, [[(160, 190)], []]) if option == "bounds" else None
    batch = make_batch(rng, lens, rows, num_q_heads=6, key_dim=72, bounds=bounds)
    found = ops.paged_attention(
        batch.queries, batch.key_pool, batch.value_pool, batch.plan(), scale=0.2,
        activations="int8", **options,
    )  # fmt: skip
    assert_close(found, batch.expected(scale=0.2, **options), ROUNDED)


def test_rounded_attention_of_scores_that_grow_and_of_infinities(rng) -> None:
    """Each tile has a new maximum; an infinite value stays one; NaN reaches only its head."""
    batch = make_batch(rng, [300], [40], num_q_heads=4, num_kv_heads=2, key_dim=64)
    keys = to_numpy(batch.key_pool)
    for place, block in enumerate(batch.tables[0]):
        keys[block] *= 1 + place
    given = replace(batch, key_pool=mx.array(keys.astype(np.float32)))
    plan = given.plan()

    def attend(values: mx.array) -> np.ndarray:
        out = ops.paged_attention(
            given.queries, given.key_pool, values, plan, scale=0.02, activations="int8"
        )
        return to_numpy(out)

    found = attend(batch.value_pool)
    assert_close(mx.array(found.astype(np.float32)), given.expected(scale=0.02), 1e-2)
    values = np.array(batch.value_pool)
    values[batch.tables[0][0], 0, 0, 5] = np.inf
    values[batch.tables[0][0], 0, 1, 7] = np.nan
    changed = attend(mx.array(values))
    assert not np.isfinite(changed[:, :2, 5]).any() and np.isnan(changed[:, 2:, 7]).all()
    unchanged = np.ones_like(found, bool)
    unchanged[:, :2, 5] = unchanged[:, 2:, 7] = False
    np.testing.assert_array_equal(changed[unchanged], found[unchanged])


# --- Bits -----------------------------------------------------------------------------------------

# Attention of prompts and single rows with every kind of pool, as one file.
CODE = """
import sys
import mlx_paged
import mlx.core as mx
import numpy as np
from support.quantized import make_quantized
from support.reference import bits, make_batch
from mlx_paged import ops
rng = np.random.default_rng(5)
found = {}
for name in ("bfloat16", "float16", "float32", "rounded", "int8"):
    for dim, group, window in ((64, 3, None), (80, 1, 50), (128, 8, None)):
        shape = {"num_q_heads": group, "num_kv_heads": 1, "key_dim": dim, "window": window}
        if name == "int8":
            batch = make_quantized(rng, [150, 90], [37, 1], name=name, **shape)
            plain, pools = batch.plain, (batch.key_pool, batch.value_pool)
        else:
            dtype = mx.float32 if name == "rounded" else getattr(mx, name)
            same = np.random.default_rng(dim)
            plain = make_batch(same, [150, 90], [37, 1], dtype=dtype, **shape)
            pools = plain.key_pool, plain.value_pool
        plan = plain.plan(window=window)
        options = {"scale": 0.2, "window": window}
        if name == "rounded":
            options["activations"] = "int8"
        out = ops.paged_attention(plain.queries, *pools, plan, **options)
        found[f"{name}-{dim}"] = bits(out)
        if name == "bfloat16":
            tiny = mx.full(pools[1].shape, 2.0**-130, dtype=mx.bfloat16)
            out = ops.paged_attention(plain.queries, pools[0], tiny, plan, scale=0.2, window=window)
            found[f"tiny-{dim}"] = bits(out)
np.savez(sys.argv[1], **found)
"""


def outputs(simd: str, folder: Path) -> dict[str, np.ndarray]:
    """Runs CODE on an instruction set. Returns its outputs by pool and head dim."""
    path = folder / f"{simd}.npz"
    tests = str(HERE.parent)
    env = {**os.environ, "MLX_PAGED_SIMD": simd, "MLX_PAGED_NUM_THREADS": "2"}
    env["PYTHONPATH"] = os.pathsep.join([tests, env.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", CODE, str(path)], env=env, check=True)
    with np.load(path) as found:
        return dict(found)


@needs_emulation
def test_tiles_change_only_bfloat16_pools_and_rounded_steps_in_a_process(tmp_path: Path) -> None:
    without, tiles = outputs("avx512bf16", tmp_path), outputs("amx_emulated", tmp_path)
    assert without.keys() == tiles.keys()
    for name in tiles:
        if name.startswith("tiny"):  # subnormal values, which tiles count as zero
            assert without[name].all() and not tiles[name].any(), name
        elif name.startswith("rounded"):
            exact = name.replace("rounded", "float32")
            np.testing.assert_array_equal(without[name], without[exact], err_msg=name)
            assert (tiles[name] != tiles[exact]).any(), name
        elif not name.startswith("bfloat16"):
            np.testing.assert_array_equal(tiles[name], without[name], err_msg=name)
    if "amx" in instruction_sets():
        for name, expected in outputs("amx", tmp_path).items():
            np.testing.assert_array_equal(tiles[name], expected, err_msg=name)


@needs_emulation
def test_attention_in_a_process_with_tiles() -> None:
    """These tests, and others of bfloat16 and of rounding: a row has the same bits however its
    prompt is cut."""
    files = [
        __file__,
        str(HERE / "test_paged_attention.py"),
        str(HERE / "test_attention_bounds.py"),
        str(HERE.parent / "model" / "test_same_bits.py"),
    ]
    expression = "(bfloat16 or rounded) and not in_a_process or match_the_oracle"
    run_in_process_of("amx_emulated", 2, files, expression)
