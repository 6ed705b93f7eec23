// Files that come in: picked, pasted, dropped. Those that come over an editor are for its message.

import { focusInput, tray } from "./composer.js";
import { state } from "./state.js";
import { PASTED_CHARACTERS } from "./texts.js";

const $ = (id) => document.getElementById(id);

const trayAt = (node) => (node instanceof Element ? node.closest(".editor")?.tray : null) ?? tray;
let picks = tray; // that files are picked for

export function attach(into) {
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
  $("drop").textContent = `Drop ${state.limits?.nouns.join(", ") ?? "files"} here`;
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
