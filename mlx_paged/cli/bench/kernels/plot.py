"""Decode attention against the copy's roof, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_paged.cli.bench.kernels.show import describe, split_fields
from mlx_paged.cli.entry import needs_extra
from mlx_paged.errors import InvalidParameterError

_AXES = ("op", "context")


def check(path: Path) -> None:
    """Refuses a picture that could not be drawn, before anything is measured."""
    with needs_extra("plot", "--plot"):
        import matplotlib  # noqa: F401
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise InvalidParameterError("plot", "a file that ends in .svg, .png or .pdf", str(path))


def draw(path: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Share of copy bandwidth over context, and rate over bytes under the copy's roof.

    Args:
        rows: results; only those of `paged_attention` are drawn, a line for each combination of
            what else varies.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row["op"] == "paged_attention"]
    if not rows:
        raise InvalidParameterError("plot", "drawn from results of paged_attention", str(path))
    constant, varying = split_fields(rows)
    series = [name for name in varying if name not in _AXES]
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["context"]):
        lines.setdefault(_label(row, series), []).append(row)

    style: Any = {"svg.hashsalt": "mlx-paged", "font.size": 9}
    with pyplot.rc_context(style):
        figure, (shares, roof) = pyplot.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
        for label, points in lines.items():
            share = [100 * p["share_of_copy"] for p in points]
            shares.plot([p["context"] for p in points], share, "o-", label=label)
            rate = [p["bytes_per_second"] / 1e9 for p in points]
            roof.plot([p["bytes"] for p in points], rate, "o-", label=label)
        copies = sorted(row["copy_bytes_per_second"] / 1e9 for row in rows)
        roof.axhline(copies[len(copies) // 2], color="black", linestyle="--", label="copy")
        shares.axhline(100, color="black", linestyle="--")
        shares.set(xlabel="context, tokens", ylabel="share of copy bandwidth, %", ylim=(0, None))
        roof.set(xlabel="bytes of one launch", ylabel="GB/s", ylim=(0, None))
        shares.set_xscale("log", base=2)
        roof.set_xscale("log", base=10)
        shares.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        for axes in (shares, roof):
            axes.grid(alpha=0.3)
        handles, labels = roof.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", fontsize=8)
        said = describe(constant)
        figure.suptitle(f"{title}\npaged_attention" + (f": {said}" if said else ""), fontsize=9)
        try:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise InvalidParameterError(
                "plot", f"a file that can be written ({error})", str(path)
            ) from None
        finally:
            pyplot.close(figure)


def _label(row: Mapping[str, Any], series: Sequence[str]) -> str:
    named = [f"{name} {'all' if row[name] is None else row[name]}" for name in series]
    return ", ".join(named) or "paged_attention"
