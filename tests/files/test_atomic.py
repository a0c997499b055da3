"""Atomic writes: the old file or the new one, where it was named, as readable as before, nothing left over."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lmstate.files.atomic import STALE_SECONDS, atomic_write
from lmstate.state.snapshot import Snapshot

pytestmark = pytest.mark.skipif(os.name != "posix", reason="links, modes and pipes of POSIX")


def write(path: Path, text: str) -> None:
    with atomic_write(path) as part:
        part.write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "there" / "target", tmp_path / "link"
    target.parent.mkdir()
    link.symlink_to("there/target")
    for text in ("first", "second"):  # one that does not exist yet, and one that does
        write(link, text)
        assert link.is_symlink() and target.read_text() == text
    assert names(tmp_path) == ["link", "there"] and names(target.parent) == ["target"]


def test_the_mode_follows_the_umask_and_that_of_a_replaced_file_stays(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "new", "x")
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640
        (tmp_path / "new").chmod(0o604)
        write(tmp_path / "new", "y")
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o604
    finally:
        os.umask(before)


def test_pipes_devices_and_folders_are_refused_and_stay(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "pipe", tmp_path / "folder", Path("/dev/null")):
        before = path.stat()
        with pytest.raises(OSError, match=str(path)):
            write(path, "x")
        assert path.stat().st_ino == before.st_ino and path.stat().st_mode == before.st_mode
    assert names(tmp_path) == ["folder", "pipe"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "file", "old")
    with pytest.raises(KeyboardInterrupt), atomic_write(tmp_path / "file") as part:
        part.write_text("new")
        raise KeyboardInterrupt
    assert names(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "old"


def test_an_error_names_the_file_that_was_asked_for_and_not_the_part(tmp_path: Path) -> None:
    write(tmp_path / "file", "x")
    for path in (tmp_path / "nowhere" / "new", tmp_path / "file" / "new"):
        with pytest.raises(OSError) as caught:
            write(path, "x")
        assert caught.value.filename == str(path)
    with pytest.raises(FileNotFoundError) as caught, atomic_write(tmp_path / "file"):
        (tmp_path / "other").read_text()
    assert caught.value.filename == str(tmp_path / "other") and names(tmp_path) == ["file"]


def test_what_a_killed_write_left_is_removed_by_the_next_and_that_of_a_running_one_is_not(tmp_path: Path) -> None:
    killed = (
        "import os, pathlib, sys\n"
        "from lmstate.files.atomic import atomic_write\n"
        "with atomic_write(pathlib.Path(sys.argv[1])) as part:\n"
        "    part.write_text('half')\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", killed, str(tmp_path / "file")], env={**os.environ}, check=False)
    assert done.returncode == -9 and len(names(tmp_path)) == 1
    (left,) = tmp_path.iterdir()
    write(tmp_path / "file", "soon after")
    assert left.exists()
    os.utime(left, (time.time() - STALE_SECONDS - 1,) * 2)
    (tmp_path / ".file.backup.part").write_text("a file of somebody else")
    with atomic_write(tmp_path / "file") as other:  # this process runs
        assert names(tmp_path) == sorted([other.name, ".file.backup.part", "file"])
        write(tmp_path / "file", "inner")
        assert other.exists()
        other.write_text("outer")
    assert names(tmp_path) == [".file.backup.part", "file"] and (tmp_path / "file").read_text() == "outer"


def test_a_full_disk_is_an_os_error_and_leaves_the_old_file(tmp_path: Path) -> None:
    write(tmp_path / "file", "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError) as caught:
            write(tmp_path / "file", "new" * 10_000)
        assert caught.value.filename == str(tmp_path / "file")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "old"


def test_a_snapshot_that_finds_the_disk_full_raises_os_error_and_leaves_the_older_one(tmp_path: Path) -> None:
    snapshot = Snapshot((1, 2), 0, 0, torch.zeros(4), (), "fingerprint", "")
    snapshot.save(tmp_path / "file")
    larger = Snapshot((1, 2), 0, 0, torch.zeros(10_000), (), "fingerprint", "")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError):  # the chat goes on after that
            larger.save(tmp_path / "file")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["file"] and Snapshot.load(tmp_path / "file").tokens == (1, 2)
