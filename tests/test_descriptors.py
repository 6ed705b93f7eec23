"""The limit of open files: importing and loading leave it unchanged, `raise_limit` raises it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SHARE = """
import resource, sys
wanted = tuple(map(int, sys.argv[1:3]))
resource.setrlimit(resource.RLIMIT_NOFILE, wanted)
setrlimit = resource.setrlimit
import mlx_paged
import mlx_lm, mlx_lm.utils
assert mlx_lm.utils.__spec__.loader is mlx_lm.utils.__loader__
assert "SourceFileLoader" in repr(mlx_lm.utils.__loader__)
assert resource.setrlimit is setrlimit
"""
AFTER_IMPORT = "assert (now := resource.getrlimit(resource.RLIMIT_NOFILE)) == wanted, now\n"
LOAD = "mlx_paged.load()\n"


def run(code: str, soft: int, hard: int, **env: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHARE + code, str(soft), str(hard)],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
    )
    assert done.returncode == 0, done.stderr


# A machine's own limit below these would make the tests meaningless.
@pytest.mark.parametrize(
    ("soft", "hard", "env"),
    [(900, 1024, {}), (5000, 6000, {}), (900, 1024, {"MLX_PAGED_DISABLE": "1"})],
    ids=["low", "high", "without the drop-in"],
)
def test_mlx_lm_does_not_touch_the_limit(soft, hard, env) -> None:
    run(AFTER_IMPORT + (LOAD + AFTER_IMPORT if not env else ""), soft, hard, **env)


RAISE = """
from mlx_paged import descriptors
assert descriptors.raise_limit(1500) == descriptors.limit() == 1500
assert descriptors.raise_limit(1000) == 1500
with descriptors.at_least(1800):
    assert descriptors.limit() == 1800
    with descriptors.at_least(100):
        assert descriptors.limit() == 1800
assert descriptors.limit() == 1500
assert descriptors.raise_limit() == 2000
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (2000, 2000)
# Other callers, also of the same function, set what they like.
resource.setrlimit(resource.RLIMIT_NOFILE, (700, 800))
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (700, 800)
# A kernel that accepts less than the hard limit says (macOS).
def picky(which, limits):
    if limits[0] > 750:
        raise ValueError("not allowed")
    setrlimit(which, limits)
resource.setrlimit = picky
descriptors._STEPS = (780, 740, 720)
assert descriptors.raise_limit() == 740
"""


def test_the_soft_limit_is_raised_as_far_as_it_goes() -> None:
    run(RAISE, 1000, 2000)
