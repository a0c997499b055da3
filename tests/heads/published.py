"""What tests of drafters that are published apart share: targets, and what must hold of each drafter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lmstate
from lmstate.generation import Generation
from lmstate.speculation import HeadsDrafter
from tests.heads.test_drafts import check_heads, prompts_of, speaking_model
from tests.speculation.drafters import always
from tests.zoo import CASES, VOCAB, auto, randomize, text


def target_of(case: str) -> Any:
    """A model of `transformers` with eight layers, so that drafters have early, middle and late ones to read."""
    config = CASES[case]()
    config.num_hidden_layers = 8
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index % len(config.layer_types)] for index in range(8)]
    torch.manual_seed(0)
    target = auto(config).from_config(config, dtype=torch.float32).eval()
    randomize(target)
    return target


def check_greedy(
    model: lmstate.Model, *, tokens: int = 10, storage: Any = None, rewind: int = 16, depth: int = 4
) -> None:
    """Greedy texts with the drafter are those without, over two turns between which rows are moved and rewound."""
    model = speaking_model(model)
    plain, drafted = (model.new_state(3, kv=storage, rewind=rewind) for _ in range(2))
    prompts = prompts_of(7, 1, 19)
    for turn in range(2):
        list(Generation(model, prompts, plain, draft=None, max_new_tokens=tokens))
        speculator = always(HeadsDrafter(model, drafted), VOCAB, rows=3, depth=depth)
        generation = Generation(model, prompts, drafted, draft=speculator, max_new_tokens=tokens)
        list(generation)
        assert generation.report().draft.drafted > 0
        assert [drafted.tokens(row) for row in range(3)] == [plain.tokens(row) for row in range(3)]
        for state in (plain, drafted):
            state.select([2, 2, 0])
            state.rewind(1, state.lengths[1] - 5)
            state.restore(2, state.snapshot(0))
        if storage is None:
            check_heads(model, drafted)
        prompts = prompts_of(3, 5, 2, seed=turn + 50)


def check_no_bit(model: lmstate.Model) -> lmstate.Model:
    """The model computes the same bits with the drafter as without; returns it without."""
    alone = replace(model, network=replace(model.network, heads=()), _fingerprint=None)
    ids = text(60, rows=2)
    state = model.new_state(2)
    pieces = [model(ids[:, a:b], state, logits="all") for a, b in ((0, 7), (7, 8), (8, 60))]
    assert torch.equal(torch.cat(pieces, 1), alone(ids, alone.new_state(2), logits="all"))
    return alone


def acceptance(model: lmstate.Model, prompts: Sequence[list[int]], *, tokens: int, depth: int) -> float:
    """Share of the drafted tokens that the model accepts."""
    model = speaking_model(model)
    state = model.new_state(len(prompts))
    speculator = always(HeadsDrafter(model, state), VOCAB, rows=len(prompts), depth=depth)
    generation = Generation(model, prompts, state, draft=speculator, max_new_tokens=tokens)
    list(generation)
    report = generation.report().draft
    return report.accepted / report.drafted


def altered(folder: Path, fields: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Change fields of a drafter's config, and its tensors."""
    path, weights = folder / "config.json", folder / "model.safetensors"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    if tensors:
        save_file(load_file(weights) | tensors, weights)
