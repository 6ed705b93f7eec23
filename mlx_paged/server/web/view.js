// Elements are made here; text is always set as text, so that nothing in it is markup.

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name.includes("-") || name === "role") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

// True for keys that an input method takes: Enter accepts what it offers, Esc refuses that. (Safari ends the
// composition before it sends the key, and marks the key with 229.)
export const isComposing = (event) => event.isComposing || event.keyCode === 229;

const SVG = "http://www.w3.org/2000/svg";

// A picture of index.html's sprite; what it means is said by the label of its button.
export function icon(name) {
  const made = document.createElementNS(SVG, "svg");
  made.setAttribute("aria-hidden", "true");
  made.classList.add("icon");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#icon-${name}`);
  made.append(use);
  return made;
}

// Makes `old` look like `fresh` and keeps all nodes that need not change: a selection, the scroll
// position of code and the focus survive.
export function patch(old, fresh) {
  if (old.nodeName === "DETAILS" && fresh.nodeName === "DETAILS") fresh.open = old.open; // as the reader left it
  if (old.isEqualNode(fresh)) return;
  if (old.nodeType === Node.TEXT_NODE && fresh.nodeType === Node.TEXT_NODE) {
    if (fresh.data.startsWith(old.data)) old.appendData(fresh.data.slice(old.data.length));
    else old.data = fresh.data;
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE || !old.cloneNode().isEqualNode(fresh.cloneNode())) {
    old.replaceWith(fresh);
    return;
  }
  const before = [...old.childNodes];
  const after = [...fresh.childNodes];
  after.forEach((node, i) => (i < before.length ? patch(before[i], node) : old.append(node)));
  for (const node of before.slice(after.length)) node.remove();
}

// Works over plain HTTP too, where browsers have no navigator.clipboard.
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = element("textarea", {
      value: text, className: "offscreen", readOnly: true, "aria-hidden": "true",
    });
    const focused = document.activeElement;
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return copied;
  }
}

export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
