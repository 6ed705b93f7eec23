// Tables of Markdown. A wide one shows its first columns, and all when asked to: to lay out thousands would block the
// page, and a table that still comes is drawn again with each of its rows.

import { element } from "./view.js";

export const MOST_COLUMNS = 100;

// Takes the cells behind the most columns out of the tokens before anything else is done with them. `env.showsAll`:
// they stay.
export function wideTables(md) {
  md.core.ruler.before("inline", "wide_tables", (state) => {
    if (state.env.showsAll) return;
    const kept = [];
    let column = 0;
    let count = 0; // of the first row's columns
    let table = null;
    let isFirst = false;
    let drops = false;
    for (const token of state.tokens) {
      if (token.type === "table_open") {
        table = token;
        isFirst = true;
        count = 0;
      } else if (token.type === "tr_open") column = 0;
      else if (token.type === "tr_close") {
        if (isFirst) count = column;
        isFirst = false;
      } else if (token.type === "table_close") {
        if (count > MOST_COLUMNS) table.attrSet("data-columns", String(count));
      } else if (token.type === "th_open" || token.type === "td_open") {
        drops = column >= MOST_COLUMNS;
        column += 1;
      }
      if (!drops) kept.push(token);
      if (token.type === "th_close" || token.type === "td_close") drops = false;
    }
    state.tokens = kept;
  });
}

// A table in a box that scrolls, with a button where columns are missing.
export function dressTable(table) {
  const box = element("div", { className: "table", tabIndex: 0, role: "group", "aria-label": "Table" });
  table.replaceWith(box);
  box.append(table);
  const count = Number(table.dataset.columns);
  if (!count) return;
  const [shown, all] = [MOST_COLUMNS, count].map((number) => number.toLocaleString("en"));
  box.before(element(
    "p", { className: "cut muted" }, `The first ${shown} of ${all} columns are shown. `,
    element("button", { type: "button", className: "show-columns", textContent: "Show all" }),
  ));
}
