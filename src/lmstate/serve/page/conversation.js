// A conversation as the page knows it: messages by id, and the branch that is looked at.

export class Conversation {
  constructor(id) {
    this.id = id;
    this.title = "New conversation";
    this.settings = {};
    this.nodes = new Map();
    this.leaf = null; // the last message that is shown
    this.other = null; // the last message of the branch beside it
    this.awaited = {}; // messages that were made and are not told of yet, to be shown as `leaf` or `other`
    this.below = new Map(); // messages by the id of their parent
    this.adopted = 0; // records of other servers that this one has taken in the place of its own
    this.shape = 0; // changes with the tree, not with the texts in it
  }

  get root() {
    return `/page/conversations/${this.id}`;
  }

  /** Take what changed. */
  apply(event) {
    this.title = event.title;
    this.settings = event.settings;
    this.adopted = event.adopted;
    if (event.whole) {
      this.nodes.clear();
      this.below.clear();
      this.shape += 1;
    }
    for (const told of event.nodes) {
      const { blocks, ...rest } = told;
      const known = this.nodes.get(told.id);
      const node = Object.assign(known ?? { blocks: [], stamp: 0 }, rest);
      for (const [at, html] of blocks) node.blocks[at] = html;
      node.blocks.length = told.count;
      node.stamp += 1;
      if (known) continue;
      this.nodes.set(told.id, node);
      if (!this.below.has(told.parent)) this.below.set(told.parent, []);
      this.below.get(told.parent).push(node);
      this.shape += 1;
      // What is said below the end of what one looks at is what one looks at.
      if (!event.whole && told.parent === this.leaf) this.leaf = told.id;
      if (!event.whole && told.parent === this.other && this.other) this.other = told.id;
    }
    for (const [name, id] of Object.entries(this.awaited)) {
      if (this.nodes.has(id)) { this[name] = id; delete this.awaited[name]; }
    }
    if (event.whole && !this.nodes.has(this.leaf)) this.leaf = this.remembered();
    if (!this.nodes.has(this.other)) this.other = null;
  }

  remembered() {
    const kept = localStorage.getItem(`leaf:${this.id}`);
    if (this.nodes.has(kept)) return kept;
    const last = [...this.nodes.keys()].pop();
    return last ?? null;
  }

  /** Show a branch, at once or as soon as its end is known. */
  go(id, name = "leaf") {
    if (id === null || this.nodes.has(id)) this[name] = id;
    else this.awaited[name] = id;
    if (name !== "leaf") return;
    if (id) localStorage.setItem(`leaf:${this.id}`, id);
    else localStorage.removeItem(`leaf:${this.id}`);
  }

  path(id) {
    const found = [];
    for (let node = this.nodes.get(id); node; node = this.nodes.get(node.parent)) found.push(node);
    return found.reverse();
  }

  children(id) {
    return this.below.get(id) ?? [];
  }

  siblings(node) {
    return this.children(node.parent);
  }

  /** The end of the branch that goes down from a message by the latest ones. */
  end(id) {
    for (;;) {
      const below = this.children(id);
      if (!below.length) return id;
      id = below[below.length - 1].id;
    }
  }

  /** The nearest answer at or above a message. */
  answer(id) {
    return this.path(id).findLast((node) => node.role === "assistant") ?? null;
  }

  running(id) {
    return this.path(id).find((node) => node.status === "running") ?? null;
  }
}
