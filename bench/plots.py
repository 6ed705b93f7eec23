"""Plots for docs/benchmarks.md, from bench/results: python bench/plots.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
IMAGES = Path(__file__).parent.parent / "docs" / "images"
OURS, THEIRS, OTHERS = "#0b6e4f", "#c8553d", ("#6c8ebf", "#b0a160", "#8d6a9f")
STYLE = {
    "svg.hashsalt": "mlx_paged",  # makes the files reproducible
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "figure.constrained_layout.use": True,
}
LABELS = {"paged": "mlx_paged", "torch flash": "torch flash (dense)",
          "torch cuDNN": "cuDNN (dense)", "MLX dense": "MLX (dense)"}  # fmt: skip


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def save(figure: Any, name: str) -> None:
    IMAGES.mkdir(exist_ok=True)
    figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def bars(axes: Any, groups: list[str], series: dict[str, list[float | None]], unit: str) -> None:
    """Draws a cluster of bars per group and a color per series; failed runs have no bar."""
    colors = dict(zip(series, (OURS, THEIRS, *OTHERS)))
    width = 0.8 / len(series)
    for i, (label, values) in enumerate(series.items()):
        at = [g + (i - (len(series) - 1) / 2) * width for g in range(len(groups))]
        shown = axes.bar(at, [v or 0 for v in values], width, label=label, color=colors[label])
        texts = ["" if v is None else f"{v:.0f}" if v >= 20 else f"{v:.1f}" for v in values]
        axes.bar_label(shown, texts, fontsize=7, padding=1)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(unit)
    axes.grid(axis="y", alpha=0.3)


def legend(figure: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)


def decode_bandwidth() -> None:
    """Share of copy bandwidth by query heads per KV head, and by batch."""
    results = [r for r in load("kernels-h200")["results"] if r["op"] == "paged_attention"]
    usual = [r for r in results if r.get("dim") == 128 and r.get("block_size") == 32]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.4), sharey=True)
    full = sorted((r for r in usual if r["lens"] == "32 x 4096"), key=lambda r: r["group"])
    _shares(left, full, [f"G={r['group']}" for r in full], "32 x 4096, by group size")
    batches = [r for r in usual if r["group"] == 4]
    groups = [r["name"].replace(" + ", "\n+ ").replace(", ", ",\n") for r in batches]
    _shares(right, batches, groups, "G=4, by batch")
    right.tick_params(axis="x", labelsize=7)
    left.set_ylabel("% of copy bandwidth")
    legend(figure, left)
    save(figure, "decode-bandwidth")


def _shares(axes: Any, results: list[dict[str, Any]], groups: list[str], title: str) -> None:
    names = [n for n in LABELS if any(n in r["share_of_copy"] for r in results)]
    # Including the gaps between kernels, as in a model's layers.
    series: dict[str, list[float | None]] = {
        LABELS[n]: [
            100 * r["share_of_copy"][n]["in_a_row"] if n in r["share_of_copy"] else None
            for r in results
        ]
        for n in names
    }
    bars(axes, groups, series, "")
    axes.set_title(title, fontsize=9)


def gpu_engine() -> None:
    """Step time and memory of the 3B shape, and step times of the other models."""
    parts = load("engine-h200")["parts"]
    rows = [r for p in ("decode", "decode-more") if p in parts for r in parts[p]["results"]]
    groups = [r["workload"].replace(" + ", "\n+ ") for r in rows]
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.4))
    for ax, field, unit in zip(axes, ("step_ms", "peak_gb"), ("ms a step", "GB at the peak")):
        bars(ax, groups, _both(rows, field), unit)
        ax.tick_params(axis="x", labelsize=7)
    axes[0].set_yscale("log")
    axes[0].set_yticks([2, 5, 10, 20, 50, 100], ["2", "5", "10", "20", "50", "100"])
    axes[0].minorticks_off()
    legend(figure, axes[0])
    save(figure, "gpu-engine")

    names = [p for p in ("qwen3-0.6b", "llama-8b-4bit", "qwen3-30b-a3b") if p in parts]
    figure, axes = plt.subplots(1, len(names), figsize=(10, 3))
    for ax, part in zip(axes, names):
        rows = parts[part]["results"]
        bars(ax, [r["workload"] for r in rows], _both(rows, "step_ms"), "ms a step")
        ax.set_title(parts[part]["model"], fontsize=9)
    legend(figure, axes[0])
    save(figure, "gpu-models")


def _both(rows: list[dict[str, Any]], field: str) -> dict[str, list[float | None]]:
    return {who: [r[who].get(field) for r in rows] for who in ("mlx_paged", "mlx-lm")}


def cpu_engine() -> None:
    """Output tokens per second on two CPU cores."""
    rows = load("engine-cpu")["results"]
    groups = [f"{r['workload']}\n{r['concurrency']} at once" for r in rows]
    series = {
        who: [r[key]["output_tokens_per_second"] for r in rows]
        for who, key in (("mlx_paged", "mlx_paged"), ("mlx-lm", "mlx-lm BatchGenerator"))
    }
    figure, axes = plt.subplots(figsize=(10, 3.2))
    bars(axes, groups, series, "output tokens/s")
    axes.tick_params(axis="x", labelsize=6.5)
    legend(figure, axes)
    save(figure, "cpu-engine")


def main() -> None:
    plt.rcParams.update(STYLE)
    for plot in (decode_bandwidth, gpu_engine, cpu_engine):
        plot()


if __name__ == "__main__":
    main()
