// Chats as files: JSON, there and back, and Markdown to read. And the chats of the page's old form.

import { fromForeign } from "./foreign.js";
import { pretty } from "./json.js";
import { dataUrl, filesOf, isMediaType, mediaOf, ofBase64 } from "./media.js";
import { fenced, folded } from "./texts.js";
import { byAge, callsOf, newestLeaf, pathTo, splitReasoning, titleOf } from "./conversation.js";

const FORMAT = "mlx-paged-chats";
// 1 had no calls and no tools, 2 no media, 3 no text files, no `edited`, `from`, `parameters`, `pinned` and `folder`
const VERSION = 4;
const STATUSES = ["done", "stopped", "interrupted", "failed"];

// `recordsOf`: a promise of the bytes that a chat has.
export async function toJson(chats, messagesOf, recordsOf) {
  const file = {
    format: FORMAT,
    version: VERSION,
    exported: new Date().toISOString(),
    chats: await Promise.all(chats.map(async (chat) => ({
      id: chat.id, title: chat.title, leaf: chat.leaf, created: chat.created, used: chat.used,
      tools: chat.tools ?? [], parameters: chat.parameters ?? null,
      pinned: Boolean(chat.pinned), folder: chat.folder ?? null,
      messages: [...messagesOf(chat.id).values()].sort(byAge).map((m) => ({
        id: m.id, parent: m.parent, role: m.role, content: m.content, reasoning: m.reasoning,
        calls: callsOf(m), media: mediaOf(m),
        status: m.status === "streaming" ? "interrupted" : m.status,
        error: m.error, finish: m.finish, stats: m.stats, model: m.model, created: m.created,
        edited: Boolean(m.edited), from: m.from ?? null,
      })),
      media: await Promise.all((await recordsOf(chat.id)).map(async ({ id, blob }) => (
        { id, data: (await dataUrl(blob)).replace(/^[^,]*,/, "") }
      ))),
    }))),
  };
  return JSON.stringify(file, null, 1);
}

// `blobOf`: a promise of the bytes of an item.
export async function toMarkdown(chat, messages, blobOf) {
  const parts = [`# ${titleOf(chat, messages)}`];
  for (const message of pathTo(messages, chat.leaf)) {
    const { text } = splitReasoning(message);
    parts.push(`## ${message.role === "user" ? "You" : message.model || "Model"}${message.edited ? " (edited)" : ""}`, text.trim());
    for (const item of mediaOf(message)) {
      const blob = item.kind === "text" ? await blobOf(item.id) : null;
      parts.push(blob ? folded(item.name, await blob.text()) : `[${item.kind}: ${item.name}]`);
    }
    for (const call of callsOf(message)) parts.push(...callAsMarkdown(call));
    if (message.error) parts.push(`> Failed: ${message.error}`);
  }
  return `${parts.join("\n\n")}\n`;
}

function callAsMarkdown({ name, arguments: text, result }) {
  const parts = [`Call of \`${name}\`:`, fenced("json", pretty(text))];
  if (result) parts.push(`Result (${result.status}):`, fenced("", result.text));
  return parts;
}

export class ImportError extends Error {}

const ID = (value) => typeof value === "string" && /^[\w.-]{1,80}$/.test(value);
const TEXT = (value) => typeof value === "string";
const TIME = (value) => Number.isFinite(value) && value >= 0;
const orNull = (check) => (value) => value === null || check(value);
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const CHAT_FIELDS = {
  id: [ID, "an id"], title: [orNull(TEXT), "a text or null"], leaf: [orNull(ID), "an id or null"],
  created: [TIME, "a time in milliseconds"], used: [TIME, "a time in milliseconds"],
  tools: [(v) => Array.isArray(v) && v.every(TEXT), "a list of names"],
  parameters: [orNull((v) => isObject(v) && Object.values(v).every(TEXT)), "an object of texts or null"],
  pinned: [(v) => typeof v === "boolean", "true or false"],
  folder: [orNull((v) => TEXT(v) && v !== ""), "a text that is not empty or null"],
  messages: [Array.isArray, "a list"],
  media: [(v) => Array.isArray(v) && v.every(isRecord), "a list of ids with data in base64"],
};
const MESSAGE_FIELDS = {
  id: [ID, "an id"], parent: [orNull(ID), "an id or null"],
  role: [(v) => v === "user" || v === "assistant", '"user" or "assistant"'],
  content: [TEXT, "a text"], reasoning: [TEXT, "a text"],
  calls: [(v) => Array.isArray(v) && v.every(isCall), "a list of calls"],
  media: [(v) => Array.isArray(v) && v.every(isItem), "a list of images, videos, sounds and text files"],
  status: [(v) => STATUSES.includes(v), STATUSES.map((s) => `"${s}"`).join(", ")],
  error: [orNull(TEXT), "a text or null"], finish: [orNull(TEXT), "a text or null"],
  stats: [orNull(isStats), "statistics or null"], model: [orNull(TEXT), "a text or null"],
  created: [TIME, "a time in milliseconds"],
  edited: [(v) => typeof v === "boolean", "true or false"], from: [orNull(ID), "an id or null"],
};

const hasOnly = (value, names) => Object.keys(value).every((name) => names.includes(name));

function isCall(call) {
  if (!isObject(call) || !hasOnly(call, ["id", "name", "arguments", "result"])) return false;
  return [call.id, call.name, call.arguments].every(TEXT) && (call.result === null || isResult(call.result));
}

function isResult(result) {
  if (!isObject(result) || !hasOnly(result, ["text", "status", "media"])) return false;
  if (!Array.isArray(result.media ?? []) || !(result.media ?? []).every(isItem)) return false;
  return TEXT(result.text) && ["done", "failed", "refused"].includes(result.status);
}

function isItem(item) {
  if (!isObject(item) || !hasOnly(item, ["id", "kind", "name", "type", "size"])) return false;
  return ID(item.id) && [item.kind, item.name, item.type].every(TEXT) && isMediaType(item.kind, item.type) && TIME(item.size);
}

function isRecord(record) {
  if (!isObject(record) || !hasOnly(record, ["id", "data"]) || !ID(record.id) || !TEXT(record.data)) return false;
  return record.data.length % 4 === 0 && /^[A-Za-z0-9+/]*={0,2}$/.test(record.data);
}

function isStats(stats) {
  if (!isObject(stats)) return false;
  return Object.entries(stats).every(([name, value]) => (
    ["tokensPerSecond", "ttft", "prompt", "completion", "cached", "total"].includes(name) && TIME(value)
  ));
}

function show(value) {
  const text = JSON.stringify(value) ?? "missing";
  return text.length > 60 ? `${text.slice(0, 60)}…` : text;
}

function checkFields(where, value, fields) {
  if (!isObject(value)) throw new ImportError(`${where} must be an object but is ${show(value)}`);
  for (const name of Object.keys(value)) {
    if (!(name in fields)) throw new ImportError(`${where} has the unknown field ${show(name)}`);
  }
  for (const [name, [check, expected]] of Object.entries(fields)) {
    if (!check(value[name])) {
      throw new ImportError(`${where}.${name} must be ${expected} but is ${show(value[name])}`);
    }
  }
}

function checkTree(where, chat) {
  const messages = new Map();
  chat.messages.forEach((message, i) => {
    checkFields(`${where}.messages[${i}]`, message, MESSAGE_FIELDS);
    if (messages.has(message.id)) {
      throw new ImportError(`${where}.messages[${i}].id ${show(message.id)} is there twice`);
    }
    messages.set(message.id, message);
  });
  const known = (id) => id === null || messages.has(id);
  if (!known(chat.leaf)) throw new ImportError(`${where}.leaf names no message: ${show(chat.leaf)}`);
  chat.messages.forEach((message, i) => {
    const at = `${where}.messages[${i}].parent`;
    if (!known(message.parent)) throw new ImportError(`${at} names no message: ${show(message.parent)}`);
    let above = message;
    for (let steps = 0; above; above = messages.get(above.parent)) {
      if (++steps > messages.size) throw new ImportError(`${at} leads in a circle`);
    }
  });
}

// The chats of an exported file. Throws an ImportError that names what is wrong.
export function fromJson(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch (error) {
    throw new ImportError(`the file is not JSON: ${error.message}`);
  }
  const foreign = fromForeign(file);
  if (foreign) file = { format: FORMAT, version: 3, chats: foreign }; // (with the fields of that version)
  if (!isObject(file) || file.format !== FORMAT) {
    throw new ImportError(
      `it must be an export of this page (format "${FORMAT}"), of Open WebUI or of ChatGPT, but format is ${show(file?.format)}`,
    );
  }
  if (![1, 2, 3, VERSION].includes(file.version)) {
    throw new ImportError(`version must be 1, 2, 3 or ${VERSION} but is ${show(file.version)}`);
  }
  if (!Array.isArray(file.chats)) throw new ImportError(`chats must be a list but is ${show(file.chats)}`);
  const ids = new Set();
  if (file.version < 2) file.chats = file.chats.map(fromVersion1);
  if (file.version < 3) file.chats = file.chats.map(fromVersion2);
  if (file.version < 4) file.chats = file.chats.map(fromVersion3);
  file.chats.forEach((chat, i) => {
    checkFields(`chats[${i}]`, chat, CHAT_FIELDS);
    if (ids.has(chat.id)) throw new ImportError(`chats[${i}].id ${show(chat.id)} is there twice`);
    ids.add(chat.id);
    checkTree(`chats[${i}]`, chat);
  });
  return file.chats;
}

// (What is no chat is left as it is, for its error.)
function fromVersion1(chat) {
  return isObject(chat) && !("tools" in chat) ? { ...withField(chat, "calls"), tools: [] } : chat;
}

function fromVersion2(chat) {
  return isObject(chat) && !("media" in chat) ? { ...withField(chat, "media"), media: [] } : chat;
}

function fromVersion3(chat) {
  if (!isObject(chat)) return chat;
  const fresh = { parameters: null, pinned: false, folder: null };
  return { ...fresh, ...withField(withField(chat, "edited", false), "from", null) };
}

// A chat whose messages have a field that they lacked.
function withField(chat, name, value = []) {
  if (!Array.isArray(chat.messages)) return chat;
  return { ...chat, messages: chat.messages.map((m) => (isObject(m) && !(name in m) ? { ...m, [name]: value } : m)) };
}

// Messages of one transaction of an import, about: each saves whole chats.
const AT_ONCE = 500;

// Adds imported chats to a store: what is there already stays. Returns the number of new messages.
// `progress`: is told how many chats are saved.
export async function addTo(store, chats, progress = () => {}) {
  let added = 0;
  let saved = 0;
  let batch = { chats: [], messages: [] };
  const save = async () => {
    await store.addAll(batch.chats, batch.messages);
    added += batch.messages.length;
    batch = { chats: [], messages: [] };
    progress(saved);
  };
  for (const { messages, media, ...chat } of chats) {
    const known = store.get("chats", chat.id);
    if (!known) batch.chats.push({ ...chat, deleted: null });
    else if (known.deleted) await store.write("chats", chat.id, { deleted: null });
    for (const record of media) {
      const item = messages.flatMap(filesOf).find(({ id }) => id === record.id);
      if (item) await store.keepMedia(chat.id, { ...item, blob: ofBase64(record.data, item.type) });
    }
    const fresh = messages.filter(({ id }) => {
      const there = store.get("messages", id);
      return !there || there.deleted;
    });
    batch.messages.push(...fresh.map((message) => ({ ...message, chat: chat.id })));
    saved += 1;
    if (batch.messages.length >= AT_ONCE) await save();
  }
  await save();
  return added;
}

// Chats as the page kept them in localStorage before it had branches. Their ids follow from the
// old ones, so tabs that do this at the same time write the same.
export function fromOldPage(old) {
  if (!Array.isArray(old)) return [];
  const now = Date.now();
  return old.filter((chat) => chat?.messages?.length).map((chat, place) => {
    const id = `old-${chat.id}`;
    const used = now - place;
    const messages = chat.messages.map(({ role, content, stats, error }, i) => ({
      id: `${id}-${i}`, chat: id, parent: i ? `${id}-${i - 1}` : null, role, content: `${content}`,
      reasoning: "", calls: [], status: error ? "failed" : "done", error: error ?? null,
      finish: stats?.finish ?? null, stats: null, model: null, owner: null,
      created: used - chat.messages.length + i,
    }));
    const leaf = newestLeaf(new Map(messages.map((m) => [m.id, m])));
    return { id, title: null, leaf, created: used, used, deleted: null, messages };
  });
}
