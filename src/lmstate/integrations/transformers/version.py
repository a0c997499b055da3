"""Whether the installed transformers is one that this package was written and tested for."""

from __future__ import annotations

from importlib import metadata

LEAST, BELOW = (5, 23), (6, 0)
ADVICE = 'install it with: pip install "lmstate[transformers]"'


def parse(version: str) -> tuple[int, int]:
    """Major and minor of a version such as 5.23.0.dev0. ValueError if there are none."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def check(version: str | None) -> None:
    """Raise ImportError unless `version` (None: not installed) is supported."""
    wanted = f"transformers >= {LEAST[0]}.{LEAST[1]}, < {BELOW[0]}"
    if version is None:
        raise ImportError(f"lmstate.integrations.transformers needs {wanted}, which is not installed; {ADVICE}")
    try:
        found = parse(version)
    except ValueError:
        found = (0, 0)
    if not LEAST <= found < BELOW:
        raise ImportError(f"lmstate.integrations.transformers needs {wanted}; {version} is installed; {ADVICE}")


def installed() -> str | None:
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return None
