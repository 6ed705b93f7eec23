"""For the tests of the page: a browser, a server, and a visitor with storage of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.page_helpers import FOREIGN_HOST, Browser, Page, Visitor, chromium, new_chat, visiting
from support.server_helpers import RunningServer, running

from mlx_paged.server import endpoints
from mlx_paged.server.config import ServerConfig


@pytest.fixture(scope="session", autouse=True)
def patience() -> None:
    """Lets an engine on a busy machine answer late: its metrics would be left out."""
    endpoints._STATS_TIMEOUT = 60.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def page_server() -> Iterator[RunningServer]:
    config = ServerConfig(served_model_names=("demo",), allowed_hosts=(FOREIGN_HOST,))
    with running(config, max_model_len=2048) as server:
        yield server


@pytest.fixture(scope="module")
def tab(browser: Browser, page_server: RunningServer) -> Iterator[Page]:
    """A page with `FAKE_ANSWERS`, opened once: that takes more time than most tests of a page."""
    with visiting(browser, page_server) as visitor:
        yield visitor.open(fakes=True)


@pytest.fixture
def chat(tab: Page) -> Page:
    """That page with an empty chat, for tests that do not care about other chats."""
    return new_chat(tab)


@pytest.fixture
def visitor(browser: Browser, page_server: RunningServer) -> Iterator[Visitor]:
    with visiting(browser, page_server) as visitor:
        yield visitor
