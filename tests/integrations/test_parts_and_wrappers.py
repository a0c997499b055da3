"""A StateCache of a model, of a part of it and of a wrapper around it do not disturb one another."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from lmstate.errors import SnapshotError, StateError, UnsupportedError
from lmstate.integrations.transformers import StateCache
from tests.integrations.models import call, decoder, repetitive, text


class Wrapped(torch.nn.Module):
    """A module around a model of transformers, as PEFT makes one: its own forward and its own `generate`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model = model

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return self.base_model(input_ids=input_ids, **kwargs)

    def generate(self, **kwargs: Any) -> Any:
        return self.base_model.generate(**kwargs)


def goes_on(model: Any, cache: StateCache, ids: torch.Tensor) -> None:
    with torch.no_grad():
        expected = model(ids).logits
        model(ids[:, :20], past_key_values=cache, use_cache=True)
        cache.rewind(to=14)
        given = model(ids[:, 14:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(given, expected[:, 14:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ("llama", "qwen3_next", "gemma3"))
def test_a_cache_of_a_part_leaves_those_of_the_model_and_of_its_copies_working(name: str) -> None:
    model = copy.deepcopy(decoder(name))
    part = StateCache(model.model)
    goes_on(model, StateCache(model), text(30))
    twin = copy.deepcopy(model)
    goes_on(twin, StateCache(twin), text(30))
    with torch.no_grad():
        hidden = model.model(text(30), past_key_values=part, use_cache=True).last_hidden_state
        assert part.get_seq_length() == 30
        part.rewind(to=17)
        again = model.model(text(30)[:, 17:], past_key_values=part, use_cache=True).last_hidden_state
    torch.testing.assert_close(again, hidden[:, 17:], atol=1e-4, rtol=1e-4)
    with pytest.raises(StateError, match="another model"):
        call(twin, text(2), part)


@pytest.mark.parametrize("name", ("llama", "qwen3_next", "falcon_mamba"))
def test_a_cache_made_for_a_wrapper_drafts_goes_back_and_is_saved(name: str, tmp_path: Path) -> None:
    model = copy.deepcopy(decoder(name))
    wrapped, ids = Wrapped(model), repetitive(40)
    if name != "falcon_mamba":  # whose forward knows the cache by another name than the wrapper passes
        goes_on(wrapped, StateCache(wrapped), text(30))
    cache = StateCache(wrapped)
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    drafted = wrapped.generate(input_ids=ids, past_key_values=cache, prompt_lookup_num_tokens=4, **settings)
    assert torch.equal(drafted, wrapped.generate(input_ids=ids, **settings))
    cache.save(tmp_path / "cache")
    assert StateCache.load(tmp_path / "cache", wrapped).get_seq_length() == cache.get_seq_length()
    assert StateCache.load(tmp_path / "cache", model).get_seq_length() == cache.get_seq_length()


def test_adapters_of_peft_work_and_a_snapshot_from_before_a_merge_is_refused() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(decoder("qwen3_next")), settings)
    cache = StateCache(model)
    goes_on(model, cache, text(30))
    snapshot = cache.snapshot()
    model.merge_adapter()
    with pytest.raises(SnapshotError, match="other weights"):
        cache.restore(snapshot)


@pytest.mark.parametrize("change", ("in place", "through data"))
def test_a_snapshot_is_refused_once_weights_were_changed(change: str) -> None:
    model = copy.deepcopy(decoder("llama"))
    cache = StateCache(model)
    call(model, text(10), cache)
    snapshot = cache.snapshot()
    weight = model.model.layers[1].self_attn.q_proj.weight
    with torch.no_grad():
        if change == "in place":
            weight.mul_(1.5)
        else:
            weight.data += torch.ones_like(weight)
    with pytest.raises(SnapshotError, match="other weights"):
        cache.restore(snapshot)
    assert cache.get_seq_length() == 10


def test_a_module_without_a_model_of_transformers_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="Linear is not a transformers model"):
        StateCache(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("name", ("llama", "mistral", "qwen3_next", "lfm2", "falcon_h1"))
def test_rows_are_chosen_by_any_sequence_of_numbers(name: str) -> None:
    model = decoder(name)
    ids = text(20, rows=3)
    for rows in ((0, 2), [0, 2], torch.tensor([0, 2]), (True, False, True)):
        cache = StateCache(model)
        call(model, ids, cache)
        cache.batch_select_indices(rows)
        with torch.no_grad():
            expected = model(torch.cat([ids, text(3, 3)], dim=1)[[0, 2]]).logits[:, 20:]
        torch.testing.assert_close(call(model, text(3, 3)[[0, 2]], cache), expected, atol=1e-4, rtol=1e-4)
        layer = next(layer for layer in cache.layers if layer.rows())
        layer.batch_select_indices((1,))
        assert layer.rows() == 1
