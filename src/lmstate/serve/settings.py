"""Settings of a server: access, limits, and the folder of what outlives it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

KEY_VARIABLE = "LMSTATE_API_KEY"
HOST = re.compile(r"(\*\.)?[\w-]+(\.[\w-]+)*|[0-9a-fA-F.]*:[0-9a-fA-F.:]*")  # a name, or an address
LATEST = ":latest"  # a tag that Ollama's clients put after a name without one


@dataclass(frozen=True)
class Settings:
    """Settings of a server. Times are in seconds, sizes in bytes."""

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()  # other names that clients may ask the model by
    cors_origins: tuple[str, ...] = ()  # exact origins, or "*"
    folder: Path | None = None  # conversations of the page and saved sessions; None: memory, and saving is refused
    log_prompts: bool = False
    shared: bool = False  # all API keys share sessions, responses, conversations and prefixes
    max_body: int = 16 * 2**20
    max_sound: int = 25 * 2**20  # of a form with a sound, as OpenAI has it
    max_bodies: int = 64 * 2**20  # of all large bodies that are worked on at a time
    max_snapshot: int = 2**32  # of a session's file that a client sends
    max_new_tokens: int = 4096  # when a request does not say; the context ends an answer too
    picture_hosts: tuple[str, ...] = ()  # that pictures may be fetched from; data URLs always may
    max_inputs: int = 2048  # prompts in one completions or embeddings request
    max_input_tokens: int = 300_000  # of one embeddings or rerank request together, as OpenAI has it
    max_connections: int = 4096  # fewer where the limit of open files is lower
    header_timeout: float = 20.0
    keep_alive: int = 30  # a connection with no request is closed
    body_timeout: float = 60.0
    write_timeout: float = 60.0  # a reader that takes nothing for so long is gone
    max_unread: int = 256  # pieces of an answer, a token or a few each, that wait for a slow reader before it rests
    request_timeout: float | None = None
    ping_interval: float = 10.0
    drain: float = 20.0  # how long streams may go on after SIGTERM
    max_priority: int = 0  # of a request: larger ones count as this, so that none goes before all others
    given_name: str | None = None  # the model's path or name as it was given: asked by it too, and never shown
    stored_responses: int = 2**28  # bytes of responses kept for previous_response_id
    folder_lasts: bool = True  # False: it is removed when the server ends

    def check(self, allow_anonymous: bool = False) -> None:
        """Refuse to serve the network without a key, and origins and hosts that do not exist. Raises `ValueError`."""
        for origin in self.cors_origins:
            scheme, _, host = origin.partition("://")
            if origin not in ("*", "null") and (not scheme or not host or "/" in host):
                raise ValueError(
                    f"{origin!r} is not the origin of a page and would never match; "
                    "give its scheme, host and port alone: http://localhost:3000"
                )
        for host in self.picture_hosts:
            if host != "*" and not HOST.fullmatch(host):
                raise ValueError(
                    f"{host!r} is not a host of pictures and would never match; "
                    "give its name alone: example.com, or *.example.com"
                )
        if not self.api_keys and not allow_anonymous and not self.on_loopback:
            raise ValueError(
                f"serving on {self.host} lets the network in, and no API key is set: give --api-key-file, "
                f"set {KEY_VARIABLE}, or serve on 127.0.0.1 (--allow-anonymous if everybody may)"
            )

    @property
    def has_owners(self) -> bool:
        """Whether each API key has names and prefixes of its own."""
        return len({*self.api_keys}) > 1 and not self.shared

    @property
    def lasting_folder(self) -> Path | None:
        """The folder, if it outlives the server."""
        return self.folder if self.folder_lasts else None

    @property
    def on_loopback(self) -> bool:
        return is_loopback(self.host)

    def answers_to(self, asked: str) -> bool:
        """Whether this is one of the model's names."""
        known = {self.model_name, self.given_name, *self.aliases}
        return asked in known or asked.removesuffix(LATEST) in known


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def read_keys(file: Path | None) -> tuple[str, ...]:
    """API keys: one a line of `file` (`#` begins a comment), and what the environment has."""
    try:
        lines = [] if file is None else file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 text; give one API key per line") from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if file is not None and not keys:
        raise ValueError(f"{file} has no API key; it should have one a line")
    if from_environment := os.environ.get(KEY_VARIABLE, "").strip():
        keys.append(from_environment)
    return tuple(keys)
