// The chat page: what keys and buttons do, and what the server's state looks like.

import { Answers } from "./answers.js";
import { ApiError, get } from "./api.js";
import { Tray } from "./attachments.js";
import { tooLong } from "./context.js";
import {
  callsOf, historyOf, itemsOf, newestLeaf, newId, pathTo, pendingCalls, removalOf, seenOf, splitReasoning, titleOf,
} from "./conversation.js";
import { Banner, SettingsDialog, toast } from "./dialogs.js";
import { TokensDialog } from "./logprobs.js";
import { filesOf, Limits } from "./media.js";
import { answersTo, Messages } from "./messages.js";
import { Queue } from "./queue.js";
import { drafts, Settings, waiting } from "./settings.js";
import { Marks } from "./search.js";
import { Sidebar } from "./sidebar.js";
import { Dictation, Reader } from "./speech.js";
import { Store } from "./store.js";
import { PASTED_CHARACTERS, pastedItem } from "./texts.js";
import { Titles } from "./titles.js";
import { OwnServers } from "./own_servers.js";
import { Tools } from "./tools.js";
import { ToolsDialog } from "./tools_dialog.js";
import { addTo, fromJson, ImportError, toJson, toMarkdown } from "./transfer.js";
import { copyText, download, element, isComposing } from "./view.js";

const $ = (id) => document.getElementById(id);
const POLL_MILLISECONDS = 2000;
const NEW_CHAT = { id: "new", title: null, leaf: null, tools: [], parameters: null }; // kept once something is sent
const ANNOUNCED = 2000; // characters of an answer

const store = new Store();
const settings = new Settings();
const tools = new Tools(store, settings, new OwnServers());
const answers = new Answers(store, settings, (id) => tools.ofRequest(id), contextLimit);
const titles = new Titles(store, answers, settings);
const tokensDialog = new TokensDialog();
const reader = new Reader();
const banner = new Banner();
const touches = matchMedia("(pointer: coarse)");
const input = $("input");
const dictation = new Dictation(input, toast);
$("send").before(dictation.button);
let current = NEW_CHAT.id; // id of the chat that is shown
let models = [];
let status = null; // of the server; null: not reached
let limits = null; // of what messages may have besides text; null: not known yet
let foundLimits;
const firstLimits = new Promise((found) => { foundLimits = found; });
const knownLimits = () => limits ?? firstLimits;
let isPreparing = false; // a message is about to be sent
let follows = true; // the end of the messages is kept in view
let scrolling = null; // frame that will do so

// Tokens of prompt and answer together; undefined: not known.
function contextLimit() {
  return models.find((m) => m.id === settings.model)?.max_model_len ?? undefined;
}

const chat = () => store.chats.get(current) ?? NEW_CHAT;
const path = () => pathTo(store.messagesOf(current), chat().leaf);
const coming = () => path().find((message) => message.status === "streaming"); // of the branch that is shown

// Requests from the parts of the page.

const dialog = new SettingsDialog(settings, {
  keyChanged() {
    banner.clear("key");
    poll();
  },
  exportAll: () => exportJson(store.listed(), "chats"),
  importFile,
  deleteAll: () => remove(store.listed()),
  chat,
  setChatParameters(parameters) {
    if (current === NEW_CHAT.id) NEW_CHAT.parameters = parameters;
    else store.write("chats", current, { parameters });
  },
});

const sidebar = new Sidebar(store, answers, settings, {
  open: (chosen, hit) => open(chosen.id, hit),
  stop: (message) => answers.stop(message),
  change: (chosen, fields) => store.write("chats", chosen.id, fields),
  async exportMarkdown(chosen) {
    const text = await toMarkdown(chosen, store.messagesOf(chosen.id), (id) => store.blobOf(chosen.id, id));
    download(`${fileName(chosen)}.md`, "text/markdown", text);
  },
  exportJson: (chosen) => exportJson([chosen], fileName(chosen)),
  remove: (chosen) => remove([chosen]),
});

let mayAddServers = false; // of MCP; as the server says
new ToolsDialog(tools, {
  mayAdd: () => mayAddServers,
  insert: (text) => compose([{ text, items: [] }]),
  attach: (files) => tray.add(files),
  chosen: () => chat().tools ?? [],
  choose(names) {
    if (current === NEW_CHAT.id) NEW_CHAT.tools = names;
    else store.write("chats", current, { tools: names });
    showTools();
  },
});

const attached = new Map(); // chat id -> items that are not sent yet; as long as this page is open
const tray = new Tray({
  limits: knownLimits,
  refusal: (items) => refusal(items, chat().leaf),
  blobOf: (id) => store.blobOf(current, id),
  changed(items) {
    attached.set(current, items);
    keepPasted(current, items);
    showButtons();
  },
  focus: focusInput,
});
const queue = new Queue({ edit: (message) => compose([message]), focus: focusInput });
$("composer").before(queue.list);
$("composer").prepend(tray.list);
$("composer").after(tray.note);

const messages = new Messages($("messages"), store, answers, tools, {
  sends,
  limits: knownLimits,
  refusal: (items, message) => refusal(items, message.parent),
  attach,
  grown: scrollSoon,
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
    follows = true;
    messages.edited.delete(message.id);
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
  fork,
  readButton: (id, box) => reader.button(id, box),
  tokens: ({ id }) => tokensDialog.open(answers.tokens.get(id)),
  remove: removeMessage,
  answer(message) {
    answers.answer(message);
    focusInput();
  },
  again(message) {
    const question = answersTo(store, message);
    if (!question) return;
    const isEmpty = !message.content && !message.reasoning;
    follows = true;
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
    messages.views.get(message.id).fill();
    const arrows = [...$(`message-${message.id}`).querySelectorAll(".arrow:enabled")];
    (arrows.find((a) => a.getAttribute("aria-label") === label) ?? arrows[0])?.focus();
  },
  example(text) {
    input.value = text;
    send();
  },
  enterKey: () => dialog.open("key"),
  editSchema: () => dialog.open("schema"),
  runCall: (message, index) => tools.run(message, index),
  refuseCall: (message, index) => tools.refuse(message, index),
  alwaysCall: (message, index) => tools.allowAlways(message, index),
  stopCall: (message) => tools.stop(message.chat),
});

const marks = new Marks($("messages"));
sidebar.search.addEventListener("change", () => marks.set(sidebar.search.words));

// Showing.

function show() {
  messages.show(chat());
  sidebar.show(current);
  showButtons();
  const title = titleOf(chat(), store.messagesOf(current));
  $("title").textContent = title;
  document.title = current === NEW_CHAT.id ? "mlx-paged" : `${title} · mlx-paged`;
  showContext();
  showTools();
  scrollSoon();
}

// While an answer comes, a message that is written meanwhile can be queued.
function showButtons() {
  const running = Boolean(coming());
  $("stop").hidden = !running;
  $("send").hidden = running && !input.value.trim() && !(attached.get(current) ?? []).length;
  const label = running ? "Send when the answer has ended" : "Send";
  $("send").setAttribute("aria-label", label);
  $("send").title = running ? label : "";
}

// Once for all that changes before the next frame: reading a height lays out the page.
function scrollSoon() {
  scrolling ??= requestAnimationFrame(() => {
    scrolling = null;
    scrollToEnd();
  });
}

function scrollToEnd() {
  const box = $("scroll");
  if (follows) box.scrollTop = box.scrollHeight;
  $("to-end").hidden = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
}

function showTools() {
  const count = (chat().tools ?? []).filter((name) => tools.serverOf(name)).length;
  $("tools-label").textContent = count ? `Tools (${count})` : "Tools";
}

function showContext() {
  const stats = path().findLast((m) => m.stats?.total)?.stats;
  const limit = contextLimit();
  $("context").hidden = !stats;
  if (!stats) return;
  const share = limit ? Math.min(1, stats.total / limit) : 0;
  $("context-text").textContent = limit
    ? `${stats.total.toLocaleString("en")} of ${limit.toLocaleString("en")} tokens`
    : `${stats.total.toLocaleString("en")} tokens`;
  $("context-used").style.width = `${100 * share}%`;
  $("context").classList.toggle("nearly-full", share > 0.9);
  const meter = $("context-meter");
  meter.hidden = !limit;
  meter.setAttribute("aria-valuemax", limit ?? 0);
  meter.setAttribute("aria-valuenow", Math.min(stats.total, limit ?? 0));
}

// `hit`: id of a message that is scrolled to, in whatever branch.
function open(id, hit = null) {
  if (hit && !pathTo(store.messagesOf(id), store.chats.get(id).leaf).some((message) => message.id === hit)) {
    store.write("chats", id, { leaf: newestLeaf(store.messagesOf(id), hit) });
  }
  if (id !== current) {
    reader.stop();
    dictation.stop();
  }
  current = store.chats.has(id) ? id : NEW_CHAT.id;
  follows = !hit;
  settings.chat = current;
  input.value = drafts.get(current) ?? "";
  if (!queue.of(current).length && waiting.get(current)) { // of this tab before it was reloaded
    compose([{ text: waiting.get(current), items: [] }]);
    waiting.set(current, "");
  }
  queue.show(current);
  tray.set(attached.get(current) ?? pastedBefore(current), current);
  fitInput();
  sidebar.closeIfNarrow();
  show();
  focusInput();
  if (!messages.views.has(hit)) return;
  messages.views.get(hit).fill();
  marks.jump($(`message-${hit}`));
}

// Pasted text survives a reload, as what is typed does.
async function keepPasted(id, items) {
  const texts = await Promise.all(items.filter((item) => item.isPasted).map(({ blob }) => blob.text()));
  if (attached.get(id) === items) drafts.set(`pasted.${id}`, texts.length ? JSON.stringify(texts) : "");
}

function pastedBefore(id) {
  return JSON.parse(drafts.get(`pasted.${id}`) ?? "[]").map((text, i) => pastedItem(text, i + 1));
}

// (On a touch screen it would bring up the keyboard.)
function focusInput() {
  if (!touches.matches) input.focus();
}

// Chats.

async function send() {
  if (isPreparing) return;
  dictation.stop();
  const from = current;
  const text = input.value.trim();
  isPreparing = true;
  const items = await ready(tray, text, chat().leaf).finally(() => { isPreparing = false; });
  if (!items || from !== current || input.value.trim() !== text) return;
  follows = true;
  input.value = "";
  tray.set([], current);
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

// Puts queued messages into the composer, before what is typed there.
function compose(messages) {
  input.value = [...messages.map(({ text }) => text), input.value].filter((text) => text.trim()).join("\n\n");
  drafts.set(current, input.value);
  const items = messages.flatMap((message) => message.items);
  if (items.length) tray.change([...items, ...tray.items]);
  fitInput();
  showButtons();
  focusInput();
}

// The answer at the end of a chat has ended: the next message is sent. Where the answer is not whole, all that wait come
// back, since they may no longer fit.
function sendQueued(id) {
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
  if (id === current) return compose(all);
  drafts.set(id, [...all.map(({ text }) => text), drafts.get(id) ?? ""].filter(Boolean).join("\n\n"));
  attached.set(id, [...all.flatMap(({ items }) => items), ...(attached.get(id) ?? [])]);
}

// The items of a tray once all are in it; null: there is nothing to send, or they cannot be sent below `parent`.
async function ready(tray, text, parent) {
  await tray.pending;
  const { items } = tray;
  if (!text.trim() && !items.length) return null;
  const chatOf = current;
  const limit = contextLimit();
  const blobOf = (id) => store.blobOf(chatOf, id);
  const wrong = refusal(items, parent) ?? await tooLong({ text, items, blobOf, limit, settings: settings.of(chat()) });
  if (wrong) tray.say(wrong, true);
  return wrong ? null : items;
}

// Why items cannot be sent in a message below `parent`; null: they can.
function refusal(items, parent) {
  if (!items.length || !limits) return null;
  const question = { role: "user", content: "", media: items };
  const history = historyOf([...seenOf(pathTo(store.messagesOf(current), parent)), question]);
  const before = itemsOf(history).slice(0, -items.length);
  return limits.refusal(items, before, JSON.stringify(history).length);
}

function remove(chats) {
  if (!chats.length) return;
  const ids = chats.map((c) => c.id);
  const place = store.listed().findIndex((c) => c.id === current);
  const title = shorten(titleOf(chats[0], store.messagesOf(ids[0])));
  const what = chats.length === 1 ? `“${title}”` : `${chats.length} chats`;
  const wasOpen = ids.includes(current) ? current : null;
  store.writeAll(ids.map((id) => ["chats", id, { deleted: Date.now() }]));
  toast(`Deleted ${what}`, "Undo", async () => {
    await store.writeAll(ids.map((id) => ["chats", id, { deleted: null }]));
    if (wasOpen) open(wasOpen);
  });
  const rest = store.listed();
  if (wasOpen) open(rest[Math.min(Math.max(place, 0), rest.length - 1)]?.id);
}

function removeMessage(message) {
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
}

// A new chat with copies of the messages up to one.
async function fork(message) {
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
}

async function exportJson(chats, name) {
  const text = await toJson(chats, (id) => store.messagesOf(id), (id) => store.mediaOf(id));
  download(`${name}.json`, "application/json", text);
}

async function importFile(file) {
  const state = $("import-state");
  state.className = "";
  try {
    const chats = fromJson(await file.text());
    const added = await addTo(store, chats, (saved) => {
      state.textContent = `Importing… ${saved} of ${chats.length} chats.`;
    });
    const count = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
    state.textContent = `Imported ${count(chats.length, "chat")}: ${count(added, "new message")}.`;
  } catch (error) {
    state.className = "error";
    const reason = error instanceof ImportError ? error.message : `it cannot be read: ${error.message}`;
    state.textContent = `${file.name} was not imported: ${reason}`;
  }
}

const shorten = (text) => (text.length > 40 ? `${text.slice(0, 40)}…` : text);

function fileName(chosen) {
  const title = titleOf(chosen, store.messagesOf(chosen.id));
  return title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "chat";
}

// Changes from elsewhere.

let isShowing = false;
function showSoon() {
  if (isShowing) return;
  isShowing = true;
  queueMicrotask(() => {
    isShowing = false;
    if (store.chats.get(current)?.deleted || (current !== NEW_CHAT.id && !store.chats.has(current))) {
      open(store.listed()[0]?.id);
    } else show();
  });
}

store.addEventListener("change", ({ detail: { kind, record, remote } }) => {
  if (kind === "messages" && queue.of(record.chat).length) queueMicrotask(() => sendQueued(record.chat));
  // An answer that grows in this tab is drawn by "progress".
  if (!remote && kind === "messages" && record.status === "streaming" && messages.views.has(record.id)) {
    messages.views.get(record.id).message = record;
    if (record.content || record.reasoning) return;
  }
  showSoon();
});
store.addEventListener("gone", ({ detail }) => {
  for (const id of detail) queue.takeAll(id);
  showSoon();
});
store.addEventListener("trouble", ({ detail }) => {
  banner.set("storage", `This browser is not saving chats (${detail}). Export them before you close the page.`);
});
store.addEventListener("blocked", () => {
  banner.set("blocked", "Close or reload the other tabs of this page, which run an older version. Then your chats open.");
});
answers.addEventListener("progress", ({ detail }) => messages.progress(detail));
answers.addEventListener("unauthorised", askForKey);
answers.addEventListener("schema", ({ detail }) => dialog.refuseSchema(detail));
tools.addEventListener("change", showSoon);
tools.addEventListener("answered", ({ detail: record }) => {
  answers.answer(record);
});
answers.addEventListener("end", ({ detail: record }) => {
  if (record.chat !== current || document.hidden) sidebar.unread.add(record.chat);
  if (record.chat === current) {
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

// The server.

function askForKey() {
  const what = settings.key ? "The server does not accept this API key." : "This server requires an API key.";
  banner.set("key", `${what} Enter it under Settings, Connection.`, "Enter key", () => dialog.open("key"));
  $("key-state").textContent = what;
}

async function poll() {
  try {
    const info = await get("server_info", settings.key);
    // Another server may answer after one that was not reached.
    if (info.status !== status) showModels((await get("v1/models", settings.key)).data);
    status = info.status;
    banner.clear("connection");
    banner.clear("key");
    $("key-state").textContent = "";
    showState(info);
    showLimits(info);
    const { num_running: running = 1, num_waiting: waiting = 1 } = info.stats ?? {}; // (a busy one says less)
    titles.write(running + waiting > 0);
    await showServers(info.config);
  } catch (error) {
    status = null;
    if (error instanceof ApiError && error.status === 401) {
      banner.clear("connection");
      $("state").textContent = "no access";
      askForKey();
    } else {
      $("state").textContent = "not reachable";
      const why = navigator.onLine === false ? "This device is offline" : "The server cannot be reached";
      banner.set("connection", `${why}. Your chats are safe. Retrying every few seconds.`, "Try now", poll);
    }
  }
}

// (A server without them has no such path.)
async function showServers({ mcp_config: file, page_mcp: ofPage }) {
  mayAddServers = Boolean(ofPage) && ofPage !== "off";
  const hasSome = Boolean(file) || (mayAddServers && tools.own.enabled().length > 0);
  const isNews = (Boolean(file) || mayAddServers) === $("open-tools").hidden;
  $("open-tools").hidden = !file && !mayAddServers;
  if (!hasSome || !(isNews || tools.servers.some((server) => server.status === "starting"))) return;
  try {
    await tools.load();
  } catch (error) {
    if (!(error instanceof ApiError) || error.status === 401) throw error;
    banner.set("tools", `Tools cannot be used: ${error.message}.`);
  }
}

function showModels(data) {
  const ids = data.map((m) => m.id);
  if (JSON.stringify(data) !== JSON.stringify(models)) {
    models = data;
    $("model").replaceChildren(...ids.map((id) => element("option", { value: id, textContent: id })));
    showContext();
  }
  if (!ids.includes(settings.model)) settings.setModel(ids[0] ?? "");
  $("model").value = settings.model;
}

// Shows which files may be attached; a server that does not say so takes text only.
function showLimits(info) {
  if (info.status !== "ready" || !info.config || !info.stats) return; // (a busy one says less)
  limits = new Limits({ media: { kinds: {} }, ...info });
  foundLimits(limits);
  const label = `Attach ${limits.nouns.join(", ")}`;
  $("attach").title = label;
  $("attach").setAttribute("aria-label", label);
}

function showState({ stats, status, generation_defaults: defaults }) {
  $("state").textContent = status === "ready" ? "" : status;
  if (status === "loading") banner.set("loading", "Loading the model…");
  else banner.clear("loading");
  if (defaults) dialog.showDefaults(defaults);
  if (!stats) return;
  const { num_usable_blocks: all, num_used_blocks: used, num_cached_blocks: cached } = stats.usage;
  const share = (n) => `${(100 * n / all).toFixed(1)}%`;
  $("pool-used").style.width = share(used);
  $("pool-cached").style.width = share(cached);
  $("pool-text").textContent = `${share(used)} used, ${share(cached)} cached`;
  $("pool").setAttribute("aria-valuenow", (100 * used / all).toFixed(1));
  $("load").textContent = `${stats.num_running} running, ${stats.num_waiting} waiting`;
}

addEventListener("online", poll);
addEventListener("offline", poll);
addEventListener("storage", (event) => {
  settings.reload();
  if (event.key === "mlx-paged.key") poll();
});

// Keys and buttons.

function sends(event) {
  return event.key === "Enter" && !event.shiftKey && !isComposing(event) && !touches.matches;
}

function fitInput() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
input.addEventListener("input", () => {
  drafts.set(current, input.value);
  fitInput();
  showButtons();
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
$("to-end").addEventListener("click", () => {
  follows = true;
  scrollToEnd();
});
let top = 0;
$("scroll").addEventListener("scroll", () => {
  const box = $("scroll");
  const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
  // Only the user moves up; what grows below does not.
  if (isAtEnd) follows = true;
  else if (box.scrollTop < top - 1) follows = false;
  top = box.scrollTop;
  $("to-end").hidden = isAtEnd;
}, { passive: true });
// (Pictures, maths and fonts come late.)
const sizes = new ResizeObserver(scrollToEnd);
sizes.observe($("messages"));
sizes.observe($("scroll"));
$("messages").addEventListener("click", async (event) => {
  const button = event.target.closest(".copy-code");
  if (!button) return;
  const copied = await copyText(button.closest(".code").querySelector("code").textContent);
  toast(copied ? "Copied" : "This browser blocks copying. Select the text and copy it instead.");
});
document.addEventListener("keydown", (event) => {
  if (isComposing(event)) return;
  if (event.key === "Escape") {
    const running = coming();
    if (running) answers.stop(running);
    else tools.stop(current);
  }
  if (event.key === "k" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    sidebar.toggle(true);
    $("search").focus();
  }
  if (!event.altKey || event.ctrlKey || event.metaKey || document.querySelector("dialog[open]")) return;
  const chats = sidebar.listed();
  const place = chats.findIndex((c) => c.id === current);
  const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  if (event.code === "KeyN") open(NEW_CHAT.id);
  else if (event.code === "KeyR") {
    const last = path().findLast((m) => m.role === "assistant");
    if (last && !coming()) messages.act.again(last);
  } else if (step && chats[place + step]) open(chats[place + step].id);
  else return;
  event.preventDefault();
});

// Files: picked, pasted, dropped. Those that come over an editor are for its message.

const trayAt = (node) => (node instanceof Element ? node.closest(".editor")?.tray : null) ?? tray;
let picks = tray; // that files are picked for

function attach(into) {
  picks = into;
  $("attach-file").click();
}

$("attach").addEventListener("click", () => attach(tray));
$("attach-file").addEventListener("change", (event) => {
  picks.add(event.target.files);
  event.target.value = "";
  focusInput();
});
document.addEventListener("paste", (event) => {
  const { files, types } = event.clipboardData;
  if (document.querySelector("dialog[open]")) return;
  // (Programs for texts and tables give a picture of what they copy beside it.)
  if (types.includes("text/plain")) {
    const text = event.clipboardData.getData("text/plain");
    if (text.length <= PASTED_CHARACTERS || !event.target.matches("#input, .editor textarea")) return;
    event.preventDefault();
    trayAt(event.target).paste(text);
  } else if (files.length) {
    event.preventDefault();
    trayAt(event.target).add(files);
  }
});

// Without this a browser leaves the page and opens the file.
const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
document.addEventListener("dragover", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  event.dataTransfer.dropEffect = "copy";
  $("drop").textContent = `Drop ${limits?.nouns.join(", ") ?? "files"} here`;
  $("drop").hidden = Boolean(document.querySelector("dialog[open]"));
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) $("drop").hidden = true; // out of the window
});
document.addEventListener("drop", (event) => {
  $("drop").hidden = true;
  if (!hasFiles(event)) return;
  event.preventDefault();
  if (!document.querySelector("dialog[open]")) trayAt(event.target).add(event.dataTransfer.files);
});

// The start.

await store.open();
banner.clear("blocked");
const last = settings.chat;
open(last === NEW_CHAT.id || store.chats.get(last)?.deleted === null ? last : store.listed()[0]?.id);
await poll();
setInterval(() => { if (!document.hidden) poll(); }, POLL_MILLISECONDS);
document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  sidebar.unread.delete(current);
  showSoon();
  poll();
});
