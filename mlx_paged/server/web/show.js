// Drawing: the one place that redraws the page after a change of its state.

import { open } from "./actions.js";
import { showButtons } from "./composer.js";
import { titleOf } from "./conversation.js";
import { scrollSoon } from "./scroll.js";
import { chat, contextLimit, NEW_CHAT, path, state, store, tools } from "./state.js";

const $ = (id) => document.getElementById(id);

// Parts that take actions and are drawn by them; page.js makes them: messages, sidebar, dialog (settings), banner,
// marks (of the search), reader and tokens (a dialog).
export const parts = {};

// Draws all that follows from the state; the parts keep what has not changed.
export function show() {
  parts.messages.show(chat());
  parts.sidebar.show(state.current);
  showButtons();
  const title = titleOf(chat(), store.messagesOf(state.current));
  $("title").textContent = title;
  document.title = state.current === NEW_CHAT.id ? "mlx-paged" : `${title} · mlx-paged`;
  showContext();
  showTools();
  scrollSoon();
}

let isShowing = false;

// Once for all changes of a task. An open chat that is gone gives way to the newest.
export function showSoon() {
  if (isShowing) return;
  isShowing = true;
  queueMicrotask(() => {
    isShowing = false;
    const isGone = state.current !== NEW_CHAT.id && !store.chats.has(state.current);
    if (isGone || chat().deleted) open(store.listed()[0]?.id);
    else show();
  });
}

export function showTools() {
  const count = (chat().tools ?? []).filter((name) => tools.serverOf(name)).length;
  $("tools-label").textContent = count ? `Tools (${count})` : "Tools";
}

export function showContext() {
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
