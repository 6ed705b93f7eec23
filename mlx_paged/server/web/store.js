// Chats and messages, kept only in this browser, in IndexedDB. Each is a record of its own and is
// changed field by field, so tabs merge what they write; they tell each other of every change. The bytes of
// pictures, videos and sounds are records of a third kind, { chat, id, blob }, which never change.

import { openDB } from "./vendor/idb.js";
import { newId } from "./conversation.js";
import { filesOf, isSame } from "./media.js";
import { fromOldPage } from "./transfer.js";

const OLD_CHATS = "mlx-paged.chats"; // of localStorage, up to version 0.1
const TAB = "mlx-paged.tab";
const UNSAVED = "mlx-paged.unsaved"; // of localStorage, before the database's name
const LIFE_SIGN_MILLISECONDS = 1500;
const CHECK_MILLISECONDS = 15_000;
const UNDO_MILLISECONDS = 10 * 60_000;
const READ_AT_ONCE = 250; // messages; the page draws between two reads

// Servers under several paths of one host share its storage.
function databaseName() {
  const path = new URL(".", document.baseURI).pathname;
  return path === "/" ? "mlx-paged" : `mlx-paged${path}`;
}

// The keys of a chat's items.
const itemsOf = (chat) => IDBKeyRange.bound([chat], [chat, []]);

// Events, with their details: "change" { kind, record, remote }, "gone" ids of chats, "stop" the id of an
// answer that another tab wants stopped, "trouble" why nothing is kept, "blocked" that opening waits for tabs of an
// older page.
export class Store extends EventTarget {
  constructor() {
    super();
    this.chats = new Map();
    this.messages = new Map(); // chat id -> Map of its messages
    this.erased = new Map(); // message id -> a message that was deleted, until that cannot be undone
    this.chatOf = new Map(); // message id -> chat id
    this.streaming = new Set(); // ids of answers that come, in this tab or another
    this.tab = ownTab();
    this.owned = new Set(); // ids of answers that come in this tab
    this.unsaved = new Set(); // lists of changes that the database does not have yet
    this.media = []; // records that the database did not take
    this.gone = new Set(); // ids of chats that were deleted for good
  }

  async open() {
    this.listen();
    try {
      this.db = await openDB(databaseName(), 2, {
        upgrade(db, version) {
          if (version < 1) {
            db.createObjectStore("chats", { keyPath: "id" });
            db.createObjectStore("messages", { keyPath: "id" }).createIndex("chat", "chat");
          }
          db.createObjectStore("media", { keyPath: ["chat", "id"] });
        },
        // (Tabs of the page before it had media keep the database as it was.)
        blocked: () => this.dispatchEvent(new Event("blocked")),
        blocking: (_, __, event) => {
          event.target.close();
          this.trouble("another tab has a newer version of this page; reload this one");
        },
        terminated: () => this.trouble("the browser closed its storage; reload the page"),
      });
      await this.load();
      await this.takeUnsaved();
    } catch (error) {
      this.db = null;
      this.trouble(error.message);
    }
    await this.migrate();
    const forgotten = [...this.chats.values()]
      .filter((chat) => chat.deleted && Date.now() - chat.deleted > UNDO_MILLISECONDS);
    await this.forget(forgotten.map((chat) => chat.id));
    await this.eraseForGood();
    this.findInterrupted();
    setInterval(() => this.findInterrupted(), CHECK_MILLISECONDS); // tabs can crash
    addEventListener("pagehide", () => {
      this.keepUnsaved();
      this.channel?.postMessage({ closed: this.tab });
    });
    // A page that was frozen or in the browser's cache of pages has not heard other tabs.
    const wake = () => this.db && this.load();
    document.addEventListener("resume", wake);
    addEventListener("pageshow", (event) => event.persisted && wake());
  }

  async load() {
    const tx = this.db.transaction(["chats", "messages"]);
    const chats = await tx.objectStore("chats").getAll();
    const ids = new Set(chats.map(({ id }) => id));
    const takeAll = (kind, records) => {
      for (const record of records) {
        const known = this.get(kind, record.id);
        if (known?.updated >= record.updated) continue; // heard of it meanwhile
        const chat = kind === "chats" ? record.id : record.chat;
        if (!ids.has(chat) || this.gone.has(chat)) continue;
        this.take(kind, record);
        this.dispatchEvent(new CustomEvent("change", { detail: { kind, record, remote: true } }));
      }
    };
    let messages = [];
    do {
      const after = messages.length ? IDBKeyRange.lowerBound(messages.at(-1).id, true) : null;
      messages = await tx.objectStore("messages").getAll(after, READ_AT_ONCE);
      takeAll("messages", messages);
    } while (messages.length === READ_AT_ONCE);
    takeAll("chats", chats); // last, so that none is listed without its messages
  }

  // Reading.

  listed() {
    return [...this.chats.values()].filter((c) => !c.deleted).sort((a, b) => b.used - a.used);
  }

  messagesOf(chat) {
    return this.messages.get(chat) ?? new Map();
  }

  get(kind, id) {
    if (kind === "chats") return this.chats.get(id);
    return this.messages.get(this.chatOf.get(id))?.get(id) ?? this.erased.get(id);
  }

  // The answers that come in a chat, in this tab or another.
  answersOf(chat) {
    return [...this.streaming].filter((id) => this.chatOf.get(id) === chat).map((id) => this.get("messages", id));
  }

  // The bytes of an item; undefined: they are gone.
  async blobOf(chat, id) {
    const kept = this.media.find((record) => record.chat === chat && record.id === id);
    return (kept ?? await this.db?.get("media", [chat, id]))?.blob;
  }

  // The records of a chat's items.
  async mediaOf(chat) {
    const stored = await this.db?.getAll("media", itemsOf(chat)) ?? [];
    return [...stored, ...this.media.filter((record) => record.chat === chat)];
  }

  // Writing. The promise is kept once the database has it.

  addChat(fields = {}) {
    const now = Date.now();
    const chat = {
      id: newId(), title: null, leaf: null, created: now, used: now, deleted: null, tools: [], pinned: false, folder: null,
      ...fields,
    };
    return this.write("chats", chat.id, chat);
  }

  // A message, and as the leaf of its chat.
  async addLeaf(fields) {
    const message = newMessage(fields);
    await this.writeAll([
      ["messages", message.id, message],
      ["chats", message.chat, { leaf: message.id, used: message.created }],
    ]);
    return this.get("messages", message.id);
  }

  // Chats and messages that are not there yet, as a file has them, in one transaction.
  async addAll(chats, messages) {
    await this.writeAll([
      ...chats.map((chat) => ["chats", chat.id, chat]),
      ...messages.map((fields) => ["messages", fields.id, newMessage(fields)]),
    ]);
  }

  // Keeps an item for the messages of a chat; returns it as these have it. Without an id it is a new one, and
  // bytes that the chat has already are not kept twice.
  async keepMedia(chat, { id, blob, kind, name, type, size }) {
    const known = await this.mediaOf(chat);
    let same = known.find((record) => record.id === id);
    if (!id) for (const record of known) if (!same && await isSame(record.blob, blob)) same = record;
    const record = same ?? { chat, id: id ?? newId(), blob };
    if (!same && blob) {
      try {
        if (!this.db) this.media.push(record);
        else await this.db.put("media", record);
      } catch (error) {
        this.media.push(record);
        this.trouble(error.message);
      }
    }
    return { id: record.id, kind, name, type, size };
  }

  async write(kind, id, changes) {
    await this.writeAll([[kind, id, changes]]);
    return this.get(kind, id);
  }

  // All of them or none: [kind, id, changed fields], each.
  async writeAll(list) {
    const written = [];
    for (const [kind, id, changes] of list) {
      const known = this.get(kind, id);
      const updated = Math.max(Date.now(), (known?.updated ?? 0) + 1);
      const record = { ...known, ...changes, id, updated };
      if (kind === "messages" && !this.chats.has(record.chat)) continue; // deleted meanwhile
      this.take(kind, record);
      written.push({ kind, id, changes: { ...changes, updated }, record, isNew: !known });
    }
    for (const { kind, id, changes, record } of written) this.channel?.postMessage({ kind, id, changes, record });
    for (const { kind, record } of written) {
      this.dispatchEvent(new CustomEvent("change", { detail: { kind, record, remote: false } }));
    }
    if (!this.db) return;
    this.unsaved.add(written);
    try {
      const tx = this.db.transaction(["chats", "messages"], "readwrite");
      await Promise.all([...written.map(async ({ kind, id, changes, record, isNew }) => {
        // (Another tab may have changed other fields.)
        const stored = isNew ? undefined : await tx.objectStore(kind).get(id);
        await tx.objectStore(kind).put(stored ? { ...stored, ...changes } : record);
      }), tx.done]);
    } catch (error) {
      this.trouble(error.message);
    }
    this.unsaved.delete(written);
  }

  // A page that goes aborts what the database has not done yet: it is done when the next page starts.
  keepUnsaved() {
    const changes = [...this.unsaved].flat();
    if (!changes.length) return;
    try {
      const key = UNSAVED + databaseName();
      const others = JSON.parse(localStorage.getItem(key)) ?? [];
      localStorage.setItem(key, JSON.stringify([...others, ...changes]));
    } catch {
      // There is no storage, or no room in it.
    }
  }

  async takeUnsaved() {
    let kept;
    try {
      const key = UNSAVED + databaseName();
      kept = JSON.parse(localStorage.getItem(key)) ?? [];
      localStorage.removeItem(key);
    } catch {
      return;
    }
    for (const { kind, id, changes, record } of kept) {
      const known = this.get(kind, id);
      if (known?.updated >= changes.updated) continue; // it was saved after all, or changed again
      await this.write(kind, id, known ? changes : record);
    }
  }

  // Deletes chats for good.
  async forget(ids, remote = false) {
    if (!ids.length) return;
    for (const id of ids) {
      this.gone.add(id);
      this.chats.delete(id);
      for (const message of this.messagesOf(id).keys()) {
        this.chatOf.delete(message);
        this.streaming.delete(message);
      }
      this.messages.delete(id);
      for (const message of [...this.erased.values()]) {
        if (message.chat !== id) continue;
        this.erased.delete(message.id);
        this.chatOf.delete(message.id);
      }
    }
    this.media = this.media.filter((record) => !ids.includes(record.chat));
    this.dispatchEvent(new CustomEvent("gone", { detail: ids }));
    if (remote) return;
    this.channel?.postMessage({ gone: ids });
    if (!this.db) return;
    const tx = this.db.transaction(["chats", "messages", "media"], "readwrite");
    for (const id of ids) {
      tx.objectStore("chats").delete(id);
      const keys = await tx.objectStore("messages").index("chat").getAllKeys(id);
      for (const key of keys) tx.objectStore("messages").delete(key);
      tx.objectStore("media").delete(itemsOf(id));
    }
    await tx.done;
  }

  // Messages that were deleted a while ago, and files that no other message of their chat has.
  async eraseForGood() {
    const old = [...this.erased.values()].filter((message) => Date.now() - message.deleted > UNDO_MILLISECONDS);
    if (!old.length || !this.db) return;
    for (const { id } of old) {
      this.erased.delete(id);
      this.chatOf.delete(id);
    }
    const tx = this.db.transaction(["messages", "media"], "readwrite");
    for (const { id } of old) tx.objectStore("messages").delete(id);
    for (const chat of new Set(old.map((message) => message.chat))) {
      const kept = [...this.messagesOf(chat).values(), ...this.erased.values()].flatMap(filesOf).map(({ id }) => id);
      for (const key of await tx.objectStore("media").getAllKeys(itemsOf(chat))) {
        if (!kept.includes(key[1])) tx.objectStore("media").delete(key);
      }
    }
    await tx.done;
  }

  // Other tabs.

  listen() {
    this.channel = globalThis.BroadcastChannel ? new BroadcastChannel(databaseName()) : null;
    this.channel?.addEventListener("message", ({ data }) => {
      if (data.gone) this.forget(data.gone, true);
      else if (data.stop) this.dispatchEvent(new CustomEvent("stop", { detail: data.stop }));
      else if (data.closed) this.endAnswersOf(data.closed);
      else if (data.alive) this.waiting?.delete(data.alive);
      else if (data.isAlive) {
        if (this.owned.has(data.isAlive)) this.channel.postMessage({ alive: data.isAlive });
      } else this.heard(data);
    });
  }

  heard({ kind, id, changes, record }) {
    const known = this.get(kind, id);
    if (kind === "messages" && known && (this.owned.has(id) || known.updated >= changes.updated)) return;
    this.take(kind, known ? { ...known, ...changes } : record);
    const detail = { kind, record: this.get(kind, id), remote: true };
    this.dispatchEvent(new CustomEvent("change", { detail }));
  }

  askToStop(id) {
    this.channel?.postMessage({ stop: id });
  }

  // Answers that were coming when their tab was closed or reloaded.
  findInterrupted() {
    this.endAnswersOf(this.tab); // of this tab before it was reloaded
    this.waiting = new Set(this.foreign().map((m) => m.id));
    for (const id of this.waiting) this.channel?.postMessage({ isAlive: id });
    setTimeout(() => {
      for (const id of this.waiting) this.endAnswer(id);
    }, LIFE_SIGN_MILLISECONDS);
  }

  // Answers that come, but not in this tab.
  foreign() {
    return [...this.streaming].filter((id) => !this.owned.has(id)).map((id) => this.get("messages", id));
  }

  endAnswersOf(tab) {
    for (const { id, owner } of this.foreign()) if (owner === tab) this.endAnswer(id);
  }

  endAnswer(id) {
    if (this.get("messages", id)?.status !== "streaming") return;
    this.write("messages", id, { status: "interrupted", owner: null });
  }

  // The rest.

  take(kind, record) {
    if (kind === "chats") {
      this.gone.delete(record.id); // a file brought it back
      this.chats.set(record.id, record);
      return;
    }
    if (!this.messages.has(record.chat)) this.messages.set(record.chat, new Map());
    this.chatOf.set(record.id, record.chat);
    if (record.deleted) {
      this.erased.set(record.id, record);
      this.messages.get(record.chat).delete(record.id);
      this.streaming.delete(record.id);
      return;
    }
    this.erased.delete(record.id);
    this.messages.get(record.chat).set(record.id, record);
    if (record.status === "streaming") this.streaming.add(record.id);
    else this.streaming.delete(record.id);
  }

  trouble(reason) {
    this.dispatchEvent(new CustomEvent("trouble", { detail: reason }));
  }

  async migrate() {
    let old;
    try {
      old = JSON.parse(localStorage.getItem(OLD_CHATS));
    } catch {
      return;
    }
    if (old === null) return;
    const chats = fromOldPage(old);
    for (const { messages, ...chat } of chats) {
      if (this.chats.has(chat.id)) continue; // another tab was faster
      await this.addAll([chat], messages);
    }
    if (this.db) localStorage.removeItem(OLD_CHATS);
  }
}

function newMessage(fields) {
  return {
    id: newId(), reasoning: "", calls: [], media: [], status: "done", error: null, finish: null, stats: null, model: null,
    owner: null, edited: false, from: null, deleted: null, created: Date.now(), ...fields,
  };
}

// An id that survives a reload of the tab, but is not copied when the tab is duplicated.
function ownTab() {
  try {
    const id = sessionStorage.getItem(TAB) ?? newId();
    sessionStorage.removeItem(TAB);
    addEventListener("pagehide", () => sessionStorage.setItem(TAB, id));
    addEventListener("pageshow", () => sessionStorage.removeItem(TAB));
    return id;
  } catch {
    return newId();
  }
}
