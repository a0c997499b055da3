"""Random interleavings of all that moves a StateCache, and of its forks, against recomputation from scratch."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmstate.integrations.transformers import StateCache
from tests.integrations.models import call, decoder, text

KINDS = ("llama", "gemma3", "qwen3_next", "mamba2", "deepseek_v3", "falcon_h1", "lfm2", "jamba", "deepseek_v4")
MOST_ROWS, MOST_TOKENS, OPERATIONS = 4, 90, 14

PART = st.floats(0, 1)
OPERATION = st.one_of(
    st.tuples(st.just("feed"), st.sampled_from([1, 1, 1, 2, 5, 17])),
    st.tuples(st.just("feed"), st.sampled_from([1, 1, 1, 2, 5, 17])),
    st.tuples(st.just("rewind"), PART),
    st.tuples(st.just("crop"), st.integers(0, 9)),
    st.tuples(st.just("reorder"), st.lists(st.integers(0, 99), min_size=MOST_ROWS, max_size=MOST_ROWS)),
    st.tuples(st.just("choose"), st.lists(st.integers(0, 99), min_size=1, max_size=MOST_ROWS)),
    st.tuples(st.just("repeat"), st.integers(1, 3)),
    st.tuples(st.just("fork"), st.integers(1, 2)),
    st.tuples(st.just("leave")),
    st.tuples(st.just("snapshot")),
    st.tuples(st.just("restore"), st.booleans()),
    st.tuples(st.just("record")),
)


class Caches:
    """Caches of one model, each beside the ids `[R, n]` that it should hold."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.held: list[tuple[StateCache, Tensor]] = []
        self.kept: Any = None
        self.fed = 0
        self.add(StateCache(model), text(0, rows=2))
        self.feed(11)

    def add(self, cache: StateCache, ids: Tensor) -> None:
        self.held = [*self.held[-2:], (cache, ids)]

    @property
    def last(self) -> tuple[StateCache, Tensor]:
        return self.held[-1]

    def now(self, ids: Tensor) -> None:
        self.held[-1] = (self.last[0], ids)

    def feed(self, count: int) -> None:
        cache, ids = self.last
        self.fed += 1
        new = text(count, rows=ids.shape[0], seed=self.fed)
        self.now(torch.cat([ids, new], dim=1))
        with torch.no_grad():
            expected = self.model(self.last[1]).logits[:, ids.shape[1] :]
        torch.testing.assert_close(call(self.model, new, cache), expected, atol=1e-4, rtol=1e-4)

    def rewind(self, part: float) -> None:
        cache, ids = self.last
        to = 1 + round(part * (ids.shape[1] - 1))
        cost = cache.rewind_cost(to)
        assert cache.rewind(to=to) == cost
        self.now(ids[:, :to])

    def crop(self, count: int) -> None:
        cache, ids = self.last
        count = min(count, ids.shape[1] - 1)
        cache.crop(-count)
        self.now(ids[:, : ids.shape[1] - count])

    def reorder(self, order: list[int]) -> None:
        cache, ids = self.last
        rows = torch.tensor([row % ids.shape[0] for row in order[: ids.shape[0]]])
        cache.reorder_cache(rows)
        self.now(ids[rows])

    def choose(self, order: list[int]) -> None:
        cache, ids = self.last
        rows = torch.tensor([row % ids.shape[0] for row in order])
        cache.batch_select_indices(rows)
        self.now(ids[rows])

    def repeat(self, times: int) -> None:
        cache, ids = self.last
        if ids.shape[0] * times <= MOST_ROWS:
            cache.batch_repeat_interleave(times)
            self.now(ids.repeat_interleave(times, 0))

    def fork(self, times: int) -> None:
        cache, ids = self.last
        times = times if ids.shape[0] * times <= MOST_ROWS else 1
        self.add(cache.fork(times), ids.repeat_interleave(times, 0))

    def leave(self) -> None:
        """Go on with an earlier one of the forks."""
        self.held.insert(0, self.held.pop())

    def snapshot(self) -> None:
        cache, ids = self.last
        self.kept = (cache.snapshot(), ids)

    def restore(self, through_disk: bool) -> None:
        if self.kept is None:
            return
        snapshot, ids = self.kept
        cache = StateCache(self.model)
        cache.restore(snapshot)
        if through_disk:
            with tempfile.TemporaryDirectory() as folder:
                cache.save(Path(folder) / "cache")
                self.last[0].restore(StateCache.load(Path(folder) / "cache", self.model).snapshot())
        else:
            self.last[0].restore(snapshot)
        self.now(ids)

    def record(self) -> None:
        """As assisted decoding does: a draft, of which some is taken back by `crop`."""
        self.last[0].activate_past_recording()
        for rejected in (3, 0, 2):
            self.feed(4)
            self.crop(rejected)

    def check(self) -> None:
        for cache, ids in self.held:
            assert cache.get_seq_length() == ids.shape[1] and cache.rows in (0, ids.shape[0])
        for place in range(len(self.held)):
            cache, ids = self.held[place]
            self.held.append((cache.fork(), ids))
            self.feed(2)
            self.held.pop()


@pytest.mark.parametrize("name", KINDS)
@settings(
    max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)
@given(data=st.data())
def test_any_interleaving_of_moves_gives_what_was_fed(name: str, data: st.DataObject) -> None:
    run(name, data.draw(st.lists(OPERATION, min_size=OPERATIONS, max_size=OPERATIONS)))


@pytest.mark.soak
@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(moves=st.lists(OPERATION, max_size=2 * OPERATIONS))
def test_many_interleavings_of_moves_give_what_was_fed(name: str, moves: list[tuple[Any, ...]]) -> None:
    run(name, moves)


def run(name: str, moves: list[tuple[Any, ...]]) -> None:
    caches = Caches(decoder(name))
    for move, *arguments in moves:
        getattr(caches, move)(*arguments)
        if caches.last[1].shape[1] > MOST_TOKENS:
            caches.rewind(0.3)
    caches.check()
