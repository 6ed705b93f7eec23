// Folded parts of Markdown: a line <details>, a line <summary>...</summary> or both in one, Markdown, a line </details>.

const OPEN = /^<details(\s+open)?>\s*(?:<summary>(.*)<\/summary>)?\s*$/i;
const SUMMARY = /^<summary>(.*)<\/summary>\s*$/i;
const CLOSE = /^<\/details>\s*$/i;
const BEGINS = /^<details(?:\s+open)?>/i;
const FENCE = /^(?:`{3,}|~{3,})/;

const lineOf = (state, line) => state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]);

function block(state, startLine, endLine, silent) {
  if (state.sCount[startLine] - state.blkIndent >= 4) return false; // code
  const found = OPEN.exec(lineOf(state, startLine));
  if (!found) return false;
  if (silent) return true;
  let first = startLine + 1;
  let summary = found[2];
  if (summary === undefined && first < endLine) {
    summary = SUMMARY.exec(lineOf(state, first))?.[1];
    if (summary !== undefined) first += 1;
  }
  const last = endOf(state, first, endLine);
  state.push("details_open", "details", 1).attrs = found[1] ? [["open", ""]] : [];
  state.tokens.at(-1).map = [startLine, last];
  state.tokens.at(-1).block = true;
  state.push("summary_open", "summary", 1);
  const name = state.push("inline", "", 0);
  Object.assign(name, { content: summary?.trim() || "Details", map: [startLine, first], children: [] });
  state.push("summary_close", "summary", -1);
  const { lineMax, parentType } = state;
  state.lineMax = last;
  state.md.block.tokenize(state, first, last);
  Object.assign(state, { lineMax, parentType });
  state.push("details_close", "details", -1).block = true;
  state.line = Math.min(last + 1, endLine);
  return true;
}

// The line that closes a part; without one it goes to the end, as while it still comes.
function endOf(state, first, endLine) {
  let depth = 1;
  let fence = null;
  for (let line = first; line < endLine; line += 1) {
    const text = lineOf(state, line);
    const mark = FENCE.exec(text)?.[0];
    if (fence) {
      if (mark?.startsWith(fence)) fence = null;
    } else if (mark) fence = mark;
    else if (CLOSE.test(text)) depth -= 1;
    else if (BEGINS.test(text)) depth += 1;
    if (!depth) return line;
  }
  return endLine;
}

export function details(md) {
  const ends = ["paragraph", "reference", "blockquote", "list"]; // that it interrupts
  md.block.ruler.before("fence", "details", block, { alt: ends });
}
