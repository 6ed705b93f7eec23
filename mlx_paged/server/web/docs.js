// The API's documentation, made from the OpenAPI document in the reader's browser.

import { element } from "./view.js";

const spec = await (await fetch("openapi.json")).json();
const schemas = spec.components.schemas;

function resolve(schema) {
  return schema.$ref ? schemas[schema.$ref.split("/").pop()] : schema;
}

function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.enum) return schema.enum.map((v) => JSON.stringify(v)).join(" | ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.anyOf) return [...new Set(schema.anyOf.map(typeOf))].join(" | ");
  if (schema.type === "array") return `array of ${typeOf(schema.items ?? {})}`;
  const limits = [];
  for (const [name, sign] of [["minimum", "≥"], ["exclusiveMinimum", ">"], ["maximum", "≤"]]) {
    if (name in schema) limits.push(`${sign} ${schema[name]}`);
  }
  return [schema.type ?? "any", ...limits].join(" ");
}

function table(schema) {
  const required = new Set(schema.required ?? []);
  // Required fields first, refused ones last.
  const rank = ([name, field]) => required.has(name) ? 0 : /400\.$/.test(field.description) ? 2 : 1;
  const fields = Object.entries(schema.properties ?? {}).sort((a, b) => rank(a) - rank(b));
  const rows = fields.map(([name, field]) => element(
    "tr", {},
    element("td", {}, element("code", { textContent: name }), required.has(name) ? " *" : ""),
    element("td", { textContent: typeOf(field) }),
    element("td", { textContent: field.description ?? "" }),
  ));
  return element("table", {}, ...rows);
}

function operation(path, method, item) {
  const parts = [element(
    "summary", {},
    element("span", { className: "method", textContent: method.toUpperCase() }), path,
    element("span", { className: "about", textContent: item.summary }),
  )];
  const [{ schema: body } = {}] = Object.values(item.requestBody?.content ?? {});  // (JSON, or a form)
  if (body) parts.push(element("h3", { textContent: "Body" }), table(resolve(body)));
  const answer = item.responses["200"].content["application/json"]?.schema;
  if (answer) parts.push(element("h3", { textContent: "Answer" }), table(resolve(answer)));
  const statuses = Object.entries(item.responses).map(([status, response]) =>
    element("tr", {}, element("td", { textContent: status }),
      element("td", { textContent: response.description })));
  parts.push(element("h3", { textContent: "Statuses" }), element("table", {}, ...statuses));
  return element("details", {}, ...parts);
}

document.getElementById("paths").replaceChildren(
  ...Object.entries(spec.paths).flatMap(([path, item]) =>
    Object.entries(item).map(([method, described]) => operation(path, method, described))),
);
