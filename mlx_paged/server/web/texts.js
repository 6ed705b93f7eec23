// Text files of messages: which files are text, and how they stand in a prompt.
//
// An item of kind "text" is stored as UTF-8, whatever its file's encoding was.

export const TEXT = "text/plain"; // the type that stored text has
export const PASTED_CHARACTERS = 8000; // longer pasted text becomes a file
const SNIFFED = 65_536; // bytes at the start of a file that show whether it is text
// Types that browsers give to files by their ending, while the files are text: TypeScript, playlists, drawings.
const MISTYPED = ["video/mp2t", "video/vnd.dlna.mpeg-tts", "audio/x-mpegurl", "audio/mpegurl", "image/svg+xml"];

// The text of bytes in UTF-8, or UTF-16 with a byte order mark; null: they are not text.
// `isPart`: more bytes follow.
function decoded(bytes, isPart = false) {
  const mark = `${bytes[0]} ${bytes[1]}`;
  const encoding = { "255 254": "utf-16le", "254 255": "utf-16be" }[mark] ?? "utf-8";
  try {
    const text = new TextDecoder(encoding, { fatal: true }).decode(bytes, { stream: isPart });
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

// An item of a tray as text where its file is text; else as it is. One of more than `most` bytes is not read.
// `kinds`: kinds of media that the model takes.
export async function asText(item, most, kinds) {
  if (item.kind && !(MISTYPED.includes(item.type) && !kinds.includes(item.kind))) return item;
  const read = async (blob) => new Uint8Array(await blob.arrayBuffer());
  const head = await read(item.blob.slice(0, SNIFFED));
  if (decoded(head, item.size > SNIFFED) === null) return item;
  const found = { ...item, kind: "text", type: TEXT };
  if (item.size > most) return found;
  const text = decoded(await read(item.blob));
  if (text === null) return item;
  const blob = new Blob([text], { type: TEXT });
  return { ...found, size: blob.size, blob };
}

// Pasted text as an item of a tray; `place`: its number, from 1.
export function pastedItem(text, place) {
  const blob = new Blob([text], { type: TEXT });
  const name = place === 1 ? "Pasted text.txt" : `Pasted text ${place}.txt`;
  return { kind: "text", name, type: TEXT, size: blob.size, blob, isPasted: true };
}

// A block of code in Markdown; its fence is longer than any within the text.
export function fenced(language, text) {
  let longest = 2;
  for (const [run] of text.matchAll(/`+/g)) longest = Math.max(longest, run.length);
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}

// A text file as the model reads it.
export function folded(name, text) {
  const language = /\.(\w{1,12})$/.exec(name)?.[1].toLowerCase() ?? "";
  return `File: ${name.replace(/\s+/g, " ")}\n${fenced(language, text)}`;
}
