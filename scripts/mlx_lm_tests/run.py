"""Runs mlx-lm's own tests without and with ``import mlx_paged``, and prints the differences.

    make test-mlx-lm

Runs all tests of the installed version's source distribution, which are downloaded to
``.mlx-lm-tests`` on first use and never become part of this repository. Stand-ins replace hub
models, so tests that expect a certain model's words fail either way. There are two stand-ins: the
embedded model, a Llama, whose class makes its own caches, and the same weights as a Qwen 2, whose
class leaves that to mlx-lm (`max_kv_size` has an effect there).

Exits with status 1 if a test passes without the import and fails with it.
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
from typing import Any

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent.parent / ".mlx-lm-tests"
STAND_INS = ("llama", "qwen2")
FILE_LIMIT = 1800  # seconds


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test; for one that did not pass, the reason."""

    status: str  # "pass", "fail" or "skip"
    reason: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="for example: generate server; default: all")
    parser.add_argument("-k", default="", help="only tests that match, as pytest's -k")
    parser.add_argument("--stand-in", choices=STAND_INS, help="default: one after the other")
    options = parser.parse_args()
    if find_spec("requests") is None:
        sys.exit("mlx-lm's tests need requests: pip install requests")
    tests = fetch_tests()
    paths = [p for p in sorted(tests.glob("*.py")) if p.stem != "__init__"]
    if options.files:
        paths = [p for p in paths if p.stem.removeprefix("test_") in options.files]
    runs: dict[str, dict[str, Outcome]] = {"without": {}, "with": {}}
    for stand_in in STAND_INS if options.stand_in is None else (options.stand_in,):
        model = prepare_model(stand_in)
        for path in paths:
            if stand_in != STAND_INS[0] and options.stand_in is None and not uses_hub(path):
                continue
            for name, disabled in (("without", "1"), ("with", "0")):
                print(f"--- {path.stem}, {stand_in}, {name} the import", flush=True)
                outcomes = run(path, options.k, model, disabled)
                runs[name].update({f"[{stand_in}] {k}": v for k, v in outcomes.items()})
    sys.exit(report(runs["without"], runs["with"]))


def uses_hub(path: Path) -> bool:
    """True if a test file loads hub models."""
    return "mlx-community/" in path.read_text()


def fetch_tests() -> Path:
    """Folder with the installed mlx-lm's tests."""
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


def prepare_model(stand_in: str) -> Path:
    """The embedded model in float32: with 8 bits, as stored, MLX's CPU backend takes minutes."""
    target = FOLDER / stand_in
    if (target / "config.json").is_file():
        return target
    os.environ["MLX_PAGED_DISABLE"] = "1"
    from mlx_lm.utils import save_config, save_model

    import mlx_paged

    loaded = mlx_paged.load(dtype="float32")
    config = {k: v for k, v in loaded.config.items() if not k.startswith("quantization")}
    target.mkdir(parents=True, exist_ok=True)
    model = loaded.model
    if stand_in == "qwen2":
        model, config = as_qwen2(model, config)
    save_model(target, model)
    loaded.tokenizer.save_pretrained(target)
    save_config(config, target / "config.json")  # last, because it marks the folder as complete
    return target


def as_qwen2(model: Any, config: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The same function as a Qwen 2: the Llama's weights, with biases of 0."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    config = {**config, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    model_class, args_class = _get_classes(config=config)
    twin = model_class(args_class.from_dict(config))
    assert not hasattr(twin, "make_cache")
    biases = [(k, mx.zeros_like(v)) for k, v in tree_flatten(twin.parameters()) if "bias" in k]
    twin.load_weights([*tree_flatten(model.parameters()), *biases])
    return twin, config


def run(path: Path, matching: str, model: Path, disabled: str) -> dict[str, Outcome]:
    """Runs a test file in its own process; returns outcomes by test."""
    tests = path.parent
    results = FOLDER / "results.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "plugin", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, "--rootdir", str(tests), f"--junitxml={results}", "--tb=line"]
    command += ["-k", matching, str(path)]
    env = {
        **os.environ,
        "MLX_PAGED_DISABLE": disabled,
        "MLX_LM_TESTS_MODEL": str(model),
        "HF_HUB_CACHE": str(FOLDER / "hub"),
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    results.unlink(missing_ok=True)
    (FOLDER / "hub").mkdir(exist_ok=True)
    try:
        status = subprocess.run(command, cwd=tests, env=env, check=False, timeout=FILE_LIMIT)
    except subprocess.TimeoutExpired:
        return {path.stem: Outcome("fail", f"did not end within {FILE_LIMIT} s")}
    if not results.is_file():
        return {path.stem: Outcome("fail", f"no results, exit status {status.returncode}")}
    outcomes = {
        f"{path.stem}.{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}": (
            outcome_of(case)
        )
        for case in ElementTree.parse(results).iter("testcase")
    }
    if not outcomes and not matching:
        outcomes[path.stem] = Outcome("fail", "no tests")
    return outcomes


def outcome_of(case: ElementTree.Element) -> Outcome:
    """The outcome of a test in JUnit XML."""
    for tag, status in (("failure", "fail"), ("error", "fail"), ("skipped", "skip")):
        found = case.find(tag)
        if found is not None:
            message = found.get("message") or found.text or ""
            lines = message.strip().splitlines() or [""]
            return Outcome(status, lines[0][:110])
    return Outcome("pass")


def report(without: dict[str, Outcome], with_: dict[str, Outcome]) -> int:
    """Prints every test that does not pass both times; returns the exit status."""
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
