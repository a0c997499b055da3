"""Which tensors of a checkpoint become heads, and when."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lmstate
from tests.heads.zoo import pair, save
from tests.zoo import text

Config = dict[str, Any]
Change = Callable[[Config, dict[str, Tensor]], None]


def saved(case: str, folder: Path, change: Change | None = None) -> Path:
    made = pair(case)
    save(made.theirs, made.mtp, made.case, folder)
    if change is not None:
        path, weights = folder / "config.json", folder / "model.safetensors"
        config, tensors = json.loads(path.read_text()), load_file(weights)
        change(config, tensors)
        path.write_text(json.dumps(config))
        save_file(tensors, weights)
    return folder


def drafts(model: lmstate.Model) -> dict[int, Any]:
    state = model.new_state()
    model(text(20), state)
    return model.draft_ahead(state, {0: 7}, 3)


def test_heads_are_loaded_only_where_they_are_asked_for(tmp_path: Path) -> None:
    folder, ids = saved("qwen3_next", tmp_path), text(30)
    plain, headed = lmstate.load(folder, weights="float32"), lmstate.load(folder, weights="float32", heads=True)
    assert not plain.heads and len(headed.heads) == 1
    assert len(headed.new_state().layers) == len(plain.new_state().layers) + 1
    torch.testing.assert_close(plain(ids), headed(ids), atol=0, rtol=0)
    assert plain.fingerprint != headed.fingerprint
    with pytest.raises(lmstate.ModelError, match="training or adapters"):
        lmstate.load(folder, heads=True, trainable=True)


def test_copies_of_embedding_and_head_are_shared_and_others_are_not(tmp_path: Path) -> None:
    layer = f"model.layers.{pair('deepseek_v3').theirs.config.num_hidden_layers}"

    def copies(config: Config, tensors: dict[str, Tensor]) -> None:
        tensors[f"{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{layer}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()

    def others(config: Config, tensors: dict[str, Tensor]) -> None:
        copies(config, tensors)
        tensors[f"{layer}.embed_tokens.weight"] += 1.0
        tensors[f"{layer}.shared_head.head.weight"] *= -1.0

    whole = pair("deepseek_v3").ours
    for change, shared in ((copies, True), (others, False)):
        model = lmstate.load(saved("deepseek_v3", tmp_path, change), weights="float32", heads=True)
        (head,) = model.heads
        assert (head.embed is model.embed) == (head.head is model.head) == shared
        assert (drafts(model) == drafts(whole)) == shared


def test_heads_beside_the_text_model_of_a_wrapper(tmp_path: Path) -> None:
    """Qwen3.5: the text model lies in `model.language_model`, its heads in `mtp`."""

    def wrap(config: Config, tensors: dict[str, Tensor]) -> None:
        inner = dict(config)
        config.clear()
        config |= {"model_type": "qwen3_5", "text_config": inner, "tie_word_embeddings": False}
        for name in list(tensors):
            if name.startswith("model."):
                tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors["model.visual.patch_embed.proj.weight"] = torch.ones(2, 2)

    folder = saved("qwen3_5", tmp_path, wrap)
    assert drafts(lmstate.load(folder, weights="float32", heads=True)) == drafts(pair("qwen3_5").ours)
    ids = text(12)
    torch.testing.assert_close(lmstate.load(folder, weights="float32")(ids), pair("qwen3_5").ours(ids))


def drop(end: str) -> Change:
    def change(config: Config, tensors: dict[str, Tensor]) -> None:
        del tensors[next(name for name in tensors if name.endswith(end))]

    return change


def narrow(end: str) -> Change:
    def change(config: Config, tensors: dict[str, Tensor]) -> None:
        name = next(name for name in tensors if name.endswith(end))
        tensors[name] = tensors[name][..., 1:].contiguous()

    return change


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("glm4_moe", drop("hnorm.weight"), "lacks the tensor"),
        ("glm4_moe", narrow("eh_proj.weight"), "has the shape"),
        ("qwen3_next", drop("mtp.norm.weight"), "lacks the tensor"),
        ("qwen3_next", narrow("mtp.layers.0.self_attn.o_proj.weight"), "has the shape"),
        ("qwen3_next", drop("mtp.fc.weight"), "no multi-token prediction heads"),
        ("nemotron_h", drop("eh_proj.weight"), "no multi-token prediction heads"),
        ("nemotron_h", lambda config, _: config.update(mtp_layers_block_type=["moe", "cheese"]), "cheese"),
    ],
)
def test_damaged_heads_are_refused(case: str, change: Change, message: str, tmp_path: Path) -> None:
    folder = saved(case, tmp_path, change)
    with pytest.raises(lmstate.ModelError, match=message):
        lmstate.load(folder, weights="float32", heads=True)
    lmstate.load(folder, weights="float32")  # whole without them


@pytest.mark.parametrize("case", ["qwen3_next", "glm4_moe"])
def test_an_engine_of_a_model_with_heads_gives_the_same_tokens(case: str) -> None:
    model = pair(case).ours
    prompts = [text(40, seed=1)[0].tolist() + text(length, seed=length)[0].tolist() for length in (3, 9, 5)]
    alone = [model.generate(prompt, max_new_tokens=8, draft=None, return_ids=True) for prompt in prompts]
    with lmstate.Engine(model, rows=2) as engine:
        for _ in range(2):  # again, from what it kept
            requests = [engine.submit(prompt, max_new_tokens=8) for prompt in prompts]
            assert [list(request.result().tokens[0]) for request in requests] == alone
