// The tokens of an answer, shaded by their probability, and the alternatives of each.

import { element, icon, isComposing } from "./view.js";

export const NUM_ALTERNATIVES = 5; // that a request asks for
const STRONGEST = 45; // percent of the shade of a token with probability 0

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)}%`;
const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

// A token that white space does not hide.
const shown = (token) => token.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "␣") || "(empty)";

// Tokens are entries of the API: { token, logprob, top_logprobs: [{ token, logprob }] }.
export class TokensDialog {
  constructor() {
    this.list = element("div", {
      className: "tokens", role: "listbox", tabIndex: 0, "aria-label": "Tokens of the answer",
      onclick: (event) => {
        const place = [...this.list.children].indexOf(event.target.closest("[role=option]"));
        if (place >= 0) this.choose(place);
      },
      onkeydown: (event) => this.move(event),
    });
    this.about = element("div", { className: "alternatives", role: "status" });
    const close = { type: "button", className: "icon-button", "aria-label": "Close tokens", onclick: () => this.dialog.close() };
    this.dialog = element(
      "dialog", { id: "token-view", "aria-labelledby": "token-view-title" },
      element("header", {}, element("h2", { id: "token-view-title" }, "Tokens"), element("button", close, icon("close"))),
      element(
        "div", { className: "body" },
        element("p", { className: "muted" }, "The stronger the color of a token, the less probable it was. Click one, or use the arrow keys, to see its alternatives."),
        this.about, this.list,
      ),
    );
    this.dialog.addEventListener("click", (event) => { // on what is around it
      if (event.target === this.dialog) this.dialog.close();
    });
    this.dialog.addEventListener("keydown", (event) => {
      if (event.key === "Escape") event.stopPropagation(); // it closes the dialog, and stops nothing
    });
    document.body.append(this.dialog);
  }

  open(tokens) {
    this.tokens = tokens;
    this.list.replaceChildren(...tokens.map(({ token, logprob }, i) => {
      const name = `${shown(token)}, ${percent(logprob)}`;
      const option = element("span", { role: "option", id: `token-${i}`, "aria-selected": "false", "aria-label": name, title: name }, token);
      option.style.setProperty("--doubt", `${(STRONGEST * (1 - Math.exp(logprob))).toFixed(0)}%`);
      return option;
    }));
    this.place = null;
    this.dialog.showModal();
    this.choose(0);
    this.list.focus();
  }

  move(event) {
    if (isComposing(event)) return;
    const last = this.tokens.length - 1;
    const to = { Home: 0, End: last }[event.key] ?? this.place + STEPS[event.key];
    if (Number.isNaN(to)) return;
    event.preventDefault();
    this.choose(Math.min(last, Math.max(0, to)));
  }

  choose(place) {
    this.list.children[this.place]?.setAttribute("aria-selected", "false");
    this.place = place;
    const option = this.list.children[place];
    option.setAttribute("aria-selected", "true");
    option.scrollIntoView({ block: "nearest" });
    this.list.setAttribute("aria-activedescendant", option.id);
    const { token, logprob, top_logprobs: top = [] } = this.tokens[place];
    const all = top.some((one) => one.token === token) ? top : [{ token, logprob }, ...top];
    const rows = [...all].sort((a, b) => b.logprob - a.logprob).map((one) => element(
      "tr", {}, element("th", { scope: "row" }, element("code", {}, shown(one.token))),
      element("td", {}, percent(one.logprob)), element("td", {}, one.token === token ? "chosen" : ""),
    ));
    this.about.replaceChildren(element("table", { "aria-label": "Alternatives" }, element("tbody", {}, ...rows)));
  }
}
