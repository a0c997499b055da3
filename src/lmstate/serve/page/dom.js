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

export const button = (text, click, options = {}, ...children) => el("button", { type: "button", on: { click }, ...options }, text, ...children);

/** Have an element show a text. One that it shows already is left alone, so that nothing is laid out or read anew. */
export function showText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Whether an element is not to be seen; nothing is touched if that is so already. */
export function hide(element, hidden) {
  if (element.hidden !== hidden) element.hidden = hidden;
}

/**
 * Show HTML that the server rendered and sanitized, with a button to copy each block of code. Only what differs from
 * what is shown is touched: a growing block costs what it grew by, and a selection in it stays.
 */
export function showHtml(element, html) {
  const made = document.createElement("div");
  made.innerHTML = policy ? policy.createHTML(html) : html;
  for (const code of made.querySelectorAll("pre.code")) {
    const language = /language-(\S+)/.exec(code.className)?.[1] ?? "";
    const box = el("div", { class: "code-box" });
    code.replaceWith(box);
    code.tabIndex = 0; // a block that scrolls can be scrolled by keys
    code.setAttribute("role", "region");
    code.setAttribute("aria-label", language ? `Code in ${language}` : "Code");
    const head = el("div", { class: "code-head" }, el("span", {}, language || "text"), copyButton(() => box.querySelector("code").textContent, "Copy code"));
    box.append(head, code);
  }
  graft(element, made);
}

/** Make the children of one element those of another. */
function graft(into, from) {
  let at = into.firstChild;
  for (const wanted of [...from.childNodes]) {
    if (!at) { into.append(wanted); continue; }
    const next = at.nextSibling;
    if (at.nodeType === Node.TEXT_NODE && wanted.nodeType === Node.TEXT_NODE) {
      if (wanted.data.startsWith(at.data)) { if (wanted.length > at.length) at.appendData(wanted.data.slice(at.length)); }
      else at.data = wanted.data;
    } else if (!at.isEqualNode(wanted)) {
      if (at.cloneNode(false).isEqualNode(wanted.cloneNode(false))) graft(at, wanted);
      else at.replaceWith(wanted);
    }
    at = next;
  }
  while (at) { const next = at.nextSibling; at.remove(); at = next; }
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
  byId("said").textContent = text; // even the same one again: it is said again
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
