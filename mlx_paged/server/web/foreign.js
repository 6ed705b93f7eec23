// Reads chats that other programs have exported: ChatGPT's conversations.json, and chats of Open WebUI. Only texts
// are taken; "[attachment]" stands for everything else.

import { newestLeaf } from "./conversation.js";

const ROLES = ["user", "assistant"];
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

// Returns the chats of a parsed file; null: it is from neither program. Ids follow from the program's own, so a file that is
// imported twice adds nothing.
export function fromForeign(file) {
  const list = Array.isArray(file) ? file : [file];
  if (!list.length) return null;
  if (list.every((chat) => isObject(chat?.mapping))) return list.map(fromChatGpt);
  if (list.every((chat) => isObject(chat?.chat?.history?.messages))) return list.map(fromOpenWebUi);
  return null;
}

// The mapping is a tree of nodes; those of the system, of tools and without text are left out, and their children
// go to the nearest node above that stays.
function fromChatGpt({ id, conversation_id: other, title, create_time: created, update_time: used, mapping, current_node: current }, i) {
  const chat = `gpt-${idOf(id ?? other ?? i)}`;
  const nodes = Object.entries(mapping).map(([key, node]) => [key, {
    parent: node?.parent ?? null,
    role: node?.message?.author?.role,
    content: textOf(node?.message?.content?.parts ?? []),
    created: node?.message?.create_time * 1000,
    model: node?.message?.metadata?.model_slug,
  }]);
  return made(chat, { title, created: created * 1000, used: used * 1000, leaf: current }, new Map(nodes));
}

function fromOpenWebUi({ id, title, created_at: created, updated_at: used, chat: inner }, i) {
  const chat = `owui-${idOf(id ?? i)}`;
  const nodes = Object.entries(inner.history.messages).map(([key, message]) => [key, {
    parent: message?.parentId ?? null,
    role: message?.role,
    content: textOf([message?.content ?? "", ...(message?.files ?? []).map(() => ({}))]),
    created: message?.timestamp * 1000,
    model: message?.model,
  }]);
  const times = { title: title ?? inner.title, created: created * 1000, used: used * 1000 };
  return made(chat, { ...times, leaf: inner.history.currentId }, new Map(nodes));
}

// An id of ours: the other programs use UUIDs, with 36 characters.
const idOf = (id) => String(id).replace(/[^\w.-]/g, "_").slice(0, 36);
const timeOf = (value) => (Number.isFinite(value) && value >= 0 ? value : 0);
const textOf = (parts) => parts.map((part) => (typeof part === "string" ? part : "[attachment]")).join("\n\n").trim();

function made(chat, { title, created, used, leaf }, nodes) {
  const isKept = ({ role, content }) => ROLES.includes(role) && content !== "";
  const kept = (key) => {
    const seen = new Set();
    while (nodes.has(key) && !isKept(nodes.get(key)) && !seen.has(key)) {
      seen.add(key);
      key = nodes.get(key).parent;
    }
    return nodes.has(key) && isKept(nodes.get(key)) ? key : null;
  };
  const ids = new Map([...nodes.keys()].map((key) => [key, `${chat}-${idOf(key)}`]));
  const messages = [...nodes].filter(([, node]) => isKept(node)).map(([key, node], i) => {
    const parent = kept(node.parent);
    return {
      id: ids.get(key), parent: parent === null ? null : ids.get(parent), role: node.role, content: node.content,
      reasoning: "", calls: [], media: [], status: "done", error: null, finish: null, stats: null,
      model: typeof node.model === "string" ? node.model : null, created: timeOf(node.created) || i,
      edited: false,
    };
  });
  const end = kept(leaf ?? null);
  return {
    id: chat, title: typeof title === "string" && title ? title : null, created: timeOf(created), used: timeOf(used),
    leaf: end === null ? newestLeaf(new Map(messages.map((m) => [m.id, m]))) : ids.get(end),
    tools: [], parameters: null, messages, media: [],
  };
}
