"""`lmstate cache`: what downloads and conversions hold of the disk, and how to have it back."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from time import time
from typing import Annotated

import typer

from lmstate.cli.output import size, table

DOWNLOAD, CONVERSION = re.compile(r"[0-9a-f]{16}"), re.compile(r"[0-9a-f]{32}")
DAY = 24 * 3600.0  # seconds
SHOWN = 12  # characters of a name that `list` shows; `remove` takes any beginning that is clear

cache = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List and remove downloads and conversions.")


@dataclass(frozen=True)
class CacheFolder:
    """A folder of the cache."""

    path: Path
    kind: str  # download, or conversion
    files: tuple[Path, ...]

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    @property
    def model(self) -> str:
        """The name that loads what was downloaded or converted; "unknown" where nothing tells."""
        from lmstate.checkpoints.hub import name_of
        from lmstate.checkpoints.recorded import recorded_source

        if self.kind == "download":
            return name_of(min(self.files)) if self.files else "unknown"
        source = recorded_source(self.path)
        return "unknown" if source is None else name_of(source)

    @property
    def content(self) -> str:
        """The file that was downloaded, or the storages that were made."""
        names = [file.name for file in self.files if self.kind == "download" or file.suffix == ".safetensors"]
        return ", ".join(sorted(name.removesuffix(".safetensors") for name in names)) or "file index"

    @property
    def written(self) -> str:
        newest = max((file.stat().st_mtime for file in self.files), default=self.path.stat().st_mtime)
        return datetime.fromtimestamp(newest).strftime("%Y-%m-%d %H:%M")


def entries(root: Path) -> list[CacheFolder]:
    """Entries that lmstate put into the folder; anything else there is left out."""
    found = [("download", path) for path in _folders(root / "models", DOWNLOAD)]
    found += [("conversion", path) for path in _folders(root, CONVERSION)]
    return [CacheFolder(path, kind, tuple(each for each in path.rglob("*") if each.is_file())) for kind, path in found]


def _folders(root: Path, pattern: re.Pattern[str]) -> list[Path]:
    if not root.is_dir():
        return []
    return sorted(
        path for path in root.iterdir() if pattern.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    )


@cache.command("list")
def list_() -> None:
    """List downloads and conversions with model, size and age.

    \b
    Examples:
      lmstate cache list
      LMSTATE_CACHE=/data/lmstate lmstate cache list
    """
    from lmstate.checkpoints.hub import cache_dir

    found = entries(cache_dir())
    rows = [
        (each.path.name[:SHOWN], each.kind, each.model, each.content, size(each.nbytes), each.written) for each in found
    ]
    rows.append(("", "", "", "all", size(sum(each.nbytes for each in found)), ""))
    table(f"Cache: {cache_dir()}", ("name", "kind", "model", "what", "size", "written"), rows)


@cache.command("remove")
def remove(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Names or models from `list`, or a kind.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All downloads and conversions.")] = False,
) -> None:
    """Remove downloads and conversions.

    They are made again when the model is next loaded.

    NAME is the beginning of a name in `lmstate cache list`, a model for everything of that model, or `download` or
    `conversion` for everything of that kind.

    \b
    Examples:
      lmstate cache remove conversion
      lmstate cache remove 3f2a 90c1
      lmstate cache remove smollm2
      lmstate cache remove --all
    """
    from lmstate.checkpoints.hub import cache_dir

    if bool(names) == every:
        raise typer.BadParameter("give names from `lmstate cache list`, or --all")
    found = entries(cache_dir())
    chosen = found if every else list(dict.fromkeys(each for name in names or () for each in _named(found, name)))
    freed = sum(each.nbytes for each in chosen)
    for each in chosen:
        shutil.rmtree(each.path)
        print(f"removed {each.kind} {each.path.name[:SHOWN]}")
    print(f"{size(freed)} freed")


@cache.command("prune")
def prune() -> None:
    """Remove conversions without a model and broken downloads.

    A broken download is removed when it is a day old.

    \b
    Examples:
      lmstate cache prune
    """
    from lmstate.checkpoints.hub import cache_dir
    from lmstate.checkpoints.recorded import recorded_source

    def lasts(source: str | None) -> bool:
        return source is not None and Path(source).exists()

    made = [each.path for each in entries(cache_dir()) if each.kind == "conversion"]
    gone = [path for path in made if not lasts(recorded_source(path))]
    broken = [path for path in (cache_dir() / "models").glob("*/.fetch-*") if time() - path.stat().st_mtime > DAY]
    freed = 0
    for path in (*gone, *broken):
        freed += sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        shutil.rmtree(path)
        print(f"removed {path.relative_to(cache_dir())}")
    print(f"{size(freed)} freed")


def _named(found: list[CacheFolder], name: str) -> list[CacheFolder]:
    """The entries that a name stands for. Raises ValueError if there is none, or a beginning is not clear."""
    from lmstate.checkpoints.hub import name_of

    if name in ("download", "conversion"):
        return [each for each in found if each.kind == name]
    models = {name, name_of(Path(name).expanduser().absolute())}
    if of_model := [each for each in found if each.model in models]:
        return of_model
    fitting = [each for each in found if name and each.path.name.startswith(name)]
    if len(fitting) != 1:
        how = "no name begins" if not fitting else f"{len(fitting)} names begin"
        raise ValueError(f"{how} with {name!r} in the cache; `lmstate cache list` shows them; nothing was removed")
    return fitting
