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
from tests.files.ggufs import write
from tests.files.test_gguf_attention import metadata
from tests.heads.published import altered, check_greedy, check_no_bit, target_of
from tests.heads.test_drafts import prompts_of
from tests.zoo import VOCAB, randomize

KNOWN = 40
"""Tokens that the small heads know."""
TARGETS = ("llama", "qwen3_next", "gemma3")
NAMES = {  # of GGUF
    "fc": "fc", "norm": "output_norm", "lm_head": "output", "input_norm": "enc.output_norm",
    "midlayer.hidden_norm": "blk.0.attn_norm_2", "midlayer.input_layernorm": "blk.0.attn_norm",
    "midlayer.post_attention_layernorm": "blk.0.ffn_norm", "midlayer.self_attn.o_proj": "blk.0.attn_output",
    **{f"midlayer.self_attn.{part}_proj": f"blk.0.attn_{part}" for part in "qkv"},
    **{f"midlayer.mlp.{part}_proj": f"blk.0.ffn_{part}" for part in ("gate", "up", "down")},
}  # fmt: skip


class Reference(nn.Module):
    """The head on layers of `transformers`: a Llama layer whose projections read the embedding too.

    `normed`: it norms what it fuses, and adds to the normed stream, as EAGLE 3.1 and Red Hat's heads do.
    """

    def __init__(self, target: Any, taps: tuple[int, ...], normed: bool = False) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

        super().__init__()
        hidden = target.get_input_embeddings().weight.shape[1]
        self.config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=hidden, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, attn_implementation="eager",
        )  # fmt: skip
        self.taps, self.normed = taps, normed
        if normed:
            self.input_norm = LlamaRMSNorm(3 * hidden, 1e-6)
        self.midlayer = LlamaDecoderLayer(self.config, 0)
        for part, height in (("q", 64), ("k", 32), ("v", 32)):
            setattr(self.midlayer.self_attn, f"{part}_proj", nn.Linear(2 * hidden, height, bias=False))
        self.midlayer.hidden_norm = LlamaRMSNorm(hidden, 1e-6)
        self.rotary = LlamaRotaryEmbedding(self.config)
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.norm = LlamaRMSNorm(hidden, 1e-6)
        self.lm_head = nn.Linear(hidden, KNOWN, bias=False)

    def fused(self, streams: Tensor) -> Tensor:
        return self.fc(self.input_norm(streams) if self.normed else streams)

    def forward(self, embedded: Tensor, before: Tensor) -> Tensor:
        """The stream behind the layer, of tokens 1.. and what was handed on of those before them, `[T, E]` each."""
        layer, length = self.midlayer, len(before)
        normed = layer.hidden_norm(before)
        x = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)[None]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        mixed, _ = layer.self_attn(x, self.rotary(x, torch.arange(length)[None]), mask)
        mixed = mixed + (normed if self.normed else before)
        return (mixed + layer.mlp(layer.post_attention_layernorm(mixed)))[0]


class Pair:
    """A target of `transformers` and a head for it, and both in lmstate."""

    def __init__(self, case: str, folder: Path, normed: bool = False) -> None:
        self.folder = folder
        self.target = target_of(case)
        self.head = Reference(self.target, (2, 4, 5), normed).eval()
        randomize(self.head, seed=1)
        generator = torch.Generator().manual_seed(2)
        self.known = torch.randperm(VOCAB, generator=generator)[:KNOWN].sort().values
        self.target.save_pretrained(folder / "target")
        save(folder / "head", self.head, self.known)
        self.ours = self.load("head")

    def load(self, head: str) -> lmstate.Model:
        return lmstate.load(self.folder / "target", weights="float32", heads=self.folder / head)

    def ahead(self, tokens: list[int], drafted: int) -> Tensor:
        """The logits of the next token, from scratch; the last `drafted` tokens are of the head itself."""
        whole = torch.tensor([tokens])
        with torch.no_grad():
            streams = self.target(whole[:, : len(tokens) - 1 - drafted], output_hidden_states=True).hidden_states
            before = self.head.fused(torch.cat([streams[tap][0] for tap in self.head.taps], dim=-1))
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
    config |= dict.fromkeys(("norm_before_residual", "norm_before_fc"), head.normed)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    return lru_cache(lambda case: Pair(case, tmp_path_factory.mktemp(case)))


def save_gguf(path: Path, head: Reference, known: Tensor, *, copies: tuple[str, ...] = ("lm_head",)) -> None:
    """The head as llama.cpp's converter writes it; of its own matrices those of `copies`."""
    config, tensors = head.config, {}
    for full, tensor in head.state_dict().items():
        stem = full.removesuffix(".weight")
        if stem != "lm_head" or stem in copies:
            tensors[f"{NAMES[stem]}.weight"] = tensor
    for part, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
        rows = tensors[f"blk.0.attn_{part}.weight"]
        tensors[f"blk.0.attn_{part}.weight"] = (
            rows.view(heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
        )
    arrays: dict[str, Any] = {name: tensor.contiguous().numpy() for name, tensor in tensors.items()}
    values = metadata(
        config, "eagle3", target_layers=list(head.taps), target_hidden_size=config.hidden_size,
        norm_before_residual=head.normed, norm_before_fc=head.normed,
    )  # fmt: skip
    values["tokenizer.ggml.tokens"] = [f"t{index}" for index in range(VOCAB)]
    if "lm_head" in copies:
        arrays["d2t"] = known.numpy()
    write(path, "eagle3", values, arrays)


@pytest.mark.parametrize("case", TARGETS)
def test_a_draft_is_what_the_head_says(case: str, pairs: Callable[[str], Pair]) -> None:
    check_drafts(pairs(case), pairs(case).ours)


def check_drafts(made: Pair, model: lmstate.Model) -> None:
    """What a model drafts is what the layers of `transformers` say."""
    rows = prompts_of(9, 4, 17)
    state = model.new_state(3)
    logits = model(rows, state)
    assert logits is not None
    last = {row: int(logits[row].argmax()) for row in (0, 2)}
    drafts = model.draft_ahead(state, last, 4)
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


@pytest.mark.parametrize("normed", [False, True])
def test_a_head_in_gguf_is_the_head_in_its_folder(normed: bool, tmp_path: Path) -> None:
    made = Pair("llama", tmp_path, normed)
    save_gguf(tmp_path / "head.gguf", made.head, made.known)
    model = made.load("head.gguf")
    assert model.fingerprint == made.ours.fingerprint
    check_drafts(made, model)
    check_greedy(model)
    check_no_bit(model)


def test_a_head_in_gguf_without_an_output_has_that_of_its_model(tmp_path: Path) -> None:
    made = Pair("llama", tmp_path)
    made.head.lm_head, made.known = made.target.get_output_embeddings(), torch.arange(VOCAB)
    save_gguf(tmp_path / "head.gguf", made.head, made.known, copies=())
    check_drafts(made, made.load("head.gguf"))


def test_a_table_of_tokens_in_gguf_that_is_no_list_is_refused(tmp_path: Path, pairs: Callable[[str], Pair]) -> None:
    made = pairs("llama")
    made.target.save_pretrained(tmp_path / "target")
    save_gguf(tmp_path / "head.gguf", made.head, made.known.expand(2, -1).contiguous())
    with pytest.raises(ModelError, match="expected a list of token ids"):
        lmstate.load(tmp_path / "target", weights="float32", heads=tmp_path / "head.gguf")


def test_a_head_is_no_model_by_itself(tmp_path: Path) -> None:
    made = Pair("llama", tmp_path)
    save_gguf(tmp_path / "head.gguf", made.head, made.known)
    for path in ("head", "head.gguf"):
        with pytest.raises(ModelError, match="drafts for another model"):
            lmstate.load(tmp_path / path)


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
