"""The child process: runs jobs of `cases`, see `child_jobs`."""

from __future__ import annotations

import json
import sys
from typing import Any

from mlx_paged import child_jobs, kernels
from mlx_paged.calibration import check, timing

# The job that comes first: what calibration knows so far.
KNOWN = "known"


def run(name: str) -> dict[str, Any]:
    """Runs a job; returns the seconds it measured, and why there was nothing to do."""
    kind, _, rest = name.partition("/")
    if kind == KNOWN:
        known = json.loads(rest)
        kernels.allow_tensor_kernels(known["tensor_units"])
        kernels.reject_kernels(known["rejected"])
        check.programs.proven = set(known["proven"])
        return {}
    try:
        if kind in timing.TIMINGS:
            return {"seconds": timing.TIMINGS[kind](*rest.split("/"))}
        check.programs.begin()
        check.CHECKS[kind](*rest.split("/"))
        check.programs.end()
    except check.Unsupported as reason:
        return {"unsupported": str(reason)}
    except Exception:
        # Later jobs must not run these kernels, whose faults would look like those of others.
        kernels.reject_kernels({*kernels.rejected, *(child_jobs.announced() or ())})
        raise
    return {}


if __name__ == "__main__":
    child_jobs.serve(run, sys.argv[1:])
