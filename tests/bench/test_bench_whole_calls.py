"""`bench/whole_calls.py` runs: every kind of part, on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.interpreters import python_path

BENCH = Path(__file__).resolve().parents[2] / "bench"
# The smallest workload of each kind.
RUN = """
import json, whole_calls
options = ["--tiny", "--no-save", "--workload", "1 x 1024", "8 x 1024", "1 x 8192", "--only"]
parts = whole_calls.main([*options, "decode", "prefill", "ttft", "busy"])
nothing = whole_calls.main(["--tiny", "--no-save", "--seconds", "-1"])
whole_calls.CONFIGS["tiny, 4 bits"] = whole_calls.CONFIGS["tiny"]
quantized = whole_calls.random_model("tiny, 4 bits")
print(json.dumps([parts, nothing, type(quantized.model.layers[0].mlp.up_proj).__name__]))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="`busy` pins threads: Linux only")
def test_every_kind_of_part_gives_its_figures() -> None:
    run = subprocess.run(
        [sys.executable, "-c", RUN],
        env={**os.environ, "PYTHONPATH": python_path(BENCH)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert "left out, the time is over" in run.stdout
    parts, nothing, layer = json.loads(run.stdout.splitlines()[-1])
    assert nothing == {}
    assert layer == "QuantizedLinear"
    rows = {name: {r["workload"]: r for r in part["results"]} for name, part in parts.items()}
    assert "error" not in json.dumps(rows)
    decode = rows["decode"]
    assert set(decode) == {"1 x 1024", "8 x 1024"}
    for row in decode.values():
        ours = row["mlx_paged"]
        assert len(ours["all_ms"]) == 3 and ours["step_ms"] in ours["all_ms"]
        assert 0 < ours["host_ms"]["schedule"] < ours["host_ms"]["all"]
        assert ours["pool_copies"] == 0
        assert {"step_ms", "peak_gb"} <= row["mlx-lm"].keys()
    [prefill] = rows["prefill"].values()
    assert prefill["mlx_paged"]["tokens_per_s"] > 0 < prefill["mlx-lm"]["tokens_per_s"]
    assert {"cold_ms", "cached_ms", "share"} == rows["ttft"]["4096 cached + 64"]["mlx_paged"].keys()
    assert {"alone_ms", "with_neighbor_ms", "growth"} == rows["busy"]["8 x 1024"][
        "mlx_paged"
    ].keys()
