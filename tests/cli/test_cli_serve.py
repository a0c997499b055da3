"""`lmstate serve`: what its options ask of the engine, and what is refused before a model is loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import lmstate
from lmstate.checkpoints.hub import served_name
from lmstate.cli.app import app
from lmstate.cli.serve import banner
from lmstate.serve import Settings
from tests.cli.test_cli_branches import talking


def test_options_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def engine(model: lmstate.Model, **given: Any) -> None:
        seen.update(given)
        raise OSError("far enough")

    monkeypatch.setattr(lmstate, "load", lambda name, weights, **_: talking("llama"), raising=False)
    monkeypatch.setattr("lmstate.engine.Engine", engine)
    options = (
        "--rows 3 --queue 9 --memory 1MiB --stall 7 --max-itl 40 --kv-bits 4 --carries 8 --store redis://localhost/5 "
        "--draft none"
    )
    result = CliRunner().invoke(app, ["serve", "m", "--port", "0", "--threads", "1", *options.split()])
    assert result.exit_code == 1 and "far enough" in result.stderr
    assert seen == {
        "rows": 3, "queue": 9, "memory": 2**20, "stall": 7.0, "max_itl": 40.0, "kv": lmstate.kv.Quantized(4),
        "carries": 8, "store": "redis://localhost/5", "draft": "none",
    }  # fmt: skip


@pytest.mark.parametrize(
    "option", ["--stall 1", "--stall nan", "--max-itl 0", "--kv-bits 5", "--carries 4", "--memory many"]
)
def test_wrong_usage_loads_nothing(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmstate, "load", lambda name, weights, **_: pytest.fail("loaded for nothing"), raising=False)
    result = CliRunner().invoke(app, ["serve", "m", "--port", "0", *option.split()])
    assert result.exit_code == 2 and option.split()[1] in result.stderr


@pytest.mark.parametrize(
    ("store", "said"),
    [
        ("file/x", "cannot be made: "),
        ("file", "is a file; name a folder"),
        ("", "name a folder or a URL"),
        ("locked/x", "may not read and write"),
        ("nonsense://x", "obstore says"),
        ("file:///proc/nowhere", "obstore says: No such file or directory"),
    ],
)
def test_a_store_that_cannot_be_opened_loads_nothing(
    store: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "locked").mkdir()
    locked = str(tmp_path / "locked")
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != locked)  # who runs this may be root
    monkeypatch.setattr(lmstate, "load", lambda name, weights, **_: pytest.fail("loaded for nothing"), raising=False)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["serve", "m", "--port", "0", "--store", store])
    assert result.exit_code == 1 and said in result.stderr, result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "locked"]


def test_the_command_that_is_shown_has_the_key_that_is_needed() -> None:
    with_keys, without = (banner(Settings("m", api_keys=keys), 8080, "8 rows") for keys in (("secret",), ()))
    assert "curl http://127.0.0.1:8080/v1/chat/completions -H 'Authorization: Bearer YOUR_KEY' -d '{" in with_keys
    assert "curl http://127.0.0.1:8080/v1/chat/completions -d '{" in without


def test_the_name_of_a_model_does_not_tell_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gguf").touch()
    monkeypatch.chdir(tmp_path)
    for given in (f"{tmp_path}/a.gguf", "a.gguf", "./a.gguf"):
        assert served_name(given) == "a.gguf"
    assert served_name(str(tmp_path)) == served_name(".") == tmp_path.name
    (tmp_path / "b.gguf").symlink_to("a.gguf")  # as the Hub's cache has its files
    assert served_name("b.gguf") == "b.gguf"
    assert served_name("organization/name") == "organization/name"
