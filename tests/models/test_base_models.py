"""Checkpoints of base models, saved without a head under names without its prefix, load where the embedding is it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import lmstate
from lmstate.errors import ModelError
from tests.zoo import CASES, randomize
from tests.zoo import text as ids


def changed(case: str, tied: bool) -> Any:
    config = CASES[case]()
    config.tie_word_embeddings = tied
    return config


def base(config: Any) -> Any:
    """A model without a head, as `AutoModel` makes it, with random weights."""
    torch.manual_seed(0)
    theirs = transformers.AutoModel.from_config(config, dtype=torch.float32).eval()
    randomize(theirs)
    return theirs


CHOSEN = (
    "llama", "qwen3", "gemma3", "mamba", "mamba2", "falcon_mamba", "falcon_h1", "recurrent_gemma", "gpt_neox", "falcon",
    "gpt2", "gptj", "opt",
)  # fmt: skip


@pytest.mark.parametrize("case", CHOSEN)
def test_a_base_model_gives_the_logits_of_its_embedding(case: str, tmp_path: Path) -> None:
    base(changed(case, tied=True)).save_pretrained(tmp_path)
    assert not any(
        name.startswith(("model.", "backbone.", "gpt_neox.", "transformer."))
        for name in load_file(tmp_path / "model.safetensors")
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = ids(40)
    with torch.no_grad():
        expected = theirs(tokens).logits
    ours = lmstate.load(tmp_path, weights="float32")
    torch.testing.assert_close(ours(tokens), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["llama", "mamba2"])
def test_without_a_head_or_a_tied_embedding_it_is_refused(case: str, tmp_path: Path) -> None:
    base(changed(case, tied=False)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"base model without a language model head.*tie_word_embeddings is false"):
        lmstate.load(tmp_path)


def test_with_a_head_beside_it_no_tie_is_asked_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(changed("llama", tied=False)).float().eval()
    randomize(theirs)
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}, path)
    tokens = ids(40)
    with torch.no_grad():
        expected = theirs(tokens).logits
    torch.testing.assert_close(lmstate.load(tmp_path, weights="float32")(tokens), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["score.weight", "pooler.dense.weight", "layers.9.input_layernorm.weight"])
def test_what_a_base_model_does_not_use_is_refused(name: str, tmp_path: Path) -> None:
    base(changed("llama", tied=True)).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {name: torch.zeros(3)}, path)
    with pytest.raises(ModelError, match=f"does not use.*{name}"):
        lmstate.load(tmp_path)


@pytest.mark.parametrize("old", ["model.", "model.layers.0."])
def test_a_model_saved_while_compiled_is_the_same_model(old: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(CASES["llama"]()).float().eval()
    randomize(theirs)
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    # The whole model compiled, then one layer of it; and constants that old versions of transformers saved.
    new = f"_orig_mod.{old}" if old == "model." else f"{old}_orig_mod."
    tensors = {name.replace(old, new): tensor for name, tensor in load_file(path).items()}
    save_file(tensors | {"model.layers.0.self_attn.masked_bias": torch.tensor(-1e4)}, path)
    tokens = ids(40)
    with torch.no_grad():
        expected = theirs(tokens).logits
    torch.testing.assert_close(lmstate.load(tmp_path, weights="float32")(tokens), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("change", [{}, {"text_config": {"model_type": "never_heard_of"}}], ids=["plain", "wrapped"])
def test_an_unsupported_family_is_told_as_such_whatever_its_tensors_are(change: dict, tmp_path: Path) -> None:
    config = {"model_type": "never_heard_of", "tie_word_embeddings": False} | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"decoder.embed.weight": torch.zeros(3, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"family 'never_heard_of' are not supported; supported are .*llama"):
        lmstate.load(tmp_path)
