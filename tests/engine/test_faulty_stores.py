"""Stores that are slow, fail, are full, cut, flip a byte, deny what they have or lose a lock: no turn is lost."""

from __future__ import annotations

import errno
import random
import time
from contextlib import suppress

import pytest

import lmstate
from lmstate.engine import SessionMoved, StoreUnreachable
from lmstate.engine.tiers.shared import SharedTier
from tests.engine.alone import alone
from tests.engine.faults import retry_at_once
from tests.engine.test_shared_tiers import Memory
from tests.zoo import ours

FAULTS = ("delays", "fails", "fails late", "is full", "cuts", "flips", "denies", "loses the lock")
TURNS = 16


class Faulty(Memory):
    """One of `FAULTS` befalls about every third call, but no two calls of a kind after each other."""

    def __init__(self, fault: str, seed: int) -> None:
        super().__init__()
        self.fault, self.dice = fault, random.Random(seed)
        self.on, self.befell = False, 0
        self.spared: set[str] = set()

    def befalls(self, call: str) -> bool:
        if not self.on or call in self.spared or self.dice.random() > 1 / 3:
            self.spared.discard(call)
            return False
        self.spared.add(call)
        self.befell += 1
        return True

    def before(self, call: str, *, writes: bool = False) -> bool:
        """Whether the call is to be spoilt; some faults befall it at once."""
        spoilt = self.befalls(call)
        if spoilt and self.fault == "delays":
            time.sleep(0.02)
        if spoilt and self.fault == "fails":
            raise OSError("the store is away")
        if spoilt and self.fault == "is full" and writes:
            raise OSError(errno.ENOSPC, "no space left")
        return spoilt

    def spoil(self, data: bytes, *, spoilt: bool) -> bytes:
        if not spoilt or not data:
            return data
        at = self.dice.randrange(1, len(data))  # cut to nothing, a record looks like that of a closed session
        if self.fault == "cuts":
            return data[:at]
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if self.fault == "flips" else data

    def get(self, name: str, most: int) -> bytes | None:
        spoilt = self.before("get")
        found = super().get(name, most)
        if found is None or (spoilt and self.fault == "denies"):
            return None
        return self.spoil(found, spoilt=spoilt)

    def put(self, name: str, data: bytes) -> None:
        spoilt = self.before("put", writes=True)
        super().put(name, data)
        if spoilt and self.fault == "fails late":
            raise OSError("no answer came")

    def names(self, prefix: str) -> list[str]:
        return [] if self.before("names") and self.fault == "denies" else super().names(prefix)

    def read_record(self, name: str, most: int) -> tuple[int, bytes] | None:
        spoilt = self.before("read_record")
        found = super().read_record(name, most)
        if found is None or (spoilt and self.fault == "denies"):
            return None
        return found[0], self.spoil(found[1], spoilt=spoilt)

    def commit_record(self, name: str, data: bytes, generation: int) -> bool:
        spoilt = self.before("commit_record", writes=True)
        if spoilt and self.fault == "loses the lock":
            return False
        stored = super().commit_record(name, data, generation)
        if spoilt and self.fault == "fails late":
            raise OSError("no answer came")
        return stored


@pytest.mark.parametrize("fault", FAULTS)
def test_each_confirmed_turn_is_there_once_and_each_answer_right(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    retry_at_once(monkeypatch)
    model, blobs = ours("llama"), Faulty(fault, FAULTS.index(fault))
    confirmed: list[int] = []
    with (
        lmstate.Engine(model, store=SharedTier(blobs, "one")) as here,
        lmstate.Engine(model, store=SharedTier(blobs, "one")) as there,
    ):
        blobs.on = True
        for turn in range(TURNS):
            engine = blobs.dice.choice((here, there))
            with suppress(SessionMoved, StoreUnreachable):
                told = engine.session("one").send([turn], max_new_tokens=1, ignore_eos=True).result(600)
                confirmed += [turn] if told.stored else []
        blobs.on = False
    with lmstate.Engine(model, store=SharedTier(blobs, "one")) as engine:
        tokens = engine.session("one").tokens
        assert engine.sessions() == ["one"]
    assert blobs.befell > TURNS / 2 and len(confirmed) > TURNS / 4
    turns = tokens[::2]
    assert turns == sorted(set(turns)), "a turn is there twice, or not in its place"
    assert set(confirmed) <= set(turns), "a confirmed turn is lost"
    for at in range(1, len(tokens), 2):
        assert alone(model, tokens[:at], 1, ends=frozenset())[0] == [tokens[at]]
