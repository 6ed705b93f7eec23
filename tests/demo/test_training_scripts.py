"""The scripts that trained the embedded model: corpus, tasks and evaluation still run."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest

from scripts.demo_model import compositions, corpus, evaluate, families, prepare, wording

LICENSED = "Metadata-Version: 2.1\nName: small\nVersion: 1.0\nLicense-Expression: MIT\n"
CODE = '''"""A module."""

import math


def circle_area(radius: float) -> float:
    """Return the area of a circle of a given radius."""
    return math.pi * radius**2


class Counter:
    """Counts words."""

    def add_word(self, word: str) -> None:
        """Add a word to the counted words of this counter."""
        self.words = [*self.words, word]
        self.total = len(self.words)
'''


def wheel(folder: Path, name: str, licence: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/module.py", CODE)
        archive.writestr(f"{name}-1.0.dist-info/METADATA", LICENSED.replace("MIT", licence))


def test_the_corpus_takes_permissive_wheels_only(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(corpus, "stdlib_files", lambda: iter(()))
    wheel(tmp_path, "small", "MIT")
    wheel(tmp_path, "other", "GPL-3.0-only")
    found = corpus.collect(tmp_path, str(Path(sys.executable).with_name("ruff")))
    assert [o["name"] for o in found.origins if o["characters"]] == ["small"]
    assert {p.description for p in found.pairs} == {
        "Return the area of a circle of a given radius.",
        "Add a word to the counted words of this counter.",
    }
    corpus.save(found, tmp_path / "raw")
    lines = (tmp_path / "raw" / "pairs.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [vars(pair) for pair in found.pairs]


def test_the_written_and_the_generated_tasks_are_those_of_the_card() -> None:
    kinds = prepare.tasks([])
    assert {kind: len(tasks) for kind, tasks in kinds.items() if tasks} == {
        "classic": 276,
        "family": 543,
        "composition": 11_800,
    }


@pytest.mark.parametrize("pairs", [families.all_families(), compositions.random_compositions(50)])
def test_every_generated_answer_parses(pairs) -> None:
    assert all(evaluate.parses(pair.source) for pair in pairs)


def test_every_hand_written_answer_parses() -> None:
    assert all(evaluate.parses(task.answer) and task.asks for task in wording.load_classics())


def test_an_answer_is_judged_by_running_it() -> None:
    check = evaluate.CHECKED["Return the sum of the digits of a number"]
    right = "def digit_sum(n):\n    return sum(map(int, str(n)))\n"
    assert evaluate.works(right, check)
    assert not evaluate.works(right.replace("sum(", "max("), check)
    assert not evaluate.works("no python", check)
