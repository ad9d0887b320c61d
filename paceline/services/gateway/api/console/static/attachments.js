// Images, videos and sounds that are chosen or dropped. They are sent inside the message, as data: URLs.
import { h } from "./dom.js";
import { store } from "./store.js";

const kindOf = (file) => file.type.split("/")[0];

function asDataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/** Return a picture, player or name of a part of a message. */
export function preview(part, name) {
  const source = part[part.type].url;
  if (part.type === "image_url") return h("img.medium", { src: source, alt: name });
  return h(part.type === "audio_url" ? "audio.medium" : "video.medium", { src: source, controls: true, "aria-label": name });
}

/** Return the control: its `element`, `take` for dropped files, and `flush`, which returns the parts and empties it. */
export function attachments(say) {
  const input = h("input.unseen", { type: "file", id: "attach", multiple: true, tabindex: -1, change: () => { take(input.files); input.value = ""; } });
  const button = h("button.quiet", { type: "button", click: () => input.click() }, "Attach");
  const chosen = h("ul.attached", { "aria-label": "Attached" });
  const element = h("div.attach", { hidden: true }, input, button, chosen);
  let items = [];

  function kinds() {
    return store.about?.media ?? [];
  }

  function showKinds() {
    element.hidden = !kinds().length;
    button.textContent = `Attach ${kinds().join(", ")}`;
    input.accept = kinds().map((kind) => `${kind}/*`).join(",");
  }

  async function take(files) {
    for (const file of files) {
      const kind = kindOf(file);
      if (!kinds().includes(kind)) {
        say(kinds().length ? `${file.name}: this model takes ${kinds().join(", ")}.` : "This model takes text alone.");
        continue;
      }
      const type = `${kind}_url`;
      items.push({ name: file.name, part: { type, [type]: { url: await asDataUrl(file) } } });
    }
    show();
  }

  function show() {
    chosen.replaceChildren(...items.map((item) => h("li", {}, preview(item.part, item.name), h("span", {}, item.name),
      h("button.quiet", {
        type: "button", "aria-label": `Remove ${item.name}`,
        click: () => { items = items.filter((other) => other !== item); show(); button.focus(); },
      }, "Remove"))));
  }

  return {
    element,
    take,
    showKinds,
    flush() {
      const flushed = items;
      items = [];
      show();
      return flushed;
    },
  };
}
