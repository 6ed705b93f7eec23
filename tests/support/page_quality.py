"""Checks of the chat page's quality: accessibility, widths, and keyboard control of dialogs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from axe_playwright_python.base import AxeResults
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, expect

from support.page_helpers import shoot

#: Sizes in pixels: a phone, a laptop, and a large screen, where lines and boxes are most likely to
#: be too wide. `test_a_phone` shows all states at a phone's width in the default run, too.
AT_ALL_WIDTHS = pytest.mark.parametrize(
    "width", [*(pytest.param(width, marks=pytest.mark.long) for width in (390, 1280)), 2560]
)
LONGEST_LINE = 110  # characters
COLOR_RULES = ("color-contrast", "link-in-text-block")  # of axe, with the tag cat.color

# Finds boxes that scroll sideways, and measures line widths in characters.
MEASURE = """() => {
  const isSeen = (e) => e.checkVisibility({ visibilityProperty: true });
  const boxes = document.querySelectorAll("html, dialog[open], dialog[open] .body, #scroll");
  const wide = [...boxes].filter((e) => e.scrollWidth > e.clientWidth + 1)
    .map((e) => [e.id || e.className || e.tagName, e.scrollWidth, e.clientWidth]);
  const sample = "the quick brown fox jumps over the lazy dog ";
  const context = document.createElement("canvas").getContext("2d");
  const long = [...document.querySelectorAll(".text p, .text li, dialog p, dialog li, #viewer pre")]
    .filter(isSeen)
    .map((e) => {
      context.font = getComputedStyle(e).font;
      const width = context.measureText(sample).width / sample.length;
      return [e.textContent.slice(0, 60), Math.round(e.clientWidth / width)];
    });
  return { wide, long };
}"""

# Marks the controls that Tab should reach in a dialog; a group of radio buttons counts as one.
CONTROLS = """(dialog) => {
  const all = dialog.querySelectorAll(
    "button, input, select, textarea, summary, a[href], [tabindex='0']");
  window.left = new Set([...all].filter((e) => (
    !e.disabled && e.tabIndex >= 0 && e.checkVisibility({ visibilityProperty: true }))));
  return window.left.size;
}"""
REACHED = """(dialog) => {
  const focused = document.activeElement;
  for (const control of window.left) {
    const isOfGroup = focused.type === "radio" && control.name === focused.name;
    if (control === focused || isOfGroup) window.left.delete(control);
  }
  return focused === document.body || dialog.contains(focused) ? null : focused.outerHTML;
}"""
LEFT = "() => [...window.left].map((control) => control.outerHTML.slice(0, 200))"


def find_violations(page: Page, *, rules: Sequence[str] = ()) -> AxeResults:
    """Runs axe, which is parsed once per document; `rules` are all by default."""
    if not page.evaluate("() => Boolean(window.axe)"):
        page.evaluate(Axe().axe_script)
    only = {"runOnly": {"type": "rule", "values": list(rules)}} if rules else {}
    options = {"resultTypes": ["violations"], **only}
    return AxeResults(page.evaluate("(options) => axe.run(document, options)", options))


def check_look(page: Page, state: str) -> None:
    """Asserts that axe finds nothing in both themes, and that no line is too wide to read.

    Themes differ in their colors alone, so the second one is checked for those.
    """
    width = page.viewport_size["width"] if page.viewport_size else 0
    for theme, rules in (("light", ()), ("dark", COLOR_RULES)):
        page.emulate_media(color_scheme=theme, reduced_motion="reduce")
        expect(page.locator("html")).to_have_attribute("data-theme", theme)
        shoot(page, f"{state}-{width}-{theme}")
        found = find_violations(page, rules=rules)
        assert found.violations_count == 0, (state, theme, found.generate_report())
    measured = page.evaluate(MEASURE)
    assert not measured["wide"], (state, measured["wide"])
    too_long = [text for text in measured["long"] if text[1] > LONGEST_LINE]
    assert not too_long, (state, too_long)


def check_keys(page: Page, dialog: Locator) -> None:
    """Asserts that Tab reaches all controls of an open dialog, and none outside it."""
    expect(dialog).to_be_visible()
    box = dialog.element_handle()
    count = page.evaluate(CONTROLS, box)
    assert count > 0
    for _ in range(2 * count + 5):  # Tab also visits the browser's own controls.
        page.keyboard.press("Tab")
        outside = page.evaluate(REACHED, box)
        assert outside is None, outside
    left = page.evaluate(LEFT)
    assert not left, left


def check_escape(page: Page, dialog: Locator, opener: Locator) -> None:
    """Asserts that Esc closes a dialog and returns the focus."""
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(opener).to_be_focused()
