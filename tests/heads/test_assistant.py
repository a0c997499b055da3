"""Gemma 4's assistants: the drafts of transformers, and texts that are the model's own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

import lmstate
from lmstate import kv
from lmstate.errors import ModelError
from tests.files.ggufs import write
from tests.files.test_gguf_shared import INSIDE, shared
from tests.heads.published import acceptance, altered, check_greedy, check_no_bit
from tests.heads.test_drafts import prompts_of
from tests.zoo import CASES, VOCAB, auto, randomize, text

WINDOW = 13
CENTROIDS, BEST = 11, 3
NAMES = {  # of GGUF
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "pre_projection.weight": "nextn.pre_projection.weight", "post_projection.weight": "nextn.post_projection.weight",
}  # fmt: skip


class Pair:
    """A target of `transformers` and an assistant for it, and both in lmstate."""

    def __init__(self, folder: Path, ordered: bool = False) -> None:
        config = CASES["gemma4"]()
        torch.manual_seed(0)
        self.target = auto(config).from_config(config, dtype=torch.float32).eval()
        randomize(self.target)
        kinds = ["sliding_attention", "sliding_attention", "full_attention"]
        inside = Gemma4TextConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=config.num_key_value_heads, head_dim=8, global_head_dim=16, layer_types=kinds,
            sliding_window=WINDOW, hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, num_kv_shared_layers=3,
            use_double_wide_mlp=False, enable_moe_block=False, pad_token_id=0,
        )  # fmt: skip
        outside = Gemma4AssistantConfig(
            text_config=inside, backbone_hidden_size=config.hidden_size, use_ordered_embeddings=ordered,
            num_centroids=CENTROIDS, centroid_intermediate_top_k=BEST,
        )  # fmt: skip
        self.assistant = Gemma4AssistantForCausalLM(outside).eval()
        randomize(self.assistant, seed=3)
        if ordered:
            order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))
            self.assistant.masked_embedding.token_ordering.copy_(order)
        self.target.save_pretrained(folder / "target")
        self.assistant.save_pretrained(folder / "assistant")
        self.folder = folder
        self.ours = self.load()

    def load(self, assistant: str = "assistant") -> lmstate.Model:
        return lmstate.load(self.folder / "target", weights="float32", heads=self.folder / assistant)

    def save_gguf(self, path: Path, **more: Any) -> None:
        """The assistant as llama.cpp's converter writes it."""
        config = self.assistant.config.text_config
        config.allow_global_per_layer_attribute_access = True
        dim = config.per_layer_config[2].head_dim
        given = {
            "attention.key_length": dim, "attention.key_length_swa": config.head_dim, "nextn_predict_layers": 3,
            "embedding_length_out": self.assistant.config.backbone_hidden_size,
        }  # fmt: skip
        tensors: dict[str, Any] = {"rope_freqs.weight": np.array([1.0] * (dim // 8) + [1e30] * (dim // 2 - dim // 8))}
        for name, tensor in self.assistant.state_dict().items():
            if (match := re.fullmatch(r"model\.layers\.(\d)\.(.+)\.weight", name)) is not None:
                tensors[f"blk.{match[1]}.{INSIDE[match[2]]}.weight"] = tensor
            elif (match := re.fullmatch(r"model\.layers\.(\d)\.layer_scalar", name)) is not None:
                tensors[f"blk.{match[1]}.layer_output_scale.weight"] = tensor
            elif name in NAMES:
                tensors[NAMES[name]] = tensor
        arrays = {name: np.asarray(each, np.float32) for name, each in tensors.items()}
        write(path, "gemma4-assistant", shared(config, "gemma4-assistant", **given | more), arrays)

    @torch.no_grad()
    def ahead(self, ids: list[int], token: int, drafted: list[int]) -> Tensor:
        """Logits after a text, its next token and drafted ones: the text is read from scratch."""
        out = self.target(torch.tensor([ids]), output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
        hidden = out.hidden_states[-1][:, -1:]
        words = self.target.get_input_embeddings()
        for last in (token, *drafted):
            made = self.assistant(
                inputs_embeds=torch.cat([words(torch.tensor([[last]])), hidden], dim=-1),
                position_ids=torch.tensor([[len(ids)]]), shared_kv_states=out.shared_kv_states,
            )  # fmt: skip
            hidden = made.last_hidden_state
        return made.logits[0, 0]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Pair]:
    return lru_cache(lambda ordered: Pair(tmp_path_factory.mktemp(f"assistant{ordered}"), ordered))


@pytest.mark.parametrize("ordered", [False, True])
def test_a_draft_is_what_the_assistant_says(ordered: bool, pairs: Callable[[bool], Pair]) -> None:
    check_drafts(pairs(ordered), pairs(ordered).ours)


def test_an_assistant_in_gguf_is_the_assistant_in_its_folder(pairs: Callable[[bool], Pair]) -> None:
    made = pairs(False)
    made.save_gguf(made.folder / "assistant.gguf")
    model = made.load("assistant.gguf")
    check_drafts(made, model)
    check_greedy(model)
    check_no_bit(model)


def test_an_assistant_in_gguf_for_another_model_is_refused(pairs: Callable[[bool], Pair]) -> None:
    made = pairs(False)
    made.save_gguf(made.folder / "other.gguf", embedding_length_out=32)
    with pytest.raises(ModelError, match="drafts for a model 32 wide"):
        made.load("other.gguf")
    with pytest.raises(ModelError, match="drafts for another model"):
        lmstate.load(made.folder / "other.gguf")


def check_drafts(made: Pair, model: lmstate.Model) -> None:
    """What a model drafts is what transformers says."""
    rows = prompts_of(9, 4, 70)  # shorter than the window, and longer
    state = model.new_state(3)
    logits = model(rows, state)
    assert logits is not None
    last = {row: int(logits[row].argmax()) for row in (0, 2)}
    drafts = model.draft_ahead(state, last, 4)
    assert state.lengths == list(map(len, rows)) and state.pending == [0, 0, 0]
    for row, draft in drafts.items():
        assert draft.tokens
        for at, (token, confidence) in enumerate(zip(draft.tokens, draft.confidence)):
            expected = made.ahead(rows[row], last[row], list(draft.tokens[:at])).softmax(-1)
            assert confidence == pytest.approx(float(expected[token]), abs=1e-4) and token == int(expected.argmax())


def test_a_draft_is_the_same_after_a_rewind_a_fork_and_a_restore(pairs: Callable[[bool], Pair], tmp_path: Path) -> None:
    model, ids = pairs(False).ours, text(90)[0].tolist()
    whole = model.new_state()
    model([ids[:70]], whole)
    (expected,) = model.draft_ahead(whole, {0: ids[70]}, 4).values()
    state = model.new_state(rows=2)
    for first in range(0, 84, 7):
        model([ids[first : first + 7], []], state)
    state.rewind(0, 70)
    state.snapshot(0).save(tmp_path / "row")
    state.restore(1, lmstate.Snapshot.load(tmp_path / "row"))
    for draft in model.draft_ahead(state, {0: ids[70], 1: ids[70]}, 4).values():
        assert draft.tokens == expected.tokens
        assert draft.confidence == pytest.approx(expected.confidence, abs=1e-5)


@pytest.mark.parametrize("storage", [None, kv.Quantized(8)])
@pytest.mark.parametrize("rewind", [0, 16])
def test_greedy_with_an_assistant_equals_greedy_without(
    rewind: int, storage: Any, pairs: Callable[[bool], Pair]
) -> None:
    check_greedy(pairs(False).ours, tokens=20, storage=storage, rewind=rewind)


def test_an_assistant_changes_no_bit_of_its_model(pairs: Callable[[bool], Pair]) -> None:
    model = pairs(False).ours
    alone, ids = check_no_bit(model), text(60, rows=2)
    with lmstate.Engine(model, rows=2, memory="64MiB", draft="heads") as engine:
        told = engine.submit(ids[0].tolist(), max_new_tokens=12, ignore_eos=True).result()
    expected = alone.generate(ids[0].tolist(), max_new_tokens=12, ignore_eos=True, return_ids=True, draft=None)
    assert told.tokens[0] == expected


def test_an_assistant_that_learned_its_model_is_accepted(tmp_path: Path) -> None:
    """Distilled for a few seconds on the texts of a small target: what a published one was for weeks."""
    made = Pair(tmp_path)
    target, assistant = made.target, made.assistant
    with torch.no_grad():
        for parameter in assistant.parameters():
            if parameter.ndim == 2:
                parameter.mul_(0.5)
    texts = [
        made.ours.generate([[seed] for seed in range(1, 33)], max_new_tokens=24, ignore_eos=True, return_ids=True)
    ][0]
    ids = torch.tensor([[seed, *own] for seed, own in zip(range(1, 33), texts)])
    with torch.no_grad():
        out = target(ids, output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
    optimizer = torch.optim.AdamW(assistant.parameters(), lr=5e-3)
    words = target.get_input_embeddings()
    for step in range(150):
        at = 2 + step % 22
        shared = {kind: (k[:, :, :at], v[:, :, :at]) for kind, (k, v) in out.shared_kv_states.items()}
        hidden = out.hidden_states[-1][:, at - 1 : at]
        made_of = torch.cat([words(ids[:, at : at + 1]).detach(), hidden], dim=-1)
        logits = assistant(
            inputs_embeds=made_of, position_ids=torch.full((len(ids), 1), at), shared_kv_states=shared
        ).logits[:, 0]
        loss = torch.nn.functional.cross_entropy(logits, ids[:, at + 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assistant.save_pretrained(tmp_path / "assistant")
    prompts = [[seed] for seed in range(1, 9)]
    rates = [acceptance(own, prompts, tokens=20, depth=2) for own in (made.ours, made.load())]
    assert rates[0] < 0.2 and rates[1] > 0.5, rates


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]] = {
    "drafts for a model 64 wide": ({"backbone_hidden_size": 64}, {}, {}),
    "knows 98 tokens": ({}, {"vocab_size": 98}, {}),
    "made for another model": ({}, {"num_key_value_heads": 1}, {}),
    "holds no head": ({"model_type": []}, {}, {}),
    "does not use": ({}, {}, {"model.layers.0.other.weight": torch.zeros(3)}),
    "pre_projection": ({}, {}, {"pre_projection.weight": torch.zeros(3, 3)}),
}


@pytest.mark.parametrize("message", WRONG)
def test_an_assistant_that_does_not_fit_is_refused(message: str, tmp_path: Path) -> None:
    made = Pair(tmp_path)
    outside, inside, more = WRONG[message]
    told = json.loads((tmp_path / "assistant" / "config.json").read_text())["text_config"]
    altered(tmp_path / "assistant", outside | {"text_config": told | inside}, more)
    with pytest.raises(ModelError, match=message):
        made.load()


def test_clusters_are_no_more_than_there_are_where_nothing_is_said(tmp_path: Path) -> None:
    made = Pair(tmp_path, ordered=True)
    path = tmp_path / "assistant" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"centroid_intermediate_top_k": None}))
    model, ids = made.load(), text(9)[0].tolist()
    state = model.new_state()
    model([ids], state)
    assert len(model.draft_ahead(state, {0: 5}, 3)[0].tokens) >= 1


def test_an_assistant_of_another_family_is_refused(tmp_path: Path) -> None:
    made = Pair(tmp_path)
    config = CASES["llama"]()
    auto(config).from_config(config).save_pretrained(tmp_path / "llama")
    with pytest.raises(ModelError, match="drafts for Gemma 4, and this is a llama model"):
        lmstate.load(tmp_path / "llama", heads=made.folder / "assistant")
    with pytest.raises(ModelError, match="does not name each of 99 tokens once"):
        pair = Pair(tmp_path / "ordered", ordered=True)
        file = pair.folder / "assistant" / "model.safetensors"
        save_file(load_file(file) | {"masked_embedding.token_ordering": torch.zeros(VOCAB, dtype=torch.int64)}, file)
        pair.load()
