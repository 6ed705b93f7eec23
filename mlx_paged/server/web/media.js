// Pictures, videos, sounds and text files of messages: what a server takes, how files become it, and parts of
// requests.
//
// A message of the user has `media`, a list of { id, kind, name, type, size }; the bytes of `id` are in the
// store, once in a chat. Before it is sent an item has its bytes as `blob` instead of an id. Every model takes items
// of kind "text": texts.js.

import { folded, TEXT } from "./texts.js";
import { element } from "./view.js";

export const KINDS = ["image", "video", "audio"];
const NOUNS = { image: ["image", "images"], video: ["video", "videos"], audio: ["sound", "sounds"] };
// Types of pictures that servers read as they are; the browser converts the others.
const READ = [
  "png", "jpeg", "jpg", "webp", "gif", "bmp", "x-ms-bmp", "tiff", "avif", "jp2", "x-icon", "vnd.microsoft.icon",
  "x-portable-pixmap",
].map((name) => `image/${name}`);
// Types that every browser reads: a picture it cannot read is broken.
const SHOWN = ["png", "jpeg", "jpg", "webp", "gif", "bmp"].map((name) => `image/${name}`);
// Where the browser knows no type of a file.
const BY_ENDING = {
  pdf: "application/pdf", avif: "image/avif", heic: "image/heic", heif: "image/heif", jp2: "image/jp2", tif: "image/tiff", tiff: "image/tiff", mkv: "video/x-matroska",
  avi: "video/x-msvideo", flv: "video/x-flv", ts: "video/mp2t", m4a: "audio/mp4", flac: "audio/flac", opus: "audio/ogg",
  aif: "audio/aiff", aiff: "audio/aiff",
};
// Formats of `input_audio`, by what comes behind "audio/".
const FORMATS = {
  mpeg: "mp3", mp3: "mp3", wav: "wav", "x-wav": "wav", wave: "wav", "vnd.wave": "wav", flac: "flac", "x-flac": "flac",
  ogg: "ogg", opus: "opus", mp4: "m4a", "x-m4a": "m4a", m4a: "m4a", aac: "aac", webm: "webm", aiff: "aiff", "x-aiff": "aiff",
};
// The longest side of a picture that is made smaller; it shrinks until the file is small enough.
const LONGEST = 2048;
const SHORTEST = 128;
const SHRINKS = 0.75;
const QUALITY = 0.9;
// The share of a request's bytes that one picture may have: a chat has several, and sends them all each time.
const SHARE = 1 / 4;
const OVERHEAD = 16_384; // bytes of a request besides its messages

// An item that cannot be attached or sent; the message says which and why.
export class MediaError extends Error {}

export const mediaOf = (message) => message.media ?? [];

// The items of a message, those of its calls' results included.
export const filesOf = (message) => [
  ...mediaOf(message), ...(message.calls ?? []).flatMap(({ result }) => result?.media ?? []),
];

// True for types that are only shown or played: a document of another type could run code.
export const isMediaType = (kind, type) => (kind === "text" && type === TEXT) || (
  KINDS.includes(kind) && type.startsWith(`${kind}/`) && /^[a-z]+\/[\w.+-]{1,80}$/.test(type) && !/svg|xml/.test(type)
);

// Describes a file: { kind, name, type, size, blob }; `kind` is null for other files.
export function itemOf(file) {
  const ending = /\.(\w+)$/.exec(file.name ?? "")?.[1].toLowerCase();
  const type = (file.type || BY_ENDING[ending] || "").split(";")[0].toLowerCase();
  const kind = KINDS.find((name) => type.startsWith(`${name}/`)) ?? null;
  return { kind, name: file.name || NOUNS[kind]?.[0] || "file", type, size: file.size, blob: file };
}

export function megabytes(count) {
  const tenths = Math.round(count / 1e5) / 10;
  return tenths ? `${tenths.toLocaleString("en")} MB` : `${Math.max(1, Math.round(count / 1000))} kB`;
}

const listed = (words) => words.join(", ").replace(/, ([^,]*)$/, " and $1");

// The limits of a server, from what it says of itself; null: it has not said anything.
// `extract`: gives a promise of the text of a PDF.
export class Limits {
  constructor({ media, config }, extract = null) {
    this.kinds = media.kinds;
    this.types = [...READ, ...(media.image_types ?? [])];
    this.pdf = media.pdf ?? { reason: "this server does not read PDFs" };
    this.extract = extract;
    this.maxPixels = media.max_image_pixels;
    this.reason = media.reason ?? "it reads text only";
    this.maxBody = config.max_body_size;
  }

  get nouns() {
    return ["text files", ...(this.pdf.reason ? [] : ["PDFs"]), ...this.taken.map((kind) => NOUNS[kind][1])];
  }

  // Kinds of media that the model takes besides text.
  get taken() {
    return KINDS.filter((kind) => kind in this.kinds);
  }

  // Bytes of a picture's file that need not be made smaller.
  get maxPicture() {
    return Math.min(this.kinds.image?.max_bytes ?? Infinity, this.maxBody * 3 / 4 * SHARE);
  }

  // Why the model takes no such item; null: it does.
  wrongKind({ kind, name }) {
    if (kind === "text") return null;
    if (!kind) return `${name} cannot be attached: this model takes ${listed(this.nouns)}.`;
    if (!this.taken.length) return `This model takes no ${NOUNS[kind][1]}: ${this.reason}.`;
    if (!(kind in this.kinds)) return `${name} cannot be attached: this model takes no ${NOUNS[kind][1]}, only ${listed(this.nouns)}.`;
    return null;
  }

  // Why items cannot be sent behind a history; null: they can. `texts`: characters of all messages.
  refusal(items, before, texts) {
    for (const item of items) {
      const wrong = this.wrongKind(item);
      if (wrong) return wrong;
      const most = this.kinds[item.kind]?.max_bytes;
      if (item.size > most) {
        return `${item.name} has ${megabytes(item.size)}: this server takes ${NOUNS[item.kind][1]} of at most ${megabytes(most)}.`;
      }
    }
    for (const [kind, { max_items: most }] of Object.entries(this.kinds)) {
      const earlier = before.filter((item) => item.kind === kind).length;
      const now = items.filter((item) => item.kind === kind);
      if (!now.length || earlier + now.length <= most) continue;
      const { name } = now[Math.max(0, most - earlier)];
      const noun = NOUNS[kind][most === 1 ? 0 : 1];
      return `${name} is too many: this server takes at most ${most} ${noun} in a chat, earlier messages included.`;
    }
    if (!items.length) return null;
    let size = OVERHEAD + 2 * texts;
    for (const item of [...before, ...items]) {
      size += item.kind === "text" ? 2 * item.size : Math.ceil(item.size / 3) * 4;
      if (size <= this.maxBody) continue;
      const { name } = items.at(-1);
      return `${name} is too large: with it the request has more than ${megabytes(this.maxBody)}, the most that this server takes (--max-body-size).`;
    }
    return null;
  }
}

// An item as the server reads it: { item, note }, where `note` says what was changed (null: nothing). A picture that
// is too large, or of a form that servers do not read, is drawn anew.
export async function fitted(item, limits) {
  if (!item.size) throw new MediaError(`${item.name} is empty.`);
  if (item.kind !== "image") return { item, note: null };
  const isRead = limits.types.includes(item.type);
  const url = URL.createObjectURL(item.blob);
  try {
    const picture = element("img", { src: url });
    try {
      await picture.decode();
    } catch {
      if (SHOWN.includes(item.type)) throw new MediaError(`${item.name} is not a readable image.`);
      if (isRead) return { item, note: null }; // the server may, where the browser cannot
      throw new MediaError(`${item.name} cannot be attached: neither this browser nor the server reads ${item.type}.`);
    }
    const { naturalWidth: width, naturalHeight: height } = picture;
    const isSmall = item.size <= limits.maxPicture && width * height <= limits.maxPixels;
    if (isRead && isSmall) return { item, note: null };
    const longest = Math.max(width, height) || 1024; // (a drawing may say no size)
    const drawn = await smaller(picture, item, isSmall ? longest : Math.min(longest, LONGEST), limits.maxPicture);
    const note = isSmall
      ? `${item.name} was converted: the server does not read ${item.type}.`
      : `${item.name} was scaled down to ${drawn.width} × ${drawn.height} to fit into a request (--max-body-size).`;
    const { blob } = drawn;
    return { item: { ...item, blob, type: blob.type, size: blob.size }, note };
  } finally {
    URL.revokeObjectURL(url);
  }
}

// Screenshots stay sharp where that is small enough; photographs are JPEG.
async function smaller(picture, item, longest, most) {
  const { naturalWidth, naturalHeight } = picture;
  let drawn;
  for (let side = longest; !drawn || side >= SHORTEST; side *= SHRINKS) {
    const scale = side / Math.max(naturalWidth, naturalHeight, 1);
    const width = Math.max(1, Math.round((naturalWidth || 1) * scale));
    const height = Math.max(1, Math.round((naturalHeight || 1) * scale));
    for (const type of item.type === "image/jpeg" ? ["image/jpeg"] : ["image/png", "image/jpeg"]) {
      const canvas = element("canvas", { width, height });
      const context = canvas.getContext("2d");
      context.fillStyle = "white";
      context.fillRect(0, 0, width, height);
      context.drawImage(picture, 0, 0, width, height);
      const blob = await new Promise((done) => canvas.toBlob(done, type, QUALITY));
      if (!blob) throw new MediaError(`${item.name} cannot be attached: this browser cannot make it smaller.`);
      drawn = { blob, width, height };
      if (blob.size <= most) return drawn;
    }
  }
  return drawn; // the limits say what is wrong with it
}

// Messages of a request, their items as OpenAI's parts, and the names of these by "MESSAGE.PART".
// Text files stand before the text of their message; a message with nothing else has a text only.
// `blobOf`: a promise of the bytes of an item; undefined: they are gone.
export async function filled(messages, blobOf) {
  const names = new Map();
  const parts = async (content, i) => {
    const media = [];
    const texts = [];
    for (const { type, text, item } of content) {
      const blob = type === "media" ? await blobOf(item) : null;
      if (type !== "media") texts.push(text);
      else if (!blob) throw new MediaError(`${item.name} is no longer stored in this browser`);
      else if (item.kind === "text") texts.push(folded(item.name, await blob.text()));
      else {
        names.set(`${i}.${media.length}`, item.name);
        media.push(asPart(item, await dataUrl(blob, item.type)));
      }
    }
    const text = texts.join("\n\n");
    if (!media.length) return text;
    return text ? [...media, { type: "text", text }] : media;
  };
  const found = messages.map(async (message, i) => (
    Array.isArray(message.content) ? { ...message, content: await parts(message.content, i) } : message
  ));
  return { messages: await Promise.all(found), names };
}

function asPart({ kind, type }, url) {
  const format = FORMATS[type.slice("audio/".length)];
  if (kind === "audio" && format) {
    return { type: "input_audio", input_audio: { data: url.slice(url.indexOf(",") + 1), format } };
  }
  return { type: `${kind}_url`, [`${kind}_url`]: { url } };
}

export function dataUrl(blob, type = blob.type) {
  return new Promise((done, fail) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => fail(reader.error);
    reader.readAsDataURL(new Blob([blob], { type }));
  });
}

export function ofBase64(data, type) {
  try {
    return new Blob([Uint8Array.from(atob(data), (character) => character.charCodeAt(0))], { type });
  } catch {
    throw new MediaError("it is not base64");
  }
}

export async function isSame(one, other) {
  if (one.size !== other.size) return false;
  const [a, b] = await Promise.all([one, other].map(async (blob) => new Uint8Array(await blob.arrayBuffer())));
  return a.every((byte, i) => byte === b[i]);
}
