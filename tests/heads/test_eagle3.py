"""EAGLE-3 heads, published apart from their models, equal layers of `transformers` that are wired as in the paper."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lmstate
from lmstate.errors import ModelError
from tests.heads.published import altered, check_greedy, check_no_bit, target_of
from tests.heads.test_drafts import prompts_of
from tests.zoo import VOCAB, randomize

KNOWN = 40
"""Tokens that the small heads know."""
TARGETS = ("llama", "qwen3_next", "gemma3")


class Reference(nn.Module):
    """The head on layers of `transformers`: a Llama layer whose projections read the embedding too."""

    def __init__(self, target: Any, taps: tuple[int, ...]) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

        super().__init__()
        hidden = target.get_input_embeddings().weight.shape[1]
        self.config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=hidden, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, attn_implementation="eager",
        )  # fmt: skip
        self.taps = taps
        self.midlayer = LlamaDecoderLayer(self.config, 0)
        for part, height in (("q", 64), ("k", 32), ("v", 32)):
            setattr(self.midlayer.self_attn, f"{part}_proj", nn.Linear(2 * hidden, height, bias=False))
        self.midlayer.hidden_norm = LlamaRMSNorm(hidden, 1e-6)
        self.rotary = LlamaRotaryEmbedding(self.config)
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.norm = LlamaRMSNorm(hidden, 1e-6)
        self.lm_head = nn.Linear(hidden, KNOWN, bias=False)

    def forward(self, embedded: Tensor, before: Tensor) -> Tensor:
        """The stream behind the layer, of tokens 1.. and what was handed on of those before them, `[T, E]` each."""
        layer, length = self.midlayer, len(before)
        x = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(before)], dim=-1)[None]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        mixed, _ = layer.self_attn(x, self.rotary(x, torch.arange(length)[None]), mask)
        mixed = mixed + before
        return (mixed + layer.mlp(layer.post_attention_layernorm(mixed)))[0]


class Pair:
    """A target of `transformers` and a head for it, and both in lmstate."""

    def __init__(self, case: str, folder: Path) -> None:
        self.target = target_of(case)
        self.head = Reference(self.target, (2, 4, 5)).eval()
        randomize(self.head, seed=1)
        generator = torch.Generator().manual_seed(2)
        self.known = torch.randperm(VOCAB, generator=generator)[:KNOWN].sort().values
        self.target.save_pretrained(folder / "target")
        save(folder / "head", self.head, self.known)
        self.ours = lmstate.load(folder / "target", weights="float32", heads=folder / "head")

    def ahead(self, tokens: list[int], drafted: int) -> Tensor:
        """The logits of the next token, from scratch; the last `drafted` tokens are of the head itself."""
        whole = torch.tensor([tokens])
        with torch.no_grad():
            streams = self.target(whole[:, : len(tokens) - 1 - drafted], output_hidden_states=True).hidden_states
            before = self.head.fc(torch.cat([streams[tap][0] for tap in self.head.taps], dim=-1))
            embedded = nn.functional.embedding(whole[0, 1:], self.target.get_input_embeddings().weight)
            for _ in range(drafted):
                stream = self.head(embedded[: len(before)], before)
                before = torch.cat([before, stream[-1:]])
            known = self.head.lm_head(self.head.norm(self.head(embedded, before)))[-1]
        return torch.full((VOCAB,), -torch.inf).index_copy(0, self.known, known)


def save(folder: Path, head: Reference, known: Tensor) -> None:
    folder.mkdir()
    tensors = {name: x.contiguous() for name, x in head.state_dict().items() if "rotary" not in name}
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[known] = True
    tensors |= {"d2t": known - torch.arange(KNOWN), "t2d": mask}
    save_file(tensors, folder / "model.safetensors")
    config = head.config.to_dict() | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": KNOWN}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    return lru_cache(lambda case: Pair(case, tmp_path_factory.mktemp(case)))


@pytest.mark.parametrize("case", TARGETS)
def test_a_draft_is_what_the_head_says(case: str, pairs: Callable[[str], Pair]) -> None:
    made = pairs(case)
    rows = prompts_of(9, 4, 17)
    state = made.ours.new_state(3)
    logits = made.ours(rows, state)
    assert logits is not None
    last = {row: int(logits[row].argmax()) for row in (0, 2)}
    drafts = made.ours.draft_ahead(state, last, 4)
    for row, draft in drafts.items():
        assert draft.tokens
        for at, (token, confidence) in enumerate(zip(draft.tokens, draft.confidence)):
            expected = made.ahead([*rows[row], last[row], *draft.tokens[:at]], at).softmax(-1)
            assert confidence == pytest.approx(float(expected[token]), abs=1e-4) and token == int(expected.argmax())


@pytest.mark.parametrize("case", TARGETS)
def test_greedy_with_a_published_head_equals_greedy_without(case: str, pairs: Callable[[str], Pair]) -> None:
    check_greedy(pairs(case).ours)


@pytest.mark.parametrize("case", TARGETS)
def test_the_head_changes_no_bit_of_its_model(case: str, pairs: Callable[[str], Pair]) -> None:
    check_no_bit(pairs(case).ours)


def test_names_of_other_tools_are_the_same_head(tmp_path: Path) -> None:
    made = Pair("llama", tmp_path)
    folder = tmp_path / "head"
    tensors = load_file(folder / "model.safetensors")
    save_file({name.replace("midlayer", "layers.0"): x for name, x in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    own = {"speculators_model_type": "eagle3", "draft_vocab_size": KNOWN, "transformer_layer_config": config}
    (folder / "config.json").write_text(json.dumps(own | {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}))
    again = lmstate.load(tmp_path / "target", weights="float32", heads=folder)
    assert again.fingerprint == made.ours.fingerprint
    own["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
    (folder / "config.json").write_text(json.dumps(own))
    assert lmstate.load(tmp_path / "target", weights="float32", heads=folder).heads[0].taps == (2, 4, 7)


WRONG: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "names tokens past the model's vocabulary": ({}, {"d2t": torch.full((KNOWN,), 90)}),
    "names a token twice": ({}, {"d2t": -torch.arange(KNOWN)}),
    "'d2t' has the shape": ({"draft_vocab_size": 7}, {}),
    "no head that lmstate can draft with": ({"architectures": ["LlamaForCausalLM"]}, {}),
    "EAGLE-3 heads of one": ({"num_hidden_layers": 2}, {}),
    "of a model of 8": ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, {}),
    "does not use": ({}, {"midlayer.other.weight": torch.zeros(3)}),
    "made for another model": ({"hidden_size": 32}, {}),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_head_that_does_not_fit_is_refused(message: str, tmp_path: Path, pairs: Callable[[str], Pair]) -> None:
    made = pairs("llama")
    made.target.save_pretrained(tmp_path / "target")
    save(tmp_path / "head", made.head, made.known)
    altered(tmp_path / "head", *WRONG[message])
    with pytest.raises(ModelError, match=message):
        lmstate.load(tmp_path / "target", weights="float32", heads=tmp_path / "head")
