// Export of all chats into a folder that is chosen once, a file for each chat, where the browser can (File System
// Access). A chat keeps its file: the end of the file's name is the chat's id. Files of deleted chats stay.

import { fileName } from "./chat_actions.js";
import { store } from "./state.js";
import { toJson } from "./transfer.js";
import { openDB } from "./vendor/idb.js";

const $ = (id) => document.getElementById(id);
const FOLDERS = "folders"; // of a database of its own, since older pages do not know it
const KEY = "export";
const ACCESS = { mode: "readwrite" };

let folder = null; // its handle

// Why there is no such export here; null: there is.
function reason() {
  if (!isSecureContext) return "Export to a folder needs HTTPS, or localhost.";
  return "showDirectoryPicker" in globalThis ? null : "This browser cannot write into a folder. Export all makes one file.";
}

const database = () => openDB(`mlx-paged.export${new URL(".", document.baseURI).pathname}`, 1, {
  upgrade: (db) => db.createObjectStore(FOLDERS),
});

async function known() {
  const db = await database();
  const found = await db.get(FOLDERS, KEY);
  db.close();
  return found ?? null;
}

async function keep(handle) {
  folder = handle;
  show();
  try {
    const db = await database();
    await db.put(FOLDERS, handle, KEY);
    db.close();
  } catch {
    // A browser that keeps nothing: the folder serves until the page is closed.
  }
}

function show() {
  $("export-folder").textContent = folder ? `Export to “${folder.name}”` : "Export to a folder…";
  $("change-folder").hidden = !folder;
}

function say(text, isWrong = false) {
  $("export-state").textContent = text;
  $("export-state").classList.toggle("error", isWrong);
}

// False where the user wants no folder after all.
async function choose() {
  try {
    await keep(await showDirectoryPicker({ id: "mlx-paged", ...ACCESS }));
    return true;
  } catch (error) {
    if (error.name === "AbortError") return false;
    throw error;
  }
}

// (Browsers ask again after a while.)
async function mayWrite() {
  if (await folder.queryPermission(ACCESS) === "granted") return true;
  return await folder.requestPermission(ACCESS) === "granted";
}

const ending = (chat) => ` ${chat.id}.json`;

async function write(onSaved) {
  const names = [];
  for await (const name of folder.keys()) names.push(name);
  const chats = store.listed();
  for (const [i, chat] of chats.entries()) {
    const name = names.find((one) => one.endsWith(ending(chat))) ?? `${fileName(chat)}${ending(chat)}`;
    const file = await folder.getFileHandle(name, { create: true });
    const out = await file.createWritable(); // (the file changes once all is written)
    await out.write(await toJson([chat], (id) => store.messagesOf(id), (id) => store.mediaOf(id)));
    await out.close();
    onSaved(i + 1, chats.length);
  }
  return chats.length;
}

let isRunning = false;

// (A button that is disabled would lose the focus.)
function setRunning(value) {
  isRunning = value;
  for (const id of ["export-folder", "change-folder"]) $(id).setAttribute("aria-disabled", String(value));
}

async function run() {
  if (isRunning) return;
  setRunning(true);
  try {
    if (!folder && !await choose()) return;
    if (!await mayWrite()) {
      say(`The browser does not let this page write into “${folder.name}”.`, true);
      return;
    }
    const count = await write((saved, all) => say(`Exporting… ${saved} of ${all} chats.`));
    say(`Exported ${count} ${count === 1 ? "chat" : "chats"} to “${folder.name}”.`);
  } catch (error) {
    const why = error.name === "NotFoundError" ? "the folder is gone. Choose another one" : error.message;
    say(`Not everything was exported: ${why}.`, true);
  } finally {
    setRunning(false);
  }
}

const missing = reason();
$("export-folder").hidden = Boolean(missing);
if (missing) say(missing);
else {
  $("export-folder").addEventListener("click", run);
  $("change-folder").addEventListener("click", async () => {
    if (!isRunning && await choose()) await run();
  });
  known().then((handle) => {
    folder ??= handle;
    show();
  }, () => {}); // (a browser that keeps nothing: it is chosen anew)
}
