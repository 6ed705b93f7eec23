"""Every primitive once, on small data, against NumPy in float64.

The data is random, unused slots hold NaN, and each case takes milliseconds; whoever wants more runs
the test suite. A case raises `WrongResult` with the row that is wrong and by how much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Largest error of a row, relative to the row's norm.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
DTYPES = tuple(TOLERANCE)


class WrongResult(Exception):
    """A primitive ran, and its result is not what NumPy says."""


@dataclass(frozen=True)
class Case:
    """A check of one primitive.

    Attributes:
        run: takes a `self_test_data.Data`; raises `WrongResult`.
        dtypes: it is tried in on the CPU.
        gpu_dtypes: those in which it has a GPU kernel of ours.
    """

    run: Callable[[Any], None]
    dtypes: tuple[str, ...] = DTYPES
    gpu_dtypes: tuple[str, ...] = ()


def jobs(device: str) -> list[str]:
    """The jobs (`jobs.run`) of all cases that run on "cpu" or "gpu"."""
    from mlx_paged.doctor.self_test_cases import CASES

    return [
        f"test/{device}/{name}/{dtype}"
        for name, case in CASES.items()
        for dtype in (case.dtypes if device == "cpu" else case.gpu_dtypes)
    ]


def run_case(name: str, device: str, dtype: str) -> None:
    """Runs one case.

    Raises:
        WrongResult: the result is not NumPy's.
        Exception: whatever the primitive raised.
    """
    import mlx.core as mx

    import mlx_paged.extension  # checks versions, before ops are called  # noqa: F401
    from mlx_paged.doctor.self_test_cases import CASES
    from mlx_paged.doctor.self_test_data import Data

    with mx.stream(mx.gpu if device == "gpu" else mx.cpu):
        CASES[name].run(Data(dtype))
