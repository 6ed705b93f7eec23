"""Dumps the state of a process that hangs."""

from __future__ import annotations

import faulthandler
import os
import tempfile
from pathlib import Path


def all_threads() -> str:
    """Python stacks of all threads; on Linux also kernel states of native threads, such as MLX's,
    which have no Python stack."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        stacks = file.read().decode(errors="replace")
    lines = []
    for task in sorted(Path(f"/proc/{os.getpid()}/task").glob("*")):
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()
            name, waits = (task / "comm").read_text().strip(), (task / "wchan").read_text()
        except OSError:  # the thread has ended
            continue
        ticks = int(state[11]) + int(state[12])
        lines.append(f"{task.name} {name}: {state[0]}, {ticks} ticks of CPU time, in {waits}")
    return "\n".join([stacks, *lines])
