"""The chat page's view of an answer's tokens and their alternatives."""

from __future__ import annotations

from playwright.sync_api import expect
from support.page_helpers import ask, in_browser, set_parameters


@in_browser
def test_tokens_with_their_alternatives(visitor) -> None:
    page = visitor.open()
    set_parameters(page, temperature="0", max_tokens="12")
    ask(page, "Return the n-th Fibonacci number")
    assert "logprobs" not in visitor.bodies[0]
    expect(page.get_by_role("button", name="Tokens", exact=True)).to_have_count(0)
    page.click("#open-settings")
    page.locator("#show-tokens").check()
    page.click("#close-settings")
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_role("button", name="Tokens", exact=True).click()
    assert (visitor.bodies[1]["logprobs"], visitor.bodies[1]["top_logprobs"]) == (True, 5)
    options = page.locator("#token-view [role=option]")
    expect(options).to_have_count(12)
    alternatives = page.locator("#token-view tr")
    expect(alternatives).to_have_count(5)
    text = page.locator(".assistant .text").inner_text()
    assert options.first.text_content() in text
    # Greedy: the chosen one is the most probable one, and shades follow probabilities.
    expect(alternatives.first).to_contain_text("chosen")
    for option in options.all()[:4]:
        chance = float(option.get_attribute("aria-label").rsplit(", ")[1].rstrip("%"))
        doubt = option.evaluate("(e) => parseFloat(e.style.getPropertyValue('--doubt'))")
        assert abs(doubt - 0.45 * (100 - chance)) < 1
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(options.nth(2)).to_have_attribute("aria-selected", "true")
    expect(page.locator("#token-view [aria-selected=true]")).to_have_count(1)
    options.nth(1).click()
    expect(options.nth(1)).to_have_attribute("aria-selected", "true")
    page.keyboard.press("Escape")
    expect(page.locator("#token-view")).to_be_hidden()
    page.reload()  # they were kept in memory only
    expect(page.locator(".assistant")).to_have_count(1)
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
    expect(page.get_by_role("button", name="Tokens", exact=True)).to_have_count(0)
