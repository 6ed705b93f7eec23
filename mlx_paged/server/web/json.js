// JSON as people read it.

const TOKENS = /"(?:[^"\\]|\\.)*"|[{}[\],:]|[^\s{}[\],:"]+/g;
const INVISIBLE = /[\p{C}\p{Z}]/gu;

// Writes invisible characters, and those that turn text around, as escapes.
function visible(text) {
  return text.replace(INVISIBLE, (found) => (" \n\t".includes(found) ? found : [...Array(found.length).keys()]
    .map((i) => `\\u${found.charCodeAt(i).toString(16).padStart(4, "0")}`).join("")));
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

export function isObject(text) {
  const value = parsed(text);
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

// True if a text is an object or a list.
export function isStructure(text) {
  return /^\s*[[{]/.test(text) && parsed(text) !== undefined;
}

// JSON on lines of its own; what is not JSON stays as it is. Values are not parsed: numbers keep all of
// their digits, and names that are there twice are shown twice.
export function pretty(text) {
  if (parsed(text) === undefined) return visible(text);
  const tokens = text.match(TOKENS);
  const parts = [];
  let depth = 0;
  const newLine = () => parts.push(`\n${"  ".repeat(depth)}`);
  tokens.forEach((token, i) => {
    const isEmpty = "{[".includes(tokens[i - 1]) && "}]".includes(token);
    if ("}]".includes(token)) {
      depth -= 1;
      if (!isEmpty) newLine();
    }
    parts.push(token === ":" ? ": " : visible(token));
    if ("{[".includes(token)) depth += 1;
    if (token === "," || ("{[".includes(token) && !"}]".includes(tokens[i + 1]))) newLine();
  });
  return parts.join("");
}
