// Groups of the list of chats: the pinned ones, one for each folder, and the rest.

import { element } from "./view.js";

// [{ key, name, chats }] without empty groups, each in the order of `chats`; the rest has the key null.
export function groupsOf(chats) {
  const pinned = chats.filter((chat) => chat.pinned);
  const others = chats.filter((chat) => !chat.pinned);
  const folders = foldersOf(others).map((name) => (
    { key: `folder.${name}`, name, chats: others.filter((chat) => chat.folder === name) }
  ));
  const rest = others.filter((chat) => !chat.folder);
  return [{ key: "pinned", name: "Pinned", chats: pinned }, ...folders, { key: null, name: null, chats: rest }]
    .filter((group) => group.chats.length);
}

// Names of folders, in alphabetical order.
export function foldersOf(chats) {
  return [...new Set(chats.map((chat) => chat.folder).filter(Boolean))].sort((a, b) => a.localeCompare(b));
}

// A group that can be collapsed, and stays as the user left it.
export function groupView({ key, name, chats }, rows, settings) {
  const details = element(
    "details", { open: !settings.collapsed[key] },
    element("summary", {}, element("span", { className: "group-name" }, name), element("span", { className: "muted" }, `${chats.length}`)),
    element("ul", { "aria-label": name }, ...rows),
  );
  details.addEventListener("toggle", () => settings.setCollapsed(key, !details.open));
  return element("li", { className: "group", "data-group": key }, details);
}
