"""The structure of the chat page's code: who may change its state, and the map for newcomers."""

from __future__ import annotations

import re
from pathlib import Path

import mlx_paged

WEB = Path(mlx_paged.__file__).parent / "server/web"
CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"
ACTIONS = {"actions.js", "message_actions.js", "server_state.js", "scroll.js", "state.js"}


def test_only_actions_change_the_state() -> None:
    changes = re.compile(r"(?<![\w.])state\.\w+ (?:\?\?)?=(?!=)")
    texts = {path.name: path.read_text() for path in WEB.glob("*.js")}
    users = {name for name, text in texts.items() if name == "state.js" or "./state.js" in text}
    assert {name for name in users if changes.search(texts[name])} == ACTIONS


def test_the_page_is_redrawn_in_one_place() -> None:
    drawn = re.compile(r"parts\.(?:messages|sidebar)\.show\(")
    assert [path.name for path in WEB.glob("*.js") if drawn.search(path.read_text())] == ["show.js"]


def test_the_map_names_files_and_functions_that_exist() -> None:
    section = CONTRIBUTING.read_text().split("## The chat page\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`(\w+\.js)`", section))
    assert {"page.js", *ACTIONS} <= named
    for name in named:
        assert (WEB / name).is_file(), name
    functions = {
        "send": "actions.js",
        "sendQueued": "actions.js",
        "ready": "composer.js",
        "showSoon": "show.js",
    }
    for function, name in functions.items():
        assert f"`{function}`" in section
        assert re.search(
            rf"^export (?:async )?function {function}\(", (WEB / name).read_text(), re.M
        ), function
