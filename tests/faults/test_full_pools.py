"""A pool that is full at any block of an operation: it is refused whole, and can be done once there is room."""

from __future__ import annotations

import copy
from itertools import count

import pytest

import lmstate
from lmstate.errors import CapacityError
from lmstate.state.blocks import BlockPool
from tests.faults.harness import KINDS, OPERATIONS, Record, applies, draft, prepared
from tests.zoo import text


def restore_tensors(model: lmstate.Model, state: lmstate.State) -> None:
    """As from a file: of blocks that are made anew."""
    state.restore(0, copied(state.snapshot(1)))


def copied(snapshot: lmstate.Snapshot) -> lmstate.Snapshot:
    layers = tuple({name: tensor.clone() for name, tensor in layer.items()} for layer in snapshot.layers)
    return lmstate.Snapshot(
        snapshot.tokens, snapshot.cached, snapshot.frequency_key, snapshot.logits, layers, snapshot.fingerprint
    )


def tree(model: lmstate.Model, state: lmstate.State) -> None:
    model([[5, 6, 7], [8]], state, logits="all", commit=False, parents=[[-1, 0, 0], [-1]])
    state.commit_path([[0, 2], [0]])


MORE = {
    **{
        name: OPERATIONS[name]
        for name in ("decode", "idle row", "commit some", "rewind far", "fork", "restore", "drop")
    },
    "long prompt": lambda model, state: model([text(150, seed=3)[0].tolist(), [1]], state),
    "backlog": lambda model, state: (state.rewind(0, 9), model([[5], []], state)),
    "restore tensors": restore_tensors,
    "add tensors": lambda model, state: state.add(copied(state.snapshot(1))),
    "tree": tree,
}
CASES = [(kind, name) for kind in KINDS for name in MORE if applies(kind, name) and "static" not in kind]


@pytest.mark.parametrize("kind, operation", CASES)
def test_a_pool_that_is_full_at_any_block_changes_nothing(kind: str, operation: str) -> None:
    pool = BlockPool()
    model, state = prepared(kind, pool=pool)
    if operation.startswith("commit"):
        draft(model, state)
    done = copy.deepcopy(state)
    MORE[operation](model, done)
    before, after, rows = Record(model, state), Record(model, done), state.rows
    del done
    sizes = {block.nbytes for block in state.blocks()}
    for spare in count() if sizes else ():
        twin = copy.deepcopy(state)
        held = pool.nbytes
        pool.limit = held + spare * min(sizes)
        try:
            MORE[operation](model, twin)
            return
        except CapacityError:
            pass
        finally:
            assert pool.nbytes <= pool.limit
            pool.limit = None
        if operation != "backlog":
            assert pool.nbytes == held and twin.rows == rows and Record(model, twin) == before
        MORE[operation](model, twin)  # and it can still be done
        assert Record(model, twin) == after
        del twin
        assert spare < 200
