// Footnotes of Markdown: [^label] in a text, and a paragraph [^label]: text, which stays where it is. They have the
// numbers of their paragraphs' order. As with links, a mark is one once its paragraph is known.

const NOTE = /^\[\^([^\]\s]{1,80})\]:[ \t]*(.*)$/;
const MARK = /^\[\^([^\]\s]{1,80})\]/;
const LONGEST_MARK = 84;

const lineOf = (state, line) => state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]);

// Numbers by label, of a text.
function numbersOf(env) {
  env.footnotes ??= new Map();
  return env.footnotes;
}

function block(state, startLine, endLine, silent) {
  if (state.sCount[startLine] - state.blkIndent >= 4) return false; // code
  const found = NOTE.exec(lineOf(state, startLine));
  if (!found) return false;
  if (silent) return true;
  const numbers = numbersOf(state.env);
  const [, label, first] = found;
  if (!numbers.has(label)) numbers.set(label, numbers.size + 1);
  const lines = [first];
  let end = startLine + 1;
  for (; end < endLine && !state.isEmpty(end) && !NOTE.test(lineOf(state, end)); end += 1) lines.push(lineOf(state, end));
  const open = state.push("footnote_open", "div", 1);
  Object.assign(open, { block: true, map: [startLine, end], meta: numbers.get(label) });
  Object.assign(state.push("inline", "", 0), { content: lines.join("\n"), map: [startLine, end], children: [] });
  state.push("footnote_close", "div", -1).block = true;
  state.line = end;
  return true;
}

function inline(state, silent) {
  if (state.src[state.pos] !== "[" || state.src[state.pos + 1] !== "^") return false;
  const found = MARK.exec(state.src.slice(state.pos, state.pos + LONGEST_MARK));
  const number = found && numbersOf(state.env).get(found[1]);
  if (!number) return false;
  if (!silent) state.push("footnote_mark", "sup", 0).meta = number;
  state.pos += found[0].length;
  return true;
}

export function footnotes(md) {
  md.block.ruler.before("reference", "footnote", block, { alt: ["paragraph", "reference"] });
  md.inline.ruler.before("link", "footnote", inline);
  const { rules } = md.renderer;
  rules.footnote_open = (tokens, i) => `<div class="footnote" data-note="${tokens[i].meta}"><sup>${tokens[i].meta}</sup> `;
  rules.footnote_close = () => "</div>\n";
  rules.footnote_mark = (tokens, i) => `<sup data-footnote="${tokens[i].meta}">${tokens[i].meta}</sup>`;
}

// Makes marks links to their notes, which are somewhere below `box`.
export function followFootnotes(box) {
  const follow = (event) => {
    const mark = event.target.closest("[data-footnote]");
    if (!mark || (event.type === "keydown" && event.key !== "Enter")) return;
    event.preventDefault();
    box.querySelector(`[data-note="${mark.dataset.footnote}"]`)?.focus();
  };
  box.addEventListener("click", follow);
  box.addEventListener("keydown", follow);
}

export function dressFootnotes(root) {
  for (const mark of root.querySelectorAll("[data-footnote]")) {
    mark.tabIndex = 0;
    mark.setAttribute("role", "link");
    mark.setAttribute("aria-label", `Footnote ${mark.dataset.footnote}`);
  }
  for (const note of root.querySelectorAll("[data-note]")) note.tabIndex = -1;
}
