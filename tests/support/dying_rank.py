"""Another rank than 0 that is killed when it connects to the others: rank 1 of all of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

from mlx_paged.engine.ranks import launch, process


def join(environment: Mapping[str, str], backend: str) -> object:
    if os.environ["MLX_RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return _join(environment, backend)


_join, launch.join = launch.join, join  # type: ignore[assignment]

if __name__ == "__main__":
    process.main()
