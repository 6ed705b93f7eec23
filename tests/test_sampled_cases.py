"""The choice of cases that a run samples."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from support.sampled_cases import sampled

CASES = [f"case{i}" for i in range(40)]


@dataclass(frozen=True)
class Item:
    """A case of a test, with the parts of `pytest.Item` that are used."""

    name: str
    num_cases: int | None = None
    is_long: bool = False

    @property
    def nodeid(self) -> str:
        return f"tests/test_x.py::{self.name}"

    def get_closest_marker(self, name: str) -> Any:
        if name == "long":
            return self.is_long or None
        return self.num_cases and SimpleNamespace(args=(self.num_cases,))


def cases_of(test: str, kept: list[Any]) -> set[str]:
    return {item.name.partition("[")[2][:-1] for item in kept if item.name.startswith(test)}


def chosen(tests: list[str], num_cases: int) -> list[set[str]]:
    items: Any = [Item(f"{test}[{case}]", num_cases) for test in tests for case in CASES]
    kept = sampled(items)
    return [cases_of(test, kept) for test in tests]


def test_tests_of_the_same_cases_sample_different_ones() -> None:
    found = chosen(["test_a", "test_b", "test_c", "test_d"], 4)
    assert all(4 <= len(cases) <= 20 for cases in found)
    assert len(set.union(*found)) > max(map(len, found)) + 8
    assert found == chosen(["test_a", "test_b", "test_c", "test_d"], 4)  # in every run


def test_each_kind_keeps_a_case() -> None:
    assert all(chosen(["test_a", "test_b"], 10**9))
    items: Any = [
        Item("test_c[one: a]", 10**9), Item("test_c[one: b]", 10**9), Item("test_c[two: a]", 10**9),
        Item("test_d"), Item("test_e", is_long=True),
    ]  # fmt: skip
    kept = [item.name for item in sampled(items)]
    assert kept == ["test_c[one: a]", "test_c[two: a]", "test_d"]
