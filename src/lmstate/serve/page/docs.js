// The API as the server's OpenAPI document tells it, each path with its fields and a form to try it.

import { answerTo, get } from "./api.js";
import { button, byId, el, hide, showText } from "./dom.js";

const BOUNDS = { minimum: "at least", maximum: "at most", minLength: "length at least", maxLength: "length at most", minItems: "items at least", maxItems: "items at most" };

let schemas = {};

const resolved = (schema) => (schema.$ref ? schemas[schema.$ref.split("/").pop()] : schema);
const name = (schema) => schema.$ref?.split("/").pop() ?? schema.type ?? "any";

/** The kind of values that a schema describes, in words. */
function kind(schema) {
  if (schema.anyOf) return schema.anyOf.filter((one) => one.type !== "null").map(kind).join(" or ") || "null";
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" or ");
  if (schema.type === "array") return `list of ${schema.items ? kind(schema.items) : "any"}`;
  return name(schema);
}

function bounds(schema) {
  const own = [schema, ...(schema.anyOf ?? [])];
  return own.flatMap((one) => Object.entries(BOUNDS).filter(([key]) => one[key] !== undefined).map(([key, words]) => `${words} ${one[key]}`)).join(", ");
}

/** The fields of an object, a row each. */
function fields(schema) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([field, one]) =>
    el("tr", {}, el("th", { scope: "row" }, el("code", {}, field), required.has(field) ? " (required)" : null), el("td", {}, kind(one)), el("td", {}, [one.description, bounds(one)].filter(Boolean).join("; "))));
  return el("table", {}, el("thead", {}, el("tr", {}, ...["Field", "Type", "Notes"].map((text) => el("th", { scope: "col" }, text)))), el("tbody", {}, ...rows));
}

/** The objects that a schema names, and those that they name, each once. */
function named(schema, found = new Map()) {
  for (const one of Object.values(schema)) {
    if (one === null || typeof one !== "object") continue;
    if (one.$ref && !found.has(name(one))) {
      found.set(name(one), resolved(one));
      named(resolved(one), found);
    }
    named(one, found);
  }
  return found;
}

/** Show an answer as it comes. */
async function show(answer, output) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    text += part.value;
    showText(output, text);
  }
  if (!answer.headers.get("content-type")?.startsWith("application/json")) return;
  try {
    showText(output, JSON.stringify(JSON.parse(text), null, 2));
  } catch { /* it is shown as it came */ }
}

function operation(path, method, told, model) {
  const id = told.operationId;
  const inputs = (told.parameters ?? []).map((one) => ({ ...one, input: el("input", { id: `${id}-${one.name}`, autocomplete: "off", required: one.required }) }));
  const content = told.requestBody?.content["application/json"];
  const example = { ...content?.example, ...(content?.example?.model ? { model } : {}) };
  const body = content && el("textarea", { id: `${id}-body`, rows: 8, spellcheck: "false" });
  if (body) body.value = JSON.stringify(example, null, 2);
  const status = el("p", { class: "quiet", role: "status" }), output = el("pre", { tabindex: 0, "aria-label": "Answer" });
  hide(output, true);
  let control = null;
  const stop = button("Stop", () => control?.abort());
  hide(stop, true);

  async function send() {
    const query = new URLSearchParams();
    let target = path;
    for (const one of inputs) {
      if (one.in === "path") target = target.replace(`{${one.name}}`, encodeURIComponent(one.input.value));
      else if (one.input.value) query.set(one.name, one.input.value);
    }
    control = new AbortController();
    const begun = performance.now();
    hide(stop, false);
    showText(status, "Waiting for the answer.");
    showText(output, "");
    try {
      const answer = await answerTo(method, `${target}${query.size ? `?${query}` : ""}`, { body: body?.value, signal: control.signal });
      hide(output, false);
      showText(status, `${answer.status} ${answer.statusText}`);
      await show(answer, output);
      showText(status, `${answer.status} ${answer.statusText}, ${((performance.now() - begun) / 1000).toFixed(2)} s`);
    } catch (error) {
      showText(status, error.name === "AbortError" ? "Stopped." : error.message);
    }
    hide(stop, true);
  }

  const schema = content ? resolved(content.schema) : {};
  const others = [...named(schema)].map(([key, one]) => el("details", {}, el("summary", {}, key), el("p", {}, one.description ?? ""), fields(one)));
  return el("details", { class: "operation" },
    el("summary", {}, el("code", { class: "method" }, method.toUpperCase()), " ", el("code", {}, path), " ", el("span", { class: "quiet" }, told.summary ?? "")),
    el("form", { on: { submit: (event) => { event.preventDefault(); send(); } } },
      ...inputs.map((one) => el("p", {}, el("label", { for: one.input.id }, one.name), one.input)),
      body && el("label", { for: body.id }, "Body"), body,
      el("p", { class: "row" }, el("button", { class: "primary", type: "submit" }, "Send"), stop)),
    status, output,
    content ? fields(schema) : null, ...others);
}

async function main() {
  const [told, served] = await Promise.all([get("/openapi.json"), get("/v1/models")]);
  schemas = told.components.schemas;
  const groups = new Map();
  for (const [path, methods] of Object.entries(told.paths))
    for (const [method, one] of Object.entries(methods)) {
      const tag = one.tags[0];
      if (!groups.has(tag)) groups.set(tag, el("section", { "aria-label": tag }, el("h2", {}, tag)));
      groups.get(tag).append(operation(path, method, one, served.data[0].id));
    }
  byId("api").append(...groups.values());
}

main().catch((error) => {
  showText(byId("problem"), error.message);
  hide(byId("problem"), false);
});
