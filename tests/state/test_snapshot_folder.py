"""A folder of snapshots: what they have in common is stored once, and nothing in it is trusted."""

from __future__ import annotations

import json
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lmstate import SnapshotError
from lmstate.state import snapshot_folder
from lmstate.state.snapshot import VERSION
from lmstate.state.snapshot_folder import PART_TOKENS, SnapshotFolder
from tests.zoo import ours, text


def ids(count: int, seed: int = 0) -> list[int]:
    return text(count, seed=seed)[0].tolist()


@pytest.mark.parametrize("case", ["llama", "mistral", "deepseek_v3", "falcon_h1", "qwen3_next-dense", "mamba2"])
def test_saved_in_a_folder_goes_on_as_if_it_never_left(case: str, tmp_path: Path) -> None:
    model, folder = ours(case), SnapshotFolder(tmp_path / "all")
    state = model.new_state()
    model([ids(2 * PART_TOKENS + 30)], state)
    folder.save("one", state.snapshot())
    loaded = SnapshotFolder(tmp_path / "all").load("one")
    assert (loaded.tokens, loaded.nbytes) == (state.snapshot().tokens, state.snapshot().nbytes)
    other = model.new_state()
    other.restore(0, loaded)
    assert torch.equal(model([[3, 4]], other), model([[3, 4]], state))


def test_a_common_prefix_is_stored_once(tmp_path: Path) -> None:
    model, folder = ours("llama"), SnapshotFolder(tmp_path)
    state = model.new_state()
    model([ids(8 * PART_TOKENS)], state)
    folder.save("first", state.snapshot())
    alone = folder.nbytes()
    for seed in range(4):
        state.rewind(0, 8 * PART_TOKENS - 5)
        model([ids(9, seed + 1)], state)
        folder.save(f"branch {seed}", state.snapshot())
    assert folder.nbytes() < 2 * alone
    assert folder.names() == ["branch 0", "branch 1", "branch 2", "branch 3", "first"]
    for seed in range(4):
        folder.remove(f"branch {seed}")
    assert folder.nbytes() == alone
    assert folder.load("first").tokens == tuple(ids(8 * PART_TOKENS))
    folder.remove("first")
    assert folder.nbytes() == 0 and folder.names() == []


def test_what_is_damaged_or_missing_is_said_and_not_believed(tmp_path: Path) -> None:
    model, folder = ours("llama"), SnapshotFolder(tmp_path)
    state = model.new_state()
    model([ids(PART_TOKENS + 10)], state)
    folder.save("one", state.snapshot())
    with pytest.raises(SnapshotError, match="no snapshot 'two'; there are: one"):
        folder.load("two")
    files = sorted(file for file in tmp_path.glob("parts/*/*"))
    for file in files:
        content = file.read_bytes()
        for place in (10, len(content) // 2, len(content) - 1):
            changed = bytearray(content)
            changed[place] ^= 1
            file.write_bytes(changed)
            with pytest.raises(SnapshotError):
                folder.load("one")
        file.write_bytes(content)
    files[0].rename(files[0].with_name("elsewhere"))
    files[1].rename(files[0])  # sound in itself, under the name of another
    with pytest.raises(SnapshotError):
        folder.load("one")
    for manifest in ("{}", "[", '{"tokens": "x"}', '{"parts": ["../../etc/passwd"], "rest": "x"}'):
        with sqlite3.connect(tmp_path / "index.sqlite3") as index:
            index.execute("update snapshots set manifest = ?", (manifest,))
        with pytest.raises(SnapshotError, match="damaged"):
            folder.load("one")


def test_a_damaged_part_is_set_aside_and_the_next_save_writes_it_again(tmp_path: Path) -> None:
    model, folder = ours("llama"), SnapshotFolder(tmp_path)
    state = model.new_state()
    model([ids(PART_TOKENS + 10)], state)
    snapshot = state.snapshot()
    folder.save("one", snapshot)
    for file in tmp_path.glob("parts/*/*"):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(SnapshotError, match="damaged"):
            folder.load("one")
        assert (tmp_path / "damaged" / file.name).is_file() and not file.exists()
        folder.save("one", snapshot)
        assert file.read_bytes() == content
    assert folder.load("one").tokens == snapshot.tokens


def test_a_part_of_another_version_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = ours("llama"), SnapshotFolder(tmp_path)
    state = model.new_state()
    model([ids(5)], state)
    with monkeypatch.context() as patch:
        patch.setattr(snapshot_folder, "VERSION", 2)
        folder.save("one", state.snapshot())
    files = set(tmp_path.glob("parts/*/*"))
    with pytest.raises(SnapshotError, match="of version '2'; this lmstate reads version 1"):
        folder.load("one")
    assert files == set(tmp_path.glob("parts/*/*")) and not (tmp_path / "damaged").exists()


def test_what_is_no_snapshot_is_refused(tmp_path: Path) -> None:
    model, folder = ours("llama"), SnapshotFolder(tmp_path)
    state = model.new_state()
    model([ids(3)], state)
    for name, given in (("one", "path"), (state.snapshot(), "one"), (None, state.snapshot())):
        with pytest.raises(SnapshotError, match="a name and a snapshot"):
            folder.save(name, given)  # type: ignore[arg-type]
    assert folder.names() == []


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.sqlite3").write_bytes(b"no index at all" * 100)
    with pytest.raises(OSError, match="index"):
        SnapshotFolder(tmp_path)


@pytest.mark.parametrize(
    "schema",
    [
        "create view snapshots as with recursive n(x) as (select 1 union all select x + 1 from n) "
        "select 'one' as name, max(x) as manifest, 1 as nbytes from n",
        "create table snapshots (name text primary key, nbytes integer, manifest text as (hex(zeroblob(1 << 29))))",
        "create trigger t after insert on snapshots begin delete from snapshots; end",
    ],
)
def test_an_index_that_would_compute_is_refused(schema: str, tmp_path: Path) -> None:
    if "trigger" in schema:
        SnapshotFolder(tmp_path)
    with sqlite3.connect(tmp_path / "index.sqlite3") as index:
        index.execute(schema)
    index.close()
    with pytest.raises(OSError, match="views or triggers"):
        SnapshotFolder(tmp_path)


def test_nothing_is_removed_through_a_link(tmp_path: Path) -> None:
    model = ours("llama")
    state = model.new_state()
    model([ids(PART_TOKENS)], state)
    own, other = SnapshotFolder(tmp_path / "own"), SnapshotFolder(tmp_path / "other")
    own.save("one", state.snapshot())
    other.save("gone", state.snapshot())
    other.remove("gone")
    (tmp_path / "other" / "parts").rename(tmp_path / "empty")
    (tmp_path / "other" / "parts").symlink_to(tmp_path / "own" / "parts")
    other.save("two", model.new_state().snapshot())
    with pytest.raises(OSError, match="link"):
        other.remove("two")
    assert other.names() == ["two"]
    assert own.load("one").tokens == state.snapshot().tokens


def test_numbers_that_do_not_fit_each_other_are_refused_before_a_part_is_read(tmp_path: Path) -> None:
    model, folder = ours("llama"), SnapshotFolder(tmp_path)
    state = model.new_state()
    model([ids(PART_TOKENS + 3)], state)
    folder.save("one", state.snapshot())
    with sqlite3.connect(tmp_path / "index.sqlite3") as index:
        told = json.loads(index.execute("select manifest from snapshots").fetchone()[0])
        long, short = told["parts"] * 1000, told["parts"][:1]
        for change in ({"parts": long}, {"cached": 10**9}, {"cached": -1}, {"parts": short}):
            index.execute("update snapshots set manifest = ?", (json.dumps({**told, **change}),))
            index.commit()
            with pytest.raises(SnapshotError, match="its record of"):
                folder.load("one")
    index.close()


def test_a_load_that_a_save_overtakes_returns_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder, saved = ours("llama"), SnapshotFolder(tmp_path), []
    for seed in (0, 1):
        state = model.new_state()
        model([ids(PART_TOKENS + 20, seed)], state)
        saved.append(state.snapshot())
    folder.save("one", saved[0])
    folder.save("other", model.new_state().snapshot())
    read, others = SnapshotFolder._read, ["other"]

    def overtaken(self: SnapshotFolder, digest: str) -> dict[str, torch.Tensor]:
        while others:
            folder.save("one", saved[1])
            folder.remove(others.pop())  # and with it what "one" was made of before
        return read(self, digest)

    monkeypatch.setattr(SnapshotFolder, "_read", overtaken)
    got = folder.load("one")
    assert got.tokens == saved[1].tokens
    assert all(torch.equal(a[name], b[name]) for a, b in zip(saved[1].layers, got.layers) for name in a)


def test_saving_and_removing_at_once_loses_no_part(tmp_path: Path) -> None:
    """Two writers whose snapshots have parts in common, one of which takes its own away again each time."""
    model = ours("llama")
    state = model.new_state()
    model([ids(PART_TOKENS + 10)], state)
    snapshot = state.snapshot()

    def come_and_go(name: str) -> None:
        folder = SnapshotFolder(tmp_path)
        for _ in range(15):
            folder.save(name, snapshot)
            folder.load(name)
            folder.remove(name)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(come_and_go, name) for name in ("one", "two")]:
            done.result()
    assert SnapshotFolder(tmp_path).nbytes() == 0


def test_a_snapshot_of_another_version_is_named_as_such(tmp_path: Path) -> None:
    model, folder = ours("llama"), SnapshotFolder(tmp_path)
    state = model.new_state()
    model([ids(5)], state)
    folder.save("one", state.snapshot())
    with sqlite3.connect(tmp_path / "index.sqlite3") as index:
        (text,) = index.execute("select manifest from snapshots").fetchone()
    with sqlite3.connect(tmp_path / "index.sqlite3") as index:
        index.execute("update snapshots set manifest = ?", (json.dumps({**json.loads(text), "version": VERSION + 1}),))
    with pytest.raises(SnapshotError, match=f"version {VERSION + 1}; this lmstate reads version {VERSION}"):
        folder.load("one")
