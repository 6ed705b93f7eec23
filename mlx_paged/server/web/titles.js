// Titles of chats, written by the model: a short request after the first answer, once nothing else runs.

import { post } from "./api.js";
import { splitReasoning } from "./conversation.js";

const TASK = "Write a title of at most six words for the conversation that follows, in its language. "
  + "Reply with the title alone, on one line.";
const MAX_TOKENS = 24;
const READ_CHARACTERS = 1000; // of the question, and of the answer
const LONGEST = 80; // characters of a title

export class Titles {
  constructor(store, answers, settings) {
    this.store = store;
    this.settings = settings;
    this.waiting = new Map(); // chat id -> its first answer
    this.controller = null; // of the request that runs
    answers.addEventListener("end", ({ detail: answer }) => {
      if (settings.titles && this.isFirst(answer)) this.waiting.set(answer.chat, answer);
    });
    // The user's questions come first: a title that is being written is asked for again later.
    store.addEventListener("change", ({ detail: { kind, record } }) => {
      if (kind === "messages" && record.status === "streaming") this.controller?.abort();
    });
  }

  isFirst(answer) {
    const question = this.store.get("messages", answer.parent);
    return answer.status === "done" && question?.parent === null && Boolean(splitReasoning(answer).text.trim());
  }

  isUntitled(chat) {
    const known = this.store.chats.get(chat);
    return Boolean(known) && !known.deleted && !known.title;
  }

  // Asks for one title. Called every few seconds; `isBusy`: the server computes something.
  async write(isBusy) {
    if (!this.settings.titles) this.waiting.clear();
    if (isBusy || this.controller || this.store.streaming.size) return;
    for (const chat of this.waiting.keys()) if (!this.isUntitled(chat)) this.waiting.delete(chat);
    const [answer] = this.waiting.values();
    if (!answer) return;
    this.controller = new AbortController();
    try {
      const title = await this.ask(answer, this.controller.signal);
      this.waiting.delete(answer.chat);
      if (title && this.isUntitled(answer.chat)) await this.store.write("chats", answer.chat, { title });
    } catch {
      if (!this.controller.signal.aborted) this.waiting.delete(answer.chat); // its first question stays its title
    } finally {
      this.controller = null;
    }
  }

  async ask(answer, signal) {
    const question = this.store.get("messages", answer.parent);
    const texts = [question.content, splitReasoning(answer).text].map((text) => text.slice(0, READ_CHARACTERS));
    const reply = await post("v1/chat/completions", this.settings.key, {
      model: this.settings.model || undefined,
      messages: [
        { role: "system", content: TASK },
        { role: "user", content: `User: ${texts[0]}\n\nAssistant: ${texts[1]}` },
      ],
      max_tokens: MAX_TOKENS, temperature: 0, stop: ["\n"], chat_template_kwargs: { enable_thinking: false },
    }, signal);
    return cleaned(reply.choices[0].message.content ?? "");
  }
}

// Without the marks that models put around a title.
function cleaned(text) {
  const { text: line } = splitReasoning({ content: text, reasoning: "" });
  return line.split("\n")[0].replace(/^(?:\s|title:|[#*"'`“”])+|[\s*"'`“”.]+$/giu, "").slice(0, LONGEST);
}
