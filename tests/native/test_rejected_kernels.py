"""Kernels that calibration rejected do not run: other tiles serve their rows, and MLX's operations
where none is left. Results stay right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np
import pytest
from support.planted_kernels import whole_steps
from support.reference import alibi_slopes, assert_close, make_batch, spans_of
from support.simulated import launches, needs_sim_extension, needs_simulator, sim_ext, simulated

from mlx_paged import executables, kernels, ops, plain_ops
from mlx_paged.kernels import AttentionLayer

pytestmark = [needs_sim_extension, needs_simulator]

NAME = "float32_80_80"
MATRIX = [f"paged_decode_matrix_{NAME}_m{size}" for size in (8, 16, 32)]
PREFILL = [f"paged_prefill_{NAME}_m32"]
MERGE = "paged_merge_float32_80"
DECODE = [f"paged_decode_{NAME}_q{n}" for n in (1, 2, 3)]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    with simulated():
        kernels.reject_kernels(())


def attend(rng: np.random.Generator, rows: Sequence[int], heads: int = 2, **options) -> set[str]:
    """Checks a step with these rows a sequence; returns the kernels that ran."""
    lens = [70 + n for n in rows]
    batch = make_batch(rng, lens, rows, num_q_heads=heads, num_kv_heads=2, key_dim=80)
    plan = batch.plan(split_tokens=32)
    launches()
    pools = (batch.key_pool, batch.value_pool)
    out = ops.paged_attention(batch.queries, *pools, plan, scale=0.1, **options)
    mx.eval(out)
    assert_close(out, batch.expected(scale=0.1, **options))
    return {launch["kernel"] for launch in launches()} - {MERGE}


def served(rejected: Sequence[str], group: int = 1) -> list[str]:
    """The kernels of 1 to 20 rows, without repetitions."""
    layer = AttentionLayer("float32", group, 80, 80, 0, 0, 0)
    kernels.reject_kernels(rejected)
    names = [kernels.attention_kernel(layer, rows) for rows in range(1, 21)]
    return [k for i, k in enumerate(names) if i == 0 or k != names[i - 1]]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("rejected", "expected"),
    [
        ([], [*DECODE, MATRIX[0], PREFILL[0]]),
        (DECODE[:1], [MATRIX[0], PREFILL[0]]),
        (DECODE[1:2], [DECODE[0], MATRIX[0], PREFILL[0]]),
        (DECODE[2:], [*DECODE[:2], MATRIX[0], PREFILL[0]]),
        (MATRIX[:1], [*DECODE, MATRIX[1], PREFILL[0]]),
        (MATRIX[:2], [*DECODE, MATRIX[2], PREFILL[0]]),
        (PREFILL, [*DECODE, *MATRIX]),
        ([*PREFILL, MATRIX[1]], [*DECODE, MATRIX[0], MATRIX[2]]),
        ([*PREFILL, *MATRIX[1:]], [*DECODE, MATRIX[0]]),
        ([*DECODE, *MATRIX], PREFILL),
        ([*DECODE, *MATRIX, *PREFILL], [""]),
        ([MERGE], [""]),
    ],
    ids=lambda names: "-".join(n.rpartition("_")[2] for n in names) or "none",
)
def test_the_next_tile_serves_the_rows_of_a_rejected_one(rng, rejected, expected) -> None:
    with simulated():
        names = served(rejected)
        assert names == expected
        assert len(set(names)) == len(names), "the rows of a kernel are contiguous"
        ran = attend(rng, [1, 2, 3, 5, 8, 9, 20, 40])
    assert not ran & set(rejected)
    assert ran == {"gather_kv"} if expected == [""] else ran >= {expected[-1]}


def test_pipelines_of_rejected_kernels_are_not_compiled(rng) -> None:
    with simulated():
        sim_ext.forget_attention_layers()
        kernels.reject_kernels(MATRIX[:1])
        attend(rng, [1, 4])
        names = {name for name, _ in sim_ext.pipelines_to_come()}
    assert MATRIX[0] not in names and {DECODE[0], MATRIX[1], PREFILL[0]} <= names


def test_a_rejected_kernel_takes_whole_steps_with_it() -> None:
    x, weight = mx.ones((2, 64)), mx.ones((8, 64))
    mx.eval(x, weight)
    with simulated():
        (unknown,) = executables.placeholders([x])
        assert executables.GpuExecutable([unknown], [ops.linear(unknown, weight)]).kernels == [
            "product_rows_float32_m4"
        ]
        kernels.reject_kernels(["product_rows_float32_m4"])
        with pytest.raises(ValueError, match="does not allow the kernel product_rows_float32_m4"):
            executables.GpuExecutable([unknown], [ops.linear(unknown, weight)])


def test_whole_steps_wait_for_calibration() -> None:
    with simulated(), whole_steps():
        assert (executables.max_gpu_step_rows(), executables.supported_step_rows()) == (0, 16)
        for allowed in (8, 32, 0):
            kernels.allow_step_rows(allowed)
            assert executables.max_gpu_step_rows() == min(allowed, 16)


# --- MLX's own operations -------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["plain", "window", "softcap", "sinks", "alibi", "bounds"])
def test_plain_attention_is_that_of_the_oracle(rng, options) -> None:
    lens, rows = [70, 33, 20, 1], [1, 4, 20, 1]
    bounds = spans_of(lens, rows, [[], [(30, 32)], [(2, 17)], []]) if options == "bounds" else None
    window = 13 if options == "window" else None
    batch = make_batch(rng, lens, rows, num_q_heads=6, window=window, bounds=bounds)
    plan = batch.plan()
    given = {
        "window": {"window": 13},
        "softcap": {"softcap": 2.0},
        "sinks": {"sinks": mx.linspace(-2, 3, 6)},
        "alibi": {"alibi_slopes": alibi_slopes(6)},
    }.get(options, {})
    dense = plain_ops.gather_kv(
        batch.key_pool, batch.value_pool, plan.block_tables, plan.context_lens, 70
    )
    out = plain_ops.paged_attention(batch.queries, *dense, plan, scale=0.125, **given)
    assert_close(out, batch.expected(scale=0.125, **given))


def test_every_replaced_operation_gives_the_kernels_result(rng) -> None:
    batch = make_batch(rng, [40, 9], [2, 1], key_dim=64, value_dim=80)
    plan, pools = batch.plan(), (batch.key_pool, batch.value_pool)
    rows = [mx.ones((3, *pool.shape[2:])) for pool in pools]
    pairs = mx.array([[1, 0], [3, 2]], mx.int32)
    logits = mx.array(rng.standard_normal((3, 100)).astype(np.float32))
    keys = mx.array(rng.integers(0, 1 << 31, (3, 2)).astype(np.uint32))
    words = mx.array(rng.integers(0, 1 << 31, (2, 4), dtype=np.int64).astype(np.int32))
    slots = mx.array([-1, 17, 18], mx.int32)
    settings = mx.array([1.0, 0.5, 2.0]), mx.array([-mx.inf, -2.0, -mx.inf]), mx.array([5, 0, 30])
    settings = *settings, mx.array([1.0, 0.9, 0.8])  # temperature, floors, top_k, top_p
    entries = mx.array([[5, -1], [7, 2], [8, 0]], mx.int32)  # a ban, and penalized tokens
    edits = mx.array([[2, 0, 0, 1, 3]], mx.int32), mx.array([[1.3, 0.2, 0.3]]), entries
    edits = *edits, mx.array([-mx.inf, 0.0, 0.0]), mx.array([7], mx.int32)
    mx.eval(pools, rows, logits, words, edits)

    def all_of_them() -> list[np.ndarray]:
        copies = [[mx.array(np.array(pool)) for pool in pools] for _ in range(2)]
        written = ops.write_kv(*copies[0], *rows, slots)
        greedy = ops.greedy_tokens(logits)
        outputs = [
            *(pool[1:] for pool in written),  # block 0 is padding
            *ops.copy_blocks(copies[1], pairs),
            *ops.gather_kv(*pools, plan.block_tables, plan.context_lens, 45),
            *greedy,
            ops.draw_tokens(logits, *greedy[:2], mx.array([1.0, 0, 2]), keys, -3 * mx.ones(3)),
            ops.sampling_thresholds(logits, logits.max(axis=-1), *settings),
            ops.apply_token_bitmask(logits + 0, words, mx.array([2, 0], mx.int32)),
            ops.edit_logits(logits, *edits),
            ops.take_rows(logits, mx.array([2, 0], mx.int32)),
            ops.take_rows(logits, mx.array([[99], [0], [5]], mx.uint32)),
        ]
        mx.eval(outputs)
        return [np.array(out) for out in outputs]

    names = ["write_kv", "copy_blocks", "gather_kv", "greedy_tokens_float32"]
    names += ["apply_token_bitmask_32", "draw_tokens_float32", "merge_draws"]
    names += ["sampling_thresholds_float32", "edit_logits", "copy_strided_32", "take_rows_32"]
    with simulated():
        expected = all_of_them()
        assert {launch["kernel"] for launch in launches()} == set(names)
        kernels.reject_kernels(names)
        for found, wanted in zip(all_of_them(), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
        assert not launches()
