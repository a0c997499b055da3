"""Heads that draft over ranks that are threads: the drafts, logits and snapshots of one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lmstate
from lmstate.generation import Generation
from lmstate.models.model import Model
from lmstate.speculation import HeadsDrafter
from lmstate.speculation.heads_drafter import AheadDraft
from tests.distributed.helpers import one_process, over_threads, same
from tests.generation.fake_model import FakeTokenizer
from tests.heads.test_assistant import Pair as AssistantPair
from tests.heads.test_dflash import Pair as DFlashPair
from tests.heads.test_dspark import Pair as DSparkPair
from tests.heads.test_eagle3 import Pair as EaglePair
from tests.heads.zoo import pair, save
from tests.speculation.drafters import always
from tests.sweeps import sampled
from tests.zoo import VOCAB, text

IDS = text(90)[0].tolist()


def told(model: Model, folder: Path) -> tuple[list[Tensor], list[dict[int, AheadDraft]], list[lmstate.Snapshot]]:
    """Logits, drafts and snapshots on the way through what a state does."""
    state, out, drafts = model.new_state(2), [], []
    out.append(model([IDS[:40], IDS[:7]], state))
    drafts.append(model.draft_ahead(state, {0: IDS[40], 1: IDS[7]}, 4))
    out.append(model([IDS[40:45], IDS[7:10]], state, logits="all", commit=False))
    state.commit([3, 1])
    drafts.append(model.draft_ahead(state, {0: IDS[43]}, 3))
    snapshots = [state.snapshot(0), state.snapshot(1)]
    snapshots[0].save(folder / "row")
    state.rewind(0, 39)
    state.select([1, 0, 0])
    state.restore(2, lmstate.Snapshot.load(folder / "row"))
    out.append(model([IDS[8:10], [], IDS[43:45]], state))
    return out, [*drafts, model.draft_ahead(state, {0: IDS[10], 2: IDS[45]}, 4)], snapshots


def check(one: Model, two: Model, folder: Path) -> None:
    assert one.fingerprint == two.fingerprint
    (out, drafts, own), (expected, theirs, whole) = (told(model, folder) for model in (two, one))
    assert same(out, expected)
    assert drafts == theirs and any(draft.tokens for each in theirs for draft in each.values())
    for ours, alone in zip(own, whole):
        for layer, other in zip(ours.layers, alone.layers, strict=True):
            assert set(layer) == set(other) and all(torch.equal(layer[name], other[name]) for name in other)


OWN = ("deepseek_v3-two", "qwen3_next", "mimo_v2_flash", "glm4_moe", "minimax_m3", "deepseek_v4", "nemotron_h")


@pytest.mark.parametrize("case", sampled([*OWN, "bailing_hybrid", "qwen4_exp", "glm5_next", "longcat_flash"], OWN))
def test_heads_of_a_model_draft_as_in_one_process(case: str, tmp_path: Path) -> None:
    made = pair(case)
    save(made.theirs, made.mtp, made.case, tmp_path)
    with over_threads(tmp_path, "float32", 2, heads=True) as (two, _):
        check(one_process(tmp_path, "float32", heads=True), two, tmp_path)


PUBLISHED = {
    "eagle3": (partial(EaglePair, "llama"), "target", "head"),
    "dflash": (partial(DFlashPair, "qwen3"), "target", "drafter"),
    "gemma4": (AssistantPair, "target", "assistant"),
    "dspark": (DSparkPair, "", None),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_other_drafters_draft_as_in_one_process(kind: str, tmp_path: Path) -> None:
    """Those that were published apart, which read the stream of several blocks, attend to the keys of the model or fill
    a block at once; and that of DeepSeek-V4."""
    make, target, drafter = PUBLISHED[kind]
    alone = make(tmp_path).ours
    with over_threads(tmp_path / target, "float32", 2, heads=tmp_path / drafter if drafter else True) as (two, _):
        check(alone, two, tmp_path)


def test_as_many_drafts_are_accepted_as_in_one_process(tmp_path: Path) -> None:
    made, found = pair("qwen3_next"), []
    save(made.theirs, made.mtp, made.case, tmp_path)
    with over_threads(tmp_path, "float32", 2, heads=True) as (two, _):
        for model in (one_process(tmp_path, "float32", heads=True), two):
            speaking = replace(model, _tokenizer=FakeTokenizer(), eos_ids=frozenset())
            state = speaking.new_state(2)
            drafter = always(HeadsDrafter(speaking, state), VOCAB, rows=2, depth=4)
            generation = Generation(speaking, [IDS[:9], IDS[:4]], state, draft=drafter, max_new_tokens=20)
            list(generation)
            report = generation.report().draft
            found.append((state.tokens(0), state.tokens(1), report.drafted, report.accepted))
    assert found[0] == found[1] and found[0][2]
