// The frame: which view is shown, the state of the connection, the theme.
import { about } from "./about.js";
import { batches } from "./batches.js";
import { chat } from "./chat.js";
import { h } from "./dom.js";
import { embed, rankingModels } from "./embed.js";
import { fleet } from "./fleet.js";
import { requests } from "./requests.js";
import { choose, connect, pause, store } from "./store.js";
import { timeline } from "./timeline.js";

/** A view fills an element, may return a function that ends it, and gets the rest of the address. */
const VIEWS = { fleet, requests, chat, embed, batches, about };
const TITLES = { fleet: "Fleet", requests: "Requests", chat: "Chat", embed: "Embed", batches: "Batches", about: "About" };
const LINKS = {
  connecting: "Connecting",
  live: "Live",
  lost: "Connection lost, trying again",
};

const main = document.getElementById("main");
let end = null;
let isFirst = true;

function show() {
  const [, name = "", ...rest] = location.hash.split("/");
  if (location.hash && !location.hash.startsWith("#/")) return; // a link within the page
  const key = name in VIEWS ? name : "fleet";
  const argument = decodeURIComponent(rest.join("/"));
  end?.();
  main.replaceChildren();
  for (const link of document.querySelectorAll("nav a")) {
    const isCurrent = link.getAttribute("href") === `#/${key}`;
    if (isCurrent) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${argument ? "Request" : TITLES[key]} · Paceline`;
  const view = key === "requests" && argument ? timeline : VIEWS[key];
  end = view(main, argument) || null;
  // Keyboards and screen readers follow to the new view, but the first one is where they begin anyway.
  if (!isFirst) { main.focus({ preventScroll: true }); scrollTo(0, 0); }
  isFirst = false;
}

function showLink() {
  const element = document.getElementById("link");
  element.dataset.state = store.link;
  element.textContent = LINKS[store.link];
}

/** Show the model's name, or a choice if the gateway has several models. */
function showModel() {
  const place = document.getElementById("model");
  document.querySelector('nav a[href="#/embed"]').hidden = !Object.keys(rankingModels()).length;
  const { model = "", models = [] } = store.about ?? {};
  if (models.length < 2) {
    place.textContent = model;
    return;
  }
  if (!place.querySelector("select")) {
    const select = h("select", { "aria-label": "Model" }, ...models.map((name) => h("option", { value: name }, name)));
    select.addEventListener("change", () => choose(select.value));
    place.replaceChildren(select);
  }
  place.querySelector("select").value = model;
}

function setUpTheme() {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const names = { auto: "Theme: as the system", light: "Theme: light", dark: "Theme: dark" };
  const label = () => { button.textContent = names[root.dataset.theme]; };
  button.addEventListener("click", () => {
    const order = Object.keys(names);
    root.dataset.theme = order[(order.indexOf(root.dataset.theme) + 1) % order.length];
    try {
      localStorage.setItem("paceline.theme", root.dataset.theme);
    } catch { /* storage is forbidden; the choice lasts until the page is left */ }
    label();
    document.dispatchEvent(new Event("theme"));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    document.dispatchEvent(new Event("theme"));
  });
  label();
}

addEventListener("hashchange", show);
addEventListener("error", (event) => main.prepend(h("p.error", { role: "alert" }, `The page failed: ${event.message}`)));
store.addEventListener("link", showLink);
store.addEventListener("rows", showModel);
document.addEventListener("visibilitychange", () => (document.hidden ? pause() : connect()));
setUpTheme();
connect();
show();
