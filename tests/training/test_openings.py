"""Prompt tuning and prefix tuning: what transformers and PEFT compute, and a state that begins with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import lmstate
from lmstate import kv
from lmstate.errors import CapacityError, ModelError, RewindError, SnapshotError, StateError, UnsupportedError
from lmstate.files.writing import save_tensors
from lmstate.state import Media
from lmstate.training import AdaptedModel, NetworkAdapterModel, PrefixTuningConfig, PromptTuningConfig, loss
from lmstate.training.openings import OpeningConfig
from tests.invariants.opened import opened
from tests.training.in_double import InDouble
from tests.training.small import ragged, saved, theirs, whole_loss
from tests.zoo import text

POSITIONS = 7
# Full and windowed attention, learned positions, embeddings that are scaled in two ways, a hybrid, and embeddings that
# are normalized, kept, or the begin of several streams.
VECTORS = ["llama", "mistral", "gpt2", "gemma2", "granite", "qwen3_next-dense", "bloom", "zamba2", "hy_v4"]
KEYS = ["llama", "mistral", "gpt2", "gemma2", "granite", "qwen2-tied-mqa"]
EVERY = [*((case, PromptTuningConfig) for case in VECTORS), *((case, PrefixTuningConfig) for case in KEYS)]


def reference_of(case: str) -> Any:
    """A model of transformers whose config says how many key heads it has; the zoo's of GPT-2 says another number."""
    model = theirs(case)
    if case == "gpt2":
        model.config.num_key_value_heads = model.config.num_attention_heads
    return model


def trained(folder: Path, out: Path, kind: type[OpeningConfig], seed: int = 1) -> NetworkAdapterModel:
    """A model with learned positions, saved in `out`."""
    model = lmstate.load(folder, weights="float32", trainable=kind(POSITIONS))
    assert isinstance(model, NetworkAdapterModel)
    with torch.no_grad():
        for leaf in model.parameters():
            leaf.copy_(0.5 * torch.randn(leaf.shape, generator=torch.Generator().manual_seed(seed)))
    model.save_pretrained(out)
    return model


def reference_logits(reference: Any, learned: Tensor, ids: Tensor, keys: bool) -> Tensor:
    """What transformers computes behind learned vectors, or keys and values, `[P, ..]`: float32 `[R, T, V]`."""
    if not keys:
        words = reference.get_input_embeddings()(ids)
        whole = torch.cat([learned.expand(len(ids), -1, -1), words], dim=1)
        return reference(inputs_embeds=whole).logits[:, len(learned) :]
    config, cache = reference.config, DynamicCache()
    layers = config.num_hidden_layers
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    for layer, own in enumerate(
        learned.view(len(learned), layers, 2, heads, -1).permute(1, 2, 3, 0, 4)
    ):  # [2, K, P, D]
        cache.update(*own[:, None].expand(-1, len(ids), -1, -1, -1), layer)
    return reference(ids, past_key_values=cache).logits


@pytest.mark.parametrize(("case", "kind"), EVERY)
def test_texts_are_read_behind_what_was_learned(case: str, kind: type[OpeningConfig], tmp_path: Path) -> None:
    reference, ids = reference_of(case), text(40, rows=2)
    with saved(reference) as folder, torch.no_grad():
        model = trained(folder, tmp_path, kind)
        (learned,) = model.parameters()
        expected = reference_logits(reference, learned, ids, kind is PrefixTuningConfig)
        own = lmstate.load(folder, weights="float32", adapter=tmp_path)
        whole = own(ids)
        assert whole is not None and not torch.allclose(lmstate.load(folder, weights="float32")(ids), whole, atol=0.05)  # type: ignore[arg-type]
        torch.testing.assert_close(whole, expected, atol=1e-3, rtol=1e-3)
        assert torch.equal(model(ids), whole)  # type: ignore[arg-type]
        state = own.new_state(rows=2)
        for first, last in ((0, 1), (1, 18), (18, 40)):
            cut = own(ids[:, first:last], state)
            assert torch.equal(cut, whole[:, last - 1])  # type: ignore[arg-type]


@pytest.mark.parametrize("keys", [False, True])
def test_a_state_does_not_count_what_was_learned(keys: bool, tmp_path: Path) -> None:
    model, ids = opened("llama", keys), text(30)[0].tolist()
    state = model.new_state(rows=2, capacity=30)
    assert state.lengths == [0, 0] and state.tokens(0) == [] and state.media(0) == () and model.opening_length == 11
    last = model([ids, []], state)
    assert last is not None and last[1].isnan().all() and state.kept(0, 0) == [list(range(30))] * len(state.kept(0, 0))
    with pytest.raises(CapacityError, match=r"row 0 holds 30 tokens and was given 1 more; .* capacity=30"):
        model([[3], []], state)
    with pytest.raises(RewindError, match="has the positions 0 to 30"):
        state.rewind(0, 31)
    state.snapshot(0).save(tmp_path / "row")
    snapshot = lmstate.Snapshot.load(tmp_path / "row")
    assert (snapshot.length, snapshot.opening, snapshot.backlog, snapshot.media) == (30, 11, 0, ())
    state.restore(1, snapshot)
    state.rewind(0, 0)
    assert state.rewind_cost(0, 0) == 0
    again = model([ids, []], state)
    assert torch.equal(again, torch.stack([last[0], last[0]]))  # type: ignore[arg-type]
    folder = lmstate.SnapshotFolder(tmp_path / "folder")
    folder.save("row", state.snapshot(1))
    state.restore(0, folder.load("row"))
    assert state.lengths == [30, 30]
    plain = opened("llama", keys, 4)
    with pytest.raises(SnapshotError, match="another model"):
        plain.new_state().restore(0, snapshot)
    with pytest.raises(StateError, match="another model"):
        plain([[1]], model.new_state())
    with pytest.raises(UnsupportedError, match="learned positions"):
        model.new_state(static=True, capacity=64)


@pytest.mark.parametrize("case", ["llama", "llama-dynamic", "qwen3_next-dense"])
def test_messages_do_not_count_what_was_learned(case: str) -> None:
    model, ids = opened(case, keys=False), [1, 2, 3, 9, 9, 9, 9, 5, 6, 7]
    picture = Media.of(torch.randn(4, model.config.hidden_size), 9)
    state = model.new_state(rewind=0)
    state.place(0, 3, picture)
    with pytest.raises(StateError, match=r"token at 3 is 4, .* stands at 3: .* rewind to 3 first"):
        model([[1, 2, 3, 4]], state)
    model([ids], state)
    if case == "llama":
        with pytest.raises(UnsupportedError, match="cut the picture at 3 to 7"):
            state.drop(0, 4, 8)
    state.restore(0, state.snapshot(0).without_embeddings())
    if case == "llama-dynamic":  # a long text rotates by other frequencies, and is computed from its start
        with pytest.raises(StateError, match=r"computed from 0 on, .* picture at 3 to 7 were let go"):
            model([text(500)[0].tolist()], state)
    else:
        with pytest.raises(RewindError, match=r"to 5 .* computed from [05] on, .* at 3 to 7 .* or rewind to 3"):
            state.rewind(0, 5)
        state.rewind(0, 3)
    assert state.lengths == [3 if case != "llama-dynamic" else 10]


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("storage", [None, kv.Quantized(8)])
def test_a_policy_never_evicts_what_was_learned(keys: bool, storage: Any) -> None:
    """With room for the whole text nothing is evicted; with little, learned positions stay, whatever they receive."""
    model, ids = opened("llama", keys), text(90)[0].tolist()
    options = {} if storage is None else {"storage": storage}
    for policy in (kv.Recent(24, **options), kv.H2O(24, recent=8, **options)):
        state = model.new_state(kv=policy)
        for first in range(0, 90, 9):
            model([ids[first : first + 9]], state)
        inside = [layer.kept(0, state._rows[0].cached) for layer in state.layers]
        assert all(set(range(11)) < set(head) and len(head) == 24 + 11 for layer in inside for head in layer)
        assert all(len(head) == 24 for head in state.kept(0, 0))
    roomy, exact = model.new_state(kv=kv.Recent(90)), model.new_state()
    assert torch.equal(model([ids], roomy), model([ids], exact))  # type: ignore[arg-type]

    class Anything(kv.Evicting):
        most = 8

        def evict(self, slots: Any) -> Tensor:
            return slots.alive

    with pytest.raises(UnsupportedError, match="may evict them"):
        model.new_state(kv=Anything())


@pytest.mark.parametrize("keys", [False, True])
def test_an_engine_answers_as_the_request_alone(keys: bool, tmp_path: Path) -> None:
    model = opened("llama", keys)
    common = text(70, seed=4)[0].tolist()
    prompts = [[*common, *text(5, seed=seed)[0].tolist()] for seed in range(3)] + [text(9, seed=8)[0].tolist()]
    alone = []
    for prompt in prompts:
        state, answer = model.new_state(), []
        logits = model([prompt], state)
        for _ in range(12):
            assert logits is not None
            answer.append(int(logits[0].argmax()))
            logits = model([[answer[-1]]], state)
        alone.append(answer)
    store = tmp_path / "store"
    for again in range(2):
        with lmstate.Engine(model, rows=3, memory="64MiB", store=store) as engine:
            requests = [engine.submit(prompt, max_new_tokens=12, ignore_eos=True) for prompt in prompts]
            results = [request.result() for request in requests]
            assert [result.tokens[0] for result in results] == alone
            assert [result.usage.prompt for result in results] == list(map(len, prompts))
            later = engine.submit(prompts[0], max_new_tokens=12, ignore_eos=True).result()
            assert later.tokens[0] == alone[0] and later.usage.reused == len(prompts[0])
            assert engine.explain([*common, 1, 2, 3]).reused == len(common)
            session = engine.session(f"turns {again}")
            session.send(prompts[0], max_new_tokens=12, ignore_eos=True).result()
            assert session.tokens[: len(prompts[0])] == prompts[0]
            session.rewind(0)
            session.send(prompts[1], max_new_tokens=12, ignore_eos=True).result()
            assert session.tokens == [*prompts[1], *alone[1]]
            echo = engine.submit(prompts[3], max_new_tokens=1, prompt_logprobs=0).result().prompt_logprobs
            assert echo is not None and len(echo) == len(prompts[3])
        if again:
            assert results[0].usage.reused, "nothing was found in the store"


@pytest.mark.parametrize(("case", "kind"), [*EVERY[:1], *EVERY[4:5], *EVERY[6:8]])
def test_gradients_in_chunks_are_those_of_the_whole(case: str, kind: type[OpeningConfig], tmp_path: Path) -> None:
    rows = ragged(40, 13)
    with saved(theirs(case)) as folder, InDouble():
        model = trained(folder, tmp_path, kind)
        expected = whole_loss(model, rows)
        expected.backward()
        (leaf,) = model.parameters()
        wanted = leaf.grad
        for chunk in (3, 7, 64):
            model.zero_grad()
            got = loss(model, rows, chunk=chunk)
            got.backward()
            assert float(abs(got - expected).detach()) < 1e-10
            assert leaf.grad is not None and wanted is not None and float(wanted.abs().max()) > 0
            torch.testing.assert_close(leaf.grad, wanted, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
def test_a_text_is_learned(kind: type[OpeningConfig], tmp_path: Path) -> None:
    with saved(theirs("llama")) as folder:
        model = lmstate.load(folder, weights="float32", trainable=kind(POSITIONS))
        assert isinstance(model, NetworkAdapterModel)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            now = loss(model, ragged(24), chunk=10)
            now.backward()
            optimizer.step()
            losses.append(float(now.detach()))
        assert losses[-1] < (0.93 if kind is PromptTuningConfig else 0.6) * losses[0]  # frozen, and not trained itself
        model.save_pretrained(tmp_path)
        again = lmstate.load(folder, weights="float32", trainable="adapter", adapter=tmp_path)
        assert isinstance(again, NetworkAdapterModel) and torch.equal(
            *map(next, (again.parameters(), model.parameters()))
        )
        with torch.no_grad():
            assert abs(float(whole_loss(again, ragged(24))) - float(whole_loss(model, ragged(24)))) < 1e-6
        state = model.new_state()
        model([[1, 2]], state)
        optimizer.step()
        with pytest.raises(StateError, match="weights of this model changed"):
            model([[1, 2]], state)


def test_prompts_begin_as_the_embeddings_of_tokens() -> None:
    with saved(theirs("granite")) as folder, torch.no_grad():
        model = lmstate.load(folder, weights="float32", trainable=PromptTuningConfig(5, [4, 9]))
        plain = lmstate.load(folder, weights="float32")
        ids = text(12)[0].tolist()
        torch.testing.assert_close(model([ids]), plain([[4, 9, 4, 9, 4, *ids]])[:, 5:], atol=1e-4, rtol=1e-4)  # type: ignore[index]


def test_adapters_of_all_kinds_are_served_by_name(tmp_path: Path) -> None:
    with saved(theirs("llama")) as folder, torch.no_grad():
        trained(folder, tmp_path / "prompt", PromptTuningConfig)
        trained(folder, tmp_path / "prefix", PrefixTuningConfig)
        model = lmstate.load(folder, weights="float32", adapter={n: tmp_path / n for n in ("prompt", "prefix")})
        assert isinstance(model, AdaptedModel)
        ids = text(9)
        names: list[str | None] = ["prompt", "prefix", None]
        assert len({model.adapted(name).fingerprint for name in names}) == 3
        for name in names:
            each = model.adapted(name)
            alone = lmstate.load(folder, weights="float32", adapter=None if name is None else tmp_path / name)
            assert torch.equal(each(ids), alone(ids)) and each.opening_length == (POSITIONS if name else 0)  # type: ignore[arg-type]
        with pytest.raises(ModelError, match="for all rows"):
            model.adapted(["prompt", None])
        with pytest.raises(ModelError, match="no matrices"):
            lmstate.load(folder, adapter=tmp_path / "prompt", merge=True)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with saved(theirs("llama")) as folder:
        trained(folder, tmp_path, PrefixTuningConfig)
        config = json.loads((tmp_path / "adapter_config.json").read_text())
        for changes, why in (
            ({"num_virtual_tokens": 6}, r"\[6, [0-9]+\] is expected"), ({"num_virtual_tokens": 0}, "from 1 to"),
            ({"num_transformer_submodules": 2}, "with an encoder"), ({"peft_type": "PROMPT_TUNING"}, "another model"),
            ({"peft_type": "CPT"}, "is a CPT adapter"),
        ):  # fmt: skip
            (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **changes}))
            with pytest.raises(ModelError, match=why):
                lmstate.load(folder, adapter=tmp_path)
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        save_tensors(
            tmp_path / "adapter_model.safetensors", {"prompt_embeddings": torch.zeros(POSITIONS, 8, dtype=torch.int64)}
        )
        with pytest.raises(ModelError, match="expected floats"):
            lmstate.load(folder, adapter=tmp_path)
        with pytest.raises(ModelError, match="give 1 to"):
            PromptTuningConfig(0)
        with pytest.raises(ModelError, match="ids are 0 to"):
            lmstate.load(folder, trainable=PromptTuningConfig(3, [-1]))
    for case, kind, why in (
        ("qwen3_next", PrefixTuningConfig, "without keys"), ("gemma3n", PromptTuningConfig, "apart from the stream"),
        ("deepseek_v4", PromptTuningConfig, "the tokens themselves"),
        ("diffllama", PrefixTuningConfig, "in a way of its own"), ("doge", PrefixTuningConfig, "in a way of its own"),
    ):  # fmt: skip
        with saved(theirs(case)) as folder, pytest.raises(ModelError, match=why):
            lmstate.load(folder, trainable=kind())


@pytest.mark.parametrize(("case", "kind"), EVERY)
def test_peft_reads_what_is_saved_and_its_files_are_read(case: str, kind: type[OpeningConfig], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    reference, ids = reference_of(case), text(20, rows=2)
    keys, behind = kind is PrefixTuningConfig, 0 if kind is PrefixTuningConfig else POSITIONS
    with saved(reference) as folder:
        model = trained(folder, tmp_path / "ours", kind)
        other = peft.PeftModel.from_pretrained(reference, tmp_path / "ours").eval()
        with torch.no_grad():
            torch.testing.assert_close(other(ids).logits[:, behind:], model(ids), atol=1e-3, rtol=1e-3)
        made = (
            peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5, prefix_projection=True,
                                    encoder_hidden_size=16)
            if keys
            else peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
        )  # fmt: skip
        other = peft.get_peft_model(reference_of(case), made).eval()
        other.save_pretrained(tmp_path / "theirs")
        with torch.no_grad():
            again = lmstate.load(folder, weights="float32", adapter=tmp_path / "theirs")
            torch.testing.assert_close(again(ids), other(ids).logits[:, behind and 5 :], atol=1e-3, rtol=1e-3)


def test_prompts_of_a_small_network_are_read(tmp_path: Path) -> None:
    """P-tuning: what the network made of its positions is what is saved."""
    peft = pytest.importorskip("peft")
    ids = text(20, rows=2)
    with saved(reference := theirs("llama")) as folder, torch.no_grad():
        made = peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=6, encoder_hidden_size=16)
        other = peft.get_peft_model(reference, made).eval()
        other.save_pretrained(tmp_path)
        again = lmstate.load(folder, weights="float32", adapter=tmp_path)
        torch.testing.assert_close(again(ids), other(ids).logits[:, 6:], atol=1e-3, rtol=1e-3)
