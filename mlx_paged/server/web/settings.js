// The user's settings, in localStorage: parameters, model, key, theme, and unsent texts.

const PREFIX = "mlx-paged.";
// Up to version 0.1 the page sent defaults of its own.
const OLD_DEFAULTS = { temperature: "0.7", top_p: "0.95", max_tokens: "512" };

const number = (name, label, limits) => ({ name, label, type: "number", ...limits });

// The fields of a request that can be set here; an empty one is not sent.
export const PARAMETERS = [
  number("temperature", "Temperature", { min: 0, max: 100, step: "any" }),
  number("top_p", "Top p", { min: 0.000001, max: 1, step: "any" }),
  number("top_k", "Top k", { min: -1, step: 1 }),
  number("min_p", "Min p", { min: 0, max: 1, step: "any" }),
  number("repetition_penalty", "Repetition penalty", { min: 0.01, max: 100, step: "any" }),
  number("presence_penalty", "Presence penalty", { min: -2, max: 2, step: "any" }),
  number("frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: "any" }),
  number("max_tokens", "Max tokens", { min: 1, step: 1 }),
  number("seed", "Seed", { step: 1 }),
];

// The JSON schema that answers must follow; null: none.
export function schemaOf({ schema }) {
  if (!schema?.trim()) return null;
  const value = JSON.parse(schema);
  if (typeof value !== "object" || value === null || Array.isArray(value)) {
    throw new SyntaxError("It must be an object.");
  }
  return value;
}

// Stop strings, one a line; \n, \t and \\ are escapes, since a stop string may have a line break.
export function stopStringsOf({ stop }) {
  const escapes = { n: "\n", t: "\t", "\\": "\\" };
  return (stop ?? "").split("\n").filter(Boolean)
    .map((line) => line.replace(/\\(n|t|\\)/g, (_, letter) => escapes[letter]));
}

// (Even naming a storage throws where the browser forbids it.)
function read(name, storage = "localStorage") {
  try {
    return globalThis[storage].getItem(PREFIX + name);
  } catch {
    return null;
  }
}

function keep(name, value, storage = "localStorage") {
  try {
    if (value) globalThis[storage].setItem(PREFIX + name, value);
    else globalThis[storage].removeItem(PREFIX + name);
  } catch {
    // Full, or forbidden: it holds until the page is closed.
  }
}

function parsed(text) {
  try {
    return JSON.parse(text) ?? {};
  } catch {
    return {};
  }
}

export class Settings {
  constructor() {
    this.migrate();
    this.parameters = parsed(read("parameters")); // name to text; also `system`, `schema`, `stop`
    this.model = read("model") ?? "";
    this.keepsKey = read("key", "sessionStorage") === null;
    this.key = read("key", "sessionStorage") ?? read("key") ?? "";
  }

  // The settings in force in a chat, which may have parameters of its own.
  of(chat) {
    return chat?.parameters ? Object.create(this, { parameters: { value: chat.parameters } }) : this;
  }

  // Sets of parameters by name.
  get presets() {
    return parsed(read("presets"));
  }

  // `parameters` null: the preset is deleted.
  setPreset(name, parameters) {
    const { [name]: _, ...others } = this.presets;
    keep("presets", JSON.stringify(parameters ? { ...others, [name]: parameters } : others));
  }

  setParameters(parameters) {
    this.parameters = parameters;
    keep("parameters", JSON.stringify(parameters));
  }

  setParameter(name, value) {
    this.parameters = { ...this.parameters, ...parsed(read("parameters")), [name]: value };
    keep("parameters", JSON.stringify(this.parameters));
  }

  setModel(model) {
    this.model = model;
    keep("model", model);
  }

  // Kept for the session unless `keepsKey`: forgotten when the tab is closed.
  setKey(key, keepsKey) {
    this.key = key;
    this.keepsKey = keepsKey;
    keep("key", keepsKey ? key : "");
    keep("key", keepsKey ? "" : key, "sessionStorage");
  }

  // Another tab has changed something.
  reload() {
    this.parameters = parsed(read("parameters"));
    this.key = read("key", "sessionStorage") ?? read("key") ?? "";
  }

  // True if the model writes the titles of new chats.
  get titles() {
    return read("titles") !== "off";
  }

  set titles(isOn) {
    keep("titles", isOn ? "" : "off");
  }

  // True if requests ask for the probabilities of tokens.
  get showsTokens() {
    return read("tokens") === "on";
  }

  set showsTokens(isOn) {
    keep("tokens", isOn ? "on" : "");
  }

  // Groups of the list of chats that are collapsed: their keys, each true.
  get collapsed() {
    return parsed(read("collapsed"));
  }

  setCollapsed(key, isCollapsed) {
    const { [key]: _, ...others } = this.collapsed;
    keep("collapsed", JSON.stringify(isCollapsed ? { ...others, [key]: true } : others));
  }

  get theme() {
    return read("theme") ?? "system";
  }

  set theme(theme) {
    keep("theme", theme);
    dispatchEvent(new Event("theme"));
  }

  // The chat that this tab opens after a reload.
  get chat() {
    return read("chat", "sessionStorage");
  }

  set chat(id) {
    keep("chat", id, "sessionStorage");
  }

  migrate() {
    const old = parsed(read("settings"));
    if (!Object.keys(old).length) return;
    const parameters = {};
    for (const name of ["system", ...PARAMETERS.map((p) => p.name)]) {
      if (old[name] && old[name] !== OLD_DEFAULTS[name]) parameters[name] = String(old[name]);
    }
    keep("parameters", JSON.stringify(parameters));
    keep("key", old.key);
    keep("model", old.model);
    keep("settings", "");
  }
}

// Texts that were typed but not sent: of the composer by chat, of an editor by message.
export const drafts = {
  get: (id) => read(`draft.${id}`),
  set: (id, text) => keep(`draft.${id}`, text),
};

// Texts of messages that wait for an answer of this tab, by chat; they survive a reload.
export const waiting = {
  get: (chat) => read(`queue.${chat}`, "sessionStorage"),
  set: (chat, text) => keep(`queue.${chat}`, text, "sessionStorage"),
};
