// A branch as messages. Elements of messages that did not change stay; of those that grow, only the changed blocks.

import { button, copyButton, el, hide, showHtml, showText } from "./dom.js";
import { Attached, pasted, pictureRow } from "./pictures.js";

const SLICE = 40; // messages of a long branch that are made in a frame, the last ones first
const CUT = { length: "Stopped at the token limit. Continue resumes it.", stopped: "Stopped before its end. Continue resumes it." };
const EXAMPLES = ["Explain recursion to a child, with an example.", "Write a Python function that finds the primes up to n.", "Plan a weekend in Rome as a table."];

export class Pane {
  /** `actions`: what the buttons of a message do, each called with the message. */
  constructor(element, actions) {
    this.element = element;
    this.actions = actions;
    this.shown = new Map();
    this.editing = null;
    this.model = "Answer"; // the name above answers
    this.looked = [null, null]; // the conversation, and the last message of the branch
    this.most = SLICE;
    this.due = false;
  }

  /** Have answers bear the name of the model. */
  named(model) {
    this.model = model;
    for (const view of this.shown.values()) if (view.role !== "user") showText(view.name, model);
  }

  show(conversation, leaf) {
    const near = this.isAtEnd();
    const path = conversation.path(leaf);
    if (this.looked[0] !== conversation) this.most = SLICE;
    this.looked = [conversation, leaf];
    const wanted = new Set(path.map((node) => node.id));
    for (const [id, view] of this.shown) {
      if (!wanted.has(id)) { view.element.remove(); this.shown.delete(id); }
    }
    if (this.editing && !wanted.has(this.editing)) this.editing = null;
    this.element.querySelector(".welcome")?.remove();
    if (!path.length) {
      this.element.append(el("div", { class: "welcome" },
        el("p", {}, "Send a message. You can regenerate every answer and edit every message: the conversation becomes a tree, and no branch computes again what another has."),
        el("ul", { "aria-label": "Examples" }, ...EXAMPLES.map((text) => el("li", {}, button(text, () => this.actions.example(text)))))));
    }
    if (path.length <= this.most) this.most = Infinity; // all of them are there: from now on they come one by one
    else this.soon();
    let at = null;
    for (const node of path.slice(-this.most)) {
      let view = this.shown.get(node.id);
      if (!view) { view = new View(node, this); this.shown.set(node.id, view); }
      const after = at ? at.nextSibling : this.element.firstChild;
      if (view.element !== after) this.element.insertBefore(view.element, after);
      at = view.element;
      view.update(node, conversation.siblings(node), node.id === leaf);
    }
    if (near) this.element.scrollTop = this.element.scrollHeight;
  }

  /** Show more of a long branch in the next frame. */
  soon() {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => {
      this.due = false;
      this.most += SLICE;
      this.show(...this.looked);
    });
  }

  isAtEnd() {
    return this.element.scrollHeight - this.element.scrollTop - this.element.clientHeight < 120;
  }

  toEnd() {
    this.element.scrollTop = this.element.scrollHeight;
  }

  edit(node) {
    this.shown.get(node.id)?.edit(node);
  }
}

class View {
  constructor(node, pane) {
    this.pane = pane;
    this.blocks = [];
    this.key = this.buttons = "";
    this.role = node.role;
    this.name = el("h2", { class: "name" }, node.role === "user" ? "You" : pane.model);
    this.reasoning = el("details", { hidden: true }, el("summary", {}, "Reasoning"), el("div"));
    this.body = el("div", { class: "body" });
    this.pictures = node.pictures.length ? pictureRow(pane.looked[0].root, node.pictures, node.sounds) : null;
    this.cut = el("p", { class: "cut quiet", hidden: true });
    this.error = el("p", { class: "error", role: "alert", hidden: true });
    this.foot = el("div", { class: "foot", role: "group", "aria-label": `Of this ${node.role === "user" ? "message" : "answer"}` });
    this.element = el("article", { class: `message ${node.role}`, "data-id": node.id }, this.name, this.pictures, this.reasoning, this.body, this.cut, this.error, this.foot);
  }

  update(node, siblings, last) {
    const place = siblings.indexOf(node), key = `${node.stamp} ${siblings.length} ${last}`;
    if (key === this.key) return;
    this.key = key;
    node.blocks.forEach((html, at) => {
      if (this.blocks[at]?.html === html) return;
      let block = this.blocks[at];
      if (!block) { block = this.blocks[at] = { element: el("div") }; this.body.append(block.element); }
      block.html = html;
      showHtml(block.element, html ?? "");
    });
    while (this.blocks.length > node.blocks.length) this.blocks.pop().element.remove();
    const running = node.status === "running";
    if (this.element.getAttribute("aria-busy") !== `${running}`) this.element.setAttribute("aria-busy", running);
    if (running && !node.blocks.length) {
      this.waiting ??= this.body.appendChild(el("p", { class: "waiting" }));
      const [read, total] = node.progress ?? [0, 0];
      showText(this.waiting, read < total ? `Reading: ${read} of ${total} tokens…` : "…");
    } else { this.waiting?.remove(); this.waiting = null; }
    if (node.reasoning) {
      hide(this.reasoning, false);
      showText(this.reasoning.lastChild, node.reasoning);
    }
    hide(this.cut, !(node.status in CUT));
    showText(this.cut, CUT[node.status] ?? "");
    hide(this.error, !node.error);
    showText(this.error, node.error);
    // Buttons are made anew only when they would be others: a focused one stays.
    const buttons = JSON.stringify([node.status, siblings.length, place, last, node.usage]);
    if (buttons === this.buttons) return;
    this.buttons = buttons;
    const focused = this.foot.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    this.foot.replaceChildren(...this.controls(node, siblings, place, last));
    if (focused) [...this.foot.children].find((one) => one.getAttribute("aria-label") === focused)?.focus();
  }

  controls(node, siblings, place, last) {
    const act = this.pane.actions, found = [];
    if (siblings.length > 1) {
      const step = (by, name, sign) =>
        button(sign, () => act.choose(siblings[(place + by + siblings.length) % siblings.length]), { "aria-label": name });
      found.push(step(-1, "The branch before", "‹"), el("span", {}, `${place + 1} of ${siblings.length}`), step(1, "The next branch", "›"));
      found.push(button("Compare", () => act.compare(siblings[(place + 1) % siblings.length]), { "aria-label": "Show the next branch beside this one" }));
    }
    if (node.status === "running") {
      found.push(button("Stop", () => act.stop(node), { "aria-label": "Stop this answer" }));
      return found;
    }
    found.push(copyButton(() => node.text, node.role === "user" ? "Copy this message" : "Copy this answer"));
    if (node.role === "user") {
      found.push(button("Edit", () => this.edit(node), { "aria-label": "Edit this message, in a new branch" }));
      return found;
    }
    if (["stopped", "length", "failed"].includes(node.status)) {
      found.push(button("Continue", () => act.goOn(node), { "aria-label": "Continue this answer" }));
    }
    found.push(button("Regenerate", () => act.again(node), { "aria-label": "Regenerate this answer, in a new branch" }));
    found.push(button("Tokens", () => act.tokens(node), { "aria-label": "The tokens of this answer and their alternatives" }));
    if (!last) found.push(button("Branch", () => act.goTo(node), { "aria-label": "Branch: continue from this answer" }));
    const { usage } = node;
    if (usage.prompt !== undefined) {
      const rate = usage.decode_ms > 0 ? ` · ${(usage.generated / usage.decode_ms * 1000).toFixed(0)} tokens/s` : "";
      found.push(el("span", { class: "cost", title: "Prompt tokens reused from the state, and prompt tokens computed" },
        `reused ${usage.reused_tokens} · computed ${usage.computed_tokens} in ${usage.prefill_ms.toFixed(0)} ms${rate}`));
    }
    return found;
  }

  edit(node) {
    const text = el("textarea", { rows: "4", "aria-label": "Edit this message" });
    text.value = node.text;
    const list = el("ul", { class: "pictures", "aria-label": "Files to send", hidden: true });
    const attached = new Attached(list, this.pane.actions.refused);
    attached.name(this.pane.looked[0].root, node.pictures, node.sounds);
    hide(this.pictures ?? list, true);
    const end = () => { if (this.pictures) hide(this.pictures, false); attached.clear(); form.replaceWith(this.body); this.foot.hidden = false; this.pane.editing = null; };
    const form = el("form", { class: "edit", on: {
      submit: async (event) => {
        event.preventDefault();
        if (!text.value.trim() && !attached.length) return;
        if (await this.pane.actions.sayOtherwise(node, text.value, attached)) end();
      },
      paste: (event) => {
        const files = pasted(event.clipboardData, this.pane.actions.about());
        if (files.length) { event.preventDefault(); attached.add(files); }
      },
      keydown: (event) => {
        if (event.key === "Escape") { event.stopPropagation(); end(); }
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
      },
    } }, list, text, el("div", { class: "row" }, el("button", { class: "primary" }, "Send as a new branch"), button("Cancel", end)));
    this.body.replaceWith(form);
    this.foot.hidden = true;
    this.pane.editing = node.id;
    text.focus();
  }
}
