// The MCP servers that the user has added on this page, in localStorage: { name, url, headers, isOff }.
//
// The server connects to them, since most do not let pages of other origins in. It gets them with each request.

const KEY = "mlx-paged.mcp-servers";
const NAME = /^[A-Za-z0-9-]+(_[A-Za-z0-9-]+)*$/; // as the server takes it
const LONGEST_NAME = 32;

export class OwnServers {
  // (Read anew each time: another tab may have changed them.)
  get all() {
    try {
      return JSON.parse(localStorage.getItem(KEY)) ?? [];
    } catch {
      return [];
    }
  }

  keep(servers) {
    localStorage.setItem(KEY, JSON.stringify(servers));
  }

  // Those that are on, as requests take them.
  enabled() {
    return this.all.filter(({ isOff }) => !isOff).map(sent);
  }

  find(name) {
    const found = this.all.find((server) => server.name === name);
    return found && sent(found);
  }

  // Adds a server, or puts it in the place of the one that was named `before`.
  put(server, before = null) {
    const { all } = this;
    const place = all.findIndex(({ name }) => name === before);
    if (place < 0) this.keep([...all, server]);
    else this.keep(all.with(place, server));
  }

  remove(name) {
    this.keep(this.all.filter((server) => server.name !== name));
  }
}

const sent = ({ name, url, headers }) => ({ name, url, headers });

// Why the fields of a server cannot be used: { field, reason }; null: they can. `taken`: names of the others.
export function wrongServer({ name, url }, headersText, taken) {
  if (!NAME.test(name) || name.length > LONGEST_NAME) {
    return { field: "name", reason: `Use up to ${LONGEST_NAME} letters, digits, "-" and single "_".` };
  }
  if (taken.includes(name)) return { field: "name", reason: "There is a server of this name." };
  if (!/^https?:\/\/[^/@\s]+(\/\S*)?$/.test(url)) {
    return { field: "url", reason: "Enter an http or https URL, without a user name." };
  }
  try {
    headersOf(headersText);
  } catch (error) {
    return { field: "headers", reason: error.message };
  }
  return null;
}

// The headers of a text with one "Name: value" a line.
export function headersOf(text) {
  const headers = {};
  for (const line of text.split("\n").filter((each) => each.trim())) {
    const [, name, value] = /^\s*([^\s:]+)\s*:\s*(.*?)\s*$/.exec(line) ?? [];
    if (!name) throw new SyntaxError(`Write each header as "Name: value". This line is not: ${line.trim()}`);
    headers[name] = value;
  }
  return headers;
}

export const headersText = (headers) => Object.entries(headers).map(([name, value]) => `${name}: ${value}`).join("\n");
