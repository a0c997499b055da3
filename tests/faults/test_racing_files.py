"""A file that is replaced while it is read: a load gives one of the values that were saved, whole."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import torch

import lmstate
from tests.zoo import ours, text

LOADS = 150


def test_a_load_that_races_with_saves_returns_a_whole_snapshot(tmp_path: Path) -> None:
    model, path = ours("llama"), tmp_path / "row.lmstate"
    saved = []
    for length in (5, 60):
        state = model.new_state()
        model(text(length), state)
        saved.append(state.snapshot())
    saved.append(dataclasses.replace(saved[0], notes="x" * 5000))
    saved[0].save(path)
    done = threading.Event()

    def save() -> None:
        while not done.is_set():
            for each in saved:
                each.save(path)

    writer = threading.Thread(target=save)
    writer.start()
    try:
        for turn in range(LOADS):
            got = lmstate.Snapshot.load(path, mmap=turn % 2 == 0)
            (one,) = [each for each in saved if (each.tokens, each.notes) == (got.tokens, got.notes)]
            assert all(torch.equal(a[name], b[name]) for a, b in zip(one.layers, got.layers) for name in a)
    finally:
        done.set()
        writer.join()
