"""Sampled with drafts: the model's distribution exactly, and with a seed the very text where drafts are not drawn."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from lmstate.generation import Generation, Sampler
from lmstate.generation.sampling import TokenPicker
from lmstate.speculation import Draft, ModelDrafter, verify, verify_tree
from tests.generation.fake_model import VOCAB as FAKE
from tests.generation.fake_model import FakeModel, ids
from tests.speculation.drafters import NoisyOracle, RandomDrafter, always
from tests.speculation.test_greedy import prompts_of, run, speaking, whole_texts
from tests.zoo import VOCAB

SMALL = 4  # tokens: few enough to count every text of three of them
TRIALS = 3000


def table(seed: int) -> dict[tuple[int, ...], Tensor]:
    """Logits after every text of up to two tokens."""
    generator = torch.Generator().manual_seed(seed)
    texts = [text for length in range(3) for text in itertools.product(range(SMALL), repeat=length)]
    return {text: 1.5 * torch.randn(SMALL, generator=generator) for text in texts}


def exact(logits: dict[tuple[int, ...], Tensor], sampler: Sampler) -> dict[tuple[int, ...], float]:
    """The probability of every text of three tokens, by the definition of the sampler."""
    found = {}
    for text in itertools.product(range(SMALL), repeat=3):
        probability = 1.0
        for at, token in enumerate(text):
            here = logits[text[:at]][None]
            seen = torch.tensor([[token in text[:at] for token in range(SMALL)]])
            here = torch.where(seen, sampler.penalized(here), here)
            for known, often in Counter(text[:at]).items():
                here[0, known] -= sampler.presence_penalty + sampler.frequency_penalty * often
            probabilities, ids = sampler.candidates(here)
            dense = torch.zeros(SMALL, dtype=torch.float64).scatter_(0, ids[0], probabilities[0])
            probability *= float(dense[token])
        found[text] = probability
    return found


def append(text: list[int], row: int, token: int) -> bool:
    text.append(token)
    return True


def forget(picker: TokenPicker) -> None:
    """A new text: nothing of it was seen. The random stream goes on."""
    picker._held, picker._new, picker._ids = [set()], [[]], [torch.empty(0, dtype=torch.int64)]
    picker._counts = [Counter()]


def sampled_by_trees(logits: dict[tuple[int, ...], Tensor], sampler: Sampler, seed: int) -> Counter[tuple[int, ...]]:
    """Texts of three tokens, each from steps with random trees of drafts, some of whose siblings are the same token."""
    picker, rng = TokenPicker(sampler, 1), random.Random(seed)
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(TRIALS):
        text: list[int] = []
        forget(picker)
        while len(text) < 3:
            paths: list[tuple[int, ...]] = [()]
            tokens, parents = [0], [-1]
            for _ in range(rng.randint(0, 5)):
                parent = rng.randrange(len(paths))
                token = rng.randrange(SMALL)
                if len(text) + len(paths[parent]) < 2:
                    paths.append((*paths[parent], token))
                    tokens.append(token)
                    parents.append(parent)
            step = torch.stack([logits[*text, *path] for path in paths])
            before = list(text)
            path = verify_tree(step, 0, tokens, parents, picker, partial(append, text))
            assert text[: len(before) + len(path) - 1] == [*before, *paths[path[-1]]]
        counts[tuple(text[:3])] += 1
    return counts


class PickedRow:
    """A row of a picker, whose text ends after three tokens."""

    def __init__(self, picker: TokenPicker, text: list[int]) -> None:
        self.feed: list[int] = []
        self._picker, self._text = picker, text

    @property
    def over(self) -> bool:
        return len(self._text) >= 3

    def pick(self, logits: Tensor) -> int:
        return self._picker.pick(logits[None], [0])[0]

    def distribution(self, logits: Tensor) -> Tensor:
        return self._picker.distribution(logits, 0)

    def uniform(self) -> float:
        return self._picker.uniform(0)

    def chosen(self, token: int) -> None:
        self._picker.take(0, token)

    def give(self, token: int, logits: Tensor) -> None:
        self.feed.append(token)
        self._text.append(token)


def sampled(
    logits: dict[tuple[int, ...], Tensor], sampler: Sampler, q: Tensor | None, depths: Sequence[int]
) -> Counter[tuple[int, ...]]:
    """Texts of three tokens, each from steps with drafts of these depths (drawn from q, or the same fixed one)."""
    picker = TokenPicker(sampler, 1)
    generator = torch.Generator().manual_seed(7)
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(TRIALS):
        text: list[int] = []
        forget(picker)
        for depth in itertools.cycle(depths):
            depth = min(depth, 2 - len(text))
            if q is None:
                draft = Draft((1, 2, 1)[:depth])
            else:
                drawn = torch.multinomial(q, max(depth, 1), replacement=True, generator=generator).tolist()[:depth]
                draft = Draft(tuple(drawn), drawn_from=(q,) * depth)
            places = [tuple(text + list(draft.tokens[:at])) for at in range(depth + 1)]
            row = PickedRow(picker, text)
            verify(row, torch.stack([logits[place] for place in places]), draft, row.give)
            if len(text) >= 3:
                break
        counts[tuple(text[:3])] += 1
    return counts


def fits(counts: Counter[tuple[int, ...]], probabilities: dict[tuple[int, ...], float]) -> bool:
    """A chi-square test whose chance of refusing what is right is one in ten thousand."""
    statistic, cells, rest, rest_seen = 0.0, 0, 0.0, 0
    for text, probability in probabilities.items():
        if probability == 0.0:
            assert counts[text] == 0
        elif probability * TRIALS < 5:
            rest, rest_seen = rest + probability, rest_seen + counts[text]
        else:
            statistic += (counts[text] - probability * TRIALS) ** 2 / (probability * TRIALS)
            cells += 1
    if rest * TRIALS >= 5:
        statistic += (rest_seen - rest * TRIALS) ** 2 / (rest * TRIALS)
        cells += 1
    # Wilson and Hilferty: chi-square^(1/3) is nearly normal.
    freedom = cells - 1
    spread = (2 / (9 * freedom)) ** 0.5
    return bool(((statistic / freedom) ** (1 / 3) - (1 - spread**2)) / spread < 3.7)


SAMPLERS = [
    Sampler(temperature=1.0, seed=1),
    Sampler(temperature=0.7, top_p=0.8, seed=2),
    Sampler(temperature=1.3, top_k=3, repetition_penalty=1.7, seed=3),
]
PENALTIES = Sampler(
    temperature=0.9, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.5, seed=4
)
PROPOSALS = {
    "not drawn": None,
    "flat": torch.full((SMALL,), 1 / SMALL, dtype=torch.float64),
    "skewed": torch.tensor([0.7, 0.2, 0.1, 0.0], dtype=torch.float64),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("proposal", PROPOSALS)
def test_drafts_leave_the_distribution_as_it_is(sampler: Sampler, proposal: str) -> None:
    logits = table(seed=5)
    probabilities = exact(logits, sampler)
    counts = sampled(logits, sampler, PROPOSALS[proposal], depths=(2, 1))
    assert fits(counts, probabilities)


@pytest.mark.parametrize("sampler", [*SAMPLERS, PENALTIES])
def test_trees_leave_the_distribution_as_it_is(sampler: Sampler) -> None:
    logits = table(seed=5)
    assert fits(sampled_by_trees(logits, sampler, seed=6), exact(logits, sampler))


def test_drafts_under_all_penalties_leave_the_distribution_as_it_is() -> None:
    logits = table(seed=8)
    for q in (None, PROPOSALS["skewed"]):
        assert fits(sampled(logits, PENALTIES, q, depths=(2, 1)), exact(logits, PENALTIES))


def test_the_test_would_notice_another_distribution() -> None:
    counts = sampled(table(seed=5), SAMPLERS[0], None, depths=(2,))
    near = {text: logits + (0.15 if text else 0.0) * torch.arange(SMALL) for text, logits in table(seed=5).items()}
    assert not fits(counts, exact(near, SAMPLERS[0]))


@pytest.mark.parametrize("case", ["llama", "qwen3_5"])
def test_with_a_seed_the_text_is_the_one_without_drafts(case: str) -> None:
    model = speaking(case)
    prompts = prompts_of(8, 3)
    sampler = Sampler(temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=11)
    plain = model.new_state(rows=2)
    run(model, prompts, plain, None, max_new_tokens=24, params=sampler)
    oracle = always(NoisyOracle(whole_texts(plain), 0.8, VOCAB), VOCAB, rows=2)
    for draft in (oracle, "text", model):
        state = model.new_state(rows=2)
        run(model, prompts, state, draft, max_new_tokens=24, params=sampler)
        assert whole_texts(state) == whole_texts(plain)


def test_a_model_that_drafts_itself_at_random_is_always_believed() -> None:
    model = speaking("llama")
    sampler = Sampler(temperature=1.0, top_k=20)
    drafter = ModelDrafter(model, 2, VOCAB, sampler, seed=3)
    generation = Generation(
        model, prompts_of(8, 3), draft=always(drafter, VOCAB, rows=2), max_new_tokens=24, params=sampler
    )
    list(generation)
    report = generation.report().draft
    assert report.drafted > 10 and report.accepted == report.drafted


def test_drafts_drawn_at_random_do_not_disturb_greedy() -> None:
    flat = torch.full((FAKE,), 1 / FAKE, dtype=torch.float64)
    prompts = [ids("a"), ids("bc")]
    plain, drafted = (
        Generation(FakeModel(), prompts, draft=draft, max_new_tokens=12)
        for draft in (None, always(RandomDrafter(flat, 1), FAKE, rows=2))
    )
    for generation in (plain, drafted):
        list(generation)
    assert plain.texts == drafted.texts
