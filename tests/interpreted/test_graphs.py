"""Steps that are recorded once and replayed: the bits of eager ones, for every state and whatever lies between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lmstate
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.models.families import build
from lmstate.models.graphs import StepGraph
from lmstate.ops.cuda.device import on_gpu
from lmstate.ops.cuda.experts import ExpertTable
from lmstate.ops.cuda.graphs import GraphPool
from lmstate.ops.cuda.tables import StepBuffers
from tests.followed import calls
from tests.interpreted.standin import GraphDevice, interpreted_gpu
from tests.other_device import DEVICE
from tests.zoo import pair, text

SAMPLE = [("llama", None), ("mamba2", None)]
MORE = [
    pytest.param(case, None, marks=pytest.mark.soak)
    for case in (
        "mistral",
        "deepseek_v3",
        "qwen3_next-dense",
        "falcon_h1",
        "gpt_oss",
        "gemma3n",
        "rwkv",
        "lfm2",
        "mixtral",
    )
]
IDS = text(80)[0].tolist()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[GraphDevice]:
    with interpreted_gpu(monkeypatch) as device:
        yield device


def model_of(case: str, folder: Path) -> lmstate.Model:
    with torch._C.DisableTorchFunction():
        pair(case)[0].save_pretrained(folder)
    return build(WeightLoader(open_source(folder), "float32", device=DEVICE))


def story(model: lmstate.Model, kv: Any = None) -> list[Tensor]:
    """Steps of two states by turns: ragged and idle rows, drafts, a verdict, a fork, a rewind and a discarded step."""
    one, two = model.new_state(2, rewind=4, kv=kv), model.new_state(1, rewind=4, kv=kv)
    found = [model([IDS[:3], IDS[:4]], one), model([[9]], two)]
    found.append(model([[7], [8]], one))
    found.append(model([[7, 11, 12], [8]], one, logits="all", commit=False))
    one.commit([2, 1])
    found.append(model([[], [3]], one))
    one.select([1, 1])
    found.append(model([[5], [6]], one))
    model([[9]], two, commit=False)
    two.discard()
    found.append(model([[10]], two))
    one.rewind(1, one.lengths[1] - 1)
    found.append(model([[1], [2]], one))
    return found


CODED = [
    pytest.param("llama", lmstate.kv.Quantized(8), id="llama-8 bits"),
    pytest.param("gemma", lmstate.kv.Quantized(4), id="gemma-4 bits", marks=pytest.mark.soak),
]
FOLLOWED = ("llama", "qwen3_next-dense", "falcon_h1", "rwkv", "lfm2", "gemma3n", "deepseek_v3", "mixtral")
MIXED = lmstate.kv.PerLayer({0: lmstate.kv.Dense()}, default=lmstate.kv.Quantized(2))


@pytest.mark.parametrize(("case", "kv"), [*SAMPLE, *CODED, *MORE])
def test_replayed_steps_have_the_bits_of_eager_ones(
    case: str, kv: Any, gpu: GraphDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = model_of(case, tmp_path)
    with torch.no_grad():
        replayed = story(model, kv)
        assert gpu.recorded, "no step was recorded"
        count = len(gpu.recorded)
        monkeypatch.setattr("lmstate.models.graphs.fuses", lambda: False)
        eager = story(model, kv)
    assert len(gpu.recorded) == count
    assert kv is None or "append_codes" in gpu.launches
    for own, other in zip(replayed, eager, strict=True):
        with torch._C.DisableTorchFunction():
            assert torch.equal(own.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("case", "kv"),
    [("mamba2", None), ("gemma", MIXED), *(pytest.param(case, None, marks=pytest.mark.soak) for case in FOLLOWED)],
)
def test_tokens_that_follow_in_one_graph_are_those_of_steps_of_one(
    case: str, kv: Any, gpu: GraphDevice, tmp_path: Path
) -> None:
    """Ragged and idle rows, past the end of a block; the verdict of a prefix, and steps behind it."""
    model, tokens = model_of(case, tmp_path), [[7], [9]]
    with torch.no_grad():
        own, other = model.new_state(2, kv=kv), model.new_state(2, kv=kv)
        model([IDS[:62], IDS[:3]], own, logits="none")
        for row in range(2):
            other.restore(row, own.snapshot(row))
        found = model.follow(tokens, own, 2)
        recorded = len(gpu.recorded)
        steps = calls(model, tokens, other, 2)
        assert found is not None and recorded == 1
        read, logits = found
        assert own.pending == [2, 2] and [row[:1] for row in read] == tokens
        own.commit([2, 1])
        other.rewind(1, 4)
        again = model.follow([[1], []], own, 3)  # from the end of a block on
        assert again is not None and again[1].shape[1] == 2, "a graph holds a power of two"
        steps_again = calls(model, [[1], []], other, 2)
        own.commit()
    with torch._C.DisableTorchFunction():
        assert torch.equal(logits, torch.stack(steps, 1))
        assert torch.equal(again[1][0], torch.stack(steps_again, 1)[0])
    assert [own.tokens(row) for row in range(2)] == [other.tokens(row) for row in range(2)]


def test_a_graph_reads_the_blocks_that_a_row_gets_later(
    gpu: GraphDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, found = model_of("llama", tmp_path), []
    with torch.no_grad():
        for replays in (True, False):
            monkeypatch.setattr("lmstate.models.graphs.fuses", lambda replays=replays: replays)
            state = model.new_state()
            model([IDS[:62]], state, logits="none")
            found.append(torch.cat([model([[token]], state) for token in range(3)]))
    assert len(gpu.recorded) == 1
    with torch._C.DisableTorchFunction():
        assert torch.equal(*found)


def test_a_graph_has_no_room_for_blocks_that_a_refused_draft_left(
    gpu: GraphDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("lmstate.models.graphs.FEWEST_ENTRIES", 1)
    model, found = model_of("llama", tmp_path), []
    with torch.no_grad():
        for replays in (True, False):
            monkeypatch.setattr("lmstate.models.graphs.fuses", lambda replays=replays: replays)
            state = model.new_state()
            model([IDS[:62]], state, logits="none")
            model([[1, 2, 3, 4]], state, commit=False)  # two blocks
            state.commit([1])
            found.append(model([[5]], state))  # reads the first
    assert len(gpu.recorded) == 2, "the draft and the step behind it"
    with torch._C.DisableTorchFunction():
        assert torch.equal(*found)


@pytest.mark.parametrize("case", ["llama", "mamba2"])
def test_a_state_that_no_gradients_follow_runs_in_a_graph_where_they_are_kept(
    case: str, gpu: GraphDevice, tmp_path: Path
) -> None:
    model = model_of(case, tmp_path)
    model([[1]], model.new_state())
    assert torch.is_grad_enabled() and len(gpu.recorded) == 1


def test_a_state_that_gradients_follow_runs_eagerly(gpu: GraphDevice, tmp_path: Path) -> None:
    model = model_of("mamba2", tmp_path)
    state = model.new_state()
    model([[1]], state)
    with torch._C.DisableTorchFunction():
        state.layers[0].carry[0].requires_grad_(True)  # type: ignore[attr-defined]
    logits = model([[2]], state)
    assert logits is not None and logits.requires_grad


def test_a_graph_serves_every_state_of_its_size(gpu: GraphDevice, tmp_path: Path) -> None:
    model = model_of("llama", tmp_path)
    with torch.no_grad():
        for rows in (3, 4):
            state = model.new_state(rows)
            model([[2], *[[]] * (rows - 2), [3]], state)
    assert len(gpu.recorded) == 1, "rows 3 and 4 have room in one graph"


@pytest.fixture
def pools(gpu: GraphDevice, monkeypatch: pytest.MonkeyPatch) -> list[GraphPool]:
    """The pools into which steps would be recorded; all run eagerly."""
    found: list[GraphPool] = []

    def refuse(graph: StepGraph, pool: GraphPool) -> None:
        found.append(pool)
        raise RuntimeError("not recorded")

    monkeypatch.setattr(StepGraph, "record", refuse)
    return found


def test_graphs_of_one_model_share_memory_and_those_of_two_do_not(pools: list[GraphPool], tmp_path: Path) -> None:
    """Engines of two models run in two threads: a graph of one would write into what the other has not copied yet."""
    with torch.no_grad():
        for folder in ("one", "two"):
            model = model_of("llama", tmp_path / folder)
            model([[1]], model.new_state())
            model([[1], [2]], model.new_state(2))
    first, second, third, fourth = pools
    assert first is second and third is fourth and first is not third


def test_numbers_of_the_host_are_not_recorded(gpu: GraphDevice) -> None:
    """Each replay would read them again, also those that were sent before."""
    counts, like = torch.tensor([3, 4]), torch.zeros(1).to(DEVICE)
    assert on_gpu(counts, like) is on_gpu(counts.clone(), like), "sent once"
    with pytest.raises(RuntimeError, match="while a graph is recorded"):
        gpu.record(lambda: on_gpu(counts, like))


def test_weights_that_moved_get_graphs_in_new_memory(pools: list[GraphPool], tmp_path: Path) -> None:
    """torch takes no more graphs into a pool whose graphs are all gone."""
    model = model_of("llama", tmp_path)
    with torch.no_grad():
        for _ in range(2):
            model([[1]], model.new_state())
            model.network.graphs._addresses = []
    first, second = pools
    assert first is not second


def test_a_step_that_waits_for_the_device_runs_eagerly(
    gpu: GraphDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ExpertTable, "fits", lambda experts: False)  # they are then counted on the host
    model = model_of("mixtral", tmp_path)
    with torch.no_grad():
        state = model.new_state()
        for _ in range(2):
            model([[1]], state)
    assert len(gpu.recorded) == 0 and caplog.text.count("run eagerly") == 1


def test_a_reference_reads_no_blocks_of_a_recorded_step(
    gpu: GraphDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lmstate.ops.cuda.attention.can_read", lambda *stored: False)
    model = model_of("llama", tmp_path)
    with torch.no_grad():
        state = model.new_state()
        model([[1, 2]], state)
    assert len(gpu.recorded) == 0 and "the reference of an operation reads blocks" in caplog.text


class Copies(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_a_step_is_sent_in_one_copy_and_addresses_when_they_change() -> None:
    buffers = StepBuffers(4, 2, 3, 8, torch.device("cpu"))
    tables = [np.arange(1 + i, 5 + i).reshape(2, 2) for i in range(3)]
    other = [tables[0], np.full((2, 2), 9), tables[2]]
    head, whole = 4 * 2 + 2 * 4, 4 * 2 + 2 * 4 + 3 * 4 * 8
    for step, (given, size) in enumerate([(tables, whole), (tables, head), (other, whole), (tables, whole)]):
        with Copies() as copies:
            buffers.send(np.array([[step], [5]]), [7, 8], [1, 0], given)
        assert copies.sizes == [size]
        assert buffers.tokens.tolist() == [[step, 0], [5, 0], [0, 0], [0, 0]]
        assert buffers.starts.tolist() == [7, 8, 0, 0] and buffers.counts.tolist() == [1, 0, 0, 0]
        for own, table in zip(buffers.tables, given):
            assert own[:2, :2].tolist() == table.tolist()
            assert not own[2:].any() and not own[:, 2:].any(), "rows and entries behind a step's point to no block"
