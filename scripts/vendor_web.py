"""Writes mlx_paged/server/web/vendor: the libraries of the chat page, at pinned versions.

    python scripts/vendor_web.py

Packages come from npm's registry and must have the integrity that stands here. Each keeps its
licence; manifest.json says what came from where. Files are as published, under other names.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shutil
import tarfile
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

VENDOR = Path(__file__).parents[1] / "mlx_paged/server/web/vendor"
REGISTRY = "https://registry.npmjs.org"

# Beside the 36 languages that highlight.js counts as common.
LANGUAGES = (
    "cmake", "dart", "dockerfile", "elixir", "haskell", "julia", "latex", "nginx", "powershell",
    "protobuf", "scala",
)  # fmt: skip


class Package(NamedTuple):
    """A package of npm.

    Attributes:
        integrity: "sha512-<base64>", as package-lock.json has it.
        files: Its path of each file to its path in the vendor directory; "/" at the end: all files
            below that end with ".woff2".
        part_of: The package whose bundle contains it; only its licence is kept then.
    """

    name: str
    version: str
    license: str
    integrity: str
    files: dict[str, str]
    part_of: str | None = None


PACKAGES = (
    Package(
        "markdown-it", "15.0.3", "MIT",
        "sha512-+Az7Ojz3iRGu8KYMvJ6xVhvrxP3eE+vEtJX75Ow88XBpcQNV/0lGX5ZynIIBftREo4DC2jsveAMDaeltmm8QvQ==",
        {"dist/browser/markdown-it.esm.min.mjs": "markdown-it.js"},
    ),
    Package(
        "entities", "8.1.0", "BSD-2-Clause",
        "sha512-kxL7msIffSuh9aaFAMD7rxAIuTRMAHMeBtgHW2yUdWw732ZNh4MehkF2gdjvtdmikkaIP9bFDDJOPlsvm7avrA==",
        {}, "markdown-it",
    ),
    Package(
        "linkify-it", "6.1.0", "MIT",
        "sha512-wJ/TwpSDTLepCrQoYWYIExIKg5Zchex2Nn5yk2mFnB+6PtdkHtyLx742md9csRjjOnGkKIS/RrbY7l8D6gT9Vw==",
        {}, "markdown-it",
    ),
    Package(
        "mdurl", "2.1.0", "MIT",
        "sha512-1+HBaOx0zi/dQWht8rNv9MYf9qqpqL/kxI0hXImU6Y547zM6Sni8BQibt7ifgMcYtQg41ao3Ivd6cnSM86inpg==",
        {}, "markdown-it",
    ),
    Package(
        "punycode.js", "2.3.1", "MIT",
        "sha512-uxFIHU0YlHYhDQtV4R9J6a52SLx28BCjT+4ieh7IGbgwVJWO+km431c4yRlREUAsAmt/uMjQUyQHNEPf0M39CA==",
        {}, "markdown-it",
    ),
    Package(
        "uc.micro", "3.0.0", "MIT",
        "sha512-U3PppEkleoTnIfi8BozMx3yju3qc/L6SwqWo2Sw+54PX+PX0q9I+r1Um5HCmqD7n9VDX5/v3vQH/AjA6deDdtw==",
        {}, "markdown-it",
    ),
    Package(
        "@highlightjs/cdn-assets", "11.12.0", "BSD-3-Clause",
        "sha512-KvOKXODaiFmId9xaq3xc5xCL66wVLUuOngDbO9B/kewbFTqdGbn2nJxNhN3H5R1cgDTVj6R8vH0zgiNDEGjpDw==",
        {"es/highlight.min.js": "highlight/highlight.js"}
        | {f"es/languages/{name}.min.js": f"highlight/{name}.js" for name in LANGUAGES},
    ),
    Package(
        "dompurify", "3.4.18", "MPL-2.0 OR Apache-2.0",
        "sha512-ofe3wI/uNm68HInABYFJYqQxRw1EaKAjNdrFVKqjUY+UZurvNd2L/HuQe097s/4RivWiZyP6tT7aoT8atjfhwg==",
        {"dist/purify.es.mjs": "dompurify.js"},
    ),
    Package(
        "katex", "0.19.1", "MIT",
        "sha512-jG8uKntjSEcm2EpQOh0XturpPuuC9r3Sq5HLHdsFdWZT27E672SF19QEi+of0/YeOy15lDgRhKvr5614uRrEfA==",
        {
            "dist/katex.min.js": "katex/katex.js",
            "dist/katex.min.css": "katex/katex.css",
            "dist/fonts/": "katex/fonts/",
        },
    ),
    Package(
        "idb", "8.0.4", "ISC",
        "sha512-jd0ITCrN+Zah4J7R/Z2jnR3W7A4BXDAjmo62MwWuSjxCiueUAf7X5rbodEdidWzeknwXHmLpdZkoiiCppNi30Q==",
        {"build/index.js": "idb.js"},
    ),
)  # fmt: skip


def main() -> None:
    """Replaces the vendor directory."""
    written: dict[str, bytes] = {}
    entries = []
    for package in PACKAGES:
        files = chosen(package, unpacked(package))
        written |= files
        entries.append(entry(package, files))
    shutil.rmtree(VENDOR, ignore_errors=True)
    for name, content in written.items():
        path = VENDOR / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (VENDOR / "manifest.json").write_text(json.dumps({"packages": entries}, indent=1) + "\n")
    print(f"{len(written)} files, {sum(map(len, written.values())) / 1024:.0f} KiB")


def unpacked(package: Package) -> dict[str, bytes]:
    """The files of a package by their paths in it.

    Raises:
        SystemExit: what the registry sent is not what is pinned here.
    """
    base = package.name.rpartition("/")[2]
    url = f"{REGISTRY}/{package.name}/-/{base}-{package.version}.tgz"
    with urllib.request.urlopen(url, timeout=60) as answer:
        archive = answer.read()
    digest = "sha512-" + base64.b64encode(hashlib.sha512(archive).digest()).decode()
    if digest != package.integrity:
        raise SystemExit(f"{url} must have integrity {package.integrity} but has {digest}")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = [member for member in tar.getmembers() if member.isfile()]
        return {m.name.partition("/")[2]: tar.extractfile(m).read() for m in members}  # type: ignore[union-attr]


def chosen(package: Package, contents: dict[str, bytes]) -> dict[str, bytes]:
    """The files that are kept, by their new paths, with the licence."""
    kept = {}
    for source, target in package.files.items():
        if not source.endswith("/"):
            kept[target] = contents[source]
            continue
        for name, content in contents.items():
            if name.startswith(source) and name.endswith(".woff2"):
                kept[target + name.removeprefix(source)] = content
    # (The MPL is dompurify's other licence; Apache's is enough.)
    [licence] = {"LICENSE", "LICENSE.txt", "LICENSE-MIT.txt"} & contents.keys()
    kept[f"licenses/{package.name.lstrip('@').replace('/', '-')}.txt"] = contents[licence]
    return kept


def entry(package: Package, files: dict[str, bytes]) -> dict[str, Any]:
    """What the manifest says of a package."""
    return {
        "name": package.name,
        "version": package.version,
        "license": package.license,
        "integrity": package.integrity,
        **({} if package.part_of is None else {"part_of": package.part_of}),
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }


if __name__ == "__main__":
    main()
