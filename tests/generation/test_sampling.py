"""The sampler: equal to transformers' filters, and one random stream per row."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmstate.errors import ModelError
from lmstate.generation.sampling import Sampler, TokenPicker
from lmstate.ops.dense.sample import HEAD

SETTINGS = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 2.0, "top_k": 100_000, "top_p": 0.999},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.95, "repetition_penalty": 0.8},
]


def theirs(options: dict, seen: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The same distribution through transformers' processors, in the order in which its generate applies them."""
    from transformers.generation import logits_process as hf

    if "repetition_penalty" in options:
        logits = hf.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"])(seen, logits)
    logits = hf.TemperatureLogitsWarper(options["temperature"])(seen, logits)
    if "top_k" in options:
        logits = hf.TopKLogitsWarper(options["top_k"])(seen, logits)
    if "top_p" in options:
        logits = hf.TopPLogitsWarper(options["top_p"])(seen, logits)
    if "min_p" in options:
        logits = hf.MinPLogitsWarper(options["min_p"])(seen, logits)
    return logits.softmax(-1)


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab", [50, 3 * HEAD])
@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_distribution_equals_transformers(options: dict, vocab: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(3, vocab, generator=generator) * scale
    seen = torch.randint(vocab, (3, 9), generator=generator)
    sampler = Sampler(**options)
    mine = logits
    if sampler.repetition_penalty != 1.0:
        mine = logits.scatter(1, seen, sampler.penalized(logits.gather(1, seen)))
    probabilities, ids = sampler.candidates(mine)
    whole = torch.zeros(3, vocab, dtype=torch.float64).scatter_(1, ids, probabilities)
    expected = theirs(options, seen, logits.clone())
    torch.testing.assert_close(whole.float(), expected, atol=2e-6, rtol=1e-4)


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -math.inf])
    draws = 20_000
    picker = TokenPicker(Sampler(temperature=1.0, seed=3), 1)
    counts = torch.zeros(5)
    for _ in range(draws):
        counts[picker.pick(logits[None], [0])[0]] += 1
    expected = logits.softmax(-1)
    spread = (expected * (1 - expected) / draws).sqrt()
    assert counts[4] == 0
    assert ((counts / draws - expected).abs() <= 5 * spread).all()


def test_greedy_takes_the_first_of_the_best_and_ignores_filters() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0], [1.0, 0.0, -1.0]])
    assert TokenPicker(Sampler(top_k=1, top_p=0.1, seed=1), 2).pick(logits, [0, 1]) == [1, 0]


def test_repetition_penalty_counts_prompt_and_picked_tokens() -> None:
    picker = TokenPicker(Sampler(repetition_penalty=2.0), 1)
    picker.see(0, [3])
    logits = torch.tensor([[1.0, 1.5, 1.9, 3.0]])
    assert [picker.pick(logits, [0])[0] for _ in range(4)] == [2, 1, 3, 3]


@settings(max_examples=40, deadline=None)
@given(
    ends=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    seed=st.integers(-(2**70), 2**70),
    options=st.sampled_from(SETTINGS),
)
def test_a_row_draws_the_same_whatever_the_other_rows_do(ends: list[int], seed: int, options: dict) -> None:
    """Each row ends after its own number of tokens; row r alone gives what it gives in the batch."""
    rows, vocab = len(ends), 60
    logits = torch.randn(max(ends), rows, vocab, generator=torch.Generator().manual_seed(1))
    sampler = Sampler(**options, seed=seed)
    together: list[list[int]] = [[] for _ in range(rows)]
    picker = TokenPicker(sampler, rows)
    for step in range(max(ends)):
        active = [row for row in range(rows) if step < ends[row]]
        for row, token in zip(active, picker.pick(logits[step, active], active)):
            together[row].append(token)
    for row in range(rows):
        alone = TokenPicker(sampler, row + 1)
        assert together[row] == [alone.pick(logits[step, row : row + 1], [row])[0] for step in range(ends[row])]


def test_rows_draw_from_different_streams() -> None:
    logits = torch.zeros(4, 1000)
    picker = TokenPicker(Sampler(temperature=1.0, seed=0), 4)
    assert len(set(picker.pick(logits, range(4)))) > 1


def test_without_a_seed_torchs_global_generator_decides() -> None:
    logits = torch.zeros(1, 100_000)

    def draws() -> list[int]:
        picker = TokenPicker(Sampler(temperature=1.0), 1)
        return [picker.pick(logits, [0])[0] for _ in range(3)]

    torch.manual_seed(5)
    first = draws()
    second = draws()
    torch.manual_seed(5)
    assert draws() == first != second


@pytest.mark.parametrize("temperature", [1e-30, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.tensor([[1e4, 2e4, -1e4]])
    assert TokenPicker(Sampler(temperature=temperature, seed=1), 1).pick(logits, [0]) == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logit", [math.nan, -math.inf])
def test_logits_that_are_not_numbers_are_refused(temperature: float, logit: float) -> None:
    with pytest.raises(ModelError, match="not numbers"):
        TokenPicker(Sampler(temperature=temperature), 1).pick(torch.full((1, 8), logit), [0])


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": 0},
        {"top_k": 1.5},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
    ],
    ids=str,
)
def test_options_out_of_range_are_named(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Sampler(**options)


@pytest.mark.parametrize(
    ("defaults", "sampler"),
    [
        ({}, Sampler()),
        ({"temperature": 0.6, "top_p": 0.9, "eos_token_id": [1]}, Sampler()),
        ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1}, Sampler(repetition_penalty=1.1)),
        ({"do_sample": True}, Sampler(1.0, 50)),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}, Sampler(0.6, 20, 0.95)),
        ({"do_sample": True, "top_k": 0, "min_p": 0.1}, Sampler(1.0, None, None, 0.1)),
        ({"do_sample": True, "top_k": -1, "top_p": 1.0}, Sampler(1.0, None, 1.0)),
        ({"do_sample": True, "temperature": 0.0}, Sampler(0.0, 50)),
    ],
    ids=str,
)
def test_what_a_checkpoint_suggests_is_read_as_transformers_reads_it(defaults: dict, sampler: Sampler) -> None:
    assert Sampler.suggested(defaults) == sampler


def test_what_is_left_unsaid_is_what_transformers_takes() -> None:
    from transformers import GenerationConfig

    unsaid, sampler = GenerationConfig._get_default_generation_params(), Sampler.suggested({"do_sample": True})
    for name in ("temperature", "top_k", "repetition_penalty"):
        assert unsaid[name] == getattr(sampler, name)
    assert unsaid["do_sample"] is False and unsaid["top_p"] == 1.0 and sampler.top_p is None


def test_presence_and_frequency_penalties_count_the_answer_and_bias_adds() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 2.9]])
    picker = TokenPicker(Sampler(presence_penalty=0.2, frequency_penalty=0.4, logit_bias=((0, 0.5),)), rows=1)
    picker.see(0, [3, 3, 3])  # a prompt, which these penalties do not count
    # 3.0 falls to 2.4 when token 2 was taken once; then 2.9 to 2.3 likewise, then 2.4 to 2.0; token 0 stays at 1.5.
    assert [picker.pick(logits, [0])[0] for _ in range(4)] == [2, 3, 2, 3]
    picker = TokenPicker(Sampler(logit_bias=((0, 10.0), (2, float("-inf")))), rows=1)
    assert picker.pick(logits, [0]) == [0]
    assert torch.equal(logits, torch.tensor([[1.0, 2.0, 3.0, 2.9]])), "the caller's logits are as they were"


def test_pickers_of_one_row_each_draw_as_the_rows_of_one_picker() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(temperature=1.5, seed=5)
    together = TokenPicker(sampler, rows=3)
    apart = [TokenPicker(sampler, rows=1, first=row) for row in range(3)]
    for _ in range(5):
        expected = together.pick(logits, [0, 1, 2])
        assert [picker.pick(logits[row : row + 1], [0])[0] for row, picker in enumerate(apart)] == expected
