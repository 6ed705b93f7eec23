// Full-text search over all chats, in slices so that typing never waits for it, and the marks on what it finds.

import { byAge, pathTo, titleOf } from "./conversation.js";
import { element } from "./view.js";

const SLICE_MILLISECONDS = 8;
const DRAW_MILLISECONDS = 150; // between two lists of what is found so far
const REFRESH_MILLISECONDS = 500; // after the last change of a chat
const BEFORE = 24; // characters of a snippet before the hit
const SNIPPET = 90; // characters of a snippet
const MOST_MARKS = 5000;

const escaped = (word) => word.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&");
const nextTask = () => new Promise((done) => { setTimeout(done); });

// Matches any of the words.
export const patternOf = (words) => new RegExp(words.map(escaped).join("|"), "giu");

// Events: "change" when there are new hits, or other words.
export class Search extends EventTarget {
  constructor(store) {
    super();
    this.store = store;
    this.words = []; // that `hits` are for
    this.hits = new Map(); // chat id -> { message (null: in the title only), snippet }
    this.isRunning = false;
    this.runs = 0;
    store.addEventListener("change", ({ detail: { record } }) => {
      if (!this.query || record.status === "streaming") return;
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.start(this.query), REFRESH_MILLISECONDS);
    });
  }

  // Finds the chats that have every word in their title or messages, newest first.
  async start(query) {
    clearTimeout(this.timer);
    this.query = query.trim();
    const run = this.runs += 1;
    const words = [...new Set(this.query.split(/\s+/).filter(Boolean))];
    const hits = new Map();
    this.isRunning = words.length > 0;
    if (!words.length) return this.tell(words, hits);
    const patterns = words.map((word) => new RegExp(escaped(word), "iu"));
    let drawn = performance.now();
    let started = drawn;
    for (const chat of this.store.listed()) {
      const messages = this.store.messagesOf(chat.id);
      let missing = patterns.filter((pattern) => !pattern.test(titleOf(chat, messages)));
      for (const { content } of [...messages.values()]) {
        if (!missing.length) break;
        missing = missing.filter((pattern) => !pattern.test(content));
        if (performance.now() - started < SLICE_MILLISECONDS) continue;
        await nextTask();
        if (run !== this.runs) return; // other words were typed meanwhile
        started = performance.now();
      }
      if (missing.length) continue;
      hits.set(chat.id, hitOf(chat, messages, patternOf(words)));
      if (performance.now() - drawn > DRAW_MILLISECONDS) {
        this.tell(words, hits);
        drawn = performance.now();
      }
    }
    this.isRunning = false;
    this.tell(words, hits);
  }

  tell(words, hits) {
    this.words = words;
    this.hits = hits;
    this.dispatchEvent(new Event("change"));
  }
}

// The first message with a hit: of the branch that is shown, else of all.
function hitOf(chat, messages, pattern) {
  const has = ({ content }) => content.search(pattern) >= 0;
  const message = pathTo(messages, chat.leaf).find(has) ?? [...messages.values()].sort(byAge).find(has);
  if (!message) return { message: null, snippet: "" };
  const place = message.content.search(pattern);
  const start = Math.max(0, place - BEFORE);
  const text = message.content.slice(start, start + SNIPPET).replace(/\s+/g, " ").trim();
  const isCut = start + SNIPPET < message.content.length;
  return { message: message.id, snippet: `${start ? "…" : ""}${text}${isCut ? "…" : ""}` };
}

// A text as nodes, with marks on the words.
export function marked(text, words) {
  const nodes = [];
  let end = 0;
  for (const { 0: found, index } of text.matchAll(patternOf(words))) {
    nodes.push(text.slice(end, index), element("mark", {}, found));
    end = index + found.length;
  }
  return [...nodes, text.slice(end)];
}

// Marks words in the messages of the open chat, where the browser can do so without changing them.
export class Marks {
  constructor(list) {
    this.list = list;
    this.pattern = null;
    this.isWaiting = false;
    this.changes = new MutationObserver(() => this.drawSoon());
  }

  set(words) {
    this.pattern = words.length ? patternOf(words) : null;
    this.changes.disconnect();
    if (this.pattern) this.changes.observe(this.list, { childList: true, subtree: true, characterData: true });
    this.draw();
  }

  drawSoon() {
    if (this.isWaiting) return;
    this.isWaiting = true;
    setTimeout(() => {
      this.isWaiting = false;
      this.draw();
    }, DRAW_MILLISECONDS);
  }

  draw() {
    if (!globalThis.Highlight || !CSS.highlights) return;
    const ranges = this.pattern ? this.rangesIn(this.list, MOST_MARKS) : [];
    if (ranges.length) CSS.highlights.set("search", new Highlight(...ranges));
    else CSS.highlights.delete("search");
  }

  rangesIn(root, most) {
    const ranges = [];
    for (const text of root.querySelectorAll(".text")) {
      const walker = document.createTreeWalker(text, NodeFilter.SHOW_TEXT);
      while (walker.nextNode()) {
        for (const { 0: found, index } of walker.currentNode.data.matchAll(this.pattern)) {
          const range = new Range();
          range.setStart(walker.currentNode, index);
          range.setEnd(walker.currentNode, index + found.length);
          ranges.push(range);
          if (ranges.length === most) return ranges;
        }
      }
    }
    return ranges;
  }

  // Scrolls to the first hit in a message. Twice, since messages on the way are laid out meanwhile.
  jump(item) {
    const [range] = this.pattern ? this.rangesIn(item, 1) : [];
    const target = range?.startContainer.parentElement ?? item;
    const scroll = () => target.scrollIntoView({ block: "center" });
    scroll();
    requestAnimationFrame(() => requestAnimationFrame(scroll));
  }
}
