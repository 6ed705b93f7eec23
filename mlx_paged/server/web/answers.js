// Answers that come in this tab: any number at once, one for each question. All of it is saved: the
// question before it is sent, the answer while it comes.

import { ApiError, bodyOf, chat as ask, ConnectionLost } from "./api.js";
import { fitting, shortened } from "./context.js";
import { callsOf, historyOf, newId, pathTo, seenOf } from "./conversation.js";
import { filled, MediaError } from "./media.js";
import { drafts } from "./settings.js";

const SAVE_MILLISECONDS = 300;

// Events, with their details: "progress" the id of a message that has more text, "end" its record,
// "unauthorised" after a 401, "schema" what the server says of the JSON schema.
export class Answers extends EventTarget {
  // `toolsOf`: what the model may call in a chat. `limitOf`: tokens of the model's context; undefined: not known.
  constructor(store, settings, toolsOf = () => [], limitOf = () => undefined) {
    super();
    this.store = store;
    this.settings = settings;
    this.toolsOf = toolsOf;
    this.limitOf = limitOf;
    this.running = new Map(); // message id -> its Answer
    this.tokens = new Map(); // message id -> its tokens with their probabilities, as long as this page is open
    this.sending = new Set(); // ids of chats whose new question is being saved
    store.addEventListener("stop", ({ detail }) => this.running.get(detail)?.stop());
    store.addEventListener("gone", ({ detail }) => this.stopChats(detail));
    store.addEventListener("change", ({ detail: { kind, record } }) => {
      if (kind === "chats" && record.deleted) this.stopChats([record.id]);
    });
  }

  // An answer that comes in a chat, in this tab or another; or undefined.
  inChat(chat) {
    return this.store.answersOf(chat)[0];
  }

  isComing(id) {
    return this.store.get("messages", id)?.status === "streaming";
  }

  stop(message) {
    const answer = this.running.get(message.id);
    if (answer) answer.stop();
    else this.store.askToStop(message.id);
  }

  stopChats(chats) {
    for (const answer of this.running.values()) if (chats.includes(answer.chat)) answer.stop();
  }

  // A new message below `parent` (null: the first), and its answer. `draft`: where its text was typed;
  // that is forgotten once the message is saved. `items`: its media, of a tray.
  async send(chat, parent, text, draft, items = []) {
    if (this.sending.has(chat) || this.isComing(parent)) return;
    this.sending.add(chat);
    const media = [];
    for (const item of items) media.push(await this.store.keepMedia(chat, item));
    const question = await this.store.addLeaf({ chat, parent, role: "user", content: text, media });
    this.sending.delete(chat);
    drafts.set(draft, "");
    await this.answer(question);
  }

  // A new answer to a user's message, or to the results of calls; it replaces `failed`, which has no text.
  async answer(question, failed = null) {
    const { chat } = question;
    // (Another tab may get an answer to another question of this chat at the same time: that is another branch.)
    if (this.store.answersOf(chat).some((answer) => answer.parent === question.id)) return;
    const fresh = {
      content: "", reasoning: "", calls: [], status: "streaming", error: null, finish: null, stats: null,
      relaxed: null, from: null, model: this.settings.model || null, owner: this.store.tab,
    };
    const id = failed?.id ?? newId();
    this.tokens.delete(id);
    const saved = failed
      ? this.store.write("messages", id, fresh)
      : this.store.addLeaf({ id, chat, parent: question.id, role: "assistant", ...fresh });
    const answer = this.begin(id);
    await saved;
    const path = pathTo(this.store.messagesOf(chat), question.id);
    await answer.run(path, { tools: this.toolsOf(chat) });
  }

  // Goes on with an answer that was cut, stopped or interrupted.
  async continue(message) {
    if (this.isComing(message.id)) return;
    // Templates trim what they are given, so the model writes this space again.
    const content = message.content.trimEnd();
    const saved = this.store.write("messages", message.id, {
      content, status: "streaming", error: null, finish: null, relaxed: null, owner: this.store.tab,
    });
    const answer = this.begin(message.id);
    await saved;
    const path = pathTo(this.store.messagesOf(message.chat), message.id);
    const unfinished = { content, reasoning: message.reasoning };
    await answer.run(seenOf(path).slice(0, -1), { unfinished });
  }

  takeTokens(id, tokens) {
    if (!this.tokens.has(id)) this.tokens.set(id, []);
    this.tokens.get(id).push(...tokens);
  }

  begin(id) {
    const answer = new Answer(this, this.store.get("messages", id));
    this.running.set(id, answer);
    this.store.owned.add(id);
    return answer;
  }

  ended(answer, record) {
    this.running.delete(answer.id);
    this.store.owned.delete(answer.id);
    if (record) this.dispatchEvent(new CustomEvent("end", { detail: record })); // else it was deleted
  }
}

class Answer {
  constructor(answers, message) {
    this.answers = answers;
    this.store = answers.store;
    this.id = message.id;
    this.chat = message.chat;
    this.content = message.content;
    this.reasoning = message.reasoning;
    this.calls = callsOf(message).map((call) => ({ ...call }));
    this.length = message.content.length; // of what was there before
    this.stats = message.stats;
    this.controller = new AbortController();
    this.numTokens = 0; // of deltas, which have one token each unless the server says otherwise
    this.timer = null;
  }

  stop() {
    this.controller.abort();
  }

  // `path`: the messages before the answer; the oldest turns are left out where they do not fit. `options`: those of
  // `bodyOf`.
  async run(path, options) {
    const settings = this.answers.settings.of(this.store.get("chats", this.chat));
    const blobOf = ({ id }) => this.store.blobOf(this.chat, id);
    let seen = path;
    if (!options.unfinished) {
      const { tools } = options;
      // (The request says what is wrong.)
      seen = await fitting(path, { limit: this.answers.limitOf(), settings, tools, blobOf }).catch(() => seenOf(path));
    }
    for (;;) {
      if (seen !== path) this.store.write("messages", this.id, { from: seen[0].id });
      const shorter = await this.request(seen, options, blobOf);
      if (!shorter) return;
      seen = shorter;
    }
  }

  // One request, and what comes of it. Returns a shorter path where the server finds this one too long; else null.
  async request(seen, options, blobOf) {
    const settings = this.answers.settings.of(this.store.get("chats", this.chat));
    let started = performance.now();
    const changes = { status: "done", owner: null, error: null, relaxed: null };
    let usage = null;
    this.last = started;
    let arrivals = 0;
    try {
      const { messages, names } = await filled(historyOf(seen), blobOf);
      const body = bodyOf(messages, settings, settings.model, options);
      this.nameOf = (i, j) => names.get(`${i - body.messages.indexOf(messages[0])}.${j}`);
      this.controller.signal.throwIfAborted();
      this.last = started = performance.now();
      for await (const news of ask(body, settings.key, this.controller.signal)) {
        if (news.text || news.reasoning || news.call) {
          const now = performance.now();
          if (now - this.last > 1) arrivals += 1;
          this.last = now;
          this.first ??= now;
          this.numTokens += 1;
          this.content += news.text ?? "";
          this.reasoning += news.reasoning ?? "";
          if (news.call) this.takeCall(news.call);
          this.progress();
        }
        if (news.tokens) this.answers.takeTokens(this.id, news.tokens);
        changes.relaxed = news.relaxed ?? changes.relaxed;
        usage = news.usage ?? usage;
        changes.finish = news.finish ?? changes.finish;
      }
    } catch (error) {
      if (this.isTooLong(error) && shortened(seen, 1 / 2) !== seen) return shortened(seen, 1 / 2);
      Object.assign(changes, this.failure(error));
    }
    clearTimeout(this.timer);
    changes.stats = this.statistics(usage, started, arrivals) ?? this.stats;
    const record = await this.store.write("messages", this.id, {
      ...changes, content: this.content, reasoning: this.reasoning, calls: this.calls,
    });
    this.answers.ended(this, record);
    return null;
  }

  isTooLong(error) {
    return error.code === "context_length_exceeded" && this.first === undefined;
  }

  takeCall({ index, id, name, arguments: piece }) {
    const call = this.calls[index] ?? { id: id ?? `call_${index}`, name: "", arguments: "", result: null };
    this.calls[index] = call;
    if (name) call.name = name;
    call.arguments += piece;
  }

  progress() {
    this.answers.dispatchEvent(new CustomEvent("progress", { detail: this.id }));
    this.timer ??= setTimeout(() => {
      this.timer = null;
      const { content, reasoning, calls } = this;
      const { tab: owner } = this.store;
      const grown = { content, reasoning, calls: calls.map((call) => ({ ...call })) };
      this.store.write("messages", this.id, { ...grown, status: "streaming", owner });
    }, SAVE_MILLISECONDS);
  }

  failure(error) {
    if (error.name === "AbortError") return { status: "stopped" };
    const hasText = this.content.trim() !== "" || this.reasoning.trim() !== "" || this.calls.length > 0;
    if (error instanceof ConnectionLost) {
      // The text so far is good; it can be continued.
      return { status: hasText ? "interrupted" : "failed", error: error.message };
    }
    if (error.status === 401) this.answers.dispatchEvent(new CustomEvent("unauthorised"));
    if (error.param?.startsWith("response_format")) {
      this.answers.dispatchEvent(new CustomEvent("schema", { detail: error.message }));
    }
    const message = this.told(error);
    // The text from before the continuation is good.
    const isOld = hasText && this.content.length === this.length;
    return { status: isOld ? "interrupted" : "failed", error: message };
  }

  // An error as it is shown; one of an item says which.
  told(error) {
    if (error instanceof MediaError) return error.message;
    if (error.code === "context_length_exceeded") return `Too long for the context. ${error.message}`;
    if (!(error instanceof ApiError)) return `${error.name}: ${error.message}`;
    const [, i, j] = /^messages\[(\d+)\]\.content\[(\d+)\]/.exec(error.param ?? "") ?? [];
    const name = i === undefined ? undefined : this.nameOf?.(i, j);
    return name ? error.message.replace(error.param, name) : error.message;
  }

  statistics(usage, started, arrivals) {
    if (this.first === undefined) return null;
    if (!usage) { // stopped, or broken
      const speed = this.tokensPerSecond();
      return speed ? { tokensPerSecond: speed, ttft: (this.first - started) / 1000 } : null;
    }
    // Text that came in one piece, from a busy browser or proxy, gives no time between tokens.
    const count = usage.completion_tokens;
    const [tokens, since] = arrivals > 3 ? [count - 1, this.first] : [count, started];
    const seconds = (this.last - since) / 1000;
    return {
      ...(seconds > 0 && tokens > 0 ? { tokensPerSecond: tokens / seconds } : {}),
      ttft: (this.first - started) / 1000,
      prompt: usage.prompt_tokens,
      completion: count,
      cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
      total: usage.total_tokens ?? usage.prompt_tokens + count,
    };
  }

  // Speed so far; undefined until there are enough tokens.
  tokensPerSecond() {
    const seconds = (this.last - this.first) / 1000;
    return this.numTokens > 8 && seconds > 0.3 ? (this.numTokens - 1) / seconds : undefined;
  }
}
