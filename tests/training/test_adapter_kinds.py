"""Adapters of other kinds than LoRA: (IA)3, LoHa, LoKr, as the matrices that they stand for and as in PEFT."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lmstate
from lmstate.errors import ModelError
from lmstate.files.safetensors import TensorFile
from lmstate.files.writing import save_tensors
from lmstate.training import AdaptedModel, AdapterConfig, IA3Config, LoHaConfig, LoKrConfig, LoraModel, loss
from tests.training.in_double import InDouble
from tests.training.small import ragged, saved, theirs, whole_loss
from tests.zoo import text

KINDS: dict[str, Callable[..., AdapterConfig]] = {
    "ia3": lambda targets: IA3Config(targets, [targets[-1]]),
    "loha": lambda targets: LoHaConfig(3, 5.0, targets),
    "lokr": lambda targets: LoKrConfig(2, 5.0, targets),
    "lokr-both": lambda targets: LoKrConfig(1, 5.0, targets, decompose_both=True, factor=4, ranks={targets[0]: 2}),
}
# Modules apart, stacked, stacked out of order, with biases, and stored transposed; the last one's inputs are rescaled.
CASES = {
    "llama": ["q_proj", "v_proj", "up_proj", "down_proj"],
    "phi3": ["qkv_proj", "down_proj", "gate_up_proj"],
    "falcon-grouped": ["query_key_value", "dense_4h_to_h"],
    "qwen2-tied-mqa": ["k_proj", "v_proj", "gate_proj"],
    "gpt2": ["attn.c_attn", "mlp.c_proj"],
    "gemma3": ["k_proj", "o_proj"],
}


def trained(folder: Path, out: Path, config: AdapterConfig, seed: int = 1, **options: Any) -> LoraModel:
    """A model with an adapter that changes much, saved in `out`."""
    model = lmstate.load(folder, weights="float32", trainable=config, **options)
    assert isinstance(model, LoraModel)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, leaf in model.named_parameters():
            moved = torch.randn(leaf.shape, generator=draw)
            leaf.copy_(1 + 0.3 * moved if name.endswith("ia3_l") else 0.3 * moved)
    model.save_pretrained(out)
    return model


def changed(config: dict[str, Any], module: str, own: dict[str, Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix `[N, K]` that a module's update makes of its own, and what its bias is multiplied by."""
    if config["peft_type"] == "IA3":
        vector = own["ia3_l"]
        return weight * vector, torch.ones(()) if len(vector) == 1 else vector[:, 0]
    rank = next((rank for name, rank in config["rank_pattern"].items() if module.endswith(name)), config["r"])
    if config["peft_type"] == "LOHA":
        update = (own["hada_w1_a"] @ own["hada_w1_b"]) * (own["hada_w2_a"] @ own["hada_w2_b"])
    else:
        first, second = (
            own[name] if name in own else own[f"{name}_a"] @ own[f"{name}_b"] for name in ("lokr_w1", "lokr_w2")
        )
        update = torch.kron(first, second)
    return weight + config["alpha"] / rank * update, torch.ones(())


def change_weights(reference: Any, out: Path) -> None:
    """Make of a model's own weights what a saved adapter makes of them."""
    config, file = json.loads((out / "adapter_config.json").read_text()), TensorFile(out / "adapter_model.safetensors")
    modules: dict[str, dict[str, Tensor]] = {}
    for name in file.entries:
        module, _, part = name.removeprefix("base_model.model.").rpartition(".")
        modules.setdefault(module, {})[part] = file.tensor(name)
    for module, own in modules.items():
        layer = reference.get_submodule(module)
        turned = not isinstance(layer, torch.nn.Linear)  # GPT-2's matrices are [K, N]
        weight, factor = changed(config, module, own, layer.weight.T if turned else layer.weight)
        layer.weight.copy_(weight.T if turned else weight)
        if layer.bias is not None:
            layer.bias.mul_(factor)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_an_adapter_gives_what_its_matrices_give_in_the_weights(case: str, kind: str, tmp_path: Path) -> None:
    reference, ids = theirs(case), text(40, rows=2)
    with saved(reference) as folder, torch.no_grad():
        model = trained(folder, tmp_path, KINDS[kind](CASES[case]))
        plain = lmstate.load(folder, weights="float32")
        apart = lmstate.load(folder, weights="float32", adapter=tmp_path)
        merged = lmstate.load(folder, weights="float32", adapter=tmp_path, merge=True)
        change_weights(reference, tmp_path)
        expected = reference(ids).logits
        assert not torch.allclose(plain(ids), expected, atol=0.05)  # type: ignore[arg-type]
        for own in (model, apart, merged):
            torch.testing.assert_close(own(ids), expected, atol=1e-3, rtol=1e-3)
        state = apart.new_state(rows=2)
        apart(ids[:, :17], state)
        cut = apart(ids[:, 17:], state)
        assert torch.equal(cut, apart(ids)[:, -1])  # type: ignore[index, arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_adapter_changes_nothing(kind: str) -> None:
    ids = text(20, rows=2)
    with saved(theirs("llama")) as folder, torch.no_grad():
        model = lmstate.load(folder, weights="int8", trainable=KINDS[kind](CASES["llama"]))
        torch.testing.assert_close(model(ids), lmstate.load(folder, weights="int8")(ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["phi3", "qwen2-tied-mqa"])
def test_gradients_in_chunks_are_those_of_the_whole(case: str, kind: str, tmp_path: Path) -> None:
    rows = ragged(40, 13)
    with saved(theirs(case)) as folder, InDouble():
        model = trained(folder, tmp_path, KINDS[kind](CASES[case]))
        whole_loss(model, rows).backward()
        wanted = [leaf.grad for leaf in model.parameters()]
        model.zero_grad()
        loss(model, rows, chunk=7).backward()
        for leaf, grad in zip(model.parameters(), wanted):
            assert grad is not None and float(grad.abs().max()) > 0
            torch.testing.assert_close(leaf.grad, grad, atol=1e-10, rtol=1e-10)


def test_rows_may_have_adapters_of_different_kinds(tmp_path: Path) -> None:
    ids, kinds = text(30, rows=4), ["loha", "ia3", "lokr"]
    names = ["loha", None, "ia3", "lokr"]
    with saved(theirs("qwen2-tied-mqa")) as folder, torch.no_grad():
        for kind in kinds:
            trained(folder, tmp_path / kind, KINDS[kind](CASES["qwen2-tied-mqa"]))
        model = lmstate.load(folder, weights="float32", adapter={kind: tmp_path / kind for kind in kinds})
        assert isinstance(model, AdaptedModel)
        got = model.adapted(names)(ids)
        for row, name in enumerate(names):
            alone = model.adapted(name)(ids[row : row + 1])
            torch.testing.assert_close(got[row], alone[0], atol=1e-4, rtol=1e-4)  # type: ignore[index]
        prints = {model.adapted(name).fingerprint for name in names}
        assert len(prints) == len(names)


def test_training_goes_on_from_a_saved_adapter(tmp_path: Path) -> None:
    with saved(theirs("llama")) as folder:
        for kind, config in KINDS.items():
            model = trained(folder, tmp_path / kind, config(CASES["llama"]))
            again = lmstate.load(folder, weights="float32", trainable="adapter", adapter=tmp_path / kind)
            assert isinstance(again, LoraModel)
            given, read = dict(model.named_parameters()), dict(again.named_parameters())
            assert set(given) == set(read) and all(torch.equal(given[name], read[name]) for name in given)
            again.save_pretrained(tmp_path / "again")
            first, second = (
                json.loads((tmp_path / place / "adapter_config.json").read_text()) for place in (kind, "again")
            )
            assert first == second
        with pytest.raises(ModelError, match="LOKR adapter: give trainable"):
            lmstate.load(folder, trainable="lora", adapter=tmp_path / "lokr")


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with saved(theirs("llama")) as folder:
        for kind, config in KINDS.items():
            out = tmp_path / kind
            trained(folder, out, config(CASES["llama"]))
            described = (out / "adapter_config.json").read_text()
            (out / "adapter_config.json").write_text(
                json.dumps({**json.loads(described), "modules_to_save": ["lm_head"]})
            )
            with pytest.raises(ModelError, match="modules_to_save"):
                lmstate.load(folder, adapter=out)
            (out / "adapter_config.json").write_text(described)
            file = TensorFile(out / "adapter_model.safetensors")
            tensors = {name: file.tensor(name).clone() for name in file.entries}
            for name in tensors:
                for damaged in ({**tensors, name: tensors[name].flatten()}, {**tensors, name: tensors[name].long()}):
                    save_tensors(out / "adapter_model.safetensors", damaged)
                    with pytest.raises(ModelError, match="are not the float tensors of a"):
                        lmstate.load(folder, adapter=out)
            save_tensors(out / "adapter_model.safetensors", {name: t.repeat(2, 2) for name, t in tensors.items()})
            with pytest.raises(ModelError, match=r"of another model|are not the float tensors"):
                lmstate.load(folder, adapter=out)
        with pytest.raises(ModelError, match="no projection is called"):
            lmstate.load(folder, trainable=IA3Config(["query"]))
        with pytest.raises(ModelError, match="its folder"):
            lmstate.load(folder, trainable="adapter")
        with pytest.raises(ModelError, match="a LOHA of rank 0"):
            LoHaConfig(0)


@pytest.mark.parametrize("kind", ["loha", "lokr", "lokr-both"])
def test_an_update_of_any_rank_takes_no_more_memory_than_its_matrix(kind: str, tmp_path: Path) -> None:
    """LoHa's rank is squared, and LoKr's multiplied: beyond that of any matrix, they are one."""
    big, ids = 200, text(9)
    with saved(reference := theirs("llama")) as folder, torch.no_grad():
        config = KINDS[kind](["q_proj", "up_proj"])
        model = trained(folder, tmp_path, config)
        parts = {name: tensor.clone() for name, tensor in model.named_parameters()}
        draw = torch.Generator().manual_seed(2)
        for name, part in parts.items():
            if name.endswith(("_a", "_b")):
                inner = 1 if name.endswith("_a") else 0
                shape = [big if at == inner else side for at, side in enumerate(part.shape)]
                parts[name] = big**-0.5 * torch.randn(shape, generator=draw)
        save_tensors(tmp_path / "adapter_model.safetensors", parts)
        with pytest.raises(ModelError, match=r"q_proj' has rank 200, and its config says"):
            lmstate.load(folder, adapter=tmp_path)
        told = json.loads((tmp_path / "adapter_config.json").read_text()) | {"r": big, "rank_pattern": {}}
        (tmp_path / "adapter_config.json").write_text(json.dumps(told))
        again = lmstate.load(folder, weights="float32", adapter=tmp_path)
        for block in again.blocks:
            for update in block.mixer.qkv.each[0]:  # type: ignore[union-attr]
                down, up = update.matrices()  # type: ignore[attr-defined]
                assert len(down) == up.shape[1] <= min(update.shape)
        change_weights(reference, tmp_path)
        torch.testing.assert_close(again(ids), reference(ids).logits, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("case", "kind"),
    [*((case, kind) for case in ("llama", "phi3", "qwen2-tied-mqa") for kind in KINDS), ("gpt2", "ia3")],
)
def test_peft_reads_what_is_saved_with_its_gradients_and_its_files_are_read(
    case: str, kind: str, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    reference, rows, ids = theirs(case), ragged(24, 24), text(20)
    with saved(reference) as folder:
        model = trained(folder, tmp_path / "ours", KINDS[kind](CASES[case]))
        loss(model, rows, chunk=7).backward()
        other = peft.PeftModel.from_pretrained(reference, tmp_path / "ours", is_trainable=True)
        torch.testing.assert_close(other(ids).logits, model(ids), atol=1e-3, rtol=1e-3)
        whole_loss(other, rows).backward()
        found = {
            name.replace(".default", ""): leaf for name, leaf in other.named_parameters() if leaf.requires_grad
        }  # fmt: skip
        own = dict(model.named_parameters())
        assert set(own) == set(found)
        for name, leaf in found.items():
            torch.testing.assert_close(own[name].grad, leaf.grad, atol=1e-4 * float(leaf.grad.abs().max()), rtol=1e-3)
        other.save_pretrained(tmp_path / "theirs")
        again = lmstate.load(folder, weights="float32", adapter=tmp_path / "theirs")
        torch.testing.assert_close(again(ids), other(ids).logits, atol=1e-3, rtol=1e-3)
