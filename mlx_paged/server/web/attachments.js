// Pictures, videos and sounds as elements: those of a message, and a tray of what will be sent.

import { fitted, itemOf, MediaError } from "./media.js";
import { element, icon } from "./view.js";

const $ = (id) => document.getElementById(id);

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
        type: "button", className: "open-picture", "aria-label": `Show ${name}`, onclick: () => view(name, src),
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

function view(name, src) {
  const dialog = $("viewer");
  $("viewer-title").textContent = name;
  $("viewer-picture").replaceChildren(element("img", { src, alt: name }));
  dialog.showModal();
}

$("close-viewer").addEventListener("click", () => $("viewer").close());
$("viewer").addEventListener("click", (event) => {
  if (event.target === $("viewer")) $("viewer").close();
});
$("viewer").addEventListener("close", () => $("viewer-picture").replaceChildren());
$("viewer").addEventListener("keydown", (event) => {
  if (event.key === "Escape") event.stopPropagation(); // it closes the picture, and stops nothing
});

// What will be sent with a message; thumbnails with buttons that remove them, and a line that says what is wrong.
// `act`: limits() of the server or null; refusal(items) why they cannot be sent; urlOf(id) of what is in the store;
// changed(items); focus() where the focus goes when nothing is left.
export class Tray {
  constructor(act, items = []) {
    this.act = act;
    this.list = element("ul", { className: "tray", "aria-label": "Attached files" });
    this.note = element("p", { className: "tray-note", role: "status" });
    this.urls = new Map(); // item -> URL of its bytes
    this.pending = Promise.resolve();
    this.set(items);
  }

  // `into`: what they are for; what is added for something else is left out.
  set(items, into = null) {
    this.into = into;
    this.say("");
    this.change([...items]);
  }

  // What is added meanwhile comes behind.
  add(files) {
    const items = [...files].map(itemOf);
    const { into } = this;
    this.pending = this.pending.then(() => this.take(items, into));
    return this.pending;
  }

  async take(items, into) {
    const limits = this.act.limits();
    if (!limits) return this.say("Nothing can be attached until the server is reached.", true);
    const told = [];
    const added = [];
    let isWrong = false;
    for (const given of items) {
      try {
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
    const url = item.blob ? Promise.resolve(URL.createObjectURL(item.blob)) : this.act.urlOf(item.id);
    url.then((found) => this.urls.set(item, found));
    const row = element("li", {}, figure(item, url, { isSmall: true }), element("button", {
      type: "button", className: "icon-button remove", "aria-label": `Remove ${item.name}`, title: "Remove",
      onclick: () => this.remove(item),
    }, icon("close")));
    row.item = item;
    return row;
  }
}
