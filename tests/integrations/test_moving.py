"""Fork, snapshot, save, select, copy and fail: a StateCache stays what it says it is."""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from lmstate.errors import RewindError, SnapshotError, StateError, UnsupportedError
from lmstate.integrations.transformers import StateCache
from lmstate.integrations.transformers.cache.hooks import cache_name
from lmstate.integrations.transformers.cache.layers.base import RewindableLayer
from lmstate.integrations.transformers.cache.layers.recurrent import RecurrentLayer
from lmstate.state.layer_file import write_layers
from tests.integrations.models import DECODERS, call, decoder, text
from tests.zoo import CASES as ZOO

KINDS = (
    "llama", "gemma3", "llama4", "qwen3_next", "mamba2", "falcon_h1", "lfm2", "deepseek_v3", "deepseek_v32", "gemma3n",
    "deepseek_v4",
)  # fmt: skip


def fed(name: str, length: int = 40, rows: int = 2) -> tuple[Any, StateCache]:
    model = decoder(name)
    cache = StateCache(model)
    call(model, text(length, rows), cache)
    return model, cache


def goes_on_as(model: Any, cache: StateCache, ids: torch.Tensor) -> None:
    """The cache gives what follows `ids` as if they were fed at once."""
    more = text(7, ids.shape[0], seed=9)
    with torch.no_grad():
        expected = model(torch.cat([ids, more], dim=1)).logits[:, ids.shape[1] :]
    torch.testing.assert_close(call(model, more, cache), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", DECODERS)
def test_forked_rows_do_not_see_each_other(name: str) -> None:
    model, cache = fed(name)
    forked = cache.fork(2)
    assert forked.rows == 4 and cache.rows == 2
    call(model, text(5, rows=4, seed=2), forked)
    goes_on_as(model, forked, torch.cat([text(40, 2).repeat_interleave(2, 0), text(5, rows=4, seed=2)], dim=1))
    goes_on_as(model, cache, text(40, 2))


@pytest.mark.parametrize("name", DECODERS)
def test_saved_and_loaded_goes_on_as_before(name: str, tmp_path: Path) -> None:
    model, cache = fed(name)
    cache.save(tmp_path / "cache.safetensors")
    loaded = StateCache.load(tmp_path / "cache.safetensors", model)
    assert loaded.get_seq_length() == 40
    goes_on_as(model, loaded, text(40, 2))
    loaded.rewind(to=25)
    goes_on_as(model, loaded, text(40, 2)[:, :25])


@pytest.mark.parametrize("name", DECODERS)
def test_a_snapshot_is_untouched_by_what_follows(name: str) -> None:
    model, cache = fed(name)
    snapshot = cache.snapshot()
    assert snapshot.length == 40 and snapshot.nbytes > 0
    call(model, text(20, 2, seed=3), cache)
    for _ in range(2):
        cache.restore(snapshot)
        assert cache.get_seq_length() == 40
        goes_on_as(model, cache, text(40, 2))
    for seed in (3, 4):  # what is written over after a rewind is the cache's own
        cache.restore(snapshot)
        cache.rewind(to=20)
        goes_on_as(model, cache, text(40, 2)[:, :20])
        cache.restore(snapshot)
        cache.rewind(to=30)
        call(model, text(3, 2, seed=seed), cache)
        goes_on_as(model, cache, torch.cat([text(40, 2)[:, :30], text(3, 2, seed=seed)], dim=1))


@pytest.mark.parametrize("name", KINDS)
def test_rows_selected_repeated_and_reordered_are_those_rows(name: str) -> None:
    model, cache = fed(name)
    ids = text(40, 2)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
    cache.batch_select_indices(torch.tensor([0, 1]))
    ids = ids[[1, 0]]
    twin = copy.deepcopy(cache)
    goes_on_as(model, twin, ids)
    twin.rewind(to=40)
    goes_on_as(model, twin, ids)
    cache.batch_select_indices(torch.tensor([False, True]))
    goes_on_as(model, cache, ids[1:])


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        *((name, "input_ids") for name in ("qwen3_next", "mamba2", "falcon_h1", "jamba", "gemma3")),
        *((name, "inputs_embeds") for name in ("qwen3_next", "mamba2", "gemma3")),
    ],
)
def test_tensors_that_the_caller_uses_again_are_not_looked_at_again(name: str, inputs: str) -> None:
    model, ids, cache = decoder(name), text(96), StateCache(decoder(name))
    tokens, mask = torch.empty(1, 16, dtype=torch.long), torch.ones(1, 96, dtype=torch.long)
    named = {cache_name(model): cache}
    with torch.no_grad():
        embeds = model.get_input_embeddings()(tokens * 0)
        for start in range(0, 96, 16):
            tokens.copy_(ids[:, start : start + 16])
            embeds.copy_(model.get_input_embeddings()(tokens))
            given = {inputs: tokens if inputs == "input_ids" else embeds}
            model(**given, **named, attention_mask=mask[:, : start + 16], use_cache=True)
        for used in (tokens, embeds, mask):
            used.fill_(0)
        cache.rewind(to=88)
        goes_on_as(model, cache, ids[:, :88])


@pytest.mark.parametrize("name", KINDS)
def test_a_reset_cache_is_as_new(name: str) -> None:
    model, cache = fed(name)
    cache.reset()
    assert cache.get_seq_length() == 0
    call(model, text(11, 1, seed=8), cache)
    goes_on_as(model, cache, text(11, 1, seed=8))


@pytest.mark.parametrize("name", KINDS)
def test_a_failed_forward_leaves_the_cache_as_it_was(name: str) -> None:
    model, cache = fed(name)
    layers = next(x for x in model.modules() if isinstance(x, torch.nn.ModuleList) and len(x) == len(cache))
    hook = layers[1].register_forward_hook(_fail)
    with pytest.raises(RuntimeError, match="injected"):
        call(model, text(3, 2, seed=6), cache)
    hook.remove()
    assert cache.get_seq_length() == 40
    if any(isinstance(layer, RecurrentLayer) for layer in cache.layers):
        with pytest.raises(StateError, match="failed"):
            call(model, text(3, 2, seed=6), cache)
    cache.rewind(to=40)
    goes_on_as(model, cache, text(40, 2))


@pytest.mark.parametrize("name", KINDS)
def test_a_restore_that_fails_in_any_layer_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = fed(name)
    snapshot = cache.snapshot()
    call(model, text(6, 2, seed=2), cache)
    for kind in {type(layer) for layer in cache.layers if isinstance(layer, RewindableLayer)}:
        for last in (False, True):
            seen, count, put = 0, sum(type(layer) is kind for layer in cache.layers), kind.put

            def failing(layer: Any, *args: Any, put: Any = put, at: int = count if last else 1) -> None:
                nonlocal seen
                seen += 1
                if seen == at:
                    raise MemoryError
                put(layer, *args)

            with monkeypatch.context() as patch, pytest.raises(MemoryError):
                patch.setattr(kind, "put", failing)
                cache.restore(snapshot)
            assert cache.get_seq_length() == 46
            goes_on_as(model, cache.fork(), torch.cat([text(40, 2), text(6, 2, seed=2)], dim=1))
    cache.restore(snapshot)
    goes_on_as(model, cache, text(40, 2))


@pytest.mark.parametrize("name", ("llama", "gemma3", "qwen3_next"))
def test_a_reorder_that_fails_in_the_middle_leaves_nothing_that_fits_nowhere(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache = fed(name)
    with pytest.raises(IndexError):
        cache.reorder_cache(torch.tensor([0, 2]))
    assert cache.get_seq_length() == 40
    goes_on_as(model, cache.fork(), text(40, 2))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="injected"):
        patch.setattr(cache.layers[-1], "select", _fail)
        cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.get_seq_length() == 0
    call(model, text(11, 1, seed=8), cache)
    goes_on_as(model, cache, text(11, 1, seed=8))


def _fail(*_: object) -> None:
    raise RuntimeError("injected")


def test_pickling_is_refused_and_says_what_to_do_instead() -> None:
    _, cache = fed("llama")
    with pytest.raises(TypeError, match="save"):
        pickle.dumps(cache)


def test_moves_that_cannot_be_are_refused_and_change_nothing() -> None:
    model, cache = fed("qwen3_next")
    for to in (-1, 41):
        with pytest.raises(RewindError, match="40 tokens"):
            cache.rewind(to=to)
    with pytest.raises(ValueError, match="minus"):
        cache.crop(3)
    goes_on_as(model, cache, text(40, 2))
    blind = StateCache(model)
    embedded = model.get_input_embeddings()(text(40, 2)).detach()
    with torch.no_grad():
        model(inputs_embeds=embedded[:, :30], past_key_values=blind, use_cache=True)
        model(inputs_embeds=embedded[:, 30:], past_key_values=blind, use_cache=True)
    with pytest.raises(UnsupportedError, match="embeddings"):
        blind.rewind(to=20)
    goes_on_as(model, blind.fork(), text(40, 2))
    blind.rewind(to=35)  # within the last call, which is kept whole
    goes_on_as(model, blind, text(40, 2)[:, :35])


@pytest.mark.parametrize("name", KINDS)
def test_calls_that_do_not_belong_to_the_cache_are_refused_and_change_nothing(name: str) -> None:
    model, cache = fed(name)
    for rows in (1, 3):
        with pytest.raises(StateError, match=f"{rows} rows .* holds 2"):
            call(model, text(1, rows), cache)
    other = copy.deepcopy(model)
    with pytest.raises(StateError, match="another model"):
        call(other, text(1, 2), cache)
    call(other, text(3, 2), StateCache(other))
    goes_on_as(model, cache, text(40, 2))


@pytest.mark.parametrize("name", ("recurrent_gemma", "minimax"))
def test_a_model_whose_state_lies_elsewhere_is_refused(name: str) -> None:
    model = AutoModelForCausalLM.from_config(ZOO[name]())
    with pytest.raises(UnsupportedError, match="its modules or in a cache of its own"):
        StateCache(model)


def test_a_part_of_a_model_is_told_from_the_model() -> None:
    mamba, cache = fed("mamba2")
    with pytest.raises(StateError, match="a part"), torch.no_grad():
        mamba.backbone(text(3, 2), cache_params=cache, use_cache=True)
    for name in ("llama", "qwen3_next"):
        model, cache = fed(name)
        with torch.no_grad():
            model.model(text(3, 2, seed=1), past_key_values=cache, use_cache=True)
        goes_on_as(model, cache.fork(), torch.cat([text(40, 2), text(3, 2, seed=1)], dim=1))
        call(model, text(3, 2, seed=2), cache)
    with pytest.raises(UnsupportedError, match="a part of the model"):
        cache.rewind(to=42)


@pytest.mark.parametrize("name", KINDS)
def test_a_cache_filled_with_gradients_followed_forks_too(name: str) -> None:
    model, cache = decoder(name), StateCache(decoder(name))
    model(text(20, 2), past_key_values=cache, use_cache=True)
    forked = cache.fork(2)
    with torch.no_grad():
        goes_on_as(model, forked, text(20, 2).repeat_interleave(2, 0))
        goes_on_as(model, copy.deepcopy(cache), text(20, 2))
        goes_on_as(model, cache, text(20, 2))


def test_a_cache_keeps_no_model_alive() -> None:
    model = copy.deepcopy(decoder("qwen3_next"))
    cache = StateCache(model)
    call(model, text(20), cache)
    del model
    import gc

    gc.collect()
    with pytest.raises(StateError, match="gone"):
        cache.rewind(to=10)


def test_files_of_other_models_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    model, cache = fed("qwen3_next")
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(other.parameters()).add_(1)
    with pytest.raises(SnapshotError, match="other weights"):
        StateCache.load(path, other)
    whole = path.read_bytes()
    for damaged in (whole[:100], whole[: len(whole) // 2], b"", b"\xff" * 64):
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(SnapshotError):
            StateCache.load(tmp_path / "damaged", model)
    save_file({"x": torch.ones(1)}, tmp_path / "other")
    with pytest.raises(SnapshotError, match="no file of a StateCache"):
        StateCache.load(tmp_path / "other", model)
    tensors = load_file(path)
    metadata = _metadata(path)
    for change in (
        {"version": "9"},
        {"length": "41"},
        {"kinds": "[]"},
        {"kinds": "[" * 10**5},
        {"kinds": "9" * 5000},
        {"length": "-1"},
        {"fingerprint": "0"},
    ):
        write_layers(tmp_path / "changed", {**metadata, **change}, tensors)
        with pytest.raises(SnapshotError):
            StateCache.load(tmp_path / "changed", model)
    carry = next(name for name in tensors if ".carry." in name)
    ids = tensors["history.ids"]
    for change in (
        {"history.ids": ids[:, 1:]},
        {"history.ids": ids.float()},
        {"history.ids": ids[:1]},
        {"history.mask": torch.ones(2, 41)},
        {"history.other": ids.clone()},
        {carry: tensors[carry][:1]},
        {carry: torch.tensor(1.0)},
        {f"layers.{'9' * 5000}.k": ids.clone()},
    ):
        write_layers(tmp_path / "changed", metadata, {**tensors, **change})
        with pytest.raises(SnapshotError):
            StateCache.load(tmp_path / "changed", model)
    for name in tensors:
        if name.endswith(".k"):
            write_layers(tmp_path / "changed", metadata, {**tensors, name: tensors[name].int()})
            with pytest.raises(SnapshotError, match="keys"):
                StateCache.load(tmp_path / "changed", model)
            write_layers(tmp_path / "changed", metadata, {**tensors, name: tensors[name][:, :, :-1].contiguous()})
            with pytest.raises(SnapshotError, match="keys"):
                StateCache.load(tmp_path / "changed", model)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "falcon_h1", "lfm2"])
def test_a_state_of_another_shape_is_told_with_both_shapes(name: str, tmp_path: Path) -> None:
    """Where the cache has tokens to compare with at once, else at the first call: half the heads gave other logits."""

    def shape(x: torch.Tensor) -> str:
        """A pattern, of any number of tokens."""
        sizes = ["[0-9]+" if keys and axis == 2 else str(size) for axis, size in enumerate(x.shape)]
        return rf"\[{', '.join(sizes)}\]"

    model, cache = fed(name)
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    tensors, metadata = load_file(path), _metadata(path)
    for changed in [name for name in tensors if name.startswith("layers.") and not name.endswith(".v")]:
        keys = changed.endswith(".k")
        for axis in (1, 3) if keys else (1,):
            names = [changed, changed[:-1] + "v"] if keys else [changed]
            halves = {one: tensors[one].narrow(axis, 0, tensors[one].shape[axis] // 2).contiguous() for one in names}
            write_layers(path, metadata, {**tensors, **halves})
            loaded = StateCache.load(path, model)
            both = f"{shape(halves[changed])}.*{shape(tensors[changed])}"
            with pytest.raises(SnapshotError, match=both):
                cache.restore(loaded.snapshot())
            if keys:
                with pytest.raises(StateError, match=both):
                    call(model, text(1, 2, seed=3), loaded)
                assert loaded.get_seq_length() == 40
    goes_on_as(model, cache, text(40, 2))


def _metadata(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def test_a_failed_save_leaves_the_older_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = fed("llama")
    path = tmp_path / "cache.safetensors"
    cache.save(path)

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("lmstate.state.layer_file.write_tensors", full)
    with pytest.raises(OSError, match="no space"):
        cache.save(path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    goes_on_as(model, StateCache.load(path, model), text(40, 2))


@pytest.mark.parametrize("name", ("llama", "gemma3"))
def test_a_token_copies_none_of_those_before_it(name: str) -> None:
    """Memory is moved when it is full, and not at every token."""
    model, cache = fed(name, rows=1)
    places = []
    for step in range(100):
        call(model, text(1, seed=step), cache)
        places.append(tuple(layer.keys.untyped_storage().data_ptr() for layer in cache.layers))
    moves = sum(a != b for a, b in itertools.pairwise(places))
    assert moves <= 4
    assert cache.nbytes() <= 4 * sum(x.nbytes for keys, values, _ in _dynamic(model, 140) for x in (keys, values))


def _dynamic(model: Any, length: int) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    call(model, text(length), cache)
    return cache


def test_a_version_that_is_not_supported_is_named() -> None:
    from lmstate.integrations.transformers.version import check

    check("5.23.0")
    check("5.30.1.dev0")
    for version in ("4.57.1", "6.0.0", "5.22.9", "unknown"):
        with pytest.raises(ImportError, match=rf"{version}.*pip install"):
            check(version)
    with pytest.raises(ImportError, match="not installed"):
        check(None)
