// Math in Markdown: $...$ and \(...\) in a line, $$...$$ and \[...\] as a block. The tokens keep the
// source; KaTeX sets it later, as elements, once there is some.

import { element } from "./view.js";

const INLINE = [["\\(", "\\)", false], ["\\[", "\\]", true], ["$$", "$$", true]];
const BLOCK = [["\\[", "\\]"], ["$$", "$$"]];

function inline(state, silent) {
  const { src, pos } = state;
  const next = closersOf(state);
  for (const [open, close, display] of INLINE) {
    if (!src.startsWith(open, pos)) continue;
    const end = next(close, pos + 2);
    if (end < 0 || !src.slice(pos + 2, end).trim()) continue;
    return push(state, silent, src.slice(pos + 2, end), display, end + 2);
  }
  // A dollar is math only next to something, and "$5 and $6" is money (as in Pandoc).
  if (src[pos] !== "$" || /\s|\$|^$/.test(src[pos + 1] ?? "")) return false;
  const end = next("$", pos + 1);
  if (end < 0 || /\s/.test(src[end - 1]) || /\d/.test(src[end + 1] ?? "")) return false;
  return push(state, silent, src.slice(pos + 1, end), false, end + 1);
}

// Finds closing marks in a paragraph. Each search begins behind the one before or finds the same mark, so all of
// them together read the text once.
const closers = new WeakMap(); // state -> its function

function closersOf(state) {
  if (!closers.has(state)) {
    const found = new Map(); // mark -> [where the search began, its result]
    closers.set(state, (close, from) => {
      const [since, end] = found.get(close) ?? [Infinity, -1];
      const isKnown = from >= since && (end < 0 || from <= end);
      const place = isKnown ? end : find(state.src, close, from);
      if (!isKnown) found.set(close, [from, place]);
      return place + close.length <= state.posMax ? place : -1;
    });
  }
  return closers.get(state);
}

// The first mark; a dollar behind a backslash is text.
function find(src, close, from) {
  let end = src.indexOf(close, from);
  while (close === "$" && end > 0 && src[end - 1] === "\\") end = src.indexOf(close, end + 1);
  return end;
}

function push(state, silent, content, display, end) {
  if (!silent) {
    const token = state.push("math", "span", 0);
    token.content = content;
    token.meta = { display };
  }
  state.pos = end;
  return true;
}

const failures = new WeakMap(); // state of a document -> the last block that had no end

function block(state, startLine, endLine, silent) {
  const start = state.bMarks[startLine] + state.tShift[startLine];
  const first = state.src.slice(start, state.eMarks[startLine]);
  const pair = BLOCK.find(([open]) => first.startsWith(open));
  if (!pair || state.sCount[startLine] - state.blkIndent >= 4) return false;
  const [open, close] = pair;
  const failed = failures.get(state);
  if (close === "\\]" && failed && startLine < failed.before && endLine === failed.endLine) return false;
  // Every block that begins before the line that ended this search ends there, too.
  const fail = (line) => {
    failures.set(state, { before: line, endLine });
    return false;
  };
  const lines = [];
  let line = startLine;
  let closed = false;
  for (; line < endLine; line += 1) {
    let text = state.getLines(line, line + 1, state.blkIndent, false);
    if (line === startLine) text = text.trimStart().slice(open.length);
    else if (!text.trim() && close === "$$") return false; // a paragraph with a $$ in it
    const end = text.indexOf(close);
    if (end >= 0) {
      if (text.slice(end + close.length).trim()) return fail(line); // goes on in the line: not a block
      lines.push(text.slice(0, end));
      closed = true;
      break;
    }
    lines.push(text);
  }
  if (!closed) return fail(endLine);
  if (silent) return true;
  const token = state.push("math", "div", 0);
  token.block = true;
  token.content = lines.join("\n");
  token.map = [startLine, line + 1];
  token.meta = { display: true };
  state.line = line + 1;
  return true;
}

export function maths(md) {
  md.inline.ruler.before("escape", "math", inline);
  md.block.ruler.before("fence", "math", block, { alt: ["paragraph", "reference", "blockquote", "list"] });
  md.renderer.rules.math = (tokens, i) => {
    const { tag, content, meta } = tokens[i];
    const kind = meta.display ? "math display" : "math";
    return `<${tag} class="${kind}">${md.utils.escapeHtml(content.trim())}</${tag}>`;
  };
}

let loading = null;

function load() {
  const href = new URL("./vendor/katex/katex.css", import.meta.url).href;
  document.head.append(element("link", { rel: "stylesheet", href }));
  return import("./vendor/katex/katex.js");
}

// Sets the math below `root`. KaTeX is loaded when it is first needed; until then, and where it
// finds an error, the source is shown.
export function typeset(root) {
  const open = root.querySelectorAll(".math:not(.typeset)");
  if (!open.length) return;
  if (!globalThis.katex) {
    loading ??= load().then(() => typeset(document));
    return;
  }
  for (const node of open) {
    const source = node.textContent;
    node.classList.add("typeset");
    try {
      globalThis.katex.render(source, node, {
        displayMode: node.classList.contains("display"),
        trust: false, // no links, images or classes of the author's
        strict: "ignore", maxExpand: 200, maxSize: 20,
      });
    } catch (error) {
      node.textContent = source;
      node.classList.add("wrong");
      node.title = error.message;
    }
  }
}
