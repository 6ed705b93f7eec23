// Messages that wait above the composer until the answer before them has ended.

import { waiting } from "./settings.js";
import { element, icon } from "./view.js";

// A message: { text, items }, its items as those of a tray. `act`: edit(message) and focus().
export class Queue {
  constructor(act) {
    this.act = act;
    this.chats = new Map(); // chat id -> its messages, first come first
    this.chat = null; // that is shown
    this.list = element("ul", { id: "queued", "aria-label": "Queued messages", hidden: true });
  }

  of(chat) {
    return this.chats.get(chat) ?? [];
  }

  add(chat, message) {
    this.change(chat, [...this.of(chat), message]);
  }

  // The first message of a chat, which no longer waits; undefined: none did.
  next(chat) {
    const [first, ...rest] = this.of(chat);
    this.change(chat, rest);
    return first;
  }

  takeAll(chat) {
    const all = this.of(chat);
    this.change(chat, []);
    return all;
  }

  change(chat, messages) {
    this.chats.set(chat, messages);
    waiting.set(chat, messages.map(({ text }) => text).join("\n\n"));
    if (chat === this.chat) this.show(chat);
  }

  show(chat) {
    this.chat = chat;
    const messages = this.of(chat);
    this.list.hidden = !messages.length;
    this.list.replaceChildren(...messages.map((message) => this.row(message)));
  }

  row(message) {
    const take = () => this.change(this.chat, this.of(this.chat).filter((other) => other !== message));
    const button = (image, label, does) => element("button", {
      type: "button", className: "icon-button", "aria-label": label, title: label,
      onclick: () => {
        take();
        does();
      },
    }, icon(image));
    const files = message.items.map(({ name }) => name);
    return element(
      "li", {}, element("span", { className: "muted", textContent: "Queued" }),
      element("span", { className: "queued-text", textContent: [message.text, ...files].filter(Boolean).join(" · ").slice(0, 500) }),
      button("edit", "Edit queued message", () => this.act.edit(message)),
      button("close", "Remove queued message", () => this.act.focus()),
    );
  }
}
