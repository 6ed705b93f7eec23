// Previews of code blocks: HTML and SVG when asked for, Mermaid diagrams once they are seen.
//
// Each preview is drawn in a frame without an origin, whose document (sandbox.html) reaches neither this page nor the
// network. HTML and SVG are sanitized before: their scripts do not run, so none can loop.

import DOMPurify from "./vendor/dompurify.js";
import { element } from "./view.js";

const NAMES = { html: "HTML", svg: "SVG", mermaid: "diagram" };
const PATIENCE = 30_000; // milliseconds that a diagram may take
const MOST_HEIGHT = 1200; // pixels of a diagram
const DOCUMENT = {
  WHOLE_DOCUMENT: true, RETURN_DOM: true, USE_PROFILES: { html: true, svg: true, svgFilters: true },
  FORBID_TAGS: ["form", "audio", "video"], FORBID_ATTR: ["srcset"],
};

const framesIn = (box) => box.querySelector(".preview");

// A button for the head of a code block; null: the block has no preview.
export function previewButton(language) {
  if (!(language in NAMES)) return null;
  const button = element("button", { type: "button", className: "preview-code", "aria-expanded": "false", textContent: "Preview" });
  button.dataset.kind = language;
  return button;
}

// HTML without scripts, and without links and pictures that lead out of it. (The frame's policy stops those of styles.)
function sanitized(source) {
  const root = DOMPurify.sanitize(source, DOCUMENT);
  for (const link of root.querySelectorAll("[href], [*|href]")) {
    for (const name of ["href", "xlink:href"]) {
      if (!(link.getAttribute(name) ?? "#").startsWith("#")) link.removeAttribute(name);
    }
  }
  for (const picture of root.querySelectorAll("[src]")) {
    if (!picture.getAttribute("src").startsWith("data:")) picture.removeAttribute("src");
  }
  return root.innerHTML;
}

function close(box) {
  framesIn(box)?.remove();
  box.querySelector("pre").hidden = false;
  mark(box, false);
}

function mark(box, isOpen) {
  const button = box.querySelector(".preview-code");
  button.setAttribute("aria-expanded", String(isOpen));
  button.textContent = isOpen ? "Show code" : "Preview";
}

function open(box) {
  const { kind } = box.querySelector(".preview-code").dataset;
  const isDiagram = kind === "mermaid";
  const source = box.querySelector("code").textContent;
  const frame = element("iframe", { title: `Preview: ${NAMES[kind]}`, src: new URL("sandbox.html", import.meta.url).href });
  frame.setAttribute("sandbox", "allow-scripts"); // (of sandbox.js; no origin, no navigation, no dialogs)
  frame.referrerPolicy = "no-referrer";
  const holder = element("div", { className: `preview ${kind}` }, frame);
  const stop = () => {
    removeEventListener("message", hear);
    clearTimeout(timer);
  };
  const fail = (reason) => {
    stop();
    if (!holder.isConnected) return;
    holder.replaceChildren(element("p", { className: "error", role: "status", textContent: `The diagram cannot be drawn: ${reason}` }));
    box.querySelector("pre").hidden = false;
  };
  const hear = ({ source: from, data }) => {
    if (from !== frame.contentWindow) return;
    stop();
    if (typeof data?.error === "string") fail(data.error.slice(0, 1000));
    else if (isDiagram && Number.isFinite(data?.height)) frame.height = Math.min(MOST_HEIGHT, Math.max(40, data.height));
  };
  const timer = isDiagram ? setTimeout(() => fail("it takes too long."), PATIENCE) : null;
  addEventListener("message", hear);
  frame.addEventListener("load", () => {
    const isDark = document.documentElement.dataset.theme === "dark";
    frame.contentWindow.postMessage({ kind, source: isDiagram ? source : sanitized(source), isDark }, "*");
  }, { once: true });
  box.querySelector("pre").hidden = true;
  box.append(holder);
  mark(box, true);
}

document.addEventListener("click", (event) => {
  const box = event.target.closest?.(".preview-code")?.closest(".code");
  if (!box) return;
  if (framesIn(box)) close(box);
  else open(box);
});

const seen = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    seen.unobserve(target);
    if (target.isConnected && !framesIn(target)) open(target);
  }
});

// Draws the diagrams of a text that is whole, once they are seen.
export function drawDiagrams(root) {
  for (const button of root.querySelectorAll(".preview-code[data-kind=mermaid]")) {
    const box = button.closest(".code");
    if (box.isDiagramKnown) continue;
    box.isDiagramKnown = true; // closed by the reader it stays closed
    seen.observe(box);
  }
}
