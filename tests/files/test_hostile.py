"""Files from outside that ask for what no file needs: each ends in an error of ours, and soon."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import zlib
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Library
from tokenizers import models

import lmstate
from lmstate.checkpoints.huggingface.directory import tokenizer_files
from lmstate.engine.prefix.digests import packed
from lmstate.engine.session_record import MARKS, UNDOS, Record
from lmstate.engine.tiers.folder import FolderTier
from lmstate.engine.tiers.tier import Entry
from lmstate.errors import ModelError, SnapshotError
from lmstate.files.json_object import parse_object
from lmstate.state.snapshot_folder import SnapshotFolder
from lmstate.text.tokenizer import Tokenizer, TokenizerFiles
from tests.training.small import saved, theirs
from tests.zoo import ours

TEN = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [TEN] * 8}}, "as long"),
        ({"decoder": {"type": "Sequence", "decoders": [TEN] * 12}}, "as long"),
        ({"normalizer": {"type": "Prepend", "prepend": ""}}, "prepends an empty text"),
        ({"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}}, "replaces an empty text"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "cannot encode"),
        ({"decoder": {"type": "Strip", "content": "a", "start": 3, "stop": 3}}, "cannot decode"),
        ({"model": {"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "[UNK]"}}, "cannot encode"),
    ],
)
def test_a_tokenizer_ends_in_an_error_of_ours(changes: dict[str, Any], said: str) -> None:
    whole = {**json.loads(Library(models.BPE({"a": 0}, [])).to_str()), **changes}
    with pytest.raises(ModelError, match=said):
        tokenizer = Tokenizer(TokenizerFiles(json.dumps(whole)))
        tokenizer.decode(tokenizer.encode("a" * 40))


def test_files_beside_a_tokenizer_are_read_as_what_they_should_be(tmp_path: Path) -> None:
    Library(models.BPE({"a": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="is not UTF-8"):
        tokenizer_files(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    os.mkfifo(tmp_path / "chat_template.jinja")
    found = tokenizer_files(tmp_path)
    assert found is not None and "chat_template" not in found.settings, "a pipe is no file"
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"name": ["x"], "template": "y"}]}')
    found = tokenizer_files(tmp_path)
    assert found is not None and not Tokenizer(found).has_chat_template
    for text in ('{"eos_token": "\\ud800"}', b'{"a": ["\\uDFff"]}'):
        with pytest.raises(ModelError, match="half a surrogate pair"):
            parse_object(text, "it")
    assert parse_object('{"a": "\\ud83d\\ude00"}', "it") == {"a": "\N{GRINNING FACE}"}


def test_bytes_in_the_place_of_floats_are_refused_whatever_the_config_says() -> None:
    with saved(theirs("llama")) as folder:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
        tensors = load_file(folder / "model.safetensors")
        lmstate.load(folder, weights="float32")
        name = "model.layers.0.self_attn.q_proj.weight"
        for dtype in (torch.uint8, torch.int64, torch.float64):
            save_file({**tensors, name: tensors[name].to(dtype)}, folder / "model.safetensors")
            with pytest.raises(ModelError, match="numbers"):
                lmstate.load(folder, weights="float32")


def test_a_record_of_a_session_has_no_more_turns_and_marks_than_one_of_ours() -> None:
    messages = [{"role": "assistant", "content": "x"}] * 500
    told = {"messages": messages, "turns": [[3, n] for n in range(500)], "marks": [[3, n] for n in range(500)]}
    record = Record.from_json([1, 2, 3], json.dumps(told))
    assert (len(record.turns), len(record.marks)) == (UNDOS, MARKS)
    assert record.turns[-1].messages == 499


@pytest.mark.parametrize("kind", [SnapshotFolder, lambda path: FolderTier(path, "ns", 1 << 20)])
def test_an_index_whose_schema_is_no_text_is_no_index(kind: Any, tmp_path: Path) -> None:
    made = kind(tmp_path)
    if isinstance(made, FolderTier):
        made.close()
    with sqlite3.connect(tmp_path / "index.sqlite3") as index:
        index.execute("pragma journal_mode=delete")
    index.close()
    file = tmp_path / "index.sqlite3"
    file.write_bytes(re.sub(rb"CREATE TABLE .", b"CREATE TABLE \xff", file.read_bytes()))
    if isinstance(made, FolderTier):  # of prefixes, which can be computed again
        kind(tmp_path).close()
        assert len(list((tmp_path / "damaged").glob("*-index.sqlite3"))) == 1
    else:
        with pytest.raises(OSError, match="not usable as index"):
            kind(tmp_path)


def test_texts_of_an_index_and_files_of_a_store_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmstate.engine.tiers.folder.MOST_TEXTS", 3 * 4 * 1000)
    FolderTier(tmp_path, "ns", 1 << 20).close()
    entries = [Entry("run", 0, 0, array("q", [n, *[0] * 999])) for n in range(16)]
    keys = [entry.key("ns") for entry in entries]
    with sqlite3.connect(tmp_path / "index.sqlite3") as index:
        for key, entry in zip(keys, entries):
            blob = zlib.compress(packed(entry.tokens))
            values = ("ns", key, "run", 0, 0, blob, 2, 1 << 40, "x", 0.0)
            index.execute(f"insert into entries values ({', '.join('?' * 10)})", values)
    index.close()
    tier = FolderTier(tmp_path, "ns", 1 << 20)
    try:
        assert len(tier.all_entries()) == 4
        file = tier._file(keys[0])
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as sparse:
            sparse.truncate(1 << 40)
        with pytest.raises(SnapshotError, match=r"larger than the \d+ bytes that there are for it"):
            tier.read(keys[0])
    finally:
        tier.close()


def test_a_part_stands_for_its_own_positions(tmp_path: Path) -> None:
    model, folder = ours("llama"), SnapshotFolder(tmp_path)
    state = model.new_state()
    model([[1, 2, 3] * 200], state)
    folder.save("a", state.snapshot())
    with sqlite3.connect(tmp_path / "index.sqlite3") as index:
        ((text,),) = index.execute("select manifest from snapshots").fetchall()
        told = json.loads(text)
        told["parts"] = [told["parts"][-1]] * len(told["parts"])
        index.execute("update snapshots set manifest = ?", (json.dumps(told),))
    index.close()
    with pytest.raises(SnapshotError, match="of other positions"):
        folder.load("a")
