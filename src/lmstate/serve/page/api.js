// Requests to the server, and the stream of a conversation's changes, which is found again when it is lost.

import { ask } from "./dom.js";

const QUIET = 20_000; // milliseconds without a word from the server after which the connection is taken for lost

const ADVICE = {
  context_length_exceeded: ". Go on from an earlier answer, say less, or begin another conversation.",
  queue_full: ". Your text is kept here.",
};

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The answer to a request, whatever its status; who has to give a key is asked for it. */
export async function answerTo(method, path, { body, signal } = {}) {
  for (;;) {
    const headers = {};
    const key = sessionStorage.getItem("key");
    if (key) headers.authorization = `Bearer ${key}`;
    let answer;
    try {
      answer = await fetch(path, { method, headers, signal, body });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refused("The server cannot be reached. Nothing is lost: try again when it is back.", 0);
    }
    if (answer.status !== 401 || !(await askKey(key))) return answer;
  }
}

async function request(method, path, { body, signal } = {}) {
  const answer = await answerTo(method, path, { body: body instanceof Blob || body === undefined ? body : JSON.stringify(body), signal });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  const advice = ADVICE[told?.error?.code] ?? "";
  throw new Refused(`${told?.error?.message ?? `The server answered ${answer.status}.`}${advice}`, answer.status);
}

let asking = null;

async function askKey(tried) {
  if (sessionStorage.getItem("key") !== tried) return true; // another request asked meanwhile
  asking ??= ask({ title: "This server wants an API key", text: "The page keeps it until this tab is closed.", label: "API key", secret: true, yes: "Go on" });
  const key = await asking;
  asking = null;
  if (key) sessionStorage.setItem("key", key);
  return Boolean(key);
}

export const get = async (path) => (await request("GET", path)).json();
export const post = async (path, body = {}) => (await request("POST", path, { body })).json();
export const remove = async (path) => (await request("DELETE", path)).json();
export const blob = async (path) => (await request("GET", path)).blob();

/**
 * Follow a conversation. `told(event)` gets its changes, `connection(up)` whether they come.
 * Returns a function that ends it.
 */
export function follow(id, told, connection, gone) {
  let over = false, control = null, since = 0, epoch = "", pause = 400;
  async function once() {
    control = new AbortController();
    let timer = 0;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => control.abort(), QUIET);
    };
    heard();
    try {
      const query = new URLSearchParams({ since, epoch });
      const answer = await request("GET", `/page/conversations/${id}/events?${query}`, { signal: control.signal });
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done || over) return;
        heard();
        connection(true);
        pause = 400;
        const parts = (rest + value).split("\n\n");
        rest = parts.pop();
        for (const part of parts) {
          if (!part.startsWith("data: ")) continue;
          const event = JSON.parse(part.slice(6));
          if (event.deleted) { over = true; gone("This conversation was deleted."); return; }
          ({ version: since, epoch } = event);
          told(event);
        }
      }
    } finally {
      clearTimeout(timer);
      control.abort();
    }
  }
  (async () => {
    while (!over) {
      try {
        await once();
      } catch (error) {
        if (error.status === 404 && !over) { over = true; gone(error.message); return; }
      }
      if (over) return;
      connection(false);
      await new Promise((resolve) => setTimeout(resolve, pause));
      pause = Math.min(pause * 1.6, 4000);
    }
  })();
  return () => { over = true; control?.abort(); };
}
