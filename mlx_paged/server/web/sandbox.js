// The document of previews (preview.js). It has no origin and no network; pages.py sets its policy.
//
// It takes one message { kind, source, isDark } from the page and answers with { height } or { error }.

const DIAGRAM = "vendor/mermaid.js";
const MOST_CHARACTERS = 50_000; // of a diagram
const MOST_EDGES = 500;

const tell = (message) => parent.postMessage(message, "*"); // (this document has no origin to name)

function load(path) {
  return new Promise((done, fail) => {
    const script = document.createElement("script");
    script.src = path;
    script.onload = done;
    script.onerror = () => fail(new Error("the library of diagrams could not be loaded"));
    document.head.append(script);
  });
}

async function drawDiagram(source, isDark) {
  await load(DIAGRAM);
  const { mermaid } = globalThis;
  mermaid.initialize({
    startOnLoad: false, securityLevel: "strict", suppressErrorRendering: true, theme: isDark ? "dark" : "default",
    maxTextSize: MOST_CHARACTERS, maxEdges: MOST_EDGES,
  });
  const { svg } = await mermaid.render("diagram", source);
  document.documentElement.style.colorScheme = isDark ? "dark" : "light";
  document.body.style.margin = "0";
  document.body.innerHTML = svg;
  tell({ height: Math.ceil(document.querySelector("svg").getBoundingClientRect().height) });
}

addEventListener("message", async ({ source: from, data: { kind, source, isDark } }) => {
  if (from !== parent) return;
  try {
    if (kind === "mermaid") await drawDiagram(source, isDark);
    else {
      document.documentElement.innerHTML = source; // (sanitized, and scripts set in this way never run)
      tell({ height: null });
    }
  } catch (error) {
    tell({ error: String(error?.message ?? error) });
  }
}, { once: true });
