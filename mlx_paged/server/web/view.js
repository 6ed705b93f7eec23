// Messages as elements. Text is always set as text: model output is never markup.

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name.includes("-")) made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

// Code between fences, or an answer that is code as a whole, is shown as such.
function renderText(content) {
  const box = element("div", { className: "text" });
  const parts = content.split(/^```[^\n]*\n?/m);
  if (parts.length === 1 && /^(def|class|import|from|@)\b/.test(content)) {
    box.classList.add("code");
    box.textContent = content;
    return box;
  }
  parts.forEach((part, i) => {
    if (i % 2) box.append(element("pre", { textContent: part.trimEnd() }));
    else if (part) box.append(part);
  });
  return box;
}

function statistics(stats) {
  const told = [];
  if (stats.tokensPerSecond) told.push(`${stats.tokensPerSecond.toFixed(1)} tokens/s`);
  if (stats.ttft !== undefined) told.push(`TTFT ${(stats.ttft * 1000).toFixed(0)} ms`);
  if (stats.usage) {
    const cached = stats.usage.prompt_tokens_details?.cached_tokens ?? 0;
    told.push(`${stats.usage.completion_tokens} tokens`);
    told.push(`${cached} of ${stats.usage.prompt_tokens} prompt tokens cached`);
  }
  if (stats.finish === "length") told.push("cut at its length limit");
  if (stats.stopped) told.push("stopped");
  return told.join(" · ");
}

export function renderMessage(message, actions, busy) {
  const below = element("div", { className: "below" });
  if (message.stats) {
    below.append(element("span", { className: "muted stats", textContent: statistics(message.stats) }));
  }
  if (!busy) {
    for (const [name, act] of Object.entries(actions)) {
      below.append(element("button", { type: "button", textContent: name, onclick: act }));
    }
  }
  const item = element(
    "li", { className: message.role + (busy ? " busy" : "") },
    element("div", { className: "role", textContent: message.role === "user" ? "You" : "Model" }),
    renderText(message.content),
  );
  if (message.error) {
    item.append(element("div", { className: "error", textContent: message.error, role: "alert" }));
  }
  item.append(below);
  return item;
}

export function renderEditor(content, save, cancel) {
  const area = element("textarea", { value: content, rows: 3, "aria-label": "Edit message" });
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      save(area.value);
    } else if (event.key === "Escape") {
      event.stopPropagation();
      cancel();
    }
  });
  return element(
    "li", { className: "user editing" }, area,
    element(
      "div", { className: "below" },
      element("button", { type: "button", textContent: "Send", onclick: () => save(area.value) }),
      element("button", { type: "button", textContent: "Cancel", onclick: cancel }),
    ),
  );
}

export function renderEmpty(examples, choose) {
  return element(
    "li", { className: "empty" }, "Ask for a Python function, for instance:",
    ...examples.map((text) =>
      element("button", { type: "button", textContent: text, onclick: () => choose(text) })),
  );
}
