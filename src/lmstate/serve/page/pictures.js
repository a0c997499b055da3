// Pictures: those that go with a message that is being written, and those that messages have.

import { blob } from "./api.js";
import { announce, button, el, hide } from "./dom.js";

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

/** The pictures of a message: each is shown small, and large when it is chosen. */
export function pictureRow(root, names) {
  return el("div", { class: "pictures" }, ...names.map((name, at) => {
    const alt = `Picture ${at + 1} of ${names.length}`;
    const made = button("", () => made.setAttribute("aria-expanded", made.getAttribute("aria-expanded") === "false"), {
      class: "picture", "aria-expanded": "false", "aria-label": `${alt}, in full size`,
    }, thumbnail(root, name, alt));
    return made;
  }));
}

/** A picture of a conversation as a data URL. */
export const dataUrl = async (root, name) => asDataUrl((await fetched(root, name)).content);

function asDataUrl(content) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(new Error("The picture cannot be read: it may have been moved or changed. Remove it, and add it again.")));
    reader.readAsDataURL(content);
  });
}

/** The pictures among the files that are pasted or dropped. */
export const picturesOf = (transfer) => [...(transfer?.files ?? [])].filter((file) => file.type.startsWith("image/"));

/** Pictures to send: files, or names of pictures that the conversation has. */
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
      if (!TYPES.includes(file.type)) this.refused(`${file.name || "The file"} is not a PNG, JPEG, WebP or GIF picture.`);
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

  /** Pictures of the conversation at `root`. */
  name(root, names) {
    this.items.push(...names.map((name) => ({ name, root, shown: thumbnail(root, name, "Picture of the message") })));
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
    return Promise.all(this.items.map((item) => {
      if (item.file) return asDataUrl(item.file);
      return item.root === root ? item.name : dataUrl(item.root, item.name);
    }));
  }

  draw() {
    hide(this.element, !this.items.length);
    this.element.replaceChildren(...this.items.map((item, at) => el("li", {}, item.shown,
      button("✕", () => { this.drop(item); announce("Picture removed"); }, { class: "icon", "aria-label": `Remove picture ${at + 1}` }))));
  }
}
