// Everything above the chat: settings, the banner of current problems, and toasts with an undo.

import { PARAMETERS, schemaOf } from "./settings.js";
import { element, icon } from "./view.js";

const $ = (id) => document.getElementById(id);
const TOAST_MILLISECONDS = 20_000;

// A line with a button; it stays while the pointer or the focus is on it.
export function toast(text, action = null, does = null) {
  const box = element("div", { className: "toast" }, element("span", { textContent: text }));
  let timer = null;
  const wait = () => {
    clearTimeout(timer);
    timer = setTimeout(() => box.remove(), TOAST_MILLISECONDS);
  };
  const close = () => {
    clearTimeout(timer);
    box.remove();
  };
  if (action) {
    box.append(element("button", {
      type: "button", textContent: action,
      onclick: () => {
        close();
        does();
      },
    }));
  }
  const dismiss = { type: "button", className: "icon-button", "aria-label": "Dismiss", onclick: close };
  box.append(element("button", dismiss, icon("close")));
  const stay = () => clearTimeout(timer);
  for (const event of ["pointerenter", "focusin"]) box.addEventListener(event, stay);
  for (const event of ["pointerleave", "focusout"]) box.addEventListener(event, wait);
  $("toasts").replaceChildren(box);
  wait();
}

// Current problems by kind ("storage", "key", "connection"), each shown until it is solved.
export class Banner {
  constructor() {
    this.lines = new Map();
  }

  set(kind, text, action = null, does = null) {
    if (this.lines.get(kind)?.text === text) return;
    const line = element("p", {}, element("span", { textContent: text }));
    if (action) line.append(element("button", { type: "button", textContent: action, onclick: does }));
    this.lines.set(kind, { text, line });
    this.show();
  }

  clear(kind) {
    if (this.lines.delete(kind)) this.show();
  }

  show() {
    $("banner").replaceChildren(...[...this.lines.values()].map(({ line }) => line));
  }
}

// Parameters hold for all chats, or for the open chat alone. `act`: keyChanged, exportAll, importFile, deleteAll,
// chat() -> the open chat, setChatParameters(parameters; null: those of all chats).
export class SettingsDialog {
  constructor(settings, act) {
    this.settings = settings;
    this.act = act;
    this.dialog = $("settings");
    for (const id of ["scope-all", "scope-chat"]) {
      $(id).addEventListener("change", () => {
        act.setChatParameters($("scope-chat").checked ? { ...settings.parameters } : null);
        this.fill();
      });
    }
    $("preset").addEventListener("change", () => this.choosePreset($("preset").value));
    $("save-preset").addEventListener("click", () => this.savePreset());
    $("delete-preset").addEventListener("click", () => {
      settings.setPreset($("preset").value, null);
      this.fillPresets();
      $("preset").focus(); // the button is disabled now
    });
    $("stop-strings").addEventListener("input", () => this.set("stop", $("stop-strings").value));
    $("parameters").replaceChildren(...PARAMETERS.map((parameter) => this.field(parameter)));
    $("open-settings").addEventListener("click", () => this.open());
    $("close-settings").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("click", (event) => { // on what is around it
      if (event.target === this.dialog) this.dialog.close();
    });
    this.dialog.addEventListener("keydown", (event) => {
      if (event.key === "Escape") event.stopPropagation(); // it closes the dialog, and stops nothing
    });
    $("system").addEventListener("input", () => this.set("system", $("system").value));
    $("schema").addEventListener("input", () => {
      this.set("schema", $("schema").value);
      this.checkSchema();
    });
    $("clear-parameters").addEventListener("click", () => {
      this.setAll({ system: this.parameters.system ?? "" });
    });
    for (const id of ["key", "keep-key"]) {
      $(id).addEventListener("change", () => {
        settings.setKey($("key").value.trim(), $("keep-key").checked);
        act.keyChanged();
      });
    }
    $("show-tokens").addEventListener("change", () => {
      settings.showsTokens = $("show-tokens").checked;
    });
    $("write-titles").addEventListener("change", () => {
      settings.titles = $("write-titles").checked;
    });
    $("theme").addEventListener("change", (event) => {
      settings.theme = event.target.value;
    });
    $("export").addEventListener("click", act.exportAll);
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", async (event) => {
      const [file] = event.target.files;
      if (file) await act.importFile(file);
      event.target.value = "";
    });
    $("delete-all").addEventListener("click", () => {
      this.dialog.close();
      act.deleteAll();
    });
    this.fill();
  }

  field({ name, label, ...limits }) {
    const input = element("input", { name, ...limits });
    const wrong = element("span", { className: "error", id: `wrong-${name}`, role: "status" });
    input.setAttribute("aria-describedby", wrong.id);
    input.addEventListener("input", () => {
      const isValid = input.checkValidity();
      wrong.textContent = isValid ? "" : `${input.validationMessage} It is not sent.`;
      input.setAttribute("aria-invalid", String(!isValid));
      this.set(name, isValid ? input.value : "");
    });
    return element("label", {}, label, input, wrong);
  }

  get parameters() {
    return this.settings.of(this.act.chat()).parameters;
  }

  set(name, value) {
    if (this.act.chat().parameters) this.act.setChatParameters({ ...this.parameters, [name]: value });
    else this.settings.setParameter(name, value);
  }

  setAll(parameters) {
    if (this.act.chat().parameters) this.act.setChatParameters(parameters);
    else this.settings.setParameters(parameters);
    this.fill();
  }

  choosePreset(name) {
    const preset = this.settings.presets[name];
    if (preset) this.setAll({ ...preset });
    $("delete-preset").disabled = !preset;
  }

  savePreset() {
    const name = $("preset-name").value.trim();
    $("preset-name").setAttribute("aria-invalid", String(!name));
    if (!name) return $("preset-name").focus();
    this.settings.setPreset(name, this.parameters);
    $("preset-name").value = "";
    this.fillPresets(name);
  }

  fillPresets(chosen = "") {
    const names = Object.keys(this.settings.presets).sort();
    const none = element("option", { value: "", textContent: names.length ? "Choose a preset" : "No presets yet" });
    $("preset").replaceChildren(none, ...names.map((name) => element("option", { value: name, textContent: name })));
    $("preset").value = chosen;
    $("delete-preset").disabled = !chosen;
  }

  fill() {
    const { parameters } = this;
    $(this.act.chat().parameters ? "scope-chat" : "scope-all").checked = true;
    this.fillPresets($("preset").value);
    if ($("stop-strings") !== document.activeElement) $("stop-strings").value = parameters.stop ?? "";
    $("system").value = parameters.system ?? "";
    if ($("schema") !== document.activeElement) $("schema").value = parameters.schema ?? "";
    this.checkSchema();
    for (const { name } of PARAMETERS) {
      const input = $("parameters").querySelector(`[name=${name}]`);
      if (input !== document.activeElement) input.value = parameters[name] ?? "";
    }
    $("key").value = this.settings.key;
    $("keep-key").checked = this.settings.keepsKey;
    $("show-tokens").checked = this.settings.showsTokens;
    $("write-titles").checked = this.settings.titles;
    $("theme").querySelector(`[value=${this.settings.theme}]`).checked = true;
  }

  // The schema that the server has refused is wrong until it is another.
  refuseSchema(reason) {
    this.refused = { schema: this.parameters.schema, reason };
    this.checkSchema();
  }

  checkSchema() {
    const { schema } = this.parameters;
    let wrong = "";
    try {
      schemaOf(this.parameters);
      if (this.refused && this.refused.schema === schema) wrong = `The server refuses it: ${this.refused.reason}`;
    } catch (error) {
      wrong = `This is not a JSON schema, so it is not sent. ${error.message}`;
    }
    $("wrong-schema").textContent = wrong;
    $("schema").setAttribute("aria-invalid", String(Boolean(wrong)));
  }

  // The server's defaults, as hints in empty fields.
  showDefaults(defaults) {
    for (const { name } of PARAMETERS) {
      const value = name === "max_tokens" ? defaults.max_new_tokens : defaults.sampling?.[name];
      const input = $("parameters").querySelector(`[name=${name}]`);
      input.placeholder = value === undefined || value === null ? "default" : `default: ${value}`;
    }
  }

  open(field = null) {
    this.fill();
    this.dialog.showModal();
    if (field) $(field).focus();
  }
}
