"""Snapshots on disk: the same value comes back, nothing else is believed, and a crash leaves a whole file."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lmstate
from lmstate.state.layer_file import write_layers
from tests.invariants.mirror import Fault, Mirror, close
from tests.zoo import CASES, ours, text


def taken(case: str, length: int = 37) -> tuple[Mirror, lmstate.Snapshot]:
    mirror = Mirror(ours(case))
    mirror.extend([text(length)[0].tolist()])
    return mirror, mirror.state.snapshot(0)


@pytest.mark.parametrize("case", CASES)
def test_saved_equals_restored(case: str, tmp_path: Path) -> None:
    mirror, snapshot = taken(case)
    path = tmp_path / "row.lmstate"
    snapshot.save(path)
    loaded = lmstate.Snapshot.load(path)
    assert (loaded.tokens, loaded.length, loaded.nbytes) == (snapshot.tokens, 37, snapshot.nbytes)
    assert (loaded.fingerprint, loaded.model) == (snapshot.fingerprint, snapshot.model)
    torch.testing.assert_close(loaded.logits, snapshot.logits, atol=0, rtol=0)
    other = Mirror(mirror.model, rows=2, rewind=0)
    other.extend([[4, 5], [6]])
    other.restore(1, loaded, mirror.rows[0])
    other.check()
    close(mirror.model([[], []], other.state)[1], mirror.expected(mirror.rows[0])[-1])
    assert os.listdir(tmp_path) == ["row.lmstate"], "no temporary file is left"


@pytest.mark.parametrize(("given", "kept"), [("smollm2", "smollm2"), ("who/what", "who/what"), ("", "")])
def test_a_snapshot_names_its_model_and_not_where_that_lies(
    given: str, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "my-model").mkdir()
    model = ours("llama")
    for name, told in ((given, kept), (str(folder), "my-model")):
        monkeypatch.setattr(model, "name", name)
        state = model.new_state()
        model([[1, 2, 3]], state)
        state.snapshot().save(tmp_path / "row")
        store = lmstate.SnapshotFolder(tmp_path / "store")
        store.save("row", state.snapshot())
        assert lmstate.Snapshot.load(tmp_path / "row").model == store.load("row").model == told


def test_another_model_is_refused_with_what_differs() -> None:
    _, snapshot = taken("llama")
    state = ours("qwen2").new_state()
    with pytest.raises(lmstate.SnapshotError, match="family is llama there and qwen2 here"):
        state.restore(0, snapshot)
    assert state.lengths == [0]
    wide = ours("llama").new_state(capacity=20)
    with pytest.raises(lmstate.CapacityError, match="37 tokens"):
        wide.restore(0, snapshot)


@pytest.mark.parametrize("case", ["llama"])
def test_a_snapshot_that_does_not_fit_changes_nothing(case: str) -> None:
    mirror, snapshot = taken(case)
    name, tensor = next(iter(snapshot.layers[-1].items()))
    wrong = [tensor[..., :-1], tensor.long(), tensor[None]]
    broken = [dataclasses.replace(snapshot, layers=(*snapshot.layers[:-1], {name: bad})) for bad in wrong]
    broken += [
        dataclasses.replace(snapshot, layers=snapshot.layers[:-1]),
        dataclasses.replace(snapshot, layers=(*snapshot.layers[:-1], {**snapshot.layers[-1], "more": tensor})),
        dataclasses.replace(snapshot, tokens=(*snapshot.tokens[:-1], 10_000)),
        dataclasses.replace(snapshot, logits=torch.zeros(5)),
        dataclasses.replace(snapshot, fingerprint="weights=other"),
        dataclasses.replace(snapshot, cached=20),
    ]
    for each in broken:
        with pytest.raises(lmstate.SnapshotError):
            mirror.state.restore(0, each)
        mirror.check()


def test_a_crash_while_saving_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, snapshot = taken("llama")
    path = tmp_path / "row.lmstate"
    snapshot.save(path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise Fault

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with pytest.raises(Fault):
                dataclasses.replace(snapshot, tokens=snapshot.tokens[::-1]).save(path)
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["row.lmstate"]


def test_missing_files_are_os_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        lmstate.Snapshot.load(tmp_path / "none.lmstate")
    with pytest.raises(OSError):
        taken("llama")[1].save(tmp_path / "no" / "folder.lmstate")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("saved") / "row.lmstate"
    taken("llama", 9)[1].save(path)
    return path.read_bytes()


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_mutated_files_raise_snapshot_errors_and_nothing_else(
    data: st.DataObject, saved: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = bytearray(saved)
    header = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        how = data.draw(st.sampled_from(["header", "header", "length", "anywhere", "cut", "grow"]))
        if how == "cut":
            del raw[data.draw(st.integers(0, len(raw))) :]
        elif how == "grow":
            raw += data.draw(st.binary(max_size=50))
        elif raw:
            most = {"header": min(header, len(raw)), "length": min(8, len(raw)), "anywhere": len(raw)}[how]
            raw[data.draw(st.integers(0, most - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "mutated.lmstate"
    path.write_bytes(raw)
    state = ours("llama").new_state()
    try:
        snapshot = lmstate.Snapshot.load(path)
        state.restore(0, snapshot)
    except lmstate.SnapshotError:
        assert state.lengths == [0]
        return
    assert state.lengths == [snapshot.length]
    assert ours("llama")([[3]], state).shape == (1, 99), "what was believed can be used"


@pytest.mark.parametrize("field", ["version", "format", "cached", "frequency_key", "layers", "fingerprint"])
@pytest.mark.parametrize("value", ["", "-1", "1e9", "99999999999999999999", "x" * 1000, "0"])
def test_lying_metadata_is_refused(field: str, value: str, tmp_path: Path, saved: bytes) -> None:
    path = tmp_path / "lying.lmstate"
    path.write_bytes(saved)
    size = int.from_bytes(saved[:8], "little")
    metadata = {**json.loads(saved[8 : 8 + size])["__metadata__"], field: value}
    if (field, value) == ("frequency_key", "0"):
        return  # that one is true
    from safetensors.torch import load_file

    write_layers(path, metadata, load_file(path))
    with pytest.raises(lmstate.SnapshotError):
        ours("llama").new_state().restore(0, lmstate.Snapshot.load(path))


def test_a_flipped_bit_anywhere_is_refused(tmp_path: Path, saved: bytes) -> None:
    path = tmp_path / "flipped.lmstate"
    for place in range(3, len(saved), max(1, len(saved) // 150)):
        path.write_bytes(saved[:place] + bytes([saved[place] ^ 1 << place % 8]) + saved[place + 1 :])
        for mmap in (False, True):
            with pytest.raises(lmstate.SnapshotError):
                lmstate.Snapshot.load(path, mmap=mmap)


def test_a_loaded_snapshot_is_no_part_of_its_file(tmp_path: Path) -> None:
    mirror, snapshot = taken("llama")
    path = tmp_path / "row.lmstate"
    snapshot.save(path)
    loaded, mapped = lmstate.Snapshot.load(path), lmstate.Snapshot.load(path, mmap=True)
    for one, other in zip(loaded.layers, mapped.layers):
        assert all(torch.equal(one[name], other[name]) for name in one)
    del mapped
    with path.open("r+b") as file:
        file.truncate(100)
    mirror.restore(0, loaded, mirror.rows[0])
    mirror.check()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for mmap in (False, True):
        with pytest.raises(lmstate.SnapshotError, match="not a regular file"):
            lmstate.Snapshot.load(tmp_path / "pipe", mmap=mmap)


@pytest.mark.parametrize("mmap", [False, True])
def test_a_folder_is_refused_by_its_name(tmp_path: Path, mmap: bool) -> None:
    with pytest.raises(IsADirectoryError) as caught:
        lmstate.Snapshot.load(tmp_path, mmap=mmap)
    assert caught.value.filename == str(tmp_path)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("shape", [[2**47, 2**47, 0], [0, *[2**47] * 7]])
def test_an_empty_tensor_of_impossible_extents_is_damage(shape: list[int], mmap: bool, tmp_path: Path) -> None:
    header = {"tokens": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}
    content = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(len(content).to_bytes(8, "little") + content)
    with pytest.raises(lmstate.SnapshotError, match="does not fill"):
        lmstate.Snapshot.load(tmp_path / "x", mmap=mmap)


@pytest.mark.parametrize("case", ["llama", "falcon_h1", "mamba2"])
def test_the_layers_of_a_snapshot_are_mappings(case: str) -> None:
    for layer in taken(case)[1].layers:
        assert "other" not in layer and layer.get("other") is None
        assert all(name in layer for name in layer)
