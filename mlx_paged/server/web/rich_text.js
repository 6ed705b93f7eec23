// Markdown that is loaded when the rest of the page can be used: it and its libraries are more than half of
// all bytes. Until then texts are shown as they are.

import { element } from "./view.js";

const PATIENCE = 250; // milliseconds; a fast connection shows no plain text first

let loaded = null; // the module
const early = new Set(); // texts that were shown before

const slow = new Promise((resolve) => { setTimeout(resolve, PATIENCE); });
const loading = import("./markdown.js").then((module) => {
  loaded = module;
  for (const text of early) text.become();
  early.clear();
});
// (Without it the page still works; a reload tries again.)
loading.catch((error) => console.error(error));

// Keeps the content of `box` equal to a text that grows.
export class RichText {
  constructor(box) {
    this.box = box;
    this.markdown = loaded && new loaded.Markdown(box);
    this.shown = null; // the arguments of `update`
    if (!loaded) early.add(this);
  }

  update(text, isWhole) {
    if (this.markdown) {
      this.markdown.update(text, isWhole);
      return;
    }
    this.shown = [text, isWhole];
    slow.then(() => {
      if (!this.markdown) this.box.replaceChildren(element("p", { className: "plain", textContent: this.shown[0] }));
    });
  }

  become() {
    this.box.replaceChildren();
    this.markdown = new loaded.Markdown(this.box);
    if (this.shown) this.markdown.update(...this.shown);
    this.shown = null;
  }
}
