"""Heads as drafters: they change no token, and their layers follow the state wherever it goes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lmstate
from lmstate.errors import PendingError, UnsupportedError
from lmstate.generation import Generation, Sampler
from lmstate.ops import dispatch
from lmstate.speculation import Draft, HeadsDrafter, TextDrafter
from lmstate.training import NetworkAdapter, PromptTuningConfig
from tests.generation.fake_model import FakeTokenizer
from tests.heads.zoo import HEADS, pair
from tests.invariants.mirror import Mirror, bytes_held
from tests.speculation.drafters import always
from tests.zoo import VOCAB, text

ROWS = 3
BOUND = 1e-4


def speaking(case: str) -> lmstate.Model:
    return speaking_model(pair(case).ours)


def speaking_model(model: lmstate.Model) -> lmstate.Model:
    return replace(model, _tokenizer=FakeTokenizer(), eos_ids=frozenset())  # type: ignore[arg-type]


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    return [text(length, seed=seed + length)[0].tolist() for length in lengths]


def heads_layers(state: lmstate.State, row: int) -> list[dict[str, Tensor]]:
    """What the layers of the heads hold of a row."""
    return list(state.snapshot(row).layers[-len(state.user().heads) :])  # type: ignore[attr-defined]


def check_heads(model: lmstate.Model, state: lmstate.State, bound: float = BOUND) -> None:
    """Every row's layers of the heads are those of its tokens fed whole."""
    idle: list[list[int]] = [[] for _ in range(state.rows)]
    model(idle, state)  # what is queued
    assert sum(state.memory().values()) == bytes_held(state)
    for row in range(state.rows):
        whole = model.new_state()
        model([state.tokens(row)], whole)
        for own, expected in zip(heads_layers(state, row), heads_layers(whole, 0), strict=True):
            assert own.keys() == expected.keys()
            for name, tensor in expected.items():
                count = min(tensor.shape[-2], own[name].shape[-2]) if tensor.ndim > 1 else None
                one, other = (t if count is None else t[..., t.shape[-2] - count :, :] for t in (own[name], tensor))
                torch.testing.assert_close(one, other, atol=bound, rtol=bound)


@pytest.mark.parametrize("case", HEADS)
def test_greedy_with_heads_equals_greedy_without(case: str) -> None:
    """Ragged rows; a rewind, a fork and a restore between two answers; the heads' layers equal to recomputation."""
    model = speaking(case)
    rng = random.Random(case)
    plain, drafted = model.new_state(ROWS), model.new_state(ROWS)
    prompts = prompts_of(7, 1, 19)
    for turn in range(2):
        budget = rng.randint(8, 14)
        list(Generation(model, prompts, plain, draft=None, max_new_tokens=budget))
        speculator = always(HeadsDrafter(model, drafted), VOCAB, rows=ROWS, depth=4)
        generation = Generation(model, prompts, drafted, draft=speculator, max_new_tokens=budget)
        list(generation)
        assert generation.report().draft.drafted > 0
        assert [drafted.tokens(row) for row in range(ROWS)] == [plain.tokens(row) for row in range(ROWS)]
        back, order = rng.randint(0, 9), rng.choice([[0, 1, 2], [2, 2, 0], [1, 0, 0]])
        for state in (plain, drafted):
            state.select(order)
            state.rewind(1, state.lengths[1] - back)
            state.restore(2, state.snapshot(0))
        check_heads(model, drafted)
        prompts = prompts_of(3, 5, 2, seed=turn + 50)


@pytest.mark.parametrize("case", ["deepseek_v3-two", "qwen3_next", "mimo_v2_flash", "mellum", "deepseek_v4"])
def test_layers_of_heads_do_not_depend_on_the_cut(case: str) -> None:
    model = speaking(case)
    ids = text(40, rows=2)
    state = model.new_state(2)
    for start, stop in [(0, 1), (1, 2), (2, 9), (9, 30)]:
        model(ids[:, start:stop], state)
    model(ids[:, 30:40], state, logits="all", commit=False)
    state.commit([0, 7])
    model([ids[0, 30:40].tolist(), []], state, logits="all", commit=False)
    state.discard()
    model([ids[0, 30:33].tolist(), ids[1, 37:].tolist()], state)
    check_heads(model, state)
    for row, to in ((0, 30), (1, 3), (0, 1), (1, 0), (0, 0)):
        state.rewind(row, to)
        model([[5, 6], [7, 8, 9]], state)
        check_heads(model, state)


@pytest.mark.parametrize(
    "case",
    [
        *("deepseek_v3", "deepseek_v3-two", "qwen3_5", "mimo_v2_flash", "ernie4_5_moe", "deepseek_v4", "glm5_next"),
        "qwen4_exp",
    ],
)
def test_a_draft_is_what_the_heads_say_of_their_own_words(case: str) -> None:
    """The drafted tokens and their probabilities, one by one from scratch with transformers' heads."""
    made = pair(case)
    model, depth = made.ours, 3 if made.case.heads == 1 else made.case.heads
    rows = prompts_of(9, 4, 17)
    state = model.new_state(ROWS)
    logits = model(rows, state)
    assert logits is not None
    last = {row: int(logits[row].argmax()) for row in (0, 2)}
    before = [heads_layers(state, row) for row in range(ROWS)]
    drafts = model.draft_ahead(state, last, depth)
    assert drafts.keys() == last.keys() and state.pending == [0] * ROWS
    for row in range(ROWS):
        for own, expected in zip(heads_layers(state, row), before[row], strict=True):
            assert all(torch.equal(own[name], tensor) for name, tensor in expected.items())
    for row, draft in drafts.items():
        assert 1 <= len(draft.tokens) == len(draft.confidence) <= depth
        for at, (token, confidence) in enumerate(zip(draft.tokens, draft.confidence)):
            expected = made.ahead([*rows[row], last[row], *draft.tokens[:at]], at).softmax(-1)
            assert confidence == pytest.approx(float(expected[token]), abs=1e-3)
            assert float(expected[token]) == pytest.approx(float(expected.max()), abs=1e-4)


def check_learned(plain: lmstate.Model) -> None:
    """Behind learned vectors that are the embedding of token 0, a draft is the one behind that token as a text."""
    count = 5
    words = plain.embed.rows(torch.zeros(count, dtype=torch.int64)).float()
    adapter = NetworkAdapter(PromptTuningConfig(count), {"prompt_embeddings": words})
    model = replace(plain, network=adapter.applied(plain.network), _fingerprint=None)
    rows, last = prompts_of(7, 1, 19), {0: 3, 1: 5, 2: 7}
    opened, written = model.new_state(ROWS, capacity=22), plain.new_state(ROWS, capacity=22 + count)
    model(rows, opened)
    plain([[*[0] * count, *row] for row in rows], written)
    before = [heads_layers(opened, row) for row in range(ROWS)]
    assert model.draft_ahead(opened, last, 4) == plain.draft_ahead(written, last, 4)
    for row in range(ROWS):
        for own, expected in zip(heads_layers(opened, row), before[row], strict=True):
            assert all(torch.equal(own[name], tensor) for name, tensor in expected.items())
    check_heads(model, opened)


@pytest.mark.parametrize("case", [case for case, made in HEADS.items() if not made.streams])  # these read the tokens
def test_learned_positions_are_positions_of_the_heads_too(case: str) -> None:
    check_learned(pair(case).ours)


@pytest.mark.parametrize("case", ["qwen3_next", "glm4_moe"])
def test_auto_drafts_with_heads_and_a_seed_gives_the_same_text(case: str) -> None:
    model = speaking(case)
    prompt = prompts_of(12)[0]
    plain = model.generate(prompt, draft=None, max_new_tokens=40, temperature=0.8, seed=3, return_ids=True)
    for draft in ("auto", "heads"):
        generation = Generation(
            model, [prompt], draft=draft, params=Sampler(temperature=0.8, seed=3), max_new_tokens=40
        )
        list(generation)
        assert generation.ids[0] == plain
        assert isinstance(generation._speculator.drafter, HeadsDrafter)  # type: ignore[union-attr]


def test_auto_takes_the_text_where_it_repeats_itself() -> None:
    model = speaking("mimo_v2_flash")
    repeating, fresh = prompts_of(12)[0] * 3, prompts_of(30, seed=9)[0]
    state = model.new_state(2)
    model([repeating[:-1], fresh[:-1]], state)
    drafter = HeadsDrafter(model, state, TextDrafter())
    drafter.observe([0, 1], [repeating, fresh])
    repeated, ahead = drafter.propose([0, 1], 6)
    assert repeated.tokens == tuple(repeating[:6])
    assert ahead == Draft(*model.draft_ahead(state, {1: fresh[-1]}, 6)[1]) and 0 < len(ahead) <= 3


@pytest.mark.skipif(dispatch.choice().library is None, reason="torch's products round by the number of rows")
def test_heads_leave_the_bits_of_a_model_without() -> None:
    model = speaking("qwen3_5")
    bare = replace(model, network=replace(model.network, heads=()))
    prompt = prompts_of(8)[0]
    state, plain = model.new_state(), bare.new_state()
    list(Generation(bare, [prompt], plain, draft=None, max_new_tokens=120))
    speculator = always(HeadsDrafter(model, state), VOCAB, depth=3)
    list(Generation(model, [prompt], state, draft=speculator, max_new_tokens=120))
    assert state.tokens(0) == plain.tokens(0)
    assert torch.equal(model([[]], state), bare([[]], plain))  # type: ignore[arg-type]


def test_drafts_of_heads_stop_at_the_edge_of_capacity() -> None:
    model = speaking("deepseek_v3")
    prompt = prompts_of(10)[0]
    plain, state = model.new_state(capacity=25), model.new_state(capacity=25)
    without = Generation(model, [prompt], plain, draft=None, max_new_tokens=30)
    drafted = Generation(
        model, [prompt], state, draft=always(HeadsDrafter(model, state), VOCAB, depth=7), max_new_tokens=30
    )
    list(without)
    list(drafted)
    assert state.tokens(0) == plain.tokens(0) and state.lengths == [25]
    assert drafted.report().finished == without.report().finished == ("capacity",)
    assert model.draft_ahead(state, {0: 5}, 4)[0].tokens == ()


def test_snapshots_hold_the_heads_and_refuse_a_model_without(tmp_path: Path) -> None:
    model = speaking("qwen3_next")
    state = model.new_state()
    logits = model([prompts_of(21)[0]], state)
    assert logits is not None
    state.snapshot().save(tmp_path / "row")
    restored = model.new_state(2)
    restored.restore(1, lmstate.Snapshot.load(tmp_path / "row"))
    last = int(logits.argmax())
    assert model.draft_ahead(restored, {1: last}, 3)[1] == model.draft_ahead(state, {0: last}, 3)[0]
    bare = replace(model, network=replace(model.network, heads=()), _fingerprint=None)
    with pytest.raises(lmstate.SnapshotError):
        bare.new_state().restore(0, state.snapshot())


@pytest.mark.parametrize("case", ["deepseek_v3", "glm4_moe", "qwen3_next"])
def test_going_back_within_the_window_or_to_a_mark_computes_nothing_again(case: str) -> None:
    model, ids = speaking(case), text(60)[0].tolist()
    state = model.new_state(rewind=16)
    model([ids[:20]], state)
    state.mark(0)
    for start in range(20, 60, 8):
        model([ids[start : start + 8]], state)
    assert [state.rewind_cost(0, to) for to in range(44, 61)] == [0] * 17
    for to in (44, 20):
        state.rewind(0, to)
        assert state.rewind_cost(0, to) == 0
        check_heads(model, state)


def heads_entries(state: lmstate.State, length: int) -> list[dict[str, Tensor]]:
    """What the heads hold of row 0: the last hidden state, and an entry a token."""
    held = [layer.capture(0, length) for layer in state.layers[-len(state.user().heads) :]]  # type: ignore[attr-defined]
    return [{"hidden": dict(own)["0.hidden"], "k": own["1.0.k"], "v": own["1.0.v"]} for own in held]  # type: ignore[misc]


@pytest.mark.parametrize("span", [(0, 1), (0, 7), (1, 9), (5, 25), (36, 39)])
def test_a_span_is_dropped_from_the_heads_as_from_the_model(span: tuple[int, int]) -> None:
    model, ids = speaking("glm4_moe"), text(40)[0].tolist()
    bare = replace(model, network=replace(model.network, heads=()), _fingerprint=None)
    state, plain, (start, stop) = model.new_state(), bare.new_state(), span
    for owner, each in ((model, state), (bare, plain)):
        owner([ids], each)
    (whole,) = heads_entries(state, 40)
    for each in (state, plain):
        each.drop(0, start, stop)
    gone, length = stop - start, 40 - stop + start
    assert state.lengths == [length]
    first = max(0, start - 1)  # entry p is of token p + 1
    (held,) = heads_entries(state, length)
    rope = model.heads[0].blocks[0].mixer.rope  # type: ignore[union-attr]
    moved = rope.rotate_by(whole["k"][:, first + gone :], -gone)  # type: ignore[union-attr]
    expected = {
        "k": torch.cat([whole["k"][:, :first], moved], 1),
        "v": torch.cat([whole["v"][:, :first], whole["v"][:, first + gone :]], 1),
        "hidden": whole["hidden"],
    }
    for name, tensor in expected.items():
        torch.testing.assert_close(held[name], tensor, atol=BOUND, rtol=BOUND)
    assert state.rewind_cost(0, length) == 0 and model.draft_ahead(state, {0: 5}, 3)[0].tokens
    torch.testing.assert_close(model([[5, 6]], state), bare([[5, 6]], plain), atol=0, rtol=0)
    state.rewind(0, 0)
    model([ids], state)
    check_heads(model, state)


@pytest.mark.parametrize("case", ["glm4_moe", "deepseek_v3-two"])
def test_the_end_of_a_row_is_dropped_where_the_token_before_it_is_known(case: str) -> None:
    model, ids = speaking(case), text(40)[0].tolist()
    state, other = model.new_state(), model.new_state()
    for each in (state, other):
        model([ids], each)
    state.drop(0, 30, 40)
    assert state.tokens(0) == ids[:30]
    check_heads(model, state)
    with pytest.raises(UnsupportedError, match="Rewind to 3"):
        other.drop(0, 3, 40)
    assert other.lengths == [40]
    check_heads(model, other)
    other.drop(0, 0, 40)
    model([[4, 5, 6]], other)
    check_heads(model, other)


def test_what_is_refused() -> None:
    model = speaking("qwen3_next")
    bare = replace(model, network=replace(model.network, heads=()), _fingerprint=None)
    static = model.new_state(capacity=32, static=True)
    evicting = model.new_state(kv=lmstate.kv.Recent(budget=16, sinks=2, recent=8))
    for owner, state in ((bare, bare.new_state()), (model, static), (model, evicting)):
        assert not owner.has_heads(state)
        with pytest.raises(UnsupportedError, match="heads=True"):
            owner.draft_ahead(state, {0: 1}, 2)
        with pytest.raises(ValueError, match="heads=True"):
            Generation(owner, [[1, 2]], state, draft="heads")
    state = model.new_state()
    assert model.draft_ahead(state, {0: 1}, 2)[0].tokens == ()  # an empty row
    model([[1, 2, 3]], state, logits="all", commit=False)
    with pytest.raises(PendingError, match="commit or discard"):
        model.draft_ahead(state, {0: 1}, 2)


@pytest.mark.parametrize("case", ["qwen3_next", "deepseek_v3-two"])
def test_every_way_through_the_model_feeds_the_heads(case: str) -> None:
    model = speaking(case)
    state = model.new_state(2)
    model([[1, 2, 3], [4]], state)
    model([[5, 6, 7], [8, 9]], state, parents=[[-1, 0, 0], [-1, -1]], commit=False)
    state.commit_path([[0, 2], [1]])
    model.trace([[10, 11], [12]], state, on=lambda name, read, made: None)
    model.hidden([[13], []], state)
    state.queue(1, [14, 15])
    check_heads(model, state)
    width = model.hidden([[16], [17]], state, commit=False)
    state.discard()
    model.hidden([[16], [17]], state, inputs=width, start=len(model.blocks))
    check_heads(model, state)


@pytest.mark.parametrize("kv", [torch.bfloat16, lmstate.kv.Quantized(8), lmstate.kv.Quantized(4)])
def test_heads_draft_on_stored_keys_of_any_kind(kv: object) -> None:
    model = speaking("qwen3_next")
    prompts = prompts_of(20, 3)
    plain, state = model.new_state(rows=2, kv=kv), model.new_state(rows=2, kv=kv)  # type: ignore[arg-type]
    list(Generation(model, prompts, plain, draft=None, max_new_tokens=30))
    drafter = always(HeadsDrafter(model, state), VOCAB, rows=2, depth=3)
    list(Generation(model, prompts, state, draft=drafter, max_new_tokens=30))
    assert [state.tokens(row) for row in range(2)] == [plain.tokens(row) for row in range(2)]


def test_exceptions_in_a_head_leave_the_state_as_it_was() -> None:
    model = speaking("glm4_moe")
    state = model.new_state()
    model([[1, 2, 3, 4]], state)
    before = model([[5, 6]], state, logits="all", commit=False)
    state.discard()

    class Failing:
        def __call__(self, *_: object) -> Tensor:
            raise KeyError("in a head")

    (head,) = model.heads
    failing = replace(head, blocks=(replace(head.blocks[0], mixer=Failing()),))  # type: ignore[arg-type]
    whole, model.network = model.network, replace(model.network, heads=(failing,))
    for run in (lambda: model([[5, 6]], state), lambda: model.draft_ahead(state, {0: 5}, 2)):
        with pytest.raises(KeyError, match="in a head"):
            run()
        assert state.lengths == [4] and state.pending == [0]
    model.network = whole
    assert torch.equal(model([[5, 6]], state, logits="all"), before)  # type: ignore[arg-type]
    check_heads(model, state)


def interleave(case: str, steps: int, seed: int) -> None:
    """Random moves of a state, with drafts of its heads between them; logits and heads as if fed from scratch."""
    rng = random.Random(seed)
    model = speaking(case)
    mirror = Mirror(model, ROWS)

    def tokens(most: int) -> list[list[int]]:
        return [[rng.randrange(1, VOCAB) for _ in range(rng.randint(0, most))] for _ in range(ROWS)]

    mirror.extend([row or [1] for row in tokens(9)])
    for _ in range(steps):
        move = rng.choice(["extend", "draft", "ahead", "rewind", "select", "restore"])
        row = rng.randrange(ROWS)
        if move == "extend":
            mirror.extend([own if len(mirror.rows[at]) < 60 else [] for at, own in enumerate(tokens(4))])
        elif move == "draft":
            new = tokens(5)
            mirror.draft(new, [rng.randint(0, len(own)) for own in new])
        elif move == "ahead":
            model.draft_ahead(mirror.state, {row: rng.randrange(VOCAB)}, rng.randint(1, 5))
        elif move == "rewind":
            mirror.rewind(row, rng.randint(0, len(mirror.rows[row])))
        elif move == "select":
            mirror.select([rng.choice([0, 1, 2, 2, None]) for _ in range(ROWS)])
        else:
            mirror.restore(row, mirror.state.snapshot(0), mirror.rows[0])
        mirror.check()
    check_heads(model, mirror.state)


@pytest.mark.parametrize("case", ["deepseek_v3-two", "qwen3_next", "mimo_v2_flash", "qwen4_exp"])
def test_random_moves_with_drafts_between_equal_recomputation(case: str) -> None:
    interleave(case, 25, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", HEADS)
def test_many_random_moves_with_drafts_between_equal_recomputation(case: str, seed: int) -> None:
    interleave(case, 150, seed)
