"""Carries in 16 and 8 bits: the codes, where a row is rounded, what a snapshot stores, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lmstate
from lmstate.errors import SnapshotError, StateError, UnsupportedError
from lmstate.models.layers.mamba2 import Mamba2
from lmstate.ops.recurrent.carry_codes import carry_codes, carry_numbers
from tests.zoo import ours, pair, text

SUMS = {  # parts of a carry that are rounded, by the case of each recurrence that is a layer by itself
    "qwen3_5": ["recurrent"], "kimi_linear": ["recurrent"], "mamba2": ["ssm"], "mamba": ["ssm"],
    "recurrent_gemma": ["recurrent"], "minimax": ["recurrent"], "xlstm": ["recurrent"],
    "rwkv": ["numerator", "denominator"],
}  # fmt: skip
every_width = pytest.mark.parametrize("bits", [16, 8])


def ids(length: int, seed: int = 0) -> list[int]:
    return text(length, seed=seed)[0].tolist()


def rounded(x: Tensor, bits: int, *turns: int) -> Tensor:
    return carry_numbers(*carry_codes(x, bits, torch.tensor(turns)))


def numbers() -> Tensor:
    """float32 `[3, 5, 7, 33]` of all magnitudes, in groups of their own and mixed."""
    x = torch.randn(3, 5, 7, 33, generator=torch.Generator().manual_seed(0))
    x[0] *= torch.logspace(-45, 38, 33)
    x[1] *= torch.logspace(-45, 38, 35).view(5, 7, 1)
    return x


@every_width
def test_what_was_rounded_is_rounded_to_itself(bits: int) -> None:
    once = rounded(numbers(), bits, 1, 2, 3)
    for turn in range(400):
        assert torch.equal(rounded(once, bits, turn, turn + 9, 7 * turn), once)
    codes, scales = carry_codes(once, bits, torch.tensor([0, 0, 0]))
    assert codes.dtype == (torch.int8 if bits == 8 else torch.int16) and scales.dtype == torch.uint8
    assert codes.shape == once.shape and scales.shape == (3, -(-5 * 7 * 33 // 32))


@every_width
def test_a_number_goes_to_one_of_its_two_neighbors_and_stays_on_average(bits: int) -> None:
    x = torch.randn(1, 4096, generator=torch.Generator().manual_seed(0))
    peak = x.view(-1, 32).abs().amax(-1, keepdim=True)
    unit = (2.0 ** (peak.log2().floor() - (bits - 2))).expand(-1, 32).reshape(1, -1)
    error = torch.stack([rounded(x, bits, turn) - x for turn in range(256)]) / unit
    below_most = x.abs() < unit * (2 ** (bits - 1) - 2)  # the largest code is not exceeded
    assert error.abs().max() <= 1.0
    assert error.mean(0)[below_most].abs().max() < 0.02  # to the nearest it would be up to 0.5
    assert error.mean(-1).abs().max() < 0.02


@every_width
def test_groups_that_are_not_finite_stay_so_and_change_no_other(bits: int) -> None:
    x = torch.ones(2, 96)
    x[0, 40], x[1, 0], x[1, 95] = torch.inf, torch.nan, -torch.inf
    got = rounded(x, bits, 1, 1)
    bad = torch.zeros(2, 3, 32, dtype=torch.bool)
    bad[0, 1] = bad[1, 0] = bad[1, 2] = True
    assert torch.equal(got.isnan(), bad.view(2, 96))
    assert torch.equal(got[~got.isnan()], x[~bad.view(2, 96)])


@every_width
@pytest.mark.parametrize("case", SUMS)
def test_a_row_is_rounded_at_multiples_of_64_and_nowhere_else(case: str, bits: int) -> None:
    """A state of full precision whose snapshots are rounded by hand says the same, to the bit."""
    model, tokens = ours(case), ids(200)
    at_once = model([tokens], model.new_state(carries=bits), logits="all")[0]
    state, parts = model.new_state(), []
    for turn, start in enumerate(range(0, len(tokens), 64)):
        snapshot = state.snapshot() if start else None
        if snapshot is not None:
            layers = tuple(by_hand(layer, SUMS[case], bits, turn) for layer in snapshot.layers)
            state.restore(0, replace(snapshot, layers=layers))
        parts.append(model([tokens[start : start + 64]], state, logits="all")[0])
    assert torch.equal(torch.cat(parts), at_once)
    exact = model([tokens], model.new_state(), logits="all")[0]
    assert torch.equal(at_once[:64], exact[:64]) and not torch.equal(at_once[64:], exact[64:])


def by_hand(layer: Mapping[str, Tensor], names: list[str], bits: int, turn: int) -> Mapping[str, Tensor]:
    if not any(name in layer for name in names):
        return layer
    return {**layer, **{name: rounded(layer[name][None], bits, turn)[0] for name in names if name in layer}}


@pytest.mark.parametrize("case", ["qwen3_5", "mamba2", "rwkv"])
def test_drafts_forks_rewinds_and_snapshots_around_a_multiple_change_no_bit(case: str) -> None:
    model, tokens = ours(case), ids(90)
    whole = model([tokens], model.new_state(carries=8), logits="all")[0]
    wrong = [token % 98 + 1 for token in tokens]

    def check(state: lmstate.State, row: int = 0) -> None:
        at = state.lengths[row]
        logits = model(
            [tokens[at : at + 2] if index == row else [] for index in range(state.rows)], state, logits="all"
        )
        assert torch.equal(logits[row], whole[at : at + 2]), at

    for start in (56, 60, 63, 64, 66):
        begun = model.new_state(carries=8)
        model([tokens[:start]], begun)
        for accepted in (1, 2, 4, 7):
            at = start + accepted
            state = copy.deepcopy(begun)
            model([tokens[start:at] + wrong[at : at + 2]], state, logits="all", commit=False)
            state.commit([accepted])
            fork, back, restored = copy.deepcopy(state), copy.deepcopy(state), model.new_state(2, carries=8)
            restored.restore(1, state.snapshot())
            fork.select([None, 0])
            back.rewind(0, at - 1)
            for each, row in ((state, 0), (fork, 1), (restored, 1), (back, 0)):
                check(each, row)
            for to in {at, 65, 67, start - 3} & {*range(at + 1)}:
                back = copy.deepcopy(state)
                assert back.rewind_cost(0, to) == 0
                back.rewind(0, to)
                check(back)


@every_width
def test_a_snapshot_stores_the_bits_at_a_multiple_of_64_and_floats_elsewhere(bits: int, tmp_path: Path) -> None:
    model, tokens = ours("mamba2"), ids(140)
    state, exact = model.new_state(carries=bits), model.new_state()
    for length in (64, 128, 135):
        for each in (state, exact):
            model([tokens[each.lengths[0] : length]], each)
        kept, layer = state.snapshot(), state.snapshot().layers[0]
        stored = layer[f"ssm.int{bits}"]
        floats = exact.snapshot().layers[0]["ssm"]
        whole = length % 64 == 0
        assert stored.dtype == ((torch.int8 if bits == 8 else torch.int16) if whole else torch.float32)
        assert set(layer) == {"conv", f"ssm.int{bits}", *(["ssm.scales"] if whole else [])}
        if whole:
            assert stored.nbytes + layer["ssm.scales"].nbytes < floats.nbytes * (bits + 1) / 32
        path = tmp_path / f"{length}.lmstate"
        kept.save(path)
        other = model.new_state(2, carries=bits)
        other.restore(1, lmstate.Snapshot.load(path))
        want = model([[*tokens[length:], 5]], state, logits="all", commit=False)
        state.discard()
        assert torch.equal(model([[], [*tokens[length:], 5]], other, logits="all", commit=False)[1], want[0])


def test_snapshots_of_other_bits_are_refused() -> None:
    model, tokens = ours("qwen3_5"), ids(70)
    for length in (64, 70):
        kept = {}
        for bits in (32, 16, 8):
            state = model.new_state(carries=bits)
            model([tokens[:length]], state)
            kept[bits] = state.snapshot()
        for bits, snapshot in kept.items():
            for other in {32, 16, 8} - {bits}:
                state = model.new_state(carries=other)
                model([tokens[:7]], state)
                with pytest.raises(SnapshotError, match="the same carries= takes it"):
                    state.restore(0, snapshot)
                assert state.tokens(0) == tokens[:7]


def test_damaged_codes_are_refused() -> None:
    model = ours("mamba2")
    state = model.new_state(carries=8)
    model([ids(64)], state)
    good = state.snapshot()
    codes, scales = good.layers[0]["ssm.int8"], good.layers[0]["ssm.scales"]
    for damage in (
        {"ssm.int8": codes.short()}, {"ssm.int8": codes.flatten()}, {"ssm.int8": codes.float()},
        {"ssm.int8": codes[:, :, :0]}, {"ssm.scales": scales[:-1]}, {"ssm.scales": scales.int()},
        {"ssm.scales": scales[None]},
    ):  # fmt: skip
        layers = ({**good.layers[0], **damage}, *good.layers[1:])
        with pytest.raises(SnapshotError):
            state.restore(0, replace(good, layers=layers))
    with pytest.raises(SnapshotError):  # at another position it would not have been rounded
        state.restore(0, replace(good, tokens=good.tokens[:63], cached=63))
    assert state.lengths == [64]


def test_what_is_refused() -> None:
    model = ours("mamba2")
    for bits in (4, 0, 64):
        with pytest.raises(
            StateError, match=rf"carries={bits}\) was asked for; carries are stored in 32, 16 or 8 bits"
        ):
            model.new_state(carries=bits)
    with pytest.raises(UnsupportedError, match="a static state was asked for with carries=8"):
        model.new_state(capacity=64, static=True, carries=8)


def test_gradients_through_rounded_carries_are_refused() -> None:
    model = pair("mamba2")[1]
    mixer = model.blocks[0].mixer
    assert isinstance(mixer, Mamba2)
    decays = mixer.A.requires_grad_()
    try:
        state = model.new_state(carries=8)
        model([ids(64)], state).sum().backward(retain_graph=True)
        assert decays.grad is not None and decays.grad.any()
        with pytest.raises(UnsupportedError, match="through carries of 8 bits"):
            model([ids(6)], state).sum().backward()
    finally:
        decays.requires_grad_(False).grad = None
