"""Checks: run kernels on small inputs and compare them with MLX's own operations.

Each check announces the kernels that it is about to run, so that a crash can be attributed. Unused
slots hold NaN. A check raises `WrongResult` with the row and the size of its error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_paged import executables, kernels, ops, plain_ops
from mlx_paged.calibration.cases import Product, layer_of, product_kernels
from mlx_paged.child_jobs import announce
from mlx_paged.kernels import MAX_ROWS, AllowedProduct, AttentionLayer
from mlx_paged.model import patches
from mlx_paged.model.plan import build_plan
from mlx_paged.ops import AttentionPlan
from mlx_paged.reference import TOLERANCE, relative_errors

_KV_HEADS = 2
_WINDOW, _SOFTCAP = 21, 4.0
# Relative error of a row that quantized keys and values may have, by format (csrc/pool_format.h).
_POOL_DTYPES: dict[int, mx.Dtype | None] = {0: None, 1: mx.int8, 2: mx.uint32, 3: mx.uint8}
_FORMAT_TOLERANCE = {1: 0.02, 2: 0.2, 3: 0.08}
# Features of a layer (features_of in metal/attention_variant.h).
_HAS_WINDOW, _HAS_SOFTCAP, _HAS_SINKS, _HAS_BOUNDS, _HAS_ALIBI = (1 << i for i in range(5))


class WrongResult(Exception):
    """A kernel's result differs from that of MLX's own operations."""


class Unsupported(Exception):
    """No kernel of ours does this on this device, so there is nothing to check."""


def _normal(rng: np.random.Generator, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


def _numbers(a: mx.array) -> np.ndarray:
    return np.array(a.astype(mx.float32)).astype(np.float64)


def _close(found: mx.array, expected: mx.array, dtype: str, tolerance: float | None = None) -> None:
    most = 2 * TOLERANCE[dtype] if tolerance is None else tolerance
    if found.shape != expected.shape:
        raise WrongResult(f"the shape is {found.shape} instead of {expected.shape}")
    width = found.shape[-1]
    errors = relative_errors(
        _numbers(found).reshape(-1, width), _numbers(expected).reshape(-1, width)
    )
    worst = int(np.argmax(errors))
    if not errors[worst] <= most:
        raise WrongResult(
            f"row {worst} is off by {errors[worst]:.1e} of its norm, at most {most:.0e} is expected"
        )


def _same(found: mx.array, expected: mx.array, what: str) -> None:
    a, b = _numbers(found), _numbers(expected)
    if a.shape != b.shape or not np.array_equal(a, b, equal_nan=True):
        raise WrongResult(f"{what} differ")


# --- Pools and attention --------------------------------------------------------------------------


class Sequences:
    """Sequences in scattered blocks: some long ones, one short, and one just begun."""

    def __init__(
        self,
        layer: AttentionLayer,
        block_size: int,
        rows: int,
        length: int = 90,
        num_long: int = 1,
    ) -> None:
        rng = np.random.default_rng(0)
        self.layer, self.block_size, self.dtype = layer, block_size, getattr(mx, layer.dtype)
        self.lens = [*[length + rows] * num_long, 11 + rows, rows]
        self.query_lens = [rows] * len(self.lens)
        num_blocks = [-(-n // block_size) for n in self.lens]
        ids = 1 + rng.permutation(sum(num_blocks))
        self.tables = [part.tolist() for part in np.split(ids, np.cumsum(num_blocks)[:-1])]
        self.rng, self.num_blocks = rng, sum(num_blocks) + 1
        self.pools = self._pools()
        self.queries = _normal(
            rng, sum(self.query_lens), layer.group * _KV_HEADS, layer.key_dim, dtype=self.dtype
        )

    @property
    def slots(self) -> np.ndarray:
        """The slots of all tokens, sequence after sequence."""
        size = self.block_size
        return np.concatenate([
            np.array([table[p // size] * size + p % size for p in range(n)], np.int32)
            for table, n in zip(self.tables, self.lens)
        ])  # fmt: skip

    def _pools(self) -> list[mx.array]:
        layer, slots = self.layer, self.slots
        dims = (layer.key_dim, layer.value_dim)
        formats = (layer.key_format, layer.value_format)
        rows = [_normal(self.rng, len(slots), _KV_HEADS, d, dtype=self.dtype) for d in dims]
        if any(formats):
            pools = [
                ops.allocate_pool(
                    self.num_blocks, self.block_size, _KV_HEADS, d, _POOL_DTYPES[f] or self.dtype
                )
                for d, f in zip(dims, formats)
            ]
            return list(ops.write_kv(pools[0], pools[1], rows[0], rows[1], mx.array(slots)))
        made = []
        for d, written in zip(dims, rows):
            flat = mx.full((self.num_blocks * self.block_size, _KV_HEADS, d), mx.nan, self.dtype)
            flat[mx.array(slots)] = written
            made.append(flat.reshape(self.num_blocks, self.block_size, _KV_HEADS, d))
        return made

    def options(self) -> dict[str, Any]:
        """Options of `paged_attention` with the layer's features."""
        features, heads = self.layer.features, self.layer.group * _KV_HEADS
        return {
            "scale": self.layer.key_dim**-0.5,
            "window": _WINDOW if features & _HAS_WINDOW else None,
            "softcap": _SOFTCAP if features & _HAS_SOFTCAP else None,
            "sinks": mx.linspace(-2, 3, heads) if features & _HAS_SINKS else None,
            "alibi_slopes": mx.linspace(0.1, 0.5, heads) if features & _HAS_ALIBI else None,
        }

    def plan(self, split_tokens: int | None) -> AttentionPlan:
        """The plan of a step with the last rows of each sequence; None: pieces as in engines."""
        bounds = None
        if self.layer.features & _HAS_BOUNDS:  # a prefix that every row sees as a whole
            ends = [n for n, rows in zip(self.lens, self.query_lens) for _ in range(rows)]
            bounds = np.array([[0] * len(ends), [n - 1 for n in ends]], np.int32)
        return build_plan(
            self.tables,
            self.lens,
            self.query_lens,
            block_size=self.block_size,
            window=self.options()["window"],
            split_tokens=split_tokens,
            bounds=bounds,
        )

    def attend(self, plan: AttentionPlan) -> mx.array:
        """Runs the kernels."""
        return ops.paged_attention(
            self.queries, self.pools[0], self.pools[1], plan, **self.options()
        )

    def expected(self, plan: AttentionPlan) -> mx.array:
        """MLX's own attention."""
        is_plain = self.layer.key_format == 0
        length = max(self.lens)
        keys, values = self.pools
        tables, lens = plan.block_tables, plan.context_lens
        if is_plain:
            keys, values = plain_ops.gather_kv(keys, values, tables, lens, length)
        else:
            keys, values = ops.gather_kv(keys, values, tables, lens, length, dtype=mx.float32)
        queries = self.queries.astype(mx.float32)
        return plain_ops.paged_attention(queries, keys, values, plan, **self.options())


_WHOLE = 1 << 20  # tokens: no context is split


def attention(layer_name: str, block: str, rows: str, kernel: str) -> None:
    """Checks a kernel on sequences of `rows` rows."""
    announce([kernel])
    layer = layer_of(layer_name)
    if kernels.attention_kernel(layer, int(rows)) != kernel:
        raise Unsupported(f"{rows} rows use another kernel than {kernel}")
    sequences = Sequences(layer, int(block), int(rows))
    plan = sequences.plan(_WHOLE)
    _close(sequences.attend(plan), sequences.expected(plan), layer.dtype, _tolerance(layer))


def merge(layer_name: str, block: str, kernel: str) -> None:
    """Checks decodes whose context is split."""
    announce([kernel])
    layer = layer_of(layer_name)
    sequences = Sequences(layer, int(block), 1)
    plan = sequences.plan(int(block))
    _close(sequences.attend(plan), sequences.expected(plan), layer.dtype, _tolerance(layer))


def uncovered(layer_name: str, block: str, kernel: str) -> None:
    """Checks rows that belong to no sequence, which are zero."""
    announce([kernel])
    layer = layer_of(layer_name)
    sequences = Sequences(layer, int(block), 1)
    plan = sequences.plan(_WHOLE)
    sequences.queries = mx.concatenate([sequences.queries, sequences.queries[:2]])
    bounds = plan.bounds
    plan = replace(
        plan,
        positions=mx.concatenate([plan.positions, plan.positions[:2]]),
        bounds=None if bounds is None else mx.concatenate([bounds, bounds[:, :2]], axis=1),
    )
    _close(sequences.attend(plan)[-2:] + 1, mx.ones((2, *sequences.queries.shape[1:2],
           layer.value_dim)), layer.dtype)  # fmt: skip


def _tolerance(layer: AttentionLayer) -> float | None:
    return None if layer.key_format == 0 else 4 * TOLERANCE[layer.dtype] + 1e-3


def pool(dims: str, block: str) -> None:
    """Checks writes to a pool and reads from it."""
    dtype, *numbers = dims.split(",")
    key_dim, value_dim, key_format, value_format = map(int, numbers)
    layer = AttentionLayer(dtype, 1, key_dim, value_dim, 0, key_format, value_format)
    announce(_pool_kernels(layer))
    plain = Sequences(replace(layer, key_format=0, value_format=0), int(block), 1)
    plan, length = plain.plan(_WHOLE), max(plain.lens)
    expected = plain_ops.gather_kv(
        plain.pools[0], plain.pools[1], plan.block_tables, plan.context_lens, length
    )
    slots = mx.array(plain.slots)
    rows = [p.flatten(0, 1)[slots] for p in plain.pools]
    formats = [_POOL_DTYPES[f] or plain.dtype for f in (key_format, value_format)]
    pools = [
        ops.allocate_pool(plain.num_blocks, int(block), _KV_HEADS, d, form)
        for d, form in zip((key_dim, value_dim), formats)
    ]
    first = mx.concatenate([slots[:5], mx.full(len(slots) - 5, -1, mx.int32)])
    ops_pools = ops.write_kv(pools[0], pools[1], rows[0], rows[1], first)
    rest = mx.concatenate([mx.full(5, -1, mx.int32), slots[5:]])
    ops_pools = ops.write_kv(ops_pools[0], ops_pools[1], rows[0], rows[1], rest)
    is_plain = key_format == 0
    found = ops.gather_kv(
        *ops_pools, plan.block_tables, plan.context_lens, length,
        dtype=None if is_plain else plain.dtype,
    )  # fmt: skip
    for got, want, form in zip(found, expected, (key_format, value_format)):
        if is_plain:
            _same(got, want, "keys or values")
        else:
            _close(got, want, dtype, _FORMAT_TOLERANCE[form])


def _pool_kernels(layer: AttentionLayer) -> list[str]:
    if layer.key_format == 0:
        return ["write_kv", "gather_kv"]
    files, names = kernels.kernel_files(), []
    for function, dim in (
        ("quantize_kv", max(layer.key_dim, layer.value_dim)),
        ("gather_quantized", layer.key_dim),
        ("gather_quantized", layer.value_dim),
        ("rotate_queries", layer.key_dim),
    ):
        size = next(n for n in (64, 128, 256, 576) if dim <= n)
        names.append(f"{function}_{layer.dtype}_{size}")
    return [name for name in dict.fromkeys(names) if name in files]


def blocks(dims: str, block: str) -> None:
    """Checks copies of blocks."""
    announce(["copy_blocks"])
    dtype, key_dim, value_dim = dims.split(",")
    layer = AttentionLayer(dtype, 1, int(key_dim), int(value_dim), 0, 0, 0)
    pools = Sequences(layer, int(block), 1).pools
    pairs = mx.array([[2, 0], [1, 3]], mx.int32)
    expected = plain_ops.copy_blocks(pools, pairs)
    mx.eval(expected)
    for got, want in zip(ops.copy_blocks(pools, pairs), expected):
        _same(got, want, "copied blocks")


def strided(dtype: str) -> None:
    """Checks inputs that are not dense."""
    size = getattr(mx, dtype).size
    announce([f"copy_strided_{8 * size}"])
    layer = AttentionLayer(dtype, 2, 64, 64, 0, 0, 0)
    sequences = Sequences(layer, 16, 1)
    plan = sequences.plan(_WHOLE)
    expected = sequences.expected(plan)
    spread = mx.repeat(sequences.queries, 2, axis=-1)
    mx.eval(spread)
    sequences.queries = spread[..., ::2]
    _close(sequences.attend(plan), expected, dtype)


# --- Adapters -------------------------------------------------------------------------------------


def lora(dtype: str) -> None:
    """Checks LoRA kernels in a step where some rows have no adapter."""
    announce([f"lora_down_{dtype}", f"lora_up_{dtype}"])
    rng, kind = np.random.default_rng(0), getattr(mx, dtype)
    num_adapters, rank, n, k = 3, 6, 136, 544  # not multiples of what a threadgroup does
    base, x = (_normal(rng, 5, size, dtype=kind) for size in (n, k))
    a = (_normal(rng, num_adapters, rank, k) / k**0.5).astype(kind)
    b = _normal(rng, num_adapters, rank, n, dtype=kind)
    adapters = mx.array([2, -1, 0, num_adapters, 2], mx.int32)
    expected = plain_ops.lora(base, x, adapters, a, b)
    mx.eval(expected)
    found = ops.lora(base, x, adapters, a, b)
    _close(found, expected, dtype)
    without = mx.array([1, 3])
    _same(found[without], base[without], "rows without an adapter")


# --- Sampling -------------------------------------------------------------------------------------


def greedy(dtype: str) -> None:
    """Checks the choice of the largest logit."""
    announce([f"greedy_tokens_{dtype}"])
    logits = _normal(np.random.default_rng(0), 5, 3000, dtype=getattr(mx, dtype))
    logits[1, 2999], logits[2, 0], logits[3] = 9, 9, -mx.inf
    for got, want, what in zip(
        ops.greedy_tokens(logits), plain_ops.greedy_tokens(logits), ("tokens", "logits", "reports")
    ):
        rows = slice(0, 3) if what == "tokens" else slice(None)  # a row without a maximum has any
        _same(got[rows], want[rows], what)


def draw(dtype: str) -> None:
    """Checks draws with thresholds, beside a greedy row."""
    announce([f"draw_tokens_{dtype}", "merge_draws"])
    rng = np.random.default_rng(0)
    logits = _normal(rng, 5, 3000, dtype=getattr(mx, dtype))
    tokens, largest, _ = plain_ops.greedy_tokens(logits)
    temperature = mx.array([1.0, 0.5, 0.0, 2.0, 1.0])
    keys = mx.array(rng.integers(0, 1 << 32, (5, 2), dtype=np.uint64).astype(np.uint32))
    thresholds = mx.array([-mx.inf, -mx.inf, -mx.inf, -1.5, -1.0])
    settings = (logits, tokens, largest, temperature, keys, thresholds)
    _same(ops.draw_tokens(*settings), plain_ops.draw_tokens(*settings), "tokens")


def thresholds(dtype: str) -> None:
    """Checks min-p, top-k and top-p."""
    announce([f"sampling_thresholds_{dtype}"])
    logits = _normal(np.random.default_rng(0), 5, 3000, dtype=getattr(mx, dtype))
    logits[4, ::2] = -mx.inf
    settings = (
        mx.array([1.0, 0.7, 0.7, 1.5, 1.0]),  # temperatures
        mx.array([-mx.inf, -mx.inf, -mx.inf, -2.0, -mx.inf]),  # logarithms of min_p
        mx.array([0, 20, 20, 3000, 2000], mx.int32),
        mx.array([0.9, 1.0, 0.8, 0.5, 1.0]),
    )
    largest = logits.max(axis=-1).astype(mx.float32)
    expected = plain_ops.sampling_thresholds(logits, largest, *settings)
    mx.eval(expected)
    _same(ops.sampling_thresholds(logits, largest, *settings), expected, "thresholds")


def bitmask(dtype: str) -> None:
    """Checks masks of tokens."""
    announce([f"apply_token_bitmask_{8 * getattr(mx, dtype).size}"])
    rng = np.random.default_rng(0)
    logits = _normal(rng, 4, 1000, dtype=getattr(mx, dtype))
    words = mx.array(rng.integers(0, 1 << 32, (2, 32), dtype=np.uint64).astype(np.uint32))
    rows = mx.array([2, 0], mx.int32)
    expected = plain_ops.apply_token_bitmask(logits, words, rows)
    mx.eval(expected)
    _same(ops.apply_token_bitmask(logits, words.view(mx.int32), rows), expected, "masked logits")


def edits(dtype: str) -> None:
    """Checks edits of logits, and rows and elements taken from them."""
    bits = 8 * getattr(mx, dtype).size
    announce(["edit_logits", "copy_strided_32", f"take_rows_{bits}"])
    rng = np.random.default_rng(0)
    logits = _normal(rng, 4, 1000, dtype=getattr(mx, dtype))
    for ids in (mx.array([2, 0], mx.int32), mx.array(rng.integers(0, 1000, (4, 20)), mx.int32)):
        expected = logits[ids] if ids.ndim == 1 else mx.take_along_axis(logits, ids, axis=1)
        mx.eval(expected)
        _same(ops.take_rows(logits, ids), expected, "rows")
    entries = np.stack([rng.permutation(1000)[:600], rng.integers(0, 3, 600)], axis=1)
    entries[:300, 1] = np.resize([-1, 5, 6], 300)
    values = np.where(np.arange(600) % 4, 1.5, -np.inf).astype(np.float32)
    rows = mx.array([[3, 1, 0, 200, 400], [0, 0, 200, 300, 600]], mx.int32)
    settings = (
        rows, mx.array([[1.3, 0.5, 0.25], [0.7, 0.0, 0.1]]), mx.array(entries.astype(np.int32)),
        mx.array(values), mx.array([5, int(entries[350, 0])], mx.int32),
    )  # fmt: skip
    wide = logits.astype(mx.float32)
    expected = plain_ops.edit_logits(wide, *settings)
    mx.eval(expected)
    _same(ops.edit_logits(wide, *settings), expected, "edited logits")


# --- Whole steps ----------------------------------------------------------------------------------

Build = Callable[..., list[mx.array]]


def program_of(build: Build, inputs: Sequence[mx.array]) -> executables.GpuExecutable:
    """Compiles a graph as a whole step.

    Raises:
        Unsupported: The device has no kernels for it.
    """
    mx.eval(list(inputs))
    unknown = executables.placeholders(list(inputs))
    try:
        with patches.graph_for_program():
            outputs = build(*unknown)
        return executables.GpuExecutable(unknown, outputs)
    except ValueError as error:
        raise Unsupported(str(error)) from error


class Programs:
    """Checks of whole steps, and the kernels that have been proven by earlier ones."""

    def __init__(self) -> None:
        self.proven: set[str] = set()
        self._tried: set[str] = set()  # by the running job

    def begin(self) -> None:
        """Begins a job."""
        self._tried = set()

    def run(self, build: Build, inputs: Sequence[mx.array]) -> list[mx.array]:
        """Runs a program after announcing its kernels and those of the job's earlier programs."""
        program = program_of(build, inputs)
        self._tried |= set(program.kernels) - self.proven
        announce(sorted(self._tried))
        outputs = program(list(inputs))
        mx.eval(outputs)
        return outputs

    def end(self) -> None:
        """Ends a job whose results were right."""
        self.proven |= self._tried


programs = Programs()


def norm(dtype: str, hidden: str) -> None:
    """Checks the sum of a residual and its norm."""
    rng, size = np.random.default_rng(0), max(64, int(hidden))
    x, y, weight = (_normal(rng, *shape, dtype=getattr(mx, dtype))
                    for shape in ((3, size), (3, size), (size,)))  # fmt: skip

    def build(x: mx.array, y: mx.array) -> list[mx.array]:
        total = x + y
        return [ops.rms_norm(total, weight, 1e-5), total]

    normed, total = programs.run(build, [x, y])
    expected = x + y
    _close(total, expected, dtype)
    _close(normed, mx.fast.rms_norm(expected.astype(mx.float32), weight.astype(mx.float32), 1e-5),
           dtype)  # fmt: skip


def silu(dtype: str) -> None:
    """Checks ``silu(gate) * up``."""
    gate, up = (_normal(np.random.default_rng(i), 3, 512, dtype=getattr(mx, dtype)) for i in (0, 1))
    found = programs.run(lambda gate, up: [ops.silu_mul(gate, up)], [gate, up])
    wide = gate.astype(mx.float32)
    _close(found[0], wide * mx.sigmoid(wide) * up.astype(mx.float32), dtype)


def rows(dtype: str, hidden: str) -> None:
    """Checks lookups of rows, as of an embedding."""
    table = _normal(np.random.default_rng(0), 9, max(64, int(hidden)), dtype=getattr(mx, dtype))
    mx.eval(table)
    ids = mx.array([8, 0, 3, 3], mx.int32)
    found = programs.run(lambda ids: [table[ids]], [ids])
    _same(found[0], table[ids], "rows")


def linear_module(product: Product, dtype: mx.Dtype, seed: int = 0) -> nn.Module:
    """A random linear layer of this shape."""
    made: nn.Module = nn.Linear(product.k, product.n, bias=False)
    shape, key = (product.n, product.k), mx.random.key(seed)
    # In float32, whose numbers are the same on every device. A GPU makes them, as there are many.
    made.weight = (mx.random.normal(shape, key=key) / product.k**0.5).astype(dtype)
    if product.bits:
        made = nn.QuantizedLinear.from_linear(
            made, product.group_size, product.bits, mode=product.mode
        )
    mx.eval(made.parameters())
    return made


def multiplied(module: nn.Module, x: mx.array) -> mx.array:
    """A product as a step's graph has it."""
    is_quantized = isinstance(module, nn.QuantizedLinear)
    with patches.native_ops(mx.zeros(x.shape[0], mx.int32)):
        # Not module(x): a process without a model has not installed these.
        return patches.quantized_linear(module, x) if is_quantized else patches.linear(module, x)


def multiplied_separately(module: nn.Module, x: mx.array) -> mx.array:
    """A product outside of whole steps, by the kernel that is allowed for its rows."""
    if not isinstance(module, nn.QuantizedLinear):
        return ops.linear(x, module.weight, module.get("bias"))
    return ops.quantized_linear(
        x, module.weight, module.scales, module.get("biases"), module.get("bias"),
        group_size=module.group_size, bits=module.bits, mode=module.mode,
    )  # fmt: skip


def width_of(module: nn.Module) -> int:
    """The columns of a linear layer's weight."""
    bits = module.bits if isinstance(module, nn.QuantizedLinear) else 32
    return int(module.weight.shape[1]) * 32 // bits


@contextmanager
def only_product(kernel: str) -> Iterator[None]:
    """Within it, this kernel multiplies any number of rows that it can, and no other one does."""
    kernels.allow_products([AllowedProduct(kernel, 1, MAX_ROWS)])
    try:
        yield
    finally:
        kernels.allow_products(())


def tensor_product(dtype: str, shape: str, kernel: str) -> None:
    """Checks a product of many rows on tensor units, and the bits of rows beside fewer others."""
    announce([kernel])
    made, tile = Product.of(shape), int(kernel.rpartition("_m")[2])
    if kernel not in product_kernels(dtype, made, tile):
        raise Unsupported(f"{kernel} is not allowed")
    module = linear_module(made, getattr(mx, dtype))
    module.bias = _normal(np.random.default_rng(2), made.n, dtype=getattr(mx, dtype))
    x = _normal(np.random.default_rng(1), tile + 9, made.k, dtype=getattr(mx, dtype))
    want = _plain_product(module, x) + module.bias.astype(mx.float32)
    mx.eval(x, want, module.parameters())
    with only_product(kernel):
        found = multiplied_separately(module, x)
        _close(found, want, dtype)
        _same(multiplied_separately(module, x[:20]), found[:20], _COMPANY)


# Rows for which a product has its own kernels: the most, one and a few.
_ROWS = (16, 1, 3)


def product(dtype: str, shape: str) -> None:
    """Checks a product, and that a row has the same bits beside any number of other rows."""
    module = linear_module(Product.of(shape), getattr(mx, dtype))
    x = _normal(np.random.default_rng(1), _ROWS[0], Product.of(shape).k, dtype=getattr(mx, dtype))
    most: mx.array | None = None
    for num_rows in _ROWS:
        [found] = programs.run(lambda x: [multiplied(module, x)], [x[:num_rows]])
        _close(found, _plain_product(module, x[:num_rows]), dtype)
        most = found if most is None else most
        _same(found, most[:num_rows], _COMPANY)


_COMPANY = "results of a row alone and beside others"


def lookup(dtype: str, shape: str) -> None:
    """Checks lookups in a quantized embedding."""
    made = Product.of(shape)
    weight = _normal(np.random.default_rng(0), made.n, made.k, dtype=getattr(mx, dtype))
    table = nn.QuantizedEmbedding.from_embedding(
        _embedding_of(weight), made.group_size, made.bits, mode=made.mode
    )
    ids = mx.array([8, 0, made.n - 1, 3], mx.int32)
    mx.eval(table.parameters())
    [found] = programs.run(lambda ids: [patches.quantized_embedding(table, ids)], [ids])
    scales, biases = table.scales[ids], table.get("biases")
    if made.mode == "affine":
        scales, biases = scales.astype(mx.float32), biases[ids].astype(mx.float32)
    want = mx.dequantize(table.weight[ids], scales, biases, made.group_size, made.bits, made.mode)
    _close(found, want, dtype)


def _embedding_of(weight: mx.array) -> nn.Embedding:
    made = nn.Embedding(*weight.shape)
    made.weight = weight
    return made


def _plain_product(module: nn.Module, x: mx.array) -> mx.array:
    weight = module.weight
    if isinstance(module, nn.QuantizedLinear):
        weight = mx.dequantize(
            module.weight, module.scales, module.get("biases"), module.group_size, module.bits,
            module.mode,
        )  # fmt: skip
    return x.astype(mx.float32) @ weight.astype(mx.float32).T


def heads(layer_name: str, block: str) -> None:
    """Checks rotation, write and attention of a decode, with the kernels of a whole step."""
    layer = layer_of(layer_name)
    sequences = Sequences(layer, int(block), 1)
    plan, num_rows = sequences.plan(_WHOLE), 3
    dim = layer.key_dim
    module = linear_module(Product(64, layer.group * _KV_HEADS * layer.value_dim), sequences.dtype)
    rng = np.random.default_rng(2)
    q, k, v = (
        _normal(rng, num_rows, count, 1, d, dtype=sequences.dtype)
        for count, d in ((layer.group * _KV_HEADS, dim), (_KV_HEADS, dim),
                         (_KV_HEADS, layer.value_dim))
    )  # fmt: skip
    frequencies = mx.array((10.0 ** -np.arange(dim // 2)).astype(np.float32))
    options = sequences.options()

    def build(
        q: mx.array, k: mx.array, v: mx.array, positions: mx.array, slots: mx.array,
        tables: mx.array, items: mx.array, merges: mx.array, keys: mx.array, values: mx.array,
    ) -> list[mx.array]:  # fmt: skip
        turns = ops.rope_rotations(positions, frequencies)
        q, k = (ops.rope(a.transpose(0, 1, 2, 3), turns) for a in (q, k))
        keys, values = ops.write_kv(keys, values, k[:, :, 0], v[:, :, 0], slots)
        step = replace(
            plan, positions=positions, slot_mapping=slots, block_tables=tables, work_items=items,
            merge_items=merges,
        )  # fmt: skip
        out = ops.paged_attention(q.squeeze(2), keys, values, step, **options)
        return [multiplied(module, out.reshape(num_rows, -1)), keys, values]

    arrays = [q, k, v, plan.positions, plan.slot_mapping, plan.block_tables, plan.work_items,
              plan.merge_items]  # fmt: skip

    def turned(a: mx.array) -> mx.array:
        angles = plan.positions.astype(mx.float32)[:, None] * frequencies
        cos, sin = mx.cos(angles)[:, None, None], mx.sin(angles)[:, None, None]
        first, second = mx.split(a.astype(mx.float32), 2, axis=-1)
        return mx.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)

    before = list(sequences.pools)
    wide = [p.astype(mx.float32) for p in before]
    expected = plain_ops.write_kv(
        wide[0], wide[1], turned(k).squeeze(2), v.squeeze(2).astype(mx.float32), plan.slot_mapping
    )
    dense = plain_ops.gather_kv(
        *expected, plan.block_tables, plan.context_lens, max(sequences.lens)
    )
    out = plain_ops.paged_attention(turned(q).squeeze(2), *dense, plan, **options)
    want = _plain_product(module, out.reshape(num_rows, -1))
    mx.eval(want)
    found = programs.run(build, [*arrays, *before])
    _close(found[0], want, layer.dtype, 4 * TOLERANCE[layer.dtype])


def experts(dtype: str, shape: str) -> None:
    """Checks a mixture of experts with weights in a format, and the bits of its rows."""
    rng, kind = np.random.default_rng(0), getattr(mx, dtype)
    num_experts, top_k = 6, 2
    gate, up, down = (_Experts(rng, Product.of(shape), num_experts, kind) for _ in "gud")
    every_x = _normal(rng, _ROWS[0], 1, Product.of(shape).k, dtype=kind)
    order = np.stack([rng.permutation(num_experts) for _ in range(_ROWS[0])])
    every_logit = mx.array(order[:, None].astype(np.float32)).astype(kind)

    def chosen(logits: mx.array) -> tuple[mx.array, mx.array]:
        shares = mx.softmax(logits, axis=-1, precise=True)
        best = mx.argpartition(-shares, kth=top_k - 1, axis=-1)[..., :top_k]
        return best, mx.take_along_axis(shares, best, axis=-1)

    def build(x: mx.array, logits: mx.array) -> list[mx.array]:
        best, shares = chosen(logits)
        rows = mx.expand_dims(x, (-2, -3))
        y = ops.silu_mul(gate.multiply(rows, best), up.multiply(rows, best))
        return [(down.multiply(y, best).squeeze(-2) * shares[..., None]).sum(axis=-2)]

    most: mx.array | None = None
    for num_rows in _ROWS:
        x, logits = every_x[:num_rows], every_logit[:num_rows]
        best, shares = chosen(logits)
        best, wide = best[:, 0], x.astype(mx.float32)[:, 0]
        g, u = ((e.wide[best] @ wide[:, None, :, None]).squeeze(-1) for e in (gate, up))
        y = (down.wide[best] @ (g * mx.sigmoid(g) * u)[..., None]).squeeze(-1)
        want = (y * shares[:, 0, :, None].astype(mx.float32)).sum(axis=1)[:, None]
        [found] = programs.run(build, [x, logits])
        _close(found, want, dtype, 4 * TOLERANCE[dtype])
        most = found if most is None else most
        _same(found, most[:num_rows], _COMPANY)


class _Experts:
    """Random square matrices of experts, ``[num_experts, k, k]``."""

    def __init__(
        self, rng: np.random.Generator, made: Product, num_experts: int, dtype: mx.Dtype
    ) -> None:
        weight = _normal(rng, num_experts, made.k, made.k) / made.k**0.5
        self.form: dict[str, Any] = {
            "group_size": made.group_size,
            "bits": made.bits,
            "mode": made.mode,
        }
        self.arrays = [weight.astype(dtype)]
        self.wide = self.arrays[0].astype(mx.float32)
        if made.bits:
            self.arrays = list(mx.quantize(self.arrays[0], **self.form))
            self.wide = mx.dequantize(*self.arrays, **self.form).astype(mx.float32)
        mx.eval(self.arrays, self.wide)

    def multiply(self, x: mx.array, indices: mx.array) -> mx.array:
        """The product as a step's graph has it."""
        form = self.form if len(self.arrays) > 1 else {}
        return ops.expert_linear(x, indices, *self.arrays, **form, for_program=True)


CHECKS: dict[str, Callable[..., None]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        attention, merge, uncovered, pool, blocks, strided, lora, greedy, draw, thresholds, bitmask,
        edits,        norm, silu, rows, product, tensor_product, lookup, heads, experts,
    )
}  # fmt: skip
