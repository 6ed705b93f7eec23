// Actions on the open chat. `send` is what happens when Send is pressed.

import {
  attached, compose, dictation, fitInput, focusInput, input, pastedBefore, queue, ready, showButtons, tray,
} from "./composer.js";
import { callsOf, newestLeaf, pathTo } from "./conversation.js";
import { drafts, waiting } from "./settings.js";
import { parts, show } from "./show.js";
import { answers, chat, chatIsOpen, coming, NEW_CHAT, settings, state, store } from "./state.js";

const $ = (id) => document.getElementById(id);

// A message of the open chat: checked, then queued while an answer comes, else saved and answered (answers.js).
export async function send() {
  if (state.isPreparing) return;
  state.isPreparing = true;
  await chatIsOpen(); // a fast reader sends before that
  dictation.stop();
  const from = state.current;
  const text = input.value.trim();
  const items = await ready(tray, text, chat().leaf).finally(() => { state.isPreparing = false; });
  if (!items || from !== state.current || input.value.trim() !== text) return;
  state.follows = true;
  input.value = "";
  tray.set([], state.current);
  fitInput();
  if (coming()) {
    queue.add(from, { text, items });
    drafts.set(from, "");
    $("announce").textContent = "Queued until the answer has ended.";
    showButtons();
  } else if (from === NEW_CHAT.id) {
    const { id } = await store.addChat({ tools: NEW_CHAT.tools, parameters: NEW_CHAT.parameters });
    NEW_CHAT.tools = [];
    NEW_CHAT.parameters = null;
    navigator.storage?.persist?.(); // asks that the browser does not make room by deleting chats
    answers.send(id, null, text, from, items);
    open(id);
  } else answers.send(from, chat().leaf, text, from, items);
}

// The answer at the end of a chat has ended: the next message is sent. Where the answer is not whole, all that wait come
// back, since they may no longer fit.
export function sendQueued(id) {
  const { leaf } = store.get("chats", id) ?? {};
  const record = store.get("messages", leaf);
  if (!queue.of(id).length || record?.role !== "assistant" || record.status === "streaming") return;
  if (record.status === "done") {
    if (callsOf(record).length) return; // the model goes on
    const { text, items } = queue.next(id);
    answers.send(id, leaf, text, `queue.${id}`, items);
    return;
  }
  const all = queue.takeAll(id);
  if (id === state.current) return compose(all);
  drafts.set(id, [...all.map(({ text }) => text), drafts.get(id) ?? ""].filter(Boolean).join("\n\n"));
  attached.set(id, [...all.flatMap(({ items }) => items), ...(attached.get(id) ?? [])]);
}

// `hit`: id of a message that is scrolled to, in whatever branch.
export function open(id, hit = null) {
  if (hit && !pathTo(store.messagesOf(id), store.chats.get(id).leaf).some((message) => message.id === hit)) {
    store.write("chats", id, { leaf: newestLeaf(store.messagesOf(id), hit) });
  }
  if (id !== state.current) {
    parts.reader.stop();
    dictation.stop();
  }
  state.current = store.chats.has(id) ? id : NEW_CHAT.id;
  state.follows = !hit;
  settings.chat = state.current;
  input.value = drafts.get(state.current) ?? "";
  if (!queue.of(state.current).length && waiting.get(state.current)) { // of this tab before it was reloaded
    compose([{ text: waiting.get(state.current), items: [] }]);
    waiting.set(state.current, "");
  }
  queue.show(state.current);
  tray.set(attached.get(state.current) ?? pastedBefore(state.current), state.current);
  fitInput();
  parts.sidebar.closeIfNarrow();
  show();
  focusInput();
  if (hit) jumpTo(hit);
}

async function jumpTo(hit) {
  if (!await parts.messages.placed()) return; // another chat was opened
  const view = parts.messages.reveal(hit);
  if (view) parts.marks.jump(view.item);
}
