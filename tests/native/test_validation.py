"""Every refusal, when the graph is built: "[op] <what> must be <expectation> but got <actual>"."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from support.reference import ON_GPU

from mlx_paged import ops
from mlx_paged.extension import ext
from mlx_paged.model.plan import build_plan
from mlx_paged.ops import AttentionPlan

NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, KEY_DIM, VALUE_DIM = 4, 8, 2, 16, 24
KEY_POOL = (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, KEY_DIM)
VALUE_POOL = (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, VALUE_DIM)


def f32(*shape: int) -> mx.array:
    return mx.zeros(shape)


def i32(*shape: int) -> mx.array:
    return mx.zeros(shape, mx.int32)


host_values = pytest.mark.skipif(ON_GPU, reason="the host reads no values of a GPU's arrays")


def on_host(numbers: list[float]) -> mx.array:
    array = mx.array(numbers)
    mx.eval(array)
    return array


def write_kv(**changed: mx.array) -> object:
    arguments = {
        "key_pool": f32(*KEY_POOL),
        "value_pool": f32(*VALUE_POOL),
        "keys": f32(3, NUM_KV_HEADS, KEY_DIM),
        "values": f32(3, NUM_KV_HEADS, VALUE_DIM),
        "slot_mapping": i32(3),
    }
    return ops.write_kv(**{**arguments, **changed})


def copy_blocks(**changed: object) -> object:
    arguments = {"pools": [f32(*KEY_POOL), f32(*VALUE_POOL)], "block_pairs": i32(2, 2)}
    return ops.copy_blocks(**{**arguments, **changed})


def gather_kv(**changed: object) -> object:
    arguments = {
        "key_pool": f32(*KEY_POOL),
        "value_pool": f32(*VALUE_POOL),
        "block_tables": i32(2, 3),
        "context_lens": i32(2),
        "max_context_len": 20,
    }
    return ops.gather_kv(**{**arguments, **changed})


def plan_of(num_rows: int = 3) -> AttentionPlan:
    return AttentionPlan(
        positions=i32(num_rows),
        slot_mapping=i32(num_rows),
        block_tables=i32(2, 3),
        context_lens=i32(2),
        query_starts=i32(3),
        work_items=i32(2, 6),
        merge_items=i32(0, 4),
    )


def paged_attention(**changed: object) -> object:
    fields = {name: changed.pop(name) for name in list(changed) if hasattr(plan_of(), name)}
    arguments = {
        "queries": f32(3, 4, KEY_DIM),
        "key_pool": f32(*KEY_POOL),
        "value_pool": f32(*VALUE_POOL),
        "plan": replace(plan_of(), **fields),
        "scale": 0.25,
    }
    return ops.paged_attention(**{**arguments, **changed})


def native_attention(**changed: float) -> object:
    """The extension itself, behind the checks that `ops` adds."""
    plan = plan_of()
    return ext.paged_attention(
        f32(3, 4, KEY_DIM),
        f32(*KEY_POOL),
        f32(*VALUE_POOL),
        plan.positions,
        plan.block_tables,
        plan.work_items,
        plan.merge_items,
        **{"scale": 0.25, **changed},
    )


OPS = {
    "write_kv": write_kv,
    "copy_blocks": copy_blocks,
    "gather_kv": gather_kv,
    "paged_attention": paged_attention,
}


def refuses(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        call()


@pytest.mark.parametrize("op", OPS)
def test_the_arguments_that_these_tests_spoil_are_accepted(op) -> None:
    OPS[op]()


# --- Pools ----------------------------------------------------------------------------------------

BAD_POOLS = {
    "int32": (
        i32(*KEY_POOL),
        "{} must be float32, float16 or bfloat16, or int8, uint32 or uint8 for a quantized pool "
        "but got int32",
    ),
    "rank": (
        f32(4, 8, 32),
        "{} must be of shape (num_blocks,block_size,num_kv_heads,head_dim) but got (4,8,32)",
    ),
    "block_size": (
        f32(4, 12, 2, 16),
        "block_size of {} must be 8, 16, 32 or 64 but got 12",
    ),
    "block_size of 4": (
        f32(8, 4, 2, 16),
        "block_size of {} must be 8, 16, 32 or 64 but got 4",
    ),
    "block_size of 128": (
        f32(1, 128, 2, 16),
        "block_size of {} must be 8, 16, 32 or 64 but got 128",
    ),
    "odd head_dim": (
        f32(4, 8, 2, 20),
        "head_dim of {} must be a multiple of 8 up to 576 but got 20",
    ),
    "large head_dim": (
        f32(4, 8, 2, 584),
        "head_dim of {} must be a multiple of 8 up to 576 but got 584",
    ),
    "no head_dim": (
        f32(4, 8, 2, 0),
        "head_dim of {} must be a multiple of 8 up to 576 but got 0",
    ),
    "no blocks": (f32(0, 8, 2, 16), "num_blocks of {} must be at least 1 but got 0"),
    "no heads": (f32(4, 8, 0, 16), "num_kv_heads of {} must be at least 1 but got 0"),
}


@pytest.mark.parametrize("name", BAD_POOLS)
@pytest.mark.parametrize("which", ["key_pool", "value_pool"])
@pytest.mark.parametrize("op", ["write_kv", "gather_kv", "paged_attention"])
def test_pool(op, which, name) -> None:
    pool, message = BAD_POOLS[name]
    refuses(lambda: OPS[op](**{which: pool}), f"[{op}] {message.format(which)}")


@pytest.mark.parametrize("name", BAD_POOLS)
@pytest.mark.parametrize("position", [0, 1])
def test_any_pool_of_copy_blocks(position, name) -> None:
    pool, message = BAD_POOLS[name]
    pools = [f32(*KEY_POOL)] * position + [pool]
    refuses(
        lambda: copy_blocks(pools=pools),
        "[copy_blocks] " + message.format(f"pools[{position}]"),
    )


@pytest.mark.parametrize("name", sorted(BAD_POOLS.keys() - {"rank"}))
def test_allocate_pool(name) -> None:
    pool, message = BAD_POOLS[name]
    refuses(
        lambda: ops.allocate_pool(*pool.shape, pool.dtype),
        f"[allocate_pool] {message.format('pool')}",
    )


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2**26, 32, 1, 8), "num_blocks of pool must be at most 67108863 at block_size 32"),
        ((2**30, 64, 2**24, 8), "num_blocks of pool must be at most 33554431 at block_size 64"),
        (
            (1, 64, 2**20, 64),
            "num_kv_heads of pool must be at most 524287 at block_size 64 and head_dim 64",
        ),
    ],
)
def test_allocate_pool_counts_slots_and_blocks_in_32_bits(shape, message) -> None:
    actual = shape[0] if "num_blocks" in message else shape[2]
    refuses(
        lambda: ops.allocate_pool(*shape, mx.float32), f"[allocate_pool] {message} but got {actual}"
    )


@pytest.mark.parametrize("op", ["write_kv", "gather_kv", "paged_attention"])
def test_pools_that_do_not_belong_together(op) -> None:
    refuses(
        lambda: OPS[op](value_pool=f32(*VALUE_POOL).astype(mx.float16)),
        f"[{op}] value_pool must be float32 like key_pool but got float16",
    )
    for shape in ((5, 8, 2, 24), (4, 16, 2, 24), (4, 8, 1, 24)):
        actual = ",".join(map(str, shape))
        refuses(
            lambda shape=shape: OPS[op](value_pool=f32(*shape)),
            f"[{op}] value_pool must be of shape (4,8,2,*) but got ({actual})",
        )


@pytest.mark.parametrize("op", OPS)
def test_pool_with_work_pending_on_another_stream(op) -> None:
    device = mx.default_device()
    here, there = mx.default_stream(device), mx.new_stream(device)
    rows = f32(1, NUM_KV_HEADS, KEY_DIM)
    pending, _ = ops.write_kv(
        f32(*KEY_POOL),
        f32(*KEY_POOL),
        rows,
        rows,
        i32(1),
        stream=here,
    )
    changed = {"pools": [pending]} if op == "copy_blocks" else {"key_pool": pending}
    what = "pools[0]" if op == "copy_blocks" else "key_pool"
    refuses(
        lambda: OPS[op](**changed, stream=there),
        f"[{op}] {what} must be on the op's stream {there} but got {here}",
    )
    mx.eval(pending)
    OPS[op](**changed, stream=there) if op == "copy_blocks" else None


@pytest.mark.skipif(mx.is_available(mx.gpu), reason="needs a machine without a GPU")
@pytest.mark.parametrize("op", OPS)
def test_a_device_that_is_not_there(op) -> None:
    with pytest.raises(ValueError, match="gpu"):
        mx.eval(OPS[op](stream=mx.gpu))


# --- write_kv -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"slot_mapping": i32(3, 1)},
            "slot_mapping must be of shape (*) but got (3,1)",
        ),
        ({"slot_mapping": f32(3)}, "slot_mapping must be int32 but got float32"),
        (
            {"slot_mapping": mx.zeros(3, mx.int64)},
            "slot_mapping must be int32 but got int64",
        ),
        ({"keys": f32(2, 2, 16)}, "keys must be of shape (3,2,16) but got (2,2,16)"),
        ({"keys": f32(3, 4, 16)}, "keys must be of shape (3,2,16) but got (3,4,16)"),
        ({"keys": f32(3, 32)}, "keys must be of shape (3,2,16) but got (3,32)"),
        (
            {"values": f32(3, 2, 16)},
            "values must be of shape (3,2,24) but got (3,2,16)",
        ),
        # An extent of 0 is that extent, and not any.
        ({"slot_mapping": i32(0)}, "keys must be of shape (0,2,16) but got (3,2,16)"),
        ({"keys": f32(0, 2, 16)}, "keys must be of shape (3,2,16) but got (0,2,16)"),
        (
            {"keys": mx.zeros((3, 2, 16), mx.bfloat16)},
            "keys must be float32 like key_pool but got bfloat16",
        ),
        (
            {"values": mx.zeros((3, 2, 24), mx.float16)},
            "values must be float32 like value_pool but got float16",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_write_kv(changed, message) -> None:
    refuses(lambda: write_kv(**changed), f"[write_kv] {message}")


# --- copy_blocks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"pools": []}, "pools must be at least one array but got none"),
        ({"block_pairs": i32(4)}, "block_pairs must be of shape (*,2) but got (4)"),
        (
            {"block_pairs": i32(2, 3)},
            "block_pairs must be of shape (*,2) but got (2,3)",
        ),
        ({"block_pairs": f32(2, 2)}, "block_pairs must be int32 but got float32"),
        (
            {"pools": [f32(4, 8, 2, 16), f32(5, 8, 2, 16)]},
            "num_blocks of pools[1] must be 4 like pools[0] but got 5",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_copy_blocks(changed, message) -> None:
    refuses(lambda: copy_blocks(**changed), f"[copy_blocks] {message}")


# --- gather_kv ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"block_tables": i32(6)}, "block_tables must be of shape (*,*) but got (6)"),
        ({"block_tables": f32(2, 3)}, "block_tables must be int32 but got float32"),
        ({"context_lens": i32(3)}, "context_lens must be of shape (2) but got (3)"),
        (
            {"context_lens": i32(2, 1)},
            "context_lens must be of shape (2) but got (2,1)",
        ),
        ({"context_lens": f32(2)}, "context_lens must be int32 but got float32"),
        ({"block_tables": i32(0, 3)}, "context_lens must be of shape (0) but got (2)"),
        (
            {"block_tables": i32(2, 2**27), "max_context_len": 2**27},
            "max_context_len must be at most 89478485 for heads of fewer than 2^31 elements but "
            "got 134217728",
        ),
        ({"max_context_len": -1}, "max_context_len must be at least 0 but got -1"),
        (
            {"max_context_len": 25},
            "max_context_len must be at most 24 (the slots of a row of block_tables) but got 25",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_gather_kv(changed, message) -> None:
    refuses(lambda: gather_kv(**changed), f"[gather_kv] {message}")


# --- paged_attention ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"positions": i32(2, 3)}, "positions must be of shape (*) but got (2,3)"),
        ({"positions": i32(3, 1)}, "queries must be of shape (1,*,16) but got (3,4,16)"),
        ({"positions": f32(3)}, "positions must be int32 but got float32"),
        ({"block_tables": i32(6)}, "block_tables must be of shape (*,*) but got (6)"),
        ({"block_tables": f32(2, 3)}, "block_tables must be int32 but got float32"),
        ({"work_items": i32(2, 5)}, "work_items must be of shape (*,6) but got (2,5)"),
        ({"work_items": f32(2, 6)}, "work_items must be int32 but got float32"),
        ({"merge_items": i32(4)}, "merge_items must be of shape (*,4) but got (4)"),
        ({"merge_items": f32(1, 4)}, "merge_items must be int32 but got float32"),
        (
            {"queries": f32(2, 4, 16)},
            "queries must be of shape (3,*,16) but got (2,4,16)",
        ),
        (
            {"queries": f32(3, 4, 24)},
            "queries must be of shape (3,*,16) but got (3,4,24)",
        ),
        ({"queries": f32(3, 64)}, "queries must be of shape (3,*,16) but got (3,64)"),
        ({"positions": i32(0)}, "queries must be of shape (0,*,16) but got (3,4,16)"),
        ({"merge_items": i32(0, 0)}, "merge_items must be of shape (*,4) but got (0,0)"),
        (
            {"queries": mx.zeros((3, 4, 16), mx.float16)},
            "queries must be float32 like key_pool but got float16",
        ),
        (
            {"queries": f32(3, 5, 16)},
            "num_q_heads must be a multiple of num_kv_heads 2 but got 5",
        ),
        (
            {"queries": f32(3, 1, 16)},
            "num_q_heads must be a multiple of num_kv_heads 2 but got 1",
        ),
        (
            {"queries": f32(3, 0, 16)},
            "num_q_heads must be a multiple of num_kv_heads 2 but got 0",
        ),
        ({"scale": 0.0}, "scale must be positive and at most 2e+38 but got 0"),
        ({"scale": -1.5}, "scale must be positive and at most 2e+38 but got -1.5"),
        ({"scale": float("inf")}, "scale must be positive and at most 2e+38 but got inf"),
        ({"scale": 3e38}, "scale must be positive and at most 2e+38 but got 3e+38"),
        (
            {"softcap": 3e38},
            "softcap must be positive and at most 2e+38, or 0 for none but got 3e+38",
        ),
        ({"scale": float("nan")}, "scale must be positive and at most 2e+38 but got nan"),
        ({"window": 0}, "window must be None or at least 1 but got 0"),
        ({"window": -4}, "window must be None or at least 1 but got -4"),
        ({"softcap": 0.0}, "softcap must be None or positive but got 0.0"),
        ({"softcap": -2.0}, "softcap must be None or positive but got -2.0"),
        (
            {"softcap": float("inf")},
            "softcap must be positive and at most 2e+38, or 0 for none but got inf",
        ),
        (
            {"softcap": float("nan")},
            "softcap must be positive and at most 2e+38, or 0 for none but got nan",
        ),
        ({"sinks": f32(3)}, "sinks must be of shape (4) but got (3)"),
        ({"sinks": f32(4, 1)}, "sinks must be of shape (4) but got (4,1)"),
        ({"sinks": i32(4)}, "sinks must be floating point but got int32"),
        ({"alibi_slopes": f32(3)}, "alibi_slopes must be of shape (4) but got (3)"),
        ({"alibi_slopes": i32(4)}, "alibi_slopes must be floating point but got int32"),
        pytest.param(
            {"alibi_slopes": on_host([0.5, 2e28, 0.5, 0.5])},
            "alibi_slopes[1] must be from -1e+28 to 1e+28 but got 2e+28",
            marks=host_values,
        ),
        pytest.param(
            {"alibi_slopes": on_host([0.5, 0.5, 0.5, float("nan")])},
            "alibi_slopes[3] must be from -1e+28 to 1e+28 but got nan",
            marks=host_values,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_paged_attention(changed, message) -> None:
    refuses(lambda: paged_attention(**changed), f"[paged_attention] {message}")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"window": -1}, "window must be at least 1, or 0 for none but got -1"),
        ({"softcap": -1.0}, "softcap must be positive and at most 2e+38, or 0 for none but got -1"),
    ],
)
def test_the_extension_checks_for_itself(changed, message) -> None:
    refuses(lambda: native_attention(**changed), f"[paged_attention] {message}")


# --- build_plan -----------------------------------------------------------------------------------


SHORT = "must be at least 1 blocks for context length 7 at block size 16"


@pytest.mark.parametrize(
    ("tables", "context_lens", "query_lens", "block_size", "message"),
    [
        ([[1]], [5], [1], 12, "block_size must be 8, 16, 32 or 64 but got 12"),
        ([[1, 2]], [5], [1], 4, "block_size must be 8, 16, 32 or 64 but got 4"),
        (
            [[1], [2]],
            [5],
            [1, 1],
            16,
            "context_lens must be of shape (2,) like block_tables but got (1,)",
        ),
        (
            [[1]],
            [5],
            [1, 1],
            16,
            "query_lens must be of shape (1,) like block_tables but got (2,)",
        ),
        (
            [[1], [2]],
            [5, -1],
            [1, 0],
            16,
            "context_lens[1] must be at least 0 but got -1",
        ),
        (
            [[1], [2]],
            [5, 5],
            [1, -2],
            16,
            "query_lens[1] must be at least 0 but got -2",
        ),
        (
            [[1], [2]],
            [5, 3],
            [1, 4],
            16,
            "query_lens[1] must be at most its context length 3 but got 4",
        ),
        (
            [[1, 2], []],
            [32, 7],
            [1, 1],
            16,
            f"block_tables[1] {SHORT} but got 0",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_build_plan(tables, context_lens, query_lens, block_size, message) -> None:
    refuses(
        lambda: build_plan(tables, context_lens, query_lens, block_size=block_size),
        f"[paged_attention] {message}",
    )


@pytest.mark.parametrize("limit", ["rows_per_item", "split_tokens"])
@pytest.mark.parametrize("value", [0, -1])
def test_build_plan_limits(limit, value) -> None:
    refuses(
        lambda: build_plan([[1]], [5], [1], block_size=16, **{limit: value}),
        f"[paged_attention] {limit} must be at least 1 but got {value}",
    )


def test_a_refused_call_leaves_nothing_behind() -> None:
    refuses(
        lambda: write_kv(keys=f32(1, 1, 8)),
        "[write_kv] keys must be of shape (3,2,16) but got (1,1,8)",
    )
    mx.eval(write_kv(slot_mapping=mx.array(np.arange(3, dtype=np.int32))))


@pytest.mark.parametrize("op", OPS)
def test_wrong_types_are_type_errors(op) -> None:
    changed = {"pools": [[1.0]]} if op == "copy_blocks" else {"key_pool": np.zeros(KEY_POOL)}
    with pytest.raises(TypeError):
        OPS[op](**changed)
