"""Chooses the cases of a run that is not of all cases."""

from __future__ import annotations

import os
import zlib

import pytest


def sampled(items: list[pytest.Item]) -> list[pytest.Item]:
    """Leaves out tests marked `long`, and all but one in n cases of those marked `one_in`.

    At least one of each kind remains, marked or not. Each test is one kind; with
    `one_in(n, by_prefix=True)`, each "file" of ids like "file: fault" is one. Other ids are text
    that may contain ": " by accident. MLX_PAGED_TEST_SAMPLE=4 leaves out three in four cases of
    every test.
    """
    sample = int(os.environ.get("MLX_PAGED_TEST_SAMPLE", "1"))

    def drawn_from(item: pytest.Item) -> tuple[int, tuple[str, str]]:
        """Returns the n of one in n, and the kind."""
        marker = item.get_closest_marker("one_in")
        name, _, case = item.nodeid.partition("[")
        if marker is None:
            return sample, (name, "")
        prefix = case.partition(": ")[0] if marker.kwargs.get("by_prefix") else ""
        return sample * marker.args[0], (name, prefix)

    drawn = [(i, *drawn_from(i)) for i in items if i.get_closest_marker("long") is None]
    kinds = {kind for _, num_cases, kind in drawn if num_cases == 1}
    kept = []
    for item, num_cases, kind in drawn:
        if num_cases > 1:
            # With the test's name: otherwise two tests of the same cases would run the same few.
            if kind in kinds and zlib.crc32(item.name.encode()) % num_cases:
                continue
            kinds.add(kind)
        kept.append(item)
    return kept
