// The server's state: asked for every few seconds, and shown beside the chats.

import { ApiError, get, post } from "./api.js";
import { Limits } from "./media.js";
import { parts, showContext } from "./show.js";
import { answers, setLimits, settings, state, store, tools } from "./state.js";
import { Titles } from "./titles.js";
import { element } from "./view.js";

const $ = (id) => document.getElementById(id);
const POLL_MILLISECONDS = 2000;
const titles = new Titles(store, answers, settings);

export function askForKey() {
  const what = settings.key ? "The server does not accept this API key." : "This server requires an API key.";
  parts.banner.set("key", `${what} Enter it under Settings, Connection.`, "Enter key", () => parts.dialog.open("key"));
  $("key-state").textContent = what;
}

export async function poll() {
  try {
    const info = await get("server_info", settings.key);
    // Another server may answer after one that was not reached.
    if (info.status !== state.status || info.models) showModels((await get("v1/models", settings.key)).data);
    state.status = info.status;
    parts.banner.clear("connection");
    parts.banner.clear("key");
    $("key-state").textContent = "";
    const ofModel = info.models ? await infoOfModel() : info;
    showState(ofModel);
    showLimits(ofModel);
    const { num_running: running = 1, num_waiting: waiting = 1 } = ofModel.stats ?? {}; // (a busy one says less)
    titles.write(running + waiting > 0);
    await showServers(info.config);
  } catch (error) {
    state.status = null;
    if (error instanceof ApiError && error.status === 401) {
      parts.banner.clear("connection");
      $("state").textContent = "no access";
      askForKey();
    } else {
      $("state").textContent = "not reachable";
      const why = navigator.onLine === false ? "This device is offline" : "The server cannot be reached";
      parts.banner.set("connection", `${why}. Your chats are safe. Retrying every few seconds.`, "Try now", poll);
    }
  }
}

export async function startPolling() {
  addEventListener("online", poll);
  addEventListener("offline", poll);
  await poll();
  setInterval(() => { if (!document.hidden) poll(); }, POLL_MILLISECONDS);
}

// (A server without them has no such path.)
async function showServers({ mcp_config: file, page_mcp: ofPage }) {
  state.mayAddServers = Boolean(ofPage) && ofPage !== "off";
  const hasSome = Boolean(file) || (state.mayAddServers && tools.own.enabled().length > 0);
  const isNews = (Boolean(file) || state.mayAddServers) === $("open-tools").hidden;
  $("open-tools").hidden = !file && !state.mayAddServers;
  if (!hasSome || !(isNews || tools.servers.some((server) => server.status === "starting"))) return;
  try {
    await tools.load();
  } catch (error) {
    if (!(error instanceof ApiError) || error.status === 401) throw error;
    parts.banner.set("tools", `Tools cannot be used: ${error.message}.`);
  }
}

// What the server of several models says about the chosen one. One that is not loaded takes text until it says more.
async function infoOfModel() {
  const chosen = state.models.find((m) => m.id === settings.model);
  const status = chosen?.status?.value === "loading" ? "loading" : "ready";
  if (chosen?.status?.value !== "loaded") return { status, config: {}, stats: null, isUnloaded: true };
  return get(`server_info?model=${encodeURIComponent(settings.model)}`, settings.key);
}

// An option of the list, with the state of its model where there are several.
function modelOption({ id, status }) {
  const failed = status?.failed ? `failed: ${status.reason}` : "";
  const told = { loaded: "", loading: "loading…", unloaded: status?.failed ? "failed" : "not loaded" }[status?.value ?? "loaded"];
  return element("option", { value: id, textContent: told ? `${id} (${told})` : id, title: failed });
}

function showModels(all) {
  const data = all.filter((m) => !m.status || m.root === m.id || m.parent); // (no aliases)
  const ids = data.map((m) => m.id);
  if (JSON.stringify(data) !== JSON.stringify(state.models)) {
    state.models = data;
    // An open list would close if its options were other elements.
    const options = data.map(modelOption);
    const before = [...$("model").options];
    if (before.length === options.length && before.every((old, i) => old.value === options[i].value)) {
      before.forEach((old, i) => Object.assign(old, { textContent: options[i].textContent, title: options[i].title }));
    } else $("model").replaceChildren(...options);
    showContext();
  }
  if (!ids.includes(settings.model)) settings.setModel(ids[0] ?? "");
  $("model").value = settings.model;
}

// Shows which files may be attached; a server that does not say so takes text only.
function showLimits(info) {
  if (!info.isUnloaded && (info.status !== "ready" || !info.config || !info.stats)) return; // (a busy one says less)
  const limits = new Limits({ media: { kinds: {} }, ...info }, (data) => post("extract_text", settings.key, { data }));
  setLimits(limits);
  const label = `Attach ${limits.nouns.join(", ")}`;
  $("attach").title = label;
  $("attach").setAttribute("aria-label", label);
}

function showState({ stats, status, generation_defaults: defaults }) {
  $("state").textContent = status === "ready" ? "" : status;
  if (status === "loading") parts.banner.set("loading", "Loading the model…");
  else parts.banner.clear("loading");
  if (defaults) parts.dialog.showDefaults(defaults);
  if (!stats) return;
  const { num_usable_blocks: all, num_used_blocks: used, num_cached_blocks: cached } = stats.usage;
  const share = (n) => `${(100 * n / all).toFixed(1)}%`;
  $("pool-used").style.width = share(used);
  $("pool-cached").style.width = share(cached);
  $("pool-text").textContent = `${share(used)} used, ${share(cached)} cached`;
  $("pool").setAttribute("aria-valuenow", (100 * used / all).toFixed(1));
  $("load").textContent = `${stats.num_running} running, ${stats.num_waiting} waiting`;
}
