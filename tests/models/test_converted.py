"""`lmstate convert`: the folder loads with the bits of the checkpoint that it was made of, and MLX's files are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import lmstate
from lmstate.checkpoints.huggingface import mlx
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.checkpoints.source import GroupedQuant
from lmstate.cli.options import DEFAULT_MODEL
from lmstate.converting import Survey, convert
from lmstate.models.families import build
from lmstate.ops.weights.grouped import rounded
from tests import zoo
from tests.files.test_gguf_attention import save_mxfp4
from tests.sweeps import sampled
from tests.training.small import saved, theirs
from tests.zoo import text

CASES = (
    "llama", "qwen3_moe", "gemma3", "gpt2", "gpt_oss", "deepseek_v3", "falcon_h1", "qwen3_5-tied", "qwen3_vl_moe",
    "mamba2",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["int4", "int8", "bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of noise, 4 bits lose much
def test_a_converted_folder_has_the_bits_of_its_source(case: str, kind: str, tmp_path: Path) -> None:
    ids = text(20)[0].tolist()
    with saved(theirs(case)) as folder:
        convert(folder, tmp_path / "out", kind, progress=False)
        source = lmstate.load(folder, weights=kind)
        for weights in ("auto", kind):
            made = lmstate.load(tmp_path / "out", weights=weights)
            assert (made.fingerprint, made.dtype) == (source.fingerprint, source.dtype)
            assert torch.equal(made([ids]), source([ids]))


@pytest.mark.parametrize("case", sampled([*zoo.CASES, *zoo.ENCODERS], CASES))
def test_no_matrix_is_held_while_the_storage_of_all_is_learned(case: str) -> None:
    with saved(zoo.kept(case)[0]) as folder:
        source = open_source(folder)
        loader, survey = WeightLoader(source, "int8", progress=False), Survey(source, "int8", progress=False)
        build(loader)
        build(survey)
    assert survey.stacks == loader.stacks
    assert survey._made and all(matrix.device.type == "meta" for matrix in survey._made.values())


@pytest.mark.parametrize("kind", ["auto", "int4", "int8"])
def test_a_gguf_becomes_a_folder_with_its_bits_tokens_and_template(kind: str, tmp_path: Path) -> None:
    nbytes = convert(DEFAULT_MODEL, tmp_path / "out", kind, progress=False)
    source, made = lmstate.load(DEFAULT_MODEL, weights=kind), lmstate.load(tmp_path / "out")
    assert made.fingerprint == source.fingerprint
    question = [{"role": "user", "content": "Name a river."}]
    assert made.tokenizer.chat(question) == source.tokenizer.chat(question)
    assert (made.eos_ids, made.defaults) == (source.eos_ids, source.defaults)
    assert made.chat(question, max_new_tokens=8) == source.chat(question, max_new_tokens=8)
    assert nbytes["int4" if kind != "int8" else "int8"] > 0.6 * nbytes.total()
    assert "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in (tmp_path / "out" / "README.md").read_text()
    again = convert(tmp_path / "out", tmp_path / "again", kind, progress=False)
    assert again == nbytes and lmstate.load(tmp_path / "again").fingerprint == source.fingerprint


@pytest.mark.parametrize("kind", ["int4", "int8", "bfloat16"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_experts_in_mxfp4_become_a_folder_that_loads(kind: str, tmp_path: Path) -> None:
    (source := tmp_path / "source").mkdir()
    save_mxfp4(source)
    convert(source, tmp_path / "out", kind, progress=False)
    made, whole = lmstate.load(tmp_path / "out"), lmstate.load(source, weights=kind)
    assert made.fingerprint == whole.fingerprint


def test_a_large_checkpoint_is_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmstate.checkpoints.saving.SHARD", 20_000)
    with saved(theirs("llama")) as folder:
        convert(folder, tmp_path / "out", "int8", progress=False)
        assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 3
        assert not list((tmp_path / "out").glob("part-*"))
        assert lmstate.load(tmp_path / "out").fingerprint == lmstate.load(folder, weights="int8").fingerprint


def test_a_folder_that_is_used_is_refused_and_a_failure_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (used := tmp_path / "used").mkdir()
    (used / "note").write_text("mine")
    with saved(theirs("llama")) as folder:
        for path in (used, used / "note"):
            with pytest.raises(lmstate.ModelError, match="empty or not there"):
                convert(folder, path, "int8", progress=False)

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("lmstate.checkpoints.saving.write_json", fail)
        with pytest.raises(OSError, match="No space"):
            convert(folder, tmp_path / "out", "int8", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["used"] and (used / "note").read_text() == "mine"


def words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of numbers as one large number each, lowest first, in 32-bit words."""
    rows = []
    for row in numbers.tolist():
        whole = sum(number << bits * place for place, number in enumerate(row))
        rows.append(list(whole.to_bytes(len(row) * bits // 8, "little")))
    return torch.tensor(rows, dtype=torch.uint8).view(torch.uint32)


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("bits", mlx.BITS)
def test_what_mlx_packed_is_read(bits: int, size: int, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(bits)
    name, ids = "model.layers.0.mlp.down_proj", text(20)[0].tolist()
    with saved(theirs("llama")) as folder:
        tensors = load_file(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        outputs, inputs = tensors[f"{name}.weight"].shape
        config["intermediate_size"] = inputs = size * 2
        for place in range(config["num_hidden_layers"]):
            for module, shape in (("up", (inputs, outputs)), ("gate", (inputs, outputs)), ("down", (outputs, inputs))):
                tensors[f"model.layers.{place}.mlp.{module}_proj.weight"] = torch.randn(*shape, generator=draw) / 8
        q = torch.randint(2**bits, (outputs, inputs), generator=draw)
        scales, biases = (torch.randn(outputs, 2, generator=draw).half() / 64 for _ in range(2))
        plain = q.view(outputs, 2, size) * scales.float()[..., None] + biases.float()[..., None]
        (tmp_path / "plain").mkdir()
        (tmp_path / "packed").mkdir()
        tensors[f"{name}.weight"] = plain.flatten(1)
        save_file(tensors, tmp_path / "plain" / "model.safetensors")
        tensors |= {f"{name}.weight": words(q, bits), f"{name}.scales": scales, f"{name}.biases": biases}
        save_file(tensors, tmp_path / "packed" / "model.safetensors")
        (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
        config["quantization"] = {"group_size": 128, "bits": 4, name: {"group_size": size, "bits": bits}}
        (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
        read = lmstate.load(tmp_path / "packed", weights="float32")
        expected = lmstate.load(tmp_path / "plain", weights="float32")
        assert torch.equal(read([ids]), expected([ids]))
        config["quantization"]["mode"] = "mxfp4"
        (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
        with pytest.raises(lmstate.ModelError, match="in the mode 'mxfp4'"):
            lmstate.load(tmp_path / "packed")
        config["quantization"] = {"group_size": 7, "bits": 4}
        (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
        with pytest.raises(lmstate.ModelError, match="groups of 7 numbers"):
            lmstate.load(tmp_path / "packed")


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_mlx_reads_the_same_numbers(kind: str) -> None:
    core = pytest.importorskip("mlx.core")
    matrix = torch.randn(48, 96, generator=torch.Generator().manual_seed(1))
    q, scale, minimum = rounded(matrix, kind)
    numbers = GroupedQuant(q, scale, minimum)
    parts = mlx.packed(numbers)
    assert parts is not None
    given = [core.array(part.numpy()) for part in parts.values()]
    read = core.dequantize(*given, group_size=32, bits=int(kind[3:]))
    exact = numbers.dequantize()
    torch.testing.assert_close(torch.tensor(read.astype(core.float32).tolist()), exact, atol=4e-3, rtol=2e-3)


@pytest.mark.parametrize(
    "section", [{"weights": "int5"}, {"activation_bits": 4}, {"rounded": [1]}, [], {"activation_bits": "8"}]
)
def test_a_section_that_no_conversion_wrote_is_refused(section: object, tmp_path: Path) -> None:
    with saved(theirs("llama")) as folder:
        convert(folder, tmp_path / "out", "int8", progress=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps({**config, "lmstate": section}))
    with pytest.raises(lmstate.ModelError):
        lmstate.load(tmp_path / "out")
