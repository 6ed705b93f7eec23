"""Which kernel serves a product with quantised weights on NVIDIA's GPUs, and over which grid. The
rule needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest
from support.simulated import needs_sim_extension, sim_ext

pytestmark = needs_sim_extension


def launch_of(rows: int, outputs: list[int], k: int, **options: Any) -> dict[str, Any] | None:
    given = {"dtype": "bfloat16", "bits": 4, "group_size": 64, "mode": "affine"}
    given |= {"is_gated": False, "clusters": True}
    return sim_ext.quantised_product_launch(rows, outputs, k, **(given | options))


@pytest.mark.parametrize(
    ("rows", "clusters", "kernel", "grid"),
    [
        (1, True, "linear_quantised_bfloat16_affine_4_64_1", (256, 1, 1)),
        (8, True, "linear_quantised_bfloat16_affine_4_64_1", (256, 1, 1)),
        (9, True, "linear_quantised_cluster_bfloat16_affine_4_64_2", (256, 1, 1)),
        (17, True, "linear_quantised_cluster_bfloat16_affine_4_64_4", (256, 1, 1)),
        (33, True, "linear_quantised_cluster_bfloat16_affine_4_64_8", (256, 1, 1)),
        (64, True, "linear_quantised_cluster_bfloat16_affine_4_64_8", (256, 1, 1)),
        (9, False, "linear_quantised_bfloat16_affine_4_64_2", (256, 1, 1)),
        (33, False, "linear_quantised_bfloat16_affine_4_64_2", (256, 3, 1)),
    ],
)
def test_the_kernel_for_so_many_rows(rows: int, clusters: bool, kernel: str, grid: Any) -> None:
    launch = launch_of(rows, [4096], 4096, clusters=clusters)
    assert launch and launch["kernel"] == kernel and launch["grid"] == grid
    in_clusters = "cluster" in kernel
    assert launch["cluster"] == (8 if in_clusters else 0)
    assert launch["threadgroup"] == ((128 if in_clusters else 256), 1, 1)
    assert len(launch["buffers"]) == 19


def test_no_block_has_rows_of_two_weights() -> None:
    for rows, tile in ((8, 16), (32, 128)):
        outputs = [4096, 1030, 20]
        blocks = sum(-(-n // tile) for n in outputs) * (1 if rows == 8 else 8)
        assert launch_of(rows, outputs, 4096)["grid"][0] == blocks
        gated = launch_of(rows, [1030, 1030], 4096, is_gated=True)
        assert gated["grid"][0] == -(-1030 // (tile // 2)) * (1 if rows == 8 else 8)


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
        {"rows": 65},
        {"rows": 0},
        {"k": 4096 + 32},  # half a group
        {"k": 64, "bits": 3},  # rows of 24 bytes
    ],
    ids=str,
)
def test_what_is_left_to_mlx(options: dict[str, Any]) -> None:
    given = {"rows": 8, "k": 4096, **options}
    assert launch_of(given.pop("rows"), [512], given.pop("k"), **given) is None
