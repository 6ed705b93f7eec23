// Actions on one message: its buttons, and the cards of its calls.

import { open, send } from "./actions.js";
import { focusInput, input, ready } from "./composer.js";
import { newestLeaf, newId, pathTo, removalOf, splitReasoning, titleOf } from "./conversation.js";
import { toast } from "./dialogs.js";
import { filesOf } from "./media.js";
import { answersTo } from "./messages.js";
import { drafts } from "./settings.js";
import { parts, show } from "./show.js";
import { answers, state, store, tools } from "./state.js";
import { copyText } from "./view.js";

const $ = (id) => document.getElementById(id);

export const messageActions = {
  async copy(message) {
    const copied = await copyText(splitReasoning(message).text);
    toast(copied ? "Copied" : "This browser blocks copying. Select the text and copy it instead.");
  },
  edit(message) {
    drafts.set(`edit.${message.id}`, splitReasoning(message).text || " ");
    show();
    $(`message-${message.id}`).querySelector("textarea").focus();
  },
  cancelEdit(message) {
    drafts.set(`edit.${message.id}`, "");
    show();
    focusInput();
  },
  async resend(message, text, edited) {
    const items = await ready(edited, text, message.parent);
    if (!items) return;
    state.follows = true;
    parts.messages.edited.delete(message.id);
    answers.send(message.chat, message.parent, text.trim(), `edit.${message.id}`, items);
    focusInput();
  },
  // The user's version of an answer, beside it.
  async rewrite(message, text) {
    if (!text) return;
    drafts.set(`edit.${message.id}`, "");
    const { chat: chatOf, parent, model, calls, from = null } = message;
    const { reasoning } = splitReasoning(message);
    await store.addLeaf({
      chat: chatOf, parent, role: "assistant", content: text, reasoning, calls, model, from, edited: true,
    });
    focusInput();
  },
  readButton: (id, box) => parts.reader.button(id, box),
  tokens: ({ id }) => parts.tokens.open(answers.tokens.get(id)),
  answer(message) {
    answers.answer(message);
    focusInput();
  },
  again(message) {
    const question = answersTo(store, message);
    if (!question) return;
    const isEmpty = !message.content && !message.reasoning;
    state.follows = true;
    answers.answer(question, isEmpty ? message : null);
    focusInput();
  },
  continue(message) {
    answers.continue(message);
    focusInput();
  },
  choose(message) {
    const label = document.activeElement.getAttribute("aria-label");
    const leaf = newestLeaf(store.messagesOf(message.chat), message.id);
    store.write("chats", message.chat, { leaf });
    show();
    const { item } = parts.messages.reveal(message.id);
    const arrows = [...item.querySelectorAll(".arrow:enabled")];
    (arrows.find((a) => a.getAttribute("aria-label") === label) ?? arrows[0])?.focus();
  },
  example(text) {
    input.value = text;
    send();
  },
  enterKey: () => parts.dialog.open("key"),
  editSchema: () => parts.dialog.open("schema"),
  runCall: (message, index) => tools.run(message, index),
  refuseCall: (message, index) => tools.refuse(message, index),
  alwaysCall: (message, index) => tools.allowAlways(message, index),
  stopCall: (message) => tools.stop(message.chat),
  remove(message) {
    const { id, chat: chatOf, parent, role } = message;
    const before = store.get("chats", chatOf).leaf;
    const { gone, moved, leaf } = removalOf(store.messagesOf(chatOf), message, before);
    const write = (deleted, above, end) => store.writeAll([
      ...gone.map((one) => ["messages", one, { deleted }]),
      ...moved.map((one) => ["messages", one, { parent: above }]),
      ...(end === undefined ? [] : [["chats", chatOf, { leaf: end }]]),
    ]);
    write(Date.now(), parent, leaf);
    const what = role === "user" ? "message" : "answer";
    const more = gone.length > 1 ? ` and ${gone.length - 1} below it` : "";
    toast(`Deleted the ${what}${more}`, "Undo", () => {
      write(null, id, store.get("chats", chatOf)?.leaf === leaf ? before : undefined);
    });
    focusInput();
  },
  // A new chat with copies of the messages up to one.
  async fork(message) {
    const from = store.get("chats", message.chat);
    const id = newId();
    const path = pathTo(store.messagesOf(from.id), message.id);
    for (const item of path.flatMap(filesOf)) {
      await store.keepMedia(id, { ...item, blob: await store.blobOf(from.id, item.id) });
    }
    const ids = new Map(path.map((one) => [one.id, newId()]));
    const idOf = (old) => ids.get(old) ?? null;
    const copies = path.map((one) => ({
      ...one, id: idOf(one.id), chat: id, parent: idOf(one.parent), from: idOf(one.from),
    }));
    const title = `${titleOf(from, store.messagesOf(from.id))} (fork)`;
    const now = Date.now();
    await store.addAll([{ ...from, id, title, leaf: copies.at(-1).id, created: now, used: now }], copies);
    open(id);
  },
};
