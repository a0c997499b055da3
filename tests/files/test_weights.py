import json
import os

import gguf
import pytest
import torch
from safetensors.torch import save_file

from lmstate.checkpoints import loader as weights_module
from lmstate.checkpoints.gguf import source as gguf_source
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_cached
from lmstate.errors import ModelError
from lmstate.ops import dispatch
from tests.files import ggufs

LAYER = "model.layers.0."
QKV = [f"{LAYER}self_attn.{part}_proj.weight" for part in "qkv"]


def quantized(format_):
    return lambda name, rows, columns: (ggufs.blocks(format_, rows, columns, seed=rows), format_)


def build(weights):
    """Asks for what a llama would ask for."""
    made = {"embed": weights.linear("model.embed_tokens.weight"), "norm": weights.tensor("model.norm.weight", (64,))}
    for layer in range(2):
        at = f"model.layers.{layer}."
        made[f"qkv{layer}"] = weights.linear(*(f"{at}self_attn.{part}_proj.weight" for part in "qkv"))
        made[f"o{layer}"] = weights.linear(f"{at}self_attn.o_proj.weight", shape=(64, 128))
        made[f"up{layer}"] = weights.linear(f"{at}mlp.gate_proj.weight", f"{at}mlp.up_proj.weight")
        made[f"down{layer}"] = weights.linear(f"{at}mlp.down_proj.weight")
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{name}{layer}"] = weights.tensor(f"{at}{name}.weight")
    weights.check_all_used()
    return made


def same(one, other):
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other[name])
        else:
            assert value.kind == other[name].kind and torch.equal(value.dequantize(), other[name].dequantize())


@pytest.mark.parametrize(("format_", "kind"), [("Q4_0", "int4"), ("Q4_1", "int4"), ("Q5_0", "int8"), ("Q8_0", "int8")])
def test_auto_keeps_the_numbers_of_a_quantized_file_exactly(tmp_path, format_, kind):
    path = ggufs.write(tmp_path / "a.gguf", tensors=ggufs.llama_tensors(quantized(format_)))
    weight = WeightLoader(open_cached(path, None)).linear("model.layers.0.mlp.down_proj.weight")
    raw, _ = quantized(format_)("", 64, 96)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[format_])
    assert weight.kind == kind
    torch.testing.assert_close(weight.dequantize(), torch.from_numpy(expected), rtol=1e-6, atol=1e-6)


def test_float32_of_a_quantized_file_is_what_the_gguf_package_makes_of_it(tmp_path):
    path = ggufs.write(tmp_path / "a.gguf", tensors=ggufs.llama_tensors(quantized("Q4_1")))
    weights = WeightLoader(open_cached(path, None), "float32")
    raw, _ = quantized("Q4_1")("", 96, 64)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q4_1))
    stack = weights.linear(f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight")
    assert stack.kind == "float32" and weights.dtype == torch.float32
    assert torch.equal(stack.dequantize(), torch.cat([expected, expected]))


def test_a_stack_of_mixed_storage_takes_the_widest(tmp_path):
    tensors = ggufs.llama_tensors(quantized("Q4_0")) | {"blk.0.attn_v.weight": quantized("Q8_0")("", 64, 64)}
    weights = WeightLoader(open_cached(ggufs.write(tmp_path / "a.gguf", tensors=tensors), None))
    parts = torch.cat([weights.linear(name).dequantize() for name in QKV])
    stack = weights.linear(*QKV)
    assert stack.kind == "int8" and weights.linear(QKV[0]).kind == "int4"
    assert (stack.dequantize() - parts).abs().max() <= parts.abs().max() / 127


@pytest.mark.parametrize(("format_", "kind"), [(None, "float32"), (None, "int8"), ("Q4_0", "auto"), ("Q8_0", "auto")])
def test_a_stack_in_another_order_has_the_same_rows(tmp_path, format_, kind):
    tensors = ggufs.llama_tensors() if format_ is None else ggufs.llama_tensors(quantized(format_))
    weights = WeightLoader(open_cached(ggufs.write(tmp_path / "a.gguf", tensors=tensors), None), kind)
    plain = weights.linear(*QKV)
    order = torch.randperm(plain.out_features, generator=torch.Generator().manual_seed(0))
    turned = weights.linear(*QKV, order=lambda: order)
    assert turned.kind == plain.kind and turned is weights.linear(*QKV, order=lambda: order)
    assert torch.equal(turned.dequantize(), plain.dequantize()[order])


@pytest.mark.parametrize("kind", ["auto", "int4", "int8", "float32"])
def test_second_start_gives_the_same_without_parsing_the_file(tmp_path, monkeypatch, kind):
    path, cache = ggufs.write(tmp_path / "a.gguf", tensors=ggufs.llama_tensors(quantized("Q4_1"))), tmp_path / "cache"
    first = open_cached(path, cache)
    made = build(WeightLoader(first, kind, cache=cache))

    def refuse(*_):
        raise AssertionError("converted again")

    monkeypatch.setattr(gguf_source, "open_gguf", refuse)
    monkeypatch.setattr(gguf_source, "take_apart", refuse)
    second = open_cached(path, cache)
    assert second.config == first.config and second.generation == first.generation
    same(made, build(WeightLoader(second, kind, cache=cache)))


def test_a_changed_file_is_converted_again(tmp_path):
    path, cache = ggufs.write(tmp_path / "a.gguf", tensors=ggufs.llama_tensors(quantized("Q4_1"))), tmp_path / "cache"
    old = build(WeightLoader(open_cached(path, cache), cache=cache))
    ggufs.write(path, tensors=ggufs.llama_tensors(quantized("Q4_0")))
    new = build(WeightLoader(open_cached(path, cache), cache=cache))
    assert not torch.equal(old["o0"].dequantize(), new["o0"].dequantize())


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "garbage"])
@pytest.mark.parametrize("file", ["memory.json", "auto-*.safetensors"])
def test_a_damaged_cache_is_made_again(tmp_path, damage, file):
    path, cache = ggufs.write(tmp_path / "a.gguf", tensors=ggufs.llama_tensors(quantized("Q4_1"))), tmp_path / "cache"
    made = build(WeightLoader(open_cached(path, cache), cache=cache))
    (target,) = cache.glob(f"*/{file}")
    whole = target.read_bytes()
    damaged = {
        "cut": whole[: len(whole) // 2],
        "flip": whole[:3] + bytes([whole[3] ^ 0xFF]) + whole[4:],
        "empty": b"",
        "garbage": b"\xff" * 100,
    }
    target.write_bytes(damaged[damage])
    same(made, build(WeightLoader(open_cached(path, cache), cache=cache)))
    assert len(target.read_bytes()) == len(whole)


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    path = ggufs.write(tmp_path / "a.gguf", tensors=ggufs.llama_tensors(quantized("Q4_1")))
    (tmp_path / "cache").write_text("a file where the folder should be")
    build(WeightLoader(open_cached(path, tmp_path / "cache"), cache=tmp_path / "cache"))


def test_kept_matrices_begin_on_a_cache_line_and_other_readers_read_them(tmp_path):
    from safetensors.torch import load_file

    path, cache = ggufs.write(tmp_path / "a.gguf", tensors=ggufs.llama_tensors(quantized("Q4_1"))), tmp_path / "cache"
    build(WeightLoader(open_cached(path, cache), cache=cache))
    again = build(WeightLoader(open_cached(path, cache), cache=cache))
    assert again["o0"].tensors()["packed"].data_ptr() % 64 == 0
    (file,) = cache.glob("*/auto-*.safetensors")
    kept = load_file(file)["model.layers.0.self_attn.o_proj.weight#packed"]
    assert torch.equal(kept, again["o0"].tensors()["packed"])


def test_nothing_is_left_beside_the_cache_files(tmp_path):
    path, cache = ggufs.write(tmp_path / "a.gguf", tensors=ggufs.llama_tensors(quantized("Q4_1"))), tmp_path / "cache"
    build(WeightLoader(open_cached(path, cache), cache=cache))
    names = sorted(os.listdir(next(cache.iterdir())))
    assert len(names) == 2 and names[0].startswith("auto-") and names[1] == "memory.json"


def float_directory(path, dtype=torch.float32):
    renamed = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    tensors = {}
    source = gguf_source.GgufSource.open(ggufs.write(path.with_suffix(".gguf")))
    for name in source.names():
        tensors[renamed.get(name, name)] = source.read(name).clone().to(dtype)
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("native", [True, False])
def test_auto_of_floats_follows_the_processor(tmp_path, monkeypatch, dtype, native):
    monkeypatch.setattr(weights_module, "multiplies_bfloat16", lambda device: native)
    weights = WeightLoader(open_cached(float_directory(tmp_path / "m", dtype), None))
    matrices = [value for value in build(weights).values() if not isinstance(value, torch.Tensor)]
    assert {value.kind.split()[0] for value in matrices} == {"bfloat16" if native else "float32"}
    assert weights.dtype == (torch.bfloat16 if native else torch.float32)


def test_matrices_that_need_no_conversion_lie_in_the_file(tmp_path):
    source = open_cached(float_directory(tmp_path / "m"), None)
    weight = WeightLoader(source, "float32").linear(QKV[0])
    assert weight.tensors()["matrix"].data_ptr() == source.read(QKV[0]).data_ptr()


@pytest.mark.parametrize("kind", ["int4", "bfloat16"])
def test_where_memory_is_short_weights_stay_mapped(tmp_path, monkeypatch, kind):
    path, cache = float_directory(tmp_path / "m", torch.bfloat16), tmp_path / "cache"
    plain = build(WeightLoader(open_cached(path, cache), kind, cache=cache))
    monkeypatch.setattr(weights_module, "spare", lambda: 1000)
    weights = WeightLoader(open_cached(path, cache), kind, cache=cache)
    mapped = build(weights)
    for name, weight in plain.items():
        if not isinstance(weight, torch.Tensor):
            assert torch.equal(mapped[name].dequantize(), weight.dequantize())
    if kind == "int4":
        assert (
            mapped["o0"].storage.data_ptr() == weights._packed.get(f"{LAYER}self_attn.o_proj.weight").storage.data_ptr()
        )
    else:
        assert mapped["o0"].kind == "bfloat16"


def test_bfloat16_is_the_same_number_for_number(tmp_path):
    source = open_cached(float_directory(tmp_path / "m", torch.bfloat16), None)
    weight = WeightLoader(source, "bfloat16").linear(*QKV)
    expected = torch.cat([source.read(name) for name in QKV])
    assert torch.equal(weight.dequantize(torch.bfloat16), expected)
    assert dispatch.choice().library is None or weight.nbytes < 0.8 * expected.nbytes


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_floats_are_quantized_once(tmp_path, monkeypatch, kind):
    path, cache = float_directory(tmp_path / "m"), tmp_path / "cache"
    plain = build(WeightLoader(open_cached(path, cache), "float32"))
    made = build(WeightLoader(open_cached(path, cache), kind, cache=cache))
    worst = (made["o0"].dequantize() - plain["o0"].dequantize()).abs().max()
    assert made["o0"].kind == kind and worst < (0.4 if kind == "int4" else 0.03)

    def refuse(*_):
        raise AssertionError("quantized again")

    monkeypatch.setattr(weights_module, "quantize", refuse)
    same(made, build(WeightLoader(open_cached(path, cache), kind, cache=cache)))


def test_small_parameters_are_float32(tmp_path):
    weights = WeightLoader(open_cached(float_directory(tmp_path / "m", torch.bfloat16), None))
    assert weights.tensor("model.norm.weight").dtype == torch.float32
    assert weights.tensor("model.norm.bias", optional=True) is None


def test_the_same_names_give_the_same_object(tmp_path):
    weights = WeightLoader(open_cached(float_directory(tmp_path / "m"), None))
    assert weights.linear("model.embed_tokens.weight") is weights.linear("model.embed_tokens.weight")


def test_experts_in_one_tensor_are_handed_out_one_by_one(tmp_path):
    path = float_directory(tmp_path / "m")
    stack = torch.randn(3, 8, 64)
    save_file({"experts": stack}, path / "model.safetensors")
    weights = WeightLoader(open_cached(path, None), "float32")
    assert torch.equal(weights.stacked("experts", 2).dequantize(), stack[2])
    with pytest.raises(ModelError, match="no matrix 3"):
        weights.stacked("experts", 3)


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    weights = WeightLoader(open_cached(float_directory(tmp_path / "m"), None))
    with pytest.raises(ModelError, match=r"lacks the tensor 'lm_head.weight'"):
        weights.linear("lm_head.weight")
    with pytest.raises(ModelError, match=r"\[128, 64\].*\[128, 65\]"):
        weights.linear(QKV[0], shape=(128, 65))
    with pytest.raises(ModelError, match=r"q_proj.weight.*\[128, 64\].*\[127, 64\]"):
        weights.linear(*QKV, shape=((127, 65, 64), 64))
    with pytest.raises(ModelError, match=r"model.norm.weight.*\[64\].*\[65\]"):
        weights.tensor("model.norm.weight", (65,))
    with pytest.raises(ModelError, match="cannot stack"):
        weights.linear(QKV[0], f"{LAYER}self_attn.o_proj.weight")
    with pytest.raises(ModelError, match="choose one of auto"):
        WeightLoader(weights.source, "int2")


def test_tensors_that_nobody_asked_for_are_errors_unless_ignored(tmp_path):
    weights = WeightLoader(open_cached(float_directory(tmp_path / "m"), None), "float32")
    for name in weights.source.names() - {"model.norm.weight"}:
        weights.linear(name) if len(weights.shape(name)) == 2 else weights.tensor(name)
    with pytest.raises(ModelError, match=r"1 tensors that a llama model does not use.*model.norm.weight"):
        weights.check_all_used()
    weights.check_all_used(ignore=["*.norm.weight"])


def test_infinite_scales_are_refused(tmp_path):
    raw = ggufs.blocks("Q4_0", 64, 96)
    raw[3, 1] = 0x7C
    tensors = ggufs.llama_tensors() | {"blk.0.ffn_down.weight": (raw, "Q4_0")}
    weights = WeightLoader(open_cached(ggufs.write(tmp_path / "a.gguf", tensors=tensors), None))
    with pytest.raises(ModelError, match="infinities"):
        weights.linear(f"{LAYER}mlp.down_proj.weight")


def test_any_changed_byte_of_the_cache_is_noticed(tmp_path):
    """Also where the file would read back whole: among the numbers of a matrix, of a tokenizer or of a config."""
    path, cache = ggufs.write(tmp_path / "a.gguf", tensors=ggufs.llama_tensors(quantized("Q4_1"))), tmp_path / "cache"
    made = build(WeightLoader(open_cached(path, cache), cache=cache))
    config = open_cached(path, cache).config
    generator = torch.Generator().manual_seed(0)
    targets = [path for path in cache.glob("*/*") if path.is_file()]
    assert len(targets) >= 2
    for target in targets:
        whole = target.read_bytes()
        for place in [len(whole) - 1, *torch.randint(len(whole), (12,), generator=generator).tolist()]:
            target.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            opened = open_cached(path, cache)
            assert opened.config == config
            same(made, build(WeightLoader(opened, cache=cache)))
    build(WeightLoader(open_cached(path, cache), cache=cache))  # and what was made again is read again


def test_int4_keeps_embeddings_and_what_a_file_holds_in_more_bits_at_8(tmp_path):
    floats = WeightLoader(open_cached(float_directory(tmp_path / "m"), None), "int4")
    floats.config = type(floats.config)(
        {**floats.config, "vocab_size": floats.shape("model.embed_tokens.weight")[0]}, ""
    )
    made = build(floats)
    assert made["embed"].kind == "int8" and {made[f"{part}0"].kind for part in ("qkv", "o", "up", "down")} == {"int4"}
    for format_, kind in (("Q4_1", "int4"), ("Q8_0", "int8")):
        path = ggufs.write(tmp_path / f"{format_}.gguf", tensors=ggufs.llama_tensors(quantized(format_)))
        whole = build(WeightLoader(open_cached(path, None), "int4"))
        assert {whole[f"{part}0"].kind for part in ("qkv", "o", "up", "down")} == {kind}


def test_int8_embeddings_cost_outliers_less_than_int4_ones(tmp_path):
    torch.manual_seed(0)
    rows = torch.randn(97, 64)
    rows[:, ::32] *= 30  # a channel of outliers in each group
    worst = {kind: (weights_module.quantize(rows, kind).dequantize() - rows).abs().mean() for kind in ("int4", "int8")}
    assert worst["int8"] < 0.2 * worst["int4"]
