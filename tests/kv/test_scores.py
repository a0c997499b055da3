"""Score-based policies against a brute-force recomputation in plain Python, on random queries, keys and values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lmstate import kv
from lmstate.ops import AttentionParams, dispatch
from lmstate.ops.attention.attend_quantized import WHOLE, attend_quantized
from lmstate.ops.attention.attend_slots import attend_observed, attend_slots
from lmstate.ops.attention.slots import commit_slots, commit_slots_reference, undo_evictions
from lmstate.ops.types import kv_format
from lmstate.ops.types.params import AttentionSums, QuantizedKV
from lmstate.ops.types.slot_table import EvictLowest, SlotCommit, SlotTable
from lmstate.state import Layout, Step, attention_state
from lmstate.state.changes import Changes
from tests.zoo import ours

HEADS, KV_HEADS, DIM = 6, 2, 8


class Brute:
    """Every query, key and value of one row; what is kept of them by the letter of the policy."""

    def __init__(self, policy: kv.Budget) -> None:
        self.policy = policy
        self.q, self.k = torch.zeros(0, HEADS, DIM), torch.zeros(0, KV_HEADS, DIM)
        self.kept: list[list[int]] = [[] for _ in range(KV_HEADS)]
        self.scores: list[dict[int, float]] = [{} for _ in range(KV_HEADS)]

    def probs(self, head: int, own: int, visible: list[int]) -> dict[int, float]:
        """The attention of the query at `own`, averaged over a kv head's query heads."""
        group = HEADS // KV_HEADS
        mean = dict.fromkeys(visible, 0.0)
        for h in range(head * group, (head + 1) * group):
            logits = [float(self.q[own, h].double() @ self.k[p, head].double()) / math.sqrt(DIM) for p in visible]
            weights = torch.tensor(logits).softmax(0).tolist()
            for position, weight in zip(visible, weights):
                mean[position] += weight / group
        return mean

    def step(self, q: Tensor, k: Tensor) -> None:
        start = len(self.q)
        self.q, self.k = torch.cat([self.q, q]), torch.cat([self.k, k])
        length = len(self.q)
        for head in range(KV_HEADS):
            for own in range(start, length):
                visible = [*self.kept[head], *range(start, own + 1)]
                for position, weight in self.probs(head, own, visible).items():
                    self.scores[head][position] = self.scores[head].get(position, 0.0) + weight
            kept = [*self.kept[head], *range(start, length)]
            excess = len(kept) - self.policy.budget
            if excess > 0:
                rank = self.rank(head, kept, length)
                free = [p for p in kept if self.policy.sinks <= p < length - self.policy.newest]
                gone = sorted(free, key=lambda p: (rank[p], p))[: max(excess, self.policy.batch)]
                kept = [p for p in kept if p not in gone]
            self.kept[head] = kept

    def rank(self, head: int, kept: list[int], length: int) -> dict[int, float]:
        if isinstance(self.policy, kv.H2O):
            return self.scores[head]
        assert isinstance(self.policy, kv.SnapKV)
        sums = dict.fromkeys(kept, 0.0)
        for own in range(max(0, length - self.policy.window), length):
            for position, weight in self.probs(head, own, [p for p in kept if p <= own]).items():
                sums[position] += weight
        half = self.policy.pool // 2
        return {p: max(sums[n] for n in kept[max(0, i - half) : i + half + 1]) for i, p in enumerate(kept)}


@pytest.mark.parametrize(
    "policy", [kv.H2O(budget=12, recent=3, sinks=1), kv.SnapKV(budget=14, window=4, sinks=1, pool=3)]
)
@pytest.mark.parametrize("steps", [[40, 1, 1, 1, 7], [1] * 40, [5, 9, 20, 3, 1, 1]])
def test_kept_equals_brute_force(policy: kv.Budget, steps: list[int]) -> None:
    generator = torch.Generator().manual_seed(3)
    layout = Layout(1, torch.device("cpu"), torch.float32, kv=policy)
    state = attention_state(layout, KV_HEADS, DIM, heads=HEADS, scale=DIM**-0.5)
    brute = Brute(policy)
    start = 0
    for count in steps:
        q = 2 * torch.randn(1, count, HEADS, DIM, generator=generator)
        k, v = (torch.randn(1, count, KV_HEADS, DIM, generator=generator) for _ in "kv")
        step = Step((start,), (count,), layout.device, (start + count,))
        state.reserve(step)
        state.attend(q, (k, v), step, AttentionParams(DIM**-0.5))
        changes = Changes()
        state.commit(step, (count,), changes)
        changes.apply()
        start += count
        brute.step(q[0], k[0])
        assert state.kept(0, start) == brute.kept


def test_attention_over_slots_gives_gradients_and_columns() -> None:
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(2, 5, HEADS, DIM, generator=generator, requires_grad=True)
    k, v = (torch.randn(2, KV_HEADS, 30, DIM, generator=generator, requires_grad=True) for _ in "kv")
    positions = torch.stack([torch.randperm(40, generator=generator)[:30] for _ in range(4)]).view(2, KV_HEADS, 30)
    positions[:, :, :3] = -1
    starts, counts = torch.tensor([20, 31]), torch.tensor([5, 3])
    given = AttentionSums(torch.zeros(2, KV_HEADS, 2, 30), starts + counts)
    out = attend_slots(q, k, v, positions, starts, counts, AttentionParams(0.3), columns=given)
    own = (starts[:, None] + torch.arange(5))[:, None, :, None]
    mask = ((positions[:, :, None] <= own) & (positions[:, :, None] >= 0)).repeat_interleave(3, dim=1)
    keys, values = (x.repeat_interleave(3, dim=1) for x in (k, v))
    weights = (q.transpose(1, 2) @ keys.mT * 0.3).masked_fill(~mask, -torch.inf).softmax(-1)
    real = (torch.arange(5) < counts[:, None])[..., None, None]
    wanted = (weights @ values).transpose(1, 2) * real
    torch.testing.assert_close(out, wanted)
    pull = torch.randn(out.shape, generator=generator)
    for mine, theirs in zip(torch.autograd.grad(out, (q, k, v), pull), torch.autograd.grad(wanted, (q, k, v), pull)):
        torch.testing.assert_close(mine, theirs)
    columns = weights.unflatten(1, (KV_HEADS, -1)).mean(2)  # [R, K, T, S]
    for row, count in enumerate(counts.tolist()):
        split = torch.stack([columns[row, :, : count - 1].sum(1), columns[row, :, count - 1]], dim=1)
        torch.testing.assert_close(given.sums[row], split.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_observed_attention_equals_the_reference(dtype: torch.dtype, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(7)
    for width, slots, dim, planes in ((1, 70, 64, 1), (7, 129, 24, 3), (130, 400, 80, 17), (9, 40, 64, 9)):
        q = torch.randn(2, width, HEADS, dim, generator=generator)
        k, v = (torch.randn(2, KV_HEADS, slots, dim, generator=generator).to(dtype) for _ in "kv")
        starts, counts = torch.tensor([slots - width, 0]), torch.tensor([width, width // 2])
        params = AttentionParams(0.3, softcap, torch.randn(HEADS, generator=generator))
        got, wanted = (AttentionSums(torch.zeros(2, KV_HEADS, planes, slots), starts + counts) for _ in range(2))
        where = torch.arange(slots).expand(2, KV_HEADS, slots)
        seen = attend_observed(q, k, v, starts, counts, params, got)
        torch.testing.assert_close(
            seen, attend_slots(q, k, v, where, starts, counts, params, columns=wanted), atol=2e-5, rtol=2e-5
        )
        torch.testing.assert_close(got.sums, wanted.sums, atol=2e-5, rtol=2e-5)
        assert got.sums.sum() > 1
        if width < 32:  # the same bits beside other rows, and token by token
            alone = attend_observed(
                q[:1], k[:1], v[:1], starts[:1], counts[:1], params, AttentionSums(*(x[:1] for x in got))
            )
            assert torch.equal(alone[0], seen[0])


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize(("width", "dim"), [(1, 64), (9, 40), (100, 128)])
def test_observed_codes_equal_what_they_stand_for(bits: int, width: int, dim: int) -> None:
    """Codes with scales of their own are stored and read as `kv_codes` says, and tell what each slot received."""
    generator = torch.Generator().manual_seed(bits)
    slots, before = 190, 70
    codes, scales = kv_format.widths(dim, bits, WHOLE)
    kv = QuantizedKV(
        bits,
        *(torch.zeros(2, KV_HEADS, slots, codes, dtype=kv_format.code_dtype(bits)) for _ in "kv"),
        *(torch.zeros(2, KV_HEADS, slots, scales, dtype=torch.float16) for _ in "kv"),
    )
    starts, counts = torch.tensor([0, 0]), torch.tensor([before, before - 5])
    params = AttentionParams(0.2, None, torch.randn(HEADS, generator=generator))
    stored = []
    for tokens in (before, width):
        q = torch.randn(2, tokens, HEADS, dim, generator=generator)
        new = tuple(torch.randn(2, tokens, KV_HEADS, dim, generator=generator) for _ in "kv")
        stored.append(new)
        sums = AttentionSums(torch.zeros(2, KV_HEADS, 3, slots), starts + counts)
        seen = attend_quantized(q, new, None, kv, starts, counts, params, columns=sums)
        starts, counts = counts, torch.tensor([width, width // 2])
    k, v = (kv_format.decode(x, scale, bits) for x, scale in ((kv.k, kv.k_scale), (kv.v, kv.v_scale)))
    for ring, old, new in zip((k, v), *stored):
        both = torch.cat([old[0], new[0]]).transpose(0, 1)  # [K, n, D]
        wanted = kv_format.decode(*kv_format.encode(kv_format.hadamard(both), bits, WHOLE), bits)
        apart = (ring[0, :, : before + width] - wanted).abs()
        assert (apart > 1e-5).float().mean() < 1e-3 and apart.mean() < 1e-3  # a number on the edge of two codes
    starts, counts = torch.tensor([before, before - 5]), torch.tensor([width, width // 2])
    wanted_sums = AttentionSums(torch.zeros(2, KV_HEADS, 3, slots), starts + counts)
    where = torch.arange(slots).expand(2, KV_HEADS, slots)
    wanted = attend_slots(kv_format.hadamard(q), k, v, where, starts, counts, params, columns=wanted_sums)
    torch.testing.assert_close(seen, kv_format.hadamard(wanted), atol=2e-5, rtol=2e-4)
    torch.testing.assert_close(sums.sums, wanted_sums.sums, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("by_scores", [False, True])
def test_committed_slots_equal_the_references(by_scores: bool) -> None:
    """Random steps of two layers at once through the native body and the plain one: the same slots, undo logs and
    scores; and undone."""
    generator = torch.Generator().manual_seed(11)
    rows, heads, slots, undo_slots, history = 2, 3, 40, 24, 5

    def lists() -> SlotTable:
        kept = {"k": torch.zeros(rows, heads, slots, 6), "position": torch.zeros(rows, heads, slots, dtype=torch.int32)}
        undo_log = {name: x[:, :, :undo_slots].clone() for name, x in kept.items()}
        numbers = {name: torch.zeros(rows, heads, undo_slots, dtype=torch.int32) for name in ("evicted_at", "slot")}
        if by_scores:
            kept["scores"] = torch.zeros(rows, heads, history, slots)
        none = torch.zeros(rows, heads, dtype=torch.int64)
        return SlotTable(kept, {**undo_log, **numbers}, none, none.clone())

    mine, beside, plain = lists(), lists(), lists()
    lengths, past = [0] * rows, {}
    for turn in range(40):
        counts = torch.randint(1, 5, (rows,), generator=generator)
        accepted = (counts - torch.tensor([0, turn % 2])).clamp(min=0)
        columns = torch.rand(rows, heads, 4, slots, generator=generator) if by_scores else None
        live = mine.filled[:, 0] + accepted
        evicted: Tensor | EvictLowest = EvictLowest(20, turn % 2, 2, 4, by_scores)
        if turn % 3 == 0:
            evicted = torch.rand(rows, heads, slots, generator=generator) < 0
            evicted[0, :, 5:7] = live[0] > 20
        new = torch.randn(rows, heads, 5, 6, generator=generator)
        for one in (mine, beside, plain):
            for r in range(rows):
                for h in range(heads):
                    first = int(one.filled[r, h])
                    one.stored["k"][r, h, first : first + 5] = new[r, h, : slots - first]
        starts = torch.tensor(lengths)
        commit_slots([SlotCommit(one, columns, evicted) for one in (beside, mine)], starts, counts, accepted)
        assert all(torch.equal(mine.stored[name], array) for name, array in beside.stored.items())
        commit_slots_reference(SlotCommit(plain, columns, evicted), starts, counts, accepted)
        lengths = [start + n for start, n in zip(lengths, accepted.tolist())]
        assert torch.equal(mine.filled, plain.filled) and torch.equal(mine.undo_head, plain.undo_head)
        n = int(mine.filled.max())
        for name, array in mine.stored.items():
            if name != "scores":
                filled = torch.arange(slots) < mine.filled[..., None]
                assert torch.equal(array[filled], plain.stored[name][filled])
        for name, array in mine.undo_log.items():
            assert torch.equal(array, plain.undo_log[name])
        if by_scores:
            for r, length in enumerate(lengths):
                got, wanted = (x.stored["scores"][r, :, length % history, :n] for x in (mine, plain))
                torch.testing.assert_close(got, wanted)
        past[lengths[0]] = mine.stored["k"][0, :, :n].clone(), mine.stored["position"][0, :, :n].clone()
    before = max(length for length in past if length <= lengths[0] - 3)
    undo_head = mine.undo_head.clone()
    undo_evictions(mine, before)
    assert (mine.undo_head[0] < undo_head[0]).all()
    for got, then in zip((mine.stored["k"], mine.stored["position"]), past[before]):
        assert torch.equal(got[0, :, : int(mine.filled[0, 0])], then[:, : int(mine.filled[0, 0])])


def test_sums_that_end_before_the_queries_are_refused() -> None:
    if dispatch.choice().library is None:
        pytest.skip("the reference checks nothing")
    q, ring = torch.randn(2, 2, HEADS, DIM), torch.zeros(2, KV_HEADS, 16, DIM)
    starts, counts, sums = torch.tensor([5, 5]), torch.tensor([2, 2]), torch.zeros(2, KV_HEADS, 2, 16)
    with pytest.raises(ValueError, match="row 1 starts at 5"):
        attend_observed(q, ring, ring, starts, counts, AttentionParams(1.0), AttentionSums(sums, torch.tensor([7, 6])))
    with pytest.raises(ValueError, match="must be contiguous"):
        attend_observed(
            q,
            ring,
            ring,
            starts,
            counts,
            AttentionParams(1.0),
            AttentionSums(sums, torch.tensor([[7, 0], [7, 0]])[:, 0]),
        )
    assert not sums.any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_ranks_that_are_no_numbers_cost_a_head_as_many_slots_as_others(value: float) -> None:
    """Where the heads of a row are alike, the host counts on it."""

    class Overflown(kv.Budget):
        def rank(self, slots: kv.Slots) -> Tensor:
            ranks = slots.positions.float()
            ranks[:, 0] = value
            return ranks

    model = ours("llama")
    state = model.new_state(kv=Overflown(budget=9, recent=2, sinks=1))
    for width in (30, 1, 1, 5, 1):
        model([list(range(1, 1 + width))], state)
        length = state.lengths[0]
        for head in state.kept(0, 0):
            assert len(head) == 9 and head[0] == 0 and head[-2:] == [length - 2, length - 1]


@pytest.mark.parametrize("body", [commit_slots_reference, "native"])
@pytest.mark.parametrize("score", [math.nan, -math.nan])
def test_scores_that_are_no_numbers_evict(score: float, body: Any) -> None:
    position = torch.arange(6, dtype=torch.int32)[None, None]
    kept = {"position": position.clone(), "scores": torch.full((1, 1, 1, 6), score)}
    none = torch.zeros(1, 1, 0, dtype=torch.int32)
    filled, undo_head = torch.tensor([[5]]), torch.zeros(1, 1, dtype=torch.int64)
    lists = SlotTable(kept, {"position": none, "evicted_at": none, "slot": none}, filled, undo_head)
    change = SlotCommit(lists, torch.zeros(1, 1, 1, 6), EvictLowest(5, 0, 1, 1, True))
    step = torch.tensor([5]), torch.tensor([1]), torch.tensor([1])
    if body == "native":
        commit_slots([change], *step)
    else:
        body(change, *step)
    assert sorted(kept["position"][0, 0, : int(filled)].tolist()) == [0, 2, 3, 4, 5]
