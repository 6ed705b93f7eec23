"""The chat page's settings: for all chats or one, presets, stop strings."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect
from support.page_helpers import Visitor, answered, fake, in_browser, send


@pytest.fixture
def page(visitor: Visitor) -> Page:
    return visitor.open(fakes=True)


def fill(page: Page, *, only_here: bool = False, **texts: str) -> None:
    """Fills in fields of the settings by their ids, or parameters by their names."""
    page.click("#open-settings")
    page.locator("#scope-chat" if only_here else "#scope-all").check()
    for name, text in texts.items():
        page.locator(f"#{name.replace('_', '-')}, #parameters [name={name}]").fill(text)
    page.click("#close-settings")


def asked(page: Page, text: str) -> dict:
    """The body of a request."""
    count = page.locator(".assistant").count()
    send(page, text)
    body = fake(page, "answer.body")
    fake(page, "answer.end()")
    answered(page, count + 1)
    return body


@in_browser
def test_a_chat_may_have_settings_of_its_own(page: Page) -> None:
    fill(page, system="Be brief.", temperature="0.5")
    fill(page, only_here=True, system="Be a pirate.", stop_strings="END\\n\n</s>")
    body = asked(page, "One")  # of a chat that was new when its settings were made
    assert body["messages"][0] == {"role": "system", "content": "Be a pirate."}
    assert body["stop"] == ["END\n", "</s>"] and body["temperature"] == 0.5
    page.click("#new-chat")
    body = asked(page, "Two")
    assert body["messages"][0]["content"] == "Be brief." and "stop" not in body
    page.reload()
    page.get_by_role("button", name="One", exact=True).click()
    page.click("#open-settings")
    expect(page.locator("#scope-chat")).to_be_checked()
    expect(page.locator("#system")).to_have_value("Be a pirate.")
    page.locator("#scope-all").check()
    expect(page.locator("#system")).to_have_value("Be brief.")


@in_browser
def test_presets_are_saved_chosen_and_deleted(page: Page) -> None:
    fill(page, system="Translate into French.", temperature="0")
    page.click("#open-settings")
    page.click("#save-preset")
    expect(page.locator("#preset-name")).to_be_focused()  # it needs a name
    page.locator("#preset-name").fill("French")
    page.click("#save-preset")
    page.click("#clear-parameters")
    page.locator("#system").fill("")
    page.reload()
    page.click("#open-settings")
    page.locator("#preset").select_option("French")
    expect(page.locator("#system")).to_have_value("Translate into French.")
    page.click("#close-settings")
    assert asked(page, "Yes")["temperature"] == 0
    page.click("#open-settings")
    page.locator("#preset").select_option("French")
    page.click("#delete-preset")
    expect(page.locator("#preset option")).to_have_text(["No presets yet"])
