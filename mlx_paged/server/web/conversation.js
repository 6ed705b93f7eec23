// A chat is a tree of messages: each names its parent, and the chat names the leaf that is shown.
//
// A chat: { id, title (null: from its first message), leaf, created, updated, deleted, pinned, folder }. `folder`:
// the name of a group of the list of chats, or null.
// A message: { id, chat, parent, role, content, reasoning, calls, status, error, finish, stats, model,
// owner, created, updated, media, edited, from, deleted }. `media` of the user's: see media.js. `status` of an answer:
// streaming, done, stopped, interrupted, failed. One to a JSON schema also has `relaxed`: the parts of it that were
// not enforced. `edited`: the user wrote this version of an answer. `from`: id of the first message that the model saw for
// it, where it did not see all; else null. `deleted`: when it was deleted, or null.
//
// `calls` of an answer are those of tools (messages of older pages have none): { id, name, arguments,
// result }. `arguments` is JSON text; `result` is null, or { text, status, media } with status done, failed or
// refused, and pictures that the user sees, where there are some. The answer to results is a child of the message that called.

import { isObject } from "./json.js";
import { mediaOf } from "./media.js";

// (crypto.randomUUID does not exist over plain HTTP.)
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export const byAge = (a, b) => a.created - b.created || (a.id < b.id ? -1 : 1);

// From the first message to `leaf`. `messages`: a Map by id.
export function pathTo(messages, leaf) {
  const path = [];
  for (let message = messages.get(leaf); message; message = messages.get(message.parent)) path.push(message);
  return path.reverse();
}

// The part of a path that the model sees: what its last answer saw, and all that came since.
export function seenOf(path) {
  const from = path.findLast((message) => message.role === "assistant")?.from;
  const place = from ? path.findIndex(({ id }) => id === from) : 0;
  return place > 0 ? path.slice(place) : path;
}

// The messages below each parent, oldest first: a Map by the parent's id, null for the first messages.
export function childrenOf(messages) {
  const children = new Map();
  for (const message of messages.values()) {
    if (children.has(message.parent)) children.get(message.parent).push(message);
    else children.set(message.parent, [message]);
  }
  for (const found of children.values()) if (found.length > 1) found.sort(byAge);
  return children;
}

// Changes that take a message out of its chat: { gone: ids that are deleted, moved: ids of children that get its
// parent, leaf: the chat's }. Where it has siblings its branch goes with it, since that is one of several versions.
export function removalOf(messages, message, leaf) {
  const children = childrenOf(messages);
  const siblings = children.get(message.parent);
  const below = (id) => (children.get(id) ?? []).map((child) => child.id);
  if (siblings.length === 1) {
    return { gone: [message.id], moved: below(message.id), leaf: leaf === message.id ? message.parent : leaf };
  }
  const gone = [message.id];
  for (const id of gone) gone.push(...below(id));
  const place = siblings.indexOf(message);
  const next = siblings[place - 1] ?? siblings[place + 1];
  return { gone, moved: [], leaf: gone.includes(leaf) ? newestLeaf(messages, next.id) : leaf };
}

// The end of the newest branch below a message, or of the whole chat.
export function newestLeaf(messages, from = null) {
  const children = new Map();
  for (const message of [...messages.values()].sort(byAge)) children.set(message.parent, message);
  let leaf = from;
  while (children.has(leaf)) leaf = children.get(leaf).id;
  return leaf;
}

export function titleOf(chat, messages) {
  if (chat.title) return chat.title;
  let first = null;
  for (const message of messages.values()) {
    if (message.role === "user" && (!first || byAge(message, first) < 0)) first = message;
  }
  if (!first) return "New chat";
  const line = first.content.trim().split("\n")[0] || mediaOf(first).map((item) => item.name).join(", ");
  return line.slice(0, 80) || "New chat";
}

// Models that think write <think>...</think> first; templates may have written the opening tag
// already, then the closing one begins a line. A server that tells reasoning apart sends it in a field
// of its own.
export function splitReasoning({ content, reasoning }) {
  if (reasoning) return { reasoning, text: content };
  const begins = /^\s*<think>/.exec(content);
  const end = begins ? content.indexOf("</think>") : content.search(/(?<=^|\n)<\/think>/);
  if (end >= 0) {
    const thought = content.slice(begins ? begins[0].length : 0, end);
    return { reasoning: thought.trim(), text: content.slice(end + 8).trimStart() };
  }
  if (begins) return { reasoning: content.slice(begins[0].length).trim(), text: "" };
  return { reasoning: "", text: content };
}

export const callsOf = (message) => message.calls ?? [];

// Calls without a result, of an answer that is whole.
export function pendingCalls(message) {
  return message.status === "done" ? callsOf(message).filter((call) => !call.result) : [];
}

// True if an answer may be sent as history: a failed or empty one would teach the model nothing.
export function isSendable(answer) {
  if (answer.status === "failed") return false;
  return splitReasoning(answer).text.trim() !== "" || sentCalls(answer).length > 0;
}

// (Templates read the arguments: what was cut is no JSON.)
export const sentCalls = (answer) => callsOf(answer).filter((call) => isObject(call.arguments));

// An answer as history: its text, its reasoning, its calls and their results.
function messagesOfAnswer(answer) {
  const { text, reasoning } = splitReasoning(answer);
  const calls = sentCalls(answer);
  const message = { role: "assistant", content: text };
  if (reasoning) message.reasoning = reasoning;
  if (!calls.length) return [message];
  message.tool_calls = calls.map(({ id, name, arguments: text }) => (
    { id, type: "function", function: { name, arguments: text } }
  ));
  const results = calls.map(({ id, result }) => (
    { role: "tool", tool_call_id: id, content: result?.text ?? "The user did not let this call run." }
  ));
  return [message, ...results];
}

// A text, or items and then what is asked about them. (api.js's callers fill in the items' bytes.)
function contentOf(questions) {
  if (!questions.some((message) => mediaOf(message).length)) return questions.map(({ content }) => content).join("\n\n");
  return questions.flatMap((message) => [
    ...mediaOf(message).map((item) => ({ type: "media", item })),
    ...(message.content ? [{ type: "text", text: message.content }] : []),
  ]);
}

// Answers that follow each other, since what stood between them was deleted, as one.
function joined(answers) {
  const found = [];
  for (const message of answers) {
    const last = found.at(-1);
    if (last?.role !== "assistant" || last.tool_calls || message.role !== "assistant") {
      found.push(message);
      continue;
    }
    const texts = (name) => [last[name], message[name]].filter(Boolean).join("\n\n");
    const reasoning = texts("reasoning");
    found.splice(-1, 1, { ...message, content: texts("content"), ...(reasoning ? { reasoning } : {}) });
  }
  return found;
}

// The items of a history.
export function itemsOf(history) {
  return history.flatMap(({ content }) => (Array.isArray(content) ? content : []))
    .filter((part) => part.type === "media").map((part) => part.item);
}

// The request's messages, so that the model answers the last one of `path`: a user's, or an answer whose calls
// have results. Turns that failed are left out as a whole, since templates want roles to alternate. Questions without
// an answer between them are one.
export function historyOf(path) {
  const turns = [];
  for (const message of path) {
    if (message.role !== "user") turns.at(-1)?.answers.push(message);
    else if (turns.length && !turns.at(-1).answers.length) turns.at(-1).questions.push(message);
    else turns.push({ questions: [message], answers: [] });
  }
  return turns.flatMap(({ questions, answers }, i) => {
    const isLast = i === turns.length - 1;
    if (!isLast && !isSendable(answers.at(-1))) return [];
    const told = answers.filter(isSendable).flatMap(messagesOfAnswer);
    return [{ role: "user", content: contentOf(questions) }, ...joined(told)];
  });
}
