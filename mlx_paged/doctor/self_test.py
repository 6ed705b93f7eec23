"""Runs every primitive once against `mlx_paged.reference`. Imports MLX, so only the child does.

The data is random, unused slots hold NaN, and each case takes milliseconds. A case raises
`WrongResult` with the wrong row and the size of its error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged import ops, reference
from mlx_paged.model.plan import build_plan
from mlx_paged.reference import TOLERANCE

DTYPES = tuple(TOLERANCE)
_BLOCK_SIZE, _KV_HEADS, _HEAD_DIM, _NUM_BLOCKS = 16, 2, 64, 9
_TABLES, _LENS = [[3, 7, 1, 5], [2, 6, 4]], [59, 37]
_SCALE = 0.125


class WrongResult(Exception):
    """A primitive's result differs from NumPy's."""


@dataclass(frozen=True)
class Case:
    """A check of one primitive.

    Attributes:
        run: Raises `WrongResult`.
        dtypes: Dtypes that the primitive supports on the CPU, if any.
        gpu_dtypes: Dtypes for which we have a GPU kernel.
    """

    run: Callable[[Data], None]
    dtypes: tuple[str, ...] = DTYPES
    gpu_dtypes: tuple[str, ...] = ()


def jobs(device: str) -> list[str]:
    """Returns the jobs (see `jobs.run`) of all cases that run on "cpu" or "gpu"."""
    return [
        f"test/{device}/{name}/{dtype}"
        for name, case in CASES.items()
        for dtype in (case.dtypes if device == "cpu" else case.gpu_dtypes)
    ]


def run_case(name: str, device: str, dtype: str) -> None:
    """Runs one case.

    Raises:
        WrongResult: The result differs from NumPy's.
        Exception: Any error of the primitive.
    """
    with mx.stream(mx.gpu if device == "gpu" else mx.cpu):
        CASES[name].run(Data(dtype))


class Data:
    """Random arrays of one dtype, the same on every run."""

    def __init__(self, dtype: str) -> None:
        self.name = dtype
        self.dtype: mx.Dtype = getattr(mx, dtype)
        self._rng = np.random.default_rng(0)

    def normal(self, *shape: int) -> mx.array:
        """Normally distributed values, rounded to the dtype."""
        return mx.array(self._rng.standard_normal(shape).astype(np.float32)).astype(self.dtype)

    def pools(self) -> tuple[mx.array, mx.array]:
        """Keys and values ``[_NUM_BLOCKS, _BLOCK_SIZE, _KV_HEADS, _HEAD_DIM]`` of two sequences;
        slots without a token are NaN."""
        pools = np.full((2, _NUM_BLOCKS, _BLOCK_SIZE, _KV_HEADS, _HEAD_DIM), np.nan, np.float32)
        for pool in pools:
            for table, length in zip(_TABLES, _LENS):
                rows = np.full((len(table) * _BLOCK_SIZE, *pool.shape[2:]), np.nan)
                rows[:length] = self._rng.standard_normal((length, *pool.shape[2:]))
                pool[table] = rows.reshape(-1, *pool.shape[1:])
        keys, values = (mx.array(pool).astype(self.dtype) for pool in pools)
        return keys, values

    def check(self, actual: mx.array, expected: np.ndarray, what: str = "result") -> None:
        """Raises `WrongResult` if the shape differs or a row exceeds the dtype's tolerance."""
        found = _exact_of_shape(actual, expected, what)
        relative = reference.relative_errors(found, expected)
        worst = int(np.argmax(relative))
        if relative[worst] > TOLERANCE[self.name]:
            raise WrongResult(
                f"{what}: row {worst} is off by {relative[worst]:.1e} of its norm, expected "
                f"at most {TOLERANCE[self.name]:.0e}"
            )

    def same(self, actual: mx.array, expected: np.ndarray, what: str) -> None:
        """Raises `WrongResult` if a shape or a value differs; NaN equals NaN."""
        found = _exact_of_shape(actual, expected, what)
        wrong = ~((found == expected) | (np.isnan(found) & np.isnan(expected)))
        if wrong.any():
            place = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise WrongResult(
                f"{what}: expected {expected[place]} at {place} but got {found[place]}; "
                f"{int(wrong.sum())} of {wrong.size} values differ"
            )


def exact(a: mx.array) -> np.ndarray:
    """Returns a float64 copy, which represents every value of the three dtypes exactly."""
    return np.array(a.astype(mx.float32)).astype(np.float64)


def _exact_of_shape(actual: mx.array, expected: np.ndarray, what: str) -> np.ndarray:
    if tuple(actual.shape) != expected.shape:
        raise WrongResult(f"{what}: expected shape {expected.shape} but got {actual.shape}")
    return exact(actual)


def _allocate_pool(data: Data) -> None:
    expected = (4, _BLOCK_SIZE, _KV_HEADS, _HEAD_DIM)
    pool = ops.allocate_pool(*expected, data.dtype)
    if tuple(pool.shape) != expected or pool.dtype != data.dtype:
        raise WrongResult(f"expected {expected} of {data.dtype} but got {pool.shape}, {pool.dtype}")


def _write_kv(data: Data) -> None:
    key_pool, value_pool = data.pools()
    before = exact(key_pool), exact(value_pool)
    keys, values = (data.normal(3, _KV_HEADS, _HEAD_DIM) for _ in range(2))
    slots = [130, -1, 17]
    written = ops.write_kv(key_pool, value_pool, keys, values, mx.array(slots, mx.int32))
    for name, out, pool, rows in zip(("keys", "values"), written, before, (keys, values)):
        data.same(out, reference.write_kv(pool, exact(rows), slots), name)


def _copy_blocks(data: Data) -> None:
    pools = data.pools()
    before = [exact(pool) for pool in pools]
    copied = ops.copy_blocks(pools, mx.array([[3, 8], [2, 5]], mx.int32))
    for name, out, pool in zip(("first pool", "second pool"), copied, before):
        data.same(out, reference.copy_blocks(pool, [(3, 8), (2, 5)]), name)


def _gather_kv(data: Data) -> None:
    key_pool, value_pool = data.pools()
    plan = build_plan(_TABLES, _LENS, [1, 1], block_size=_BLOCK_SIZE)
    dense = ops.gather_kv(key_pool, value_pool, plan.block_tables, plan.context_lens, 60)
    for name, out, pool in zip(("keys", "values"), dense, (key_pool, value_pool)):
        data.same(out, reference.gather_kv(exact(pool), _TABLES, _LENS, 60), name)


def _attention(
    data: Data,
    query_lens: list[int],
    *,
    group: int = 4,
    window: int | None = None,
    split_tokens: int = 4096,
    **options: Any,
) -> None:
    """`options`: more of those that the operation and the oracle have in common."""
    pools = data.pools()
    queries = data.normal(sum(query_lens), group * _KV_HEADS, _HEAD_DIM)
    plan = build_plan(
        _TABLES, _LENS, query_lens, block_size=_BLOCK_SIZE, window=window, split_tokens=split_tokens
    )
    out = ops.paged_attention(queries, *pools, plan, scale=_SCALE, window=window, **options)
    exact_options = {k: exact(v) if isinstance(v, mx.array) else v for k, v in options.items()}
    key_pool, value_pool = map(exact, pools)
    expected = reference.paged_attention(
        exact(queries),
        key_pool,
        value_pool,
        _TABLES,
        _LENS,
        query_lens,
        scale=_SCALE,
        window=window,
        **exact_options,
    )
    data.check(out, expected)


def _rope_rotations(data: Data) -> None:
    positions, freqs = np.array([0, 5, 4095]), 10000.0 ** (-np.arange(0, 1, 1 / 16))
    out = ops.rope_rotations(
        mx.array(positions, mx.int32), mx.array(freqs.astype(np.float32)), scale=0.5
    )
    angles = 0.5 * positions[:, None] * freqs.astype(np.float32).astype(np.float64)
    # In float32, an angle of 2,000 radians is accurate to only four digits.
    difference = np.abs(exact(out) - np.stack([np.cos(angles), np.sin(angles)], axis=1)).max()
    if not difference < 1e-3:
        raise WrongResult(f"a cosine or sine is off by {difference:.1e}, expected at most 1e-03")


def _rope(data: Data) -> None:
    x = data.normal(3, 2, 1, _HEAD_DIM)
    angles = np.random.default_rng(1).uniform(-3, 3, (3, _HEAD_DIM // 2)).astype(np.float32)
    rotations = mx.array(np.stack([np.cos(angles), np.sin(angles)], axis=1))
    cos, sin = (exact(rotations)[:, i, None, None, :] for i in range(2))
    data.check(ops.rope(x, rotations), reference.rope(exact(x), cos, sin))


def _rms_norm(data: Data) -> None:
    x, weight = data.normal(5, 96), data.normal(96)
    data.check(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(exact(x), exact(weight), 1e-5))


def _silu_mul(data: Data) -> None:
    gate, x = data.normal(5, 96), data.normal(5, 96)
    data.check(ops.silu_mul(gate, x), reference.silu_mul(exact(gate), exact(x)))


def _lora(data: Data) -> None:
    base, x = data.normal(4, 96), data.normal(4, 64)
    a, b = data.normal(3, 8, 64) / 8, data.normal(3, 8, 96) / 4
    adapters = [2, -1, 0, 2]
    expected = reference.lora(exact(base), exact(x), adapters, exact(a), exact(b))
    data.check(ops.lora(base, x, mx.array(adapters, mx.int32), a, b), expected)


def _expert_lora(data: Data) -> None:
    base, x = data.normal(4, 2, 1, 96), data.normal(4, 1, 1, 64)
    a, b = data.normal(3, 5, 8, 64) / 8, data.normal(3, 5, 8, 96) / 4
    adapters, experts = [2, -1, 0, 2], np.array([[4, 0], [1, 2], [3, 1], [0, 4]], np.uint32)
    expected = reference.expert_lora(exact(base), exact(x), adapters, experts, exact(a), exact(b))
    found = ops.expert_lora(base, x, mx.array(adapters, mx.int32), mx.array(experts), a, b)
    data.check(found, expected)


def _layer_norm(data: Data) -> None:
    x, weight, bias = data.normal(5, 96), data.normal(96), data.normal(96)
    expected = reference.layer_norm(exact(x), exact(weight), exact(bias), 1e-5)
    data.check(ops.layer_norm(x, weight, bias, 1e-5), expected)


def _gelu(data: Data) -> None:
    x = data.normal(5, 96)
    for approximation in ("none", "fast"):
        data.check(ops.gelu(x, approximation), reference.gelu(exact(x), approximation))


def _clipped_swiglu(data: Data) -> None:
    gate, x = data.normal(5, 96), data.normal(5, 96)
    expected = reference.clipped_swiglu(exact(gate), exact(x), alpha=1.5, limit=0.5)
    data.check(ops.clipped_swiglu(gate, x, alpha=1.5, limit=0.5), expected)


def _greedy_tokens(data: Data) -> None:
    logits = exact(data.normal(4, 1000))
    logits[3, 500] = np.nan
    tokens, largest, reported = ops.greedy_tokens(
        mx.array(logits.astype(np.float32)).astype(data.dtype)
    )
    data.same(tokens[:3], np.argmax(logits[:3], axis=-1).astype(np.float64), "tokens")
    data.same(largest[:3], logits[:3].max(axis=-1), "largest logits")
    data.same(mx.isnan(largest), np.array([0.0, 0.0, 0.0, 1.0]), "NaNs")
    reports = [*np.argmax(logits[:3], axis=-1).astype(np.float64), -1.0]
    data.same(reported, np.array(reports), "reported tokens")


def _draw_tokens(data: Data) -> None:
    logits = data.normal(5, 1001)
    temperature = np.array([1.0, 0.5, 0.0, 2.0, 1.0], np.float32)
    thresholds = np.array([-np.inf, -np.inf, -np.inf, -1.5, -1.0], np.float32)
    keys = np.random.default_rng(1).integers(0, 1 << 32, (5, 2), dtype=np.uint64)
    keys = keys.astype(np.uint32)
    wide = exact(logits)
    greedy, largest = np.argmax(wide, axis=-1), wide.max(axis=-1)
    is_drawn = temperature > 0
    scaled = (wide - largest[:, None]) / np.where(is_drawn, temperature, 1)[:, None]
    drawn = reference.draw_tokens(np.where(scaled < thresholds[:, None], -np.inf, scaled), keys)
    out = ops.draw_tokens(
        logits,
        mx.array(greedy.astype(np.int32)),
        mx.array(largest.astype(np.float32)),
        *(mx.array(a) for a in (temperature, keys, thresholds)),
    )
    data.same(out, np.where(is_drawn, drawn, greedy).astype(np.float64), "tokens")


def _sampling_thresholds(data: Data) -> None:
    logits = exact(data.normal(5, 200)).astype(np.float32)
    largest = logits.max(axis=-1)
    temperature = np.array([0.5, 1.0, 0.7, 1.0, 2.0], dtype=np.float32)
    top_k = np.array([0, 200, 7, 60, 1], dtype=np.int32)
    top_p = np.array([0.1, 0.5, 1.0, 0.9, 0.9], dtype=np.float32)
    down = -np.sort((largest[:, None] - logits) / temperature[:, None], axis=-1)
    last = np.where((top_k > 0) & (top_k < 200), top_k, 200)[:, None] - 1
    # Numbers in 16 bits are often equal, and then kept together.
    mass = np.exp(down.astype(np.float64)) * (down >= np.take_along_axis(down, last, axis=-1))
    above = np.cumsum(mass, axis=-1) - mass
    inside = (above < top_p[:, None] * mass.sum(axis=-1, keepdims=True)) & (mass > 0)
    out = ops.sampling_thresholds(
        mx.array(logits).astype(data.dtype),
        mx.array(largest),
        mx.array(temperature),
        mx.full((5,), -1000.0),
        mx.array(top_k),
        mx.array(top_p),
    )
    data.same(out, np.where(inside, down, 0).min(axis=-1).astype(np.float64), "thresholds")


def _apply_token_bitmask(data: Data) -> None:
    logits, rows = data.normal(4, 1000), np.array([2, 0], np.int32)
    allowed = np.random.default_rng(1).integers(0, 2, (2, 32 * 32), dtype=np.uint8)
    words = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    expected = exact(logits)
    expected[rows] = np.where(allowed[:, :1000] == 1, expected[rows], -np.inf)
    out = ops.apply_token_bitmask(logits, mx.array(words), mx.array(rows))
    data.same(out, expected, "logits")


def _edit_logits(data: Data) -> None:
    logits = exact(data.normal(2, 50)).astype(np.float32)
    expected = logits.astype(np.float64)
    expected[1, 7] = -np.inf
    for token, count in ((3, 2), (4, 0), (9, 1)):  # 9 is the newest
        logit = expected[1, token]
        expected[1, token] = logit / 2 if logit > 0 else logit * 2
        expected[1, token] -= 0.25 * count + 0.5 * (count > 0)
    out = ops.edit_logits(
        mx.array(logits),
        mx.array([[1, 0, 0, 1, 3]], mx.int32),
        mx.array([[2.0, 0.5, 0.25]]),
        mx.array([[7, -1], [3, 2], [4, 0]], mx.int32),
        mx.array([-np.inf, 0.0, 0.0]),
        mx.array([9], mx.int32),
    )
    data.same(mx.isinf(out), np.isinf(expected).astype(np.float64), "banned tokens")
    finite = np.isfinite(expected)
    data.check(mx.array(np.array(out)[finite]), expected[finite])


def _take_rows(data: Data) -> None:
    a = data.normal(5, 70)
    rows, columns = np.array([4, 0, 4], np.int32), np.arange(20, dtype=np.int32).reshape(5, 4)
    data.same(ops.take_rows(a, mx.array(rows)), exact(a)[rows], "rows")
    elements = np.take_along_axis(exact(a), columns, axis=1)
    data.same(ops.take_rows(a, mx.array(columns)), elements, "elements")


def _linear(data: Data) -> None:
    x, weight, bias = data.normal(7, 96), data.normal(33, 96), data.normal(33)
    data.check(ops.linear(x, weight, bias), reference.linear(exact(x), exact(weight), exact(bias)))


def _quantized_linear(data: Data) -> None:
    x, weight, bias = data.normal(7, 128), data.normal(9, 128), data.normal(9)
    packed, scales, biases = mx.quantize(weight, group_size=64, bits=4)
    codes = mx.dequantize(
        packed, mx.ones(scales.shape), mx.zeros(scales.shape), group_size=64, bits=4
    )
    wide = exact(codes) * np.repeat(exact(scales), 64, 1) + np.repeat(exact(biases), 64, 1)
    out = ops.quantized_linear(x, packed, scales, biases, bias, group_size=64, bits=4)
    data.check(out, reference.linear(exact(x), wide, exact(bias)))


def _expert_linear(data: Data) -> None:
    weight, bias = data.normal(4, 33, 96), mx.array(exact(data.normal(4, 33)).astype(np.float32))
    x = mx.array(exact(data.normal(5, 1, 1, 96)).astype(np.float32))
    experts = np.array([[0, 3], [3, 1], [1, 0], [3, 0], [0, 1]])
    out = ops.expert_linear(x, mx.array(experts.astype(np.uint32)), weight, bias=bias)
    expected = np.einsum("tk,teok->teo", exact(x)[:, 0, 0], exact(weight)[experts])
    data.check(out[:, :, 0], expected + exact(bias)[experts])


def _quantized_experts(data: Data, n: int, k: int) -> tuple[ops.ExpertWeights, np.ndarray]:
    """Returns matrices of four experts, and their exact values."""
    packed, scales, biases = mx.quantize(data.normal(4, n, k), group_size=64, bits=4)
    wide = mx.dequantize(packed, scales, biases, group_size=64, bits=4)
    mx.eval(packed, scales, biases)
    return ops.ExpertWeights(packed, scales, biases, None, 64, 4), exact(wide)


def _sorted_expert_linear(data: Data) -> None:
    weights, wide = _quantized_experts(data, 128, 256)
    x, experts = data.normal(9, 256), np.array([0, 0, 0, 1, 3, 3, 3, 3, 3])
    out = ops.sorted_expert_linear(x, mx.array(experts.astype(np.uint32)), weights)
    if out is not None:  # else no kernel of this device serves it, and models use MLX's
        data.check(out, np.einsum("tk,tok->to", exact(x), wide[experts]))


def _expert_glu(data: Data) -> None:
    (gate, wide_gate), (up, wide_up) = (_quantized_experts(data, 128, 256) for _ in range(2))
    down, wide_down = _quantized_experts(data, 256, 128)
    x, experts = data.normal(5, 256), np.array([[0, 3], [3, 1], [1, 0], [3, 0], [0, 1]])
    out = ops.expert_glu(x, mx.array(experts.astype(np.uint32)), gate, up, down)
    if out is not None:
        g, u = (np.einsum("tk,teok->teo", exact(x), of[experts]) for of in (wide_gate, wide_up))
        rounded = exact(mx.array((g / (1 + np.exp(-g)) * u).astype(np.float32)).astype(data.dtype))
        data.check(out, np.einsum("tek,teok->teo", rounded, wide_down[experts]))


def _int8_activations(data: Data) -> None:
    """Returns a matrix of integers up to 127, which quantization does not round."""
    codes = np.random.default_rng(2).integers(-127, 128, (30, 128)).astype(np.float32)
    codes[:, ::32] = 127
    x, weight = mx.array(codes).astype(data.dtype), data.normal(9, 128)
    for bits in (4, 8):
        packed, scales, biases = mx.quantize(weight.astype(mx.float32), group_size=64, bits=bits)
        out = ops.quantized_linear(
            x, packed, scales, biases, group_size=64, bits=bits, activations="int8"
        )
        wide = mx.dequantize(packed, scales, biases, group_size=64, bits=bits)
        data.check(out, reference.linear(exact(x), exact(wide)), f"{bits} bits")


def _lookup(data: Data) -> None:
    weight, ids = data.normal(10, 96), [3, -1, 0]
    data.same(ops.lookup(mx.array(ids), weight), exact(weight)[ids], "rows")


def _upload(data: Data) -> None:
    sent = [np.arange(7, dtype=np.int32), exact(data.normal(3, 5)).astype(np.float32)]
    for name, out, expected in zip(("integers", "floats"), ops.upload(*sent), sent):
        data.same(out, expected.astype(np.float64), name)


def _to_host(data: Data) -> None:
    numbers = np.arange(-3, 1000, dtype=np.int32)
    data.same(ops.to_host(mx.array(numbers) + 0), numbers.astype(np.float64), "integers")


CASES: dict[str, Case] = {
    "allocate_pool": Case(_allocate_pool, gpu_dtypes=DTYPES),
    "write_kv": Case(_write_kv, gpu_dtypes=DTYPES),
    "copy_blocks": Case(_copy_blocks, gpu_dtypes=DTYPES),
    "gather_kv": Case(_gather_kv, gpu_dtypes=DTYPES),
    "paged_attention: decode": Case(lambda d: _attention(d, [1, 1], group=1), gpu_dtypes=DTYPES),
    "paged_attention: grouped decode": Case(lambda d: _attention(d, [1, 1]), gpu_dtypes=DTYPES),
    "paged_attention: prefill": Case(lambda d: _attention(d, [40, 1]), gpu_dtypes=DTYPES),
    "paged_attention: split and merged": Case(
        lambda d: _attention(d, [1, 2], split_tokens=16), gpu_dtypes=DTYPES
    ),
    "paged_attention: window": Case(lambda d: _attention(d, [20, 1], window=24), gpu_dtypes=DTYPES),
    "paged_attention: softcap and sinks": Case(
        lambda d: _attention(d, [1, 3], softcap=5.0, sinks=d.normal(4 * _KV_HEADS)),
        gpu_dtypes=DTYPES,
    ),
    "paged_attention: ALiBi": Case(
        lambda d: _attention(d, [1, 20], alibi_slopes=abs(d.normal(4 * _KV_HEADS))),
        gpu_dtypes=DTYPES,
    ),
    "rope_rotations": Case(_rope_rotations, dtypes=("float32",)),
    "rope": Case(_rope),
    "rms_norm": Case(_rms_norm),
    "silu_mul": Case(_silu_mul),
    "lora": Case(_lora, gpu_dtypes=DTYPES),
    "expert_lora": Case(_expert_lora, dtypes=("float32",), gpu_dtypes=DTYPES),
    "layer_norm": Case(_layer_norm),
    "gelu": Case(_gelu),
    "clipped_swiglu": Case(_clipped_swiglu),
    "greedy_tokens": Case(_greedy_tokens, gpu_dtypes=DTYPES),
    "draw_tokens": Case(_draw_tokens, gpu_dtypes=DTYPES),
    "sampling_thresholds": Case(_sampling_thresholds, gpu_dtypes=DTYPES),
    "apply_token_bitmask": Case(_apply_token_bitmask, gpu_dtypes=DTYPES),
    "edit_logits": Case(_edit_logits, dtypes=("float32",), gpu_dtypes=("float32",)),
    "take_rows": Case(_take_rows, gpu_dtypes=DTYPES),
    # Not in float32 on a GPU: MLX's own op runs there, and may round to TF32.
    "linear": Case(_linear, gpu_dtypes=("float16", "bfloat16")),
    # MLX's own ops on a GPU.
    "quantized_linear": Case(_quantized_linear),
    "expert_linear": Case(_expert_linear),
    "sorted_expert_linear": Case(_sorted_expert_linear, (), ("float16", "bfloat16")),
    "expert_glu": Case(_expert_glu, (), ("float16", "bfloat16")),
    "quantized_linear: int8 activations": Case(_int8_activations),
    "lookup": Case(_lookup),
    "upload": Case(_upload, dtypes=("float32",), gpu_dtypes=("float32",)),
    "to_host": Case(_to_host, dtypes=("float32",), gpu_dtypes=("float32",)),
}
