"""A llama-server as a peer: started here from its binary, or one that runs already, at its URL."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

SLOTS, CONTEXT = 16, 2048  # of each slot, in tokens
START_SECONDS = 120


class LlamaServer:
    """Its own endpoint, with token ids in and out."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._pool = ThreadPoolExecutor(SLOTS)

    def stream(self, ids: list[int], count: int) -> Iterator[bytes]:
        """A line for each token."""
        with self._open(ids, count, stream=True) as answer:
            yield from (line for line in answer if line.startswith(b"data:") and b'"stop":true' not in line)

    def ask(self, ids: list[int], count: int) -> Callable[[], list[int]]:
        """The answer's ids, once it is called."""

        def complete() -> list[int]:
            with self._open(ids, count, return_tokens=True) as answer:
                tokens: list[int] = json.load(answer)["tokens"]
                return tokens

        return self._pool.submit(complete).result

    def _open(self, ids: list[int], count: int, **more: Any) -> Any:
        body = {"prompt": ids, "n_predict": count, "ignore_eos": True, "temperature": 0, "cache_prompt": True, **more}
        headers = {"Content-Type": "application/json"}
        return urllib.request.urlopen(
            urllib.request.Request(f"{self.url}/completion", json.dumps(body).encode(), headers)
        )


@contextmanager
def llama_server(
    where: str, model: str, threads: int, slots: int = SLOTS, options: Sequence[str] = ()
) -> Iterator[LlamaServer]:
    """`where`: a URL, or the path of the binary, which then serves the file `model` while the context lasts, with
    more `options` of its command line.

    Raises RuntimeError, with what it wrote, for a server that does not start.
    """
    if where.startswith("http"):
        yield LlamaServer(where.rstrip("/"))
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [where, "-m", model, "--port", str(port), "-np", str(slots), "-c", str(slots * CONTEXT)]
    command += ["-t", str(threads), "-tb", str(threads), "--no-webui", "-lv", "1", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(START_SECONDS * 5):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).read()
                break
            except (urllib.error.URLError, OSError):
                if process.poll() is not None:
                    assert process.stderr is not None
                    raise RuntimeError(process.stderr.read().decode()[-2000:]) from None
                time.sleep(0.2)
        else:
            raise RuntimeError(f"{where} did not answer within {START_SECONDS} seconds")
        yield LlamaServer(url)
    finally:
        process.terminate()
        process.wait(30)
