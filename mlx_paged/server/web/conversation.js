// A chat is a tree of messages: each names its parent, and the chat names the leaf that is shown.
//
// A chat: { id, title (null: from its first message), leaf, created, updated, deleted }.
// A message: { id, chat, parent, role, content, reasoning, status, error, finish, stats, model,
// owner, created, updated }. `status` of an answer: streaming, done, stopped, interrupted, failed.

// (crypto.randomUUID does not exist over plain HTTP.)
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export const byAge = (a, b) => a.created - b.created || (a.id < b.id ? -1 : 1);

// From the first message to `leaf`. `messages`: a Map by id.
export function pathTo(messages, leaf) {
  const path = [];
  for (let message = messages.get(leaf); message; message = messages.get(message.parent)) {
    path.unshift(message);
  }
  return path;
}

export function siblings(messages, message) {
  return [...messages.values()].filter((m) => m.parent === message.parent).sort(byAge);
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
  const first = [...messages.values()].filter((m) => m.role === "user").sort(byAge)[0];
  return first ? first.content.trim().split("\n")[0].slice(0, 80) : "New chat";
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

// Whether an answer may be sent as history: a failed or empty one would teach the model nothing.
export function isSendable(answer) {
  return answer.status !== "failed" && splitReasoning(answer).text.trim() !== "";
}

// What the model is told before it answers the last message of `path`, a user's: turns that failed
// are left out as a whole, since templates want roles to alternate.
export function historyOf(path) {
  const sent = [];
  path.forEach((message, i) => {
    if (message.role !== "user") return;
    const answer = path[i + 1];
    if (!answer) sent.push({ role: "user", content: message.content });
    else if (answer.role === "assistant" && isSendable(answer)) {
      sent.push({ role: "user", content: message.content });
      sent.push({ role: "assistant", content: splitReasoning(answer).text });
    }
  });
  return sent;
}

// Chats that have every word of `query` in their title or messages, newest first.
export function search(chats, messagesOf, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  return chats.filter((chat) => {
    const messages = messagesOf(chat.id);
    const texts = [titleOf(chat, messages), ...[...messages.values()].map((m) => m.content)];
    const text = texts.join("\n").toLowerCase();
    return words.every((word) => text.includes(word));
  });
}
