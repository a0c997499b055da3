"""`lmstate pull`, `list`, `rm`, `run` and `cache prune`, with a cache of the Hub that was made by hand."""

from __future__ import annotations

import os
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.utils import _cache_manager
from typer.testing import CliRunner

from lmstate.cli import local
from lmstate.cli.app import app
from tests.files import ggufs
from tests.generation.fake_model import FakeModel


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the Hub with two repositories, and none of lmstate's own."""
    monkeypatch.setenv("LMSTATE_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(_cache_manager, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def offline(name: str, revision: str | None) -> None:
        raise huggingface_hub.errors.OfflineModeIsEnabled("no network")

    monkeypatch.setattr(huggingface_hub, "list_repo_files", offline)
    for repository, name, nbytes in (
        ("who--what", "a-Q4_K_M.gguf", 2048),
        ("who--what", "a-Q8_0.gguf", 4096),
        ("who--folder", "model.safetensors", 512),
        ("who--folder", "config.json", 512),
    ):
        folder = tmp_path / "hub" / f"models--{repository}"
        blob, pointer = folder / "blobs" / name[::-1], folder / "snapshots" / "c0ffee" / name
        for path in (blob, pointer):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(b"x" * nbytes)
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    return tmp_path / "hub"


def lmstate_(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout + result.stderr


def listed() -> list[list[str]]:
    return [line.split()[:3] for line in lmstate_("list")[1].splitlines()[2:]]


def test_models_that_were_downloaded_are_listed_and_removed_one_by_one(hub: Path) -> None:
    q4 = ["who/what/a-Q4_K_M.gguf", "2", "KiB"]
    assert listed() == [["who/folder", "1", "KiB"], q4, ["who/what/a-Q8_0.gguf", "4", "KiB"]]
    code, told = lmstate_("rm", "who/what/a-Q8_0.gguf", "nothing")
    assert code == 1 and "no model 'nothing'" in told and len(listed()) == 3
    assert lmstate_("rm", "who/what/a-Q8_0.gguf", "who/folder") == (
        0, "removed who/what/a-Q8_0.gguf\nremoved who/folder\n5 KiB freed\n",
    )  # fmt: skip
    assert listed() == [q4]
    left = [path.name for path in hub.rglob("*") if path.is_file()]
    assert sorted(left) == sorted(["a-Q4_K_M.gguf", "a-Q4_K_M.gguf"[::-1]])


def test_a_file_that_the_cache_only_points_to_is_not_removed(hub: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.gguf").write_bytes(b"x")
    (hub / "models--who--what" / "snapshots" / "c0ffee" / "mine.gguf").symlink_to(tmp_path / "mine.gguf")
    assert lmstate_("rm", "who/what/mine.gguf")[0] == 0
    assert (tmp_path / "mine.gguf").exists() and len(listed()) == 3


def test_without_network_a_model_that_was_downloaded_is_pulled_by_its_quantization(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = hub / "models--who--what" / "snapshots" / "c0ffee"
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repository, name, revision: str(there / name))
    assert lmstate_("pull", "who/what:Q4_K_M") == (
        0, f"who/what/a-Q4_K_M.gguf is at {there / 'a-Q4_K_M.gguf'}\n",
    )  # fmt: skip
    code, told = lmstate_("pull", "who/other:Q4_K_M")
    assert code == 1 and "'who/other' is not in the Hub's cache and the Hub cannot be reached" in told


def test_run_answers_a_prompt_and_talks_without_one(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    code, told = lmstate_("run", "m", "a", "river")
    assert code == 0 and told.startswith("You said a river.")
    talked: list[object] = []
    monkeypatch.setattr(local.sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr(local, "chat", lambda model, **given: talked.append((model, given["system"])))
    local.run("m", system="Be short.")
    assert talked == [("m", "Be short.")]


def test_pruning_removes_what_no_model_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmstate.checkpoints.open import open_cached

    cache = tmp_path / "own"
    monkeypatch.setenv("LMSTATE_CACHE", str(cache))
    kept, gone = (ggufs.write(tmp_path / name, tensors=ggufs.llama_tensors()) for name in ("kept.gguf", "gone.gguf"))
    for path in (kept, gone):
        open_cached(path, cache)
    gone.unlink()
    old, new = (cache / "models" / ("a" * 16) / f".fetch-{name}" for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    code, told = lmstate_("cache", "prune")
    assert code == 0 and told.count("removed") == 2 and not old.exists() and new.exists()
    assert lmstate_("cache", "prune") == (0, "0 B freed\n")
    assert str(kept) in lmstate_("cache", "list")[1]


@pytest.mark.parametrize("url", ["ftp://there", "http://127.0.0.1:1"])
def test_a_server_that_does_not_answer_is_told(url: str) -> None:
    code, told = lmstate_("ps", "--url", url)
    assert code == 1 and url in told


@pytest.mark.parametrize(
    ("expires", "shown"), [("9999-12-31T00:00:00+00:00", "forever"), ("2026-05-04T10:30:00+00:00", "2026-05-0")]
)
def test_models_in_a_server_are_told_with_the_time_when_they_go(
    monkeypatch: pytest.MonkeyPatch, expires: str, shown: str
) -> None:
    loaded = {"name": "m:latest", "size": 2**20, "context_length": 512, "expires_at": expires}
    monkeypatch.setattr(local, "asked", lambda url: {"models": [loaded]})
    code, told = lmstate_("ps")
    assert code == 0 and told.splitlines()[-1].split("  ")[-1].strip().startswith(shown)
