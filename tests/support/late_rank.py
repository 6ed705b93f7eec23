"""Another rank than 0 that stops itself on its way to the first step, until it is continued."""

from __future__ import annotations

import os
import signal
from typing import Any

from mlx_paged.engine.ranks import process

_stage = os.environ["LATE_RANK_STOPS_AT"]


def follow_late(*given: Any) -> None:
    if _stage == "import":
        os.kill(os.getpid(), signal.SIGSTOP)
    from mlx_paged.engine.ranks import follow

    load = follow.load

    def load_late(*given: Any, **options: Any) -> Any:
        if _stage == "load":
            os.kill(os.getpid(), signal.SIGSTOP)
        return load(*given, **options)

    follow.load = load_late
    _follow_and_end(*given)


_follow_and_end, process._follow_and_end = process._follow_and_end, follow_late  # type: ignore[assignment]

if __name__ == "__main__":
    process.main()
