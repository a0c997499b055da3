"""Rows of a StateCache are reordered from where they differ, and its forks share memory until one of them writes."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from lmstate.integrations.transformers import StateCache
from lmstate.integrations.transformers.cache.layers.growable import GrowableTensor, agreement
from lmstate.integrations.transformers.cache.layers.recurrent import RecurrentLayer
from tests.integrations.models import call, decoder, text
from tests.integrations.test_moving import KINDS, fed, goes_on_as

BEAMS = ("llama", "mistral", "gemma3", "llama4", "deepseek_v3", "deepseek_v32", "gemma3n")


class Copied(TorchDispatchMode):
    """Counts the floats that are written by copies: gathers, scatters, clones and concatenations."""

    COPIES = ("index_select", "index_copy_", "index", "clone", "copy_", "cat", "_to_copy", "repeat_interleave")

    def __init__(self) -> None:
        super().__init__()
        self.floats = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.__name__.split(".")[0] in self.COPIES:
            written = args[3] if func.__name__.startswith("index_copy_") else out
            self.floats += written.numel() if written.is_floating_point() else 0
        return out


@contextmanager
def copied() -> Iterator[Copied]:
    with torch.no_grad(), Copied() as count:
        yield count


def storages(cache: StateCache) -> set[int]:
    """The memory of all keys, values, tails and carries."""
    found = set()
    for layer in cache.layers:
        held: list[Tensor | None] = [getattr(layer, "keys", None), getattr(layer, "values", None)]
        if isinstance(layer, RecurrentLayer):
            held += [*layer.conv_states.values(), *layer.recurrent_states.values()]
        found |= {x.untyped_storage().data_ptr() for x in held if x is not None}
    return found


@pytest.mark.parametrize("name", BEAMS)
def test_beams_are_those_of_the_dynamic_cache_to_the_bit(name: str) -> None:
    model = decoder(name)
    for beams in (4, 8):
        for ids in (text(30), text(30, rows=2)):
            ours, theirs = (
                model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, num_beams=beams, do_sample=False,
                    num_return_sequences=beams, past_key_values=cache, return_dict_in_generate=True, output_scores=True,
                )
                for cache in (StateCache(model), DynamicCache(config=model.config))
            )  # fmt: skip
            assert torch.equal(ours.sequences, theirs.sequences)
            assert torch.equal(ours.sequences_scores, theirs.sequences_scores)
            assert all(torch.equal(a, b) for a, b in zip(ours.scores, theirs.scores, strict=True))


@pytest.mark.parametrize("repeat", ("before", "after"))
def test_a_reorder_copies_only_what_lies_behind_the_common_prompt(repeat: str) -> None:
    """As `generate` does, which repeats a prompt before it is fed; or of a cache that is repeated afterwards."""
    model = decoder("llama")
    cache, twin = StateCache(model), DynamicCache(config=model.config)
    for held in (cache, twin):
        if repeat == "before":
            call(model, text(200).repeat(4, 1), held)
        else:
            call(model, text(200), held)
            held.batch_repeat_interleave(4)
        call(model, text(3, rows=4, seed=1), held)
    width = sum(2 * layer.keys.shape[1] * layer.keys.shape[3] for layer in cache.layers)  # floats a token
    order = torch.tensor([1, 1, 2, 0])
    with copied() as ours:
        cache.reorder_cache(order)
    with copied() as theirs:
        twin.reorder_cache(order)
    assert ours.floats == 2 * 2 * 3 * width  # out and in, two rows that change, three tokens
    assert theirs.floats == 4 * 203 * width
    for ours_layer, theirs_layer in zip(cache.layers, twin.layers):
        assert torch.equal(ours_layer.keys, theirs_layer.keys) and torch.equal(ours_layer.values, theirs_layer.values)


@pytest.mark.parametrize("name", ("llama", "gemma3", "qwen3_next"))
def test_rows_that_stay_where_they_are_are_not_copied(name: str) -> None:
    _, cache = fed(name, rows=3)
    with copied() as count:
        cache.reorder_cache(torch.arange(3))
    assert count.floats == 0


def test_beams_copy_no_prompt_in_any_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt, floats = decoder("llama"), text(150), []
    reorder = StateCache.reorder_cache

    def counted(cache: StateCache, order: Tensor) -> None:
        with copied() as count:
            reorder(cache, order)
        floats.append(count.floats)

    monkeypatch.setattr(StateCache, "reorder_cache", counted)
    cache = StateCache(model)
    model.generate(prompt, max_new_tokens=12, num_beams=4, do_sample=False, past_key_values=cache)
    a_token = sum(x[:, :, :1].numel() for layer in cache.layers for x in (layer.keys, layer.values))
    assert floats and all(done <= 2 * new * a_token for new, done in enumerate(floats, start=1))


def test_a_reorder_puts_the_right_rows_behind_the_window() -> None:
    """Sliding layers leave tokens behind, and what rows have in common moves with the rest."""
    model = decoder("mistral")
    caches = StateCache(model), DynamicCache(config=model.config)
    chance, ids = random.Random(0), text(20).repeat(4, 1)
    for step in range(150):
        ours, theirs = (call(model, ids, cache) for cache in caches)
        assert torch.equal(ours, theirs), step
        order = torch.tensor([chance.randrange(4) for _ in range(4)])
        for cache in caches:
            cache.reorder_cache(order)
        ids = text(chance.choice((1, 1, 1, 3)), rows=4, seed=step)


def test_growable_tensors_and_their_copies_hold_what_plain_tensors_would() -> None:
    """Any order of growing, cutting, selecting and forking; values repeat, so that rows agree by chance as well."""
    for seed in range(30):
        chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        held: list[tuple[GrowableTensor, Tensor | None, Tensor | None]] = [(GrowableTensor(), None, None)]
        for _ in range(80):
            place = chance.randrange(len(held))
            room, view, plain = held[place]
            move = chance.choice(("extend", "extend", "extend", "cut", "last", "select", "select", "fork", "drop"))
            with torch.inference_mode(chance.random() < 0.2), torch.set_grad_enabled(chance.random() < 0.2):
                if plain is None or view is None or move == "extend":
                    rows = chance.randrange(1, 4) if plain is None else plain.shape[0]
                    shape = (1 if chance.random() < 0.5 else rows, 2, chance.randrange(1, 40), 3)
                    new = torch.randint(2, shape, generator=generator).float().expand(rows, *shape[1:])
                    view, plain = room.extend(view, new), new if plain is None else torch.cat([plain, new], -2)
                elif move in ("cut", "last"):
                    kept = chance.randrange(1, plain.shape[-2] + 1)
                    view = getattr(room, move)(view, kept)
                    plain = plain[..., :kept, :] if move == "cut" else plain[..., plain.shape[-2] - kept :, :]
                elif move == "select":
                    rows = plain.shape[0]
                    count = rows if chance.random() < 0.8 else chance.randrange(1, 5)
                    order = torch.tensor([chance.randrange(rows) for _ in range(count)])
                    view, plain = room.select(view, order), plain.index_select(0, order)
                elif move == "fork":
                    shared = {id(x): x for x in (room.slots, room.view) if x is not None}
                    held.append((copy.deepcopy(room, shared), view, plain))
                elif len(held) > 1:
                    held.pop(place)
                    continue
            held[place] = room, view, plain
            del room
            for _, is_, should in held:
                assert (is_ is None and should is None) or torch.equal(is_, should), (seed, move)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64))
def test_rows_agree_as_far_as_their_bits_do(dtype: torch.dtype) -> None:
    a = torch.arange(2 * 300 * 4).view(2, 300, 4).remainder(7).to(dtype)
    assert agreement(a, a.clone()) == 300
    for place in (0, 1, 63, 64, 150, 299):
        b = a.float().clone()
        b[1, place, 2] += 1
        assert agreement(a, b.to(dtype)) == place
    zeros = torch.zeros(1, 5, 1, dtype=torch.float32)
    assert agreement(zeros, -zeros) == 0
    assert agreement(zeros / 0, zeros / 0) == 5


@pytest.mark.parametrize("name", (*KINDS, "zamba2", "inkling", "deepseek_v32"))
def test_a_fork_costs_no_memory_until_one_of_the_two_goes_on(name: str) -> None:
    model, cache = fed(name)
    with copied() as count:
        forks = [cache.fork(), copy.deepcopy(cache), cache.fork().fork()]
    assert count.floats == 0
    assert all(storages(fork) == storages(cache) for fork in forks)
    texts = [text(40, 2)]
    for seed, fork in enumerate(forks):
        for token in text(6, 2, seed=seed + 1).split(1, dim=1):
            call(model, token, fork)
        texts.append(torch.cat([text(40, 2), text(6, 2, seed=seed + 1)], dim=1))
    carries = [layer for layer in cache.layers if isinstance(layer, RecurrentLayer)]
    if carries:
        assert not storages(forks[0]) & storages(forks[1])
    everything = [cache, *forks]
    for held, ids in zip(reversed(everything), reversed(texts)):
        goes_on_as(model, held.fork(), ids)
        for to in (ids.shape[1] - 2, 38):  # recurrent layers are fed the ids again that this one was fed
            held.rewind(to=to)
            goes_on_as(model, held.fork(), ids[:, :to])


def test_a_part_of_the_model_writes_no_carry_that_a_fork_shares() -> None:
    model, cache = fed("qwen3_next")
    fork = cache.fork()
    with torch.no_grad():
        model.model(text(1, 2, seed=1), past_key_values=fork, use_cache=True)
    goes_on_as(model, cache, text(40, 2))
    goes_on_as(model, fork, torch.cat([text(40, 2), text(1, 2, seed=1)], dim=1))


def test_one_fork_goes_on_behind_the_common_tokens_and_the_others_elsewhere() -> None:
    model, cache = fed("llama")
    first, second = cache.fork(), cache.fork()
    with copied() as count:
        call(model, text(1, 2, seed=1), first)
    assert storages(first) == storages(cache)
    call(model, text(1, 2, seed=2), second)
    call(model, text(1, 2, seed=3), cache)
    assert not storages(first) & storages(second) and not storages(cache) & (storages(first) | storages(second))
    a_token = sum(x[:, :, :1].numel() for layer in cache.layers for x in (layer.keys, layer.values))
    assert 0 < count.floats < 40 * a_token
    for seed, held in enumerate((first, second, cache), start=1):
        goes_on_as(model, held, torch.cat([text(40, 2), text(1, 2, seed=seed)], dim=1))


def test_a_cache_whose_forks_are_gone_is_reordered_in_place_again() -> None:
    model, cache = fed("llama")
    fork = cache.fork()
    before = storages(cache)
    del fork
    with torch.no_grad():
        cache.reorder_cache(torch.tensor([1, 0]))
    assert storages(cache) == before
    fork = cache.fork()
    with torch.no_grad():
        cache.reorder_cache(torch.tensor([1, 0]))
    assert not storages(cache) & before
    goes_on_as(model, fork, text(40, 2)[[1, 0]])
    goes_on_as(model, cache, text(40, 2))


@pytest.mark.parametrize("name", KINDS)
def test_what_was_held_in_inference_mode_is_forked_and_reordered_outside(name: str) -> None:
    model, cache = decoder(name), StateCache(decoder(name))
    with torch.inference_mode():
        call(model, text(40, 2), cache)
        inside = cache.fork()
        call(model, text(2, 2, seed=1), inside)
        inside.reorder_cache(torch.tensor([1, 0]))
    fork = cache.fork()
    fork.reorder_cache(torch.tensor([1, 0]))
    goes_on_as(model, fork, text(40, 2)[[1, 0]])
    goes_on_as(model, cache, text(40, 2))
    goes_on_as(model, inside, torch.cat([text(40, 2), text(2, 2, seed=1)], dim=1)[[1, 0]])


def test_gradients_pass_through_a_cache_that_is_forked_and_reordered() -> None:
    model = copy.deepcopy(decoder("llama"))
    gradients = []
    for cache in (StateCache(model), DynamicCache(config=model.config)):
        model.zero_grad()
        first = model(text(20, 2), past_key_values=cache, use_cache=True).logits
        fork = copy.deepcopy(cache) if isinstance(cache, StateCache) else None
        cache.reorder_cache(torch.tensor([1, 0]))
        second = model(text(3, 2, seed=1), past_key_values=cache, use_cache=True).logits
        if fork is not None:
            with torch.no_grad():
                fork.reorder_cache(torch.tensor([1, 1]))
                call(model, text(3, 2, seed=2), fork)
        (first.sum() + second.square().sum()).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_rows_that_are_not_held_are_refused_and_nothing_changes() -> None:
    model, cache = fed("llama")
    for rows in ([0, 2], [-1, 0]):
        with pytest.raises(IndexError, match="batch of 2 rows"):
            cache.batch_select_indices(torch.tensor(rows))
    goes_on_as(model, cache, text(40, 2))
