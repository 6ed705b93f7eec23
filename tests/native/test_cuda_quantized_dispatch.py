"""Tests the kernel and grid of products with quantized weights on NVIDIA GPUs, and how programs
with such products are read. Neither needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.mixtures import Experts
from support.simulated import needs_sim_extension, sim_ext, simulated

from mlx_paged import executables, ops

pytestmark = needs_sim_extension


def launch_of(rows: int, outputs: list[int], k: int, **options: Any) -> dict[str, Any] | None:
    given = {"dtype": "bfloat16", "bits": 4, "group_size": 64, "mode": "affine"}
    given |= {"is_gated": False, "tma": "any"}
    return sim_ext.quantized_product_launch(rows, outputs, k, **(given | options))


@pytest.mark.parametrize(
    ("rows", "tma", "kernel", "grid"),
    [
        (1, "any", "linear_quantized_stream_bfloat16_affine_4_64_1", (128, 1, 1)),
        (8, "any", "linear_quantized_stream_bfloat16_affine_4_64_1", (128, 1, 1)),
        (9, "any", "linear_quantized_stream_bfloat16_affine_4_64_2", (128, 1, 1)),
        (17, "any", "linear_quantized_stream_bfloat16_affine_4_64_4", (128, 1, 1)),
        (33, "any", "linear_quantized_stream_bfloat16_affine_4_64_8", (128, 1, 1)),
        (64, "any", "linear_quantized_stream_bfloat16_affine_4_64_8", (128, 1, 1)),
        (16, "wgmma", "linear_quantized_stream_bfloat16_affine_4_64_2", (128, 1, 1)),
        (17, "wgmma", "linear_quantized_wgmma_bfloat16_affine_4_64_4", (128, 1, 1)),
        (64, "wgmma", "linear_quantized_wgmma_bfloat16_affine_4_64_8", (128, 1, 1)),
        (8, "none", "linear_quantized_bfloat16_affine_4_64_1", (256, 1, 1)),
        (9, "none", "linear_quantized_bfloat16_affine_4_64_2", (256, 1, 1)),
        (33, "small", "linear_quantized_bfloat16_affine_4_64_2", (256, 3, 1)),
        # More rows are divided among blocks.
        (65, "any", "linear_quantized_stream_bfloat16_affine_4_64_8", (128, 2, 1)),
        (65, "wgmma", "linear_quantized_wgmma_bfloat16_affine_4_64_16", (128, 1, 1)),
        (129, "wgmma", "linear_quantized_wgmma_bfloat16_affine_4_64_16", (128, 2, 1)),
        (512, "any", "linear_quantized_stream_bfloat16_affine_4_64_8", (128, 8, 1)),
        (8192, "wgmma", "linear_quantized_wgmma_bfloat16_affine_4_64_16", (128, 64, 1)),
    ],
)
def test_the_kernel_for_so_many_rows(rows: int, tma: str, kernel: str, grid: Any) -> None:
    launch = launch_of(rows, [4096], 4096, tma=tma)
    clusters = tma in ("any", "wgmma")
    copies_alone = "linear_quantized_stream" in kernel  # a warp
    assert launch and launch["kernel"] == kernel and launch["grid"] == grid
    assert launch["cluster"] == (4 if clusters else 0)  # of 32 tiles of 128 rows
    assert launch["threadgroup"] == ((288 if copies_alone else 256), 1, 1)
    assert len(launch["buffers"]) == 28


@pytest.mark.parametrize(
    ("variable", "bits", "expected"),
    [("", 3, (8, 2)), ("", 8, (16, 1)), ("WIDE_PRODUCTS", 4, (8, 2))],
)
def test_how_many_rows_a_block_has(
    monkeypatch: pytest.MonkeyPatch, variable: str, bits: int, expected: tuple[int, int]
) -> None:
    if variable:
        monkeypatch.setenv(f"MLX_PAGED_{variable}", "0")
    launch = launch_of(128, [4096], 4096, bits=bits, tma="wgmma")
    assert launch and (int(launch["kernel"].split("_")[-1]), launch["grid"][1]) == expected


def test_many_rows_can_be_left_to_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_PAGED_QUANTIZED_ROWS", "64")
    assert launch_of(64, [4096], 4096) and not launch_of(65, [4096], 4096)


def test_shared_memory() -> None:
    """Two blocks to a multiprocessor, or one; less than `TmaKernels::any` promises."""
    for rows in (1, 9, 17, 33):
        for bits in (2, 3, 4, 5, 6, 8):
            launch = launch_of(rows, [4096], 4096, bits=bits, group_size=32)
            blocks = 2 if rows <= 32 else 1
            assert blocks * (launch["threadgroup_memory"] + 1024) <= 228 * 1024
            launch = launch_of(rows, [4096], 4096, bits=bits, group_size=32, tma="wgmma")
            assert 2 * (launch["threadgroup_memory"] + 1024) <= 228 * 1024
            launch = launch_of(100, [4096], 4096, bits=bits, group_size=32, tma="wgmma")
            assert launch["threadgroup_memory"] <= 227 * 1024


def test_how_columns_are_divided() -> None:
    for outputs, k, cluster in (
        ([4096, 1024, 1024], 4096, 4),
        ([4096], 14336, 8),
        ([4096], 1024, 1),  # no block has fewer columns
        ([14336], 4096, 2),
        ([40960], 4096, 1),
    ):
        launch = launch_of(8, outputs, k)
        tiles = sum(-(-n // 128) for n in outputs)
        assert launch["cluster"] == (cluster if cluster > 1 else 0)
        assert launch["grid"][0] == tiles * cluster


def test_what_the_copy_engine_is_told() -> None:
    x, *of_weights = launch_of(17, [4096, 1024], 4096, bits=8, group_size=32)["maps"]
    assert x == (0, 2, 17, 4096, 4096, 32, 64, True)
    for i, n in enumerate((4096, 1024)):
        codes, scales, biases = of_weights[3 * i : 3 * i + 3]
        assert codes == (2 + 5 * i, 4, n, 1024, 1024, 64, 32, True)
        assert scales == (3 + 5 * i, 2, n, 128, 128, 64, 8, False)
        assert biases == (4 + 5 * i, *scales[1:])
    maps = launch_of(1, [512], 1024, mode="mxfp4", bits=4, group_size=32)["maps"]
    assert maps[2] == (3, 1, 512, 32, 32, 64, 16, False)
    # Rows of 128 bytes are swizzled, others are not.
    boxes = {2: (16, False), 3: (24, False), 4: (32, True), 5: (20, False), 6: (24, False)}
    for bits, box in boxes.items():
        _, codes, *_ = launch_of(1, [512], 1024, bits=bits)["maps"]
        assert codes[6:] == box


def test_rows_of_scales_that_the_copy_engine_cannot_read() -> None:
    for group, k in ((32, 4096 + 128), (64, 4096 + 256), (128, 4096 + 512)):
        launch = launch_of(33, [512], k, group_size=group)
        assert launch["kernel"] == f"linear_quantized_bfloat16_affine_4_{group}_2"
        assert launch["cluster"] == 0 and not launch["maps"]


def sorted_launches(rows: int, n: int, k: int, **options: Any) -> list[dict[str, Any]] | None:
    given = {"num_experts": 128, "dtype": "bfloat16", "bits": 4, "group_size": 64, "mode": "affine"}
    given |= {"is_gated": False, "tma": "wgmma"}
    return sim_ext.sorted_expert_launches(rows, n=n, k=k, **(given | options))


@pytest.mark.parametrize(
    ("rows", "n", "k", "options", "kernel", "grid"),
    [
        (65_536, 768, 2048, {}, "wgmma_bfloat16_affine_4_64_16", 640 * 6),
        (65_536, 2048, 768, {}, "whole_wgmma_bfloat16_affine_4_64_16", 640 * 16),
        (65_536, 768, 2048, {"is_gated": True}, "wgmma_bfloat16_affine_4_64_16", 640 * 12),
        (8192, 768, 2048, {}, "wgmma_bfloat16_affine_4_64_8", 256 * 6),
        (2048, 2048, 768, {}, "whole_wgmma_bfloat16_affine_4_64_4", (128 + 64) * 16),
        (64, 768, 2048, {}, "wgmma_bfloat16_affine_4_64_4", 64 * 6),
        (65_536, 768, 2048, {"bits": 3}, "wgmma_bfloat16_affine_3_64_8", (128 + 1024) * 6),
        (100, 100, 512, {"mode": "mxfp4", "group_size": 32, "dtype": "float16"},
         "wgmma_float16_mxfp4_4_32_4", 100),
    ],
)  # fmt: skip
def test_products_of_sorted_rows(
    rows: int, n: int, k: int, options: dict[str, Any], kernel: str, grid: int
) -> None:
    """A block for each item that there can be, and each tile of an expert's weight."""
    items, product = sorted_launches(rows, n, k, **options) or ()
    assert items["kernel"] == "sorted_items" and items["grid"] == (1, 1, 1)
    assert product["kernel"] == f"expert_quantized_{kernel}"
    assert product["grid"] == (grid, 1, 1) and product["threadgroup"] == (256, 1, 1)
    x, codes, *_ = product["maps"]
    assert x[2:6] == (rows, k, k, 8 * int(kernel.rpartition("_")[2]))
    assert codes[2] == 128 * n


def test_sorted_rows_that_no_kernel_serves() -> None:
    for options in ({"tma": "any"}, {"mode": "nvfp4", "group_size": 16}, {"num_experts": 1024}):
        assert sorted_launches(4096, 768, 2048, **options) is None
    # Rows of scales that are neither multiples of 16 bytes nor short, or in parts of tiles.
    assert sorted_launches(4096, 768, 1664) is None
    assert sorted_launches(4096, 100, 768) is None


STREAMS = 2 * ["expert_quantized_stream_bfloat16_affine_4_64_4"]


def gathered(tiles: int) -> list[str]:
    return ["sorted_rows_64_4", *2 * [f"expert_quantized_wgmma_bfloat16_affine_4_64_{tiles}"]]


@pytest.mark.parametrize(
    ("rows", "tma", "kernels"),
    [
        (31, "wgmma", STREAMS),
        (32, "any", STREAMS),
        (32, "wgmma", gathered(4)),
        (128, "wgmma", gathered(8)),
        (512, "wgmma", gathered(16)),
    ],
)
def test_a_mixture_of_many_rows_gathers_them(
    rng: np.random.Generator, rows: int, tma: str, kernels: list[str]
) -> None:
    """From eight pairs per expert on."""
    experts = Experts(rng, 8, 512, 512, mx.bfloat16, form=("affine", 4, 64))
    with simulated():
        inputs = executables.placeholders(
            [mx.zeros((rows, 1, 512), mx.bfloat16), mx.zeros((rows, 1, 8), mx.bfloat16)]
        )
        built = experts.build(*inputs, "normalized", 2)
        launches = sim_ext.cuda_executable_launches(inputs, [built], tma=tma)
    route, *products, combine = launches
    assert route["kernel"] == "route_experts_bfloat16"
    assert combine["kernel"] == "combine_experts_bfloat16"
    assert [launch["kernel"] for launch in products] == kernels
    item_rows = np.frombuffer(route["constants"], np.int32).tolist()
    assert 8 * int(kernels[-1].rpartition("_")[2]) in item_rows


def test_no_block_has_rows_of_two_weights() -> None:
    for tma, tile in (("none", 16), ("any", 128)):
        outputs = [4096, 1030, 20]
        launch = launch_of(8, outputs, 4096, tma=tma)
        blocks = sum(-(-n // tile) for n in outputs)
        assert launch["grid"][0] == blocks * (launch["cluster"] or 1)
        gated = launch_of(8, [1030, 1030], 4096, is_gated=True, tma=tma)
        assert gated["grid"][0] == -(-1030 // (tile // 2)) * (gated["cluster"] or 1)


@pytest.mark.parametrize("mode_bits_group", [
    *(("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)),
    ("mxfp4", 4, 32), ("mxfp8", 8, 32),
])  # fmt: skip
@pytest.mark.parametrize("rows", [1, 9, 17, 33])
def test_every_format_fits_a_multiprocessor(mode_bits_group: tuple[str, int, int], rows) -> None:
    mode, bits, group = mode_bits_group
    launch = launch_of(rows, [512], 4096, mode=mode, bits=bits, group_size=group)
    assert launch and f"_{mode}_{bits}_{group}_" in launch["kernel"]
    assert 0 < launch["threadgroup_memory"] <= 227 * 1024


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "nvfp4", "group_size": 16},
        {"group_size": 256},
        {"bits": 7},
        {"mode": "mxfp4", "group_size": 64},
        {"rows": 513},
        {"rows": 65, "tma": "none"},
        {"rows": 65, "tma": "small"},
        {"rows": 65, "k": 4096 + 256},  # scales that the copy engine cannot read
        {"rows": 0},
        {"k": 4096 + 32},  # half a group
        {"k": 64, "bits": 3},  # rows of 24 bytes
    ],
    ids=str,
)
def test_what_is_left_to_mlx(options: dict[str, Any]) -> None:
    given = {"rows": 8, "k": 4096, **options}
    assert launch_of(given.pop("rows"), [512], given.pop("k"), **given) is None


# --- In programs ----------------------------------------------------------------------------------


Layer = Callable[[mx.array], mx.array]


def weight_of(n: int, k: int, bits: int = 4, group: int = 64) -> Layer:
    """A layer with a quantized weight and a bias."""
    weight = mx.random.normal((n, k)).astype(mx.bfloat16)
    arrays = mx.quantize(weight, group_size=group, bits=bits)
    bias = mx.zeros(n, mx.bfloat16)
    mx.eval(arrays, bias)
    return lambda x: sim_ext.quantized_linear_node(x, *arrays, bias, bits=bits, group_size=group)


def launches_of(
    build: Callable[..., list[mx.array]], rows: int = 8, k: int = 256, tma: str = "any"
) -> list[dict[str, Any]]:
    with simulated():
        [x] = executables.placeholders([mx.zeros((rows, k), mx.bfloat16)])
        return sim_ext.cuda_executable_launches([x], build(x), tma=tma)


def params_of(launch: dict[str, Any]) -> dict[str, int]:
    """`LinearParams`."""
    names = ("num_rows", "k", "x_stride", "num_weights", "is_gated", "has_residual", "head_dim")
    names += ("n0", "n1", "n2", "bias0", "bias1", "bias2")
    names += ("x_is_ordered", "out_run", "out_apart")
    names += (
        "num_adapters",
        "rank",
        "num_targets",
        "num_units",
        "num_workers",
        "num_blocks",
        "target0",
        "target1",
        "target2",
    )
    return dict(zip(names, np.frombuffer(launch["constants"], np.int32).tolist(), strict=True))


KERNEL = "linear_quantized_bfloat16_affine_4_64_1"


def test_a_residual_is_part_of_a_product() -> None:
    up, down = weight_of(320, 256), weight_of(256, 320)
    first, second = launches_of(lambda x: [x + down(up(x))])
    assert first["kernel"] == second["kernel"] == KERNEL
    assert params_of(first) == {
        **dict.fromkeys(params_of(first), 0),
        **{"num_rows": 8, "k": 256, "x_stride": 256, "num_weights": 1, "n0": 320, "bias0": 1},
    }
    assert params_of(second)["has_residual"] == 1 and params_of(second)["n0"] == 256
    read = [operand for operand, access, _ in second["buffers"] if access == "read"]
    x, residual, codes, scales, biases, bias = read[:6]
    assert len({x, residual, codes, scales, biases, bias}) == 6
    assert second["buffers"][0][0] != second["buffers"][1][0]


def test_gate_and_up_are_one_launch() -> None:
    gate, up = weight_of(320, 256), weight_of(320, 256)
    [launch] = launches_of(lambda x: [ops.silu_mul(gate(x), up(x))], rows=40)
    assert launch["kernel"] == "linear_quantized_bfloat16_affine_4_64_2"
    params = params_of(launch)
    assert params["is_gated"] == 1 and params["num_weights"] == 2 and params["num_rows"] == 40
    assert launch["grid"] == (40, 3, 1)  # of eight rows of each, for sixteen of x
    wide = [weight_of(320, 512) for _ in range(2)]
    [launch] = launches_of(lambda x: [ops.silu_mul(wide[0](x), wide[1](x))], rows=40, k=512)
    assert launch["kernel"] == "linear_quantized_stream_bfloat16_affine_4_64_8"
    assert launch["grid"] == (5, 1, 1)  # of 64 rows of each


def test_products_of_one_input_are_one_launch_if_their_weights_are_alike() -> None:
    layers = [weight_of(n, 256) for n in (256, 64, 64)]
    [launch] = launches_of(lambda x: [layer(x) for layer in layers])
    params = params_of(launch)
    assert [params[name] for name in ("num_weights", "n0", "n1", "n2")] == [3, 256, 64, 64]
    wide, dense = weight_of(64, 256, bits=8), mx.zeros((64, 256), mx.bfloat16)
    mixed = launches_of(lambda x: [layers[0](x), wide(x), x @ dense.T])
    assert [launch["kernel"] for launch in mixed] == [
        KERNEL, KERNEL.replace("_4_64", "_8_64"), "linear_stream_bfloat16_1"
    ]  # fmt: skip
    assert [params_of(launch)["num_weights"] for launch in mixed] == [1, 1, 1]
    gate, up = weight_of(64, 256), weight_of(64, 256, bits=8)
    kernels = [x["kernel"] for x in launches_of(lambda x: [ops.silu_mul(gate(x), up(x))])]
    assert kernels == [KERNEL, KERNEL.replace("_4_64", "_8_64"), "silu_mul_bfloat16"]


def test_a_refusal_names_the_format() -> None:
    layer = weight_of(64, 256)
    with pytest.raises(RuntimeError, match=r"of 65 rows, 64 x 256 .* 4 bits in groups of 64"):
        launches_of(lambda x: [layer(x)], rows=65)
    with simulated():  # Metal has kernels of its own for them
        [x] = executables.placeholders([mx.zeros((8, 256), mx.bfloat16)])
        program = executables.GpuExecutable([x], [layer(x)])
    assert program.kernels == ["product_rows_bfloat16_affine_4_m16"]


# --- Values in the order of codes -----------------------------------------------------------------

K, N = 1024, 2048


class Mlp:
    """An MLP and the norm before it, without the residual."""

    def __init__(self, bits: int = 4, group: int = 64) -> None:
        self.scale = mx.ones(K, mx.bfloat16)
        mx.eval(self.scale)
        self.gate, self.up = (weight_of(N, K, bits, group) for _ in range(2))
        self.down = weight_of(K, N, bits, group)

    def norm(self, x: mx.array) -> mx.array:
        return ops.rms_norm(x, self.scale, 1e-5)

    def gated(self, normed: mx.array) -> mx.array:
        return ops.silu_mul(self.gate(normed), self.up(normed))

    def __call__(self, x: mx.array) -> mx.array:
        return self.down(self.gated(self.norm(x)))


def orders_of(launches: list[dict[str, Any]]) -> list[Any]:
    """Returns the order that each norm writes, and for each product whether x has one and the order
    of its output (None: columns stay in place)."""
    found: list[Any] = []
    for launch in launches:
        kernel = launch["kernel"]
        if kernel.startswith("add_rms_norm_"):
            order = kernel.removeprefix("add_rms_norm_bfloat16").removeprefix("_ordered_")
            found.append(tuple(map(int, order.split("_"))) if order else None)
        elif kernel.startswith("linear_"):
            params = params_of(launch)
            order = (params["out_run"], params["out_apart"])
            found.append((bool(params["x_is_ordered"]), order if order[0] else None))
    return found


# Columns of a run, and how far apart those of a pair are.
ORDERS = {
    **{(bits, group): (min(group, 64), 1) for bits in (2, 3, 5, 6) for group in (32, 64, 128)},
    **{(4, group): (min(group, 64), 4) for group in (32, 64, 128)},
    **{(8, group): (min(group, 64), 2) for group in (32, 64, 128)},
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", ORDERS, ids=str)
def test_what_products_of_four_warps_read_is_written_in_their_order(form: tuple[int, int]) -> None:
    order, mlp = ORDERS[form], Mlp(*form)
    for rows in (17, 64, 130):
        launches = launches_of(lambda x: [mlp(x)], rows, K, "wgmma")
        assert orders_of(launches) == [order, (True, order), (True, None)]


def launches_with_adapters(tma: str, rank: int, rows: int = 32) -> list[dict[str, Any]]:
    """An MLP whose layers all have adapters."""
    mlp = Mlp()
    slots = mx.zeros(rows, mx.int32)
    matrices = {
        (k, n): [mx.zeros((2, rank, size), mx.bfloat16) for size in (k, n)]
        for k, n in ((K, N), (N, K))
    }
    mx.eval(slots, list(matrices.values()))

    def adapted(layer: Layer, x: mx.array) -> mx.array:
        out = layer(x)
        return ops.lora(out, x, slots, *matrices[x.shape[-1], out.shape[-1]])

    def build(x: mx.array) -> list[mx.array]:
        normed = mlp.norm(x)
        gated = ops.silu_mul(adapted(mlp.gate, normed), adapted(mlp.up, normed))
        return [adapted(mlp.down, gated)]

    return launches_of(build, rows, K, tma)


@pytest.mark.parametrize(("tma", "suffix"), [("wgmma", "_ordered_64_4"), ("any", "")])
def test_products_add_their_adapters(tma: str, suffix: str) -> None:
    """No other kernel does. Their own blocks multiply by the adapters' first matrices if they have
    the registers, or blocks in front of them."""
    launches = launches_with_adapters(tma, 8)
    names = [launch["kernel"] for launch in launches]
    assert names[0] == f"add_rms_norm_bfloat16{suffix}" and len(names) == 3
    products = launches[1:]
    assert orders_of(products) == [
        (bool(suffix), (64, 4) if suffix else None),
        (bool(suffix), None),
    ]
    gated, down = map(params_of, products)
    assert gated["is_gated"] and not down["is_gated"]
    for launch, params, targets in zip(products, (gated, down), ([0, 1], [0])):
        assert [params[name] for name in ("num_adapters", "rank")] == [2, 8]
        assert [params[f"target{i}"] for i in range(len(targets))] == targets
        # For each target: up to five tiles of rows with one of two adapters, and four parts of the
        # columns.
        assert params["num_targets"] == len(targets)
        assert params["num_units"] == 20 * len(targets)
        num_tiles = params["n0"] // (64 if params["is_gated"] else 128)
        num_blocks = num_tiles * params["k"] // 1024
        alone = 0 if suffix else params["num_units"]  # whole clusters
        assert params["num_blocks"] == alone and launch["grid"] == (alone + num_blocks, 1, 1)
        assert params["num_workers"] == min(params["num_units"], alone or num_blocks)
    # Hidden values and counts are written; the last first matrix stands for the missing one.
    *_, hidden, chosen, counts, a0, a1, a2, b0, b1, b2 = products[0]["buffers"]
    assert hidden[1] == counts[1] == "read_write"
    assert len({b[0] for b in (hidden, chosen, counts, a0, a1, b0, b1)}) == 7 and a2 == a1
    assert b2[0] == products[0]["buffers"][0][0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("n", [4096, 3840])
def test_blocks_for_adapters_leave_room_for_the_others(n: int) -> None:
    """GPCs have room for 32 clusters of eight blocks; one in front of them comes at least."""
    k, rows = 8192, 64
    layer = weight_of(n, k)
    slots, a, b = (mx.zeros(rows, mx.int32), *(mx.zeros((2, 16, s), mx.bfloat16) for s in (k, n)))
    mx.eval(slots, a, b)
    [launch] = launches_of(lambda x: [ops.lora(layer(x), x, slots, a, b)], rows, k, "wgmma")
    params = params_of(launch)
    # Eight parts of the columns, and five tiles of each 32 rows.
    assert params["num_units"] == 80
    num_blocks = 8 if n == 4096 else 16
    assert params["num_workers"] == params["num_blocks"] == num_blocks
    assert launch["grid"] == (8 * n // 128 + num_blocks, 1, 1)


def test_blocks_of_unquantized_products_multiply_by_first_matrices() -> None:
    n, k, rows = 8192, 256, 32
    weights = [mx.zeros((n, k), mx.bfloat16) for _ in range(2)]
    slots, a, b = (mx.zeros(rows, mx.int32), *(mx.zeros((2, 16, s), mx.bfloat16) for s in (k, n)))
    mx.eval(weights, slots, a, b)

    def build(x: mx.array) -> list[mx.array]:
        return [ops.silu_mul(*(ops.lora(ops.linear(x, w), x, slots, a, b) for w in weights))]

    [launch] = launches_of(build, rows, k)
    params = params_of(launch)
    # Two targets, four parts of the columns, and five tiles of rows.
    assert [params[name] for name in ("num_units", "num_workers", "num_blocks")] == [40, 40, 0]
    assert launch["grid"] == (256, 1, 1)


def test_whole_clusters_count_as_finished() -> None:
    """52 units take seven clusters of eight blocks. All 56 blocks report their end, so the others
    must wait for as many: the count would be wrong from the next launch on."""
    n, k, rows, num_adapters = 1024, 2048, 34, 8
    weight = mx.zeros((n, k), mx.bfloat16)
    slots, a, b = (
        mx.zeros(rows, mx.int32),
        *(mx.zeros((num_adapters, 16, size), mx.bfloat16) for size in (k, n)),
    )
    mx.eval(weight, slots, a, b)
    [launch] = launches_of(
        lambda x: [ops.lora(ops.linear(x, weight), x, slots, a, b)], rows, k, "wgmma"
    )
    params = params_of(launch)
    assert launch["grid"] == (8 * n // 64 + 56, 1, 1)
    assert [params[name] for name in ("num_units", "num_workers", "num_blocks")] == [52, 56, 56]


@pytest.mark.parametrize(
    ("tma", "rank", "rows"),
    [("none", 8, 32), ("wgmma", 12, 32), ("wgmma", 72, 32), ("wgmma", 8, 65)],
)
def test_other_products_leave_their_adapters_to_a_kernel(tma: str, rank: int, rows: int) -> None:
    """Those without a copy engine, of many rows, and with ranks that are large or not in eights."""
    launches = launches_with_adapters(tma, rank, rows)
    suffix = "_ordered_64_4" if tma == "wgmma" else ""
    names = [launch["kernel"] for launch in launches]
    assert [name for name in names if not name.startswith("linear_")] == [
        f"add_rms_norm_bfloat16{suffix}", f"lora_down_bfloat16{suffix}",
        f"lora_up_bfloat16{suffix}", f"lora_down_bfloat16{suffix}", "lora_up_bfloat16",
    ]  # fmt: skip
    products = [launch for launch in launches if launch["kernel"].startswith("linear_")]
    assert orders_of(products) == [(bool(suffix), None)] * 2
    assert not any(params_of(launch)["num_adapters"] for launch in products)


def test_a_product_that_is_read_without_its_adapter_is_written() -> None:
    layer, slots = weight_of(N, K), mx.zeros(32, mx.int32)
    a, b = (mx.zeros((2, 8, size), mx.bfloat16) for size in (K, N))
    mx.eval(slots, a, b)

    def build(x: mx.array) -> list[mx.array]:
        base = layer(x)
        return [ops.lora(base, x, slots, a, b), base]

    launches = launches_of(build, 32, K)
    assert ["lora_up" in launch["kernel"] for launch in launches] == [False, False, True]


@pytest.mark.parametrize(("rows", "tma"), [(16, "wgmma"), (17, "any"), (64, "none")])
def test_other_kernels_read_columns_where_they_are(rows: int, tma: str) -> None:
    mlp = Mlp()
    launches = launches_of(lambda x: [mlp(x)], rows, K, tma)
    assert orders_of(launches) == [None, (False, None), (False, None)]


def test_a_layer_and_the_head() -> None:
    """Sums are read by norms and residuals; of what a norm makes several products read the same."""
    mlp, last, head = Mlp(), Mlp(), weight_of(512, K)
    heads = [weight_of(256, K) for _ in range(4)]

    def build(x: mx.array) -> list[mx.array]:
        normed = mlp.norm(x)
        x = x + mlp(x + last(x))
        return [head(last.norm(x)), *(layer(normed) for layer in heads)]

    order = (64, 4)
    found = orders_of(launches_of(build, 32, K, "wgmma"))
    # (Of the first norm three products are one launch, and the fourth is another.)
    assert sorted(map(str, found)) == sorted(
        map(str, [*[order] * 4, *[(True, order)] * 2, *[(True, None)] * 5])
    )


def dense(n: int, k: int) -> Layer:
    weight = mx.zeros((n, k), mx.bfloat16)
    mx.eval(weight)
    return lambda x: ops.linear(x, weight)


# Other readers of a norm's result.
OTHER_READERS: dict[str, Callable[[Mlp, mx.array], mx.array]] = {
    "a result": lambda mlp, normed: normed,
    "weights of 16 bits": lambda mlp, normed: dense(N, K)(normed),
    "weights of 8 bits": lambda mlp, normed: weight_of(N, K, bits=8)(normed),
    "half of its columns": lambda mlp, normed: weight_of(N, K // 2)(normed[:, : K // 2]),
    "a residual": lambda mlp, normed: normed + mlp.down(mlp.gated(normed)),
    "another norm": lambda mlp, normed: mlp.norm(normed),
}


@pytest.mark.parametrize("reader", OTHER_READERS)
def test_what_is_also_read_otherwise_stays_in_place(reader: str) -> None:
    mlp = Mlp()

    def build(x: mx.array) -> list[mx.array]:
        normed = mlp.norm(x)
        return [mlp.down(mlp.gated(normed)), OTHER_READERS[reader](mlp, normed)]

    launches = launches_of(build, 32, K, "wgmma")
    assert orders_of(launches)[:2] == [None, (False, (64, 4))]


def test_gates_that_are_a_result_stay_in_place() -> None:
    mlp = Mlp()

    def build(x: mx.array) -> list[mx.array]:
        gated = mlp.gated(mlp.norm(x))
        return [mlp.down(gated), gated]

    launches = launches_of(build, 32, K, "wgmma")
    assert orders_of(launches) == [(64, 4), (True, None), (False, None)]


def test_norms_of_shorter_rows_than_products_read() -> None:
    """Their last runs of columns might be shorter."""
    gate, scale = weight_of(N, K), mx.ones(128, mx.bfloat16)
    mx.eval(scale)

    def build(x: mx.array) -> list[mx.array]:
        heads = ops.rms_norm(x.reshape(32, K // 128, 128), scale, 1e-5)
        return [gate(heads.reshape(32, K))]

    assert orders_of(launches_of(build, 32, K, "wgmma")) == [None, (False, None)]


def test_scales_that_the_copy_engine_cannot_read() -> None:
    small = weight_of(64, 256)
    launches = launches_of(lambda x: [small(ops.rms_norm(x, None, 1e-5))], 32, 256, "wgmma")
    assert launches[1]["kernel"] == "linear_quantized_bfloat16_affine_4_64_2"
    assert orders_of(launches) == [None, (False, None)]


def test_gates_with_weights_of_16_bits_before_quantized_ones() -> None:
    mlp, gate, up = Mlp(), dense(N, K), dense(N, K)

    def build(x: mx.array) -> list[mx.array]:
        normed = mlp.norm(x)
        return [mlp.down(ops.silu_mul(gate(normed), up(normed)))]

    for rows in (17, 64):
        launches = launches_of(build, rows, K, "wgmma")
        assert orders_of(launches) == [None, (False, (64, 4)), (True, None)]
