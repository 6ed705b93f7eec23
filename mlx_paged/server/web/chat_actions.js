// Actions on whole chats: delete, export, import.

import { open } from "./actions.js";
import { titleOf } from "./conversation.js";
import { toast } from "./dialogs.js";
import { state, store } from "./state.js";
import { addTo, fromJson, ImportError, toJson, toMarkdown } from "./transfer.js";
import { download } from "./view.js";

const $ = (id) => document.getElementById(id);

export function remove(chats) {
  if (!chats.length) return;
  const ids = chats.map((c) => c.id);
  const place = store.listed().findIndex((c) => c.id === state.current);
  const title = shorten(titleOf(chats[0], store.messagesOf(ids[0])));
  const what = chats.length === 1 ? `“${title}”` : `${chats.length} chats`;
  const wasOpen = ids.includes(state.current) ? state.current : null;
  store.writeAll(ids.map((id) => ["chats", id, { deleted: Date.now() }]));
  toast(`Deleted ${what}`, "Undo", async () => {
    await store.writeAll(ids.map((id) => ["chats", id, { deleted: null }]));
    if (wasOpen) open(wasOpen);
  });
  const rest = store.listed();
  if (wasOpen) open(rest[Math.min(Math.max(place, 0), rest.length - 1)]?.id);
}

export async function exportMarkdown(chosen) {
  const text = await toMarkdown(chosen, store.messagesOf(chosen.id), (id) => store.blobOf(chosen.id, id));
  download(`${fileName(chosen)}.md`, "text/markdown", text);
}

export async function exportJson(chats, name) {
  const text = await toJson(chats, (id) => store.messagesOf(id), (id) => store.mediaOf(id));
  download(`${name}.json`, "application/json", text);
}

export async function importFile(file) {
  const line = $("import-state");
  line.className = "";
  try {
    const chats = fromJson(await file.text());
    const added = await addTo(store, chats, (saved) => {
      line.textContent = `Importing… ${saved} of ${chats.length} chats.`;
    });
    const count = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
    line.textContent = `Imported ${count(chats.length, "chat")}: ${count(added, "new message")}.`;
  } catch (error) {
    line.className = "error";
    const reason = error instanceof ImportError ? error.message : `it cannot be read: ${error.message}`;
    line.textContent = `${file.name} was not imported: ${reason}`;
  }
}

const shorten = (text) => (text.length > 40 ? `${text.slice(0, 40)}…` : text);

export function fileName(chosen) {
  const title = titleOf(chosen, store.messagesOf(chosen.id));
  return title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "chat";
}
