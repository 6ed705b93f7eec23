"""The chat page's reading aloud and dictation, with a browser's speech that the test plays."""

from __future__ import annotations

from playwright.sync_api import expect
from support.page_helpers import answered, fake, in_browser, send, visiting

SPEECH = """
window.spoken = [];
Object.defineProperty(window, "speechSynthesis", { configurable: true, value: {
  speak: (piece) => window.spoken.push(piece),
  cancel: () => { for (const p of window.spoken.splice(0)) p.dispatchEvent(new Event("error")); },
} });
window.SpeechSynthesisUtterance = class extends EventTarget {
  constructor(text) { super(); this.text = text; }
};
window.SpeechRecognition = class extends EventTarget {
  start() { window.listening = this; }
  stop() { this.dispatchEvent(new Event("end")); }
  hear(...texts) {
    const results = texts.map((transcript) => [{ transcript }]);
    this.dispatchEvent(Object.assign(new Event("result"), { results }));
  }
};
"""
NO_SPEECH = """
for (const name of ["speechSynthesis", "SpeechRecognition", "webkitSpeechRecognition"]) {
  delete window[name];
}
"""
ANSWER = "# Bees\\n\\nThey **fly**. They hum.\\n\\n```python\\nx = 1\\n```"


@in_browser
def test_answers_are_read_and_messages_dictated(visitor) -> None:
    visitor.context.add_init_script(SPEECH)
    page = visitor.open(fakes=True)
    page.locator("#input").fill("Tell me")
    page.get_by_role("button", name="Dictate").press("Enter")
    page.evaluate("window.listening.hear('about', ' bees')")
    expect(page.locator("#input")).to_have_value("Tell me about bees")
    expect(page.locator("#dictate")).to_have_attribute("aria-pressed", "true")
    page.locator("#input").press("Enter")
    page.evaluate("window.listening.hear('about bees', ' and more')")  # too late
    fake(page, f"(answer.say('{ANSWER}'), answer.end())")
    answered(page)
    expect(page.locator("#input")).to_have_value("")
    expect(page.locator("#dictate")).to_have_attribute("aria-pressed", "false")
    page.get_by_role("button", name="Read aloud").press("Enter")
    button = page.get_by_role("button", name="Stop reading")
    expect(button).to_be_focused()
    texts = page.evaluate("window.spoken.map((piece) => piece.text)")
    assert texts == ["Bees", "They fly.", "They hum.", "Code."]
    page.evaluate("window.spoken.at(-1).dispatchEvent(new Event('end'))")
    expect(button).to_have_count(0)
    page.get_by_role("button", name="Read aloud").click()
    button.click()
    assert page.evaluate("window.spoken.length") == 0
    expect(page.get_by_role("button", name="Read aloud")).to_be_visible()


@in_browser
def test_without_speech_there_are_no_buttons_for_it(browser, page_server) -> None:
    with visiting(browser, page_server) as visitor:
        visitor.context.add_init_script(NO_SPEECH)
        page = visitor.open(fakes=True)
        send(page, "Hello")
        fake(page, "(answer.say('Hello'), answer.end())")
        answered(page)
        expect(page.get_by_role("button", name="Copy")).not_to_have_count(0)
        expect(page.get_by_role("button", name="Read aloud")).to_have_count(0)
        expect(page.locator("#dictate")).to_be_hidden()
