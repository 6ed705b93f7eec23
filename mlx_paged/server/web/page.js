// The chat page's entry: it makes the parts, connects buttons and events to actions, and starts.
// CONTRIBUTING.md has a map of the files.

import { open, send, sendQueued } from "./actions.js";
import { exportJson, exportMarkdown, fileName, importFile, remove } from "./chat_actions.js";
import { compose, focusInput, input, queue, refusal, sends, tray } from "./composer.js";
import { pendingCalls } from "./conversation.js";
import { Banner, SettingsDialog, toast } from "./dialogs.js";
import "./folder_export.js";
import { attach } from "./incoming.js";
import "./keys.js";
import { TokensDialog } from "./logprobs.js";
import { messageActions } from "./message_actions.js";
import { Messages } from "./messages.js";
import { scrollSoon } from "./scroll.js";
import { Marks } from "./search.js";
import { askForKey, poll, startPolling } from "./server_state.js";
import { parts, showContext, showSoon, showTools } from "./show.js";
import { drafts } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Reader } from "./speech.js";
import {
  answers, changeChat, chat, coming, knownLimits, markOpened, NEW_CHAT, settings, state, store, tools,
} from "./state.js";
import { ToolsDialog } from "./tools_dialog.js";
import { copyText } from "./view.js";

const $ = (id) => document.getElementById(id);
const ANNOUNCED = 2000; // characters of an answer

// The parts.

parts.banner = new Banner();
parts.reader = new Reader();
parts.tokens = new TokensDialog();
parts.dialog = new SettingsDialog(settings, {
  keyChanged() {
    parts.banner.clear("key");
    poll();
  },
  exportAll: () => exportJson(store.listed(), "chats"),
  importFile,
  deleteAll: () => remove(store.listed()),
  chat,
  setChatParameters: (parameters) => changeChat({ parameters }),
});
parts.sidebar = new Sidebar(store, answers, settings, {
  open: (chosen, hit) => open(chosen.id, hit),
  stop: (message) => answers.stop(message),
  change: (chosen, fields) => store.write("chats", chosen.id, fields),
  exportMarkdown,
  exportJson: (chosen) => exportJson([chosen], fileName(chosen)),
  remove: (chosen) => remove([chosen]),
});
new ToolsDialog(tools, {
  mayAdd: () => state.mayAddServers,
  insert: (text) => compose([{ text, items: [] }]),
  attach: (files) => tray.add(files),
  chosen: () => chat().tools ?? [],
  choose(names) {
    changeChat({ tools: names });
    showTools();
  },
});
parts.messages = new Messages($("messages"), store, answers, tools, {
  ...messageActions,
  sends,
  limits: knownLimits,
  refusal: (items, message) => refusal(items, message.parent),
  attach,
  grown: scrollSoon,
});
parts.marks = new Marks($("messages"));
parts.sidebar.search.addEventListener("change", () => parts.marks.set(parts.sidebar.search.words));

// Buttons.

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
input.addEventListener("keydown", (event) => {
  if (!sends(event)) return;
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => {
  const running = coming();
  if (running) answers.stop(running);
  focusInput();
});
$("new-chat").addEventListener("click", () => open(NEW_CHAT.id));
$("model").addEventListener("change", () => {
  settings.setModel($("model").value);
  showContext();
});

$("messages").addEventListener("click", async (event) => {
  const button = event.target.closest(".copy-code");
  if (!button) return;
  const copied = await copyText(button.closest(".code").querySelector("code").textContent);
  toast(copied ? "Copied" : "This browser blocks copying. Select the text and copy it instead.");
});

// Changes of what is saved, of answers and of tools.

store.addEventListener("change", ({ detail: { kind, record, remote } }) => {
  if (kind === "messages" && queue.of(record.chat).length) queueMicrotask(() => sendQueued(record.chat));
  // An answer that grows in this tab is drawn by "progress".
  if (!remote && kind === "messages" && record.status === "streaming" && parts.messages.views.has(record.id)) {
    parts.messages.views.get(record.id).message = record;
    if (record.content || record.reasoning) return;
  }
  showSoon();
});
store.addEventListener("gone", ({ detail }) => {
  for (const id of detail) queue.takeAll(id);
  showSoon();
});
store.addEventListener("trouble", ({ detail }) => {
  parts.banner.set("storage", `This browser is not saving chats (${detail}). Export them before you close the page.`);
});
store.addEventListener("blocked", () => {
  parts.banner.set("blocked", "Close or reload the other tabs of this page, which run an older version. Then your chats open.");
});
answers.addEventListener("progress", ({ detail }) => parts.messages.progress(detail));
answers.addEventListener("unauthorised", askForKey);
answers.addEventListener("schema", ({ detail }) => parts.dialog.refuseSchema(detail));
tools.addEventListener("change", showSoon);
tools.addEventListener("answered", ({ detail: record }) => {
  answers.answer(record);
});
answers.addEventListener("end", ({ detail: record }) => {
  if (record.chat !== state.current || document.hidden) parts.sidebar.unread.add(record.chat);
  if (record.chat === state.current) {
    // Screen readers are told once, not token by token.
    const text = $(`message-${record.id}`)?.querySelector(":scope > .text")?.innerText ?? "";
    const how = {
      done: "Answer", stopped: "Stopped", failed: "Failed", interrupted: "Interrupted",
    }[record.status];
    const calls = pendingCalls(record).map((call) => call.name).join(", ");
    const wants = calls ? ` It wants to call ${calls}.` : "";
    $("announce").textContent = `${how}: ${record.error ?? text.slice(0, ANNOUNCED)}${wants}`;
  }
  tools.settle(record);
  showSoon();
  poll();
});

addEventListener("beforeprint", () => parts.messages.fillNow());

addEventListener("storage", (event) => {
  settings.reload();
  if (event.key === "mlx-paged.key") poll();
});

// The start.

await store.open();
parts.banner.clear("blocked");
const early = input.value; // typed while the page was loading
const last = settings.chat;
open(last === NEW_CHAT.id || store.chats.get(last)?.deleted === null ? last : store.listed()[0]?.id);
if (early.trim() && early !== input.value) {
  drafts.set(NEW_CHAT.id, "");
  compose([{ text: early, items: [] }]);
}
markOpened();
await startPolling();
document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  parts.sidebar.unread.delete(state.current);
  showSoon();
  poll();
});
