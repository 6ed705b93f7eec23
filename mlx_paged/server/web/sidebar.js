// The list of chats: search, rename, menus, and which of them are being answered.

import { titleOf } from "./conversation.js";
import { foldersOf, groupsOf, groupView } from "./folders.js";
import { marked, Search } from "./search.js";
import { element, icon, isComposing } from "./view.js";

const $ = (id) => document.getElementById(id);
const MOST_HITS = 100; // chats that a search lists

// `act`: open(chat, id of a message with a hit or null), stop, change(chat, fields), exportMarkdown, exportJson, remove; each takes a chat.
export class Sidebar {
  constructor(store, answers, settings, act) {
    this.store = store;
    this.answers = answers;
    this.settings = settings;
    this.act = act;
    this.edited = null; // { id, field }: the chat whose title or folder is edited
    this.unread = new Set();
    this.narrow = matchMedia("(max-width: 760px)");
    this.narrow.addEventListener("change", () => this.toggle(!this.narrow.matches));
    this.toggle(!this.narrow.matches);
    this.search = new Search(store);
    this.search.addEventListener("change", () => this.show());
    $("search").addEventListener("input", () => this.search.start($("search").value));
    $("search").addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || isComposing(event)) return;
      event.stopPropagation();
      $("search").value = "";
      this.search.start("");
    });
    $("toggle-sidebar").addEventListener("click", () => this.toggle());
    $("close-sidebar").addEventListener("click", () => this.close());
    $("shade").addEventListener("click", () => this.close());
    $("sidebar").addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.narrow.matches) {
        event.stopPropagation();
        this.close();
      }
    });
    $("chat-menu").addEventListener("keydown", (event) => this.moveInMenu(event));
  }

  // Narrow: a drawer above the rest. Wide: a column beside it.
  toggle(isOpen = document.body.dataset.sidebar !== "open") {
    document.body.dataset.sidebar = isOpen ? "open" : "closed";
    $("toggle-sidebar").setAttribute("aria-expanded", String(isOpen));
    const covers = isOpen && this.narrow.matches;
    $("shade").hidden = !covers;
    document.querySelector("main").inert = covers;
    if (covers) $("close-sidebar").focus();
  }

  close() {
    this.toggle(false);
    $("toggle-sidebar").focus();
  }

  closeIfNarrow() {
    if (this.narrow.matches) this.toggle(false);
  }

  // The chats in their order on the page.
  listed() {
    return this.groups().flatMap((group) => group.chats);
  }

  groups() {
    const all = this.store.listed();
    const { words, hits } = this.search;
    if (!words.length) return groupsOf(all);
    return [{ key: null, name: null, chats: all.filter((chat) => hits.has(chat.id)).slice(0, MOST_HITS) }];
  }

  show(current = this.current) {
    this.current = current;
    this.unread.delete(current);
    if (this.edited && $("chats").querySelector(".rename")) return; // shown again after that
    const groups = this.groups();
    const chats = groups.flatMap((group) => group.chats);
    const shown = JSON.stringify(chats.map((chat) => [
      chat.id, titleOf(chat, this.store.messagesOf(chat.id)), this.answers.inChat(chat.id)?.id,
      this.unread.has(chat.id), chat.id === current, chat.id === this.edited?.id,
      chat.pinned, chat.folder, this.search.hits.get(chat.id)?.snippet,
    ]).concat(this.found(chats.length), this.search.words));
    if (shown === this.shown) return;
    this.shown = shown;
    const focused = document.activeElement?.closest("#chats [data-chat], #chats [data-group]");
    const kind = document.activeElement?.className;
    const rowOf = (chat) => (chat.id === this.edited?.id ? this.editor(chat) : this.row(chat));
    $("chats").replaceChildren(...groups.flatMap((group) => {
      const rows = group.chats.map(rowOf);
      return group.key === null ? rows : [groupView(group, rows, this.settings)];
    }));
    $("no-chats").textContent = this.found(chats.length);
    $("no-chats").hidden = !$("no-chats").textContent;
    if (!focused) return;
    const { chat, group } = focused.dataset;
    const rows = [...$("chats").querySelectorAll("[data-chat], [data-group]")];
    const row = rows.find((r) => r.dataset.chat === chat && r.dataset.group === group);
    [...(row?.querySelectorAll("button, input, summary") ?? [])].find((b) => b.className === kind)?.focus();
  }

  // The line below `count` chats.
  found(count) {
    const { words, hits, isRunning } = this.search;
    if (!words.length) return count ? "" : "No chats yet.";
    if (hits.size > MOST_HITS) return `Showing the newest ${MOST_HITS} of ${hits.size} chats.`;
    if (count) return "";
    return isRunning ? "Searching…" : "No chats match.";
  }

  row(chat) {
    const title = titleOf(chat, this.store.messagesOf(chat.id));
    const running = this.answers.inChat(chat.id);
    const isUnread = this.unread.has(chat.id);
    const hit = this.search.hits.get(chat.id);
    const open = () => this.act.open(chat, hit?.message ?? null);
    const row = element("li", { "data-chat": chat.id }, element("button", {
      type: "button", className: "title", title, "aria-current": String(chat.id === this.current),
      onclick: open,
    }, title));
    const mark = { className: "unread", role: "img", "aria-label": "new answer" };
    if (isUnread) row.firstChild.append(element("span", mark));
    if (running) {
      row.append(element("button", {
        type: "button", className: "stop icon-button", "aria-label": `Stop ${title}`, title: "Stop",
        onclick: () => this.act.stop(running),
      }, icon("stop")));
    }
    row.append(element("button", {
      type: "button", className: "more icon-button", "aria-label": `Menu of ${title}`,
      "aria-haspopup": "menu",
      onclick: (event) => this.openMenu(chat, event.currentTarget),
    }, icon("more")));
    if (!hit?.snippet) return row;
    const id = `snippet-${chat.id}`;
    row.firstChild.setAttribute("aria-describedby", id);
    row.append(element("p", { className: "snippet", id, onclick: open }, ...marked(hit.snippet, this.search.words)));
    return row;
  }

  editor(chat) {
    const { field } = this.edited;
    const end = async (text) => {
      if (this.edited?.id !== chat.id) return;
      this.edited = null;
      input.remove();
      if (text !== null) await this.act.change(chat, { [field]: text.trim() || null });
      this.show();
    };
    const isTitle = field === "title";
    const input = element("input", {
      className: "rename", value: isTitle ? titleOf(chat, this.store.messagesOf(chat.id)) : chat.folder ?? "",
      "aria-label": isTitle ? "Title" : "Folder", placeholder: isTitle ? "" : "Folder (empty: none)", maxLength: 200,
      onblur: () => end(input.value),
      onkeydown: (event) => {
        if (isComposing(event)) return;
        if (event.key === "Enter") end(input.value);
        if (event.key === "Escape") {
          event.stopPropagation();
          end(null);
        }
      },
    });
    if (isTitle) return element("li", { "data-chat": chat.id }, input);
    const known = foldersOf(this.store.listed()).map((value) => element("option", { value }));
    input.setAttribute("list", "folder-names");
    return element("li", { "data-chat": chat.id }, input, element("datalist", { id: "folder-names" }, ...known));
  }

  edit(chat, field) {
    this.edited = { id: chat.id, field };
    this.show();
    $("chats").querySelector(".rename")?.select();
  }

  openMenu(chat, button) {
    const menu = $("chat-menu");
    const item = (name, image, does) => element("button", {
      type: "button", role: "menuitem",
      onclick: () => {
        menu.hidePopover();
        does();
      },
    }, icon(image), name);
    menu.replaceChildren(
      item("Rename", "edit", () => this.edit(chat, "title")),
      item(chat.pinned ? "Unpin" : "Pin", "pin", () => this.act.change(chat, { pinned: !chat.pinned })),
      item("Move to folder", "folder", () => this.edit(chat, "folder")),
      item("Export as Markdown", "file", () => this.act.exportMarkdown(chat)),
      item("Export as JSON", "file", () => this.act.exportJson(chat)),
      item("Delete", "delete", () => this.act.remove(chat)),
    );
    menu.showPopover();
    const { left, bottom } = button.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = menu;
    menu.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
    menu.style.top = `${Math.max(8, Math.min(bottom + 4, innerHeight - height - 8))}px`;
    menu.firstChild.focus();
  }

  moveInMenu(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") event.stopPropagation(); // it closes the menu, and stops nothing
    if (!step) return;
    event.preventDefault();
    const items = [...$("chat-menu").children];
    const place = items.indexOf(document.activeElement);
    items[(place + step + items.length) % items.length].focus();
  }
}
