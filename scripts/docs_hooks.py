"""Hooks of mkdocs.yml: pages written for GitHub become a site.

Files of the repository outside docs/ join it where pages link to them, and lists are indented as
Python-Markdown expects.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from markdown_it import MarkdownIt
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
#: Files of the repository that are pages of the site.
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
#: The folder of the site that holds other linked files. They are shown as they are.
FOLDER = "repository"
_LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that stand at the top of the repository."""
    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links to files of the repository at their copies on the site, and indents lists."""
    uri = page.file.src_uri
    source = next((path for path, name in PAGES.items() if name == uri), f"docs/{uri}")

    def rewritten(match: re.Match[str]) -> str:
        opening, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        name = _place(path, config, files)
        if name is None:
            return match[0]
        return f"{opening}{posixpath.relpath(name, posixpath.dirname(uri) or '.')}{anchor}"

    return indent_lists(_LINK.sub(rewritten, text))


def indent_lists(text: str) -> str:
    """Indents items of lists by four spaces a level, and puts an empty line before each list.

    GitHub needs neither, Python-Markdown both.
    """
    lines = text.split("\n")
    items: list[list[int]] = [[] for _ in lines]  # first lines of the items that a line is in
    first_lines, code = set(), set()
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.map is None:
            continue
        begin, end = token.map
        if token.type == "list_item_open":
            for line in range(begin, end):
                items[line].append(begin)
        elif token.type in ("bullet_list_open", "ordered_list_open") and token.level == 0:
            first_lines.add(begin)
        elif token.type in ("fence", "code_block"):
            code.update(range(begin, end))
    indented: list[str] = []
    for number, line in enumerate(lines):
        depth = len(items[number])
        if not depth or not line.strip():
            indented.append(line)
        elif (begin := items[number][-1]) == number:
            previous = indented[-1].strip() if indented else ""
            if (number in first_lines and previous) or previous.startswith("```"):
                indented.append("")
            indented.append(" " * 4 * (depth - 1) + line.lstrip())
        else:
            marker = re.match(r"\s*(?:[-*+]|\d+[.)])\s+", lines[begin])
            assert marker is not None
            spaces = min(marker.end(), len(line) - len(line.lstrip()))
            line = line[spaces:]
            if number not in code:  # there, a number that begins a line is not an item
                line = re.sub(r"^(\d+)\. ", r"\1\\. ", line)
            indented.append(" " * 4 * depth + line)
    return "\n".join(indented)


def _place(path: str, config: MkDocsConfig, files: Files) -> str | None:
    """The place of a file of the repository on the site; None if there is no such file."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path in PAGES:
        return PAGES[path]
    if path == "README.md" and files.get_file_from_path("index.md"):
        return "index.md"
    if (ROOT / path).is_dir():
        path += "/README.md"
    if not (ROOT / path).is_file():
        return None
    # Markdown of other folders would become pages.
    name = f"{FOLDER}/{path}" + (".txt" if path.endswith(".md") else "")
    if files.get_file_from_path(name) is None:
        content = (ROOT / path).read_bytes()
        files.append(File.generated(config, name, content=content))
    return name
