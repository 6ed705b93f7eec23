// The state of the page besides the saved chats (store.js) and settings (settings.js), and what follows from it.
// Only actions.js, message_actions.js, server_state.js and scroll.js change it; show.js then draws it.

import { Answers } from "./answers.js";
import { pathTo } from "./conversation.js";
import { OwnServers } from "./own_servers.js";
import { Settings } from "./settings.js";
import { Store } from "./store.js";
import { Tools } from "./tools.js";

export const NEW_CHAT = { id: "new", title: null, leaf: null, tools: [], parameters: null }; // kept once something is sent

export const state = {
  current: NEW_CHAT.id, // id of the chat that is shown
  models: [],
  status: null, // of the server; null: not reached
  limits: null, // of what messages may have besides text; null: not known yet
  mayAddServers: false, // of MCP; as the server says
  isPreparing: false, // a message is about to be sent
  follows: true, // the end of the messages is kept in view
};

export const store = new Store();
export const settings = new Settings();
export const tools = new Tools(store, settings, new OwnServers());
export const answers = new Answers(store, settings, (id) => tools.ofRequest(id), contextLimit);

// Tokens of prompt and answer together; undefined: not known.
export function contextLimit() {
  return state.models.find((m) => m.id === settings.model)?.max_model_len ?? undefined;
}

export const chat = () => store.chats.get(state.current) ?? NEW_CHAT;
export const path = () => pathTo(store.messagesOf(state.current), chat().leaf);
export const coming = () => path().find((message) => message.status === "streaming"); // of the branch that is shown

let markOpened;
const opened = new Promise((found) => { markOpened = found; });
export const chatIsOpen = () => opened; // the chat of the last visit has been opened
export { markOpened };

let foundLimits;
const firstLimits = new Promise((found) => { foundLimits = found; });
export const knownLimits = () => state.limits ?? firstLimits;

export function setLimits(limits) {
  state.limits = limits;
  foundLimits(limits);
}

// Changes fields of the open chat, also of one that is not kept yet.
export function changeChat(fields) {
  if (state.current === NEW_CHAT.id) Object.assign(NEW_CHAT, fields);
  else store.write("chats", state.current, fields);
}
