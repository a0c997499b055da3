"""What a decode step reads: counted from weights and layers beforehand, and as operations are given it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from lmstate.cli.inspect_model import LENGTHS, read_rows, state_rows
from lmstate.cli.output import size
from lmstate.models.fingerprint import instances
from lmstate.models.layers import compressed_attention
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.compressed_attention import CompressedAttention
from lmstate.models.layers.moe import MixtureOfExperts
from lmstate.models.reads import state_reads, weight_reads
from lmstate.state.layers import indexed_attention, latent
from tests.zoo import ours, text

LENGTH = 75  # more than these indexes choose; at the end of a block of five, and one short of a block of four


class Recorder:
    """Counts the bytes of one row that operations with a choice attend to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.attended = 0
        for module, name in ((latent, "attend_chosen"), (indexed_attention, "attend_blocks"),
                             (compressed_attention, "attend_beside")):  # fmt: skip
            monkeypatch.setattr(module, name, getattr(self, name)(getattr(module, name)))

    def attend_chosen(self, attend: Any) -> Any:
        def run(q: Any, q_rope: Any, latents: Any, ropes: Any, chosen: torch.Tensor, **others: Any) -> torch.Tensor:
            self.attended += int((chosen >= 0).sum()) * (width(latents) + width(ropes))
            return attend(q, q_rope, latents, ropes, chosen, **others)

        return run

    def attend_blocks(self, attend: Any) -> Any:
        def run(q: Any, k: Any, v: Any, chosen: torch.Tensor, *others: Any, size: int) -> torch.Tensor:
            own = chosen[chosen >= 0]
            positions = (LENGTH - own * size).clamp(max=size).sum()  # of all groups of heads, one each
            self.attended += int(positions) * (width(k) + width(v)) * k.shape[1] // chosen.shape[2]
            return attend(q, k, v, chosen, *others, size=size)

        return run

    def attend_beside(self, attend: Any) -> Any:
        def run(q: Any, keys: Any, entries: Any, chosen: torch.Tensor, *others: Any, **more: Any) -> torch.Tensor:
            self.attended += int((chosen >= 0).sum()) * width(entries) + min(LENGTH, more["window"]) * width(keys)
            return attend(q, keys, entries, chosen, *others, **more)

        return run


def width(stored: Any) -> int:
    """Bytes of one position of one head."""
    return stored.shape[3] * stored.dtype.itemsize


@pytest.mark.parametrize("case", ["deepseek_v32", "glm_moe_dsa-shared", "minimax_m3-groups", "qwen4_exp", "glm5_next"])
def test_no_more_is_attended_to_than_was_counted(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ours(case)
    state, ids = model.new_state(), text(LENGTH)[0].tolist()
    model([ids[:-1]], state)
    recorder = Recorder(monkeypatch)
    model([ids[-1:]], state)
    read = state_reads(model.network, state.layers, state.lengths)
    assert recorder.attended == read.attended < read.whole
    assert read.index > 0


def test_entries_are_counted_beside_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ours("deepseek_v4")
    state, ids = model.new_state(), text(LENGTH)[0].tolist()
    model([ids[:-1]], state)
    recorder = Recorder(monkeypatch)
    model([ids[-1:]], state)
    read = state_reads(model.network, state.layers, state.lengths)
    mixers = [block.mixer for block in model.blocks if isinstance(block.mixer, CompressedAttention)]
    alone = sum(min(LENGTH, each.window) * each.dim * 4 for each in mixers if each.compressor is None)
    assert recorder.attended + alone == read.attended
    assert read.fixed == sum(each.inputs.shape[0] * 4 for each in mixers if each.inputs is not None)
    assert read.index > 0


@pytest.mark.parametrize("case", ["llama", "gemma3", "qwen3_5", "mamba2", "falcon_h1"])
@pytest.mark.parametrize("rows", [1, 3])
def test_layers_without_an_index_read_what_a_snapshot_holds(case: str, rows: int) -> None:
    model = ours(case)
    state = model.new_state(rows, rewind=0)
    model([text(LENGTH)[0].tolist()[row:] for row in range(rows)], state)
    read = state_reads(model.network, state.layers, state.lengths)
    held = [layer for row in range(rows) for layer in state.snapshot(row).layers]
    spare = rows * sum(  # the query itself is the last position of a window
        2 * mixer.kv_heads * mixer.head_dim * 4
        for mixer in (block.mixer for block in model.blocks)
        if isinstance(mixer, Attention) and mixer.kind == "window"
    )
    assert read.total == sum(tensor.nbytes for layer in held for tensor in layer.values()) + spare
    assert read.index == 0 and read.total == read.total_of_all


@pytest.mark.parametrize("case", ["qwen3_moe", "deepseek_v32", "phimoe", "inkling", "kolibri1"])
def test_of_experts_those_count_that_rows_can_choose(case: str) -> None:
    model = ours(case)
    mixtures = [mixture for _, mixture in instances(model.blocks, MixtureOfExperts)]
    assert mixtures
    for mixture in mixtures:
        weights, chosen = mixture.router(torch.randn(5, model.config.hidden_size))
        assert weights.shape == chosen.shape == (5, mixture.router.per_token)
    sizes = [weight_reads(model.network, rows) for rows in range(1, 9)]
    assert sizes[0] < sizes[1] and sizes == sorted(sizes)
    least = min(mixture.count // mixture.router.per_token for mixture in mixtures)
    assert all(later - earlier == sizes[1] - sizes[0] for earlier, later in pairwise(sizes[:least]))


def test_inspect_tells_what_a_step_reads() -> None:
    model = ours("deepseek_v32")
    rows = read_rows(model)
    assert [row[0] for row in rows] == [f"{length:,}" for length in LENGTHS]
    index = 3 * 16 * 4  # layers, features, bytes
    assert rows[1][3] == size(32_000 * index) and rows[0][2] == rows[1][2]
    assert all(row[6].endswith("%") and int(row[6][:-1]) < 100 for row in rows)
    assert read_rows(ours("llama"))[0][6] == "100%"


def test_inspect_counts_entries_by_the_token() -> None:
    rows = {row[1]: row for row in state_rows(ours("qwen4_exp"))}
    assert rows["index"][2:] == (size(16 * 4 // 4), "0 B")
