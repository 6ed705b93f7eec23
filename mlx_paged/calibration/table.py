"""The table of verdicts and timings that doctor and `make mac-report` print."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:  # it imports MLX, which the process that reports must not
    from mlx_paged.calibration.verdicts import Verdicts


class KernelVerdict(TypedDict):
    """A kernel. `verdict` is "right" or the reason why it is not used."""

    kernel: str
    verdict: str


class Timing(TypedDict):
    """A measured alternative for a shape: a kernel, "whole" and "graph" for steps, "mlx" for
    products, or the minimum tokens of a piece of a split context."""

    shape: str
    way: str
    seconds: float


class Table(TypedDict):
    """The results of calibration.

    `step_rows` is the maximum of a whole step; 0 disables those. `piece_tokens`: minimum tokens of
    context per work item of a decode; 0: the built-in number. `products`: kernels of products that
    run outside of whole steps, with the rows that they multiply.
    """

    machine: dict[str, str]
    kernels: list[KernelVerdict]
    timings: list[Timing]
    step_rows: int
    piece_tokens: int
    products: list[str]


def table_of(verdicts: Verdicts, machine: dict[str, str]) -> Table:
    """Returns the table of a machine."""
    named = {**dict.fromkeys(verdicts.proven, "right"), **verdicts.rejected}
    return {
        "machine": machine,
        "kernels": [{"kernel": k, "verdict": v} for k, v in sorted(named.items())],
        "timings": [
            {"shape": _shape(job), "way": job.rpartition("/")[2], "seconds": seconds}
            for job, seconds in verdicts.seconds.items()
        ],
        "step_rows": verdicts.step_rows,
        "piece_tokens": verdicts.piece_tokens,
        "products": [str(product) for product in sorted(verdicts.products)],
    }


def _shape(job: str) -> str:
    kind, *parts, _ = job.split("/")
    if kind == "time-attention":
        layer, _, rows = parts
        dtype, group, key_dim, value_dim, *_ = layer.split(",")
        return f"attention {dtype}, group {group}, dims {key_dim}/{value_dim}, {rows} rows"
    if kind == "time-split":
        dtype, group, key_dim, value_dim, *_ = parts[0].split(",")
        return f"pieces of contexts, {dtype}, group {group}, dims {key_dim}/{value_dim}"
    dtype, shapes, rows = parts
    if kind == "time-products":
        *_, bits, group, mode = json.loads(shapes)[0].split(",")
        form = f"{mode} of {bits} bits in groups of {group}" if int(bits) else "dense"
        return f"{len(json.loads(shapes))} products in {dtype}, {form}, {rows} rows"
    return f"{len(json.loads(shapes))} products in {dtype}, {rows} rows"


def lines(table: Table) -> Iterator[str]:
    """The table as text, best first within a shape."""
    for row in table["kernels"]:
        yield f"{row['kernel']}: {row['verdict']}"
    shapes: dict[str, list[Timing]] = {}
    for timing in table["timings"]:
        shapes.setdefault(timing["shape"], []).append(timing)
    for shape, timings in shapes.items():
        timings.sort(key=lambda timing: timing["seconds"])
        ways = ", ".join(f"{t['way']} {t['seconds'] * 1e3:.3f} ms" for t in timings)
        yield f"{shape}: {ways}"
    rows = table["step_rows"]
    yield f"whole steps: {f'up to {rows} rows' if rows else 'not used'}"
    yield f"products outside of them: {', '.join(table['products']) or 'all by MLX'}"
    tokens = table["piece_tokens"]
    yield f"pieces of contexts: {f'{tokens} tokens or more' if tokens else 'the built-in length'}"
