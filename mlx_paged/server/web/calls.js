// The calls of an answer as elements: folded, their arguments and results within; the question whether a
// call may run stands below it.

import { figure } from "./attachments.js";
import { isObject, pretty } from "./json.js";
import { element } from "./view.js";

// `act`: runCall, refuseCall, alwaysCall, stopCall; each takes a message and the place of a call. `urlOf`: a
// promise of where the bytes of an item are.
export class CallView {
  constructor(index, act, urlOf) {
    this.urlOf = urlOf;
    this.index = index;
    this.act = act;
    this.name = element("code");
    this.state = element("span", { className: "muted" });
    this.arguments = box("Arguments");
    this.result = box("Result");
    this.resultLabel = element("p", { className: "call-label", textContent: "Result" });
    this.summary = element("summary", {}, this.name, " ", this.state);
    this.details = element(
      "details", {}, this.summary,
      element("p", { className: "call-label", textContent: "Arguments" }), this.arguments,
      this.resultLabel, this.result,
    );
    this.question = element("div", { className: "question" });
    this.pictures = element("ul", { className: "items", "aria-label": "Pictures of the result", hidden: true });
    this.item = element("div", { className: "call", role: "group" }, this.details, this.pictures, this.question);
    this.shown = "";
    this.asked = false;
  }

  // `server`: that has the tool; undefined: none. `asks`: whether the user may let it run.
  update(message, call, { server, asks, isRunning }) {
    this.message = message;
    const shown = JSON.stringify([call, server, asks, isRunning, message.status]);
    if (shown === this.shown) return;
    this.shown = shown;
    const isWhole = message.status !== "streaming" || isObject(call.arguments);
    this.name.textContent = call.name;
    this.state.textContent = stateOf(message, call, asks, isRunning);
    this.item.setAttribute("aria-label", `Call of ${call.name}`);
    this.arguments.textContent = isWhole ? pretty(call.arguments || "{}") : call.arguments;
    this.result.textContent = call.result ? pretty(call.result.text) : "";
    for (const part of [this.result, this.resultLabel]) part.hidden = !call.result;
    const items = call.result?.media ?? [];
    this.pictures.hidden = !items.length;
    this.pictures.replaceChildren(...items.map((item) => element("li", {}, figure(item, this.urlOf(item.id)))));
    this.item.classList.toggle("failed", Boolean(call.result) && call.result.status !== "done");
    // A call that waits for approval is open; afterwards it is folded.
    if (asks !== this.asked) this.details.open = asks;
    this.asked = asks;
    this.drawQuestion(call, server, asks, isRunning);
  }

  drawQuestion(call, server, asks, isRunning) {
    const hadFocus = this.question.contains(document.activeElement);
    const button = (textContent, className, does) => element("button", {
      type: "button", textContent, className, onclick: () => does(this.message, this.index),
    });
    if (isRunning) this.question.replaceChildren(button("Stop the call", "", this.act.stopCall));
    else if (asks) {
      const text = `Run ${call.name} of the server “${server}” with these arguments?`;
      this.question.replaceChildren(
        element("p", { textContent: text }),
        button("Run", "primary", this.act.runCall),
        button("Refuse", "", this.act.refuseCall),
        button("Always in this chat", "", this.act.alwaysCall),
      );
    } else this.question.replaceChildren();
    if (hadFocus) (this.question.querySelector("button") ?? this.summary).focus();
  }
}

function box(label) {
  return element("pre", { tabIndex: 0, role: "group", "aria-label": label });
}

function stateOf(message, call, asks, isRunning) {
  if (isRunning) return "Running…";
  if (asks) return "Waiting for approval";
  if (call.result) return { done: "Done", failed: "Failed", refused: "Refused" }[call.result.status];
  return message.status === "streaming" ? "Writing…" : "Not run";
}
