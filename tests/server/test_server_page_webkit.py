"""The chat page in WebKitGTK, Safari's engine: the main paths, each without an uncaught error."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.page_helpers import FAKE_ANSWERS, PATIENCE, PROMPT
from support.programs import needs
from support.server_helpers import RunningServer

if TYPE_CHECKING:
    from selenium.webdriver.remote.webelement import WebElement

DRIVER, XVFB = shutil.which("WebKitWebDriver"), shutil.which("Xvfb")
[MINI_BROWSER, *_] = [*Path("/usr/lib").glob("*/webkit2gtk-4.*/MiniBrowser"), None]
pytestmark = needs("WebKitGTK", found=None not in (DRIVER, XVFB, MINI_BROWSER), option="--browsers")

ENTER, ESCAPE = "\ue007", "\ue00c"  # WebDriver's keys

NOTE_ERRORS = """
window.problems = [];
window.addEventListener("error", (event) => window.problems.push(event.message));
window.addEventListener("unhandledrejection", (e) => window.problems.push(String(e.reason)));
"""


@pytest.fixture(scope="module")
def display() -> Iterator[str]:
    """A screen in memory."""
    assert XVFB is not None
    reading, writing = os.pipe()
    command = [XVFB, "-displayfd", str(writing), "-screen", "0", "1280x1024x24", "-nolisten", "tcp"]
    with subprocess.Popen(command, pass_fds=[writing], stderr=subprocess.DEVNULL) as process:
        os.close(writing)
        with open(reading) as number:
            yield f":{number.readline().strip()}"
        process.terminate()


class Tab:
    """One tab, with shorthands of WebDriver."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        self._url = url
        self.driver.get(url)
        self.prepare()

    def prepare(self) -> None:
        """After the page was loaded: answers come from the test, and errors are noted."""
        self.until("document.querySelectorAll('#messages > li').length > 0")
        self.driver.execute_script(NOTE_ERRORS + FAKE_ANSWERS)

    def until(self, condition: str) -> Any:
        """Waits until a JavaScript expression is true; returns its value."""
        from selenium.webdriver.support.ui import WebDriverWait

        script = f"return {condition}"
        return WebDriverWait(self.driver, PATIENCE / 1000).until(
            lambda driver: driver.execute_script(script), f"never true: {condition}"
        )

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element("css selector", selector)

    def send(self, text: str) -> None:
        self.find("#input").send_keys(text)
        self.find("#send").click()

    def fake(self, script: str) -> Any:
        """Does something with the answer that is asked for."""
        self.until("window.answers.some((answer) => !answer.over)")
        return self.driver.execute_script(
            f"const answer = window.answers.find((a) => !a.over); return {script};"
        )

    def answered(self) -> None:
        self.until("document.querySelector('#stop').hidden || !document.querySelector('#stop')"
                   ".checkVisibility()")  # fmt: skip


@pytest.fixture
def tab(display: str, page_server: RunningServer, monkeypatch) -> Iterator[Tab]:
    from selenium import webdriver
    from selenium.webdriver.webkitgtk.options import Options
    from selenium.webdriver.webkitgtk.service import Service

    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.setenv("WEBKIT_DISABLE_SANDBOX_THIS_IS_DANGEROUS", "1")  # containers are roots
    monkeypatch.setenv("LIBGL_ALWAYS_SOFTWARE", "1")
    options = Options()
    options.binary_location = str(MINI_BROWSER)
    options.add_argument("--automation")
    # The browser's processes may still write to it at the end.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
            monkeypatch.setenv(name, home)
        driver = webdriver.WebKitGTK(options=options, service=Service(DRIVER))
        try:
            tab = Tab(driver, page_server.url)
            yield tab
            assert driver.execute_script("return window.problems") == []
        finally:
            driver.quit()


def test_an_answer_streams_as_markdown(tab: Tab) -> None:
    tab.send(PROMPT)
    tab.fake("answer.say('# Title\\n\\nSome **bold** text.\\n\\n```python\\nx = 1\\n')")
    tab.until("document.querySelector('.assistant h1')?.textContent === 'Title'")
    tab.until("document.querySelector('.assistant code')?.textContent.includes('x = 1')")
    tab.fake("(answer.say('```\\n\\n$x^2$'), answer.end())")
    tab.answered()
    tab.until("document.querySelector('.assistant math')")


def test_an_answer_is_stopped_and_a_reload_keeps_the_chat(tab: Tab) -> None:
    tab.send(PROMPT)
    tab.fake("answer.say('It begins')")
    tab.until("document.querySelector('.assistant')?.textContent.includes('It begins')")
    tab.find("#stop").click()
    tab.answered()
    tab.driver.refresh()
    tab.until("document.querySelector('.assistant')?.textContent.includes('It begins')")
    assert PROMPT in tab.find(".user").text
    tab.prepare()


def test_the_enter_that_ends_a_composition_sends_nothing(tab: Tab) -> None:
    tab.find("#input").send_keys("にほん")
    kept = tab.driver.execute_script(
        """const enter = (options) => {
            const all = { key: "Enter", bubbles: true, cancelable: true, ...options };
            const event = new KeyboardEvent("keydown", all);
            return document.querySelector("#input").dispatchEvent(event);
          };
          return [enter({ isComposing: true }), enter({ keyCode: 229 })];"""
    )
    assert kept == [True, True], "both are left to the input method"
    tab.find("#input").send_keys(ENTER)
    tab.fake("(answer.say('Yes.'), answer.end())")
    tab.answered()


def test_a_text_file_goes_with_the_message(tab: Tab) -> None:
    # WebDriver would open a file chooser, because the input is hidden.
    tab.driver.execute_script(
        """const input = document.querySelector("#attach-file");
           const data = new DataTransfer();
           data.items.add(new File(["Buy a ladder."], "notes.txt", { type: "text/plain" }));
           input.files = data.files;
           input.dispatchEvent(new Event("change", { bubbles: true }));"""
    )
    tab.until("document.querySelector('#composer').textContent.includes('notes.txt')")
    tab.send("What is in it?")
    sent = tab.fake("JSON.stringify(answer.body.messages)")
    assert "Buy a ladder." in sent
    tab.fake("(answer.say('A ladder.'), answer.end())")
    tab.answered()


def test_a_dialog_opens_by_keyboard_and_escape_closes_it(tab: Tab) -> None:
    tab.driver.execute_script("document.querySelector('#open-settings').focus()")
    tab.driver.switch_to.active_element.send_keys(ENTER)
    tab.until("document.querySelector('dialog[open]')")
    tab.driver.switch_to.active_element.send_keys(ESCAPE)
    tab.until("!document.querySelector('dialog[open]')")
    tab.until("document.activeElement.id === 'open-settings'")


def test_dark_mode_is_dark(tab: Tab) -> None:
    dark = """const root = document.documentElement;
      root.dataset.theme = "dark";
      const [r, g, b] = getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number);
      return r + g + b;"""
    assert tab.driver.execute_script(dark) < 200
