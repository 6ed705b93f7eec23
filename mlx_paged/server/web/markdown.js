// Markdown to elements, block by block: what is finished is not touched again while text comes.

import hljs from "./vendor/highlight/highlight.js";
import cmake from "./vendor/highlight/cmake.js";
import dart from "./vendor/highlight/dart.js";
import dockerfile from "./vendor/highlight/dockerfile.js";
import elixir from "./vendor/highlight/elixir.js";
import haskell from "./vendor/highlight/haskell.js";
import julia from "./vendor/highlight/julia.js";
import latex from "./vendor/highlight/latex.js";
import nginx from "./vendor/highlight/nginx.js";
import powershell from "./vendor/highlight/powershell.js";
import protobuf from "./vendor/highlight/protobuf.js";
import scala from "./vendor/highlight/scala.js";
import DOMPurify from "./vendor/dompurify.js";
import MarkdownIt from "./vendor/markdown-it.js";
import { details } from "./details.js";
import { dressFootnotes, followFootnotes, footnotes } from "./footnotes.js";
import { isStructure, pretty } from "./json.js";
import { maths, typeset } from "./math.js";
import { drawDiagrams, previewButton } from "./preview.js";
import { dressTable, wideTables } from "./tables.js";
import { element, icon, patch } from "./view.js";

const MORE_LANGUAGES = {
  cmake, dart, dockerfile, elixir, haskell, julia, latex, nginx, powershell, protobuf, scala,
};
for (const [name, grammar] of Object.entries(MORE_LANGUAGES)) hljs.registerLanguage(name, grammar);

const LONGEST_HIGHLIGHTED = 50_000; // characters
const PURIFY = {
  RETURN_DOM_FRAGMENT: true,
  USE_PROFILES: { html: true },
  FORBID_TAGS: ["style", "form", "input", "button", "textarea", "select", "audio", "video", "picture"],
  FORBID_ATTR: ["style", "id", "name", "srcset"],
};

// HTML of a model is shown as text, but for these tags, without attributes: tables need <br>.
const SIMPLE_TAG = /^<(?:br\s*\/?|\/?(?:sub|sup|kbd|mark|u|b|i|s))>/i;

const md = new MarkdownIt({ html: false, linkify: true });
md.linkify.set({ fuzzyLink: false }); // else "store.py" is a site in Paraguay
md.use(maths);
md.use(details);
md.use(footnotes);
md.use(wideTables);
md.inline.ruler.before("html_inline", "simple_tag", (state, silent) => {
  const found = SIMPLE_TAG.exec(state.src.slice(state.pos, state.pos + 16));
  if (!found) return false;
  if (!silent) state.push("html_inline", "", 0).content = found[0];
  state.pos += found[0].length;
  return true;
});
// A picture from elsewhere would tell its server what is read here: it is a link instead.
md.renderer.rules.image = (tokens, i, options, env, self) => {
  const source = tokens[i].attrGet("src");
  const alt = self.renderInlineAsText(tokens[i].children, options, env);
  const [src, text] = [source, alt || source].map(md.utils.escapeHtml);
  return source.startsWith("data:") ? `<img src="${src}" alt="${text}">` : `<a href="${src}">${text}</a>`;
};
for (const cell of ["th_open", "td_open"]) { // (style attributes are forbidden)
  md.renderer.rules[cell] = (tokens, i, options, env, self) => {
    const align = /text-align:(\w+)/.exec(tokens[i].attrGet("style") ?? "");
    tokens[i].attrs = align ? [["class", `align-${align[1]}`]] : null;
    return self.renderToken(tokens, i, options);
  };
}

// The outermost blocks: their tokens, and their first lines.
function blocksOf(tokens) {
  const blocks = [];
  let start = 0;
  let depth = 0;
  tokens.forEach((token, i) => {
    depth += token.nesting;
    if (depth) return;
    blocks.push({ tokens: tokens.slice(start, i + 1), line: tokens[start].map[0] });
    start = i + 1;
  });
  return blocks;
}

const MOST_DECORATORS = 10;
// An answer that is Python as a whole, without a fence around it.
const BARE_CODE = new RegExp([
  /(?:async )?def \w+\(/, /class \w+[(:]/, /import \w+(?:\.\w+)*$/, /from [\w.]+ import (?:\(|\*$|NAME(?:, NAME)*,?$)/,
  /(?:@[\w.]+(?:\(.*\))?\n)+(?:(?:async )?def|class) /, // "@Ann, ..." is a name
].map(({ source }) => `^(?:${source.replaceAll("NAME", "\\w+(?: as \\w+)?")})`).join("|"), "m");

function prepared(text) {
  if (isStructure(text)) return `\`\`\`json\n${pretty(text)}`;
  const start = text.trimStart().split("\n", MOST_DECORATORS).join("\n");
  return BARE_CODE.exec(start)?.index === 0 && !text.includes("```") ? `\`\`\`python\n${text}` : text;
}

// Keeps the content of `box` equal to a text that grows.
export class Markdown {
  constructor(box) {
    this.box = box;
    this.blocks = []; // { html, node }
    this.showsAll = false; // of wide tables
    followFootnotes(box);
    box.addEventListener("click", (event) => {
      if (event.target.closest(".show-columns")) this.showAll();
    });
    this.restart("");
  }

  restart(source) {
    this.source = source;
    this.offset = 0; // of the first block that may still change
    this.numFinished = 0; // blocks before it
    this.env = { showsAll: this.showsAll };
  }

  showAll() {
    this.showsAll = true;
    const { source, isWhole } = this;
    this.restart("");
    this.update(source, isWhole);
  }

  // `isWhole`: nothing more comes; links may be defined after their use.
  update(text, isWhole) {
    const source = prepared(text);
    if (isWhole || !source.startsWith(this.source)) this.restart(source);
    this.source = source;
    this.isWhole = isWhole;
    const rest = source.slice(this.offset);
    if (isWhole) md.parse(rest, this.env); // collects the definitions
    const blocks = blocksOf(md.parse(rest, this.env));
    blocks.forEach(({ tokens }, i) => {
      this.show(this.numFinished + i, md.renderer.render(tokens, md.options, this.env));
    });
    for (const { node } of this.blocks.splice(this.numFinished + blocks.length)) node.remove();
    if (isWhole) drawDiagrams(this.box);
    else this.finish(rest, blocks);
  }

  // The last block is open, and with it the one before until the last one's first line is whole.
  finish(rest, blocks) {
    const last = blocks.at(-1);
    if (blocks.length < 2) return;
    let start = 0;
    for (let line = 0; line < last.line; line += 1) start = rest.indexOf("\n", start) + 1;
    if (!rest.includes("\n", start)) return;
    this.offset += start;
    this.numFinished += blocks.length - 1;
  }

  show(i, html) {
    const known = this.blocks[i];
    if (known?.html === html) return;
    const fresh = element("div", { className: "block" }, DOMPurify.sanitize(html, PURIFY));
    decorate(fresh);
    if (known) {
      patch(known.node, fresh);
      known.html = html;
    } else {
      this.box.append(fresh);
      this.blocks.push({ html, node: fresh });
    }
    typeset(this.blocks[i].node);
  }
}

// Does to sanitised elements what Markdown itself does not.
function decorate(root) {
  for (const code of root.querySelectorAll("pre > code")) dressCode(code);
  for (const table of root.querySelectorAll("table")) dressTable(table);
  for (const link of root.querySelectorAll("a[href]")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const item of root.querySelectorAll("li")) dressTask(item);
  dressFootnotes(root);
  typeset(root);
}

function dressCode(code) {
  const label = /language-(\S+)/.exec(code.className)?.[1] ?? "";
  const language = hljs.getLanguage(label) ? label : null;
  code.className = "hljs";
  if (language && code.textContent.length < LONGEST_HIGHLIGHTED) {
    const { value } = hljs.highlight(code.textContent, { language, ignoreIllegals: true });
    code.replaceChildren(DOMPurify.sanitize(value, PURIFY));
  }
  const pre = code.parentElement;
  pre.tabIndex = 0;
  pre.setAttribute("role", "group");
  pre.setAttribute("aria-label", label ? `Code: ${label}` : "Code");
  const box = element("div", { className: "code" }, element(
    "div", { className: "code-head" },
    element("span", { className: "language", textContent: label || "text" }),
    ...[previewButton(label)].filter(Boolean),
    element("button", { type: "button", className: "copy-code" }, icon("copy"), "Copy"),
  ));
  pre.replaceWith(box);
  box.append(pre);
}

function dressTask(item) {
  const holder = item.firstElementChild?.tagName === "P" ? item.firstElementChild : item;
  const text = holder.firstChild;
  const mark = text?.nodeType === Node.TEXT_NODE && /^\[([ xX])\]\s/.exec(text.data);
  if (!mark) return;
  text.data = text.data.slice(mark[0].length);
  const checked = mark[1] !== " ";
  item.classList.add("task");
  const box = element("input", { type: "checkbox", disabled: true, "aria-label": checked ? "Done" : "Open" });
  box.toggleAttribute("checked", checked);
  holder.prepend(box);
}
