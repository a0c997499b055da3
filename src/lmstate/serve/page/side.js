// The list of conversations.

import { get, remove } from "./api.js";
import { ask, button, byId, el } from "./dom.js";

let latest = 0;

export async function showList(current, open, deleted) {
  const mine = ++latest;
  const query = new URLSearchParams({ search: byId("search").value });
  const { data } = await get(`/page/conversations?${query}`);
  if (mine !== latest) return;
  const list = byId("list");
  const focused = list.contains(document.activeElement) ? document.activeElement.dataset.id : null;
  list.replaceChildren(...data.map(({ id, title }) => el("li", {},
    button(title, () => open(id), { class: "open", "data-id": id, "aria-current": id === current ? "page" : undefined }),
    button("✕", async () => {
      const sure = await ask({ title: "Delete this conversation?", text: `“${title}” and all its branches will be gone.`, yes: "Delete" });
      if (sure === null) return;
      await remove(`/page/conversations/${id}`);
      deleted(id);
    }, { class: "icon", "aria-label": `Delete ${title}` }),
  )));
  byId("list-empty").hidden = data.length > 0;
  if (focused) [...list.querySelectorAll(".open")].find((one) => one.dataset.id === focused)?.focus();
}

/** Up and down in the list. */
export function walk(event) {
  if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
  const all = [...byId("list").querySelectorAll(".open")];
  const at = all.indexOf(document.activeElement);
  const next = all[at + (event.key === "ArrowDown" ? 1 : -1)];
  if (next) { next.focus(); event.preventDefault(); }
  else if (event.key === "ArrowUp" && at === 0) byId("search").focus();
}
