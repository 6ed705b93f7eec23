// The composer: its text, the files in its tray and the messages that wait in its queue. actions.js sends them.

import { Tray } from "./attachments.js";
import { tooLong } from "./context.js";
import { historyOf, itemsOf, pathTo, seenOf } from "./conversation.js";
import { toast } from "./dialogs.js";
import { Queue } from "./queue.js";
import { drafts } from "./settings.js";
import { Dictation } from "./speech.js";
import { chat, coming, contextLimit, knownLimits, settings, state, store } from "./state.js";
import { pastedItem } from "./texts.js";
import { isComposing } from "./view.js";

const $ = (id) => document.getElementById(id);
const touches = matchMedia("(pointer: coarse)");
export const input = $("input");
export const dictation = new Dictation(input, toast);
$("send").before(dictation.button);

export const attached = new Map(); // chat id -> items that are not sent yet; as long as this page is open
export const tray = new Tray({
  limits: knownLimits,
  refusal: (items) => refusal(items, chat().leaf),
  blobOf: (id) => store.blobOf(state.current, id),
  changed(items) {
    attached.set(state.current, items);
    keepPasted(state.current, items);
    showButtons();
  },
  focus: focusInput,
});
export const queue = new Queue({ edit: (message) => compose([message]), focus: focusInput });
$("composer").before(queue.list);
$("composer").prepend(tray.list);
$("composer").after(tray.note);

input.addEventListener("input", () => {
  drafts.set(state.current, input.value);
  fitInput();
  showButtons();
});

// While an answer comes, a message that is written meanwhile can be queued.
export function showButtons() {
  const running = Boolean(coming());
  $("stop").hidden = !running;
  $("send").hidden = running && !input.value.trim() && !(attached.get(state.current) ?? []).length;
  const label = running ? "Send when the answer has ended" : "Send";
  $("send").setAttribute("aria-label", label);
  $("send").title = running ? label : "";
}

export function fitInput() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

// (On a touch screen it would bring up the keyboard.)
export function focusInput() {
  if (!touches.matches) input.focus();
}

export function sends(event) {
  return event.key === "Enter" && !event.shiftKey && !isComposing(event) && !touches.matches;
}

// Puts queued messages into the composer, before what is typed there.
export function compose(messages) {
  input.value = [...messages.map(({ text }) => text), input.value].filter((text) => text.trim()).join("\n\n");
  drafts.set(state.current, input.value);
  const items = messages.flatMap((message) => message.items);
  if (items.length) tray.change([...items, ...tray.items]);
  fitInput();
  showButtons();
  focusInput();
}

// The items of a tray once all are in it; null: there is nothing to send, or they cannot be sent below `parent`.
export async function ready(tray, text, parent) {
  await tray.pending;
  const { items } = tray;
  if (!text.trim() && !items.length) return null;
  const chatOf = state.current;
  const limit = contextLimit();
  const blobOf = (id) => store.blobOf(chatOf, id);
  const wrong = refusal(items, parent) ?? await tooLong({ text, items, blobOf, limit, settings: settings.of(chat()) });
  if (wrong) tray.say(wrong, true);
  return wrong ? null : items;
}

// Why items cannot be sent in a message below `parent`; null: they can.
export function refusal(items, parent) {
  if (!items.length || !state.limits) return null;
  const question = { role: "user", content: "", media: items };
  const history = historyOf([...seenOf(pathTo(store.messagesOf(state.current), parent)), question]);
  const before = itemsOf(history).slice(0, -items.length);
  return state.limits.refusal(items, before, JSON.stringify(history).length);
}

// Pasted text survives a reload, as what is typed does.
async function keepPasted(id, items) {
  const texts = await Promise.all(items.filter((item) => item.isPasted).map(({ blob }) => blob.text()));
  if (attached.get(id) === items) drafts.set(`pasted.${id}`, texts.length ? JSON.stringify(texts) : "");
}

export function pastedBefore(id) {
  return JSON.parse(drafts.get(`pasted.${id}`) ?? "[]").map((text, i) => pastedItem(text, i + 1));
}
