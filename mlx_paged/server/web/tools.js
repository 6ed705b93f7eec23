// Tools of MCP servers: which there are, which a chat may use, and the calls that the user allows.

import { ApiError, ConnectionLost, get, post } from "./api.js";
import { callsOf, pathTo, pendingCalls, sentCalls } from "./conversation.js";
import { isObject } from "./json.js";
import { isMediaType, MediaError, ofBase64 } from "./media.js";

const MOST_ROUNDS = 10; // of calls for one message of the user, until it is the user who sends their results

const keyOf = (message, index) => `${message.id}.${index}`;

// Events: "change", of what runs or of what the server has.
export class Tools extends EventTarget {
  // `own`: the servers that the user has added on this page.
  constructor(store, settings, own) {
    super();
    this.store = store;
    this.settings = settings;
    this.own = own;
    // { name, status, error, is_own, tools: [{ name, title, description, parameters }], prompts, resources }
    this.servers = [];
    this.running = new Map(); // key of a call -> AbortController
    this.always = new Map(); // chat id -> names; as long as this page is open
    store.addEventListener("gone", ({ detail }) => detail.forEach((chat) => this.stop(chat)));
  }

  // Reads the offers of all servers anew.
  async load() {
    const servers = this.own.enabled();
    const { key } = this.settings;
    const found = servers.length ? await post("mcp/tools", key, { servers }) : await get("mcp/tools", key);
    this.servers = found.servers;
    this.dispatchEvent(new Event("change"));
  }

  // The text of a prompt of a server.
  async prompt(server, name, args) {
    const body = { server: this.named(server), name, arguments: args };
    return (await post("mcp/prompt", this.settings.key, body)).text;
  }

  // The contents of a resource: [{ uri, type, text or data }].
  async read(server, uri) {
    return (await post("mcp/resource", this.settings.key, { server: this.named(server), uri })).contents;
  }

  // How requests name a server: by its name, or whole if it is the page's.
  named({ name, is_own: isOwn }) {
    return isOwn ? this.own.find(name) : name;
  }

  // The server of a tool, by the tool's name; undefined: there is none.
  serverOf(name) {
    return this.servers.find((server) => server.tools.some((tool) => tool.name === name));
  }

  // The tools of a chat, as the API takes them.
  ofRequest(chat) {
    const names = this.store.get("chats", chat)?.tools ?? [];
    return this.servers.flatMap(({ tools }) => tools).filter((tool) => names.includes(tool.name)).map(
      ({ name, description, parameters }) => ({ type: "function", function: { name, description, parameters } }),
    );
  }

  isRunning(message, index) {
    return this.running.has(keyOf(message, index));
  }

  // Why a call can never run; null: the user decides.
  wrong(message, call) {
    if (!this.store.get("chats", message.chat)?.tools?.includes(call.name) || !this.serverOf(call.name)) {
      return "There is no such tool in this chat.";
    }
    return isObject(call.arguments) ? null : "Its arguments are not a JSON object.";
  }

  // An answer has ended: calls that cannot run get their results, those that always may are run.
  async settle(message) {
    for (const call of pendingCalls(message)) {
      const index = callsOf(message).indexOf(call);
      const reason = this.wrong(message, call);
      if (reason) await this.note(message, index, { status: "failed", text: `Not run. ${reason}` });
      else if (this.always.get(message.chat)?.has(call.name)) this.run(message, index);
    }
  }

  // Answers with calls since the user's last message.
  numRounds(message) {
    const path = pathTo(this.store.messagesOf(message.chat), message.id);
    return path.length - 1 - path.findLastIndex((m) => m.role === "user");
  }

  allowAlways(message, index) {
    const names = this.always.get(message.chat) ?? new Set();
    this.always.set(message.chat, names.add(callsOf(message)[index].name));
    callsOf(message).forEach((call, i) => {
      if (!call.result && names.has(call.name) && !this.wrong(message, call)) this.run(message, i);
    });
  }

  refuse(message, index) {
    return this.note(message, index, { status: "refused", text: "The user refused this call." });
  }

  // The user has agreed to exactly this.
  async run(message, index) {
    const key = keyOf(message, index);
    const { name, arguments: text } = callsOf(message)[index];
    if (this.running.has(key)) return;
    const controller = new AbortController();
    this.running.set(key, controller);
    this.dispatchEvent(new Event("change"));
    let result;
    try {
      const server = this.serverOf(name);
      const own = server?.is_own ? { server: this.named(server) } : {};
      const body = { name, arguments: text, consent: { name, arguments: text }, ...own };
      const answer = await post("mcp/call", this.settings.key, body, controller.signal);
      const media = await this.kept(message.chat, answer.images ?? []);
      result = { status: answer.is_error ? "failed" : "done", text: answer.text, ...(media.length ? { media } : {}) };
    } catch (error) {
      result = { status: "failed", text: reasonOf(error) };
    }
    this.running.delete(key);
    await this.note(message, index, result);
  }

  // Pictures of a result; what is none is left out.
  async kept(chat, images) {
    const found = [];
    for (const [i, { type, data }] of images.entries()) {
      if (!isMediaType("image", type)) continue;
      try {
        const blob = ofBase64(data, type);
        const name = `picture ${i + 1}`;
        found.push(await this.store.keepMedia(chat, { blob, kind: "image", name, type, size: blob.size }));
      } catch (error) {
        if (!(error instanceof MediaError)) throw error;
      }
    }
    return found;
  }

  // Stops the calls of a chat.
  stop(chat) {
    for (const message of this.store.messagesOf(chat).values()) {
      callsOf(message).forEach((_, i) => this.running.get(keyOf(message, i))?.abort());
    }
  }

  // Once all calls have results, the model goes on: "answered" has the message.
  async note(message, index, result) {
    const known = this.store.get("messages", message.id);
    if (!known || callsOf(known)[index].result) return;
    const calls = callsOf(known).map((call, i) => (i === index ? { ...call, result } : call));
    const record = await this.store.write("messages", message.id, { calls });
    this.dispatchEvent(new Event("change"));
    if (!record || pendingCalls(record).length || !sentCalls(record).length || this.numRounds(record) > MOST_ROUNDS) return;
    if (this.store.get("chats", record.chat)?.leaf !== record.id) return;
    this.dispatchEvent(new CustomEvent("answered", { detail: record }));
  }
}

function reasonOf(error) {
  if (error.name === "AbortError") return "The user stopped this call.";
  if (error instanceof ApiError || error instanceof ConnectionLost) return `The call failed: ${error.message}`;
  return `The call failed: ${error.name}: ${error.message}`;
}
