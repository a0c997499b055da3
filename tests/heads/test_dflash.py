"""DFlash drafters equal layers of `transformers` that are wired as in the paper, and texts stay the model's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, rotate_half

import lmstate
from lmstate.errors import ModelError
from lmstate.generation import Generation
from lmstate.speculation import HeadsDrafter
from tests.heads.test_drafts import check_heads, check_learned, prompts_of, speaking_model
from tests.speculation.drafters import always
from tests.zoo import CASES, VOCAB, auto, randomize, text

TARGETS = ("llama", "qwen3_next", "mistral")
SIZE, MASK, TAPS = 5, 98, [1, 3, 6]


class Layer(nn.Module):
    """A layer: queries of the block, keys of the context and of the block."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        width, heads, kv_heads, self.dim = config.hidden_size, 4, 2, config.head_dim
        self.self_attn = nn.Module()
        for name, shape in {
            "q_proj": (width, heads * self.dim), "k_proj": (width, kv_heads * self.dim),
            "v_proj": (width, kv_heads * self.dim), "o_proj": (heads * self.dim, width),
        }.items():  # fmt: skip
            setattr(self.self_attn, name, nn.Linear(*shape, bias=False))
        self.self_attn.q_norm, self.self_attn.k_norm = Qwen3RMSNorm(self.dim, 1e-6), Qwen3RMSNorm(self.dim, 1e-6)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm, self.post_attention_layernorm = Qwen3RMSNorm(width, 1e-6), Qwen3RMSNorm(width, 1e-6)

    def forward(self, x: Tensor, context: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        own, y = self.self_attn, self.input_layernorm(x)

        def heads(part: Tensor) -> Tensor:
            return part.unflatten(-1, (-1, self.dim)).transpose(0, 1)

        both = torch.cat([context, y])
        q, k, v = own.q_norm(heads(own.q_proj(y))), own.k_norm(heads(own.k_proj(both))), heads(own.v_proj(both))
        q = q * cos[-len(y) :] + rotate_half(q) * sin[-len(y) :]
        k = k * cos + rotate_half(k) * sin
        k, v = (part.repeat_interleave(2, 0) for part in (k, v))
        seen = (q @ k.transpose(1, 2) / self.dim**0.5).softmax(-1) @ v
        x = x + own.o_proj(seen.transpose(0, 1).flatten(1))
        return x + self.mlp(self.post_attention_layernorm(x))


class Reference(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.config = Qwen3Config(
            vocab_size=VOCAB, hidden_size=width, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6,
        )  # fmt: skip
        self.layers = nn.ModuleList([Layer(self.config) for _ in range(2)])
        self.norm, self.hidden_norm = Qwen3RMSNorm(width, 1e-6), Qwen3RMSNorm(width, 1e-6)
        self.fc = nn.Linear(len(TAPS) * width, width, bias=False)

    def forward(self, features: Tensor, embedded: Tensor) -> Tensor:
        """The stream behind the layers, normed, of a block behind the features `[T, taps * E]` of a text."""
        context = self.hidden_norm(self.fc(features))
        positions = torch.arange(len(context) + len(embedded))[None]
        cos, sin = (part[0] for part in Qwen3RotaryEmbedding(self.config)(context, positions))
        for layer in self.layers:
            embedded = layer(embedded, context, cos, sin)
        return self.norm(embedded)


class Pair:
    """A target of `transformers` and a drafter for it, and both in lmstate."""

    def __init__(self, case: str, folder: Path) -> None:
        config = CASES[case]()
        config.num_hidden_layers = 8
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[index % len(config.layer_types)] for index in range(8)]
        torch.manual_seed(0)
        self.target = auto(config).from_config(config, dtype=torch.float32).eval()
        randomize(self.target)
        self.drafter = Reference(config.hidden_size).eval()
        randomize(self.drafter, seed=1)
        self.folder = folder
        self.target.save_pretrained(folder / "target")
        (folder / "drafter").mkdir()
        told = self.drafter.config.to_dict() | {
            "architectures": ["DFlashDraftModel"], "block_size": SIZE,
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": TAPS},
        }  # fmt: skip
        (folder / "drafter" / "config.json").write_text(json.dumps(told))
        self.save()
        self.ours = self.load()

    def save(self) -> None:
        save_file({name: x.contiguous() for name, x in self.drafter.state_dict().items()}, self.weights)

    @property
    def weights(self) -> Path:
        return self.folder / "drafter" / "model.safetensors"

    def load(self) -> lmstate.Model:
        return lmstate.load(self.folder / "target", weights="float32", heads=self.folder / "drafter")

    def block(self, ids: list[int], token: int) -> Tensor:
        """Logits `[SIZE - 1, V]` of the masks of a block behind a text and its next token."""
        with torch.no_grad():
            streams = self.target(torch.tensor([ids]), output_hidden_states=True).hidden_states
        features = torch.cat([streams[index + 1][0] for index in TAPS], dim=-1)
        words = self.target.get_input_embeddings()(torch.tensor([token, *[MASK] * (SIZE - 1)])).detach()
        return self.target.get_output_embeddings()(self.drafter(features, words))[1:]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    return lru_cache(lambda case: Pair(case, tmp_path_factory.mktemp(case)))


def test_learned_positions_are_positions_of_the_drafter_too(pairs: Callable[[str], Pair]) -> None:
    check_learned(pairs("llama").ours)


@pytest.mark.parametrize("case", TARGETS)
def test_a_draft_is_what_the_drafter_says(case: str, pairs: Callable[[str], Pair], tmp_path: Path) -> None:
    made = pairs(case)
    rows = prompts_of(9, 4, 70)
    state = made.ours.new_state(3)
    for first in range(0, 70, 11):
        logits = made.ours([row[first : first + 11] for row in rows], state)
    assert logits is not None
    last = {row: int(logits[row].argmax()) for row in (0, 2)}
    drafts = made.ours.draft_ahead(state, last, SIZE + 3)
    assert state.lengths == list(map(len, rows))
    for row, draft in drafts.items():
        expected = made.block(rows[row], last[row]).softmax(-1)
        assert draft.tokens and len(draft.tokens) <= SIZE - 1
        for token, confidence, own in zip(draft.tokens, draft.confidence, expected):
            assert confidence == pytest.approx(float(own[token].detach()), abs=1e-4) and token == int(own.argmax())
    state.snapshot(2).save(tmp_path / "row")
    state.restore(1, lmstate.Snapshot.load(tmp_path / "row"))
    again = made.ours.draft_ahead(state, {1: last[2]}, SIZE)[1].tokens  # alone it may end earlier
    assert again and again == drafts[2].tokens[: len(again)]
    full = made.ours.new_state(1, capacity=12)
    made.ours([rows[0]], full)
    assert made.ours.draft_ahead(full, {0: 1}, 3)[0].tokens == ()


@pytest.mark.parametrize("case", TARGETS)
def test_greedy_with_a_drafter_equals_greedy_without(case: str, pairs: Callable[[str], Pair]) -> None:
    model = speaking_model(pairs(case).ours)
    plain, drafted = model.new_state(3), model.new_state(3)
    prompts = prompts_of(7, 1, 19)
    for turn in range(2):
        list(Generation(model, prompts, plain, draft=None, max_new_tokens=10))
        speculator = always(HeadsDrafter(model, drafted), VOCAB, rows=3, depth=4)
        generation = Generation(model, prompts, drafted, draft=speculator, max_new_tokens=10)
        list(generation)
        assert generation.report().draft.drafted > 0
        assert [drafted.tokens(row) for row in range(3)] == [plain.tokens(row) for row in range(3)]
        for state in (plain, drafted):
            state.select([2, 2, 0])
            state.rewind(1, state.lengths[1] - 5)
            state.restore(2, state.snapshot(0))
        check_heads(model, drafted)
        prompts = prompts_of(3, 5, 2, seed=turn + 50)


@pytest.mark.parametrize("case", TARGETS)
def test_the_drafter_changes_no_bit_of_its_model(case: str, pairs: Callable[[str], Pair]) -> None:
    model = pairs(case).ours
    alone = replace(model, network=replace(model.network, heads=()), _fingerprint=None)
    ids = text(60, rows=2)
    state = model.new_state(2)
    pieces = [model(ids[:, a:b], state, logits="all") for a, b in ((0, 7), (7, 8), (8, 60))]
    assert torch.equal(torch.cat(pieces, 1), alone(ids, alone.new_state(2), logits="all"))


def test_a_drafter_that_learned_its_model_is_accepted(tmp_path: Path) -> None:
    """Distilled for a few seconds on the texts of a small target."""
    made = Pair("llama", tmp_path)
    prompts = [[seed] for seed in range(1, 25)]
    texts = made.ours.generate(prompts, max_new_tokens=16, ignore_eos=True, return_ids=True)
    whole = [[*prompt, *own] for prompt, own in zip(prompts, texts)]
    optimizer = torch.optim.AdamW(made.drafter.parameters(), lr=3e-3)
    for epoch in range(14):
        total = torch.zeros(())
        for ids in whole:
            at = 2 + (epoch * 5 + ids[0]) % 9
            logits = made.block(ids[:at], ids[at])
            total = total + nn.functional.cross_entropy(logits, torch.tensor(ids[at + 1 : at + SIZE]))
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    made.save()
    rates = []
    for model in (speaking_model(made.ours), speaking_model(made.load())):
        state = model.new_state(8)
        speculator = always(HeadsDrafter(model, state), VOCAB, rows=8, depth=1)
        generation = Generation(model, prompts[:8], state, draft=speculator, max_new_tokens=14)
        list(generation)
        report = generation.report().draft
        rates.append(report.accepted / report.drafted)
    assert rates[1] > rates[0] + 0.2, rates


WRONG: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "drafts for a model 32 wide": ({"hidden_size": 32}, {}),
    "mask_token_id": ({"dflash_config": {"mask_token_id": 99, "target_layer_ids": TAPS}}, {}),
    "of a model of 8": ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 8]}}, {}),
    "windows or a causal block": ({"dflash_config": {"mask_token_id": 1, "use_swa": True}}, {}),
    "block_size": ({"block_size": 1}, {}),
    "does not use": ({}, {"layers.0.other.weight": torch.zeros(3)}),
    "no head that lmstate can draft with": ({"architectures": ["DFlash2DraftModel"]}, {}),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_drafter_that_does_not_fit_is_refused(message: str, tmp_path: Path) -> None:
    made = Pair("llama", tmp_path)
    fields, more = WRONG[message]
    path = tmp_path / "drafter" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    save_file(load_file(made.weights) | more, made.weights)
    with pytest.raises(ModelError, match=message):
        made.load()
