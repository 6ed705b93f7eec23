// Chats and settings, kept only in this browser.

const CHATS = "mlx-paged.chats";
const SETTINGS = "mlx-paged.settings";

export const DEFAULTS = {
  system: "", temperature: "0.7", top_p: "0.95", top_k: "", min_p: "", repetition_penalty: "",
  max_tokens: "512", seed: "", key: "", model: "",
};

function read(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? fallback;
  } catch {
    return fallback;
  }
}

export class Store {
  constructor() {
    this.chats = read(CHATS, []);
    this.settings = { ...DEFAULTS, ...read(SETTINGS, {}) };
    if (this.chats.length === 0) this.add();
    this.current = this.chats[0];
  }

  add() {
    const chat = { id: crypto.randomUUID?.() ?? String(Date.now() + Math.random()), messages: [] };
    this.chats.unshift(chat);
    this.current = chat;
    this.save();
    return chat;
  }

  remove(chat) {
    this.chats = this.chats.filter((c) => c !== chat);
    if (this.chats.length === 0) this.add();
    if (chat === this.current) this.current = this.chats[0];
    this.save();
  }

  save() {
    try {
      localStorage.setItem(CHATS, JSON.stringify(this.chats));
      localStorage.setItem(SETTINGS, JSON.stringify(this.settings));
    } catch {
      // Full, or forbidden: the page still works, but keeps nothing when it is closed.
    }
  }
}

export function titleOf(chat) {
  const first = chat.messages.find((m) => m.role === "user");
  return first ? first.content.slice(0, 60) : "New chat";
}
