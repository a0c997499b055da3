"""The end of a step for slots in no order: the accepted tokens become real, and what is evicted goes into the undo log.

Every row and kv head has a list of slots, filled from the front. Where one is evicted the last one takes its place, so
that attention reads a list as it reads a ring that has not wrapped: what order slots are in does not matter to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.types.slot_table import NONE, EvictLowest, SlotCommit, SlotTable


def commit_slots(changes: Sequence[SlotCommit], starts: Tensor, counts: Tensor, accepted: Tensor) -> None:
    """Make the first accepted[r] of the counts[r] tokens real that are after row r's filled slots, then evict.

    Of any number of layers at once. starts, counts, accepted: int64 `[R]`; a row that accepts none stays as it is. All
    that it changes is changed in place; it cannot fail.
    """
    library = dispatch.native(starts, counts, accepted)
    if library is not None:
        library.slots.commit(changes, starts, counts, accepted)
    else:
        for change in changes:
            commit_slots_reference(change, starts, counts, accepted)


def prepare_commit(
    starts: Tensor, counts: Tensor, accepted: Tensor
) -> Callable[[Sequence[SlotCommit]], tuple[Callable[[bytes], object], bytes]] | None:
    """`commit_slots` in two halves, for a caller that must not fail between them; None without a native body.

    Given the commits of all layers, it checks and packs them: a function of C, and the argument that it is to be called
    with while these tensors live.
    """
    library = dispatch.native(starts, counts, accepted)
    if library is None:
        return None
    return lambda commits: library.slots.prepare(commits, starts, counts, accepted)


def commit_slots_reference(change: SlotCommit, starts: Tensor, counts: Tensor, accepted: Tensor) -> None:
    """Plain torch, a row and head after another."""
    lists, columns, evicted = change.lists, change.columns, change.evicted
    stored, heads = lists.stored, range(lists.filled.shape[1])
    spans = zip(starts.tolist(), counts.tolist(), accepted.tolist())
    for r, (start, count, n) in enumerate(spans):
        if not n:
            continue
        length = start + n
        new = torch.arange(start, length, device=starts.device)
        for h, filled in zip(heads, lists.filled[r].tolist()):
            if "scores" in stored and columns is not None:
                scores = stored["scores"][r, h]
                for token, after in scores_after(scores[start % len(scores)], columns[r, h], filled, count, n):
                    scores[(start + token + 1) % len(scores), : len(after)] = after
            stored["position"][r, h, filled : filled + n] = new.int()
            lists.filled[r, h] = filled + n
            if isinstance(evicted, EvictLowest):
                for left in range(filled + n, filled + n - evicted.excess(filled + n), -1):
                    position = stored["position"][r, h, :left]
                    ranks = (
                        stored["scores"][r, h, length % stored["scores"].shape[2]] if evicted.by_scores else position
                    )
                    guarded = (position < evicted.sinks) | (position >= length - evicted.newest)
                    ranks = behind_all(ranks[:left].float(), guarded)
                    evict(lists, r, h, lowest(ranks, position, torch.ones_like(position[:1])), length)
            elif evicted is not None:
                evict(lists, r, h, evicted[r, h], length)
        if change.queries is not None and change.ring is not None:
            size = change.ring.shape[1]
            change.ring[r, new[-size:] % size] = change.queries[r, :n][-size:].to(change.ring)


def scores_after(before: Tensor, columns: Tensor, filled: int, count: int, n: int) -> list[tuple[int, Tensor]]:
    """A head's scores after some of a step's first n tokens: (number of the token, float32 `[filled + count]`).

    before `[S]`: those before the step, of which the first `filled` count. columns `[n, S']`: as in `commit_slots`.
    """
    scores = torch.zeros_like(columns[0, : filled + count])
    scores[:filled] = before[:filled]
    out = []
    for plane in range(max(0, len(columns) - count), len(columns)):
        token = plane + count - len(columns)
        if token < n:
            scores = scores + columns[plane, : filled + count]
            out.append((token, scores))
    return out


def behind_all(ranks: Tensor, guarded: Tensor) -> Tensor:
    """The ranks, with those that are guarded after all others: a model that overflowed has NaN ranks, and as many
    slots must go of its heads as of any."""
    return ranks.nan_to_num(nan=torch.finfo(torch.float32).max).masked_fill(guarded, torch.inf)


def lowest(ranks: Tensor, positions: Tensor, counts: Tensor) -> Tensor:
    """bool `[..., S]`: the `counts` `[..., 1]` slots of lowest rank, the oldest first among equals."""
    most = int(counts.max())
    if not most:
        return torch.zeros_like(ranks, dtype=torch.bool)
    limit = ranks.topk(most, largest=False).values.gather(-1, (counts - 1).clamp(min=0))  # [..., 1]
    below, tied = ranks < limit, ranks == limit
    oldest = torch.where(tied, positions, NONE).topk(most, largest=False).indices
    first = torch.arange(most, device=ranks.device) < counts - below.sum(-1, keepdim=True)
    return (below | (torch.zeros_like(tied).scatter_(-1, oldest, first) & tied)) & (counts > 0)


def evict(lists: SlotTable, r: int, h: int, gone: Tensor, length: int) -> None:
    """Move the slots of a head that are `gone`, bool `[S]`, into the undo log, at a length of its row."""
    filled, undo_slots = int(lists.filled[r, h]), lists.undo_log["evicted_at"].shape[2]
    order, slots = list(range(filled)), gone[:filled].nonzero()[:, 0].tolist()[::-1]
    for slot in slots:  # from the last one on, so that what fills a hole stays
        last = order.pop()
        if slot < len(order):
            order[slot] = last
    first = int(lists.undo_head[r, h])
    where = [(first + i) % undo_slots for i in range(len(slots))] if undo_slots else []
    for name, array in lists.stored.items():
        if name == "scores":
            scores = array[r, h, length % array.shape[2]]
            scores[: len(order)] = scores[order]
            continue
        lists.undo_log[name][r, h, where] = array[r, h, slots if undo_slots else []]
        array[r, h, : len(order)] = array[r, h, order]
    lists.undo_log["evicted_at"][r, h, where] = length
    lists.undo_log["slot"][r, h, where] = torch.tensor(
        slots if undo_slots else [], dtype=torch.int32, device=gone.device
    )
    lists.filled[r, h], lists.undo_head[r, h] = len(order), first + len(where)


def undo_evictions(lists: SlotTable, to: int) -> None:
    """Take every row back to length `to`: what was evicted since comes back, what came since goes. All in place.

    The scores of that length are where the slots do then.
    """
    slots, undo_slots = lists.stored["position"].shape[2], lists.undo_log["evicted_at"].shape[2]
    for r, rows in enumerate(lists.filled.tolist()):
        for h, filled in enumerate(rows):
            order, undo_head = list(range(filled)), int(lists.undo_head[r, h])
            evicted_at, where = lists.undo_log["evicted_at"][r, h].tolist(), lists.undo_log["slot"][r, h].tolist()
            position = torch.cat([lists.stored["position"][r, h], lists.undo_log["position"][r, h]]).tolist()
            undone: list[int] = []
            while len(undone) < undo_slots and evicted_at[entry := (undo_head - 1 - len(undone)) % undo_slots] > to:
                slot, victim = where[entry], slots + entry
                while order and position[order[-1]] >= evicted_at[entry]:
                    order.pop()  # it came after
                if slot < len(order):
                    order.append(order[slot])
                    order[slot] = victim
                else:
                    order.append(victim)
                undone.append(entry)
            while order and position[order[-1]] >= to:
                order.pop()
            for name, array in lists.stored.items():
                if name != "scores":
                    array[r, h, : len(order)] = torch.cat([array[r, h], lists.undo_log[name][r, h]])[order]
            lists.undo_log["evicted_at"][r, h, undone] = 0
            lists.filled[r, h], lists.undo_head[r, h] = len(order), undo_head - len(undone)
