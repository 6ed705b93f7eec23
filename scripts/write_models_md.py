"""Compares each verified family with mlx-lm's or mlx-vlm's code; writes docs/models.md's tables.

    python scripts/write_models_md.py

Hand-written text in that file does not change.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["MLX_PAGED_DISABLE"] = "1"  # otherwise the drop-in would replace the dense caches

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
from mlx_lm.utils import MODEL_REMAPPING

from mlx_paged import ops
from mlx_paged.errors import UnsupportedModelError
from mlx_paged.model.deviations import DEVIATIONS, MLX_LM, TRANSFORMERS
from mlx_paged.model.families import MLX_LM_VERSION, PROVEN, REFUSED
from mlx_paged.model.layout import CacheLayout, StateSpec, UnusedSpec
from mlx_paged.model.wrap import build_paged_model
from mlx_paged.multimodal.corrections import DEVIATIONS as MEDIA_DEVIATIONS
from mlx_paged.multimodal.corrections import VERSIONS as MEDIA_VERSIONS
from mlx_paged.multimodal.families import MEDIA_FAMILIES, MEDIA_REFUSED
from mlx_paged.multimodal.mlx_vlm import MLX_VLM_VERSION

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/models.md"
BEGIN, END = "<!-- {}: written by scripts/write_models_md.py -->", "<!-- {}: end -->"


KINDS = ("full", "window", "chunked", "latent", "recurrent")  # of layers, in this order
# Families that share another family's processor class and settings.
SAME_PROCESSOR = {"qwen3_vl_moe": "qwen3_vl", "qwen3_5_moe": "qwen3_5"}


def run(module: str) -> dict[str, Any]:
    """One family: its layout, its calls to attention, and the difference."""
    from support.family_config_parts import VOCAB_SIZE
    from support.family_configs import config_of
    from support.metal_stand_ins import standing_in
    from support.parity import Driver, family_model, relative_difference

    extras: set[str] = set()
    attend = ops.paged_attention

    def noted(*args: Any, **options: Any) -> Any:
        extras.update(["soft cap"] if options.get("softcap") else [])
        extras.update(["sinks"] if options.get("sinks") is not None else [])
        return attend(*args, **options)

    with standing_in(module), mock.patch.object(ops, "paged_attention", noted):
        model = family_model(config_of(module))
        paged = build_paged_model(model, config_of(module), block_size=8)
        differences = relative_difference(model, Driver(paged), VOCAB_SIZE)
    return {
        "layout": paged.layout,
        "attention": describe(paged.layout, sorted(extras)),
        "difference": max(differences.values()),
    }


def describe(layout: CacheLayout, extras: list[str]) -> str:
    """Summary of a model's layer types."""
    kinds = set()
    for spec in layout.specs:
        if isinstance(spec, UnusedSpec):
            continue
        if isinstance(spec, StateSpec):
            kinds.add("recurrent")
        elif spec.latent:
            kinds.add("latent")
        elif spec.window is not None:
            kinds.add("window")
        elif spec.chunk is not None:
            kinds.add("chunked")
        else:
            kinds.add("full")
    return ", ".join([*(kind for kind in KINDS if kind in kinds), *extras])


def listed(names: Iterable[str]) -> str:
    """Names in the order of the alphabet."""
    return ", ".join(f"`{name}`" for name in sorted(names, key=str.lower))


def grouped(
    head: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], str, tuple[float | None, ...]]]
) -> str:
    """A table with a row for all names that have equal cells.

    Args:
        head: Titles of the cells, of the figures and of the names.
        rows: Cells, a name and its figures. A group's figures are the largest of its names.
    """
    names: dict[tuple[str, ...], list[str]] = defaultdict(list)
    figures: dict[tuple[str, ...], list[tuple[float | None, ...]]] = defaultdict(list)
    for cells, name, found in rows:
        names[cells].append(name)
        figures[cells].append(found)
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for cells in sorted(names, key=lambda cells: (-len(names[cells]), cells)):
        largest = [
            max((figure for figure in column if figure is not None), default=None)
            for column in zip(*figures[cells])
        ]
        texts = ["" if figure is None else f"{figure:.0e}" for figure in largest]
        lines.append(f"| {' | '.join([*cells, *texts, listed(names[cells])])} |")
    return "\n".join(lines)


PROVEN_HEAD = ("layers", "how it runs", "prefixes reused", "largest difference", "families")


def proven_table() -> str:
    """Verified families by how they run."""
    rows = []
    for module in PROVEN:
        found = run(module)
        layout = found["layout"]
        reuse = "at snapshots" if layout.has_states else "to the token"
        cells = (found["attention"], str(layout.mode), reuse)
        rows.append((cells, module, (found["difference"],)))
        print(*cells, module, found["difference"], flush=True)
    return grouped(PROVEN_HEAD, rows)


def refused_table() -> str:
    """A row for each rejected family."""
    rows = [f"| {module} | {reason} |" for module, reason in sorted(REFUSED.items())]
    return "\n".join(["| family | why |", "|---|---|", *rows])


def aliases_table() -> str:
    """Families that mlx-lm runs with another family's code."""
    names = [
        f"{alias} (as {module})"
        for alias, module in sorted(MODEL_REMAPPING.items())
        if module in PROVEN
    ]
    return ", ".join(names) + "."


MEDIA_HEAD = ("takes", "how it runs", "text", "images", "audio", "families")


def media_table() -> str:
    """Multimodal families by what they take."""
    from support.media_cases import vary
    from support.media_checkpoints import PROCESSORS
    from support.media_parity import differences
    from support.more_media_checkpoints import ALL_CHECKPOINTS, MORE_PROCESSORS
    from support.more_media_models import ALL_CASES

    found_of: dict[str, list[dict[str, float]]] = {}
    for make in ALL_CASES.values():
        case = make()
        vary(case.model)
        found_of.setdefault(case.module, []).append(differences(case))
        print(case.module, found_of[case.module][-1], flush=True)

    rows = []
    for name, family in MEDIA_FAMILIES.items():
        assert name in {*ALL_CHECKPOINTS, *PROCESSORS, *MORE_PROCESSORS, *SAME_PROCESSOR}
        found = [each for one in found_of[name] for each in one.items()]
        texts = [d for kind, d in found if kind == "text"]
        sounds = [d for kind, d in found if "sound" in kind]
        pictures = [d for kind, d in found if "picture" in kind and "sound" not in kind]
        largest = tuple(max(each, default=None) for each in (texts, pictures, sounds))
        rows.append(((", ".join(family.kinds), str(family.mode)), name, largest))
    return grouped(MEDIA_HEAD, rows)


def media_refused_table() -> str:
    """Rejected multimodal families by reason."""
    rows = [((reason,), module, ()) for module, reason in MEDIA_REFUSED.items()]
    return grouped(("why", "families"), rows)


REFERENCE_HEAD = ("", "largest difference", "models")


def reference_table() -> str:
    """The transformers models in the comparison."""
    from tempfile import TemporaryDirectory

    from support.reference_configs import REFERENCES
    from support.reference_models import differences

    rows = []
    for name, reference in REFERENCES.items():
        with TemporaryDirectory() as path:
            try:
                difference = max(differences(reference, Path(path)))
            except UnsupportedModelError:
                difference = None
        rows.append((("refused" if difference is None else "equal",), name, (difference,)))
        print(name, difference, flush=True)
    return grouped(REFERENCE_HEAD, rows)


MEDIA_REFERENCE_HEAD = ("prompts", "largest difference", "models")


def media_reference_table() -> str:
    """The multimodal transformers models in the comparison, by their prompts."""
    from tempfile import TemporaryDirectory

    sys.path.insert(0, str(ROOT / "tests/multimodal"))
    from support.more_reference_vision import ALL_REFERENCES
    from test_reference_vision import compared

    rows = []
    for name, reference in ALL_REFERENCES.items():
        with TemporaryDirectory() as path, reference.running():
            found = compared(name, Path(path))
        rows.append(((", ".join(found),), name, (max(found.values()),)))
        print(name, found, flush=True)
    return grouped(MEDIA_REFERENCE_HEAD, rows)


def media_deviations_table() -> str:
    """A row for each deviation of mlx-vlm from transformers."""
    rows = [f"| {', '.join(each.packages)} | {each.what} |" for each in MEDIA_DEVIATIONS]
    return "\n".join(["| package | what mlx-vlm does |", "|---|---|", *rows])


def deviations_table() -> str:
    """A row for each deviation of mlx-lm from transformers."""
    rows = [f"| {', '.join(each.modules)} | {each.what} |" for each in DEVIATIONS]
    return "\n".join(["| module | what mlx-lm does |", "|---|---|", *rows])


def replace(page: str, name: str, text: str) -> str:
    """Returns the page with new text between two marks."""
    begin, end = BEGIN.format(name), END.format(name)
    head, rest = page.split(begin)
    return f"{head}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}"


def main() -> None:
    """Writes the tables."""
    sys.path.insert(0, str(ROOT / "tests"))
    page = PAGE.read_text()
    page = replace(page, "proven", f"mlx-lm {MLX_LM_VERSION}.\n\n{proven_table()}")
    page = replace(page, "refused", refused_table())
    page = replace(page, "aliases", aliases_table())
    page = replace(page, "reference", reference_table())
    versions = f"mlx-lm {MLX_LM}, transformers {TRANSFORMERS}."
    page = replace(page, "deviations", f"{versions}\n\n{deviations_table()}")
    page = replace(page, "media", f"mlx-vlm {MLX_VLM_VERSION}.\n\n{media_table()}")
    page = replace(page, "media refused", media_refused_table())
    page = replace(page, "media reference", media_reference_table())
    versions = ", ".join(f"{name} {version}" for name, version in MEDIA_VERSIONS.items())
    page = replace(page, "media deviations", f"{versions}.\n\n{media_deviations_table()}")
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
