// The page: which conversation and branch is shown, and what keys and buttons do.

import { follow, get, post, remove } from "./api.js";
import { Conversation } from "./conversation.js";
import { announce, ask, byId, el, hide, showText } from "./dom.js";
import { Pane } from "./messages.js";
import { Attached, pasted, takes } from "./pictures.js";
import { keepSettings, replicaParts, settingsPanel, statePanel, tokensPanel, treePanel } from "./panels.js";
import { showList, walk } from "./side.js";
import { canRecord, record } from "./sounds.js";
import { quoted } from "./text-files.js";

let conversation = null, unfollow = () => {}, about = null, panel = null, asked = 0, due = false, wasRunning = null, mapped = "", fading = 0;
const text = byId("text");
const attached = new Attached(byId("attached"), problem);

const actions = {
  choose: (node) => goTo(conversation.end(node.id)),
  goTo: (node) => { goTo(node.id); text.focus(); },
  compare: (node) => { conversation.other = conversation.end(node.id); draw(); panes.forEach((pane) => pane.toEnd()); },
  stop: (node) => tried(() => post(`${conversation.root}/${node.id}/stop`)),
  goOn: (node) => tried(async () => goTo((await post(`${conversation.root}/${node.id}/continue`)).answer)),
  again: (node) => tried(async () => goTo((await post(`${conversation.root}/say`, { parent: node.parent })).answer)),
  tokens: (node) => openPanel("tokens", node.id),
  sayOtherwise: (node, said, pictures) => tried(async () => {
    const sent = { parent: node.parent, text: said, pictures: await pictures.sent(conversation.root) };
    goTo((await post(`${conversation.root}/say`, sent)).answer);
  }),
  example: (said) => { text.value = said; fit(); keepDraft(); text.focus(); },
  refused: problem,
  about: () => about,
};
// A branch beside the first is walked on its own.
const beside = { ...actions, choose: actions.compare };
const panes = [new Pane(byId("pane"), actions), new Pane(byId("other"), beside)];

// ---- which conversation and branch

function show(id) {
  unfollow();
  conversation = id ? new Conversation(id) : null;
  if (location.hash.slice(1) !== (id ?? "")) history.pushState(null, "", id ? `#${id}` : location.pathname);
  problem("");
  byId("connection").hidden = byId("adopted").hidden = true;
  text.value = localStorage.getItem(`draft:${id ?? ""}`) ?? "";
  fit();
  closeSide();
  unfollow = id ? follow(id, told, connection, gone) : () => {};
  draw();
  panes[0].toEnd();
  list();
}

function told(event) {
  const first = event.whole, { title, adopted } = conversation;
  conversation.apply(event);
  if (!first && conversation.adopted > adopted) changedElsewhere();
  if (conversation.title !== title) list();
  later();
  if (first) requestAnimationFrame(() => panes[0].toEnd());
}

function gone(message) {
  show(null);
  problem(message);
}

function connection(up) {
  const line = byId("connection");
  if (up && !line.hidden) announce("The connection is back.");
  hide(line, up);
  showText(line, up ? "" : "The connection is lost. Trying again… your text is kept.");
}

function changedElsewhere() {
  const line = byId("adopted");
  hide(line, false);
  showText(line, "Another server changed this conversation. This is its newest state.");
  clearTimeout(fading);
  fading = setTimeout(() => hide(line, true), 8000);
}

function goTo(id) {
  conversation.go(id);
  draw();
}

function undo() {
  if (!conversation?.leaf) return;
  const last = conversation.path(conversation.leaf).findLast((node) => node.role === "user");
  goTo(last?.parent ?? null);
  if (last && !text.value && !attached.length) {
    text.value = last.text;
    attached.name(conversation.root, last.pictures, last.sounds);
    fit();
  }
  announce("The last turn was undone. It stays in the tree.");
}

// ---- drawing, once a frame at most

function later() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => { due = false; draw(); });
}

function draw() {
  const empty = new Conversation(""), shown = conversation ?? empty;
  const title = conversation ? `${shown.title} – lmstate` : "lmstate";
  showText(byId("title"), shown.title);
  if (document.title !== title) document.title = title;
  hide(byId("rename"), !conversation);
  panes[0].show(shown, shown.leaf);
  hide(byId("other"), !shown.other);
  if (shown.other) panes[1].show(shown, shown.other);
  const running = runningAnswers();
  hide(byId("stop"), !running.length);
  showText(byId("send"), shown.other ? "Send to both" : "Send");
  const now = running.length > 0;
  if (byId("send").disabled !== now) byId("send").disabled = now;
  if (wasRunning !== null && now !== wasRunning) announce(now ? "An answer is being written." : "The answer ended.");
  if (now !== wasRunning && panel === "state") drawPanel();
  wasRunning = now;
  const map = `${shown.id} ${shown.shape} ${shown.leaf}`;
  if (panel === "tree" && map !== mapped) drawPanel();
  mapped = map;
}

const runningAnswers = () => conversation ? [...new Set([conversation.running(conversation.leaf), conversation.running(conversation.other)].filter(Boolean))] : [];

// ---- panels

let tokensOf = null;

function openPanel(name, id = null) {
  const ends = panes.filter((pane) => pane.isAtEnd());
  panel = name === panel && id === null ? null : name;
  tokensOf = id;
  for (const one of document.querySelectorAll("[data-panel]")) one.setAttribute("aria-pressed", one.dataset.panel === panel);
  byId("panel").hidden = panel === null;
  byId("panel").replaceChildren();
  ends.forEach((pane) => pane.toEnd()); // lines break elsewhere now
  if (panel) drawPanel(true);
}

async function drawPanel(focus = false) {
  const mine = ++asked, box = byId("panel");
  let parts;
  try {
    if (panel === "settings") {
      about ??= await get("/page/about");
      parts = settingsPanel(conversation?.settings ?? usual(), Boolean(conversation), about, async (settings) => {
        if (conversation) await keepSettings(conversation, settings);
        else localStorage.setItem("settings", JSON.stringify(settings));
      });
      parts.push(...replicaParts((await get("/v1/replicas")).data));
    } else if (!conversation) parts = [el("p", { class: "quiet" }, "No conversation yet.")];
    else if (panel === "tree") parts = treePanel(conversation, (node) => (node ? goTo(node.role === "user" ? conversation.end(node.id) : node.id) : undo()));
    else if (panel === "state") parts = await statePanel(conversation, actions.goTo);
    else parts = await tokensPanel(conversation, conversation.nodes.get(tokensOf), (node, at, token) =>
      tried(async () => {
        const { answer } = await post(`${conversation.root}/${node.id}/fork`, { at, token });
        goTo(answer);
      }));
  } catch (error) {
    parts = [el("p", { class: "problem", role: "alert" }, error.message)];
  }
  if (mine !== asked) return;
  const focused = box.contains(document.activeElement) ? document.activeElement.dataset.id : null;
  const close = el("button", { type: "button", class: "icon close", "aria-label": "Close the panel", on: { click: () => openPanel(panel) } }, "✕");
  box.replaceChildren(close, ...parts.filter(Boolean));
  if (focus) close.focus();
  else if (focused) [...box.querySelectorAll("[data-id]")].find((one) => one.dataset.id === focused)?.focus();
}

// ---- saying

/** The settings of new conversations. */
function usual() {
  try {
    return JSON.parse(localStorage.getItem("settings")) ?? {};
  } catch {
    return {};
  }
}

async function begin() {
  const { id } = await post("/page/conversations", { settings: usual() });
  const draft = text.value;
  localStorage.removeItem("draft:");
  text.value = "";
  show(id);
  text.value = draft;
  keepDraft();
}

/** Do it; what stands in the way is told beside the field. Resolves to whether it was done. */
async function tried(action) {
  problem("");
  try {
    await action();
    return true;
  } catch (error) {
    problem(error.message);
    return false;
  }
}

function problem(message) {
  byId("problem").textContent = message;
  byId("problem").hidden = !message;
}

async function send() {
  const said = text.value, shown = [...attached.items];
  if ((!said.trim() && !shown.length) || runningAnswers().length || byId("send").disabled) return;
  byId("send").disabled = true;
  const fresh = !conversation;
  let mine = conversation; // another one may be shown when the server has answered
  const done = await tried(async () => {
    if (fresh) { await begin(); mine = conversation; }
    const { root, leaf, other } = mine;
    const message = { text: said, pictures: await attached.sent(root) };
    const sent = [post(`${root}/say`, { parent: parentOf(leaf), ...message })];
    if (other) sent.push(post(`${root}/say`, { parent: parentOf(other), ...message }));
    const [first, second] = await Promise.all(sent);
    if (second) mine.go(second.answer, "other");
    mine.go(first.answer);
  });
  if (!done && fresh && mine && mine === conversation) await leaveEmpty();
  if (done) attached.clear(shown);
  if (done && text.value === said) { text.value = ""; keepDraft(); fit(); }
  draw();
  panes.forEach((pane) => pane.toEnd());
  list();
}

/** Leave no conversation behind whose first message was refused; the server keeps one that has messages. */
async function leaveEmpty() {
  const { id, root } = conversation, said = text.value, told = byId("problem").textContent;
  keepDraft();
  unfollow();
  let left = id;
  try {
    await remove(`${root}?empty=1`);
    localStorage.removeItem(`draft:${id}`);
    left = null;
  } catch { /* it has the message, and the answer to it was lost on the way; or the server is away */ }
  show(left);
  text.value = said;
  keepDraft();
  fit();
  problem(told);
}

/** Pictures and sounds go with the message, files of text into it. */
async function addFiles(files) {
  problem("");
  for (const file of files) {
    const taken = takes(file, about);
    if (taken === null) await tried(async () => { const part = await quoted(file, text.value); text.value += part; });
    else if (taken) attached.add([file]);
    else problem(`This model ${about?.pictures || about?.sounds ? "" : "reads text only: it "}takes no ${file.type.startsWith("image/") ? "pictures" : "sounds"}.`);
  }
  fit();
  keepDraft();
}

let recording = null;

/** Begin to record a sound, or end it: then it goes with the message. */
async function toggleRecording() {
  const shown = byId("record"), running = recording;
  shown.disabled = true;
  await tried(async () => {
    recording = null; // whatever comes of the one that runs
    if (running) attached.add([await running.stop()]);
    else { recording = await record(); announce("Recording"); }
  });
  shown.disabled = false;
  shown.setAttribute("aria-pressed", recording !== null);
  shown.setAttribute("aria-label", recording ? "End the recording" : "Record a sound");
}

/** The answer that a message goes below: a branch that ends with a message without answer goes on above it. */
const parentOf = (leaf) => conversation.answer(leaf)?.id ?? null;

function keepDraft() {
  const name = `draft:${conversation?.id ?? ""}`;
  if (text.value) localStorage.setItem(name, text.value);
  else localStorage.removeItem(name);
}

function fit() {
  text.rows = Math.min(10, text.value.split("\n").length);
}

// ---- the rest of the page

const list = () => showList(conversation?.id, show, (id) => (id === conversation?.id ? show(null) : list())).catch((error) => problem(error.message));

function closeSide() {
  byId("side").classList.remove("open");
}

function theme(next) {
  const root = document.documentElement;
  if (next) localStorage.setItem("theme", next);
  const kept = localStorage.getItem("theme") ?? "system";
  if (kept === "system") delete root.dataset.theme;
  else root.dataset.theme = kept;
  byId("theme").setAttribute("aria-label", `Theme: ${kept === "system" ? "as the system" : kept}`);
}

async function rename() {
  const title = await ask({ title: "Rename this conversation", label: "Name", value: conversation.title, yes: "Rename" });
  if (title?.trim()) await tried(() => post(conversation.root, { title: title.slice(0, 200) }));
}

byId("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
byId("stop").addEventListener("click", () => runningAnswers().forEach(actions.stop));
byId("new").addEventListener("click", () => { show(null); text.focus(); });
byId("rename").addEventListener("click", rename);
byId("search").addEventListener("input", list);
byId("search").addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown") { byId("list").querySelector(".open")?.focus(); event.preventDefault(); }
});
byId("list").addEventListener("keydown", walk);
byId("side-open").addEventListener("click", () => { byId("side").classList.add("open"); byId("new").focus(); });
byId("side-close").addEventListener("click", () => { closeSide(); byId("side-open").focus(); });
byId("theme").addEventListener("click", () => {
  const kept = localStorage.getItem("theme") ?? "system";
  theme({ system: "light", light: "dark", dark: "system" }[kept]);
});
byId("load").addEventListener("change", (event) => tried(async () => {
  const [file] = event.target.files;
  event.target.value = "";
  if (file) show((await post("/page/upload", file)).id);
}));
for (const one of document.querySelectorAll("[data-panel]")) one.addEventListener("click", () => openPanel(one.dataset.panel));
byId("attach").addEventListener("click", () => byId("files").click());
byId("record").addEventListener("click", toggleRecording);
byId("files").addEventListener("change", async (event) => {
  const files = [...event.target.files];
  event.target.value = "";
  await addFiles(files);
  text.focus();
});
text.addEventListener("paste", (event) => {
  const files = pasted(event.clipboardData, about);
  if (files.length) { event.preventDefault(); problem(""); attached.add(files); }
});
// A file that is dropped anywhere is meant for the message: it must not take the place of the page.
const dragged = (event) => event.dataTransfer?.types.includes("Files");
addEventListener("dragover", (event) => {
  if (!dragged(event)) return;
  event.preventDefault();
  byId("composer").classList.add("over");
});
addEventListener("dragleave", (event) => { if (!event.relatedTarget) byId("composer").classList.remove("over"); });
addEventListener("drop", (event) => {
  if (!dragged(event)) return;
  event.preventDefault();
  byId("composer").classList.remove("over");
  addFiles([...event.dataTransfer.files]);
});
text.addEventListener("input", () => { fit(); keepDraft(); });
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("dialog").open) {
    if (byId("side").classList.contains("open")) closeSide();
    else if (byId("panel").contains(document.activeElement)) { openPanel(panel); text.focus(); }
    else if (runningAnswers().length) runningAnswers().forEach(actions.stop);
    else if (conversation?.other) { conversation.other = null; draw(); }
    return;
  }
  if (!event.altKey || event.ctrlKey || event.metaKey) return;
  const keys = {
    KeyN: () => byId("new").click(),
    KeyK: () => { byId("side").classList.add("open"); byId("search").focus(); },
    KeyZ: undo,
    KeyT: () => openPanel("tree"),
    KeyS: () => openPanel("state"),
    Comma: () => openPanel("settings"),
  };
  if (keys[event.code]) { event.preventDefault(); keys[event.code](); }
});
addEventListener("popstate", () => show(location.hash.slice(1) || null));
addEventListener("focus", list);

theme();
show(location.hash.slice(1) || null);
text.focus();
get("/page/about").then((told) => {
  about = told;
  hide(byId("record"), !told.sounds || !canRecord());
  panes.forEach((pane) => pane.named(told.model));
  byId("model").textContent = `${told.model}${told.context ? `, ${told.context.toLocaleString("en")} tokens of context` : ""}.`;
}).catch((error) => problem(error.message));
