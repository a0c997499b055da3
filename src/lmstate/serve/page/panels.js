// The panels beside the messages: the tree, what the state holds, tokens, settings.

import { blob, get, post } from "./api.js";
import { announce, button, el, saveAs, size } from "./dom.js";
import { dataUrl, thumbnail } from "./pictures.js";

/** The tree as nested lists: a line of messages without branches is one list, and so are the branches of a message. */
export function treePanel(conversation, go) {
  const on = new Set(conversation.path(conversation.leaf).map((node) => node.id));
  const line = (id) => {
    const list = el("ul", { class: "map" });
    let below = conversation.children(id);
    while (below.length === 1) {
      list.append(el("li", {}, entry(below[0])));
      below = conversation.children(below[0].id);
    }
    if (below.length) {
      const words = parting(below.map((node) => beginning(node.text ?? "…")));
      list.append(el("li", {}, el("ul", { class: "map branches" }, ...below.map((node, at) => el("li", {}, entry(node, words[at]), line(node.id))))));
    }
    return list;
  };
  const entry = (node, words = beginning(node.text ?? "…")) => {
    const pictures = node.pictures.map((name, at) => (node.sounds.includes(name) ? el("span", { class: "quiet" }, "♪ Sound ")
      : thumbnail(conversation.root, name, `Picture ${at + 1}`)));
    return button("", () => go(node), {
      class: `${node.role}${on.has(node.id) ? " on" : ""}`,
      "aria-current": node.id === conversation.leaf ? "true" : undefined,
      title: `${node.role === "user" ? "Your message" : "An answer"}: ${beginning(node.text ?? "…")}`,
      "data-id": node.id,
    }, ...pictures, pictures.length && !node.text ? null : words);
  };
  const count = [...conversation.nodes.values()].filter((node) => node.role === "assistant" && !conversation.children(node.id).length).length;
  return [
    el("h2", {}, "The tree"),
    el("p", { class: "quiet" }, `● a message, ◆ an answer. ${count} ${count === 1 ? "branch" : "branches"}. Going to one computes nothing.`),
    line(null),
    conversation.leaf ? button("Undo the last turn (Alt+Z)", () => go(null)) : null,
  ];
}

/** The first words of a message, without the marks of Markdown. */
function beginning(text) {
  const lines = text.split("\n").map((line) => line.replace(/^\s*(```\S*|[#>*+-]+(?=\s))/, "").trim());
  return (lines.find(Boolean) ?? "(empty)").slice(0, 200);
}

/** Texts that begin with the same words, each from the word at which they part; as they are where that is a short way. */
function parting(texts) {
  const each = texts.map((text) => text.split(" "));
  let same = 0;
  while (each.every((words) => words.length > same + 1 && words[same] === each[0][same])) same++;
  return texts.length > 1 && same > 2 ? each.map((words) => `… ${words.slice(same).join(" ")}`) : texts;
}

export async function statePanel(conversation, go) {
  const answer = conversation.answer(conversation.leaf);
  if (!answer || answer.status === "running") {
    return [el("h2", {}, "What the state holds"), el("p", { class: "quiet" }, answer ? "It is being written." : "Nothing yet.")];
  }
  const told = await get(`${conversation.root}/${answer.id}/state`);
  const { reuse, usage } = told;
  const total = Object.values(told.memory).reduce((sum, bytes) => sum + bytes, 0);
  const meter = told.context ? el("meter", { min: 0, max: told.context, value: told.tokens, high: told.context * 0.9, "aria-label": "Context in use" }) : null;
  return [
    el("h2", {}, "What the state holds"),
    pairs(["Tokens of this branch", told.tokens], ["Shared with another branch", told.shared], ["Its own", told.tokens - told.shared], told.context && ["Context", told.context]),
    meter,
    el("h3", {}, "Bytes by layer kind"),
    pairs(...Object.entries(told.memory).map(([kind, bytes]) => [kind, size(bytes)]), ["all", size(total)]),
    el("h3", {}, "Bytes in memory"),
    pairs(["Shared with other texts", size(told.shared_bytes)], ["This branch’s own", size(told.own_bytes)]),
    el("h3", {}, "Why the last answer computed what it did"),
    ...whyParts(usage),
    el("h3", {}, "Continuing from here"),
    pairs(["Would be reused", `${reuse.reused} of ${told.tokens}`], ["Found in", tierName(reuse.tier) ?? "nowhere"], ["Computed again", reuse.computed], reuse.forced_by && ["Because of", reuse.forced_by]),
    el("h3", {}, "Going back"),
    pairs(["Rewind window", told.rewind === null ? "all tokens" : `${told.rewind} tokens`]),
    el("p", { class: "quiet" }, told.rewind === null
      ? "Every layer stores each token, so you can go back to any position without computing."
      : "Some layers store only a summary of all tokens. Farther back than this, the nearest stored summary is continued."),
    el("ul", { class: "ways" }, ...told.back.map(({ id, tokens, computed }) => el("li", {},
      button("", () => go(conversation.nodes.get(id)), { "aria-label": `Go back to ${tokens} tokens, which computes ${computed}` },
        el("span", {}, `to ${tokens} tokens`), el("span", {}, computed ? `computes ${computed}` : "computes nothing"))))),
    el("h3", {}, "Save and share"),
    el("div", { class: "stack" },
      button("Save this branch with its state", async () => {
        saveAs(`${fileName(conversation)}.safetensors`, await blob(`${conversation.root}/${answer.id}/session`));
      }),
      button("Export this branch as Markdown", async () => saveAs(`${fileName(conversation)}.md`, new Blob([await asMarkdown(conversation)], { type: "text/markdown" }))),
      button("Export the tree as JSON", async () => saveAs(`${fileName(conversation)}.json`, new Blob([await asJson(conversation)], { type: "application/json" }))),
    ),
    el("h3", {}, "Stored prefixes"),
    el("p", { class: "quiet" }, "Runs of tokens from all conversations; those of this branch are marked. A text that begins with them does not compute them again."),
    el("ul", { class: "prefixes" }, ...told.prefixes.map(prefixLine)),
    told.prefixes_left_out ? el("p", { class: "quiet" }, `And ${told.prefixes_left_out} others.`) : null,
  ];
}

const pairs = (...rows) => el("dl", {}, ...rows.filter(Boolean).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, `${value}`)]));

const TIERS = { memory: "memory", folder: "the store’s folder", shared: "the shared store" };
const tierName = (tier) => TIERS[tier] ?? tier;

/** Where the tokens of an answer's prompt came from, in words, and the times. */
function whyParts(usage) {
  if (usage.prompt === undefined) return [el("p", { class: "quiet" }, "It was loaded, not computed here.")];
  const said = [];
  const { prompt, reused_tokens: reused, computed_tokens: computed, matched_tokens: matched } = usage;
  said.push(reused ? `${reused} of the prompt’s ${prompt} tokens were taken from ${tierName(usage.tier) ?? "memory"}.` : `No stored prefix matches the beginning of this prompt of ${prompt} tokens.`);
  if (usage.forced_by && matched > reused) said.push(`${matched - reused} more matched a stored text, but ${usage.forced_by} layers store a summary of all tokens, and none was stored at that place.`);
  if (usage.differs_at !== null) said.push(`Token ${usage.differs_at}, ${JSON.stringify(usage.differs)}, is the first that no stored prefix has. It and all tokens after it were computed.`);
  else if (computed) said.push(`All of it was stored; ${computed === 1 ? "the last token was" : `${computed} tokens were`} computed to know what comes next.`);
  else said.push("All of it was stored, and so was its continuation: nothing was computed.");
  const times = ["queued_ms", "prefill_ms", "decode_ms"].map((name) => `${usage[name].toFixed(1)} ms`);
  return [
    el("p", { class: "why" }, said.join(" ")),
    pairs(["Reused", reused], ["Computed", computed], ["Waited", times[0]], ["Prompt took", times[1]], [`Answer of ${usage.generated} took`, times[2]]),
  ];
}

function prefixLine(one) {
  const where = [one.memory && `memory, ${size(one.nbytes)}`, tierName(one.tier), one.carry && "carry", one.logits && "logits", one.pins && "a branch ends here"].filter(Boolean);
  const line = el("li", { class: one.branch ? "on" : undefined },
    el("code", {}, one.text),
    el("span", {}, `${one.branch ? "this branch · " : ""}${one.shared ? "shared · " : ""}${one.count} ${one.count === 1 ? "token" : "tokens"} from ${one.start} · ${where.join(", ")}`));
  line.style.setProperty("--depth", Math.min(one.depth, 8));
  return line;
}

const fileName = (conversation) => conversation.title.replace(/[^\p{L}\p{N} _-]/gu, "").trim().slice(0, 60) || "conversation";

/** The pictures and sounds of some messages as data URLs, null for those that are lost, by their names: an export is whole. */
async function picturesIn(conversation, nodes) {
  const names = [...new Set(nodes.flatMap((node) => node.pictures))];
  const urls = await Promise.all(names.map((name) => dataUrl(conversation.root, name).catch(() => null)));
  return Object.fromEntries(names.map((name, at) => [name, urls[at]]));
}

async function asMarkdown(conversation) {
  const path = conversation.path(conversation.leaf), files = await picturesIn(conversation, path);
  const sounds = new Set(path.flatMap((node) => node.sounds));
  const shown = (name) => {
    if (!files[name]) return `*A ${sounds.has(name) ? "sound" : "picture"} that is lost*\n\n`;
    return sounds.has(name) ? `[Sound](${files[name]})\n\n` : `![Picture](${files[name]})\n\n`;
  };
  const parts = path.map((node) => `## ${node.role === "user" ? "User" : "Assistant"}\n\n${node.pictures.map(shown).join("")}${node.text ?? ""}`);
  return `# ${conversation.title}\n\n${parts.join("\n\n")}\n`;
}

async function asJson(conversation) {
  const nodes = [...conversation.nodes.values()], pictures = await picturesIn(conversation, nodes);
  const messages = nodes.map(({ id, parent, role, text, pictures: names, reasoning, status, usage }) => ({ id, parent, role, content: text ?? "", pictures: names, reasoning, status, usage }));
  return `${JSON.stringify({ title: conversation.title, settings: conversation.settings, leaf: conversation.leaf, messages, pictures }, null, 1)}\n`;
}

/** The tokens of an answer; one that is chosen shows what else could have stood there. */
export async function tokensPanel(conversation, answer, forked) {
  const { data } = await get(`${conversation.root}/${answer.id}/tokens`);
  const choices = el("ul", { class: "choices", "aria-label": "Alternatives" });
  const percent = (p) => `${(p * 100).toFixed(p >= 0.1 ? 0 : p >= 0.001 ? 1 : 3)} %`;
  const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
  const show = (at, chosen) => {
    for (const other of list.children) other.setAttribute("aria-expanded", other === chosen);
    const token = data[at];
    choices.replaceChildren(...token.top.map((other) =>
      el("li", {}, button("", () => forked(answer, at, other.id), {
        disabled: other.id === token.id || other.end,
        "aria-label": `${visible(other.text)}, ${percent(other.p)}${other.id === token.id ? ", as it is" : other.end ? ", would end the answer" : ", begin a branch with it"}`,
      }))));
    [...choices.querySelectorAll("button")].forEach((one, index) => {
      const other = token.top[index];
      one.append(el("span", {}, visible(other.text)), el("span", {}, `${percent(other.p)}${other.end ? " end" : ""}`));
    });
    announce(`${visible(token.text)}, ${percent(token.p)}`);
  };
  const list = el("div", { class: "tokens" }, ...data.map((token, at) => {
    const made = button(visible(token.text), () => show(at, made), {
      class: `p${token.p < 0.2 ? 0 : token.p < 0.7 ? 1 : 2}`, title: percent(token.p), "aria-expanded": "false",
    });
    return made;
  }));
  return [
    el("h2", {}, "Tokens of this answer"),
    el("p", { class: "quiet" }, data.length ? "Underlined by probability. Choose a token to see its alternatives. Choose an alternative to fork the conversation there." : "Their probabilities are not known here."),
    choices,
    list,
  ];
}

/** `kept`: the settings of a conversation (`own`), or those of new ones. `saved(settings)` keeps others. */
export function settingsPanel(kept, own, about, saved) {
  const problem = el("p", { class: "problem", role: "alert", hidden: true });
  const fields = [
    ["system", "System prompt", "Instructions before the first message. A change computes the branch again.", { rows: "5" }],
    ["temperature", "Temperature", `0 takes the likeliest token each time. By default ${about.temperature}${about.temperature ? "" : ", but other answers to a message are drawn at 0.8"}.`, { type: "number", min: 0, max: 100, step: "any" }],
    ["top_p", "Top p", `Sample from the most likely tokens that together have this probability. By default ${about.top_p ?? 1}.`, { type: "number", min: 0, max: 1, step: "any" }],
    ["max_tokens", "Longest answer, in tokens", `By default ${about.max_tokens}.`, { type: "number", min: 1, step: 1 }],
    ["seed", "Seed", "The same seed draws the same answer.", { type: "number", step: 1 }],
  ];
  const inputs = {};
  const made = fields.map(([name, label, help, options]) => {
    inputs[name] = el(options.rows ? "textarea" : "input", { id: `set-${name}`, "aria-describedby": `help-${name}`, ...options });
    inputs[name].value = kept[name] ?? "";
    return el("div", { class: "field" }, el("label", { for: `set-${name}` }, label), inputs[name], el("p", { class: "quiet", id: `help-${name}` }, help));
  });
  const form = el("form", { on: { submit: async (event) => {
    event.preventDefault();
    const settings = {};
    for (const [name, input] of Object.entries(inputs)) {
      if (input.value !== "") settings[name] = name === "system" ? input.value : Number(input.value);
    }
    problem.hidden = true;
    try {
      await saved(settings);
      announce("Settings saved");
    } catch (error) {
      problem.textContent = error.message;
      problem.hidden = false;
    }
  } } }, ...made, problem, el("button", { class: "primary" }, "Save settings"));
  const facts = [["Model", about.model], ["Family", about.family], ["Layers", about.layers], ["Context", about.context ?? "any"], ["Conversations", about.kept ? "kept in the server's store" : "until the server ends (--store keeps them)"]];
  return [el("h2", {}, own ? "Settings of this conversation" : "Settings of new conversations"), form, el("h3", {}, "The model"),
    el("dl", {}, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, `${value}`)]))];
}

/** The engines behind the server, as `lmstate cluster status` shows them. */
export function replicaParts(replicas) {
  const work = (one) => `${one.waiting} waiting, ${one.reading} reading, ${one.answering} answering`;
  return [el("h3", {}, replicas.length === 1 ? "The engine" : "The replicas"), ...replicas.map((one) => pairs(
    ["Replica", `${one.rank}${one.takes ? "" : ", takes no requests"}`],
    ["Requests", work(one)],
    ["Sessions", one.sessions],
    ["Prompt tokens reused", one.hit_rate === null ? "none yet" : `${Math.round(100 * one.hit_rate)} %`],
    ["Wait for a new prompt", one.first_token === null ? "not known" : `${one.first_token.toFixed(1)} s`],
  ))];
}

export const keepSettings = (conversation, settings) => post(conversation.root, { settings });
