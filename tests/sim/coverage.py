"""Line coverage of the kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .translate import Function

Line = tuple[str, int]  # file, line


@dataclass
class Coverage:
    lines: set[Line]  # that have code in some kernel compiled
    executed: set[Line]
    functions: list[Function]

    @staticmethod
    def merge(parts: Iterable[Coverage]) -> Coverage:
        total = Coverage(set(), set(), [])
        for part in parts:
            total.lines |= part.lines
            total.executed |= part.executed
            total.functions += part.functions
        return total

    def within(self, root: Path) -> Coverage:
        """The coverage of the files under a folder."""

        def inside(file: str) -> bool:
            return Path(file).is_relative_to(root)

        return Coverage(
            {line for line in self.lines if inside(line[0])},
            {line for line in self.executed if inside(line[0])},
            [f for f in self.functions if inside(f.file)],
        )

    @property
    def missed(self) -> list[Line]:
        return sorted(self.lines - self.executed)

    @property
    def dead_functions(self) -> list[Function]:
        """Functions that no kernel compiled has any code of: templates that nobody instantiates.
        Those that the compiler itself runs have none."""
        by_file = defaultdict(set)
        for file, line in self.lines:
            by_file[file].add(line)
        found = {
            (f.file, f.first): f
            for f in self.functions
            if not f.constant and not any(f.first <= line <= f.last for line in by_file[f.file])
        }
        return list(found.values())

    @property
    def percent(self) -> float:
        return 100 * len(self.lines & self.executed) / max(1, len(self.lines))

    def report(self) -> str:
        files = sorted({f for f, _ in self.lines})
        out = []
        for file in files:
            lines = {n for f, n in self.lines if f == file}
            missed = sorted(n for f, n in self.missed if f == file)
            share = 100 * (1 - len(missed) / len(lines))
            at = f"  missed: {', '.join(map(str, missed))}" if missed else ""
            out.append(f"{Path(file).name:32} {len(lines):5} lines {share:6.1f} %{at}")
        out += [f"{f.file}:{f.first}: {f.name} is in no kernel" for f in self.dead_functions]
        return "\n".join([*out, f"{'total':32} {len(self.lines):5} lines {self.percent:6.1f} %"])
