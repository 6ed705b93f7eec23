"""The Homebrew formula: its pins are the package's, and Ruby runs it (tests/support/homebrew.rb).

Homebrew itself runs on a Mac. Here a small program has the names of its formula language, so that
`install` and `test do` run with recorded commands, and unknown names are errors.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import write_formula
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from write_formula import FormulaError

import mlx_paged

ROOT = Path(__file__).resolve().parent.parent
TAG = f"v{mlx_paged.__version__}"
SOURCE = write_formula.FORMULA.read_text()
RESOURCES = re.findall(
    r'resource "([\w-]+)" do\n    url "([^"]+)", using: :nounzip\n    sha256 "([0-9a-f]{64})"',
    SOURCE,
)
needs_ruby = pytest.mark.skipif(
    shutil.which("ruby") is None, reason="ruby is not installed: apt install ruby"
)
MAC = {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "arm64"}
MAC |= {"python_version": write_formula.PYTHON, "extra": ""}


# --- Pins -----------------------------------------------------------------------------------------


def test_the_resources_are_what_the_package_requires() -> None:
    assert len(RESOURCES) == SOURCE.count('  resource "')
    versions = {}
    for name, url, _ in RESOURCES:
        project, version, _, _ = parse_wheel_filename(url.rpartition("/")[2])
        assert project == canonicalize_name(name)
        versions[project] = version
    assert len(versions) == len(RESOURCES)
    for line in [*write_formula.requirements(), f"mlx-metal=={versions['mlx']}"]:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(MAC):
            name = canonicalize_name(requirement.name)
            assert name in versions, f"{line}: run python scripts/write_formula.py resources"
            assert requirement.specifier.contains(versions[name], prereleases=True), line


def test_every_resource_runs_on_the_formulas_macs() -> None:
    assert f'depends_on "python@{write_formula.PYTHON}"' in SOURCE
    assert "depends_on macos: :sonoma" in SOURCE and write_formula.MACOS == 14
    for _, url, _ in RESOURCES:
        assert url.startswith("https://files.pythonhosted.org/packages/")
        assert write_formula.rank(url.rpartition("/")[2]) is not None, url


@pytest.mark.parametrize(
    ("wheel", "fits"),
    [
        ("a-1-py3-none-any.whl", True),
        ("a-1-py2.py3-none-any.whl", True),
        ("a-1-cp313-cp313-macosx_14_0_arm64.whl", True),
        ("a-1-cp39-abi3-macosx_10_12_universal2.whl", True),
        ("a-1-py3-none-macosx_14_0_arm64.whl", True),
        ("a-1-cp313-cp313-macosx_15_0_arm64.whl", False),
        ("a-1-cp312-cp312-macosx_14_0_arm64.whl", False),
        ("a-1-cp313-cp313t-macosx_14_0_arm64.whl", False),
        ("a-1-cp314-abi3-macosx_14_0_arm64.whl", False),
        ("a-1-cp313-cp313-macosx_14_0_x86_64.whl", False),
        ("a-1-cp313-cp313-manylinux_2_28_aarch64.whl", False),
        ("a-1-py2-none-any.whl", False),
    ],
)
def test_which_wheels_fit(wheel: str, fits: bool) -> None:
    assert (write_formula.rank(wheel) is not None) == fits


def package(*names: str) -> dict[str, Any]:
    wheels = [{"url": f"https://x/{name}", "hashes": {"sha256": name[:3]}} for name in names]
    return {"name": "a", "version": "1", "wheels": wheels}


def test_the_newest_macos_that_fits_is_taken() -> None:
    names = [f"a-1-cp313-cp313-macosx_{macos}_0_arm64.whl" for macos in (11, 14, 15)]
    url, _ = write_formula.wheel_of(package(*names))
    assert url.endswith(names[1])
    with pytest.raises(FormulaError, match="a 1 has no wheel for these Macs"):
        write_formula.wheel_of(package(names[2]))


def test_resources_are_replaced_and_nothing_else() -> None:
    written = write_formula.with_resources(SOURCE, [package("a-1-py3-none-any.whl")])
    assert 'resource "a" do' in written and 'resource "mlx" do' not in written
    assert written.partition(write_formula.BEGIN)[0] == SOURCE.partition(write_formula.BEGIN)[0]
    assert written.partition(write_formula.END)[2] == SOURCE.partition(write_formula.END)[2]
    with pytest.raises(FormulaError, match="resources: begin"):
        write_formula.with_resources("class A\nend\n", [])


# --- Releases -------------------------------------------------------------------------------------


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    folder = tmp_path / "dist"
    folder.mkdir()
    name = f"mlx_paged-{mlx_paged.__version__}-cp313-cp313-macosx_14_0_arm64.whl"
    (folder / name).write_bytes(b"a wheel")
    return folder


def test_a_release_has_the_wheels_version_url_and_checksum(dist: Path) -> None:
    formula = write_formula.released(SOURCE, TAG, dist)
    (wheel,) = dist.iterdir()
    assert f'version "{mlx_paged.__version__}"' in formula
    assert f'  sha256 "{hashlib.sha256(b"a wheel").hexdigest()}"' in formula
    digest = hashlib.blake2b(b"a wheel", digest_size=32).hexdigest()
    assert f"packages/{digest[:2]}/{digest[2:4]}/{digest[4:]}/{wheel.name}" in formula
    assert "0.0.0" not in formula and "0" * 64 not in formula and "placeholder" not in formula
    assert formula.startswith("class MlxPaged < Formula")


def test_what_is_no_release_is_refused(dist: Path, tmp_path: Path) -> None:
    with pytest.raises(FormulaError, match="the tag must be v"):
        write_formula.released(SOURCE, "v9.9.9", dist)
    with pytest.raises(FormulaError, match="has no mlx_paged-"):
        write_formula.released(SOURCE, TAG, tmp_path)
    filled = write_formula.released(SOURCE, TAG, dist)
    with pytest.raises(FormulaError, match="but has 0"):
        write_formula.released(filled, TAG, dist)


def test_the_workflow_keeps_the_formula_of_a_release() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text())
    steps = workflow["jobs"]["publish"]["steps"]
    runs = [step.get("run", step.get("uses", "")) for step in steps]
    wanted = ["check_release.py", "write_formula.py release", "upload-artifact", "pypi-publish"]
    places = [next(i for i, run in enumerate(runs) if name in run) for name in wanted]
    assert places == sorted(places)
    output = runs[places[1]].rpartition("--output ")[2]
    assert steps[places[2]]["with"]["path"] == output and not output.startswith("dist/")


# --- Ruby -----------------------------------------------------------------------------------------


@needs_ruby
def test_the_formula_is_ruby() -> None:
    run = subprocess.run(
        ["ruby", "-wc", str(write_formula.FORMULA)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0 and not run.stderr, run.stderr


def run_formula(source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    (folder / "mlx-paged.rb").write_text(source)
    program = folder / "program"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mlx_paged.cli.main "$@"\n')
    program.chmod(0o755)
    command = ["ruby", "-w", str(ROOT / "tests/support/homebrew.rb")]
    command += [str(folder / "mlx-paged.rb"), str(folder / "brew"), str(program)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@needs_ruby
def test_it_installs_every_wheel_serves_and_tests_itself(dist: Path, tmp_path: Path) -> None:
    run = run_formula(write_formula.released(SOURCE, TAG, dist), tmp_path / "formula")
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout.splitlines()[-1])
    prefix = tmp_path / "formula/brew"

    (wheel,) = dist.iterdir()
    wanted = {wheel.name, *(url.rpartition("/")[2] for _, url, _ in RESOURCES)}
    created, pip = told["calls"]
    assert created == ["virtualenv_create", f"{prefix}/libexec", "python3.13"]
    assert pip[1:5] == ["python3.13", "-m", "pip", f"--python={prefix}/libexec/bin/python"]
    assert {"--no-index", "--no-deps"} < set(pip)
    files = [Path(word) for word in pip if word.endswith(".whl")]
    assert {file.name for file in files} == wanted and all(file.is_file() for file in files)
    assert told["installed"] == {"mlx-paged": f"{prefix}/libexec/bin/mlx-paged"}
    assert all(artifact["using"] == "nounzip" for artifact in [told["stable"], *told["resources"]])

    config = prefix / "etc/mlx-paged.yaml"
    assert told["service"]["run"] == [f"{prefix}/bin/mlx-paged", "serve", "--config", str(config)]
    assert str(config) in told["caveats"]
    assert yaml.safe_load(config.read_text()) is None, "the embedded model, until it is edited"
    examples = yaml.safe_load("\n".join(re.findall(r"^# (\w+: \S+)$", config.read_text(), re.M)))
    assert set(examples) == {"model", "port"}


@pytest.mark.one_in(4)
@needs_ruby
@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("preserve_rpath", "preserve_rpaths", "preserve_rpaths"),
        ("generate '", "generates '", "generates"),
        ('assert_match "def "', 'assert_match "defun "', "has no defun"),
        ("keep_alive", "keep_living", "keep_living"),
    ],
)
def test_faults_of_the_formula_are_found(
    dist: Path, tmp_path: Path, old: str, new: str, told: str
) -> None:
    source = write_formula.released(SOURCE, TAG, dist)
    assert old in source
    run = run_formula(source.replace(old, new), tmp_path / "formula")
    assert run.returncode != 0 and told in run.stderr
