"""Checks a release before it is published: tag, version, change log and files.

    python scripts/check_release.py v1.2.3 FOLDER

Prints the reason and exits with status 1 if the tag is not the version in mlx_paged/__init__.py,
CHANGELOG.md has no section for it, or FOLDER lacks the source distribution or a wheel for any
Python and platform.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("cp311", "cp312", "cp313", "cp314")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_28_aarch64", "macosx_14_0_arm64")


def version() -> str:
    source = (ROOT / "mlx_paged/__init__.py").read_text()
    return re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)[0]


def problems(tag: str, names: list[str], changelog: str) -> list[str]:
    """Returns one line for each problem with these files as the release `tag`."""
    wanted = version()
    found = []
    if tag != f"v{wanted}":
        found.append(
            f"the tag must be v{wanted}, the version of mlx_paged/__init__.py, but is {tag}"
        )
    if not re.search(rf"^## {re.escape(wanted)} - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        found.append(f"CHANGELOG.md must have a section '## {wanted} - DATE'")
    left = set(names)
    expected = [(f"mlx_paged-{wanted}.tar.gz", rf"mlx_paged-{re.escape(wanted)}\.tar\.gz")]
    for python in PYTHONS:
        for platform in PLATFORMS:
            name = f"mlx_paged-{wanted}-{python}-{python}-{platform}.whl"
            # auditwheel lists all platform tags that apply: the wanted one may be among several.
            pattern = (
                rf"mlx_paged-{re.escape(wanted)}-{python}-{python}-(.+\.)?{platform}(\..+)?\.whl"
            )
            expected.append((name, pattern))
    for name, pattern in expected:
        matching = {file for file in left if re.fullmatch(pattern, file)}
        if len(matching) != 1:
            found.append(f"there must be one {name} but there are {sorted(matching) or 'none'}")
        left -= matching
    found += [f"{name} is not a file of this release" for name in sorted(left)]
    return found


def main() -> None:
    tag, folder = sys.argv[1:]
    names = [file.name for file in Path(folder).iterdir()]
    if found := problems(tag, names, (ROOT / "CHANGELOG.md").read_text()):
        sys.exit("\n".join(found))
    print(f"{tag}: {len(names)} files")


if __name__ == "__main__":
    main()
