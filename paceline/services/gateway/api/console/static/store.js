// The live state: one stream of events from the gateway, which all views share. See docs/console.md.

const url = (path) => new URL(path, document.baseURI);

/** Events: "live" (the fleet), "rows" (the history), "link" (the state of the connection). */
export const store = new EventTarget();
Object.assign(store, { about: null, live: null, rows: [], hour: null, recent: null, link: "connecting", model: "" });

const SILENCE_MS = 10_000;
let source = null;
let watchdog = 0;

function tell(name) {
  store.dispatchEvent(new Event(name));
}

function setLink(state) {
  if (store.link === state) return;
  store.link = state;
  tell("link");
}

/** Insert rows into the history by their time. Rows of the past may come again with other values. */
function merge(rows) {
  const byTime = new Map(store.rows.map((row) => [row[0], row]));
  for (const row of rows) byTime.set(row[0], row);
  const ordered = [...byTime.values()].sort((one, other) => one[0] - other[0]);
  const newest = ordered.length ? ordered.at(-1)[0] : 0;
  store.rows = ordered.filter((row) => row[0] > newest - 3600);
}

function take({ rows, hour, recent }) {
  merge(rows);
  Object.assign(store, { hour, recent });
  tell("rows");
}

function heard() {
  setLink("live");
  clearTimeout(watchdog);
  // A connection can be dead without an error, for example after a laptop has slept.
  watchdog = setTimeout(() => { setLink("lost"); connect(); }, SILENCE_MS);
}

/** Open the stream. The browser opens it again after an error; the first event then has the whole history. */
export function connect() {
  source?.close();
  source = new EventSource(url(`console/feed${ofModel()}`));
  source.addEventListener("history", (event) => {
    heard();
    const data = JSON.parse(event.data);
    const { model, models, media, pooling, version, columns } = data;
    store.about = { model, models, media, pooling, version, columns };
    store.rows = [];
    take(data);
  });
  source.addEventListener("rows", (event) => { heard(); take(JSON.parse(event.data)); });
  source.addEventListener("live", (event) => { heard(); store.live = JSON.parse(event.data); tell("live"); });
  source.onerror = () => {
    setLink("lost");
    // The browser gives up if the answer was not a stream of events, for example 502 from a proxy.
    if (source.readyState === EventSource.CLOSED) { clearTimeout(watchdog); watchdog = setTimeout(connect, 3000); }
  };
}

/** Return the part of an address that names the model which is shown; without one, the gateway chooses its first. */
function ofModel() {
  return store.model ? `?model=${encodeURIComponent(store.model)}` : "";
}

/** Show another model: its fleet, its history, and the chat with it. */
export function choose(model) {
  Object.assign(store, { model, live: null, rows: [] });
  connect();
}

/** Stop listening while nobody looks: a browser has only six connections to a server, which several tabs share. */
export function pause() {
  source?.close();
  clearTimeout(watchdog);
  setLink("connecting");
}

/** Return one column of the history as an array, with null where there is no value. */
export function column(name) {
  const index = store.about.columns.indexOf(name);
  return store.rows.map((row) => row[index]);
}

/** Return the JSON at a path of the gateway. Throws an Error with the gateway's own words, and its status. */
export async function getJson(path, options) {
  const response = await fetch(url(path), options);
  const body = await response.json().catch(() => null);
  if (!response.ok) {
    const message = body?.error?.message ?? `the gateway answered ${response.status}`;
    throw Object.assign(new Error(message), { status: response.status });
  }
  return body;
}

export { url };
