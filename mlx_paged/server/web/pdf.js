// PDF files of messages: the server extracts their text, which is then a text file with the PDF's name.

import { dataUrl, MediaError, megabytes } from "./media.js";
import { TEXT } from "./texts.js";

export const PDF = "application/pdf";

export const isPdf = (item) => item.type === PDF;

// A PDF of a tray as its text: { item, note }; other items as they are.
export async function fromPdf(item, limits) {
  if (!isPdf(item)) return { item, note: null };
  const { name } = item;
  const wrong = (reason) => new MediaError(`${name} cannot be attached: ${reason}.`);
  const { reason, max_bytes: most } = limits.pdf;
  if (reason) throw wrong(reason);
  const size = Math.ceil(item.size / 3) * 4 + 1024; // of the request
  if (item.size > most || size > limits.maxBody) {
    throw wrong(`it has ${megabytes(item.size)}, more than the ${megabytes(Math.min(most, limits.maxBody * 3 / 4))} that this server takes`);
  }
  const url = await dataUrl(item.blob);
  let found;
  try {
    found = await limits.extract(url.slice(url.indexOf(",") + 1));
  } catch (error) {
    throw wrong(error.message.replace(/^data is not a readable PDF: /, ""));
  }
  const blob = new Blob([found.text], { type: TEXT });
  const pages = found.num_pages === 1 ? "1 page" : `${found.num_pages.toLocaleString("en")} pages`;
  const note = `${name}: the model reads the text of ${pages}, without pictures.`;
  return { item: { kind: "text", name, type: TEXT, size: blob.size, blob }, note };
}
