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
    by_prefix: bool = False

    @property
    def nodeid(self) -> str:
        return f"tests/test_x.py::{self.name}"

    def get_closest_marker(self, name: str) -> Any:
        if name == "long":
            return self.is_long or None
        kwargs = {"by_prefix": True} if self.by_prefix else {}
        return self.num_cases and SimpleNamespace(args=(self.num_cases,), kwargs=kwargs)


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
        *(Item(f"test_c[{i}]", 10**9, by_prefix=True) for i in ("one: a", "one: b", "two: a")),
        Item("test_d"), Item("test_e", is_long=True),
    ]  # fmt: skip
    kept = [item.name for item in sampled(items)]
    assert kept == ["test_c[one: a]", "test_c[two: a]", "test_d"]


def test_an_id_that_only_contains_a_colon_is_no_kind(monkeypatch) -> None:
    names = [f"test_a[{{'{name}': 1}}]" for name in "abcdefgh"]
    items: Any = [Item(name, 10**9) for name in names]
    assert [item.name for item in sampled(items)] == names[:1]
    monkeypatch.setenv("MLX_PAGED_TEST_SAMPLE", str(10**9))  # samples unmarked tests, too
    unmarked: Any = [Item(name) for name in names]
    assert [item.name for item in sampled(unmarked)] == names[:1]
