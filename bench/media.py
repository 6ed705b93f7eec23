"""Images and videos against mlx-vlm, for the figures of docs/benchmarks.md and docs/media.md.

python bench/media.py                 # the CPU models, some minutes each
python bench/media.py --only embedded
python bench/media.py --gpu           # Qwen2-VL-2B's shape in bfloat16, about two minutes

Each model is a run of `mlx-paged bench media`. The models are embedded or have random weights, so
nothing is downloaded. Results go to bench/results/media-cpu.json or media-gpu.json, and leave other
models' entries unchanged.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import RESULTS, save

CPU = {
    "embedded": ["--image-size", "128,512", "--frames", "2,8", "--frame-size", "128"],
    "smolvlm-256m-10-layers": [
        *("--shape", "smolvlm-256m", "--num-layers", "10", "--image-size", "512"),
        *("--frames", "2", "--frame-size", "512", "--output-len", "16", "--num-iters", "2"),
    ],
    "qwen2-vl-2b-4-layers": [
        *("--shape", "qwen2-vl-2b", "--num-layers", "4", "--image-size", "224,448"),
        *("--frames", "2,8", "--output-len", "16", "--num-iters", "2"),
    ],
}
GPU = {
    "qwen2-vl-2b": [
        *("--shape", "qwen2-vl-2b", "--image-size", "448,896", "--frames", "8"),
        *("--output-len", "16", "--num-iters", "2"),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="a large model, on a GPU")
    parser.add_argument("--only", nargs="+", choices=[*CPU, *GPU], metavar="MODEL")
    parser.add_argument("--part", nargs="+", choices=["tables", "figures"], help="the rest is kept")
    parser.add_argument("--no-save", dest="save", action="store_false")
    parser.add_argument("more", nargs="*", help="options of mlx-paged bench media, after --")
    options = parser.parse_args()
    models = GPU if options.gpu else CPU
    name = "media-gpu" if options.gpu else "media-cpu"
    path = RESULTS / f"{name}.json"
    parts = ["--figures"] if "figures" in (options.part or ["figures"]) else []
    parts += [] if "tables" in (options.part or ["tables"]) else ["--no-tables"]
    runs = json.loads(path.read_text())["runs"] if path.exists() else {}
    for model in options.only or models:
        start = time.perf_counter()
        print(f"== {model}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "media.json"
            subprocess.run(
                [
                    *(sys.executable, "-m", "mlx_paged.cli.main", "bench", "media"),
                    *(*models[model], *options.more, *parts, "--output-json", str(file)),
                ],
                check=True,
            )
            runs[model] = runs.get(model, {}) | json.loads(file.read_text())
        print(f"{time.perf_counter() - start:.0f} s", flush=True)
        if options.save:
            save(name, {"runs": runs})


if __name__ == "__main__":
    main()
