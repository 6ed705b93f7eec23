// Attached files as elements: those of a message, and a tray of what will be sent.

import { fitted, itemOf, MediaError, megabytes } from "./media.js";
import { fromPdf, isPdf } from "./pdf.js";
import { asText, pastedItem } from "./texts.js";
import { element, icon } from "./view.js";

const $ = (id) => document.getElementById(id);
const SHOWN_CHARACTERS = 300_000; // of a text file; more would block the page

// An item of a message or a tray. `url`: a promise of where its bytes are; undefined: they are gone.
// `isSmall`: a thumbnail and its name; else what can be looked at, played or heard.
export function figure(item, url, { isSmall = false } = {}) {
  const { kind, name } = item;
  const caption = element("span", { className: "media-name", textContent: name });
  const box = element("div", { className: `media ${kind}`, title: name });
  const fail = (text) => {
    box.classList.add("broken");
    box.replaceChildren(icon(kind === "audio" ? "sound" : kind), caption);
    if (text) box.append(element("span", { className: "muted", textContent: text }));
  };
  const show = (src) => {
    if (!src) return fail("no longer stored in this browser");
    const failed = { onerror: () => fail("") }; // (a form that browsers do not show)
    if (kind === "image") {
      const picture = element("img", { alt: isSmall ? "" : name, src, ...failed });
      box.replaceChildren(isSmall ? picture : element("button", {
        type: "button", className: "open-picture", "aria-label": `Show ${name}`, onclick: () => view(name, element("img", { src, alt: name })),
      }, picture));
    } else if (kind === "video") {
      // (Without the time some browsers show nothing before it is played.)
      const at = isSmall ? `${src}#t=0.01` : src;
      const player = element("video", {
        src: at, muted: isSmall, controls: !isSmall, preload: "metadata", playsInline: true, "aria-label": name, ...failed,
      });
      if (isSmall) player.tabIndex = -1;
      box.replaceChildren(player);
    } else if (isSmall) box.replaceChildren(icon("sound"));
    else box.replaceChildren(caption, element("audio", { src, controls: true, preload: "metadata", "aria-label": name, ...failed }));
    if (isSmall) box.append(caption);
  };
  url.then(show, () => fail("not readable"));
  return box;
}

// A text file of a message or a tray: its name and size; a click shows it. `blobOf`: gives a promise of its bytes;
// undefined: they are gone.
export function chip(item, blobOf) {
  const size = element("span", { className: "muted", textContent: megabytes(item.size) });
  const name = element("span", { className: "media-name", textContent: item.name });
  const show = async () => {
    const blob = await blobOf();
    if (!blob) {
      size.textContent = "no longer stored in this browser";
      return;
    }
    const text = await blob.text();
    const cut = text.length > SHOWN_CHARACTERS;
    const note = cut ? [element("p", { className: "muted", textContent: "Only the beginning is shown." })] : [];
    view(item.name, element("pre", { tabIndex: 0, textContent: text.slice(0, SHOWN_CHARACTERS) }), ...note);
  };
  return element("button", { type: "button", className: "chip", title: item.name, onclick: show }, icon("text"), name, size);
}

function view(name, ...parts) {
  const dialog = $("viewer");
  $("viewer-title").textContent = name;
  $("viewer-body").replaceChildren(...parts);
  dialog.showModal();
}

$("close-viewer").addEventListener("click", () => $("viewer").close());
$("viewer").addEventListener("click", (event) => {
  if (event.target === $("viewer")) $("viewer").close();
});
$("viewer").addEventListener("close", () => $("viewer-body").replaceChildren());
$("viewer").addEventListener("keydown", (event) => {
  if (event.key === "Escape") event.stopPropagation(); // it closes the viewer, and stops nothing
});

// The attachments of an unsent message: thumbnails with buttons that remove them, and a line for problems.
// `act`: limits() a promise of those of the server; refusal(items) why they cannot be sent; urlOf(id) and blobOf(id) of
// what is in the store;
// changed(items); focus() where the focus goes when nothing is left.
export class Tray {
  constructor(act, items = []) {
    this.act = act;
    this.list = element("ul", { className: "tray", "aria-label": "Attached files" });
    this.note = element("p", { className: "tray-note", role: "status" });
    this.urls = new Map(); // item -> URL of its bytes
    this.pending = Promise.resolve();
    this.into = null;
    this.numPasted = 0;
    this.items = [...items];
    this.draw();
  }

  // `into`: what they are for; what is added for something else is left out.
  set(items, into = null) {
    this.into = into;
    this.numPasted = items.filter((item) => item.isPasted).length;
    this.say("");
    this.change([...items]);
  }

  // Files that are added meanwhile come behind.
  add(files) {
    return this.addItems([...files].map(itemOf));
  }

  addItems(items) {
    const { into } = this;
    this.pending = this.pending.then(() => this.take(items, into));
    return this.pending;
  }

  // A long pasted text becomes a file.
  paste(text) {
    this.numPasted += 1;
    return this.addItems([pastedItem(text, this.numPasted)]);
  }

  async take(items, into) {
    if (into !== this.into) return;
    const known = this.act.limits();
    if (known instanceof Promise) this.say("Waiting for the server…");
    const limits = await known;
    if (into !== this.into) return; // another chat is open
    const told = [];
    const added = [];
    let isWrong = false;
    for (const file of items) {
      try {
        if (isPdf(file)) this.say(`Reading ${file.name}…`);
        const { item: read, note: about } = await fromPdf(file, limits);
        if (about) told.push(about);
        const given = await asText(read, limits.maxBody, limits.taken);
        const wrong = limits.wrongKind(given);
        if (wrong) throw new MediaError(wrong);
        const { item, note } = await fitted(given, limits);
        if (into !== this.into) return; // another chat is open
        const refusal = this.act.refusal([...this.items, item]);
        if (refusal) throw new MediaError(refusal);
        if (note) told.push(note);
        this.change([...this.items, item]);
        added.push(item.name);
      } catch (error) {
        isWrong = true;
        if (!told.includes(error.message)) told.push(error.message);
      }
    }
    this.say(told.join(" "), isWrong);
    if (added.length) $("announce").textContent = `Attached ${added.join(", ")}.`;
  }

  say(text, isWrong = false) {
    this.note.textContent = text;
    this.note.classList.toggle("error", isWrong);
  }

  change(items) {
    this.items = items;
    for (const [item, url] of this.urls) {
      if (items.includes(item)) continue;
      if (item.blob) URL.revokeObjectURL(url);
      this.urls.delete(item);
    }
    this.draw();
    this.act.changed(items);
  }

  remove(item) {
    const place = this.items.indexOf(item);
    this.say("");
    this.change(this.items.filter((other) => other !== item));
    const buttons = this.list.querySelectorAll("button");
    const next = buttons[Math.min(place, buttons.length - 1)];
    if (next) next.focus();
    else this.act.focus();
  }

  draw() {
    const kept = new Map([...this.list.children].map((row) => [row.item, row]));
    this.list.replaceChildren(...this.items.map((item) => kept.get(item) ?? this.row(item)));
    this.list.hidden = !this.items.length;
  }

  row(item) {
    const row = element("li", {}, item.kind === "text" ? this.chip(item) : this.thumbnail(item), element("button", {
      type: "button", className: "icon-button remove", "aria-label": `Remove ${item.name}`, title: "Remove",
      onclick: () => this.remove(item),
    }, icon("close")));
    row.item = item;
    return row;
  }

  chip(item) {
    return chip(item, () => item.blob ?? this.act.blobOf(item.id));
  }

  thumbnail(item) {
    const url = item.blob ? Promise.resolve(URL.createObjectURL(item.blob)) : this.act.urlOf(item.id);
    url.then((found) => this.urls.set(item, found));
    return figure(item, url, { isSmall: true });
  }
}
