// The messages of the open chat as elements. An answer that grows changes only where it grows. A long chat opens at
// once: its older messages follow in slices, as plain text, and become Markdown with buttons near what is seen.

import { chip, figure, Tray } from "./attachments.js";
import { CallView } from "./calls.js";
import { callsOf, childrenOf, pathTo, pendingCalls, seenOf, sentCalls, splitReasoning } from "./conversation.js";
import { RichText } from "./rich_text.js";
import { mediaOf } from "./media.js";
import { drafts } from "./settings.js";
import { element, icon, isComposing } from "./view.js";

const EXAMPLES = [
  "Write a Python function that returns the n-th Fibonacci number",
  "Explain how a hash table works, with an example",
  "Draft a short message that moves a meeting to Friday",
];
// Drawing a long open block takes a while; the rest of the page has at least as much time.
const DRAW_SHARE = 0.25;
const NEARBY = "1000px 0px"; // of what is seen
const LAST_FILLED = 4; // messages at the end of a chat that are filled with it
// Limits of one task, for messages that are placed as plain text and for those that are filled.
const PLACED_AT_ONCE = 60;
const FILLED_AT_ONCE = 8;
const SLICE_MILLISECONDS = 15;

const UNSEEN = "The model no longer sees the messages above";
// Where a request has the schema; parts of it are told by what follows.
const SCHEMA_FIELD = "response_format.json_schema.schema.";

// `act`: what the buttons do: copy, edit, resend, rewrite, fork, tokens, readButton, remove, again, continue, choose, example, enterKey, editSchema,
// attach, those of a `CallView`, and for the trays of editors limits and refusal.
export class Messages {
  constructor(list, store, answers, tools, act) {
    this.list = list;
    this.store = store;
    this.answers = answers;
    this.tools = tools;
    this.act = act;
    this.views = new Map(); // message id -> MessageView
    this.urls = new Map(); // id of an item of this chat -> promise of where its bytes are
    this.edited = new Map(); // message id -> items of its editor
    this.chat = null;
    this.path = []; // the messages of the branch that is shown, oldest first
    this.missing = []; // indices into the path of messages without a view, oldest first
    this.waiting = []; // who waits until none is missing
    this.near = new Set(); // views to fill: they are near what is seen
    this.fillsAll = false;
    this.isAtWork = false;
    this.sight = new IntersectionObserver((entries) => this.see(entries), {
      root: list.parentElement, rootMargin: NEARBY,
    });
    // Tab goes on to the buttons of the next message, which a reader with a fast hand reaches before it is seen.
    list.addEventListener("focusin", ({ target }) => {
      const item = target.closest(".message");
      for (const next of [item?.previousElementSibling, item?.nextElementSibling]) if (next) this.viewOf(next)?.fill();
    });
  }

  // Shows the branch of a chat that ends with its leaf.
  show(chat) {
    if (chat.id !== this.chat) this.clear(chat.id);
    const all = this.store.messagesOf(chat.id);
    const path = pathTo(all, chat.leaf);
    const shown = new Set(path.map((m) => m.id));
    for (const [id, view] of this.views) {
      if (shown.has(id)) continue;
      this.sight.unobserve(view.item);
      view.item.remove();
      this.views.delete(id);
      this.near.delete(view);
    }
    this.list.querySelector(".empty")?.remove();
    const isBusy = path.some((message) => message.status === "streaming");
    this.list.classList.toggle("busy", isBusy);
    const children = childrenOf(all);
    const [first] = seenOf(path);
    this.path = path;
    this.missing = [];
    this.traits = (message, i) => ({
      isBusy, isLast: i === path.length - 1, siblings: children.get(message.parent), isFirstSeen: i > 0 && message === first,
    });
    let numMade = 0;
    for (let i = path.length - 1; i >= 0; i -= 1) {
      const view = this.views.get(path[i].id);
      if (view) view.update(path[i], this.traits(path[i], i));
      else if (numMade === PLACED_AT_ONCE) this.missing.push(i);
      else {
        this.place(i);
        numMade += 1;
      }
    }
    this.missing.reverse();
    for (const { id } of path.slice(-LAST_FILLED)) this.views.get(id).fill();
    if (!path.length) this.list.append(this.empty());
    if (this.missing.length) this.workSoon();
    else this.endWaiting(true);
  }

  clear(chat) {
    this.sight.disconnect();
    this.views.clear();
    this.near.clear();
    this.list.replaceChildren();
    for (const url of this.urls.values()) url.then((found) => found && URL.revokeObjectURL(found), () => {});
    this.urls.clear();
    this.fillsAll = false;
    this.endWaiting(false);
    this.chat = chat;
  }

  // Makes the view of a message, before the next one that has a view.
  place(i) {
    const message = this.path[i];
    const view = new MessageView(message, this);
    let next = i + 1;
    while (next < this.path.length && !this.views.has(this.path[next].id)) next += 1;
    this.list.insertBefore(view.item, this.views.get(this.path[next]?.id)?.item ?? null);
    this.views.set(message.id, view);
    view.update(message, this.traits(message, i));
    this.sight.observe(view.item);
    return view;
  }

  // The filled view of a message, now; undefined: it is not on the branch that is shown.
  reveal(id) {
    const i = this.path.findIndex((message) => message.id === id);
    if (i < 0) return undefined;
    const view = this.views.get(id) ?? this.place(i);
    view.fill();
    return view;
  }

  // True once all messages have views; false if another chat is shown before that.
  placed() {
    if (!this.missing.length) return Promise.resolve(true);
    return new Promise((done) => { this.waiting.push(done); });
  }

  endWaiting(isPlaced) {
    for (const done of this.waiting.splice(0)) done(isPlaced);
  }

  see(entries) {
    const middle = ({ top, bottom }) => (top + bottom) / 2;
    const distance = ({ boundingClientRect: box, rootBounds }) => Math.abs(middle(box) - middle(rootBounds ?? box));
    for (const entry of entries.sort((a, b) => distance(a) - distance(b))) {
      const view = this.viewOf(entry.target);
      if (entry.isIntersecting && view && !view.isFilled) this.near.add(view);
      else this.near.delete(view);
    }
    if (this.near.size && !this.isAtWork) this.work();
  }

  // The browser's own search finds plain text as it is written; this lets it find texts as they are shown.
  fillAll() {
    this.fillsAll = true;
    this.workSoon();
  }

  // For paper, which is drawn in this task.
  fillNow() {
    while (this.missing.length) this.placeNext();
    this.endWaiting(true);
    for (const view of this.views.values()) view.fill();
  }

  placeNext() {
    const i = this.missing.pop();
    if (!this.views.has(this.path[i].id)) this.place(i);
  }

  workSoon() {
    if (this.isAtWork) return;
    this.isAtWork = true;
    setTimeout(() => {
      this.isAtWork = false;
      this.work();
    });
  }

  // One slice: first what is near, then what is missing.
  work() {
    const end = performance.now() + SLICE_MILLISECONDS;
    let numLeft = FILLED_AT_ONCE;
    for (const view of this.near) {
      if (!numLeft || performance.now() > end) break;
      this.near.delete(view);
      view.fill();
      numLeft -= 1;
    }
    for (let i = 0; this.missing.length && i < PLACED_AT_ONCE && performance.now() < end; i += 1) this.placeNext();
    if (!this.missing.length) this.endWaiting(true);
    if (this.fillsAll && !this.missing.length) {
      const open = [...this.views.values()].filter((view) => !view.isFilled);
      for (; open.length && numLeft && performance.now() < end; numLeft -= 1) open.pop().fill();
      this.fillsAll = open.length > 0;
    }
    if (this.near.size || this.missing.length || this.fillsAll) this.workSoon();
  }

  viewOf(item) {
    return this.views.get(item.id.slice("message-".length));
  }

  // Where the bytes of an item are; undefined: they are gone.
  urlOf(id) {
    if (!this.urls.has(id)) {
      this.urls.set(id, this.blobOf(id).then((blob) => blob && URL.createObjectURL(blob)));
    }
    return this.urls.get(id);
  }

  blobOf(id) {
    return this.store.blobOf(this.chat, id);
  }

  // New text of an answer that comes in this tab.
  progress(id) {
    this.views.get(id)?.drawSoon();
  }

  empty() {
    return element(
      "li", { className: "empty" },
      element("p", { className: "welcome", textContent: "What would you like to know?" }),
      ...EXAMPLES.map((text) => element("button", {
        type: "button", textContent: text, onclick: () => this.act.example(text),
      })),
    );
  }
}

class MessageView {
  constructor(message, list) {
    this.list = list;
    this.id = message.id;
    this.message = message;
    this.role = element("div", { className: "role" });
    this.text = element("div", { className: "text plain" }); // found by searches, and about as high as what is drawn later
    const properties = { className: `message ${message.role}`, id: `message-${message.id}` };
    this.item = element("li", properties, this.role, this.text);
    this.isFilled = false;
    this.shown = "";
  }

  // Makes the content, once.
  fill() {
    if (this.isFilled) return;
    this.isFilled = true;
    const { message, list } = this;
    list.near.delete(this);
    list.sight.unobserve(this.item);
    this.text.classList.remove("plain");
    this.below = element("div", { className: "below" });
    this.note = element("div", { className: "note", hidden: true });
    if (message.role === "assistant") {
      this.thought = element("div", { className: "thought markdown" });
      this.summary = element("summary");
      const folded = { className: "reasoning", hidden: true };
      this.reasoning = element("details", folded, this.summary, this.thought);
      this.summary.addEventListener("click", () => { this.isReasoningChosen = true; });
      this.callViews = [];
      this.calls = element("div", { className: "calls" });
      this.text.classList.add("markdown");
      this.text.replaceChildren();
      this.markdown = new RichText(this.text);
      this.thoughtMarkdown = new RichText(this.thought);
      this.text.before(this.reasoning);
    }
    if (message.role === "user") {
      const items = mediaOf(message).map((item) => element("li", {}, item.kind === "text"
        ? chip(item, () => list.blobOf(item.id)) : figure(item, list.urlOf(item.id))));
      this.media = element("ul", { className: "items", "aria-label": "Attached files", hidden: !items.length }, ...items);
      this.text.before(this.media);
    }
    this.item.append(...(this.calls ? [this.calls] : []), this.note, this.below);
    this.item.classList.add("filled");
    this.drawAll();
  }

  update(message, { isBusy, isLast, siblings: all, isFirstSeen }) {
    this.message = message;
    const isStreaming = message.status === "streaming";
    const isEdited = !isStreaming && drafts.get(`edit.${this.id}`) !== null;
    // Nothing to do where nothing has changed: focus and selection stay.
    const { tools } = this.list;
    const running = callsOf(message).map((_, i) => tools.isRunning(message, i));
    const servers = callsOf(message).map(({ name }) => tools.serverOf(name)?.name);
    const hasBusyArrows = isBusy && all.length > 1; // (style sheets hide other buttons of a busy chat)
    const shown = JSON.stringify([message.updated, hasBusyArrows, isLast, all.length, isEdited, running, servers, isFirstSeen]);
    if (shown === this.shown) return;
    this.shown = shown;
    this.unseen?.remove();
    this.unseen = isFirstSeen ? element("p", { className: "unseen", textContent: UNSEEN }) : null;
    if (isFirstSeen) this.item.prepend(this.unseen);
    this.isLast = isLast;
    this.isEdited = isEdited;
    this.isBusy = isBusy;
    this.siblings = all;
    this.item.classList.toggle("busy", isStreaming);
    this.item.setAttribute("aria-busy", String(isStreaming));
    this.role.textContent = message.role === "user" ? "You" : message.model || "Model";
    if (this.isFilled) this.drawAll();
    else this.text.textContent = splitReasoning(message).text;
  }

  drawAll() {
    this.draw();
    this.drawNote(this.isLast);
    this.drawEditor(this.isEdited);
    this.drawBelow(this.isBusy, this.isLast, this.siblings);
  }

  drawSoon() {
    if (this.frame || !this.isFilled) return;
    this.frame = true;
    setTimeout(() => requestAnimationFrame(() => {
      this.frame = false;
      if (this.message.status === "streaming") this.draw();
    }), this.pause ?? 0);
  }

  draw() {
    const before = performance.now();
    const running = this.list.answers.running.get(this.id);
    const { content, reasoning, calls } = running ?? this.message;
    if (this.markdown) {
      const isWhole = this.message.status !== "streaming";
      const parts = splitReasoning({ content, reasoning });
      this.reasoning.hidden = !parts.reasoning;
      const thinks = !parts.text && !calls?.length && !isWhole;
      this.summary.textContent = thinks ? "Reasoning…" : "Reasoning";
      // Open while it comes, folded when the answer begins, unless the reader has chosen.
      if (!this.isReasoningChosen) this.reasoning.open = thinks && Boolean(parts.reasoning);
      this.markdown.update(parts.text, isWhole);
      this.thoughtMarkdown.update(parts.reasoning, isWhole);
      this.drawCalls(calls ?? []);
      if (running) this.drawSpeed(running);
    } else {
      this.text.textContent = content;
      this.text.hidden = !content || Boolean(this.editor);
    }
    this.pause = (performance.now() - before) * (1 / DRAW_SHARE - 1);
    this.list.act.grown();
  }

  drawCalls(calls) {
    const { tools, act } = this.list;
    calls.forEach((call, i) => {
      if (!this.callViews[i]) {
        this.callViews[i] = new CallView(i, act, (id) => this.list.urlOf(id));
        this.calls.append(this.callViews[i].item);
      }
      const server = tools.serverOf(call.name)?.name;
      const isRunning = tools.isRunning(this.message, i);
      const isPending = this.isLast && this.message.status === "done" && !call.result;
      const asks = isPending && !isRunning && !tools.wrong(this.message, call);
      this.callViews[i].update(this.message, call, { server, asks, isRunning });
    });
    for (const { item } of this.callViews.splice(calls.length)) item.remove();
  }

  drawSpeed(running) {
    const speed = running.tokensPerSecond();
    if (speed && this.stats) this.stats.textContent = `${speed.toFixed(1)} tokens/s`;
  }

  drawNote(isLast) {
    const { status, error, finish, relaxed, role, parent } = this.message;
    const told = [];
    if (status === "failed") told.push(`Failed: ${error}. This exchange is left out of later requests.`);
    else if (status === "interrupted") told.push(`Interrupted${error ? `: ${error}` : ""}. The text so far is kept.`);
    else if (finish === "length") told.push("Stopped at the token limit.");
    else if (role === "user" && isLast) told.push("Not sent.");
    if (role === "assistant" && !parent) told.push("Left out of requests: no message of yours stands before it.");
    if (relaxed) told.push(`Not enforced parts of the schema: ${relaxed.replaceAll(SCHEMA_FIELD, "")}.`);
    this.note.textContent = told.join(" ");
    this.note.hidden = !told.length;
    this.note.classList.toggle("error", status === "failed");
  }

  drawEditor(isEdited) {
    if (Boolean(this.editor) === isEdited) return;
    this.editor?.remove();
    this.editor = isEdited ? this.makeEditor() : null;
    this.text.hidden = isEdited || !this.message.content;
    if (this.media) this.media.hidden = isEdited || !mediaOf(this.message).length;
    this.item.classList.toggle("editing", isEdited);
    if (isEdited) this.text.after(this.editor);
  }

  makeEditor() {
    return this.message.role === "user" ? this.questionEditor() : this.answerEditor();
  }

  // The text of an answer; in it Enter is a new line.
  answerEditor() {
    const { act } = this.list;
    const text = drafts.get(`edit.${this.id}`);
    const area = element("textarea", {
      value: text, rows: Math.min(20, text.split("\n").length + 2), "aria-label": "Edit answer",
      oninput: () => drafts.set(`edit.${this.id}`, area.value || " "),
    });
    const save = () => act.rewrite(this.message, area.value.trim());
    area.addEventListener("keydown", (event) => {
      if (isComposing(event)) return;
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        save();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        act.cancelEdit(this.message);
      }
    });
    return element(
      "div", { className: "editor" }, area,
      element("button", { type: "button", textContent: "Save", className: "primary", title: "Ctrl+Enter", onclick: save }),
      element("button", { type: "button", textContent: "Cancel", onclick: () => act.cancelEdit(this.message) }),
    );
  }

  questionEditor() {
    const { act, edited } = this.list;
    const tray = new Tray({
      limits: act.limits,
      refusal: (items) => act.refusal(items, this.message),
      urlOf: (id) => this.list.urlOf(id),
      blobOf: (id) => this.list.blobOf(id),
      changed: (items) => edited.set(this.id, items),
      focus: () => area?.focus(),
    }, edited.get(this.id) ?? mediaOf(this.message));
    const area = element("textarea", {
      value: drafts.get(`edit.${this.id}`), rows: 3, "aria-label": "Edit message",
      oninput: () => drafts.set(`edit.${this.id}`, area.value || " "),
    });
    area.addEventListener("keydown", (event) => {
      if (act.sends(event)) {
        event.preventDefault();
        act.resend(this.message, area.value, tray);
      } else if (event.key === "Escape" && !isComposing(event)) {
        event.stopPropagation();
        edited.delete(this.id);
        act.cancelEdit(this.message);
      }
    });
    const button = (textContent, className, onclick) =>
      element("button", { type: "button", textContent, className, onclick });
    const editor = element(
      "div", { className: "editor" }, tray.list, area, tray.note,
      button("Send", "primary", () => act.resend(this.message, area.value, tray)),
      button("Attach", "", () => act.attach(tray)),
      button("Cancel", "", () => {
        edited.delete(this.id);
        act.cancelEdit(this.message);
      }),
    );
    editor.tray = tray;
    return editor;
  }

  drawBelow(isBusy, isLast, all) {
    const { message, list: { act } } = this;
    const parts = [];
    const button = (name, image, does, properties = {}) => parts.push(element(
      "button", { type: "button", onclick: () => does(message), ...properties }, icon(image), name,
    ));
    const isUser = message.role === "user";
    const whenIdleOnly = { "data-when": "idle" }; // hidden while an answer comes
    if (message.status !== "streaming") {
      if (all.length > 1) parts.push(this.arrows(all, isBusy));
      if (canContinue(message)) button("Continue", "forward", act.continue, whenIdleOnly);
      const again = message.status === "failed" ? "Try again" : "Regenerate";
      if (!isUser && answersTo(this.list.store, message)) button(again, "again", act.again, whenIdleOnly);
      if (isUser && isLast) button("Send", "send", act.answer, whenIdleOnly);
      const hasResults = message.status === "done" && sentCalls(message).length && !pendingCalls(message).length;
      if (hasResults && isLast) button("Send the results", "send", act.answer, whenIdleOnly);
      if (isUser || message.content) button("Edit", "edit", act.edit, whenIdleOnly);
      if (message.content) button("Copy", "copy", act.copy);
      const read = !isUser && message.content && act.readButton(this.id, this.text);
      if (read) parts.push(read);
      if (this.list.answers.tokens.has(this.id)) button("Tokens", "text", act.tokens);
      button("Fork", "fork", act.fork, { title: "Continue from here in a new chat" });
      button("Delete", "delete", act.remove, whenIdleOnly);
      if (message.status === "failed" && /\bkey\b/i.test(message.error)) {
        button("Enter API key", "settings", act.enterKey);
      }
      if (message.status === "failed" && /\bschema\b/i.test(message.error)) {
        button("Edit JSON schema", "settings", act.editSchema);
      }
    }
    this.stats = element("span", { className: "muted stats", textContent: statistics(message) });
    if (!isUser) parts.push(this.stats);
    this.below.replaceChildren(...parts);
  }

  arrows(all, isBusy) {
    const { act } = this.list;
    const place = all.findIndex((m) => m.id === this.id);
    const arrow = (image, label, to) => element("button", {
      type: "button", className: "arrow", "aria-label": label, disabled: isBusy || !to,
      onclick: () => act.choose(to),
    }, icon(image));
    const name = this.message.role === "user" ? "version" : "answer";
    const label = `${name} ${place + 1} of ${all.length}`;
    return element(
      "span", { className: "branches", role: "group", "aria-label": label },
      arrow("left", `Previous ${name}`, all[place - 1]),
      element("span", { textContent: `${place + 1}/${all.length}` }),
      arrow("right", `Next ${name}`, all[place + 1]),
    );
  }
}

function canContinue(message) {
  if (message.role !== "assistant" || !message.content.trim() || callsOf(message).length) return false;
  return message.finish === "length" || message.status !== "done" || Boolean(message.edited);
}

// The message that an answer answers: a question, or calls with results; undefined: that was deleted.
export function answersTo(store, { parent }) {
  const above = store.get("messages", parent);
  return above?.role === "user" || (above && sentCalls(above).length) ? above : undefined;
}

// Why an answer ended, by the server's finish reason.
const ENDS = { stop: "complete", length: "cut at the token limit", tool_calls: "calls tools", content_filter: "filtered" };

// The line below an answer: speed, time to first token, tokens, finish reason and model.
function statistics({ stats, status, finish, model, role, edited }) {
  if (role !== "assistant" || status === "streaming") return "";
  const told = edited ? ["edited"] : [];
  if (stats?.tokensPerSecond) told.push(`${stats.tokensPerSecond.toFixed(1)} tokens/s`);
  if (stats) told.push(`TTFT ${(stats.ttft * 1000).toFixed(0)} ms`);
  if (stats?.completion) {
    told.push(`${stats.completion} tokens`, `${stats.cached} of ${stats.prompt} prompt tokens cached`);
  }
  if (status === "stopped") told.push("stopped");
  else if (status === "done" && finish) told.push(ENDS[finish] ?? finish);
  if (model) told.push(model);
  return told.join(" · ");
}
