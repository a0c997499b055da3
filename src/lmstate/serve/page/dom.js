// Elements, and the one place where the server's sanitized HTML becomes markup.

const policy = globalThis.trustedTypes?.createPolicy("lmstate", { createHTML: (html) => html });

export const byId = (id) => document.getElementById(id);

/** An element: properties and attributes by name, `on` an object of listeners, then children or texts. */
export function el(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "on") for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== undefined && value !== null && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export const button = (text, click, options = {}) => el("button", { type: "button", on: { click }, ...options }, text);

/** Show HTML that the server rendered and sanitized, with a button to copy each block of code. */
export function showHtml(element, html) {
  element.innerHTML = policy ? policy.createHTML(html) : html;
  for (const code of element.querySelectorAll("pre.code")) {
    const box = el("div", { class: "code-box" });
    code.replaceWith(box);
    code.tabIndex = 0; // a block that scrolls can be scrolled by keys
    code.setAttribute("role", "region");
    code.setAttribute("aria-label", "Code");
    box.append(copyButton(() => code.textContent, "Copy code"), code);
  }
}

export function copyButton(text, name) {
  const made = button("Copy", async () => {
    try {
      await navigator.clipboard.writeText(text());
      made.textContent = "Copied";
    } catch {
      made.textContent = "Not allowed";
    }
    announce(made.textContent);
    setTimeout(() => (made.textContent = "Copy"), 1500);
  }, { "aria-label": name });
  return made;
}

/** Tell those who listen to the page. */
export function announce(text) {
  byId("said").textContent = text;
}

/** Ask for a text, or with no `label` only for a yes. Resolves to null when it was cancelled. */
export function ask({ title, text = "", label = "", value = "", yes = "OK", secret = false }) {
  const dialog = byId("dialog"), input = byId("dialog-input");
  byId("dialog-title").textContent = title;
  byId("dialog-text").textContent = text;
  byId("dialog-label").textContent = label;
  byId("dialog-yes").textContent = yes;
  input.hidden = byId("dialog-label").hidden = !label;
  input.type = secret ? "password" : "text";
  input.value = value;
  dialog.returnValue = "";
  byId("dialog-no").onclick = () => dialog.close();
  dialog.showModal();
  (label ? input : byId("dialog-yes")).focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes" ? input.value : null), { once: true });
  });
}

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let at = 0;
  while (bytes >= 1024 && at < units.length - 1) { bytes /= 1024; at += 1; }
  return `${at ? bytes.toFixed(1) : bytes} ${units[at]}`;
}

export function saveAs(name, blob) {
  const url = URL.createObjectURL(blob);
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
