// Texts beside each other: how similar they are, or which of them fits a query best.
import { bar, h, headRow } from "./dom.js";
import { storedKey } from "./chat_settings.js";
import { count } from "./format.js";
import { getJson, store } from "./store.js";

const MOST_COMPARED = 30;
const EXAMPLE = "The cat sleeps on the sofa.\nA kitten naps on the couch.\nInterest rates rise again.";

/** What the reader typed outlives the view. */
const typed = { texts: EXAMPLE, query: "" };

/** Return the models with a task that this view needs, by name, as the gateway tells it. */
export const rankingModels = () => store.about?.pooling ?? {};

export function embed(main) {
  const texts = h("textarea", { id: "texts", rows: 8, input: () => { typed.texts = texts.value; } }, typed.texts);
  const query = h("input", { id: "query", value: typed.query, autocomplete: "off", input: () => { typed.query = query.value; } });
  const model = h("select", { id: "ranking-model" });
  const choice = h("div.field", {}, h("label", { for: "ranking-model" }, "Model"), model);
  const go = h("button", { type: "submit" }, "Compare");
  const problem = h("p.error", { role: "alert", hidden: true });
  const status = h("p.note", { role: "status" });
  const result = h("div.result");
  let running = null;

  main.append(h("h1", {}, "Embed"),
    h("form.compare", { submit: onSubmit },
      h("div.field", {}, h("label", { for: "texts" }, "Texts, one a line"), texts),
      h("div.field", {}, h("label", { for: "query" }, "Query: ranks the texts; leave it empty to compare them with each other"), query),
      choice, h("div.row", {}, go)),
    problem, status, result);
  store.addEventListener("rows", showModels);
  showModels();

  function showModels() {
    const names = Object.keys(rankingModels());
    if (names.join("\n") === [...model.options].map((option) => option.value).join("\n")) return;
    model.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    if (names.includes(store.about?.model)) model.value = store.about.model;
    choice.hidden = names.length < 2;
    go.disabled = !names.length;
    problem.hidden = names.length > 0;
    problem.textContent = names.length ? "" : "No model here computes vectors or scores.";
  }

  async function onSubmit(event) {
    event.preventDefault();
    const lines = texts.value.split("\n").map((line) => line.trim()).filter(Boolean);
    running?.abort();
    running = new AbortController();
    problem.hidden = true;
    go.disabled = true;
    status.textContent = "Computing.";
    try {
      const tasks = rankingModels()[model.value] ?? [];
      if (!lines.length) throw new Error("Type some texts, one a line.");
      const [element, usage] = query.value.trim()
        ? await rank(model.value, query.value.trim(), lines, running.signal)
        : await compare(model.value, tasks, lines, running.signal);
      result.replaceChildren(element);
      status.textContent = `${count(lines.length)} texts, ${count(usage.prompt_tokens)} tokens.`;
    } catch (error) {
      if (error.name !== "AbortError") complain(error);
    }
    go.disabled = false;
  }

  function complain(error) {
    status.textContent = "";
    problem.textContent = error.status === 401 ? `${error.message}. Type the key under Settings of the chat.` : error.message;
    problem.hidden = false;
  }

  return () => {
    running?.abort();
    store.removeEventListener("rows", showModels);
  };
}

function ask(path, body, signal) {
  const key = storedKey();
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  return getJson(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

/** Return a table of the texts, the best one for the query first, and the usage. */
async function rank(model, query, documents, signal) {
  const { results, usage } = await ask("v1/rerank", { model, query, documents }, signal);
  const scores = results.map((each) => each.relevance_score);
  const [most, least] = [Math.max(...scores), Math.min(0, ...scores)];
  const rows = results.map((each, place) => h("tr", {},
    h("td.number", {}, place + 1),
    h("th.name", { scope: "row" }, documents[each.index]),
    h("td", {}, h("span.meter", { "aria-hidden": "true" }, bar("i", (each.relevance_score - least) / (most - least || 1)))),
    h("td.number", {}, each.relevance_score.toFixed(4))));
  return [h("div.scroll", {}, h("table.ranking", {}, headRow(["#Place", "Text", "", "#Score"]), h("tbody", {}, rows))), usage];
}

/** Return a table of the cosines between all texts, and the usage. */
async function compare(model, tasks, texts, signal) {
  if (!tasks.includes("embed")) throw new Error("This model scores texts for a query and does not embed them: type a query.");
  if (texts.length > MOST_COMPARED) throw new Error(`Only ${MOST_COMPARED} texts fit beside each other: remove some, or type a query.`);
  const { data, usage } = await ask("v1/embeddings", { model, input: texts, encoding_format: "float" }, signal);
  const vectors = data.map((each) => unit(each.embedding));
  const columns = texts.map((_, column) => h("th.number", { scope: "col" }, column + 1));
  const rows = vectors.map((vector, row) => h("tr", {},
    h("td.number", {}, row + 1),
    h("th.name", { scope: "row" }, texts[row]),
    vectors.map((other) => cell(product(vector, other)))));
  const head = h("thead", {}, h("tr", {}, h("th.number", { scope: "col" }, "#"), h("th", { scope: "col" }, "Text"), columns));
  const table = h("table.similarity", {}, h("caption.unseen", {}, "Cosine of each pair of texts"), head, h("tbody", {}, rows));
  return [h("div.scroll", {}, table), usage];
}

function cell(cosine) {
  const element = h("td.number", {}, cosine.toFixed(2));
  element.style.setProperty("--share", `${Math.round(Math.max(0, cosine) * 45)}%`);
  return element;
}

function product(one, other) {
  return one.reduce((sum, value, index) => sum + value * other[index], 0);
}

function unit(vector) {
  const length = Math.sqrt(product(vector, vector)) || 1;
  return vector.map((value) => value / length);
}
