"""Trees of drafts: every node's logits are those of its path alone, and a committed path is as if it had been fed."""

from __future__ import annotations

import random

import pytest
import torch

import lmstate
from lmstate.generation import Sampler
from lmstate.generation.sampling import TokenPicker
from lmstate.speculation import verify_tree
from tests.speculation.test_greedy import KINDS, prompts_of, run, speaking
from tests.zoo import CASES, VOCAB, ours


def random_tree(rng: random.Random, nodes: int) -> tuple[list[int], list[int]]:
    """Tokens and parents."""
    return [rng.randrange(1, VOCAB) for _ in range(nodes)], [rng.randint(-1, node - 1) for node in range(nodes)]


def path_to(parents: list[int], node: int) -> list[int]:
    return [] if node == -1 else [*path_to(parents, parents[node]), node]


@pytest.mark.parametrize("case", [case for case in KINDS if case in CASES])
def test_a_tree_gives_each_path_its_own_logits_and_a_verdict_keeps_one(case: str) -> None:
    model, rng = ours(case), random.Random(case)
    state = model.new_state(rows=3)
    texts = prompts_of(11, 4, 9)
    model(texts, state)
    state.mark(0)
    for _ in range(2):
        trees = [random_tree(rng, nodes) for nodes in (rng.randint(2, 6), rng.randint(1, 5), 0)]
        tokens, parents = [tree[0] for tree in trees], [tree[1] for tree in trees]
        out = model(tokens, state, parents=parents, commit=False)
        assert out is not None and state.pending == [len(row) for row in tokens]
        for row in range(2):
            for node in range(len(tokens[row])):
                path = [tokens[row][at] for at in path_to(parents[row], node)]
                torch.testing.assert_close(out[row, node], model([texts[row] + path])[0, -1], atol=1e-4, rtol=1e-4)
        paths = [path_to(parents[row], rng.randint(-1, len(tokens[row]) - 1)) for row in range(3)]
        state.commit_path(paths)
        texts = [text + [row[at] for at in path] for text, row, path in zip(texts, tokens, paths)]
        assert [state.tokens(row) for row in range(3)] == texts and state.pending == [0, 0, 0]
        fresh = model([text[:] for text in texts], model.new_state(rows=3))
        torch.testing.assert_close(model([[], [], []], state), fresh, atol=1e-4, rtol=1e-4)
    state.rewind(0, 5)
    alone = model([[*texts[0][:5], 7]])[0, -1]
    torch.testing.assert_close(model([[7], [], []], state)[0], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["llama", "qwen3_next"])
def test_memory_counts_what_the_branches_of_a_tree_hold(case: str) -> None:
    model = ours(case)
    state, forked = model.new_state(), model.new_state()
    for each in (state, forked):
        model(prompts_of(7), each)
        each.mark(0)
    held = state.memory()
    model([[3, 4, 5]], state, parents=[[-1, -1, 1]], commit=False)
    forked.select([0, 0])
    model([[3], [4, 5]], forked, logits="all", commit=False)
    assert {**state.memory(), "tree": 0} == {**held, "tree": 0}
    assert state.memory()["tree"] == sum(forked.memory().values())  # all blocks are copied: all were written into
    state.discard()
    assert state.memory() == held


@pytest.mark.parametrize("removed", [0, 1])
@pytest.mark.parametrize("case", ["llama", "mistral", "qwen3_5"])
def test_a_row_that_was_removed_has_no_part_in_a_tree(case: str, removed: int) -> None:
    model, texts = ours(case), prompts_of(7, 9)
    state = model.new_state(rows=2)
    model(texts, state)
    state.remove(removed)
    kept = 1 - removed
    tree = [[[], [8, 9, 10]][row == kept] for row in range(2)]
    parents = [[-1, 0, 0] if row == kept else [] for row in range(2)]
    with pytest.raises(lmstate.StateError, match="was removed"):
        model([[8], [9]], state, parents=[[-1], [-1]], commit=False)
    model(tree, state, parents=parents, commit=False)
    state.commit_path([[0, 2] if row == kept else [] for row in range(2)])
    assert state.removed == {removed} and state.tokens(kept) == [*texts[kept], 8, 10]
    fresh = model([[*texts[kept], 8, 10]])[0, -1]
    torch.testing.assert_close(model([[], []], state)[kept], fresh, atol=1e-4, rtol=1e-4)
    assert state.add() == removed


def test_what_is_no_tree_or_no_path_is_refused_and_changes_nothing() -> None:
    model = ours("qwen3_5")
    state = model.new_state(capacity=12)
    before = model([[5, 6, 7]], state)
    for parents in ([[0, 0]], [[-1]], [[-1, 2]], [[-1, 0], []], [[-2, 0]]):
        with pytest.raises(lmstate.StateError):
            model([[8, 9]], state, parents=parents, commit=False)
    for options in ({"commit": True}, {"commit": False, "logits": "last"}):
        with pytest.raises(lmstate.StateError, match="commit_path"):
            model([[8, 9]], state, parents=[[-1, 0]], **options)
    with pytest.raises(lmstate.CapacityError):
        model([[8] * 10], state, parents=[list(range(-1, 9))], commit=False)
    with pytest.raises(lmstate.PendingError, match="no tree"):
        state.commit_path([[]])
    assert state.pending == [0]
    model([[8, 9, 10]], state, parents=[[-1, 0, 0]], commit=False)
    for path in ([1], [0, 1, 2], [3], [2, 0]):
        with pytest.raises(lmstate.PendingError, match="not a path"):
            state.commit_path([path])
    for forbidden in (state.commit, lambda: state.rewind(0, 1), lambda: state.snapshot(0), lambda: model([[1]], state)):
        with pytest.raises(lmstate.PendingError):
            forbidden()
    assert state.pending == [3]
    state.discard()
    assert state.pending == [0] and state.lengths == [3]
    assert torch.equal(model([[]], state), before)  # type: ignore[arg-type]


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(temperature=0.9, top_p=0.9, repetition_penalty=1.2, seed=4)])
def test_a_verified_tree_goes_the_way_of_plain_decoding(sampler: Sampler) -> None:
    model, rng = speaking("olmo_hybrid"), random.Random(2)
    prompt = prompts_of(9)[0]
    plain = model.new_state()
    run(model, [prompt], plain, None, max_new_tokens=24, params=sampler)
    whole = plain.tokens(0)
    state, picker, text = model.new_state(), TokenPicker(sampler, 1), list(prompt)
    picker.see(0, prompt)
    first = picker.pick(model([prompt], state), [0])  # type: ignore[arg-type]
    text += first
    steps = 0
    while len(text) < len(whole):
        # Two guesses at each of two places, one of them right.
        ahead = [*whole[len(text) : len(text) + 2], 3, 3][:2]
        tokens = [text[-1], rng.randrange(VOCAB), ahead[0], ahead[1], rng.randrange(VOCAB)]
        parents = [-1, 0, 0, 2, 2]
        out = model([tokens], state, parents=[parents], commit=False)
        assert out is not None

        def give(row: int, token: int) -> bool:
            text.append(token)
            return True

        path = verify_tree(out[0], 0, tokens, parents, picker, give)
        state.commit_path([path])
        steps += 1
    assert text[: len(whole)] == whole and steps < 12
