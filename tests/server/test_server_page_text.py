"""Answers as text on the chat page: Markdown, maths, hostile input, and how they grow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from support.page_helpers import Visitor, answered, fake, in_browser, new_chat, send, visiting
from support.server_helpers import RunningServer

SAMPLE = (Path(__file__).parents[1] / "support/page_sample.md").read_text()


@pytest.fixture(scope="module")
def visitor(browser: Browser, page_server: RunningServer) -> Iterator[Visitor]:
    with visiting(browser, page_server) as visitor:
        yield visitor


@pytest.fixture(scope="module")
def tab(visitor: Visitor) -> Page:
    return visitor.open(fakes=True)


@pytest.fixture
def page(chat: Page) -> Page:
    return chat


def say(page: Page, text: str) -> None:
    fake(page, f"answer.say({json.dumps(text)})")


def show(page: Page, text: str) -> Any:
    """A finished answer."""
    send(page, "Show it")
    say(page, text)
    fake(page, "answer.end()")
    answered(page, page.locator("#messages .assistant").count())
    return page.locator(".assistant").last


@in_browser
def test_markdown_in_full(page) -> None:
    answer = show(page, SAMPLE)
    text = answer.locator(".text")
    for tag in (
        "h1",
        "h2",
        "em",
        "strong",
        "s",
        "a",
        "ol",
        "ul",
        "blockquote",
        "table",
        "hr",
        "sub",
        "br",
    ):
        assert text.locator(tag).count(), tag
    labels = text.locator(".language")
    expect(labels).to_have_text(["python", "dockerfile"])
    assert text.locator(".hljs-keyword").count() > 5
    boxes = text.locator("input[type=checkbox]")
    assert [boxes.nth(i).is_checked() for i in range(boxes.count())] == [True, False]
    assert text.locator("td").nth(1).evaluate("e => getComputedStyle(e).textAlign") == "right"
    expect(text.locator(".typeset .katex")).to_have_count(4)
    expect(text).to_contain_text("money $5 and $6")
    for link in text.locator("a").all():
        assert link.get_attribute("rel") == "noopener noreferrer"
        assert link.get_attribute("target") == "_blank"
    expect(text.locator("img")).to_have_count(0)  # of another site: it would be told of the reader
    expect(text.get_by_role("link", name="picture")).to_be_visible()
    # Typeset once: nothing is drawn by fonts of the system.
    families = page.evaluate(
        "async () => { await document.fonts.ready;"
        " return [...document.fonts].filter((f) => f.status === 'loaded').map((f) => f.family) }"
    )
    assert any("KaTeX_Main" in family for family in families)


HOSTILE = (
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg><script>window.hit = 1</script></svg><svg onload='window.hit = 1'>",
    "<iframe srcdoc='<script>parent.hit = 1</script>'></iframe>",
    "[click](javascript:window.hit=1)",
    "[click](JaVaScRiPt:window.hit=1) [click](java&#10;script:window.hit=1)",
    "[click](vbscript:x) [click](data:text/html;base64,PHNjcmlwdD4=)",
    "[click][x]\n\n[x]: javascript:window.hit=1",
    "<javascript:window.hit=1>",
    "![x](javascript:window.hit=1)",
    "![x](data:image/svg+xml;base64,PHN2ZyBvbmxvYWQ9ImhpdD0xIi8+)",
    '![x"onerror="window.hit=1](https://x.example/"onerror="window.hit=1)',
    r"$\href{javascript:window.hit=1}{click}$ and \(\url{javascript:window.hit=1}\)",
    r"$\htmlData{x=1}{y}$ $\htmlClass{x}{y}$ $\htmlStyle{color:red}{y}$ $\htmlId{input}{y}$",
    r"$\includegraphics{https://x.example/y.png}$",
    r"$$\def\a{\a\a}\a$$",
    "```<img/src=x/onerror=window.hit=1>\n</code></pre><img src=x onerror=window.hit=1>\n```",
    "<b onclick='window.hit=1'>b</b> <sub>open <kbd>never closed",
    "<form action=javascript:window.hit=1><button>x</button></form>",
    "<style>* { display: none }</style><base href='https://x.example/'>",
    "<details open ontoggle=window.hit=1><summary>x</summary></details>",
    "<math><mtext><table><mglyph><style><img src=x onerror=window.hit=1>",
    "<a id=input name=answers href=#>x</a>",
    "| a |\n|---|\n| <img src=x onerror=window.hit=1> |",
    "<think><img src=x onerror=window.hit=1></think><img src=x onerror=window.hit=1>",
)


# Returns faults of the elements below those of a selector.
WRONG = """(selector) => {
  const wrong = [];
  for (const e of document.querySelectorAll(`${selector} *`)) {
    const isWrong = /^(SCRIPT|IFRAME|STYLE|BASE|FORM|OBJECT|IMG)$/i.test(e.tagName)
      || (e.tagName === "A" && !/^https?:/.test(e.href))
      || [...e.attributes].some(({ name, value }) =>
        /^on|^id$|^name$/i.test(name) || /^\\s*(java|vb)script:/i.test(value));
    if (isWrong) wrong.push(e.outerHTML);
  }
  return wrong;
}"""


@in_browser
def test_hostile_answers_stay_text(page, visitor) -> None:
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    everything = "\n\n".join(HOSTILE)
    answer = show(page, everything)
    expect(answer.locator(".typeset")).not_to_have_count(0)
    assert not page.evaluate(WRONG, "#messages .text")
    expect(answer.locator("> .text")).to_contain_text("<script>window.hit = 1</script>")
    send(page, everything)  # a user's text is no Markdown
    fake(page, "answer.end()")
    answered(page, 2)
    expect(page.locator(".user .text").last).to_have_text(everything, use_inner_text=True)
    # One by one: nothing before them changes their meaning.
    page.evaluate(
        """async (texts) => {
          const { Markdown } = await import("/web/markdown.js");
          for (const text of texts) {
            const box = document.createElement("div");
            box.className = "hostile";
            document.body.append(box);
            new Markdown(box).update(text, true);
          }
        }""",
        HOSTILE,
    )
    expect(page.locator(".hostile")).to_have_count(len(HOSTILE))
    assert not page.evaluate(WRONG, ".hostile")
    assert page.evaluate("window.hit") is None
    page.locator(".hostile").evaluate_all("(all) => all.forEach((box) => box.remove())")


@in_browser
def test_only_the_sanitiser_makes_markup(page, visitor) -> None:
    visitor.expected.append("requires 'TrustedHTML'")
    refused = page.evaluate(
        "() => { try { document.body.innerHTML = '<b>x</b>' } catch (e) { return e.name } }"
    )
    assert refused == "TypeError"


@in_browser
def test_text_that_grows_ends_as_if_it_had_come_at_once(page) -> None:
    more = (
        "A [link][later] first.\n\n- a\n**bold**\n- b\n\n    code\n\n1. x\n\n   y\n\n# T\n"
        "setext\n===\na | b\n--|--\n1 | 2\n\n> q\nlazy\n\n```js\nlet x = `\n\n# no`;\n```\n\n"
        "$$\nx\n\\frac12\n$$\n"
        "text $a_1$ \\(b\\) $ 5\n\n[later]: https://example.org\n"
    )
    different = page.evaluate(
        """async (texts) => {
          const { Markdown } = await import("/web/markdown.js");
          const { typeset } = await import("/web/math.js");
          await import("/web/vendor/katex/katex.js");
          const wrong = [];
          for (const text of texts) {
            const whole = document.createElement("div");
            new Markdown(whole).update(text, true);
            for (const size of [1, 3, 7, 50]) {
              const box = document.createElement("div");
              const markdown = new Markdown(box);
              for (let end = size; end < text.length; end += size) {
                markdown.update(text.slice(0, end), false);
              }
              markdown.update(text, true);
              if (!box.isEqualNode(whole)) wrong.push([size, box.innerHTML, whole.innerHTML]);
            }
          }
          return wrong;
        }""",
        [SAMPLE, more, SAMPLE + more, "def f(x):\n    return x\n", "plain"],
    )
    assert not different, different[0]


@in_browser
def test_a_selection_survives_while_the_answer_grows(page) -> None:
    send(page, "Tell me")
    say(page, "# Title\n\nThe first paragraph stays.\n\nThe second one grows")
    expect(page.locator(".assistant p")).to_have_count(2)
    # The selection's text comes from the layout, which may lag by a frame. The message box may take
    # the focus late, and the selection with it.
    page.wait_for_function(
        """() => {
          const [first, second] = document.querySelectorAll(".assistant p");
          window.kept = [first, first.firstChild, second, second.firstChild];
          if (getSelection().anchorNode !== first.firstChild) {
            getSelection().setBaseAndExtent(first.firstChild, 4, second.firstChild, 10);
          }
          return getSelection().toString().includes("first");
        }"""
    )
    selected = page.evaluate("getSelection().toString()")
    for i in range(5):
        say(page, f" and grows {i}")
        expect(page.locator(".assistant p").nth(1)).to_contain_text(f"grows {i}")
    say(page, "\n\n```python\ndef f():\n    return 1\n")
    expect(page.locator(".assistant code")).to_contain_text("return 1")
    for i in range(3):
        say(page, f"x{i} = {i}\n")
    fake(page, "(answer.say('```'), answer.end())")
    answered(page)
    assert page.evaluate("getSelection().toString()") == selected and "first" in selected
    assert page.evaluate("window.kept.every((node) => node.isConnected)")


@in_browser
def test_finished_blocks_are_not_touched(page) -> None:
    send(page, "Tell me")
    say(page, "One.\n\nTwo.\n\n```python\nx = 1\n```\n\nThree is open.\nYes")
    expect(page.locator(".assistant .block")).to_have_count(4)
    page.evaluate(
        """() => {
          window.changes = [];
          const observer = new MutationObserver((all) => window.changes.push(
            ...all.map((m) => [...document.querySelectorAll(".assistant .block")]
              .findIndex((b) => b.contains(m.target)))));
          observer.observe(document.querySelector(".assistant .text"), {
            subtree: true, childList: true, characterData: true, attributes: true });
        }"""
    )
    for i in range(20):
        say(page, f" word{i}")
        expect(page.locator(".assistant .block").last).to_contain_text(f"word{i}")
    say(page, "\n\nFour.")
    expect(page.locator(".assistant .block")).to_have_count(5)
    fake(page, "answer.end()")
    answered(page)
    changed = set(page.evaluate("window.changes"))
    assert changed <= {-1, 3, 4} and 3 in changed, changed


@in_browser
def test_an_answer_is_announced_once(visitor) -> None:
    page = new_chat(visitor.open(fakes=True))  # which has announced nothing yet
    page.evaluate(
        """() => {
          window.said = [];
          const live = "[aria-live], [role=status], [role=alert], [role=log]";
          for (const region of document.querySelectorAll(live)) {
            new MutationObserver(() => window.said.push(region.textContent))
              .observe(region, { subtree: true, childList: true, characterData: true });
          }
        }"""
    )
    send(page, "Tell me")
    for i in range(10):
        say(page, f"word{i} ")
        expect(page.locator(".assistant .text")).to_contain_text(f"word{i}")
        expect(page.locator(".assistant")).to_have_attribute("aria-busy", "true")
    fake(page, "answer.end()")
    answered(page)
    expect(page.locator(".assistant")).to_have_attribute("aria-busy", "false")
    page.wait_for_function("() => window.said.length > 0")
    assert [s.strip() for s in page.evaluate("window.said")] == [
        "Answer: " + " ".join(f"word{i}" for i in range(10))
    ]


@in_browser
def test_reasoning_is_folded_and_sent_back_apart(page) -> None:
    for begin, think, end in (
        (
            "answer.say('<think>')", "answer.say('Let me **see**.')",
            "answer.say('</think>\\n\\nIt is 4.')",
        ),
        (
            "answer.say('Let me ')", "answer.say('**see**.')",
            "answer.say('\\n</think>\\n\\nIt is 4.')",
        ),
        (
            "answer.delta({ reasoning_content: 'Let me ' })",
            "answer.delta({ reasoning_content: '**see**.' })", "answer.say('It is 4.')",
        ),
        (
            "answer.delta({ reasoning: 'Let me ' })", "answer.delta({ reasoning: '**see**.' })",
            "answer.say('It is 4.')",
        ),
    ):  # fmt: skip
        page.click("#new-chat")
        send(page, "2 + 2?")
        fake(page, begin)
        fake(page, think)
        if "delta" in begin or "<think>" in begin:  # otherwise its end shows what it was
            expect(page.locator(".thought")).to_be_visible()
        fake(page, f"({end}, answer.end())")
        answered(page)
        expect(page.locator(".assistant .text")).to_have_text("It is 4.")
        expect(page.locator(".thought")).to_be_hidden()
        page.locator(".reasoning summary").click()
        expect(page.locator(".thought strong")).to_have_text("see")
        send(page, "Sure?")
        sent = fake(page, "answer.body.messages")
        assert sent[1] == {
            "role": "assistant", "content": "It is 4.", "reasoning": "Let me **see**."
        }  # fmt: skip
        fake(page, "answer.end()")
        answered(page, 2)
        page.reload()
        expect(page.locator(".assistant .text").first).to_have_text("It is 4.")
    page.click("#new-chat")
    answer = show(page, "Models write `<think>` and `</think>` around it.")
    expect(answer.locator(".text")).to_have_text("Models write <think> and </think> around it.")


@in_browser
def test_code_is_copied_as_it_is(page) -> None:
    show(page, "```python\nif x:\n    y = '<b>'\n```\n\nand\n\n~~~\nplain\n~~~")
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text }")
    page.locator(".copy-code").first.click()
    expect(page.locator("#toasts")).to_contain_text("Copied")
    assert page.evaluate("window.copied") == "if x:\n    y = '<b>'\n"
    page.locator(".copy-code").last.click()
    page.wait_for_function("() => window.copied === 'plain\\n'")
    page.locator(".assistant .below").get_by_role("button", name="Copy").click()
    page.wait_for_function("() => window.copied.startsWith('```python')")


@in_browser
def test_the_end_is_kept_in_view_unless_the_reader_scrolls_up(page) -> None:
    send(page, "Tell me")
    say(page, "line\n\n" * 100)
    at_end = "() => { const e = document.querySelector('#scroll');" \
        " return e.scrollHeight - e.scrollTop - e.clientHeight < 80 }"  # fmt: skip
    expect(page.locator(".assistant p")).to_have_count(100)
    page.wait_for_function(at_end)
    page.locator("#scroll").evaluate("e => e.scrollTop = 200")
    expect(page.locator("#to-end")).to_be_visible()
    say(page, "more\n\n" * 50)
    expect(page.locator(".assistant p")).to_have_count(150)
    assert page.locator("#scroll").evaluate("e => e.scrollTop") == 200
    page.click("#to-end")
    say(page, "more\n\n" * 50)
    expect(page.locator(".assistant p")).to_have_count(200)
    page.wait_for_function(at_end)
    fake(page, "answer.end()")
    answered(page)


FOLDED = """Before[^1] and after[^note], but not[^2].

<details>
<summary>The *proof*</summary>

1. One
   ```html
   </details>
   ```

<details open><summary>Inner</summary>
It holds.
</details>
</details>

[^1]: The **first** note
goes on.
[^note]: The other.
"""


@in_browser
def test_folded_parts_and_footnotes(page) -> None:
    send(page, "Fold it")
    fake(page, f"answer.say({json.dumps(FOLDED[:150])})")
    details = page.locator(".assistant .text details")
    details.locator("summary").first.click()
    expect(details.first).to_have_attribute("open", "")
    fake(page, f"(answer.say({json.dumps(FOLDED[150:])}), answer.end())")
    answered(page)
    expect(details.first).to_have_attribute("open", "")  # as the reader left it
    expect(details.first.locator("> summary em")).to_have_text("proof")
    expect(details.locator("details p")).to_have_text("It holds.")
    expect(details.locator("pre")).to_have_text("</details>\n", use_inner_text=True)
    marks = page.locator(".text [data-footnote]")
    expect(marks).to_have_text(["1", "2"])
    expect(page.locator(".text p").first).to_have_text("Before1 and after2, but not[^2].")
    notes = page.locator(".text .footnote")
    expect(notes).to_have_text(["1 The first note goes on.", "2 The other."])
    marks.nth(1).press("Enter")
    expect(notes.nth(1)).to_be_focused()
