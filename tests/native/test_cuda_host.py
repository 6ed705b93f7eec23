"""CUDA kernels of products and of decode attention on the CPU: what their threads do, lane by lane,
compiled by the C++ compiler (`cuda_host/fibers.h`). It needs the headers of CUDA's 16-bit floats.

``MLX_PAGED_TEST_PRODUCTS=all`` has every number of bits: by default one that divides a byte, one
that does not, and whole bytes. Planted faults show that a comparison can fail. Each compiles a
program of its own, so that only `make test-long` runs them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.nvcc import needs_nvcc, toolkit_headers

ROOT = Path(__file__).parents[2]
CUDA = ROOT / "csrc/cuda"
HOST = Path(__file__).parent / "cuda_host"
# Those that the others include; what is in `cuda_host/kernels` takes the place of the rest.
KERNELS = (
    *("linear_stream.h", "linear_quantized.h", "linear_quantized_stream.h", "packed_weights.h"),
    *("adapter_units.h", "linear_adapters.h", "linear_finish.h", "linear_math.h"),
    *("operand_maps.h", "ordered_rows.h"),
    *("expert_items.h", "expert_stream.h", "expert_quantized_stream.h", "sorted_experts.h"),
    *("paged_decode_tensor.h", "decode_state.h", "kv_ring.h", "attention_arguments.h"),
    *("paged_decode_quantized.h", "quantized_state.h", "code_ring.h", "code_fragments.h"),
    *("merge_splits.h", "peer_sum.h"),
)


SHAPES = ("linear", "peer", "quantized", "tensor")
BITS = [2, 3, 4, 5, 6, 8] if os.environ.get("MLX_PAGED_TEST_PRODUCTS") == "all" else [3, 4, 8]


# Most of a program's cost is compiling its templates, so each is for one type of elements.
BFLOAT16, FLOAT16 = "ELEMENT=__nv_bfloat16", "ELEMENT=__half"
ELEMENTS = pytest.mark.parametrize("element", [BFLOAT16, FLOAT16], ids=["bfloat16", "float16"])


def compiled(
    folder: Path,
    program: str,
    definitions: Iterable[str] = (),
    changes: dict[str, tuple[str, str]] | None = None,
    includes: Iterable[Path] = (),
) -> Path:
    """A program of `cuda_host`, with something changed in some files.

    (To compile its templates takes most of the time; -Og takes the least to compile and run them.)
    """
    (folder / "gpu").mkdir(exist_ok=True)
    shutil.copy(CUDA.parent / "gpu/column_order.h", folder / "gpu")
    folder = folder / "cuda"
    shutil.copytree(HOST, folder, dirs_exist_ok=True)
    for header in ("code_order.h", *(f"{of}_shape.h" for of in SHAPES)):
        shutil.copy(CUDA / header, folder)
    shutil.copy(CUDA.parent / "attention_plan.cpp", folder)
    for header in KERNELS:
        shutil.copy(CUDA / "kernels" / header, folder / "kernels")
    for name, (before, after) in (changes or {}).items():
        text = (folder / name).read_text()
        assert before in text
        (folder / name).write_text(text.replace(before, after))
    headers = toolkit_headers()
    subprocess.run(
        [
            *(shutil.which("c++") or "g++", "-std=c++20", "-Og", "-w", "-pthread"),
            # Conversions of 16-bit floats are small functions, and most of what a program does.
            *("-finline-small-functions", "-fpartial-inlining", "-ftree-fre"),
            "-U_FORTIFY_SOURCE",  # Ubuntu's default; its longjmp refuses another fiber's stack
            *(f"-D{name}" for name in definitions),
            *("-isystem", headers, "-isystem", f"{headers}/cccl"),
            *(f"-I{path}" for path in includes),
            *(str(folder / f"{program}.cpp"), "-o", str(folder / program)),
        ],
        check=True,
        timeout=600,
    )
    return folder / program


def run(program: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program], capture_output=True, text=True, check=False, timeout=600)


def compared(program: Path) -> int:
    """Results that were compared, all of them right."""
    done = run(program)
    found = re.search(r"(\d+) compared, 0 failed", done.stdout)
    assert found, done.stdout + done.stderr
    return int(found[1])


def finds_a_fault(program: Path) -> bool:
    """True if a result is wrong, or the program fails; its first line stops it."""
    with subprocess.Popen([program], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        hangs = threading.Timer(600, running.kill)
        hangs.start()
        line = running.stdout.readline()
        hangs.cancel()
        if not line:
            return running.wait() != 0
        running.kill()
    return ", 0 failed" not in line


@pytest.mark.one_in(16)
@needs_nvcc
@ELEMENTS
def test_products(tmp_path, element: str) -> None:
    assert compared(compiled(tmp_path, "stream", [element])) > 50_000


ROWS, STREAM = "kernels/linear_quantized.h", "kernels/linear_quantized_stream.h"


def kind_of_weights(bits: int, form: str = "affine", group: int = 64) -> list[str]:
    return [f"CODE_BITS={bits}", f"CODE_FORMAT={form}", f"CODE_GROUP={group}"]


@pytest.mark.one_in(64)
@needs_nvcc
@ELEMENTS
@pytest.mark.parametrize(
    ("bits", "form", "group"),
    [
        *((bits, "affine", group) for bits in BITS for group in (64, 32, 128)),
        *((4, "mxfp4", 32), (8, "mxfp8", 32)),
    ],
)
def test_quantized_products(tmp_path, bits: int, form: str, group: int, element: str) -> None:
    kind = kind_of_weights(bits, form, group)
    assert compared(compiled(tmp_path, "quantized", [*kind, element])) > 5_000


@pytest.mark.one_in(8)
@needs_nvcc
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_products_of_many_rows(tmp_path, bits: int) -> None:
    kind = [f"CODE_BITS={bits}", "MANY_ROWS", BFLOAT16]
    assert compared(compiled(tmp_path, "quantized", kind)) > 150_000


@needs_nvcc
@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("turn, stream.xs_of(turn), Stream::first_x())", "turn, stream.xs_of(turn), 0)"),
        ("first_x() + at; }", "at; }"),
        ("min(params.num_rows - first_x(), 8 * TILES)", "8 * TILES"),
    ],
    ids=["the first rows of x", "outputs of the first rows", "rows past the last"],
)
def test_faults_of_many_rows_are_seen(tmp_path, before: str, after: str) -> None:
    kind = ["CODE_BITS=4", "MANY_ROWS", BFLOAT16]
    assert finds_a_fault(compiled(tmp_path, "quantized", kind, {STREAM: (before, after)}))


@needs_nvcc
def test_norms_in_the_order_of_codes(tmp_path) -> None:
    folders = [CUDA / "kernels", CUDA / "msl", ROOT / "metal"]
    assert compared(compiled(tmp_path, "norm", includes=folders)) > 80_000


@needs_nvcc
def test_thresholds(tmp_path) -> None:
    folders = [CUDA / "kernels", CUDA / "msl", ROOT / "metal"]
    assert compared(compiled(tmp_path, "thresholds", includes=folders)) == 24


@needs_nvcc
def test_adapters_in_the_order_of_codes(tmp_path) -> None:
    folders = [CUDA / "kernels", CUDA / "msl", ROOT / "metal"]
    assert compared(compiled(tmp_path, "lora", includes=folders)) > 80_000


@pytest.mark.one_in(16)
@needs_nvcc
@ELEMENTS
def test_products_of_experts(tmp_path, element: str) -> None:
    assert compared(compiled(tmp_path, "experts", [element])) > 10_000


@needs_nvcc
@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {"kernels/expert_items.h": ("lane + 32 * i;\n      const bool", "lane;\n      const bool")},
        {"kernels/expert_items.h": ("/ params.top_k", "/ 1")},
        {"kernels/expert_items.h": ("is_first ? index :", "false ? index :")},
        {"kernels/expert_items.h": ("item.expert) * params.product.n[0]", "0) * 1")},
        {"kernels/expert_stream.h": ("first_row = item.expert * product.n[0]", "first_row = 0")},
        {"kernels/expert_quantized_stream.h": ("item.expert * params.product.n[0]", "0")},
        {"kernels/expert_stream.h": ("__syncwarp();  // The barrier", "// The barrier")},
        {"kernels/linear_quantized_stream.h": ("return WHOLE ? whole_pitch : 16", "return 16")},
        {"kernels/sorted_experts.h": ("params.x_stride;", "params.row_chunks;")},
        {"kernels/sorted_experts.h": ("params.item_rows - 1)", "params.item_rows)")},
    ],
    ids=[
        "the first 32 rows twice", "rows of pairs", "results by pair", "biases of one expert",
        "one expert", "one quantized expert", "copied before it is expected",
        "scales of 16 bytes a row", "rows without gaps", "an item too many",
    ],
)  # fmt: skip
def test_faults_of_experts_are_seen(tmp_path, changes: dict[str, tuple[str, str]]) -> None:
    assert finds_a_fault(compiled(tmp_path, "experts", [BFLOAT16], changes))


@needs_nvcc
@pytest.mark.long
@pytest.mark.parametrize(
    ("bits", "changes"),
    [
        # A copy that is still under way when it is read, and one that comes while it is.
        (3, {ROWS: ("wait_for_copies<kStages - 2>", "wait_for_copies<kStages - 1>")}),
        (3, {ROWS: ("copy_weights(turn + kStages - 1)", "copy_weights(turn + kStages)")}),
        (3, {STREAM: ("ring.wait_until_full(turn.stage, turn.round);", "")}),
        (4, {STREAM: ("ring.begin(kMultipliers)", "ring.begin(1)")}),
        (4, {"quantized_shape.h": ("slots = whole ? 1 :", "slots = true ? 1 :")}),
        (4, {"kernels/linear_finish.h": ("row % UNIT >= kHalf}", "false}")}),
        (4, {STREAM: ("wait_for_products<0>(sums[0]);\n      take_product", "take_product")}),
        (4, {STREAM: ("load_shared(from ^ c * kPieces * 16)", "load_shared(from ^ c * 16)")}),
        # x that comes in order.
        (4, {STREAM: ("if (is_ordered) {", "if (false) {")}),
        (4, {STREAM: ("params.x_is_ordered, [&]", "false, [&]")}),
        (4, {"code_order.h": ("32 * piece", "16 * piece")}),
        (4, {"kernels/linear_finish.h": ("ordered_column(params.out_order, column + e)",
                                         "(column + e)")}),
        (4, {STREAM: ("stages + kResultBytes, false", "stages, false")}),
    ],
    ids=[
        "too little is waited for", "too early", "nothing is waited for", "one warp releases",
        "too few scales", "gate twice", "products are left", "x in another order",
        "x in order is not waited for", "x is ordered twice", "pieces elsewhere",
        "gates stay in place", "hidden values over results",
    ],
)  # fmt: skip
def test_faults_are_seen(tmp_path, bits: int, changes: dict[str, tuple[str, str]]) -> None:
    kind = [*kind_of_weights(bits), BFLOAT16]
    assert finds_a_fault(compiled(tmp_path, "quantized", kind, changes))


PRODUCTS, ADAPTERS = "kernels/linear_stream.h", "kernels/adapter_units.h"
ADDED = "kernels/linear_adapters.h"


@needs_nvcc
@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    [
        (PRODUCTS, "ring.wait_until_full(stage, turn / kStages);", ""),
        (PRODUCTS, "ring.begin(kMultipliers)", "ring.begin(1)"),
        (PRODUCTS, "wait_for_products<1>(sums);", ""),
        (PRODUCTS, "    clear(sums);\n", ""),
        (PRODUCTS, "x + s * kNextColumns", "x"),
        (PRODUCTS, "before.add(part, sums);", "if (num_parts < 8) before.add(part, sums);"),
        (PRODUCTS, "first + sums[t][i]", "sums[t][i] + (level == 2 ? 0 : first)"),
        (PRODUCTS, "in_memory(memory + number)", "in_memory(memory)"),
        (ADAPTERS, "adapter >= 0 && first_tile + place", "first_tile + place"),
        (ADAPTERS, "(unit.part + 1) * of_part, num", "(unit.part + 1) * of_part, -1 + num"),
        (ADAPTERS, "step += WARPS * STEPS;", "step += WARPS * (STEPS - 1);"),
        (ADAPTERS, "of_tile < tile.num_rows && ", ""),
        (ADDED, "      stage();\n", ""),
        (ADDED, "if (first >= params.adapters.rank) {", "if (true) {"),
    ],
    ids=[
        "nothing is waited for", "one warp releases", "released under way", "added to what was",
        "the first columns", "one part", "half of the parts", "one memory for all threads",
        "rows without an adapter", "columns without an adapter", "columns twice",
        "rows that are none", "nothing is staged", "only the first ranks",
    ],
)  # fmt: skip
def test_faults_of_the_stream_are_seen(tmp_path, change: tuple[str, str, str]) -> None:
    file, before, after = change
    changes = {file: (before, after)}
    assert finds_a_fault(compiled(tmp_path, "stream", [BFLOAT16], changes))


PEERS = [CUDA / "msl", ROOT / "metal"]


@needs_nvcc
def test_ranks_add_up(tmp_path) -> None:
    assert compared(compiled(tmp_path, "peer_sum", includes=PEERS)) > 300_000


@needs_nvcc
@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    [
        ("* 2 + round % 2", "* 2"),
        ("wait_for_flag(flag(params.rank, rank), round, params.patience);", ";"),
        ("region(rank)[i]", "region((rank + params.rank) % RANKS)[i]"),
        ("peers.region(i / part)[i]", "peers.region(params.rank)[i]"),
        ("rounds[blockIdx.x] = peers.round", "rounds[blockIdx.x] = rounds[blockIdx.x] + 1"),
    ],
    ids=["one region", "nothing is waited for", "any order", "one part", "rounds that repeat"],
)  # fmt: skip
def test_faults_of_sums_are_seen(tmp_path, change: tuple[str, str]) -> None:
    changes = {"kernels/peer_sum.h": change}
    assert finds_a_fault(compiled(tmp_path, "peer_sum", changes=changes, includes=PEERS))


ATTENTION = [CUDA, CUDA.parent, CUDA / "kernels", CUDA / "msl", ROOT / "metal"]


@needs_nvcc
@pytest.mark.parametrize(("pools", "fewest"), [("PLAIN", 90_000), ("QUANTIZED", 30_000)])
def test_drafts_share_a_pass_with_the_bits_of_single_rows(
    tmp_path, pools: str, fewest: int
) -> None:
    assert compared(compiled(tmp_path, "attention", [pools], includes=ATTENTION)) > fewest


@needs_nvcc
@pytest.mark.long
@pytest.mark.parametrize(
    ("pools", "change"),
    [
        ("PLAIN", ("attention_plan.cpp", "before.end_block != item.end_block ||", "")),
        ("PLAIN", ("attention_plan.cpp", "kTileTokens = 16", "kTileTokens = 32")),
        ("PLAIN", ("attention_plan.cpp", ">= rules.shared_rows ||", ">= 1 ||")),
        ("PLAIN", ("kernels/paged_decode_tensor.h", "item.row_begin + q / heads, params);",
                   "item.row_end - 1, params);")),
        ("PLAIN", ("kernels/decode_state.h", "factor[i % 2];", "factor[0];")),
        ("PLAIN", ("kernels/merge_splits.h", "split * num_rows + row", "split * num_rows")),
        ("QUANTIZED", ("kernels/quantized_state.h", "query_unit[n][i % 2]", "query_unit[0][0]")),
    ],
    ids=[
        "other pieces", "other tiles of a window", "no rows together",
        "rows see later ones", "one factor for two queries", "partials of one row",
        "the unit of one query",
    ],
)  # fmt: skip
def test_faults_of_attention_are_seen(tmp_path, pools: str, change: tuple[str, str, str]) -> None:
    file, before, after = change
    changes = {file: (before, after)}
    assert finds_a_fault(compiled(tmp_path, "attention", [pools], changes, ATTENTION))
