// Calls the server's API, as any other client would.

import { NUM_ALTERNATIVES } from "./logprobs.js";
import { PARAMETERS, schemaOf, stopStringsOf } from "./settings.js";

export class ApiError extends Error {
  constructor(status, message, code, param = null) {
    super(message);
    this.status = status; // null: of a stream that had begun
    this.code = code;
    this.param = param; // the field that is wrong
  }
}

// The server was not reached, or the connection broke.
export class ConnectionLost extends Error {}

function headers(key) {
  // (Only what a header can carry: another text is a wrong key, not an exception of fetch.)
  const sent = key.replace(/[^\x21-\x7e]/g, "");
  return { "Content-Type": "application/json", ...(sent ? { Authorization: `Bearer ${sent}` } : {}) };
}

async function call(path, key, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers(key) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ConnectionLost("the server could not be reached");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `${response.status} ${response.statusText}`;
  throw new ApiError(response.status, message, body?.error?.code, body?.error?.param);
}

export async function get(path, key) {
  return (await call(path, key)).json();
}

export async function post(path, key, body, signal) {
  return (await call(path, key, { method: "POST", body: JSON.stringify(body), signal })).json();
}

// The body of a request. Parameters are only sent when they are set, so that the server's defaults
// (the model's generation_config) apply otherwise. `tools`: what the model may call.
export function bodyOf(messages, settings, model, { unfinished = null, tools = [] } = {}) {
  const { system } = settings.parameters;
  const body = {
    model: model || undefined,
    messages: [...(system?.trim() ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const { name } of PARAMETERS) {
    const value = settings.parameters[name];
    if (value !== undefined && value !== "") body[name] = Number(value);
  }
  const stop = stopStringsOf(settings.parameters);
  if (stop.length) body.stop = stop;
  const schema = validSchema(settings.parameters);
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  if (tools.length) body.tools = tools;
  if (settings.showsTokens) Object.assign(body, { logprobs: true, top_logprobs: NUM_ALTERNATIVES });
  if (unfinished) {
    const { content, reasoning } = unfinished;
    const more = reasoning ? { reasoning_content: reasoning } : {};
    body.messages.push({ role: "assistant", content, ...more });
    body.continue_final_message = true;
    body.add_generation_prompt = false;
  }
  return body;
}

// (The settings say what is wrong with one that is not.)
function validSchema(parameters) {
  try {
    return schemaOf(parameters);
  } catch {
    return null;
  }
}

// The data of server-sent events.
async function* dataOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (pending + value).split(/\r?\n\r?\n/);
    pending = events.pop();
    for (const event of events) {
      const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
    }
  }
}

// Yields { text }, { reasoning }, { call }, { tokens } (see logprobs.js), { finish } and { usage } as they come. `call` is a piece:
// { index, id, name, arguments }; the first of a call has its id and name. Before them, { relaxed } where
// the server does not enforce all of the schemas: which parts it leaves out.
export async function* chat(body, key, signal) {
  const response = await call("v1/chat/completions", key, {
    method: "POST", body: JSON.stringify(body), signal,
  });
  const relaxed = response.headers.get("X-Structured-Outputs-Relaxed");
  if (relaxed) yield { relaxed };
  try {
    for await (const data of dataOf(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(null, chunk.error.message, chunk.error.code);
      const choice = chunk.choices[0];
      const reasoning = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning;
      if (reasoning) yield { reasoning };
      if (choice?.delta?.content) yield { text: choice.delta.content };
      for (const { index, id, function: part } of choice?.delta?.tool_calls ?? []) {
        yield { call: { index, id, name: part?.name, arguments: part?.arguments ?? "" } };
      }
      if (choice?.logprobs?.content?.length) yield { tokens: choice.logprobs.content };
      if (choice?.finish_reason) yield { finish: choice.finish_reason };
      if (chunk.usage) yield { usage: chunk.usage };
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ConnectionLost("the connection was lost");
  }
  throw new ConnectionLost("the connection was lost");
}
