"""Operations of a state that faults are put into, and a record of all that they must leave as it was."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import lmstate
from lmstate import kv
from lmstate.ops import dispatch
from tests.zoo import ours, text

Operation = Callable[[lmstate.Model, lmstate.State], object]

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "window": ("mistral", {}),
    "latents": ("deepseek_v3", {}),
    "gated delta": ("qwen3_next", {}),
    "mamba2": ("mamba2", {}),
    "composite": ("falcon_h1", {}),
    "8 bits": ("llama", {"kv": kv.Quantized(8)}),
    "4 bits": ("mistral", {"kv": kv.Quantized(4)}),
    "h2o": ("llama", {"kv": kv.H2O(budget=12, recent=3, sinks=1)}),
    "snapkv": ("llama", {"kv": kv.SnapKV(budget=12, window=3, sinks=1)}),
    "static": ("mistral", {"static": True, "capacity": 64}),
    "static carries": ("qwen3_next", {"static": True, "capacity": 64}),
}


def prepared(kind: str, rows: int = 2, **more: Any) -> tuple[lmstate.Model, lmstate.State]:
    """A state of two rows of different lengths, some drafts and rewinds behind it. `more`: options of the state."""
    case, options = KINDS[kind]
    model = ours(case)
    state = model.new_state(rows, rewind=8, **options, **more)
    model([row.tolist()[: 33 - 10 * i] for i, row in enumerate(text(33, rows=rows))], state)
    for token in range(3):
        model([[token + 1]] * rows, state)
    state.mark(0)
    model([[5, 6]] * rows, state)
    return model, state


def draft(model: lmstate.Model, state: lmstate.State) -> None:
    model([[5, 6, 7, 8], [9, 10]], state, commit=False)


def draft_tree(model: lmstate.Model, state: lmstate.State) -> None:
    model([[5, 6, 7], [8]], state, commit=False, parents=[[-1, 0, 0], [-1]])


def restore(model: lmstate.Model, state: lmstate.State) -> None:
    state.restore(1, state.snapshot(0))


OPERATIONS: dict[str, Operation] = {
    "decode": lambda model, state: model([[3], [4]], state),
    "prefill": lambda model, state: model([text(20, seed=3)[0].tolist(), [1]], state),
    "idle row": lambda model, state: model([[3], []], state),
    "commit all": lambda model, state: state.commit(),
    "commit some": lambda model, state: state.commit([2, 1]),
    "commit none": lambda model, state: state.commit(0),
    "rewind": lambda model, state: state.rewind(0, state.lengths[0] - 3),
    "rewind far": lambda model, state: state.rewind(0, 9),
    "rewind to a mark": lambda model, state: state.rewind(0, state.lengths[0] - 2),
    "empty": lambda model, state: state.rewind(0, 0),
    "select": lambda model, state: state.select([1, 0]),
    "fork": lambda model, state: state.select([1, None]),
    "restore": restore,
    "drop": lambda model, state: state.drop(0, 4, 9),
    "add": lambda model, state: state.add(),
    "add a snapshot": lambda model, state: state.add(state.snapshot(0)),
    "remove": lambda model, state: state.remove(1),
    "fill a removed row": lambda model, state: state.add(state.snapshot(0)),
    "mark": lambda model, state: state.mark(1),
    "expect": lambda model, state: state.expect(0, 200),
    "snapshot": lambda model, state: state.snapshot(1),
    "discard": lambda model, state: state.discard(),
    "copy": lambda model, state: copy.deepcopy(state),
    "tree": draft_tree,
    "commit path": lambda model, state: state.commit_path([[0, 2], []]),
    "queue": lambda model, state: state.queue(0, [3, 4]),
    "backlog": lambda model, state: (state.queue(0, [3, 4]), model([[5], []], state)),
}


def applies(kind: str, operation: str) -> bool:
    """Whether the layers of a kind can do it."""
    if operation in ("add", "add a snapshot") or "tree" in operation or "path" in operation:
        return not kind.startswith("static")
    return operation != "drop" or kind in ("llama", "latents", "h2o", "snapkv")


def standing(kind: str, operation: str) -> tuple[lmstate.Model, lmstate.State]:
    """A state that an operation can be done to."""
    model, state = prepared(kind)
    if operation == "commit path":
        draft_tree(model, state)
    elif operation.startswith("commit") or operation == "discard":
        draft(model, state)
    elif operation == "fill a removed row":
        state.remove(1)
    return model, state


class Record:
    """Lengths, tokens, pending tokens, and the next logits of a state that nothing may have changed.

    The logits are asked of a deep copy, which reads the same bytes.
    """

    def __init__(self, model: lmstate.Model, state: lmstate.State):
        self.lengths, self.pending = state.lengths, state.pending
        self.removed = state.removed
        self.tokens = [[] if row in state.removed else state.tokens(row) for row in range(state.rows)]
        self.probes = probes(model, state)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Record)
        plain = [(each.lengths, each.pending, each.removed, each.tokens) for each in (self, other)]
        return plain[0] == plain[1] and all(map(torch.equal, self.probes, other.probes))


def probes(model: lmstate.Model, state: lmstate.State) -> list[Tensor]:
    """Logits of what may come next: after a verdict, and after going back as far as costs nothing."""
    seen = []
    for back in (0, 5):
        twin = copy.deepcopy(state)
        if state._tree is not None:
            twin.commit_path([[0]] * twin.rows)
        elif any(twin.pending):
            twin.commit([min(1, n) for n in twin.pending])
        rows = [row for row in range(twin.rows) if row not in twin.removed]
        for row in rows:
            twin.rewind(row, max(0, twin.lengths[row] - back))
        seen.append(model([[11, 12] if row in rows else [] for row in range(twin.rows)], twin, logits="all")[rows])
    return seen


class Fault(MemoryError):
    """Thrown by a test at a call."""


class Counted:
    """Counts calls under it, and raises at the n-th."""

    def __init__(self, at: int | None = None):
        super().__init__()
        self.at, self.calls = at, 0

    def fails(self) -> bool:
        """Whether this call, one more, is the one to fail."""
        self.calls += 1
        return self.calls == self.at


class FailingCall(Counted, TorchDispatchMode):
    """Raises at the n-th torch call."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.fails():
            raise Fault(str(function))
        return function(*args, **(kwargs or {}))


class FailingNativeCall(Counted):
    """Raises at the n-th call into the native library, before any of it runs."""

    def __enter__(self) -> Self:
        library = dispatch.choice().library
        self._undo: list[tuple[object, str, Any]] = []
        for subject in vars(library).values():
            for name, function in list(getattr(subject, "__dict__", {}).items()):
                if isinstance(function, ctypes._CFuncPtr):
                    self._undo.append((subject, name, function))
                    setattr(subject, name, self.guard(function))
        assert library is None or len(self._undo) > 20
        return self

    def __exit__(self, *_: object) -> None:
        for undo in self._undo:
            setattr(*undo)

    def guard(self, function: Any) -> Callable[[bytes], int]:
        def guarded(arguments: bytes) -> int:
            if self.fails():
                raise Fault(function.__name__)
            return function(arguments)

        return guarded


class RefusingNativeCall(FailingNativeCall):
    """The n-th native call that allocates says that there is no memory."""

    ALLOCATES = (
        "lmstate_linear", "lmstate_fused", "lmstate_attend", "lmstate_rotate_attend", "lmstate_attend_quantized",
        "lmstate_attend_latent", "lmstate_gated_delta_rule", "lmstate_gated_delta_mixer", "lmstate_mamba2_mixer",
    )  # fmt: skip

    def guard(self, function: Any) -> Callable[[bytes], int]:
        if function.__name__ not in self.ALLOCATES:
            return function
        return lambda arguments: -1 if self.fails() else function(arguments)
