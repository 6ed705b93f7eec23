// The dialog of MCP servers: a chat's tools are chosen, prompts inserted, resources attached, servers added.

import { ApiError, ConnectionLost } from "./api.js";
import { ofBase64 } from "./media.js";
import { headersOf, headersText, wrongServer } from "./own_servers.js";
import { element } from "./view.js";

const $ = (id) => document.getElementById(id);
const POLL_MILLISECONDS = 1500; // while a server is starting

// `act`: chosen() -> names of tools, choose(names), insert(text) into the composer, attach(files), and
// mayAdd() whether the server takes servers of the page.
export class ToolsDialog {
  constructor(tools, act) {
    this.tools = tools;
    this.act = act;
    this.dialog = $("tools");
    this.edited = null; // name of the server that is edited; "": a new one; null: none
    this.asked = null; // { server, prompt } whose arguments are asked for
    this.opener = null; // key of the button that opened a form
    $("open-tools").addEventListener("click", () => this.open());
    $("close-tools").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close();
    });
    this.dialog.addEventListener("keydown", (event) => {
      if (event.key === "Escape") event.stopPropagation();
    });
    this.dialog.addEventListener("close", () => {
      this.edited = this.asked = null;
    });
    $("tool-list").addEventListener("change", (event) => {
      if (!event.target.matches(".tool")) return;
      const boxes = [...$("tool-list").querySelectorAll(".tool")];
      act.choose(boxes.filter((box) => box.checked).map((box) => box.value));
    });
    $("add-server").addEventListener("click", () => this.edit(""));
  }

  async open() {
    this.draw();
    this.dialog.showModal();
    await this.refresh();
  }

  async refresh() {
    try {
      await this.tools.load();
      this.say("");
    } catch (error) {
      this.say(`The tools could not be read: ${error.message}`);
    }
    if (!this.dialog.open) return;
    // (A form keeps what is typed in it.)
    if (this.edited === null && this.asked === null) this.draw();
    if (this.tools.servers.some(({ status }) => status === "starting")) {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.dialog.open && this.refresh(), POLL_MILLISECONDS);
    }
  }

  say(text) {
    $("tools-state").textContent = text;
  }

  // (Polls draw anew, too: the focus stays where it is.)
  draw() {
    const list = $("tool-list");
    const focused = list.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    this.drawList();
    if (focused) this.focus(focused);
  }

  // Moves the focus to the control that has a key, or to one that is always there.
  focus(key) {
    const found = [...$("tool-list").querySelectorAll("[data-key]")].find((each) => each.dataset.key === key);
    (found ?? ($("add-server").hidden ? $("close-tools") : $("add-server"))).focus();
  }

  drawList() {
    const chosen = this.act.chosen();
    const running = new Map(this.tools.servers.map((server) => [server.name, server]));
    const off = this.tools.own.all.filter(({ name }) => !running.has(name)).map(({ name, isOff }) => ({
      name, is_own: true, isOff, status: isOff ? "off" : "starting", tools: [], prompts: [], resources: [],
    }));
    const servers = [...this.tools.servers, ...off];
    $("tool-list").replaceChildren(...servers.map((server, i) => this.section(server, i, chosen)));
    $("add-server").hidden = !this.act.mayAdd() || this.edited !== null;
    if (this.edited === "") $("tool-list").append(this.form({ name: "", url: "", headers: {} }));
  }

  section(server, i, chosen) {
    const { name, status, error, tools, prompts, resources } = server;
    const head = element("h3", { id: `tools-of-${i}`, textContent: name });
    const section = element("section", { "aria-labelledby": head.id }, head);
    const note = (textContent, className = "muted") => section.append(element("p", { className, textContent }));
    if (status === "off") note("It is turned off.");
    else if (status === "starting") note("It is being started.");
    else if (error) note(error, "error");
    else if (!tools.length && !prompts.length && !resources.length) note("It offers nothing.");
    for (const [j, tool] of tools.entries()) {
      const about = element("p", { className: "muted about", id: `about-${i}-${j}`, textContent: tool.description ?? "" });
      const box = element("input", {
        type: "checkbox", className: "tool", value: tool.name, checked: chosen.includes(tool.name),
        "aria-describedby": about.id, "data-key": `tool ${tool.name}`,
      });
      section.append(element("label", { className: "check" }, box, tool.title || tool.name), about);
    }
    section.append(
      ...offers("Prompts", prompts.map((prompt) => this.offer(name, prompt, "Insert", () => this.insert(server, prompt)))),
      ...offers("Resources", resources.map((one) => this.offer(name, one, "Attach", () => this.attach(server, one)))),
    );
    if (this.asked?.server.name === name) section.append(this.argumentsForm(server, this.asked.prompt));
    if (server.is_own) section.append(...this.ownParts(server));
    return section;
  }

  offer(server, { name, uri, title, description }, does, onclick) {
    const label = title || name;
    const key = `${does} ${server} ${uri ?? name}`;
    return element(
      "li", {},
      element("span", {}, label, element("span", { className: "muted", textContent: description ? ` ${description}` : "" })),
      element("button", { type: "button", textContent: does, "aria-label": `${does} ${label}`, "data-key": key, onclick }),
    );
  }

  // --- Prompts and resources

  insert(server, prompt) {
    if (prompt.arguments.length) {
      this.asked = { server, prompt };
      this.edited = null;
      this.opener = `Insert ${server.name} ${prompt.name}`;
      this.draw();
      $("tool-list").querySelector(".arguments input").focus();
    } else this.insertWith(server, prompt, {});
  }

  argumentsForm(server, prompt) {
    const fields = prompt.arguments.map(({ name, description, required }) => element(
      "label", {}, `${name}${required ? "" : " (optional)"}`,
      element("input", { name, required, title: description ?? "", autocomplete: "off" }),
    ));
    const form = element(
      "form", { className: "arguments", "aria-label": `Arguments of ${prompt.title || prompt.name}` }, ...fields,
      element("div", { className: "buttons" },
        element("button", { className: "primary", textContent: "Insert" }),
        element("button", { type: "button", textContent: "Cancel", onclick: () => this.leave() })),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const given = [...new FormData(form)].filter(([, value]) => value !== "");
      this.insertWith(server, prompt, Object.fromEntries(given));
    });
    return form;
  }

  async insertWith(server, prompt, args) {
    const text = await this.answerOf(this.tools.prompt(server, prompt.name, args));
    if (text === null) return;
    this.dialog.close();
    this.act.insert(text);
  }

  async attach(server, { uri, name, title }) {
    const contents = await this.answerOf(this.tools.read(server, uri));
    if (contents === null) return;
    try {
      const files = contents.map((part, i) => fileOf(part, `${title || name}${i ? ` ${i + 1}` : ""}`));
      this.dialog.close();
      this.act.attach(files);
    } catch (error) {
      this.say(`${title || name} cannot be attached: ${error.message}`);
    }
  }

  // The answer of a server; null: there is none, and the reason is told.
  async answerOf(promise) {
    this.say("");
    try {
      return await promise;
    } catch (error) {
      if (!(error instanceof ApiError) && !(error instanceof ConnectionLost)) throw error;
      this.say(error.message);
      return null;
    }
  }

  // --- Servers of the user

  ownParts({ name, isOff }) {
    if (this.edited === name) return [this.form(this.tools.own.all.find((server) => server.name === name))];
    const button = (kind, textContent, onclick) => element("button", {
      type: "button", textContent, "aria-label": `${textContent} ${name}`, "data-key": `${kind} ${name}`, onclick,
    });
    return [element(
      "div", { className: "buttons" },
      button("edit", "Edit", () => this.edit(name)),
      button("switch", isOff ? "Turn on" : "Turn off", () => this.change(() => {
        this.opener = `switch ${name}`;
        const server = this.tools.own.all.find((one) => one.name === name);
        this.tools.own.put({ ...server, isOff: !isOff }, name);
      })),
      button("remove", "Remove", () => this.change(() => this.tools.own.remove(name))),
    )];
  }

  edit(name) {
    this.edited = name;
    this.asked = null;
    this.opener = `edit ${name}`;
    this.draw();
    $("tool-list").querySelector(".own-server input").focus();
  }

  leave() {
    this.edited = this.asked = null;
    this.draw();
    this.focus(this.opener);
  }

  async change(does) {
    try {
      does();
    } catch (error) { // storage is full, or forbidden
      this.say(`This browser does not keep it: ${error.message}`);
      return;
    }
    this.leave();
    await this.refresh();
  }

  form(server) {
    const field = (name, label, input, about) => {
      const problem = element("p", { className: "error", id: `own-${name}-problem` });
      input.name = name;
      input.setAttribute("aria-describedby", problem.id);
      return [element("label", {}, label, input), ...(about ? [element("p", { className: "muted", textContent: about })] : []), problem];
    };
    const form = element(
      "form", { className: "own-server", noValidate: true, "aria-label": server.name ? `Edit ${server.name}` : "Add a server" },
      ...field("name", "Name", element("input", { value: server.name, autocomplete: "off", spellcheck: false })),
      ...field("url", "URL (streamable HTTP)", element("input", { value: server.url, type: "url", autocomplete: "off" })),
      ...field(
        "headers", "Headers, one a line", element("textarea", { rows: 2, value: headersText(server.headers), spellcheck: false }),
        "Such as: Authorization: Bearer TOKEN. They are kept in this browser and sent through this page's server.",
      ),
      element("div", { className: "buttons" },
        element("button", { className: "primary", textContent: server.name ? "Save" : "Add" }),
        element("button", { type: "button", textContent: "Cancel", onclick: () => this.leave() })),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const values = Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, value.trim()]));
      const taken = [...this.tools.servers, ...this.tools.own.all].map(({ name }) => name);
      const wrong = wrongServer(values, values.headers, taken.filter((name) => name !== server.name));
      for (const name of ["name", "url", "headers"]) {
        const isWrong = wrong?.field === name;
        form.elements[name].setAttribute("aria-invalid", isWrong);
        form.querySelector(`#own-${name}-problem`).textContent = isWrong ? wrong.reason : "";
      }
      if (wrong) form.elements[wrong.field].focus();
      else {
        const fresh = { name: values.name, url: values.url, headers: headersOf(values.headers), isOff: server.isOff };
        this.opener = `edit ${fresh.name}`;
        this.change(() => this.tools.own.put(fresh, server.name || null));
      }
    });
    return form;
  }
}

function offers(label, rows) {
  if (!rows.length) return [];
  return [element("h4", { textContent: label }), element("ul", { className: "offers", "aria-label": label }, ...rows)];
}

// A file with the contents of a resource.
function fileOf({ uri, type, text, data }, name) {
  const blob = text === undefined ? ofBase64(data, type ?? "application/octet-stream") : new Blob([text], { type: "text/plain" });
  const named = /\.\w+$/.test(name) || !/\.\w+$/.test(uri) ? name : `${name}${/\.\w+$/.exec(uri)[0]}`;
  return new File([blob], named, { type: blob.type });
}
