import json
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from lmstate.checkpoints.huggingface.directory import CheckpointFolder
from lmstate.checkpoints.open import open_source
from lmstate.errors import ModelError
from lmstate.files.safetensors import TensorFile

TENSORS = {
    "a.weight": torch.randn(4, 6),
    "b.weight": torch.randn(3, 5).to(torch.bfloat16),
    "c": torch.arange(7, dtype=torch.float16),
    "none": torch.empty(0, 4),
}


def directory(path, files, index=None, config="{}"):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(config)
    for name, tensors in files.items():
        save_file(tensors, path / name)
    if index is not None:
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path


def raw_file(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_tensors_are_read_as_they_were_saved(tmp_path):
    source = open_source(directory(tmp_path / "m", {"model.safetensors": TENSORS}))
    assert source.names() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert source.shape(name) == tuple(tensor.shape)
        assert torch.equal(source.read(name), tensor) and source.read(name).dtype == tensor.dtype


def test_reading_twice_gives_the_same_memory(tmp_path):
    source = open_source(directory(tmp_path / "m", {"model.safetensors": TENSORS}))
    assert source.read("a.weight").data_ptr() == source.read("a.weight").data_ptr()


def test_shards_are_one_checkpoint(tmp_path):
    files = {"x-1.safetensors": {"a.weight": TENSORS["a.weight"]}, "x-2.safetensors": {"c": TENSORS["c"]}}
    index = {"a.weight": "x-1.safetensors", "c": "x-2.safetensors"}
    source = CheckpointFolder(directory(tmp_path / "m", files, index))
    assert source.names() == {"a.weight", "c"} and torch.equal(source.read("c"), TENSORS["c"])


@pytest.mark.parametrize(
    "file",
    ["../x.safetensors", "/etc/x.safetensors", "C:\\x.safetensors", "a\\..\\..\\x.safetensors", "x.bin", 3, None, "\0"],
)
def test_an_index_that_leaves_the_directory_is_refused(tmp_path, file):
    save_file({"c": TENSORS["c"]}, tmp_path / "x.safetensors")
    with pytest.raises(ModelError, match="inside it"):
        CheckpointFolder(directory(tmp_path / "m", {}, {"c": file}))


def test_an_index_that_lies_is_refused(tmp_path):
    with pytest.raises(ModelError, match="it does not"):
        CheckpointFolder(directory(tmp_path / "m", {"x.safetensors": {"c": TENSORS["c"]}}, {"d": "x.safetensors"}))
    with pytest.raises(OSError):
        CheckpointFolder(directory(tmp_path / "n", {}, {"c": "gone.safetensors"}))


def test_pickles_are_refused_with_the_reason(tmp_path):
    path = directory(tmp_path / "m", {})
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match=r"pickle.*run code"):
        open_source(path)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        open_source(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_source(tmp_path / "nowhere")
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(ModelError, match="neither"):
        open_source(tmp_path / "x.txt")
    with pytest.raises(ModelError, match="a config and no weights"):
        open_source(directory(tmp_path / "m", {}))


def test_integer_tensors_are_refused_when_read(tmp_path):
    source = CheckpointFolder(
        directory(tmp_path / "m", {"model.safetensors": {"q": torch.zeros(2, dtype=torch.int32)}})
    )
    with pytest.raises(ModelError, match="int32"):
        source.read("q")


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HOSTILE = {
    "empty": (b"", None),
    "header length": (struct.pack("<Q", 2**63) + b"{}", None),
    "header beyond the file": (struct.pack("<Q", 100) + b"{}", None),
    "no json": (b"{nope}", b""),
    "a list": (b"[]", b""),
    "deep": (b'{"a":' * 20000, b""),
    "same name twice": (b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":1}', b""),
    "entry": ({"a": 3}, b""),
    "dtype": ({"a": entry(dtype="Q7")}, b"\0" * 8),
    "dtype list": ({"a": entry() | {"dtype": ["F32"]}}, b"\0" * 8),
    "shape": ({"a": entry() | {"shape": "2"}}, b"\0" * 8),
    "negative shape": ({"a": entry(shape=(-2,))}, b"\0" * 8),
    "bool shape": ({"a": entry(shape=(True,), offsets=(0, 4))}, b"\0" * 4),
    "huge shape": ({"a": entry(shape=(2**40,) * 8)}, b"\0" * 8),
    "shape and bytes": ({"a": entry(shape=(3,))}, b"\0" * 8),
    "offset outside": ({"a": entry(offsets=(8, 16))}, b"\0" * 8),
    "offset backwards": ({"a": entry(offsets=(8, 0))}, b"\0" * 8),
    "offset negative": ({"a": entry(offsets=(-8, 0))}, b"\0" * 8),
    "overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, b"\0" * 12),
    "hole": ({"a": entry(), "b": entry(offsets=(12, 20))}, b"\0" * 20),
    "data left over": ({"a": entry()}, b"\0" * 9),
    "data cut": ({"a": entry()}, b"\0" * 7),
    "metadata": ({"__metadata__": {"a": 1}, "a": entry()}, b"\0" * 8),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_headers_are_refused(tmp_path, what):
    header, data = HOSTILE[what]
    path = tmp_path / "a.safetensors"
    if data is None:
        path.write_bytes(header)
    else:
        raw_file(path, header, data)
    with pytest.raises(ModelError, match=r"a\.safetensors"):
        TensorFile(path)


def test_the_table_of_hostile_headers_starts_from_a_good_one(tmp_path):
    file = TensorFile(raw_file(tmp_path / "a.safetensors", {"a": entry()}, struct.pack("<2f", 1, 2)))
    assert file.tensor("a").tolist() == [1.0, 2.0]


def test_unaligned_data_are_read(tmp_path):
    header = {"x": entry("U8", (1,), (0, 1)), "a": entry(offsets=(1, 9))}
    file = TensorFile(raw_file(tmp_path / "a.safetensors", header, b"\7" + struct.pack("<2f", 1, 2)))
    assert file.tensor("a").tolist() == [1.0, 2.0]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_read_or_refused(tmp_path, data):
    path = tmp_path / "a.safetensors"
    save_file(TENSORS, path)
    raw = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<Q", raw)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, 7 + length))
        raw[at] = data.draw(st.integers(0, 255) | st.sampled_from(b'0123456789[]{},":'))
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw))) :]
    path.write_bytes(raw)
    try:
        file = TensorFile(path)
    except ModelError as error:
        assert len(str(error)) < 2000
        return
    for name, found in file.entries.items():
        assert tuple(file.tensor(name).shape) == found.shape


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=30) | st.sampled_from(["{}", "[]", '{"weight_map": []}', '{"weight_map": {"a": {}}}']))
def test_any_index_and_config_is_read_or_refused(tmp_path, text):
    for name, other in (
        ("config.json", "model.safetensors.index.json"),
        ("model.safetensors.index.json", "config.json"),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / other).write_text("{}")
        with pytest.raises(ModelError):
            CheckpointFolder(tmp_path)
