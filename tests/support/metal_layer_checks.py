"""Checks of what surrounds attention, which mutants of metal/ must fail: each has few kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
from sim import SimLibrary
from sim.checks import check

from mlx_paged import executables, ops, plain_ops
from mlx_paged import reference as plain_reference
from support.mixtures import Experts, chosen_by, logits_apart
from support.reference import to_numpy
from support.simulated import launches, simulated
from support.weight_formats import dequantized
from support.weight_formats import quantized as quantized_weight

mx.set_default_device(mx.cpu)


def run_program(library: SimLibrary, build, *inputs: mx.array) -> list[mx.array]:
    mx.eval(inputs)
    with simulated(library):
        unknown = executables.placeholders(inputs)
        program = executables.GpuExecutable(unknown, build(*unknown), residual_in_product=False)
        outputs = program(list(inputs))
        mx.eval(outputs)
    return outputs


def normal(rng: np.random.Generator, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    array = mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)
    mx.eval(array)
    return array


def near(got: mx.array, expected: mx.array) -> None:
    tolerance = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}[got.dtype]
    np.testing.assert_allclose(to_numpy(got), to_numpy(expected), rtol=tolerance, atol=tolerance)


@check
def norms(library: SimLibrary) -> None:
    rng = np.random.default_rng(0)
    for size, dtype in ((200, mx.float32), (8200, mx.bfloat16), (48, mx.float16)):
        x, added, weight = (normal(rng, *s, dtype=dtype) for s in ((3, size), (3, size), (size,)))

        def build(x: mx.array, added: mx.array) -> list[mx.array]:
            total = x + added
            again = total + ops.rms_norm(total, weight, 1e-2)  # noqa: B023
            return [ops.rms_norm(ops.rms_norm(again, weight, 1e-2), weight, 1e-2)]  # noqa: B023

        near(run_program(library, build, x, added)[0], build(x, added)[0])


@check
def gates_and_rows(library: SimLibrary) -> None:
    rng = np.random.default_rng(0)
    table, rows = normal(rng, 5, 2176), mx.array([3, -1, 5, -6, 0])

    def build(rows: mx.array) -> list[mx.array]:
        return [ops.silu_mul(*mx.split(table[rows], 2, axis=1))]

    got = run_program(library, build, rows)[0]
    kept = np.array([0, 1, 4])
    near(got[mx.array(kept)], build(rows[mx.array(kept)])[0])
    assert np.isnan(np.array(got)[[2, 3]]).all()


@check
def products(library: SimLibrary) -> None:
    """Rows that are parts of wider ones, and rows of weights that do not fill a SIMD-group."""
    rng = np.random.default_rng(0)
    for rows, n, k, dtype in ((19, 38, 136, mx.float32), (3, 35, 264, mx.bfloat16)):
        wide, more = normal(rng, rows, k + 16, dtype=dtype), normal(rng, rows, n, dtype=dtype)
        weight, bias = normal(rng, n, k, dtype=dtype), normal(rng, n, dtype=dtype)

        def build(wide: mx.array, more: mx.array) -> list[mx.array]:
            x = mx.split(wide, [k], axis=1)[0]  # noqa: B023
            return [ops.linear(x, weight, bias), more + ops.linear(x, weight)]  # noqa: B023

        mx.eval(inputs := [wide, more])
        with simulated(library):
            unknown = executables.placeholders(inputs)
            got = executables.GpuExecutable(unknown, build(*unknown))(inputs)
            mx.eval(got)
        for ours, expected in zip(got, build(wide, more), strict=True):
            near(ours, expected)


@check
def adapters(library: SimLibrary) -> None:
    """Low-rank adapters of rows with and without one: more columns than a threadgroup has, ranks
    that do not fill a threadgroup or a step, more chunks of x than a threadgroup has threads, and
    tiles with one adapter, several and none."""
    rng = np.random.default_rng(0)
    chosen = [2, -1, 0, 3, 2, 2, 1, 2, -1, 3, -1, -1, 0, 0]
    cases = ((mx.float32, 262, 1096, 9), (mx.bfloat16, 40, 264, 6), (mx.float16, 36, 64, 8))
    for dtype, n, k, rank in cases:
        base, x = (normal(rng, len(chosen), size, dtype=dtype) for size in (n, k))
        a, b = normal(rng, 3, rank, k, dtype=dtype), normal(rng, 3, rank, n, dtype=dtype)
        with simulated(library):
            out = ops.lora(base, x, mx.array(chosen, mx.int32), a, b)
            mx.eval(out)
        assert_adapted(out, base, x, chosen, a, b)


def assert_adapted(
    out: mx.array, base: mx.array, x: mx.array, chosen: list[int], a: mx.array, b: mx.array
) -> None:
    expected = plain_reference.lora(
        *(to_numpy(v) for v in (base, x)), chosen, to_numpy(a), to_numpy(b)
    )
    scale = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 1e-2}[out.dtype]
    norms = np.linalg.norm(expected, axis=1)
    assert (np.linalg.norm(to_numpy(out) - expected, axis=1) <= scale * norms).all()
    for row in (i for i, slot in enumerate(chosen) if not 0 <= slot < len(a)):
        np.testing.assert_array_equal(to_numpy(out)[row], to_numpy(base)[row])


@check
def adapters_of_layers(library: SimLibrary) -> None:
    """Adapters of three layers of one input; of two, whose results are gated; and of one, whose
    result is added to other rows."""
    rng = np.random.default_rng(0)
    chosen, k, rank, dtype = [2, -1, 0, 3, 2], 72, 8, mx.float32
    x, slots = normal(rng, len(chosen), k, dtype=dtype), mx.array(chosen, mx.int32)

    def layers_of(sizes: list[int]) -> list[list[mx.array]]:
        return [
            [normal(rng, n, k), normal(rng, 3, rank, k), normal(rng, 3, rank, n)] for n in sizes
        ]

    def adapted(x: mx.array, slots: mx.array, layers: list[list[mx.array]]) -> list[mx.array]:
        return [ops.lora(ops.linear(x, w), x, slots, a, b) for w, a, b in layers]

    def run(build: Callable[[mx.array, mx.array, mx.array], list[mx.array]]) -> list[mx.array]:
        with simulated(library):
            unknown = executables.placeholders([x, slots, more])
            got = executables.GpuExecutable(unknown, build(*unknown))([x, slots, more])
            mx.eval(got)
        return got

    more = normal(rng, len(chosen), 40, dtype=dtype)
    layers = layers_of([40, 280, 24])
    bases = run(lambda x, slots, more: [ops.linear(x, weight) for weight, _, _ in layers])
    made = run(lambda x, slots, more: adapted(x, slots, layers))
    for out, base, (_, a, b) in zip(made, bases, layers, strict=True):
        assert_adapted(out, base, x, chosen, a, b)
    [added] = run(lambda x, slots, more: [more + adapted(x, slots, layers[:1])[0]])
    np.testing.assert_array_equal(np.array(added), np.array(more) + np.array(made[0]))
    layers = layers_of([40, 40])
    gate, up = map(np.array, run(lambda x, slots, more: adapted(x, slots, layers)))
    [gated] = run(lambda x, slots, more: [ops.silu_mul(*adapted(x, slots, layers))])
    np.testing.assert_allclose(np.array(gated), up * gate / (1 + np.exp(-gate)), rtol=1e-5)


@check
def rounded_products(library: SimLibrary) -> None:
    """Sums are rounded before a bias and a residual are added: to bfloat16, 257 is 256."""
    x = mx.concatenate([mx.ones((2, 257)), mx.zeros((2, 7))], axis=1).astype(mx.bfloat16)
    weight, bias, more = (mx.ones(s, mx.bfloat16) for s in ((5, 264), (5,), (2, 5)))
    mx.eval(inputs := [x, more], weight, bias)

    def build(x: mx.array, more: mx.array) -> list[mx.array]:
        return [ops.linear(x, weight, bias), more + ops.linear(x, weight)]

    with simulated(library):
        unknown = executables.placeholders(inputs)
        got = executables.GpuExecutable(unknown, build(*unknown))(inputs)
        mx.eval(got)
    for out in got:
        assert (to_numpy(out) == 256).all()
    experts = Experts(np.random.default_rng(0), 2, 264, 264, mx.bfloat16, has_bias=True)
    ones = mx.ones((2, 264, 264), mx.bfloat16)
    experts.arrays = {part: [ones] for part in experts.arrays}
    experts.biases = dict.fromkeys(experts.biases, mx.ones((2, 264), mx.bfloat16))
    mx.eval(experts.arrays, experts.biases)
    logits = mx.zeros((2, 1, 2), mx.bfloat16)

    def product(x: mx.array, logits: mx.array) -> list[mx.array]:
        return [experts.build(x, logits, "normalized", 2)]

    [out] = run_program(library, product, x.reshape(2, 1, 264), logits)
    assert (to_numpy(out) == 256 * 256 * 264).all()  # silu keeps the gates, which are large


def _quantized_products(
    library: SimLibrary, forms: Sequence[tuple[str, int, int, int, int]]
) -> None:
    """Compares (mode, bits, group size, rows, columns) with float64; the weight has 36 units.

    Every 16 rows read the weight once.
    """
    rng = np.random.default_rng(0)
    for mode, width, group, rows, n in forms:
        arrays = quantized_weight(rng, n, 1152, mode, width, group, mx.float32)
        x, weight = normal(rng, rows, 1152), dequantized(arrays, mode, width, group)

        def build(x: mx.array) -> list[mx.array]:
            codes, scales, *biases = arrays  # noqa: B023
            return [ops.quantized_linear(
                x, codes, scales, *(biases or [None]), group_size=group, bits=width, mode=mode,  # noqa: B023
                for_program=True,
            )]  # fmt: skip

        got = to_numpy(run_program(library, build, x)[0])
        traffic = launches()[0]["traffic"]
        num_tiles = -(-rows // 16)
        assert [traffic.get(i + 1, (0, 0))[0] for i in range(len(arrays))] == [
            num_tiles * a.nbytes for a in arrays
        ]
        # A SIMD-group has 4 rows of the weight for one row of x, and 2 for pairs of rows.
        simd_groups, pairs = (-(-n // 4), 1) if rows == 1 else (-(-n // 2), rows + rows % 2)
        assert traffic[0][0] == simd_groups * pairs * 1152 * 4
        expected = to_numpy(x).astype(np.float64) @ weight.T
        scale = np.linalg.norm(expected, axis=1, keepdims=True) / np.sqrt(n)
        assert (np.abs(got - expected) <= 1e-5 * scale).all()


@check
def affine_products(library: SimLibrary) -> None:
    _quantized_products(
        library, [("affine", 4, 64, 3, 21), ("affine", 3, 128, 1, 18), ("affine", 6, 32, 1, 7)]
    )


@check
def affine_products_of_many_rows(library: SimLibrary) -> None:
    forms = [("affine", 8, 128, 9, 11), ("affine", 5, 64, 16, 5), ("affine", 8, 128, 19, 3)]
    _quantized_products(library, forms)


@check
def float_products(library: SimLibrary) -> None:
    _quantized_products(
        library, [("mxfp4", 4, 32, 1, 9), ("mxfp8", 8, 32, 3, 9), ("nvfp4", 4, 16, 2, 10)]
    )


@check
def lookups(library: SimLibrary) -> None:
    """Rows of more units than a threadgroup has threads, exactly as their codes say."""
    rng = np.random.default_rng(0)
    ids = mx.array([3, -1, 5, -6, 0])
    for mode, width, group, k in (
        ("affine", 2, 64, 128), ("affine", 5, 32, 8224), ("mxfp4", 4, 32, 64), ("mxfp8", 8, 32, 64),
        ("nvfp4", 4, 16, 64),
    ):  # fmt: skip
        arrays = quantized_weight(rng, 5, k, mode, width, group, mx.float32)
        if mode == "mxfp4":  # down to the least scale
            arrays[1] = mx.array(rng.integers(0, 9, (5, k // group), dtype=np.uint8))
            mx.eval(arrays)

        def build(ids: mx.array) -> list[mx.array]:
            codes, scales, *biases = arrays  # noqa: B023
            return [ops.lookup(
                ids, codes, scales, *(biases or [None]), group_size=group, bits=width, mode=mode,  # noqa: B023
                for_program=True,
            )]  # fmt: skip

        got = to_numpy(run_program(library, build, ids)[0].astype(mx.float32))
        kept = np.array([0, 1, 4])
        expected = dequantized(arrays, mode, width, group)[np.array([3, 4, 0])]
        rtol = 1e-2 if mode == "nvfp4" else 2e-6
        np.testing.assert_allclose(got[kept], expected, rtol=rtol, atol=1e-40)
        assert np.isnan(got[[2, 3]]).all()


@check
def mixtures(library: SimLibrary) -> None:
    """Experts that span several chunks of a SIMD-group, full and partial items, numbers of pairs
    that are not multiples of four, and more pairs than threads."""
    rng = np.random.default_rng(0)
    for router, rows, num_experts, top_k, dtype, form in (
        ("softmax, last", 1, 5, 3, mx.float32, None),
        ("normalized", 40, 40, 16, mx.bfloat16, None),
        ("first, softmax", 21, 3, 2, mx.float32, ("affine", 4, 32)),
        ("first, softmax", 21, 3, 2, mx.float16, None),
        ("normalized", 9, 70, 3, mx.float16, None),
    ):
        size = 24 if form is None else 64
        experts = Experts(rng, num_experts, size, size - 8 if form is None else 64, dtype,
                          has_bias=top_k == 3, form=form)  # fmt: skip
        x = normal(rng, rows, 1, size, dtype=dtype)
        logits = logits_apart(rng, rows, num_experts, dtype)
        if router == "first, softmax":  # the two largest are equal
            ties = [[[1.0, 2.0, 1.0]], [[3.0, 3.0, 3.0]], [[0.0, 1.0, 1.0]]] * 7
            logits = mx.array(ties).astype(dtype)

        def build(x: mx.array, logits: mx.array) -> list[mx.array]:
            return [experts.build(x, logits, router, top_k)]  # noqa: B023

        got = run_program(library, build, x, logits)[0]
        chosen, shares = chosen_by(router, to_numpy(logits)[:, 0].astype(np.float64), top_k)
        tolerance = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}[dtype]
        expected = experts.expected(x, chosen, shares)
        np.testing.assert_allclose(to_numpy(got), expected, rtol=tolerance, atol=tolerance)


@check
def greedy(library: SimLibrary) -> None:
    """A vocabulary of whole chunks, more than a threadgroup reads at once, and one with a partial
    chunk; ties, NaNs, infinities, and rows without any finite logit."""
    rng = np.random.default_rng(0)
    for dtype, size in ((mx.float32, 17000), (mx.bfloat16, 1096), (mx.float16, 37)):
        values = rng.integers(-4, 3, (9, size)).astype(np.float32)
        values[0] = -np.inf
        values[1, size // 2] = np.inf
        values[2, size - 1] = np.nan
        values[3, size - 1] = 7
        values[4, [5, size // 2, size - 1]] = 9
        values[5] = np.nan
        logits = mx.array(values).astype(dtype)
        mx.eval(logits)
        with simulated(library):
            found = ops.greedy_tokens(logits)
            mx.eval(*found)
        tokens, largest, reported = map(np.array, found)
        expected = values.max(axis=1)
        np.testing.assert_array_equal(largest, expected)
        rows = ~np.isnan(expected)
        np.testing.assert_array_equal(tokens[rows], values[rows].argmax(axis=1))
        assert ((tokens >= 0) & (tokens < size)).all()
        np.testing.assert_array_equal(reported, np.where(np.isfinite(expected), tokens, -1))


# The noise of this token of 50 is -inf for this key: its random bits are all 0.
SILENT_KEY, SILENT_TOKEN, SILENT_SIZE = [48081531, 0], 43, 50


@check
def draws(library: SimLibrary) -> None:
    """Rows of whole chunks in several parts, rows of single tokens, of an odd number of them, and
    in parts of several steps; thresholds, greedy rows, and a token whose noise is -inf."""

    def compare(logits: mx.array, tokens: mx.array, *settings: mx.array) -> None:
        expected = plain_ops.draw_tokens(logits, tokens, *settings)
        mx.eval(expected)
        with simulated(library):
            found = ops.draw_tokens(logits, tokens, *settings)
            mx.eval(found)
        np.testing.assert_array_equal(np.array(found), np.array(expected))

    one = mx.ones(1)
    compare(
        mx.zeros((1, SILENT_SIZE)), mx.array([SILENT_TOKEN], mx.int32), 0 * one, one,
        mx.array([SILENT_KEY], mx.uint32), -mx.inf * one,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    for dtype, size, num_rows in (
        (mx.bfloat16, 2048, 6),
        (mx.float32, 37, 90),
        (mx.float16, 3, 90),
        (mx.float32, 70_000, 1),
    ):
        logits = mx.array((rng.standard_normal((num_rows, size)) * 3).astype(np.float32))
        logits = logits.astype(dtype)
        tokens, largest, _ = plain_ops.greedy_tokens(logits)
        temperature = mx.array(np.resize(np.float32([1.0, 3.0, 0.0, 0.4, 2.0]), num_rows))
        keys = rng.integers(0, 1 << 32, (num_rows, 2), dtype=np.uint64).astype(np.uint32)
        scaled = (logits.astype(mx.float32) - largest[:, None]) / temperature[:, None]
        second = mx.sort(scaled, axis=1)[:, -2]
        thresholds = mx.where(mx.arange(num_rows) % 3 == 2, second, -mx.inf)
        compare(logits, tokens, largest, temperature, mx.array(keys), thresholds)


@check
def thresholds(library: SimLibrary) -> None:
    """Filters alone and together. Peaked and flat rows, whose thresholds lie in the first and the
    last bins as well as between, and a row whose logits lie at the edges of bins and beside."""
    rng = np.random.default_rng(0)
    min_p, top_k, top_p = map(np.float32, zip(*THRESHOLDS, strict=True))
    with np.errstate(divide="ignore"):
        floors = np.log(min_p)
    scales = np.resize([2.0, 0.001, 40.0], len(THRESHOLDS))[:, None]
    temperature = mx.array(np.resize(np.float32([1.0, 0.7, 1.3, 0.5]), len(THRESHOLDS)))
    for dtype, size in ((mx.float32, 1100), (mx.bfloat16, 777)):
        values = rng.standard_normal((len(THRESHOLDS), size)).astype(np.float32) * scales
        edges = np.float32(np.arange(size) // 3) / -32
        values[0] = np.nextafter(edges, np.arange(size) % 3 * edges, dtype=np.float32)
        values[:, ::5] = -np.inf
        values[-1, 3] = np.nan
        logits = mx.array(values.astype(np.float32)).astype(dtype)
        columns = [temperature, mx.array(floors), mx.array(top_k.astype(np.int32)), mx.array(top_p)]
        largest = mx.array(to_numpy(logits).max(axis=1).astype(np.float32))
        expected = plain_ops.sampling_thresholds(logits, largest, *columns)
        mx.eval(largest, columns, expected)
        with simulated(library):
            found = ops.sampling_thresholds(logits, largest, *columns)
            mx.eval(found)
        numbers = ~np.isnan(np.array(largest))
        np.testing.assert_array_equal(np.array(found)[numbers], np.array(expected)[numbers])
        np.testing.assert_array_equal(np.array(found)[~numbers], floors[~numbers])


# min_p, top_k and top_p of a row each.
THRESHOLDS = [
    (0, 299, 0.9999), (0, 20, 1), (0, 20, 0.9), (0.1, 300, 0.5), (0, 1, 0.5), (0.5, 0, 1),
    (0, 0, 0.999), (0, 0, 1e-30), (0, 700, 1), (0, 0, 0.95), (0.02, 600, 0.8), (0.5, 9, 0.5),
]  # fmt: skip


@check
def heads(library: SimLibrary) -> None:
    """Queries are visible only through attention, so its keys must differ: with identical keys, the
    result would not depend on the queries."""
    rng = np.random.default_rng(0)
    rows, q_heads, kv_heads, dim, value_dim = 5, 3, 1, 80, 80
    shapes = [(rows, 1, heads, d) for heads, d in ((q_heads, dim), (1, dim), (1, value_dim))]
    q, k, v = (normal(rng, *shape) for shape in shapes)
    weights = [normal(rng, dim) for _ in range(2)]
    pools = [normal(rng, 2, 8, kv_heads, d) for d in (dim, value_dim)]
    slots = mx.array([3, -1, 11, 0, 9])
    positions = mx.array([700, 3, 11, 0, 9])
    tables = mx.array([[0, 1]] * rows)
    items = mx.array([[i, i, i + 1, 0, 2, -1] for i in range(rows)])
    seen = mx.array([15] * rows)
    merges = mx.zeros((0, 4), mx.int32)
    inv_freqs = mx.array((10.0 ** -np.arange(24)).astype(np.float32))
    out_weight = normal(rng, 16, q_heads * value_dim)
    for traditional in (False, True):
        for is_plain in (False, True):

            def build(q, k, v, positions, seen, slots, tables, items, merges, keys, values):
                if not is_plain:  # noqa: B023
                    q, k = (ops.rms_norm(a, w, 0.5) for a, w in zip((q, k), weights))
                q, k = q.transpose(0, 2, 1, 3), k.transpose(0, 2, 1, 3)
                if not is_plain:  # noqa: B023
                    turns = ops.rope_rotations(positions, inv_freqs, scale=0.5)
                    q, k = (ops.rope(a, turns, traditional=traditional) for a in (q, k))  # noqa: B023
                keys, values = ops.write_kv(keys, values, k[:, :, 0], v[:, 0], slots)
                plan = ops.AttentionPlan(seen, slots, tables, slots, slots, items, merges)
                out = ops.paged_attention(q.squeeze(2), keys, values, plan, scale=0.1)
                return [ops.linear(out.reshape(rows, -1), out_weight), keys, values]

            arrays = [q, k, v, positions, seen, slots, tables, items, merges]
            ours, theirs = ([mx.array(np.array(pool)) for pool in pools] for _ in range(2))
            expected = build(*arrays, *theirs)
            for got, want in zip(
                run_program(library, build, *arrays, *ours), expected, strict=True
            ):
                near(got, want)
