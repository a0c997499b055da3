"""`lmstate models`: what can be named, what can be run, what is on the disk already."""

from __future__ import annotations

from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill

from lmstate.cli.output import size, table


def models() -> None:
    """List aliases, supported families and the cache.

    \b
    Examples:
      lmstate models
      LMSTATE_CACHE=/data/lmstate lmstate models
    """
    from lmstate.checkpoints.hub import ALIASES, cache_dir
    from lmstate.models.families import FAMILIES

    cache = cache_dir()
    rows = []
    for name, alias in ALIASES.items():
        fetched = any((cache / "models").rglob(Path(alias.member).name))
        where = "in the cache" if fetched else "fetched when first used"
        rows.append((name, alias.description, size(alias.nbytes), where))
    table("Aliases", ("name", "model", "size", ""), rows)
    print()
    print("Families that run from a directory, a .gguf file or the Hub")
    print(fill(", ".join(sorted(FAMILIES)), width=min(100, get_terminal_size().columns), break_on_hyphens=False))
    print()
    table(f"Cache: {cache}", ("", ""), _held(cache))


def _held(cache: Path) -> list[tuple[str, str]]:
    """The bytes of downloads and of conversions."""
    totals = {"downloads": 0, "conversions": 0}
    for path in cache.rglob("*"):
        if path.is_file() and not path.is_symlink():
            part = path.relative_to(cache).parts[0]
            totals["downloads" if part == "models" else "conversions"] += path.stat().st_size
    return [(name, size(total)) for name, total in totals.items()]
