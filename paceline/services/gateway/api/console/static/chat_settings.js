// What a chat is sent with, besides its messages. The key stays in this tab, the other settings too.
import { h } from "./dom.js";

const KEY = "paceline.key";

const EXAMPLE = `[{"type": "function", "function": {
  "name": "weather",
  "parameters": {"type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"]}}}]`;

function field(name, label, control) {
  control.id = `set-${name}`;
  control.name = name;
  return h("div.field", {}, h("label", { for: control.id }, label), control);
}

/** Return the key that the reader has typed in this tab; "" if there is none. */
export function storedKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

function keepKey(event) {
  try {
    sessionStorage.setItem(KEY, event.target.value);
  } catch { /* storage is forbidden; the key lasts until the view is left */ }
}

/** Return the settings as a folded form. */
export function settings() {
  const isWide = matchMedia("(min-width: 60rem)").matches;
  return h("details.settings", { open: isWide }, h("summary", {}, "Settings"), h("form", { submit: (event) => event.preventDefault() },
    field("system", "System prompt", h("textarea", { rows: 2 })),
    h("div.pair", {},
      field("temperature", "Temperature", h("input", { type: "number", min: 0, max: 2, step: 0.1, placeholder: "the model's" })),
      field("max_tokens", "Most tokens", h("input", { type: "number", min: 1, step: 1, value: 512 }))),
    field("tool_choice", "Tool use", h("select", {}, ["auto", "required", "none"].map((name) => h("option", {}, name)))),
    field("tools", "Tools, a JSON list", h("textarea.mono", { rows: 6, spellcheck: "false", placeholder: EXAMPLE })),
    field("key", "API key, if the server needs one", h("input", { type: "password", autocomplete: "off", value: storedKey(), input: keepKey }))));
}

/** Return the fields of the request, and `system` and `key`. Throws an Error that says which setting is wrong. */
export function readSettings(element) {
  const value = (name) => element.querySelector(`[name=${name}]`).value.trim();
  const chosen = { key: value("key"), system: value("system") };
  for (const name of ["temperature", "max_tokens"]) {
    if (value(name)) chosen[name] = Number(value(name));
  }
  if (value("tools")) Object.assign(chosen, { tools: readTools(value("tools")), tool_choice: value("tool_choice") });
  return chosen;
}

function readTools(text) {
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`The tools are not JSON: ${error.message}`);
  }
  if (!Array.isArray(tools) || !tools.length) throw new Error("The tools must be a JSON list with at least one tool.");
  return tools;
}
