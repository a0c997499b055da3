"""Score-based policies against a brute-force recomputation in plain Python, on random queries, keys and values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lmstate import kv
from lmstate.ops import EVERYTHING, Scoring, Sight
from lmstate.ops.attend_slots import attend_slots, attend_slots_reference
from lmstate.state import Layout, Step, attention_state

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
    state = attention_state(layout, KV_HEADS, DIM)
    brute = Brute(policy)
    start = 0
    for count in steps:
        q = 2 * torch.randn(1, count, HEADS, DIM, generator=generator)
        k, v = (torch.randn(1, count, KV_HEADS, DIM, generator=generator) for _ in "kv")
        step = Step((start,), (count,), layout.device, (start + count,))
        state.reserve(step)
        state.attend(q, (k, v), step, Scoring(DIM**-0.5))
        install = state.commit(step, (count,))
        assert install is not None
        install()
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
    out, seen = attend_slots(q, k, v, positions, starts, counts, Scoring(0.3), last=2)
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
        split = [columns[row, :, : count - 2].sum(1), *columns[row, :, count - 2 : count].unbind(1)]
        torch.testing.assert_close(seen[row], torch.stack(split, dim=-1).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("softcap", "sight"), [(None, EVERYTHING), (2.0, Sight(window=9)), (None, Sight(chunk=16))])
def test_native_attention_over_slots_equals_the_reference(
    dtype: torch.dtype, softcap: float | None, sight: Sight
) -> None:
    generator = torch.Generator().manual_seed(7)
    for width, slots, dim, last in ((1, 70, 64, None), (7, 129, 24, 3), (32, 200, 80, 32)):
        q = torch.randn(2, width, HEADS, dim, generator=generator)
        k, v = (torch.randn(2, KV_HEADS, slots, dim, generator=generator).to(dtype) for _ in "kv")
        order = [torch.randperm(2 * slots, generator=generator)[:slots] for _ in range(2 * KV_HEADS)]
        positions = torch.stack(order).view(2, KV_HEADS, slots)
        positions[:, :, ::5] = -1
        positions[1, 0] = -1  # a head that sees nothing but its sink
        starts, counts = torch.tensor([slots, slots // 2]), torch.tensor([width, width // 2])
        sinks = torch.randn(HEADS, generator=generator)
        scoring = Scoring(0.3, softcap, sinks)
        got, seen = attend_slots(q, k, v, positions, starts, counts, scoring, sight, last)
        wanted, columns = attend_slots_reference(q, k, v, positions, starts, counts, scoring, sight, last)
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)
        if last is not None:
            torch.testing.assert_close(seen, columns, atol=2e-5, rtol=2e-5)
