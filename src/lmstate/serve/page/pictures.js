// Pictures and sounds: those that go with a message that is being written, and those that messages have.

import { blob } from "./api.js";
import { announce, button, el, hide } from "./dom.js";
import { asWav } from "./sounds.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MOST = 64; // of a conversation

const known = new Map(); // promises of pictures that were fetched, with their addresses, by their paths

/** A picture of a conversation, and an address that shows it: it is fetched once. */
function fetched(root, name) {
  const path = `${root}/pictures/${name}`;
  if (!known.has(path)) {
    const coming = blob(path).then((content) => ({ content, src: URL.createObjectURL(content) }));
    coming.catch(() => known.delete(path)); // it is asked for again
    known.set(path, coming);
  }
  return known.get(path);
}

/** A picture as a small one. What stands in its way is shown in its place. */
export function thumbnail(root, name, alt) {
  const shown = el("span", { class: "thumbnail" });
  fetched(root, name).then(
    ({ src }) => shown.append(el("img", { src, alt })),
    (error) => shown.append(el("span", { class: "lost", title: error.message }, error.status === 409 ? "Picture lost" : "Picture not loaded")),
  );
  return shown;
}

/** A sound with what plays it. */
function player(root, name, alt) {
  const shown = el("span", { class: "sound" });
  fetched(root, name).then(
    ({ src }) => shown.append(el("audio", { src, controls: true, "aria-label": alt })),
    (error) => shown.append(el("span", { class: "lost", title: error.message }, error.status === 409 ? "Sound lost" : "Sound not loaded")),
  );
  return shown;
}

/** The pictures of a message, each shown small, and large when it is chosen; and its sounds. */
export function pictureRow(root, names, sounds) {
  return el("div", { class: "pictures" }, ...names.map((name, at) => {
    if (sounds.includes(name)) return player(root, name, `Sound ${at + 1} of ${names.length}`);
    const alt = `Picture ${at + 1} of ${names.length}`;
    const made = button("", () => made.setAttribute("aria-expanded", made.getAttribute("aria-expanded") === "false"), {
      class: "picture", "aria-expanded": "false", "aria-label": `${alt}, in full size`,
    }, thumbnail(root, name, alt));
    return made;
  }));
}

/** A picture or a sound of a conversation as a data URL. */
export const dataUrl = async (root, name) => asDataUrl((await fetched(root, name)).content);

function asDataUrl(content) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(new Error("The file cannot be read: it may have been moved or changed. Remove it, and add it again.")));
    reader.readAsDataURL(content);
  });
}

/** The files that are pasted, of those that a model takes. */
export const pasted = (transfer, about) => [...(transfer?.files ?? [])].filter((file) => takes(file, about) === true);

/** Whether a model takes a file with its messages; null for one that is no picture and no sound. */
export function takes(file, about) {
  if (file.type.startsWith("image/")) return Boolean(about?.pictures);
  return file.type.startsWith("audio/") ? Boolean(about?.sounds) : null;
}

/** Pictures and sounds to send: files, or names of those that the conversation has. */
export class Attached {
  /** `refused(message)` is told what cannot be added. */
  constructor(element, refused) {
    this.element = element;
    this.refused = refused;
    this.items = [];
  }

  get length() {
    return this.items.length;
  }

  add(files) {
    for (const file of files) {
      if (file.type.startsWith("audio/")) this.hear(file);
      else if (!TYPES.includes(file.type)) this.refused(`${file.name || "The file"} is not a PNG, JPEG, WebP or GIF picture.`);
      else if (this.items.length === MOST) this.refused(`A conversation has at most ${MOST} pictures.`);
      else {
        const src = URL.createObjectURL(file);
        const shown = el("img", { src, alt: file.name || "Pasted picture" });
        shown.addEventListener("error", () => { this.drop(item); this.refused(`${file.name || "The pasted picture"} is damaged, or no picture.`); });
        const item = { file, src, shown };
        this.items.push(item);
        announce(`${file.name || "A picture"} added`);
      }
    }
    this.draw();
  }

  /** A file of sound: its place is there at once, and it can be sent once the browser has read it. */
  hear(file) {
    const item = { sound: true, shown: el("span", { class: "sound" }) };
    item.file = asWav(file);
    item.file.then(
      (wav) => {
        item.src = URL.createObjectURL(wav);
        item.shown.append(el("audio", { src: item.src, controls: true, "aria-label": file.name || "Sound" }));
        announce(`${file.name || "A sound"} added`);
      },
      (error) => { this.drop(item); this.refused(error.message); },
    );
    this.items.push(item);
  }

  /** Pictures and sounds of the conversation at `root`. */
  name(root, names, sounds) {
    this.items.push(...names.map((name) => {
      const sound = sounds.includes(name);
      return { name, root, sound, shown: sound ? player(root, name, "Sound of the message") : thumbnail(root, name, "Picture of the message") };
    }));
    this.draw();
  }

  drop(item) {
    this.items = this.items.filter((one) => one !== item);
    if (item.src) URL.revokeObjectURL(item.src);
    this.draw();
  }

  clear(sent = this.items) {
    for (const item of sent) this.drop(item);
  }

  /** As the server takes them, for the conversation at `root`. */
  sent(root) {
    return Promise.all(this.items.map(async (item) => {
      if (item.file) return asDataUrl(await item.file);
      return item.root === root ? item.name : dataUrl(item.root, item.name);
    }));
  }

  draw() {
    hide(this.element, !this.items.length);
    this.element.replaceChildren(...this.items.map((item, at) => el("li", {}, item.shown,
      button("✕", () => { this.drop(item); announce(`${item.sound ? "Sound" : "Picture"} removed`); }, { class: "icon", "aria-label": `Remove ${item.sound ? "sound" : "picture"} ${at + 1}` }))));
  }
}
