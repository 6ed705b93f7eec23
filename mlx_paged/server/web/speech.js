// Answers read aloud and messages dictated, by the browser's own speech, where it has it.

import { element, icon } from "./view.js";

const LONGEST_PIECE = 200; // characters: browsers cut off longer ones
const Recognition = globalThis.SpeechRecognition ?? globalThis.webkitSpeechRecognition;
const canRead = "speechSynthesis" in globalThis && "SpeechSynthesisUtterance" in globalThis;

// Sentences, and parts of long ones at spaces.
function piecesOf(text) {
  const sentences = text.split(/(?<=[.!?。！？]\s)|\n+/u);
  const longest = new RegExp(`.{1,${LONGEST_PIECE}}(?:\\s|$)|.{1,${LONGEST_PIECE}}`, "gsu");
  return sentences.flatMap((sentence) => sentence.match(longest) ?? []).map((piece) => piece.trim()).filter(Boolean);
}

// Text of an answer as one would read it: code is only named.
function spoken(box) {
  const copy = box.cloneNode(true);
  for (const code of copy.querySelectorAll(".code")) code.replaceWith("Code.\n");
  for (const mark of copy.querySelectorAll("[data-footnote], .katex-html")) mark.remove();
  for (const block of copy.querySelectorAll("p, li, h1, h2, h3, h4, h5, h6, tr, .block")) block.append("\n");
  return copy.textContent;
}

// Reads one answer at a time.
export class Reader {
  constructor() {
    this.id = null; // of the message that is read
    this.buttons = new Map(); // message id -> its newest button
    if (canRead) addEventListener("pagehide", () => this.stop()); // else it goes on after a reload
  }

  // A button for the message whose text is in `box`; null: this browser cannot read.
  button(id, box) {
    if (!canRead) return null;
    const button = element("button", {
      type: "button", onclick: () => (this.id === id ? this.stop() : this.read(id, spoken(box))),
    });
    this.buttons.set(id, button);
    this.label(id);
    return button;
  }

  label(id) {
    this.buttons.get(id)?.replaceChildren(
      ...(this.id === id ? [icon("stop"), "Stop reading"] : [icon("sound"), "Read aloud"]),
    );
  }

  read(id, text) {
    this.stop();
    this.id = id;
    this.label(id);
    const pieces = piecesOf(text).map((piece) => new SpeechSynthesisUtterance(piece));
    const end = () => { if (this.last === pieces.at(-1)) this.stop(); };
    this.last = pieces.at(-1);
    if (!pieces.length) return this.stop();
    this.last.addEventListener("end", end);
    for (const piece of pieces) {
      piece.addEventListener("error", end);
      speechSynthesis.speak(piece);
    }
  }

  stop() {
    const { id } = this;
    if (id === null) return;
    this.id = null;
    this.last = null;
    speechSynthesis.cancel();
    this.label(id);
  }
}

// A button that writes what is said into a text field. `tell`: shows why it cannot.
export class Dictation {
  constructor(input, tell) {
    this.input = input;
    this.tell = tell;
    this.recognition = null; // while it listens
    this.button = element("button", {
      type: "button", id: "dictate", className: "icon-button", "aria-label": "Dictate", title: "Dictate",
      "aria-pressed": "false", hidden: !Recognition,
      onclick: () => (this.recognition ? this.stop() : this.start()),
    }, icon("microphone"));
  }

  start() {
    const before = this.input.value && !/\s$/.test(this.input.value) ? `${this.input.value} ` : this.input.value;
    const recognition = new Recognition();
    Object.assign(recognition, { continuous: true, interimResults: true, lang: navigator.language });
    recognition.addEventListener("result", ({ results }) => {
      if (this.recognition !== recognition) return; // what comes late is for a message that was sent
      this.input.value = before + [...results].map(([best]) => best.transcript).join("");
      this.input.dispatchEvent(new Event("input", { bubbles: true }));
    });
    recognition.addEventListener("error", ({ error }) => {
      if (error === "not-allowed") this.tell("This browser does not let the page use the microphone.");
      else if (error !== "aborted" && error !== "no-speech") this.tell(`Dictation stopped: ${error}.`);
    });
    recognition.addEventListener("end", () => { if (this.recognition === recognition) this.stop(); });
    this.recognition = recognition;
    this.show();
    recognition.start();
  }

  stop() {
    const { recognition } = this;
    this.recognition = null;
    recognition?.stop();
    this.show();
  }

  show() {
    this.button.setAttribute("aria-pressed", String(Boolean(this.recognition)));
  }
}
