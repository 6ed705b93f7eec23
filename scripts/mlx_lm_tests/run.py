"""Runs mlx-lm's own tests without and with ``import mlx_paged``, and prints the differences.

    make test-mlx-lm

The tests are those of the installed version's source distribution. They are fetched into
``.mlx-lm-tests`` when first needed, and never become part of this repository. Models of the hub are
replaced by the embedded one, so tests that expect a certain model's words fail either way.

Exit status 1: a test that passes without the import does not pass with it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent.parent / ".mlx-lm-tests"
FILES = ("generate", "prompt_cache", "models", "server", "sample_utils", "chat")


@dataclass(frozen=True)
class Outcome:
    """How a test ended, and why, where it did not pass."""

    status: str  # "pass", "fail" or "skip"
    reason: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", default=FILES, help="for example: generate server")
    parser.add_argument("-k", default="", help="only tests that match, as pytest's -k")
    options = parser.parse_args()
    if find_spec("requests") is None:
        sys.exit("mlx-lm's tests need requests: pip install requests")
    tests = fetch_tests()
    model = prepare_model()
    runs = {
        name: run(tests, options.files, options.k, model, name, disabled)
        for name, disabled in (("without", "1"), ("with", "0"))
    }
    sys.exit(report(runs["without"], runs["with"]))


def fetch_tests() -> Path:
    """The folder of the tests of the installed mlx-lm."""
    name = f"mlx_lm-{version('mlx-lm')}"
    tests = FOLDER / name / "tests"
    if not tests.is_dir():
        FOLDER.mkdir(exist_ok=True)
        requirement = f"mlx-lm=={version('mlx-lm')}"
        command = ["pip", "download", "--quiet", "--no-deps", "--no-binary", "mlx-lm", requirement]
        subprocess.run([sys.executable, "-m", *command, "--dest", str(FOLDER)], check=True)
        with tarfile.open(FOLDER / f"{name}.tar.gz") as archive:
            archive.extractall(FOLDER, filter="data")
    return tests


def prepare_model() -> Path:
    """The embedded model in float32: in 8 bits, as stored, MLX's CPU backend takes minutes."""
    target = FOLDER / "model"
    if (target / "config.json").is_file():
        return target
    os.environ["MLX_PAGED_DISABLE"] = "1"
    from mlx_lm.utils import save_config, save_model

    import mlx_paged

    loaded = mlx_paged.load(dtype="float32")
    config = {k: v for k, v in loaded.config.items() if not k.startswith("quantization")}
    target.mkdir(parents=True, exist_ok=True)
    save_model(target, loaded.model)
    loaded.tokenizer.save_pretrained(target)
    save_config(config, target / "config.json")  # last: it marks the folder as complete
    return target


def run(
    tests: Path, files: list[str], matching: str, model: Path, name: str, disabled: str
) -> dict[str, Outcome]:
    """Runs the tests in a process of their own; returns outcomes by test."""
    print(f"--- {name} the import", flush=True)
    results = FOLDER / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "plugin", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, "--rootdir", str(tests), f"--junitxml={results}", "--tb=line"]
    command += ["-k", matching, *(str(tests / f"test_{file}.py") for file in files)]
    env = {
        **os.environ,
        "MLX_PAGED_DISABLE": disabled,
        "MLX_LM_TESTS_MODEL": str(model),
        "HF_HUB_CACHE": str(FOLDER / "hub"),
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    results.unlink(missing_ok=True)
    (FOLDER / "hub").mkdir(exist_ok=True)
    subprocess.run(command, cwd=tests, env=env, check=False)
    if not results.is_file():
        sys.exit(f"pytest gave no results {name} the import")
    return {
        f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}": outcome_of(case)
        for case in ElementTree.parse(results).iter("testcase")
    }


def outcome_of(case: ElementTree.Element) -> Outcome:
    """The outcome of a test in junit's XML."""
    for tag, status in (("failure", "fail"), ("error", "fail"), ("skipped", "skip")):
        found = case.find(tag)
        if found is not None:
            message = found.get("message") or found.text or ""
            lines = message.strip().splitlines() or [""]
            return Outcome(status, lines[0][:110])
    return Outcome("pass")


def report(without: dict[str, Outcome], with_: dict[str, Outcome]) -> int:
    """Prints everything but what passes both times; returns the exit status."""
    missing = Outcome("absent")
    names = list(dict.fromkeys([*without, *with_]))
    pairs = {n: (without.get(n, missing), with_.get(n, missing)) for n in names}
    print("\n--- not passed")
    for name, (before, after) in pairs.items():
        if (before.status, after.status) != ("pass", "pass"):
            print(
                f"{before.status:>6} -> {after.status:<6} {name}: {after.reason or before.reason}"
            )
    lost = [n for n, (b, a) in pairs.items() if b.status == "pass" and a.status != "pass"]
    gained = [n for n, (b, a) in pairs.items() if b.status != "pass" and a.status == "pass"]
    print("\n--- together")
    for title, run_ in (("without", without), ("with", with_)):
        counts = [
            f"{sum(o.status == s for o in run_.values())} {s}" for s in ("pass", "fail", "skip")
        ]
        print(f"{title:>8} the import: {', '.join(counts)}")
    print(f"passed without and not with: {', '.join(lost) or 'none'}")
    print(f"passed with and not without: {', '.join(gained) or 'none'}")
    return 1 if lost else 0


if __name__ == "__main__":
    main()
