// The room in a model's context, counted by the server's tokenizer where it may matter.

import { post } from "./api.js";
import { callsOf, historyOf, seenOf } from "./conversation.js";
import { filled, filesOf } from "./media.js";

const TEMPLATE = 64; // tokens that a chat template adds to a message, at most as a rule
// The share of the context that a chat has once its oldest turns are left out. The rest is room for the next turns:
// each time the beginning changes, the server has to compute all of it again.
const KEPT = 3 / 4;
const BYTES = 12; // of a token, at most over a whole chat
const MEDIUM = 1024; // tokens of a picture, video or sound, as a guess: the server has the last word

// Tokens of messages without their pictures, videos and sounds. Infinity: too many for the server to count;
// null: it does not say.
async function count(messages, settings, tools = []) {
  const { system } = settings.parameters;
  const all = [...(system?.trim() ? [{ role: "system", content: system }] : []), ...messages];
  try {
    const body = { model: settings.model || undefined, messages: all, add_generation_prompt: true };
    if (tools.length) body.tools = tools;
    return (await post("tokenize", settings.key, body)).count;
  } catch (error) {
    return error.code === "context_length_exceeded" ? Infinity : null;
  }
}

// Bytes of texts: a tokenizer makes at most a token of each.
const encoder = new TextEncoder();
const bytesOf = (texts) => texts.reduce((sum, text) => sum + encoder.encode(text).length, 0);

const number = (value) => value.toLocaleString("en");

// Why a message is too long even without the ones before it; null: it is not. `items`: of a tray; `blobOf`: a
// promise of the bytes of those that are stored; `limit`: tokens of prompt and answer together.
export async function tooLong({ text, items, blobOf, limit, settings }) {
  if (!limit) return null;
  const answer = Number(settings.parameters.max_tokens || 1);
  const texts = items.filter(({ kind }) => kind === "text");
  const size = bytesOf([text, settings.parameters.system ?? ""]) + texts.reduce((sum, item) => sum + item.size, 0);
  if (size + (texts.length + 2) * TEMPLATE + answer <= limit) return null;
  const content = [...texts.map((item) => ({ type: "media", item })), { type: "text", text }];
  const { messages } = await filled([{ role: "user", content }], (item) => item.blob ?? blobOf(item.id));
  const tokens = await count(messages, settings);
  if (tokens === null || tokens + answer <= limit) return null;
  const found = tokens === Infinity ? `${number(messages[0].content.length)} characters` : `${number(tokens)} tokens`;
  const room = answer > 1 ? ` and Max tokens is ${number(answer)}` : "";
  const most = `the model takes at most ${number(limit)} tokens, its answer included`;
  return `Too long for the context: this message has ${found}${room}, but ${most}.`;
}

// Bytes of a message as the model reads it, at least as many as its tokens where it has text only.
function sizeOf(message) {
  const calls = callsOf(message).flatMap(({ name, arguments: text, result }) => [name, text, result?.text ?? ""]);
  const texts = bytesOf([message.content, message.reasoning ?? "", ...calls]);
  const files = filesOf(message).reduce((sum, { kind, size }) => sum + (kind === "text" ? size : MEDIUM), 0);
  return texts + files + TEMPLATE * (1 + callsOf(message).length);
}

const sizesOf = (path) => path.reduce((sum, message) => sum + sizeOf(message), 0);

// The end of a path with at most a share of its bytes, from the beginning of a turn on; its last turn stays.
export function shortened(path, share) {
  if (share >= 1) return path;
  const sizes = path.map(sizeOf);
  const all = sizes.reduce((sum, size) => sum + size, 0);
  let start = 0;
  let left = all; // bytes from a message on
  for (const [i, message] of path.entries()) {
    if (i > 0 && message.role === "user" && path[i - 1].role !== "user") {
      start = i;
      if (left <= share * all) break;
    }
    left -= sizes[i];
  }
  return start ? path.slice(start) : path;
}

// Tokens of a path, or more: those that the server counted for the last answer, and a token for each byte since.
function mostTokens(path) {
  const last = path.findLastIndex((message) => message.stats?.total);
  return (path[last]?.stats.total ?? 0) + sizesOf(path.slice(last + 1));
}

// The end of a path that fits into the context, as far as can be told before it is sent. `limit`: tokens of prompt and
// answer together; null: not known. `blobOf`: a promise of the bytes of an item.
export async function fitting(path, { limit, settings, tools, blobOf }) {
  let seen = seenOf(path);
  if (!limit) return seen;
  const answer = Number(settings.parameters.max_tokens || 1);
  const extra = answer + TEMPLATE + bytesOf([settings.parameters.system ?? "", JSON.stringify(tools)]);
  if (sizesOf(path) + extra <= KEPT * limit) return path; // (Another model had less room.)
  if (mostTokens(seen) + extra <= limit) return seen;
  // (The server refuses to count a text that is too long whatever its tokens are.)
  seen = shortened(seen, BYTES * limit / sizesOf(seen));
  for (;;) {
    // (The server counts no pictures here.)
    const texts = seen.map((message) => ({
      ...message, media: (message.media ?? []).filter(({ kind }) => kind === "text"),
    }));
    const { messages } = await filled(historyOf(texts), blobOf);
    const tokens = await count(messages, settings, tools);
    if (tokens === null || tokens + answer <= limit) return seen;
    const most = Math.max(0, KEPT * limit - answer);
    const shorter = shortened(seen, most / Math.min(tokens, sizesOf(seen)));
    if (shorter === seen) return seen;
    seen = shorter;
  }
}
