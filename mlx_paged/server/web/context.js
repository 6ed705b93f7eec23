// The room in a model's context, counted by the server's tokenizer where it may matter.

import { post } from "./api.js";
import { filled } from "./media.js";

const TEMPLATE = 64; // tokens that a chat template adds to a message, at most as a rule

// Tokens of messages without their pictures, videos and sounds. Infinity: too many for the server to count;
// null: it does not say.
async function count(messages, settings) {
  const { system } = settings.parameters;
  const all = [...(system?.trim() ? [{ role: "system", content: system }] : []), ...messages];
  try {
    const body = { model: settings.model || undefined, messages: all, add_generation_prompt: true };
    return (await post("tokenize", settings.key, body)).count;
  } catch (error) {
    return error.code === "context_length_exceeded" ? Infinity : null;
  }
}

// Bytes of texts: a tokenizer makes at most a token of each.
const bytesOf = (texts) => new Blob(texts).size;

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
