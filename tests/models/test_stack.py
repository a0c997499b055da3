"""A state's plan runs its steps as the blocks themselves would, and captured segments replay while nothing moved."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lmstate import kv, ops
from lmstate.models.block import Block
from lmstate.models.layers.moe import MixtureOfExperts
from lmstate.models.stack import EagerSegment, FusedSegment, Part, Plan
from lmstate.ops import dispatch
from lmstate.ops.fused.graph import fuses
from lmstate.state import Layout
from tests.ops.small_mixers import MIXERS
from tests.other_device import DEVICE, OtherDevice
from tests.sweeps import sampled
from tests.zoo import ours, text

CASES = [
    "llama",
    "mistral",
    "gemma3",
    "qwen3_5",
    "granitemoehybrid",
    "mamba2",
    "qwen3_moe",
    "gpt_oss-gate",
    "lfm2",
    "lfm3",
    "falcon_h1",
]
native = pytest.mark.skipif(dispatch.choice().library is None, reason="the references fuse nothing")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Part]]:
    """The parts that were fused, or run, one by one."""
    asked: list[Part] = []

    def noted(name: str) -> None:
        one = getattr(Part, name)
        monkeypatch.setattr(Part, name, lambda part, *given: (asked.append(part), one(part, *given))[1])

    noted("fuse")
    noted("run")
    yield asked


class Apart(Block):
    """A block that runs whole."""

    fusable = False


def twin(model: Any, state: Any) -> Any:
    """Another state that holds the same."""
    other = model.new_state()
    other.restore(0, state.snapshot())
    return other


POLICIES = {
    "all": None,
    "4 bits": kv.Quantized(4),
    "recent": kv.Recent(budget=12, sinks=2),
    "h2o": kv.H2O(budget=12, recent=4, sinks=1),
    "snapkv": kv.SnapKV(budget=12, window=4, sinks=1),
}


def talk(case: str, policy: kv.Policy | None) -> list[torch.Tensor]:
    """The logits of ragged steps, drafts, growing slots, a rewind and a copied row."""
    model, ids = ours(case), text(60)[0].tolist()
    state = model.new_state(rows=2, kv=policy)
    steps = [[ids[:9], ids[:4]], [[1], [2]], [[3, 4, 5], [6]], [[], [7]], *([[token], [token]] for token in ids[9:])]
    out = [model(step, state) for step in steps]
    out.append(model([[8, 9], [10, 11]], state, commit=False))
    state.commit([1, 2])
    out.append(model([[1], [1]], state))
    state.rewind(0, state.lengths[0] - 3)
    out += [model([[token], [2]], state) for token in (2, 3)]
    state.select([1, 1, 0])
    return out + [model([[token], [3], [4]], state) for token in (2, 3)]


@native
@pytest.mark.parametrize("case", sampled(CASES, ("llama", "mistral", "qwen3_5", "gpt_oss-gate", "lfm2", "falcon_h1")))
@pytest.mark.parametrize("policy", POLICIES)
def test_repeated_steps_give_the_same_bits(case: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    got = talk(case, POLICIES[policy])
    monkeypatch.setattr(FusedSegment, "_replay", lambda *given: False)
    assert all(torch.equal(one, other) for one, other in zip(got, talk(case, POLICIES[policy]), strict=True))


@native
@pytest.mark.parametrize(
    ("case", "policy"),
    [
        *(("llama", policy) for policy in POLICIES),
        ("mistral", "4 bits"),
        *((case, "all") for case in CASES[2:]),
        ("qwen3_5", "h2o"),
    ],
)
def test_the_next_step_asks_no_part(case: str, policy: str, asked: list[Part]) -> None:
    model = ours(case)
    state = model.new_state(kv=POLICIES[policy])
    for token in text(20)[0].tolist():
        model([[token]], state)
    asked.clear()
    model([[1]], state)
    if policy in ("all", "4 bits"):
        model([[2, 3]], state, commit=False)
        state.discard()
    assert not asked


@native
@pytest.mark.parametrize("case", ["qwen3_5", "granitemoehybrid", "mamba2", "lfm2", "falcon_h1"])
def test_rows_that_pass_checkpoints_at_different_steps_run_fused(case: str, asked: list[Part]) -> None:
    model = ours(case)
    state = model.new_state(rows=2)
    model([text(9)[0].tolist(), text(14)[0].tolist()], state)
    model([[1], [1]], state)
    asked.clear()
    for token in text(24)[0].tolist():  # row 0 passes 16 and 32, row 1 passes 16 and 32 at other steps
        model([[token], [token]], state)
    assert not asked


@native
@pytest.mark.parametrize("case", ["qwen3_5", "granitemoehybrid", "mamba2", "lfm2", "falcon_h1"])
def test_a_prompt_that_nobody_goes_back_into_runs_fused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = ours(case), text(40)[0].tolist()
    want, ran = model([ids], model.new_state()), []
    monkeypatch.setattr(Part, "run", lambda part, *given: ran.append(part))
    assert torch.equal(model([ids], model.new_state(), rewindable=False), want)
    assert not ran


def changed(model: Any) -> Iterator[str]:
    """Change a model in ways that move something."""
    mlp = model.blocks[0].mlp
    for mixer in (block.mixer for block in model.blocks):
        products = [getattr(mixer, name, None) for name in ("qkv", "qkvz", "project", "gates", "out")]
        for weight in filter(None, products):
            weight.storage = weight.storage / 2
            yield "another storage"
    mlp.down.storage.data = -mlp.down.storage
    yield "other memory of the same storage"
    model.blocks[0].mixer_norm.weight.data = model.blocks[0].mixer_norm.weight * 2
    yield "other memory of a norm"
    first, second, *rest = model.blocks
    second = dataclasses.replace(second, mlp=dataclasses.replace(mlp, act="gelu_tanh"))
    model.network = dataclasses.replace(model.network, blocks=(first, second, *rest))
    yield "another block"


@native
@pytest.mark.parametrize("case", ["llama", "gemma3", "qwen3_5", "granitemoehybrid"])
def test_what_moved_is_seen(case: str) -> None:
    model = copy.deepcopy(ours(case))
    state = model.new_state()
    for token in [*text(7)[0].tolist(), 1]:
        model([[token]], state)
    state.rewind(0, 7)
    before = model([[1]], twin(model, state))
    for what in changed(model):
        want = model([[1]], twin(model, state))  # no step of which came before
        assert torch.equal(model([[1]], state), want) and not torch.equal(want, before), what
        state.rewind(0, 7)
        before = want


@native
def test_an_expert_that_moved_is_seen() -> None:
    model = copy.deepcopy(ours("qwen3_moe"))
    mixture = next(block.mlp for block in model.blocks if isinstance(block.mlp, MixtureOfExperts))
    state = model.new_state()
    for token in [*text(7)[0].tolist(), 1]:
        model([[token]], state)
    state.rewind(0, 7)
    before = model([[1]], twin(model, state))
    for expert in mixture.experts:
        expert.down.storage = expert.down.storage / 2
    want = model([[1]], twin(model, state))
    assert torch.equal(model([[1]], state), want) and not torch.equal(want, before)


@native
def test_a_gradient_is_followed() -> None:
    model = copy.deepcopy(ours("llama"))
    state = model.new_state()
    for token in (1, 2, 3):
        model([[token]], state)
    weight = model.blocks[0].mlp.down.storage.requires_grad_()
    model([[4]], state).sum().backward()
    assert weight.grad is not None and weight.grad.abs().sum() > 0
    with torch.no_grad():
        assert not model([[5]], state).requires_grad


@native
@pytest.mark.parametrize("case", ["llama", "qwen3_5", "mamba2"])
def test_a_device_step_between_others(case: str) -> None:
    model, ids = ours(case), text(8)[0].tolist()
    fixed, plain = model.new_state(static=True, capacity=32), model.new_state()
    for place, token in enumerate(ids):
        want = model([[token]], plain)
        if place == 5:
            got = model.decode_step(torch.tensor([[token]]), fixed)
            fixed.commit()
        else:
            got = model([[token]], fixed)
        torch.testing.assert_close(got, want)


@native
def test_what_was_stored_before_it_grew_is_freed() -> None:
    model = ours("llama")
    state = model.new_state()
    for token in (1, 2, 3):
        model([[token]], state)
    old = weakref.ref(state.layers[0].view_cache[0])
    gc.disable()
    try:
        model([text(600)[0].tolist()], state)
        assert old() is None
    finally:
        gc.enable()


@native
def test_a_weight_changed_in_place_is_read_and_nothing_is_fused_again(asked: list[Part]) -> None:
    model = copy.deepcopy(ours("llama"))
    state = model.new_state()
    for token in (1, 2, 3):
        model([[token]], state)
    before = model([[4]], twin(model, state))
    model.blocks[0].mlp.down.storage.mul_(2)
    want = model([[4]], twin(model, state))
    asked.clear()
    got = model([[4]], state)
    assert not asked and torch.equal(got, want) and not torch.equal(got, before)


@native
def test_a_copied_state_goes_on_alone() -> None:
    model = ours("qwen3_5")
    state = model.new_state()
    for token in (1, 2, 3):
        model([[token]], state)
    assert isinstance(state.decode_plan, Plan)
    other = copy.deepcopy(state)
    assert other.decode_plan is None, "a plan points to the caches of its own state"
    assert pickle.loads(pickle.dumps(state.decode_plan)) is None

    def held() -> list[torch.Tensor]:  # as bytes: what nobody has written yet may be a NaN
        tensors = (tensor for layer in other.layers for tensor in layer.tensors())
        return [tensor.contiguous().reshape(-1).view(torch.uint8).clone() for tensor in tensors]

    before = held()
    want = model([[4]], state)
    assert all(map(torch.equal, before, held()))
    assert torch.equal(model([[4]], other), want)


@native
def test_a_plan_serves_its_own_blocks_alone() -> None:
    model = copy.deepcopy(ours("llama"))
    state = model.new_state()
    model([[1]], state)
    plan = state.decode_plan
    model([[2]], state)
    assert state.decode_plan is plan
    assert not plan.holds(model.blocks[:1])
    assert not plan.holds([dataclasses.replace(block) for block in ours("llama").blocks])


@native
def test_a_captured_graph_is_for_its_rows_its_tables_and_its_carries() -> None:
    mixer = MIXERS["delta"]("bfloat16", 64, 64)
    (sublayer,) = mixer.sublayers(None, None, 1.0)
    cache = mixer.new_state(Layout(1, torch.device("cpu"), torch.float32))
    x, one = torch.randn(1, 1, 64), torch.tensor([1])
    graph = ops.FusedGraph(x, one * 0, one)
    fusable = graph.fusable(sublayer, start=ops.ScanStart(cache.carry))
    assert fusable is not None
    graph.add(fusable)
    captured = graph.capture()
    assert captured is not None

    def replays(x: torch.Tensor, *carries: Any) -> bool:
        counts = torch.ones(x.shape[0], dtype=torch.int64)
        scans = [ops.ScanStart(carry) for carry in carries]
        return ops.FusedGraph(x, counts * 0, counts).replay(captured, [], scans, []) is not None

    assert replays(x, cache.carry)
    assert not replays(torch.randn(2, 1, 64), cache.carry), "two rows"
    assert not replays(torch.randn(1, 1, 32), cache.carry), "a narrower stream"
    assert not replays(x), "no carry"
    assert not replays(x.clone().requires_grad_(), cache.carry)
    follow = tuple(part.clone().requires_grad_() for part in cache.carry)
    assert not replays(x, follow), "a gradient is to follow"
    with torch.no_grad():
        assert replays(x, follow)


def test_a_step_of_another_thread_may_have_longer_tables_made_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ours("llama")
    whole = model([[5, 6, 7]])
    rope = model.blocks[0].mixer.rope
    capture = ops.FusedGraph.capture

    def interrupted(self: ops.FusedGraph) -> ops.CapturedGraph | None:
        rope._kept.clear()
        return capture(self)

    monkeypatch.setattr(ops.FusedGraph, "capture", interrupted)
    state = model.new_state(1)
    for token in (5, 6, 7):
        logits = model([[token]], state)
    assert torch.equal(logits[0], whole[0, -1])


@native
def test_a_part_that_nothing_fuses_leaves_its_neighbors_captured(asked: list[Part]) -> None:
    model = copy.deepcopy(ours("llama"))
    first, second, *rest = model.blocks * 2
    second = dataclasses.replace(second, mlp=dataclasses.replace(second.mlp, act="gelu"))
    model.network = dataclasses.replace(model.network, blocks=(first, second, *rest))
    state, eager = model.new_state(), model.new_state()
    for token in (1, 2, 3):
        model([[token]], state)
        asked.clear()
        model([[token]], eager)
    assert isinstance(state.decode_plan, Plan) and state.decode_plan.segments is not None
    kinds = [type(segment) for segment in state.decode_plan.segments]
    assert kinds == [FusedSegment, EagerSegment, FusedSegment]
    asked.clear()
    got = model([[4]], state)
    assert [part.index for part in asked] == [1] and not asked[0].sublayers
    apart = [Apart(**{f.name: getattr(block, f.name) for f in dataclasses.fields(block)}) for block in model.blocks]
    model.network = dataclasses.replace(model.network, blocks=tuple(apart))
    assert torch.equal(model([[4]], eager), got)


@pytest.mark.parametrize("value", ["0", "1"])
def test_fusing_can_be_switched_off(value: str, asked: list[Part], monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = ours("qwen3_5"), text(12)[0].tolist()
    state = model.new_state()
    want = [model([[token]], state) for token in ids]
    asked.clear()
    monkeypatch.setenv("LMSTATE_FUSE", value)
    fuses.cache_clear()
    try:
        state = model.new_state()
        got = [model([[token]], state) for token in ids]
    finally:
        monkeypatch.undo()
        fuses.cache_clear()
    assert bool(asked) == (value == "1" and dispatch.choice().library is not None)
    for one, other in zip(got, want):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)  # torch's sigmoid of a gate rounds otherwise


def test_another_value_of_the_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMSTATE_FUSE", "maybe")
    fuses.cache_clear()
    try:
        with pytest.raises(ValueError, match="LMSTATE_FUSE=maybe: 1 fuses"):
            fuses()
    finally:
        monkeypatch.undo()
        fuses.cache_clear()


def test_a_traced_step_makes_no_plan() -> None:
    model = ours("llama")
    state = model.new_state(static=True, capacity=16)
    torch._dynamo.reset()  # other tests may have compiled the same code as often as is allowed
    compiled = torch.compile(model.decode_step, backend="eager", fullgraph=True)
    compiled(torch.tensor([[1]]), state)
    state.commit()
    assert state.decode_plan is None
    assert torch.isfinite(model.decode_step(torch.tensor([[2]]), state)).all()


@native
def test_a_weight_on_another_device_is_not_fused() -> None:
    with OtherDevice():
        mixer = MIXERS["delta"]("bfloat16", 64, 64)
        (sublayer,) = mixer.sublayers(None, None, 1.0)
        cache = mixer.new_state(Layout(1, torch.device("cpu"), torch.float32))
        one = torch.tensor([1])
        graph = ops.FusedGraph(torch.randn(1, 1, 64), one * 0, one)
        assert graph.fusable(sublayer, start=ops.ScanStart(cache.carry)) is not None
        sublayer.out.storage = sublayer.out.storage.to(DEVICE)
        assert graph.fusable(sublayer, start=ops.ScanStart(cache.carry)) is None
        assert not ops.FusedGraph(torch.randn(1, 1, 64).to(DEVICE), one * 0, one).enabled


@pytest.mark.parametrize("case", ["llama", "cohere", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("fused", [False, True])
def test_rows_of_different_width_have_the_bits_of_each_alone(
    case: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fused:  # as in a step of more tokens
        monkeypatch.setattr("lmstate.ops.fused.graph.FUSED_ROWS", 0)
    model, ids = ours(case), text(20)[0].tolist()
    state = model.new_state(rows=3)
    out = model([ids[:9], ids[:2], ids[:5]], state, logits="all")
    for row, count in enumerate((9, 2, 5)):
        alone = model([ids[:count]], model.new_state(), logits="all")
        assert torch.equal(out[row, :count], alone[0]) and not out[row, count:].any()
