// The playground: one conversation with the model, with tools, media, reasoning, and the facts of each answer.
import { answerView } from "./answer.js";
import { asMessage, complete, newAnswer } from "./answer_stream.js";
import { attachments, preview } from "./attachments.js";
import { readSettings, settings } from "./chat_settings.js";
import { h } from "./dom.js";
import { count } from "./format.js";
import { store } from "./store.js";

/** The conversation outlives the view, so that a look at a timeline does not lose it. */
const talk = { messages: [], views: [] };

export function chat(main) {
  const log = h("ol.talk", { "aria-label": "Conversation" }, talk.views);
  const status = h("p.unseen", { role: "status" });
  const problem = h("p.error", { role: "alert", hidden: true });
  const text = h("textarea", { id: "say", rows: 3, placeholder: "Say something", keydown: onKey });
  const send = h("button", { type: "submit" }, "Send");
  const stop = h("button.quiet", { type: "button", hidden: true, click: () => running?.abort() }, "Stop");
  const clear = h("button.quiet", { type: "button", id: "forget", click: forget }, "New conversation");
  const media = attachments(complain);
  const form = h("form.say", { submit: onSubmit },
    h("label.unseen", { for: "say" }, "Your message"), text, media.element,
    h("div.row", {}, send, stop, clear, h("span.note", {}, "Enter sends, Shift+Enter begins a line")));
  const side = settings();
  const view = h("div.chat", { dragover: onDrag, dragleave: onLeave, drop: onDrop },
    h("div.main", {}, h("h1", {}, "Chat"), log, problem, status, form), side);
  let running = null;

  main.append(view);
  store.addEventListener("rows", media.showKinds);
  media.showKinds();
  showEmpty();

  function showEmpty() {
    const empty = log.querySelector(".empty");
    if (talk.views.length) empty?.remove();
    else if (!empty) log.append(h("li.empty.note", {}, "Nothing is kept: the conversation ends when the page is closed."));
  }

  function complain(words) {
    problem.textContent = words;
    problem.hidden = !words;
  }

  function add(element) {
    talk.views.push(element);
    showEmpty();
    const isAtEnd = innerHeight + scrollY > document.body.scrollHeight - 200;
    log.append(element);
    if (isAtEnd) element.scrollIntoView({ block: "nearest" });
  }

  function onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    } else if (event.key === "Escape") {
      running?.abort();
    }
  }

  function onDrag(event) { event.preventDefault(); view.classList.add("over"); }
  function onLeave() { view.classList.remove("over"); }
  function onDrop(event) {
    event.preventDefault();
    onLeave();
    media.take(event.dataTransfer.files);
  }

  function onSubmit(event) {
    event.preventDefault();
    const words = text.value.trim();
    if (running || !check()) return;
    const items = media.flush();
    if (!words && !items.length) { text.focus(); return; }
    text.value = "";
    const parts = [...items.map((item) => item.part), ...(words ? [{ type: "text", text: words }] : [])];
    talk.messages.push({ role: "user", content: items.length ? parts : words });
    add(h("li.turn.you", {}, h("h2", {}, "You"), items.map((item) => preview(item.part, item.name)), h("p.words", {}, words)));
    ask();
  }

  /** Return whether the settings can be sent. If not, say why, and keep the message. */
  function check() {
    try {
      readSettings(side);
      complain("");
      return true;
    } catch (error) {
      complain(error.message);
      return false;
    }
  }

  /** Send the conversation. An answer that calls tools leads to another one, after their results. */
  async function ask() {
    const { key, system, ...fields } = readSettings(side);
    const answer = newAnswer();
    const shown = answerView(answer, reply);
    add(shown.element);
    running = new AbortController();
    setBusy(true);
    status.textContent = "The answer begins.";
    try {
      const messages = [...(system ? [{ role: "system", content: system }] : []), ...talk.messages];
      await complete({ model: store.about?.model, ...fields, messages }, key, answer, shown.update, running.signal);
      talk.messages.push(asMessage(answer));
      status.textContent = `The answer is complete: ${count(answer.usage?.completion_tokens ?? 0)} tokens.`;
    } catch (error) {
      answer.finish = "error";
      status.textContent = "";
      complain(error.status === 401 ? `${error.message}. Type the key under Settings.` : error.message);
    }
    running = null;
    setBusy(false);
    shown.end(key);
  }

  /** Send the results of tool calls, and return whether they could be sent. */
  function reply(results) {
    if (running || !check()) return false;
    talk.messages.push(...results);
    ask();
    return true;
  }

  function setBusy(isBusy) {
    send.disabled = isBusy;
    stop.hidden = !isBusy;
    clear.disabled = isBusy;
  }

  function forget() {
    talk.messages = [];
    talk.views = [];
    log.replaceChildren();
    showEmpty();
    complain("");
    text.focus();
  }

  return () => {
    running?.abort();
    store.removeEventListener("rows", media.showKinds);
  };
}
