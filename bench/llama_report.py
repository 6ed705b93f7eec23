"""Formats results of `bench/llama_cpp.py` as lines and as the tables of docs/benchmarks.md."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- llama_cpp.py: begin -->", "<!-- llama_cpp.py: end -->"
TITLES = {"1b": "Llama-3.2-1B's shape", "135m": "SmolLM2-135M's shape", "tiny": "a tiny shape"}
PAIRS = {"f32": "float32, f32", "bf16": "bfloat16, bf16", "8bit": "8 bits, q8_0",
         "4bit": "4 bits, q4_0"}  # fmt: skip
# Results of each kind of processor (`llama_peer.processor_kind`) have their own tables. The kind
# ends the keys of cells: "1b/4bit/2/prefill@amx".
KINDS = {"": "Processors without AMX", "no-amx": "Processors with AMX, which neither side uses",
         "avx2": "Processors with AVX2 only", "amx": "Processors with AMX"}  # fmt: skip
DISTURBED, MARK = 1.0, "†"  # with more cores used by others, a ratio is not worth showing
# Target ratios (of speeds; for memory, of bytes), by shape and format.
RATIOS = {
    ("1b", "4bit"): {
        "decode-1": "≥ 1.0x", "decode-4": "≥ 1.1x in int8, 0.8x in float",
        "decode-8": "≥ 1.1x in int8, 0.8x in float", "decode-32": "≥ 1.2x in int8, 1.0x in float",
        "prefill": "≥ 1.0x", "shared-32": "≥ 3x", "memory": "≤ 1.2x", "first-token": "≤ 3 s",
    },
    ("135m", "f32"): {"decode-1": "≥ 143 (7 ms) with 4 threads"},
    ("135m", "bf16"): {"decode-1": "≥ 143 (7 ms) with 4 threads"},
    ("135m", "4bit"): {"decode-1": "≥ 200 (5 ms) with 4 threads"},
}  # fmt: skip
WHATS = {
    "decode-1": "decode 1", "decode-4": "decode 4", "decode-8": "decode 8",
    "decode-32": "decode 32", "prefill": "prefill", "memory": "memory, MB",
    "load": "load, s", "first-token": "first token, s", "shared-32": "32 sharing, s",
}  # fmt: skip


def key_of(id: str, kind: str) -> str:
    """The key of a cell's result on a kind of processor."""
    return f"{id}@{kind}" if kind else id


def parts(key: str) -> tuple[str, str, int, str]:
    """Shape, format, threads, and the measurement."""
    shape, format, threads, what = key.partition("@")[0].split("/")
    return shape, format, int(threads), what


def ratio_of(what: str, cell: dict[str, Any], side: str = "native") -> float:
    """Median ratio over the turns: for times, their time over ours; otherwise ours over theirs."""
    less_is_better = what in ("load", "first-token", "shared-32")
    pairs = zip(cell["values"]["ours"], cell["values"][side])
    return statistics.median(
        theirs / ours if less_is_better else ours / theirs for ours, theirs in pairs
    )


def shown(what: str, value: float) -> str:
    if what == "memory":
        return f"{value / 1e6:,.0f}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def line_of(id: str, cell: dict[str, Any]) -> str:
    """One cell: medians with minimum and maximum, and ratios."""
    what = parts(id)[3]
    sides = [
        f"{name} {shown(what, cell['median'][name])} "
        f"({shown(what, min(values))} to {shown(what, max(values))})"
        for name, values in cell["values"].items()
    ]
    ratios = [f"{ratio_of(what, cell, name):.2f}x" for name in cell["values"] if name != "ours"]
    return f"{id}: {', '.join(sides)}; {', '.join(ratios)}; others {cell['others_cpu']}"


def summary(cells: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows for a terminal."""
    rows = []
    for id, cell in cells.items():
        what = parts(id)[3]
        asked = RATIOS.get((parts(id)[0], parts(id)[1].split("-")[0]), {}).get(what, "")
        sides = [shown(what, cell["median"].get(side, float("nan"))) for side in
                 ("ours", "native", "no-amx")]  # fmt: skip
        rows.append([id, *sides, f"{ratio_of(what, cell):.2f}", asked])
    return ["cell", "ours", "llama.cpp", "without AMX", "ours is", "asked"], rows


def markdown(cells: dict[str, Any]) -> str:
    """Tables for each kind of processor."""
    blocks = []
    for kind, title in KINDS.items():
        of_kind = {id: cell for id, _, its_kind, cell in
                   ((*key.partition("@"), cell) for key, cell in cells.items())
                   if its_kind == kind}  # fmt: skip
        if of_kind:
            blocks.append(f"### {title}\n\n{_tables(of_kind)}")
    return "\n\n".join(blocks)


def _tables(cells: dict[str, Any]) -> str:
    """A table for each shape: a row for each format and number of threads, our value and ratios."""
    blocks = []
    found = [parts(id) for id in cells]
    for shape in dict.fromkeys(part[0] for part in found):
        of_shape = [part for part in found if part[0] == shape]
        # A column is left out if other programs disturbed all of it.
        kept = {parts(id)[3] for id, cell in cells.items()
                if parts(id)[0] == shape and not _is_disturbed(parts(id)[3], cell)}  # fmt: skip
        whats = [what for what in WHATS if what in kept]
        lines = [
            f"**{TITLES[shape]}**",
            "",
            f"| weights | threads | {' | '.join(WHATS[what] for what in whats)} |",
            "| --- | ---: |" + " ---: |" * len(whats),
        ]
        for format in dict.fromkeys(part[1] for part in of_shape):
            base, _, variant = format.partition("-")
            name = f"{PAIRS[base]}{f'; {variant}' if variant else ''}"
            for threads in sorted({part[2] for part in of_shape if part[1] == format}):
                row = [cells.get(f"{shape}/{format}/{threads}/{what}") for what in whats]
                texts = [_text(what, cell) for what, cell in zip(whats, row)]
                lines.append(f"| {name} | {threads} | {' | '.join(texts)} |")
        blocks.append("\n".join(lines))
    blocks += [text for text in [_origins(cells)] if text]
    return "\n\n".join(blocks)


def _origins(cells: dict[str, Any]) -> str:
    """The processor and our commit behind the figures for each number of threads."""
    origins: dict[int, dict[str, None]] = {}
    for id, cell in cells.items():
        if "processor" in cell:
            commit = str(cell.get("commit") or "")[:8]
            origins.setdefault(parts(id)[2], {})[f"{cell['processor']} ({commit})"] = None
    return "\n".join(f"- {n} threads: {', '.join(found)}" for n, found in origins.items())


def _is_disturbed(what: str, cell: dict[str, Any]) -> bool:
    """True if other programs used too much for a ratio. They do not change memory."""
    return what != "memory" and cell["others_cpu"] > DISTURBED


def _text(what: str, cell: dict[str, Any] | None) -> str:
    """Our median and the ratios to llama.cpp, with AMX and without."""
    if cell is None:
        return ""
    ratios = [f"{ratio_of(what, cell, side):.2f}x" for side in cell["median"] if side != "ours"]
    if _is_disturbed(what, cell):
        ratios = [MARK]
    return f"{shown(what, cell['median']['ours'])} ({', '.join(ratios)})"


def write_docs(cells: dict[str, Any], docs: Path = DOCS) -> None:
    """Replaces the tables between the marks of a page.

    Raises:
        ValueError: The page lacks the marks.
    """
    text = docs.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{docs} lacks {BEGIN} or {END}")
    docs.write_text(f"{before}{BEGIN}\n\n{markdown(cells)}\n\n{END}{after}")
