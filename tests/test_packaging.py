"""The published package: one version, consistent pins, licenses, and releases only from a tag."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import check_release
import pytest
import yaml

import mlx_paged

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOW = ROOT / ".github/workflows/wheels.yml"
CHANGELOG = f"# Changelog\n\n## Unreleased\n\n## {mlx_paged.__version__} - 2026-01-02\n"


def test_the_version_stands_in_one_place() -> None:
    assert "version" not in PYPROJECT["project"]
    assert PYPROJECT["tool"]["scikit-build"]["metadata"]["version"]["input"] == (
        "mlx_paged/__init__.py"
    )
    assert check_release.version() == mlx_paged.__version__
    literal = re.compile(rf"""["']v?{re.escape(mlx_paged.__version__)}["']""")
    others = [
        str(file.relative_to(ROOT))
        for folder in ("mlx_paged", "csrc", "scripts")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".cpp", ".h", ".js", ".sh") and literal.search(file.read_text())
    ]
    assert others == ["mlx_paged/__init__.py"]


def test_every_pin_of_mlx_and_nanobind_is_the_same() -> None:
    project = PYPROJECT["project"]
    requirements = [
        *PYPROJECT["build-system"]["requires"],
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    mlx = [r for r in requirements if re.match(r"mlx[\[=<>!~]", r)]
    assert len(mlx) == 6 and len({r.partition(";")[0].partition("==")[2] for r in mlx}) == 1
    nanobind = [r.partition("  #")[0] for r in requirements if r.startswith("nanobind")]
    assert len(nanobind) == 2 and len(set(nanobind)) == 1


def test_every_licence_in_the_package_is_published() -> None:
    """Also applies to libraries that are copied into the package."""
    patterns = PYPROJECT["project"]["license-files"]
    published = {file for pattern in patterns for file in ROOT.glob(pattern)}
    vendored = ROOT / "mlx_paged/server/web/vendor"
    licences = [
        file
        for file in vendored.rglob("*")
        if file.is_file() and ("licen" in file.name.lower() or file.parent.name == "licenses")
    ]
    assert ROOT / "LICENSE" in published
    assert set(licences) <= published, "license-files of pyproject.toml lacks a pattern for them"


def test_the_stub_in_the_repository_is_the_extensions() -> None:
    if find_spec("nanobind") is None:
        pytest.skip("nanobind, which writes stubs, is not installed")
    import write_stub

    assert write_stub.STUB.read_text() == write_stub.stub(), "run python scripts/write_stub.py"


def test_a_build_does_not_load_mlx() -> None:
    """The extension cannot be loaded where wheels are built or cross-compiled."""
    cmake = (ROOT / "CMakeLists.txt").read_text()
    for loads in ("import mlx", "-m mlx", "nanobind_add_stub"):
        assert loads not in cmake


# --- Releases -------------------------------------------------------------------------------------


def release_files() -> list[str]:
    stem = f"mlx_paged-{mlx_paged.__version__}"
    return [
        f"{stem}.tar.gz",
        *(
            f"{stem}-{python}-{python}-{tags}.whl"
            for python in ("cp311", "cp312", "cp313", "cp314")
            for tags in (
                "manylinux_2_27_x86_64.manylinux_2_28_x86_64",
                "manylinux_2_28_aarch64",
                "macosx_14_0_arm64",
            )
        ),
    ]


def test_a_whole_release_is_accepted() -> None:
    files = release_files()
    assert check_release.problems(f"v{mlx_paged.__version__}", files, CHANGELOG) == []


@pytest.mark.parametrize(
    ("tag", "remove", "add", "changelog", "told"),
    [
        ("v9.9.9", None, None, CHANGELOG, "the tag must be v"),
        (None, None, None, "## Unreleased\n", "CHANGELOG.md must have a section"),
        (None, "cp314-macosx", None, CHANGELOG, "cp314-macosx_14_0_arm64.whl but there are none"),
        (None, ".tar.gz", None, CHANGELOG, ".tar.gz but there are none"),
        (None, None, "mlx_paged-9.9.9.tar.gz", CHANGELOG, "mlx_paged-9.9.9.tar.gz is not a file"),
    ],
)
def test_anything_else_is_not_published(tag, remove, add, changelog, told) -> None:
    files = [name for name in release_files() if remove is None or remove not in name]
    files += [add] if add else []
    (found,) = check_release.problems(tag or f"v{mlx_paged.__version__}", files, changelog)
    assert told in found


def test_only_a_tag_publishes_and_without_a_token() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text())
    publish = workflow["jobs"]["publish"]
    assert publish["if"] == "github.event_name == 'push' && startsWith(github.ref, 'refs/tags/v')"
    assert workflow[True]["push"] == {"tags": ["v*"]}  # YAML reads the key `on` as true.
    assert set(publish["needs"]) == set(workflow["jobs"]) - {"publish"}
    assert publish["permissions"] == {"id-token": "write"}
    uses = [step["uses"] for step in publish["steps"] if "uses" in step]
    assert any(use.startswith("pypa/gh-action-pypi-publish@") for use in uses)
    assert "secrets." not in WORKFLOW.read_text()
    for file in WORKFLOW.parent.glob("*.yml"):
        assert file == WORKFLOW or "pypi-publish" not in file.read_text()


def test_wheels_are_built_and_checked_for_every_python_that_is_promised() -> None:
    prefix = "Programming Language :: Python :: 3."
    classifiers = PYPROJECT["project"]["classifiers"]
    promised = [c.removeprefix(prefix) for c in classifiers if c.startswith(prefix)]
    assert promised == ["11", "12", "13", "14"]
    build = PYPROJECT["tool"]["cibuildwheel"]["build"]
    assert build == [f"cp3{minor}-*" for minor in promised]
    checked = yaml.safe_load(WORKFLOW.read_text())["jobs"]["linux-check"]["strategy"]["matrix"]
    assert checked["python"] == [f"3.{minor}" for minor in promised]
    assert list(check_release.PYTHONS) == [f"cp3{minor}" for minor in promised]


def test_the_list_of_shipped_files_is_of_files() -> None:
    tree = ast.parse((ROOT / "scripts/check_install.py").read_text())
    values = {
        node.targets[0].id: ast.literal_eval(node.value)  # type: ignore[attr-defined]
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
    }
    for name in values["SHIPPED"]:
        source = ROOT / name if name.startswith("metal/") else ROOT / "mlx_paged" / name
        assert source.is_file(), name
