// The chat page: rendering, and actions of keys and buttons.

import { bodyOf, chat as ask, get } from "./api.js";
import { Store, titleOf } from "./store.js";
import { element, renderEditor, renderEmpty, renderMessage } from "./view.js";

const $ = (id) => document.getElementById(id);
const store = new Store();
const EXAMPLES = [
  "Return the n-th Fibonacci number", "Check whether a string is a palindrome",
  "Return the sum of the squares of a list",
];
const POLL_MILLISECONDS = 2000;
let running = null; // {controller, chat, message} while an answer comes
let editing = null; // index of the message that is edited

// Rendering.

function showChats() {
  $("chats").replaceChildren(...store.chats.map((chat) => element(
    "li", {},
    element("button", {
      className: "title", textContent: titleOf(chat), title: titleOf(chat),
      "aria-current": String(chat === store.current), onclick: () => open(chat),
    }),
    element("button", {
      className: "remove", textContent: "×", "aria-label": `Delete ${titleOf(chat)}`,
      onclick: () => remove(chat),
    }),
  )));
}

function showMessages() {
  const { messages } = store.current;
  const box = $("messages");
  const follows = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
  const items = messages.map((message, i) => {
    if (i === editing) return renderEditor(message.content, (text) => resend(i, text), () => edit(null));
    const busy = running?.message === message;
    return renderMessage(message, actionsOf(message, i), busy);
  });
  box.replaceChildren(...(items.length ? items : [renderEmpty(EXAMPLES, send)]));
  if (follows) box.scrollTop = box.scrollHeight;
  const here = running !== null;
  $("stop").hidden = !here;
  $("send").hidden = here;
}

function actionsOf(message, index) {
  const actions = { Copy: () => navigator.clipboard?.writeText(message.content) };
  if (running) return actions;
  if (message.role === "user") actions.Edit = () => edit(index);
  else actions.Regenerate = () => regenerate(index);
  return actions;
}

function showLast() { // only the answer that grows
  const box = $("messages");
  if (running?.chat !== store.current) return;
  const follows = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
  box.lastElementChild?.replaceWith(renderMessage(running.message, {}, true));
  if (follows) box.scrollTop = box.scrollHeight;
}

// Actions.

function open(chat) {
  store.current = chat;
  editing = null;
  document.body.classList.remove("sidebar-open");
  showChats();
  showMessages();
  $("input").focus();
}

function remove(chat) {
  if (running?.chat === chat) stop();
  store.remove(chat);
  open(store.current);
}

function edit(index) {
  editing = index;
  showMessages();
  document.querySelector(".editing textarea")?.focus();
}

function send(text) {
  if (running || !text.trim()) return;
  store.current.messages.push({ role: "user", content: text.trim() });
  answer(store.current);
}

function resend(index, text) {
  if (!text.trim()) return;
  editing = null;
  store.current.messages.length = index;
  send(text);
}

function regenerate(index) {
  const { messages } = store.current;
  const last = index ?? messages.findLastIndex((m) => m.role === "assistant");
  if (running || last < 1) return;
  messages.length = last;
  answer(store.current);
}

function stop() {
  running?.controller.abort();
}

async function answer(chat) {
  const message = { role: "assistant", content: "", stats: {} };
  const body = bodyOf(chat.messages, store.settings);
  const controller = new AbortController();
  chat.messages.push(message);
  running = { controller, chat, message };
  showChats();
  showMessages();
  const started = performance.now();
  let first = null;
  let last = started;
  let arrivals = 0;
  let drawn = false;
  try {
    for await (const news of ask(body, store.settings.key, controller.signal)) {
      if (news.text) {
        const now = performance.now();
        if (now - last > 1) arrivals += 1;
        last = now;
        first ??= now;
        message.stats.ttft ??= (first - started) / 1000;
        message.content += news.text;
      }
      if (news.usage) message.stats.usage = news.usage;
      if (news.finish) message.stats.finish = news.finish;
      if (!drawn) { // at most once a frame, however fast tokens come
        drawn = true;
        requestAnimationFrame(() => { drawn = false; if (running?.message === message) showLast(); });
      }
    }
  } catch (error) {
    if (error.name === "AbortError") message.stats.stopped = true;
    else message.error = error.message;
  }
  const count = message.stats.usage?.completion_tokens;
  if (count && first !== null) {
    // Text that came in one piece, from a busy browser or proxy, gives no time between tokens.
    const [tokens, since] = arrivals > 3 ? [count - 1, first] : [count, started];
    message.stats.tokensPerSecond = tokens / ((last - since) / 1000);
  }
  running = null;
  store.save();
  showMessages();
  poll();
}

// The server's state.

async function loadModels() {
  try {
    const { data } = await get("v1/models", store.settings.key);
    $("model").replaceChildren(...data.map((m) => element("option", { value: m.id, textContent: m.id })));
    if (data.some((m) => m.id === store.settings.model)) $("model").value = store.settings.model;
    store.settings.model = $("model").value;
  } catch (error) {
    $("model").replaceChildren(element("option", { textContent: error.message, value: "" }));
  }
}

async function poll() {
  try {
    const { stats, status } = await get("server_info", store.settings.key);
    $("state").textContent = status;
    if (!stats) return;
    const { num_usable_blocks: all, num_used_blocks: used, num_cached_blocks: cached } = stats.usage;
    const share = (n) => `${(100 * n / all).toFixed(1)}%`;
    $("pool-used").style.width = share(used);
    $("pool-cached").style.width = share(cached);
    $("pool-text").textContent = `${share(used)} used, ${share(cached)} cached`;
    $("pool").setAttribute("aria-valuenow", (100 * used / all).toFixed(1));
    $("load").textContent = `${stats.num_running} running, ${stats.num_waiting} waiting`;
  } catch (error) {
    $("state").textContent = error instanceof TypeError ? "not reachable" : error.message;
  }
}

// Keys and buttons.

const input = $("input");

function fitInput() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return;
  const text = input.value;
  input.value = "";
  fitInput();
  send(text);
});
input.addEventListener("input", fitInput);
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
});
$("stop").addEventListener("click", stop);
$("new-chat").addEventListener("click", () => open(store.add()));
$("toggle-sidebar").addEventListener("click", () => document.body.classList.toggle("sidebar-open"));
$("toggle-settings").addEventListener("click", () => {
  const form = $("settings");
  form.hidden = !form.hidden;
  $("toggle-settings").setAttribute("aria-expanded", String(!form.hidden));
  if (!form.hidden) form.querySelector("textarea").focus();
});
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("settings").addEventListener("change", (event) => {
  if (!event.target.checkValidity()) return event.target.reportValidity();
  store.settings[event.target.name] = event.target.value;
  store.save();
  if (event.target.name === "key") { loadModels(); poll(); }
});
$("model").addEventListener("change", () => {
  store.settings.model = $("model").value;
  store.save();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
  if (!event.altKey || event.ctrlKey || event.metaKey) return;
  const place = store.chats.indexOf(store.current);
  const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  if (event.code === "KeyN") open(store.add());
  else if (event.code === "KeyR") regenerate();
  else if (step && store.chats[place + step]) open(store.chats[place + step]);
  else return;
  event.preventDefault();
});

for (const field of $("settings").elements) {
  if (field.name) field.value = store.settings[field.name];
}
open(store.current);
loadModels();
poll();
setInterval(() => { if (!document.hidden) poll(); }, POLL_MILLISECONDS);
