"""Writes mlx_paged/server/web/vendor: the chat page's libraries, at pinned versions.

    python scripts/vendor_web.py

Packages come from npm's registry and must match the integrity hashes in this file. Each keeps its
license; manifest.json lists the origin of every file. Files are unmodified but renamed.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shutil
import tarfile
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

VENDOR = Path(__file__).parents[1] / "mlx_paged/server/web/vendor"
REGISTRY = "https://registry.npmjs.org"

# In addition to the 36 languages in highlight.js's common set.
LANGUAGES = (
    "cmake", "dart", "dockerfile", "elixir", "haskell", "julia", "latex", "nginx", "powershell",
    "protobuf", "scala",
)  # fmt: skip


class Package(NamedTuple):
    """An npm package.

    Attributes:
        integrity: "sha512-<base64>", as in package-lock.json.
        files: Paths in the vendor directory, by path in the package; "/" at the end of a path
            means all files below it that end with ".woff2".
        part_of: The package whose bundle contains it; only its license is kept then.
    """

    name: str
    version: str
    license: str
    integrity: str
    files: dict[str, str]
    part_of: str | None = None


# Packages in mermaid's bundle, besides katex and dompurify: name, version, license, integrity.
# fastdom (MIT) has no license file; d3 stands for its modules, which have the same license.
IN_MERMAID = (
    ("@braintree/sanitize-url", "7.1.2", "MIT",
     "sha512-jigsZK+sMF/cuiB7sERuo9V7N9jx+dhmHHnQyDSVdpZwVutaBu7WvNYqMDLSgFgfB30n452TP3vjDAvFC973mA=="),
    ("@iconify/utils", "3.1.7", "MIT",
     "sha512-JZHlwdID+dy+lTgbYC8NEC4zeugqeYsc6jewvzb4c58kHauJn+X7rNwQjxz5p2qSjqaEeQoLkCIQ9v/H4PK0/w=="),
    ("@mermaid-js/parser", "1.2.1", "MIT",
     "sha512-n12NohV3mrUyUL2o93IgG/ifeW9FTyeJn3zDxkhwa8MJ9Fxg3HQMlA3RiGmD/3UnJvheztkjjQAjA2T4LmUcpw=="),
    ("@upsetjs/venn.js", "2.0.0", "MIT",
     "sha512-WbBhLrooyePuQ1VZxrJjtLvTc4NVfpOyKx0sKqioq9bX1C1m7Jgykkn8gLrtwumBioXIqam8DLxp88Adbue6Hw=="),
    ("cytoscape", "3.35.0", "MIT",
     "sha512-sMvBIXiGMnhkCaWz2R06FwF/27MNlS+Tqvi17foO9UhnUg3XGZccKjxsvEqQFAQYMSSZmN5SxYzUYlQ0DOJJ3g=="),
    ("cytoscape-cose-bilkent", "4.1.0", "MIT",
     "sha512-wgQlVIUJF13Quxiv5e1gstZ08rnZj2XaLHGoFMYXz7SkNfCDOOteKBE6SYRfA9WxxI/iBc3ajfDoc6hb/MRAHQ=="),
    ("cytoscape-fcose", "2.2.0", "MIT",
     "sha512-ki1/VuRIHFCzxWNrsshHYPs6L7TvLu3DL+TyIGEsRcvVERmxokbf5Gdk7mFxZnTdiGtnA4cfSmjZJMviqSuZrQ=="),
    ("d3", "7.9.2", "ISC",
     "sha512-ZKb/mONPVKzaO5UlcWcwN8bS4ezvQaYu+bsou+XgNABdGC800kwH651ADTbbTxMPHW13UlvbQafdmJQDk1w7Mg=="),
    ("d3-sankey", "0.12.3", "BSD-3-Clause",
     "sha512-nQhsBRmM19Ax5xEIPLMY9ZmJ/cDvd1BG3UVvt5h3WRxKg5zGRbvnteTyWAbzeSvlh3tW7ZEmq4VwR5mB3tutmQ=="),
    ("dagre-d3-es", "7.0.14", "MIT",
     "sha512-P4rFMVq9ESWqmOgK+dlXvOtLwYg0i7u0HBGJER0LZDJT2VHIPAMZ/riPxqJceWMStH5+E61QxFra9kIS3AqdMg=="),
    ("dayjs", "1.11.23", "MIT",
     "sha512-QDTCU0M0MxR3hQfnlDJfwekQiaanm1ubOD231u73WBckQ/fsamwRLiE2GBz6D3a/xF1NgfiDLJjXBa1hYOYTtQ=="),
    ("es-toolkit", "1.53.2", "MIT",
     "sha512-iUqZ+NlwH4jUgRmXZUxFBsV/9762TQEa1O4IXLFBmDEjVHScBytKuseX23I0+v9ShZ5MYxEx6WKNzm6IPnex8g=="),
    ("khroma", "2.1.0", "MIT",
     "sha512-Ls993zuzfayK269Svk9hzpeGUKob/sIgZzyHYdjQoAdQetRKpOLj+k/QQQ/6Qi0Yz65mlROrfd+Ev+1+7dz9Kw=="),
    ("marked", "16.4.2", "MIT",
     "sha512-TI3V8YYWvkVf3KJe1dRkpnjs68JUPyEa5vjKrp1XEEJUAOaQc+Qj+L1qWbPd0SJuAdQkFU0h73sXXqwDYxsiDA=="),
    ("roughjs", "4.6.6", "MIT",
     "sha512-ZUz/69+SYpFN/g/lUlo2FXcIjRkSu3nDarreVdGGndHEBJ6cXPdKguS8JGxwj5HA5xIbVKSmLgr5b3AWxtRfvQ=="),
    ("stylis", "4.4.0", "MIT",
     "sha512-5Z9ZpRzfuH6l/UAvCPAPUo3665Nk2wLaZU3x+TLHKVzIz33+sbJqbtrYoC3KD4/uVOr2Zp+L0LySezP9OHV9yA=="),
    ("ts-dedent", "2.3.0", "MIT",
     "sha512-JfJeIHke7y2egdGGgRAvpCwYFUsHlM2gPcrVOxFkznt/4uzQ7HFmvE63iFHVLBJNDuyDOQgijDK/tXH/f6Msjg=="),
    ("uuid", "14.0.3", "MIT",
     "sha512-Sc5u1VVln93y1Xnz4R+CunOZc7R9LUcTmhj7Rc7Eg3HVcf7rVn2FOoa812fe0W8p3jD7xeoGSYbfqCGGH2B6xw=="),
)  # fmt: skip

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
    Package(
        "mermaid", "11.17.2", "MIT",
        "sha512-V6K3C8EBdEsPFZXSKMJe6ppQOENxuHARr9GvHX4hh47lAbhMRD9qf4oEK7LoaRQxULMa80/qt5gHO73aCleBBg==",
        {"dist/mermaid.min.js": "mermaid.js"},
    ),
    *(Package(*fields, files={}, part_of="mermaid") for fields in IN_MERMAID),
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
    """Downloads a package; returns its files by path.

    Raises:
        SystemExit: The download does not match the pinned hash.
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
    """The vendored files by their new paths, with the license."""
    kept = {}
    for source, target in package.files.items():
        if not source.endswith("/"):
            kept[target] = contents[source]
            continue
        for name, content in contents.items():
            if name.startswith(source) and name.endswith(".woff2"):
                kept[target + name.removeprefix(source)] = content
    # dompurify has two licenses, the MPL and Apache's; one is enough.
    form = re.compile(r"license(-mit)?(\.txt|\.md)?", re.IGNORECASE)
    [licence] = filter(form.fullmatch, contents)
    kept[f"licenses/{package.name.lstrip('@').replace('/', '-')}.txt"] = contents[licence]
    return kept


def entry(package: Package, files: dict[str, bytes]) -> dict[str, Any]:
    """The manifest's entry for a package."""
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
