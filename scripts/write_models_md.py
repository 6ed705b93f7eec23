"""Runs every model module of mlx-lm against its dense cache; writes docs/models.md's tables.

    python scripts/write_models_md.py

What is written by hand in that file stays as it is.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["MLX_PAGED_DISABLE"] = "1"  # else the dense caches would be the drop-in's

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
from mlx_lm.utils import MODEL_REMAPPING

from mlx_paged import ops
from mlx_paged.model.families import MLX_LM_VERSION, PROVEN, REFUSED
from mlx_paged.model.layout import CacheLayout, StateSpec, UnusedSpec
from mlx_paged.model.wrap import serve

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/models.md"
BEGIN, END = "<!-- {}: written by scripts/write_models_md.py -->", "<!-- {}: end -->"


def run(module: str) -> dict[str, Any]:
    """One family: its layout, how its attention was called, and the difference."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.family_configs import VOCAB_SIZE, config_of
    from support.metal_stand_ins import standing_in
    from support.parity import Driver, family_model, relative_difference

    extras: set[str] = set()
    attend = ops.paged_attention

    def noted(*args: Any, softcap: float | None, sinks: Any, **kwargs: Any) -> Any:
        extras.update(["soft cap"] if softcap else [])
        extras.update(["sinks"] if sinks is not None else [])
        return attend(*args, softcap=softcap, sinks=sinks, **kwargs)

    with standing_in(module), mock.patch.object(ops, "paged_attention", noted):
        model = family_model(config_of(module))
        paged = serve(model, config_of(module), block_size=8)
        differences = relative_difference(model, Driver(paged), VOCAB_SIZE)
    return {
        "layout": paged.layout,
        "attention": describe(paged.layout, sorted(extras)),
        "difference": max(differences.values()),
    }


def describe(layout: CacheLayout, extras: list[str]) -> str:
    """The kinds of a model's layers, in a few words."""
    kinds = []
    for spec in layout.specs:
        if isinstance(spec, UnusedSpec):
            continue
        if isinstance(spec, StateSpec):
            kinds.append("recurrent")
        elif spec.latent:
            kinds.append("latent")
        elif spec.window is not None:
            kinds.append("window")
        elif spec.chunk is not None:
            kinds.append("chunked")
        else:
            kinds.append("full")
    return ", ".join([*Counter(kinds), *extras])


def proven_table() -> str:
    """A row for each proven family."""
    lines = [
        "| family | layers | how it runs | difference | prefixes reused |",
        "|---|---|---|---|---|",
    ]
    for module in sorted(PROVEN, key=str.lower):
        found = run(module)
        layout = found["layout"]
        reuse = "at snapshots" if layout.has_states else "to the token"
        lines.append(
            f"| {module} | {found['attention']} | {layout.mode} | {found['difference']:.0e} "
            f"| {reuse} |"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines)


def refused_table() -> str:
    """A row for each family that is refused."""
    rows = [f"| {module} | {reason} |" for module, reason in sorted(REFUSED.items())]
    return "\n".join(["| family | why |", "|---|---|", *rows])


def aliases_table() -> str:
    """Families that mlx-lm runs with another's code."""
    names = [
        f"{alias} (as {module})"
        for alias, module in sorted(MODEL_REMAPPING.items())
        if module in PROVEN
    ]
    return ", ".join(names) + "."


def replace(page: str, name: str, text: str) -> str:
    """The page with what is between two marks replaced."""
    begin, end = BEGIN.format(name), END.format(name)
    head, rest = page.split(begin)
    return f"{head}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}"


def main() -> None:
    """Writes the tables."""
    page = PAGE.read_text()
    page = replace(page, "proven", f"mlx-lm {MLX_LM_VERSION}.\n\n{proven_table()}")
    page = replace(page, "refused", refused_table())
    page = replace(page, "aliases", aliases_table())
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
