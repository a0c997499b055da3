"""`lmstate pull`, `list`, `rm`, `ps` and `run`: the models on the disk and in a server, with the words of Ollama."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from datetime import MAXYEAR, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmstate.cli import options
from lmstate.cli.cache import entries
from lmstate.cli.chat.command import chat
from lmstate.cli.generate import generate
from lmstate.cli.output import size, table

if TYPE_CHECKING:
    from urllib.error import HTTPError

ANSWER_SECONDS = 10.0  # that a server has to tell its models
Url = Annotated[
    str, typer.Option("--url", metavar="URL", help="URL of the server. Its API key is read from LMSTATE_API_KEY.")
]


@dataclass(frozen=True)
class LocalModel:
    """A model that was downloaded: its name, and the paths that are removed with it."""

    name: str
    nbytes: int
    written: float
    paths: tuple[Path, ...]


def local_models() -> list[LocalModel]:
    """The models that were downloaded, of an alias or from the Hub."""
    from lmstate.checkpoints.hub import cache_dir

    found = [
        LocalModel(each.model, each.nbytes, max(file.stat().st_mtime for file in each.files), (each.path,))
        for each in entries(cache_dir())
        if each.kind == "download" and each.files
    ]
    return sorted((*found, *_hub_models()), key=lambda model: model.name)


def _hub_models() -> list[LocalModel]:
    """Each .gguf file of the Hub's cache, and each repository with safetensors."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    found = []
    for repository in repositories:
        if repository.repo_type != "model":
            continue
        files = [(revision, file) for revision in repository.revisions for file in revision.files]
        names = {file.file_path.relative_to(revision.snapshot_path).as_posix() for revision, file in files}
        for name in sorted(name for name in names if name.endswith(".gguf")):
            same = [file for revision, file in files if file.file_path == revision.snapshot_path / name]
            others = {file.blob_path for _, file in files if file not in same}
            blobs = {file.blob_path: file.size_on_disk for file in same}
            own = [blob for blob in blobs if blob not in others and blob.is_relative_to(repository.repo_path.resolve())]
            paths = (*(file.file_path for file in same), *own)
            written = max(file.blob_last_modified for file in same)
            found.append(LocalModel(f"{repository.repo_id}/{name}", sum(blobs.values()), written, paths))
        if any(name.endswith(".safetensors") for name in names):
            where = (repository.repo_path,)
            found.append(LocalModel(repository.repo_id, repository.size_on_disk, repository.last_modified, where))
    return found


def pull(model: options.ModelName) -> None:
    """Download a model.

    \b
    Examples:
      lmstate pull smollm2
      lmstate pull organization/model
      lmstate pull organization/model:Q4_K_M
    """
    options.refuse_unknown(model)
    from lmstate.checkpoints.hub import name_of, resolve

    path = resolve(model)
    print(f"{name_of(path)} is at {path}")


def list_() -> None:
    """List downloaded models with size and age.

    \b
    Examples:
      lmstate list
    """
    rows = [
        (each.name, size(each.nbytes), datetime.fromtimestamp(each.written).strftime("%Y-%m-%d %H:%M"))
        for each in local_models()
    ]
    table("Models", ("name", "size", "written"), rows)


def rm(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Names from `lmstate list`.")],
) -> None:
    """Remove downloaded models and their conversions.

    \b
    Examples:
      lmstate rm smollm2
      lmstate rm organization/model/file.gguf
    """
    from lmstate.checkpoints.hub import cache_dir

    found = {each.name: each for each in local_models()}
    if unknown := [name for name in models if name not in found]:
        raise ValueError(f"no model {unknown[0]!r} was downloaded; `lmstate list` shows them; nothing was removed")
    converted = entries(cache_dir())
    of_models = [each.path for each in converted if each.kind == "conversion" and each.model in models]
    freed = 0
    for name in dict.fromkeys(models):
        for path in found[name].paths:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        freed += found[name].nbytes
        print(f"removed {name}")
    for path in of_models:
        freed += sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        shutil.rmtree(path)
    print(f"{size(freed)} freed")


def ps(url: Url = "http://127.0.0.1:8080") -> None:
    """List the models that a server has in memory.

    \b
    Examples:
      lmstate ps
      lmstate ps --url http://127.0.0.1:9000
    """
    rows = [
        (str(each["name"]), size(each["size"]), str(each["context_length"] or "any"), _until(each["expires_at"]))
        for each in asked(url.rstrip("/") + "/api/ps").get("models", ())
    ]
    table(f"Models in memory at {url}", ("name", "size", "context", "until"), rows)


def _until(when: str) -> str:
    """A time of Ollama's API, in the local one; "forever" for the last year that there is."""
    time = datetime.fromisoformat(when)
    return "forever" if time.year == MAXYEAR else time.astimezone().strftime("%Y-%m-%d %H:%M")


def asked(url: str, body: dict[str, Any] | None = None, wait: float = 0.0) -> dict[str, Any]:
    """The JSON object that a server answers with, to a GET, or to a POST of a body.

    `wait`: seconds that it may take beside the usual ones. Raises ConnectionError.
    """
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--url {url!r} names no server; give http://HOST:PORT")
    key = os.environ.get("LMSTATE_API_KEY", "").strip()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    data = None if body is None else json.dumps(body).encode()
    if data is not None:
        headers["Content-Type"] = "application/json"
    try:
        with urlopen(Request(url, data, headers), timeout=ANSWER_SECONDS + wait) as answer:
            told = json.loads(answer.read())
    except HTTPError as error:
        raise ConnectionError(f"the server at {url} answered {error.code}: {_reason(error)}") from None
    except (URLError, TimeoutError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise ConnectionError(f"no server answers at {url}: {reason}; start one with `lmstate serve`") from None
    if not isinstance(told, dict):
        raise ConnectionError(f"the server at {url} answered no JSON object")
    return told


def _reason(error: HTTPError) -> str:
    """The message of an error as the server words it, else the words of HTTP."""
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return str(error.reason)


def run(
    model: options.ModelName,
    prompt: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT...", help="Prompt for a single answer; without it, a chat.")
    ] = None,
    system: options.System = None,
    temperature: options.Temperature = None,
    ctx_size: options.ContextSize = None,
    device: options.Device = None,
) -> None:
    """Answer a prompt, or chat if there is none.

    \b
    Examples:
      lmstate run smollm2
      lmstate run smollm2 "Name three rivers."
      lmstate run organization/model:Q4_K_M < question.txt
    """
    if prompt or not sys.stdin.isatty():
        text = " ".join(prompt) if prompt else None
        generate(model, text, system=system, temperature=temperature, ctx_size=ctx_size, device=device)
    else:
        chat(model, system=system, temperature=temperature, ctx_size=ctx_size, device=device)
