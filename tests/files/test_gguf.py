import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lmstate
from lmstate.checkpoints.gguf import reader
from lmstate.checkpoints.gguf.blocks import FORMATS, take_apart
from lmstate.checkpoints.gguf.source import GgufSource
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.source import GroupedQuant
from lmstate.errors import ModelError
from lmstate.models.families import build
from tests.files import ggufs

EXACT = ("Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q8_0", "MXFP4", "Q1_0", "TQ1_0", "TQ2_0")
QUANTIZED = [name for name, form in FORMATS.items() if form.dtype is None]


def test_table_of_formats_is_that_of_the_gguf_package():
    for name, form in FORMATS.items():
        kind = gguf.GGMLQuantizationType[name]
        assert (form.type_id, form.numbers, form.nbytes) == (kind.value, *gguf.GGML_QUANT_SIZES[kind])


@pytest.mark.parametrize("format_", QUANTIZED)
def test_taken_apart_equals_dequantized(format_):
    raw = ggufs.blocks(format_, 5, 512)
    numbers = take_apart(torch.from_numpy(raw), format_, 512)
    assert isinstance(numbers, GroupedQuant) == (format_ in EXACT)
    floats = numbers.dequantize() if isinstance(numbers, GroupedQuant) else numbers
    if format_ == "Q1_0":  # gguf has no dequantization of it
        scale = raw.reshape(-1, 18)[:, :2].copy().view(np.float16).astype(np.float32)
        bits = np.unpackbits(raw.reshape(-1, 18)[:, 2:], axis=1, bitorder="little")
        expected = np.where(bits == 1, scale, -scale).reshape(5, 512)
    else:
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[format_])
    assert torch.equal(floats, torch.from_numpy(expected))


def test_formats_that_are_not_computed_on_are_told(tmp_path, caplog):
    tensors = ggufs.llama_tensors() | {"blk.0.attn_output.weight": (ggufs.blocks("IQ4_NL", 64, 128), "IQ4_NL")}
    path = ggufs.write(tmp_path / "a.gguf", tensors=tensors)
    with caplog.at_level("INFO", logger="lmstate.checkpoints.open"):
        model = lmstate.load(path)
    told = "1 matrices of IQ4_NL are dequantized and held as int8, the nearest storage"
    assert model.notes == (told,) and told in caplog.text
    assert model.blocks[0].mixer.out.kind == "int8"


# -- a model in several files


def split(folder: Path, count: int, no_tensors_first: bool = False) -> list[Path]:
    """The model of `ggufs.write` in several files, as llama.cpp's tool writes them."""
    tensors = list(ggufs.llama_tensors().items())
    names, paths = reader.part_names(f"m-00001-of-{count:05d}.gguf"), []
    for part, name in enumerate(names):
        mine = tensors[part - no_tensors_first :: count - no_tensors_first] if part >= no_tensors_first else []
        said = {"split.no": part, "split.count": count, "split.tensors.count": len(tensors)}
        paths.append(ggufs.write(folder / name, metadata=said, tensors=dict(mine)))
    return paths


@pytest.mark.parametrize("no_tensors_first", [False, True])
def test_a_model_in_several_files_is_the_model_in_one(tmp_path, no_tensors_first):
    whole = lmstate.load(ggufs.write(tmp_path / "whole.gguf"), weights="float32")([[1, 2, 3]])
    for path in split(tmp_path, 3, no_tensors_first):
        for _ in range(2):  # the second time through the cache
            assert torch.equal(lmstate.load(path, weights="float32")([[1, 2, 3]]), whole)


def test_parts_that_are_missing_are_named(tmp_path):
    first, second, third = split(tmp_path, 3)
    second.unlink()
    for path in (first, third):
        with pytest.raises(FileNotFoundError, match=r"one of 3 files.* lacks m-00002-of-00003\.gguf"):
            lmstate.load(path)


def test_files_that_are_no_parts_of_one_model_are_refused(tmp_path):
    first, second, third = split(tmp_path, 3)
    second.write_bytes(third.read_bytes())
    with pytest.raises(ModelError, match=r"says that it is part 2 .*says 1 of 3"):
        lmstate.load(first)
    alone = tmp_path / "renamed.gguf"
    alone.write_bytes(third.read_bytes())
    with pytest.raises(ModelError, match=r"part 2 .* of 3"):
        lmstate.load(alone)
    two = split(tmp_path, 2)
    ggufs.write(two[1], metadata={"split.no": 1, "split.count": 2})
    with pytest.raises(ModelError, match="two of its files have a tensor"):
        lmstate.load(two[0])


def undo(weight: np.ndarray, heads: int) -> np.ndarray:
    """What the converter does to q and k, written the other way round than in lmstate: halves to pairs."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def test_rows_that_the_converter_paired_come_back_as_halves(tmp_path):
    tensors = ggufs.llama_tensors()
    original = {name: tensors[f"blk.1.attn_{name}.weight"].copy() for name in "qkv"}
    tensors["blk.1.attn_q.weight"] = undo(original["q"], 4)
    tensors["blk.1.attn_k.weight"] = undo(original["k"], 2)
    source = GgufSource.open(ggufs.write(tmp_path / "a.gguf", tensors=tensors))
    for name, weight in original.items():
        assert torch.equal(source.read(f"model.layers.1.self_attn.{name}_proj.weight"), torch.from_numpy(weight))


def test_pairing_is_undone_on_quantized_rows_alike(tmp_path):
    raw = ggufs.blocks("Q4_1", 128, 64)
    tensors = ggufs.llama_tensors() | {"blk.0.attn_q.weight": (raw, "Q4_1")}
    source = GgufSource.open(ggufs.write(tmp_path / "a.gguf", tensors=tensors))
    floats = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q4_1)
    read = source.read("model.layers.0.self_attn.q_proj.weight")
    assert isinstance(read, GroupedQuant)
    assert np.array_equal(undo(read.dequantize().numpy(), 4), floats)


def test_other_architectures_keep_their_rows(tmp_path):
    tensors = ggufs.llama_tensors() | {f"blk.{i}.attn_{n}_norm.weight": ggufs.floats(32) for i in (0, 1) for n in "qk"}
    source = GgufSource.open(ggufs.write(tmp_path / "a.gguf", "qwen3", tensors=tensors))
    assert source.config["model_type"] == "qwen3" and source.config["attention_bias"] is False
    weight = source.read("model.layers.0.self_attn.q_proj.weight")
    assert torch.equal(weight, torch.from_numpy(tensors["blk.0.attn_q.weight"]))
    assert "model.layers.1.self_attn.k_norm.weight" in source.names()


def test_experts_are_found_one_by_one(tmp_path):
    stack = ggufs.floats(3, 16, 64)
    raw = ggufs.blocks("Q8_0", 3 * 16, 64).reshape(3, 16, -1)
    tensors = ggufs.llama_tensors()
    tensors = {name: value for name, value in tensors.items() if "ffn_" not in name or "norm" in name}
    tensors |= {"blk.0.ffn_gate_exps.weight": stack, "blk.0.ffn_up_exps.weight": (raw, "Q8_0")}
    metadata = {f"qwen3moe.expert_{n}": v for n, v in (("count", 3), ("used_count", 2), ("feed_forward_length", 16))}
    source = GgufSource.open(ggufs.write(tmp_path / "a.gguf", "qwen3moe", metadata, tensors))
    for expert in range(3):
        name = f"model.layers.0.mlp.experts.{expert}"
        assert torch.equal(source.read(f"{name}.gate_proj.weight"), torch.from_numpy(stack[expert]))
        up = source.read(f"{name}.up_proj.weight")
        assert isinstance(up, GroupedQuant)
        expected = gguf.quants.dequantize(raw[expert], gguf.GGMLQuantizationType.Q8_0)
        assert np.array_equal(up.dequantize().numpy(), expected)


def test_metadata_become_a_config(tmp_path):
    metadata = {"llama.rope.freq_base": 5e5, "llama.rope.dimension_count": 16, "tokenizer.ggml.eos_token_id": 3}
    metadata |= {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    metadata |= {"llama.rope.scaling.original_context_length": 64}
    config = GgufSource.open(ggufs.write(tmp_path / "a.gguf", metadata=metadata)).config
    assert config["model_type"] == "llama" and config["architectures"] == ["LlamaForCausalLM"]
    expected = {"hidden_size": 64, "head_dim": 32, "num_key_value_heads": 2, "vocab_size": 64, "rope_theta": 5e5}
    expected |= {"tie_word_embeddings": True, "partial_rotary_factor": 0.5, "eos_token_id": 3, "intermediate_size": 96}
    assert {name: config[name] for name in expected} == expected
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("kind", [None, "linear", "none"])
def test_a_factor_stretches_a_rope_unless_the_file_says_that_nothing_does(kind, tmp_path):
    metadata = {"llama.rope.scaling.factor": 4.0} | ({} if kind is None else {"llama.rope.scaling.type": kind})
    config = GgufSource.open(ggufs.write(tmp_path / "a.gguf", metadata=metadata)).config
    assert config.get("rope_scaling") == (None if kind == "none" else {"rope_type": "linear", "factor": 4.0})


def test_rope_divisors_keep_their_values(tmp_path):
    divisors = np.linspace(1, 8, 16, dtype=np.float32)
    tensors = ggufs.llama_tensors() | {"rope_freqs.weight": divisors}
    source = GgufSource.open(ggufs.write(tmp_path / "a.gguf", tensors=tensors))
    scaling = source.config["rope_scaling"]
    assert scaling["rope_type"] == "longrope" and scaling["attention_factor"] == 1.0
    assert scaling["short_factor"] == scaling["long_factor"] == pytest.approx(divisors.tolist())
    assert "rope_freqs.weight" not in source.names()


def test_an_unknown_architecture_is_named_with_those_that_are_known(tmp_path):
    with pytest.raises(ModelError, match=r"'no_such_model'.*llama, .*olmo2"):
        GgufSource.open(ggufs.write(tmp_path / "a.gguf", "no_such_model"))


REQUIRED = {"embedding_length": 64, "block_count": 2, "attention.head_count": 4, "feed_forward_length": 96}


def write_config(path, values):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_layer_norm_rms_eps(1e-5)
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for name, value in values.items():
        add[type(value)](f"llama.{name}", value)
    writer.add_tensor("token_embd.weight", ggufs.floats(64, 64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_config_value_is_named(tmp_path, key):
    assert GgufSource.open(write_config(tmp_path / "whole.gguf", REQUIRED)).config["hidden_size"] == 64
    rest = {name: value for name, value in REQUIRED.items() if name != key}
    with pytest.raises(ModelError, match=f"llama.{key}"):
        GgufSource.open(write_config(tmp_path / "a.gguf", rest))


@pytest.mark.parametrize("key", [*REQUIRED, "attention.key_length", "rope.dimension_count"])
@pytest.mark.parametrize("value", [0, 2**32 - 1, -1.0, "64", [1, 2, 3]])
def test_config_values_that_no_model_has_are_refused(tmp_path, key, value):
    with pytest.raises(ModelError, match=rf"llama.{key}|width"):
        GgufSource.open(write_config(tmp_path / "a.gguf", REQUIRED | {key: value}))


def test_the_number_of_a_layer_has_one_spelling(tmp_path):
    twice = {**ggufs.llama_tensors(), "blk.00.attn_q.weight": ggufs.floats(128, 64, seed=1)}
    path = ggufs.write(tmp_path / "a.gguf", tensors=twice)
    with pytest.raises(ModelError, match=r"does not use \(blk\.00\.attn_q\.weight\)"):
        build(WeightLoader(GgufSource.open(path), "float32"))


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"])
def test_two_tensors_that_are_the_same_one_are_refused(tmp_path, name):
    path = ggufs.write(tmp_path / "a.gguf", tensors={**ggufs.llama_tensors(), name: ggufs.floats(64)})
    with pytest.raises(ModelError, match=f"two of its tensors are '{name}'"):
        GgufSource.open(path)


def header(*parts: bytes, tensors: int = 0, keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + b"".join(parts)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


HOSTILE = {
    "empty": b"",
    "no magic": b"GGML" + b"\0" * 60,
    "version 1": b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "tensor count": header(b"\0" * 64, tensors=2**63),
    "key count": header(b"\0" * 64, keys=2**40),
    "string length": header(struct.pack("<Q", 2**63) + b"\0" * 32, keys=1),
    "array count": header(string("a"), struct.pack("<IIQ", 9, 4, 2**61) + b"\0" * 32, keys=1),
    "string array count": header(string("a"), struct.pack("<IIQ", 9, 8, 2**60) + b"\0" * 32, keys=1),
    "nested arrays": header(string("a"), struct.pack("<I", 9), struct.pack("<IQ", 9, 1) * 5000, keys=1),
    "value type": header(string("a"), struct.pack("<IQ", 77, 0), keys=1),
    "same key twice": header((string("a") + struct.pack("<II", 4, 1)) * 2, keys=2),
    "dimensions": header(string("t"), struct.pack("<I", 2**31), b"\0" * 64, tensors=1),
    "extent": header(string("t"), struct.pack("<IQIQ", 1, 2**63, 0, 0), b"\0" * 64, tensors=1),
    "product": header(string("t"), struct.pack("<IQQQQIQ", 4, *[2**40] * 4, 0, 0), b"\0" * 64, tensors=1),
    "no extent": header(string("t"), struct.pack("<IQIQ", 1, 0, 0, 0), b"\0" * 64, tensors=1),
    "type": header(string("t"), struct.pack("<IQIQ", 1, 32, 99, 0), b"\0" * 64, tensors=1),
    "half a block": header(string("t"), struct.pack("<IQIQ", 1, 31, 2, 0), b"\0" * 64, tensors=1),
    "offset": header(string("t"), struct.pack("<IQIQ", 1, 8, 0, 2**62), b"\0" * 64, tensors=1),
    "odd offset": header(string("t"), struct.pack("<IQIQ", 1, 8, 0, 1), b"\0" * 96, tensors=1),
    "same name": header((string("t") + struct.pack("<IQIQ", 1, 8, 0, 0)) * 2, b"\0" * 96, tensors=2),
    "overlap": header(
        *(string(name) + struct.pack("<IQIQ", 1, 16, 0, 32 * i) for i, name in enumerate("ab")), b"\0" * 256, tensors=2
    ),
    "alignment": header(string("general.alignment"), struct.pack("<II", 4, 3), keys=1),
    "alignment text": header(string("general.alignment"), struct.pack("<I", 8) + string("32"), keys=1),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_files_are_refused(tmp_path, what):
    path = tmp_path / "a.gguf"
    path.write_bytes(HOSTILE[what])
    with pytest.raises(ModelError, match=r"a\.gguf"):
        GgufSource.open(path)


def _read_all(path):
    source = GgufSource.open(path)
    for name in source.names():
        read = source.read(name)
        assert tuple((read.q if isinstance(read, GroupedQuant) else read).shape) == source.shape(name)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_read_or_refused(tmp_path, data):
    whole = tmp_path / "whole.gguf"
    if not whole.exists():
        tokens = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [chr(97 + i) for i in range(26)]}
        tokens |= {"tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.eos_token_id": 2}
        matrix = lambda name, rows, columns: (ggufs.blocks("Q4_0", rows, columns), "Q4_0")  # noqa: E731
        ggufs.write(whole, metadata=tokens, tensors=ggufs.llama_tensors(matrix))
    raw = bytearray(whole.read_bytes())
    front = 3000  # where the header lies
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, front))
        if data.draw(st.booleans()):
            raw[at] = data.draw(st.integers(0, 255))
        else:
            raw[at : at + 8] = data.draw(st.sampled_from([b"\xff" * 8, b"\0" * 8, struct.pack("<Q", 2**40)]))
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw))) :]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(raw)
    try:
        _read_all(path)
    except ModelError as error:
        assert len(str(error)) < 2000
