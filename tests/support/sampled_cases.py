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

    def one_in(item: pytest.Item) -> int:
        marker = item.get_closest_marker("one_in")
        return sample * (marker.args[0] if marker else 1)

    def kind_of(item: pytest.Item) -> tuple[str, str]:
        name, _, case = item.nodeid.partition("[")
        marker = item.get_closest_marker("one_in")
        by_prefix = marker is not None and marker.kwargs.get("by_prefix", False)
        return name, case.partition(": ")[0] if by_prefix else ""

    items = [item for item in items if item.get_closest_marker("long") is None]
    kinds = {kind_of(item) for item in items if one_in(item) == 1}
    kept = []
    for item in items:
        if (num_cases := one_in(item)) > 1:
            # With the test's name: otherwise two tests of the same cases would run the same few.
            if kind_of(item) in kinds and zlib.crc32(item.name.encode()) % num_cases:
                continue
            kinds.add(kind_of(item))
        kept.append(item)
    return kept
