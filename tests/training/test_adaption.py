"""Adaption prompts (LLaMA-Adapter): what PEFT and a forward written out compute, and training."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import lmstate
from lmstate.errors import ModelError, SnapshotError
from lmstate.training import AdaptionPromptConfig, NetworkAdapterModel, loss
from tests.training.in_double import InDouble
from tests.training.small import ragged, saved, theirs, whole_loss
from tests.zoo import CASES, auto, randomize, text

PROMPTED = ["llama", "mistral", "gpt2"]


def reference_of(case: str) -> Any:
    """A model of transformers whose heads are together as wide as the stream, as PEFT takes for granted."""
    config = CASES[case]()
    if case != "gpt2":
        config.head_dim, config.num_attention_heads, config.num_key_value_heads = config.hidden_size // 4, 4, 2
    torch.manual_seed(0)
    model = auto(config).from_config(config, dtype=torch.float32).eval()
    randomize(model)
    return model


def trained(folder: Path, out: Path, layers: int | None = 2, seed: int = 1) -> NetworkAdapterModel:
    """A model with adaption prompts, saved in `out`."""
    model = lmstate.load(folder, weights="float32", trainable=AdaptionPromptConfig(5, layers))
    assert isinstance(model, NetworkAdapterModel)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for leaf in model.parameters():
            leaf.copy_(torch.randn(leaf.shape, generator=draw))
    model.save_pretrained(out)
    return model


def prompted(reference: Any, parts: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    """The logits of a transformers model whose attention also sees the learned tokens, written out in hooks."""

    def hook(module: Any, args: Any, kwargs: Any, output: Any, prompt: Tensor, gate: Tensor) -> Any:
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        dim = module.head_dim

        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, dim)).transpose(1, 2)  # [R, H, T, D]

        if hasattr(module, "c_attn"):
            width = x.shape[-1]
            q, (_, k, v) = heads(module.c_attn(x)[..., :width]), map(heads, module.c_attn(prompt).split(width, -1))
        else:
            cos, sin = kwargs["position_embeddings"]
            q = heads(module.q_proj(x))
            q, _ = apply_rotary_pos_emb(q, q, cos, sin)
            k, v = heads(module.k_proj(prompt)), heads(module.v_proj(prompt))
            k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        weights = (q @ k.transpose(2, 3) / math.sqrt(dim)).softmax(-1)
        added = gate * (weights @ v).transpose(1, 2).flatten(-2)
        added = added if hasattr(module, "c_attn") else module.o_proj(added)
        return output[0] + added, *output[1:]

    for name, prompt in parts.items():
        if name.endswith("adaption_prompt"):
            module = name.removeprefix("base_model.model.").removesuffix(".adaption_prompt")
            gate = parts[name.replace("_prompt", "_gate")]
            reference.get_submodule(module).register_forward_hook(
                lambda *told, prompt=prompt, gate=gate: hook(*told, prompt, gate), with_kwargs=True
            )
    return lambda ids: reference(ids).logits


@pytest.mark.parametrize("case", PROMPTED)
def test_queries_attend_to_learned_tokens_beside_their_text(case: str, tmp_path: Path) -> None:
    reference, ids = reference_of(case), text(40, rows=2)
    with saved(reference) as folder, torch.no_grad():
        model = trained(folder, tmp_path)
        plain = reference(ids).logits
        expected = prompted(reference, dict(model.named_parameters()))(ids)
        own = lmstate.load(folder, weights="float32", adapter=tmp_path)
        whole = own(ids)
        assert whole is not None and not torch.allclose(plain, whole, atol=0.05)
        torch.testing.assert_close(whole, expected, atol=1e-3, rtol=1e-3)
        assert torch.equal(model(ids), whole)  # type: ignore[arg-type]
        state = own.new_state(rows=2)
        for first, last in ((0, 1), (1, 18), (18, 40)):
            assert torch.equal(own(ids[:, first:last], state), whole[:, last - 1])  # type: ignore[arg-type]
        one = own.new_state()
        assert torch.equal(own(ids[1:], one)[0], whole[1, -1])  # type: ignore[index]
        with pytest.raises(SnapshotError, match="another model"):
            lmstate.load(folder, weights="float32").new_state().restore(0, state.snapshot(0))
        with lmstate.Engine(own, rows=2, memory="64MiB") as engine:
            told = engine.submit(ids[0].tolist(), max_new_tokens=6, ignore_eos=True).result().tokens[0]
        assert told == own.generate(ids[0].tolist(), max_new_tokens=6, ignore_eos=True, draft=None, return_ids=True)


@pytest.mark.parametrize("case", PROMPTED)
def test_new_prompts_change_nothing_and_learn_in_chunks(case: str, tmp_path: Path) -> None:
    rows = ragged(40, 13)
    with saved(reference_of(case)) as folder:
        with torch.no_grad():
            fresh = lmstate.load(folder, weights="float32", trainable=AdaptionPromptConfig(5))
            plain = lmstate.load(folder, weights="float32")
            torch.testing.assert_close(fresh(rows), plain(rows), atol=1e-5, rtol=1e-5)
        if case == "gpt2":  # its matrices stay float32 there; its gradients are compared with PEFT's
            return
        with InDouble():
            model = trained(folder, tmp_path)
            expected = whole_loss(model, rows)
            expected.backward()
            wanted = [leaf.grad for leaf in model.parameters()]
            model.zero_grad()
            got = loss(model, rows, chunk=7)
            got.backward()
            assert float(abs(got - expected).detach()) < 1e-10
            for leaf, grad in zip(model.parameters(), wanted):
                assert grad is not None and float(grad.abs().max()) > 0
                torch.testing.assert_close(leaf.grad, grad, atol=1e-10, rtol=1e-10)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with saved(reference_of("llama")) as folder:
        trained(folder, tmp_path)
        config = json.loads((tmp_path / "adapter_config.json").read_text())
        for changes, why in (
            ({"adapter_len": 4}, r"and \[1, 4, 48\] is expected"), ({"adapter_layers": 1}, "is damaged"),
            ({"adapter_layers": 9}, "this model has 3"), ({"adapter_layers": 0}, "from 1 to"),
        ):  # fmt: skip
            (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **changes}))
            with pytest.raises(ModelError, match=why):
                lmstate.load(folder, adapter=tmp_path)
        with pytest.raises(ModelError, match=r"tokens=0"):
            AdaptionPromptConfig(0)
    with saved(theirs("qwen2-tied-mqa")) as folder, pytest.raises(ModelError, match="as in PEFT; this is a qwen2"):
        lmstate.load(folder, trainable=AdaptionPromptConfig())


@pytest.mark.parametrize("case", PROMPTED)
def test_peft_reads_what_is_saved_and_its_files_are_read(case: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    reference, ids, rows = reference_of(case), text(20, rows=2), ragged(24, 24)
    with saved(reference) as folder:
        model = trained(folder, tmp_path / "ours")
        other = peft.PeftModel.from_pretrained(reference, tmp_path / "ours", is_trainable=True)
        torch.testing.assert_close(other(ids).logits, model(ids), atol=1e-3, rtol=1e-3)
        loss(model, rows, chunk=7).backward()
        whole_loss(other, rows).backward()
        found = {name: leaf for name, leaf in other.named_parameters() if "adaption_" in name}
        own = dict(model.named_parameters())
        assert set(own) == set(found)
        for name, leaf in found.items():
            torch.testing.assert_close(own[name].grad, leaf.grad, atol=1e-4 * float(leaf.grad.abs().max()), rtol=1e-3)
        other.save_pretrained(tmp_path / "theirs")
        again = lmstate.load(folder, weights="float32", adapter=tmp_path / "theirs")
        torch.testing.assert_close(again(ids), other(ids).logits, atol=1e-3, rtol=1e-3)
