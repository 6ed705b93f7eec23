"""The documentation: its site builds without warnings, and its links lead somewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from support.waiting import TIMEOUT

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
#: Markdown files whose links are checked.
LINKED = [
    *PAGES,
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
]
MARKDOWN = MarkdownIt("commonmark").enable("table")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def build(project: Path, site: Path) -> str:
    """Builds the site as `make docs` does; returns the errors and warnings."""
    found = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=project,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    warnings = re.findall(r"^(?:WARNING|ERROR).*", found.stderr, re.MULTILINE)
    assert (found.returncode == 0) == (not warnings), found.stderr
    return "\n".join(warnings)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("site")
    assert build(ROOT, path) == ""
    return path


# --- The site -------------------------------------------------------------------------------------


def test_every_page_is_in_the_navigation(site: Path) -> None:
    start = (site / "contributing.html").read_text()
    for page in PAGES:
        path = str(page.relative_to(DOCS).with_suffix(".html"))
        assert (site / path).exists()
        assert f'href="{path}"' in start, f"{name_of(page)} is not in the nav of mkdocs.yml"


FAULTS = [
    ("lost.md", "# Lost\n", 'not included in the "nav"'),
    ("serving.md", "[x](models.md#no-such-part)\n", "'models.md#no-such-part', but the doc"),
    ("serving.md", "[x](#no-such-part)\n", "there is no such anchor"),
    ("serving.md", "[x](no-such-page.md)\n", "'no-such-page.md', but the target is not found"),
    ("serving.md", "[x](../no-such-file.py)\n", "'../no-such-file.py', but the target"),
]


@pytest.mark.long
def test_the_build_fails_on_faults(tmp_path: Path) -> None:
    for path in ROOT.iterdir():
        if path.name != "docs":
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(DOCS, tmp_path / "docs")
    for page, text, _ in FAULTS:
        with (tmp_path / "docs" / page).open("a") as file:
            file.write(f"\n{text}")
    printed = build(tmp_path, tmp_path / "site")
    for *_, error in FAULTS:
        assert error in printed


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        tags = re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", page.read_text())
        assert tags, page
        for tag in tags:
            assert not re.search(r'(?:src|href)="?(?:https?:)?//', tag), f"{page}: {tag}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import )[\"']?(?:https?:)?//", sheet.read_text()), sheet
    # Material fetches a script for these.
    assert not any('class="mermaid"' in page.read_text() for page in site.rglob("*.html"))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_site_has_the_elements_that_github_shows(site: Path, page: Path) -> None:
    """Python-Markdown and CommonMark differ, mostly on lists."""

    def elements(html: str) -> Counter[str]:
        return Counter(re.findall(r"<(h[1-6]|li|ol|ul|table|tr|pre|blockquote)[ >]", html))

    built = (site / page.relative_to(DOCS).with_suffix(".html")).read_text()
    _, _, article = built.partition("<article")
    assert elements(article.partition("</article>")[0]) == elements(
        MARKDOWN.render(page.read_text())
    )


# --- Links ----------------------------------------------------------------------------------------


def inline(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from inline(token.children or [])


def links(text: str) -> Iterator[str]:
    """Targets of links and pictures, those in HTML included."""
    for token in inline(MARKDOWN.parse(text)):
        for name in ("href", "src"):
            if token.attrGet(name):
                yield str(token.attrGet(name))
        if token.type in ("html_inline", "html_block"):
            yield from re.findall(r'\b(?:href|src)="([^"]+)"', token.content)


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives a page."""
    tokens = MARKDOWN.parse(path.read_text())
    found: Counter[str] = Counter()
    names = set()
    for heading, token in pairwise(tokens):
        if heading.type == "heading_open":
            text = "".join(each.content for each in token.children or [])
            slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
            names.add(f"{slug}-{found[slug]}" if found[slug] else slug)
            found[slug] += 1
    return names | set(re.findall(r'<a (?:id|name)="([^"]+)"', path.read_text()))


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_links_lead_somewhere_on_github(page: Path) -> None:
    for link in links(page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists() and target.is_relative_to(ROOT), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


FOLDERS = ("mlx_paged", "csrc", "metal", "scripts", "bench", "tests", "examples", ".github")
#: Named by a model in an answer.
INVENTED = {"docs/style.md"}


def test_pages_that_the_code_names_exist() -> None:
    """In messages, comments and docstrings."""
    files = [
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".h", ".cpp", ".cu", ".metal", ".md", ".yml", ".toml", ".sh")
        and ".cache" not in path.parts  # Other tests compile there.
        and path != Path(__file__)
    ]
    assert len(files) > 500
    for path in [*files, ROOT / "pyproject.toml", ROOT / "CMakeLists.txt", ROOT / "Makefile"]:
        named = re.findall(r"(?<![\w/])(docs/[\w/-]+\.md)(#[\w-]+)?", path.read_text())
        for name, anchor in named:
            assert name in INVENTED or (ROOT / name).exists(), f"{name_of(path)} names {name}"
            assert not anchor or anchor[1:] in anchors(ROOT / name), f"{name_of(path)}: {anchor}"


# --- Length ---------------------------------------------------------------------------------------

MAX_WORDS = 48_500


def words(text: str) -> int:
    """The words of prose and tables, without code blocks and comments."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return sum(re.search(r"\w", word) is not None for word in text.split())


def test_the_documentation_stays_short() -> None:
    pages = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    counts = {name_of(page): words(page.read_text()) for page in pages}
    total = sum(counts.values())
    print(f"{total:,} words on {len(pages)} pages")
    longest = ", ".join(f"{n} {c}" for n, c in Counter(counts).most_common(5))
    assert total <= MAX_WORDS, f"{total} words; the longest pages: {longest}"
