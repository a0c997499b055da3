"""All that can happen to a state happens on every rank: each method of it is in the table, or has its own command."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import lmstate
from lmstate.distributed.calls import CALLS, listed
from lmstate.distributed.follower import COMMANDS
from lmstate.distributed.mirror import MirroredState
from lmstate.distributed.model import ParallelModel

SOURCE = Path(lmstate.distributed.__path__[0])
READS = {
    "rewind_cost", "can_drop", "memory", "last_logits", "in_layers", "static_tensors", "step_room", "tokens", "source",
    "media", "kept", "blocks", "nbytes_apart", "refuses_media",
}  # fmt: skip
"""Methods of a state that change nothing, so that the other ranks need not hear of them."""
NEVER = {"record_device_step"}
"""Methods that no state over several ranks gets to: those of static states."""
BY_CALLS = {"generate", "stream", "chat", "transcribe", "embeddings", "cross_weights"}
"""Methods of a model that do what they do by its calls, or by `trace`."""
OF_THE_MODEL = {"has_heads", "pictures", "encode", "listen", "listener", "logits", "follow", "draft_ahead"}
"""Methods of a model that change no state on the way, or that ask for a GPU or for heads first."""


def public(kind: type) -> set[str]:
    return {
        name
        for of in kind.__mro__[:-1]
        for name, value in vars(of).items()
        if not name.startswith("_") and callable(value) and not isinstance(value, type)
    }


def test_every_method_of_a_state_happens_on_all_ranks() -> None:
    own = {name for name in vars(MirroredState) if not name.startswith("_")}
    assert set(CALLS) <= own, "a method of the table that a mirrored state does not take from there"
    groups = (own, READS, NEVER)
    assert public(lmstate.State) == set().union(*groups)
    assert sum(map(len, groups)) == len(set().union(*groups)), "a method is of one kind"


def test_every_method_of_a_model_happens_on_all_ranks() -> None:
    own = {name for name in vars(ParallelModel) if not name.startswith("_")}
    assert public(lmstate.Model) <= own | BY_CALLS | OF_THE_MODEL


def told() -> Iterator[str]:
    """The commands that rank 0 sends, wherever it does."""
    for path in SOURCE.glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "attr", None) in ("tell", "_send"):
                yield from (each.value for each in call.args[:2] if isinstance(each, ast.Constant) and each.value)


def test_every_command_that_is_sent_is_one_that_the_others_know() -> None:
    assert set(told()) == {*COMMANDS, "load"}


@pytest.mark.parametrize(
    "ids", [[2, 0], (2, 0), iter([2, 0]), np.array([2, 0]), torch.tensor([2, 0]), range(2, -1, -2)]
)
def test_numbers_of_any_kind_are_told(ids: object) -> None:
    found = listed(ids)
    assert isinstance(found, list) and list(map(int, found)) == [2, 0]
    assert listed([iter([1]), (2, 3)]) == [[1], [2, 3]]
    for same in (None, 3, torch.tensor(3), torch.zeros(2, 4)):
        assert listed(same) is same
