// Keys of the whole page; index.html lists them in Settings.

import { open } from "./actions.js";
import { parts } from "./show.js";
import { answers, coming, NEW_CHAT, path, state, tools } from "./state.js";
import { isComposing } from "./view.js";

const $ = (id) => document.getElementById(id);

document.addEventListener("keydown", (event) => {
  if (isComposing(event)) return;
  if (event.key === "Escape") {
    const running = coming();
    if (running) answers.stop(running);
    else tools.stop(state.current);
  }
  if (event.key === "k" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    parts.sidebar.toggle(true);
    $("search").focus();
  }
  const isCommand = event.ctrlKey || event.metaKey;
  const isInText = event.target.matches?.("input, textarea");
  if (event.key === "F3" || (isCommand && (event.key === "f" || (event.key === "a" && !isInText)))) parts.messages.fillAll();
  if (!event.altKey || event.ctrlKey || event.metaKey || document.querySelector("dialog[open]")) return;
  const chats = parts.sidebar.listed();
  const place = chats.findIndex((c) => c.id === state.current);
  const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  if (event.code === "KeyN") open(NEW_CHAT.id);
  else if (event.code === "KeyR") {
    const last = path().findLast((m) => m.role === "assistant");
    if (last && !coming()) parts.messages.act.again(last);
  } else if (step && chats[place + step]) open(chats[place + step].id);
  else return;
  event.preventDefault();
});
