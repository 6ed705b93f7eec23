// Calls the server's API, as any other client would.

function headers(key) {
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function failure(response) {
  const body = await response.json().catch(() => null);
  return new Error(body?.error?.message ?? `${response.status} ${response.statusText}`);
}

export async function get(path, key) {
  const response = await fetch(path, { headers: headers(key) });
  if (!response.ok) throw await failure(response);
  return response.json();
}

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed",
];

export function bodyOf(messages, settings) {
  const body = {
    model: settings.model || undefined,
    messages: messages.map(({ role, content }) => ({ role, content })),
    stream: true,
    stream_options: { include_usage: true },
  };
  if (settings.system) body.messages.unshift({ role: "system", content: settings.system });
  for (const name of NUMBERS) {
    if (settings[name] !== "") body[name] = Number(settings[name]);
  }
  return body;
}

// Yields {text} as it comes, and finally {usage} and {finish_reason}.
export async function* chat(body, key, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST", headers: headers(key), body: JSON.stringify(body), signal,
  });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the connection was lost");
    pending += value;
    const events = pending.split("\n\n");
    pending = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      const data = event.slice(6);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0];
      if (choice?.delta?.content) yield { text: choice.delta.content };
      if (choice?.finish_reason) yield { finish: choice.finish_reason };
      if (chunk.usage) yield { usage: chunk.usage };
    }
  }
}
