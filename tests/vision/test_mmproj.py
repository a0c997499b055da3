"""Vision towers in llama.cpp's `mmproj` files, written as its converter writes them: transformers is the oracle."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

import lmstate
from lmstate.cli.app import app
from lmstate.cli.served import models_in
from lmstate.vision import Tower, families
from lmstate.vision.mmproj import Mmproj
from tests.files import ggufs
from tests.files.test_gguf_dense import converted, halves_to_pairs, metadata
from tests.serve.byte_tokenizer import END, START, byte_tokenizer
from tests.serve.byte_tokenizer import TEMPLATE as PLAIN  # which knows no pictures, as those of LLaVA and InternVL
from tests.vision.test_encode import TEMPLATE, png, said
from tests.vision.test_parity import IMAGE, config, pictures
from tests.zoo import randomize

# A family -> the projector's type, and what its file says beside the sizes.
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3", {"clip.use_gelu": True, "clip.vision.projector.scale_factor": 2}),
    "gemma4": (
        "gemma4v",
        {"clip.projector_type": None, "clip.vision.projector_type": "gemma4v", "clip.vision.projector.scale_factor": 2},
    ),
    "idefics3": ("idefics3", {"clip.use_gelu": True, "clip.vision.projector.scale_factor": 2}),
    "internvl": ("internvl", {"clip.use_gelu": True, "clip.vision.projector.scale_factor": 2}),
    "llava": ("mlp", {}),
    "llava_next": ("mlp", {"clip.vision.image_grid_pinpoints": [16, 32, 32, 16, 32, 32]}),
    "mistral3": ("pixtral", {"clip.use_gelu": True, "clip.vision.spatial_merge_size": 2}),
    "qwen2_vl": ("qwen2vl_merger", {}),
    "qwen2_5_vl": (
        "qwen2.5vl_merger",
        {"clip.use_silu": True, "clip.vision.n_wa_pattern": 2, "clip.vision.window_size": 16},
    ),
    "qwen3_vl": ("qwen3vl_merger", {"clip.use_gelu": True, "clip.vision.is_deepstack_layers": [True, True]}),
    "qwen3_5": ("qwen3vl_merger", {"clip.use_gelu": True}),
    "smolvlm": ("idefics3", {"clip.use_gelu": True, "clip.vision.projector.scale_factor": 2}),
}
LLAVA = ("llava", "llava_next")
EPS = {"gemma4": 1e-6, "gemma3": 1e-6, "idefics3": 1e-6, "smolvlm": 1e-6, "internvl": 1e-6}
TOWER = (
    "vision",
    "visual",
    "multi_modal_projector",
    "connector",
    "embed_vision",
    "image_newline",
)  # beginnings of names
NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)


def parts(family: str, theirs: Any, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor of a checkpoint by the name, or the names, of the file, as the converter changes it."""
    if family == "internvl":
        name = name.removeprefix("model.")
        others = {"layer_norm": "mlp1.0", "linear_1": "mlp1.1", "linear_2": "mlp1.3"}
        stem, _, ending = name.removeprefix("multi_modal_projector.").rpartition(".")
        name = f"{others[stem]}.{ending}" if stem in others else f"model.{name}"
        if "lambda_" in name or "position_embeddings" in name:
            name += ".weight"
    if family == "gemma3":
        name = name.replace("_weight", ".weight")
    if family == "gemma4":
        name = name.replace("model.vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
        name += ".weight" if name.endswith("position_embedding_table") else ""
        if name.endswith("patch_embedder.input_proj.weight"):
            value = value.view(len(value), 4, 4, 3).permute(0, 3, 1, 2)
    if family in ("gemma3", *LLAVA, "mistral3"):
        name = name.removeprefix("model.")
    if family in ("gemma3", *LLAVA):
        name = name.replace("vision_tower.", "vision_tower.vision_model.")  # as in the published ones
    if name.endswith("image_newline"):
        yield "model.image_newline", value
        return
    if ".vision_tower.head." in f".{name}" or ".head." in name:
        return
    if family in LLAVA and ("post_layernorm" in name or ".layers.1." in name):
        return  # the block behind the one that is used is left out
    if family in LLAVA and name.startswith("multi_modal_projector.linear_"):
        number, ending = name.removeprefix("multi_modal_projector.linear_").split(".")
        yield f"mm.{2 * int(number) - 2}.{ending}", value
        return
    if family.startswith("qwen"):
        name = name.removeprefix("model.")
        if "patch_embed.proj.weight" in name:
            yield "v.patch_embd.weight", value[:, :, 0]
            yield "v.patch_embd.weight.1", value[:, :, 1]
            return
        if ".qkv." in name and family.startswith("qwen2"):
            for part, own in zip("qkv", value.chunk(3)):
                yield NAMES.get_name(name.replace("qkv", part), (".weight", ".bias")), own
            return
        if name.startswith("visual.deepstack_merger_list."):
            _, _, number, rest = name.split(".", 3)
            block = theirs.config.vision_config.deepstack_visual_indexes[int(number)]
            yield f"v.deepstack.{sorted([block])[0]}.{rest.replace('linear_', '')}", value
            return
        for theirs_name, own in (("linear_fc1", "mm.0"), ("linear_fc2", "mm.2"), ("norm", "v.post_ln")):
            if name.startswith(f"visual.merger.{theirs_name}."):
                yield f"{own}.{name.rpartition('.')[2]}", value
                return
    if family == "mistral3" and name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
        value = halves_to_pairs(value, theirs.config.vision_config.num_attention_heads)
    if "soft_emb_norm" in name:
        value = value + 1
    bounds = tuple(f".{side}_{end}" for side in ("input", "output") for end in ("min", "max"))
    found = NAMES.get_name(name, (".weight", ".bias", *bounds))
    if ".std_" in name:
        found = f"v.{name.rpartition('.')[2]}"
    assert found is not None, name
    yield found, value if value.ndim else value[None]


def write_mmproj(path: Path, family: str, theirs: Any, folder: Path, **changed: Any) -> Path:
    """The tower of a saved model as a file. `changed`: its metadata and tensors, on top; None leaves one out."""
    kind, more = FILES[family]
    seeing = theirs.config.vision_config
    patch, side = (value[0] if isinstance(value, list | tuple) else value for value in (
        seeing.patch_size, getattr(seeing, "image_size", 16)
    ))  # fmt: skip
    values: dict[str, Any] = {
        "clip.has_vision_encoder": True,
        "clip.projector_type": kind,
        "clip.vision.projection_dim": theirs.config.text_config.hidden_size,
        "clip.vision.image_size": side,
        "clip.vision.patch_size": patch,
        "clip.vision.embedding_length": getattr(seeing, "embed_dim", seeing.hidden_size),
        "clip.vision.feed_forward_length": getattr(seeing, "intermediate_size", 0),
        "clip.vision.block_count": 1 if family in LLAVA else 2,
        "clip.vision.attention.head_count": getattr(seeing, "num_heads", None) or seeing.num_attention_heads,
        "clip.vision.attention.layer_norm_epsilon": EPS.get(family, 1e-5),
        "clip.vision.image_mean": [0.5, 0.25, 0.125],
        "clip.vision.image_std": [0.5, 0.75, 1.0],
        **more,
    }
    tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if not name.removeprefix("model.").startswith(TOWER):
            continue
        for own, part in parts(family, theirs, name, value):
            half = "input_projection" in own or "patch_embd.weight" in own
            tensors[own] = np.ascontiguousarray(part.half().numpy() if half else part.numpy())
    for name, value in changed.items():
        (tensors if name in tensors or name.startswith(("v.", "mm.")) else values)[name] = value
    kept = ({name: value for name, value in each.items() if value is not None} for each in (values, tensors))
    ggufs.finish(gguf.GGUFWriter(path, "clip"), *kept)
    return path


def saved(family: str, folder: Path, change: Callable[[Any], None] = lambda given: None) -> Any:
    """transformers' small model of a family, whose weights are exact in 16 bits."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    given = config(family)
    if family == "qwen3_vl":
        given.vision_config.deepstack_visual_indexes = [0, 1]
    if family == "gemma4":
        given.vision_config.use_clipped_linears = given.vision_config.standardize = True
    change(given)
    theirs = AutoModelForImageTextToText.from_config(given, dtype=torch.float32).eval()
    randomize(theirs)
    for name, buffer in theirs.named_buffers():
        if name.endswith(("_min", "_max", "std_bias", "std_scale")):
            low, high = {"_min": (-0.5, -0.2), "_max": (0.2, 0.5)}.get(name[-4:], (0.5, 1.5))
            buffer.uniform_(low, high)
    for weight in theirs.parameters():
        weight.data = weight.data.half().float()
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.parametrize("family", FILES)
def test_a_tower_makes_what_the_folders_makes(family: str, tmp_path: Path) -> None:
    theirs = saved(family, tmp_path)
    path = write_mmproj(tmp_path / "mmproj.gguf", family, theirs, tmp_path)
    opened = Mmproj.open(path)
    tower, expected = opened.tower(IMAGE), Tower.open(tmp_path)
    assert opened.text_width == 48
    inputs, counts = pictures(family)
    tiles = tower.tiles(inputs)
    assert [len(tower.embed(tile)) for tile in tiles] == counts
    for tile in tiles:
        torch.testing.assert_close(tower.embed(tile), expected.embed(tile), atol=1e-5, rtol=1e-5)


ARCH = gguf.MODEL_ARCH
# A family -> the architecture of its text, what a template writes for a picture, and other tokens that it needs.
TEXTS: dict[str, tuple[ARCH, str, tuple[str, ...]]] = {
    "gemma3": (ARCH.GEMMA3, "<start_of_image>", ("<end_of_image>", "<image_soft_token>")),
    "idefics3": (ARCH.LLAMA, "<image>", ("<fake_token_around_image>", "<end_of_utterance>", "<global-img>")),
    "internvl": (ARCH.QWEN2, "<IMG_CONTEXT>", ("<img>", "</img>")),
    "llava": (ARCH.LLAMA, "<image>", ()),
    "llava_next": (ARCH.LLAMA, "<image>", ()),
    "mistral3": (ARCH.LLAMA, "[IMG]", ("[IMG_BREAK]", "[IMG_END]")),
    "qwen2_vl": (ARCH.QWEN2VL, "<|image_pad|>", ()),
    "qwen2_5_vl": (ARCH.QWEN2VL, "<|image_pad|>", ()),
    "qwen3_vl": (ARCH.QWEN3VL, "<|image_pad|>", ()),
}
SECTIONS = {"qwen2_vl": [1, 1, 2, 0], "qwen2_5_vl": [1, 1, 2, 0], "qwen3_vl": [4, 2, 2, 0]}
NORMAL: dict[str, Any] = {"image_mean": [0.5, 0.25, 0.125], "image_std": [0.5, 0.75, 1.0]}
SIDE = {"height": 16, "width": 16}


def processor_of(family: str) -> Any:
    """transformers' processor of pictures, with the settings that the file says."""
    import transformers as t

    if family == "gemma3":
        return t.Gemma3ImageProcessorPil(size=SIDE, **NORMAL)
    if family == "idefics3":
        longest = {"longest_edge": 32}
        return t.Idefics3ImageProcessorPil(size=longest, max_image_size={"longest_edge": 16}, **NORMAL)
    if family == "internvl":
        return t.GotOcr2ImageProcessorPil(size=SIDE, max_patches=4, crop_to_patches=True, **NORMAL)
    if family == "llava":
        return t.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=SIDE, **NORMAL)
    if family == "llava_next":
        grid = [[16, 32], [32, 16], [32, 32]]
        return t.LlavaNextImageProcessorPil(
            size={"shortest_edge": 16}, crop_size=SIDE, image_grid_pinpoints=grid, **NORMAL
        )
    if family == "mistral3":
        return t.PixtralImageProcessorPil(size={"longest_edge": 16}, patch_size=8, **NORMAL)
    least, most = (256**2, 4096**2) if family == "qwen3_vl" else (56**2, 28 * 28 * 16384)
    sizes = {"shortest_edge": least, "longest_edge": most}
    return t.Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=sizes, **NORMAL)


def written(family: str, folder: Path, mark: str = "") -> tuple[Any, Path, Path]:
    """transformers' model, and the files of its text model and of its tower. `mark`: another token for pictures."""
    from tokenizers.pre_tokenizers import ByteLevel

    arch, known, others = TEXTS[family]
    mark = mark or known
    tokens = [*sorted(ByteLevel.alphabet()), "ab", START, END, mark, *others]
    place = tokens.index("<image_soft_token>" if family == "gemma3" else mark)

    def sized(given: Any) -> None:
        given.text_config.vocab_size, given.image_token_id, given.text_config.eos_token_id = len(tokens), place, 258
        if family == "gemma3":
            given.text_config.layer_types = ["sliding_attention"] * 2
            given.text_config.query_pre_attn_scalar = 16

    theirs = saved(family, folder, sized)
    text = theirs.config.text_config
    more: dict[str, Any] = {"rope.dimension_sections": SECTIONS[family]} if family in SECTIONS else {}
    if family == "gemma3":
        more = {"attention.sliding_window": 7}
    values = metadata(arch, text, more)
    values |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 257 + [2 if token == "<unk>" else 3 for token in tokens[257:]],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.chat_template": PLAIN if family in ("internvl", *LLAVA) else TEMPLATE.replace("<image>", mark),
    }
    path = folder / "text.gguf"
    ggufs.finish(gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch]), values, converted(arch, theirs, text))
    changed = {"clip.vision.preproc_image_size": 32, "clip.vision.preproc_max_tiles": 4}
    return theirs, path, write_mmproj(folder / "mmproj-text.gguf", family, theirs, folder, **changed)


@pytest.mark.parametrize(("family", "mark"), [*((family, "") for family in TEXTS), ("llava", "<unk>")])
def test_a_conversation_with_pictures_of_a_gguf_model(family: str, mark: str, tmp_path: Path) -> None:
    from transformers import AutoImageProcessor

    if family in ("internvl", "mistral3"):
        pytest.importorskip("torchvision")  # which transformers' processors of these ask for
    theirs, path, mmproj = written(family, tmp_path, mark)
    model = lmstate.load(path, weights="float32", mmproj=mmproj)
    assert model.sees
    files = [png(30, 20), png(16, 40, seed=1)]
    prompt = model.encode(said(files[0], "and", files[1], "?"))
    images = [Image.open(io.BytesIO(file)) for file in files]
    options = {"do_image_splitting": True, "return_row_col_info": True} if family == "idefics3" else {}
    processor_of(family).save_pretrained(tmp_path)
    pixels = AutoImageProcessor.from_pretrained(tmp_path)  # another one where torchvision is
    inputs = pixels(images=images, return_tensors="pt", **options)
    given = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and name != "num_crops"}
    given.pop("num_patches", None)
    types = torch.tensor([[int(token == theirs.config.image_token_id) for token in prompt.tokens]])
    if family == "gemma3":
        given["token_type_ids"] = types
    elif family in SECTIONS:
        given["mm_token_type_ids"] = types
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([prompt.tokens]), **given).logits[0, -1]
    prompt.place(state := model.new_state())
    logits = model([prompt.tokens], state)
    assert logits is not None and len(prompt.media) > 1
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)


def test_a_picture_of_gemma_4_is_written_as_its_processor_writes_it(tmp_path: Path) -> None:
    import transformers as t

    pytest.importorskip("torchvision")  # of its processor of videos
    tokens = ("<|image>", "<|image|>", "<image|>", "<|audio>", "<|audio|>", "<audio|>")
    tokenizer = byte_tokenizer(tmp_path, tokens, TEMPLATE.replace("<image>", "<|image|>"))
    theirs = saved("gemma4", tmp_path)
    opened = Mmproj.open(write_mmproj(tmp_path / "mmproj.gguf", "gemma4", theirs, tmp_path))
    opened.check(48, 4, False, tokenizer)
    reader, image = opened.reader(tokenizer), Image.open(io.BytesIO(png(60, 40)))
    prompt = reader.encode(said("what", png(60, 40)))
    t.Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2).save_pretrained(tmp_path)
    inputs = t.AutoImageProcessor.from_pretrained(tmp_path)(images=[image], return_tensors="pt")
    (count,) = inputs.pop("num_soft_tokens_per_image")
    text = tokenizer.decode(prompt.tokens, skip_special_tokens=False)
    assert f"what<|image>{'<|image|>' * int(count)}<image|>" in text
    with torch.no_grad():
        expected = theirs.model.get_image_features(**inputs, return_dict=True).pooler_output
    (span,) = prompt.media
    torch.testing.assert_close(span.media.embeddings, torch.cat([*expected]), atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path, Path]:
    folder = tmp_path_factory.mktemp("llava")
    return *written("llava", folder), folder


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"clip.projector_type": "ldpv2"}, "projector of type 'ldpv2'; lmstate reads gemma3, .*idefics3"),
    ({"clip.projector_type": None}, "projector of type ''"),
    ({"clip.vision.projection_dim": 64}, "goes with a text model of width 64, and this one has 48"),
    ({"clip.vision.block_count": 4000}, "says that its tower has 4000 blocks, and holds fewer"),
    ({"clip.vision.image_size": 2**31}, "image_size"),
    ({"clip.vision.image_size": 2**14}, "4096 patches of 4 pixels"),
    ({"clip.vision.patch_size": 0}, "patch_size"),
    ({"clip.vision.patch_size": 17}, "0 patches of 17 pixels"),
    ({"clip.vision.attention.head_count": 5}, "5 heads for a width of 32"),
    ({"clip.vision.image_std": [0.5, 0.0, 1.0]}, "divides colors by"),
    ({"clip.vision.image_mean": [0.5]}, "image_mean"),
    ({"clip.vision.embedding_length": "32"}, "embedding_length"),
    ({"clip.vision.feature_layer": [0, 1]}, "feature_layer"),
    ({"v.image_newline": np.zeros(48, np.float32)}, "a LLaVA with another projector"),
]


@pytest.mark.parametrize(("changed", "said_so"), WRONG, ids=[next(iter(each)) for each, _ in WRONG])
def test_what_does_not_go_with_the_text_is_refused_at_once(
    changed: dict[str, Any], said_so: str, llava: tuple[Any, Path, Path, Path], tmp_path: Path
) -> None:
    theirs, path, _, folder = llava
    wrong = write_mmproj(tmp_path / "wrong.gguf", "llava", theirs, folder, **changed)
    with pytest.raises((lmstate.ModelError, lmstate.UnsupportedError), match=said_so):
        lmstate.load(path, mmproj=wrong)


DAMAGED: list[tuple[dict[str, Any], str]] = [
    ({"mm.2.bias": None}, "lacks 1 tensors of its tower: mm.2.bias"),
    ({"mm.2.bias": np.zeros(47, np.float32)}, r"'mm.2.bias' has the shape \[47\], and .* \[48\]"),
    ({"v.position_embd.weight": np.zeros((10, 32), np.float32)}, r"'v.position_embd.weight' has the shape \[10, 32\]"),
    ({"v.blk.0.ffn_up.weight": np.zeros((50, 32), np.float32)}, "'v.blk.0.ffn_"),
    ({"v.blk.0.attn_q_norm.weight": np.zeros(8, np.float32)}, "1 tensors that transformers' llava has no place for"),
]


@pytest.mark.parametrize(("changed", "said_so"), DAMAGED, ids=[next(iter(each)) for each, _ in DAMAGED])
def test_a_damaged_tower_is_refused_at_the_first_picture(
    changed: dict[str, Any], said_so: str, llava: tuple[Any, Path, Path, Path], tmp_path: Path
) -> None:
    theirs, path, _, folder = llava
    model = lmstate.load(path, mmproj=write_mmproj(tmp_path / "wrong.gguf", "llava", theirs, folder, **changed))
    with pytest.raises(lmstate.ModelError, match=said_so):
        model.encode(said(png(20, 20)))


def test_a_template_that_knows_no_pictures(llava: tuple[Any, Path, Path, Path]) -> None:
    _, path, mmproj, _ = llava
    model = lmstate.load(path, mmproj=mmproj)
    messages = [*said("an <image>", png(20, 20), "then?"), {"role": "assistant", "content": "yes"}, *said("and?")]
    prompt = model.encode(messages)
    assert prompt.tokens.count(model.tokenizer.id_of("<image>")) == 16
    assert model.tokenizer.decode(prompt.tokens, skip_special_tokens=False) == (
        f"{START}user\nan <image>\n{'<image>' * 16}\nthen?{END}\n{START}assistant\nyes{END}\n{START}user\nand?{END}\n"
        f"{START}assistant\n"
    )
    (parts,) = (message["content"] for message in said(png(20, 20), "then?"))
    plain = [{"role": "user", "content": [parts[0], "then?"]}]  # a part that is a text by itself
    assert model.encode(plain) == model.encode(said(png(20, 20), "then?"))


def test_a_tower_opens_without_a_word(llava: tuple[Any, Path, Path, Path], capfd: pytest.CaptureFixture[str]) -> None:
    _, _, mmproj, folder = llava
    Mmproj.open(mmproj).tower(IMAGE)
    Tower.open(folder)
    assert not capfd.readouterr().err


def test_a_processor_that_needs_another_package(
    llava: tuple[Any, Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lmstate.load(llava[1], mmproj=llava[2])
    monkeypatch.setitem(families.PROCESSED, "llava", ("no_such_package",))
    assert not model.sees
    with pytest.raises(lmstate.UnsupportedError, match="pip install no_such_package"):
        model.encode(said(png(20, 20)))
    monkeypatch.undo()
    assert model.sees and model.encode(said(png(20, 20))).media


def test_files_that_are_no_tower(llava: tuple[Any, Path, Path, Path], tmp_path: Path) -> None:
    _, path, mmproj, folder = llava
    with pytest.raises(lmstate.ModelError, match="is a model of architecture 'llama'"):
        lmstate.load(path, mmproj=path)
    with pytest.raises(lmstate.ModelError, match="is the vision tower of another file"):
        lmstate.load(mmproj)
    with pytest.raises(lmstate.ModelError, match=r"goes with a \.gguf model"):
        lmstate.load(folder, mmproj=mmproj)
    with pytest.raises(lmstate.ModelError, match="adapters, mmproj or a device"):
        lmstate.load(path, mmproj=mmproj, parallel=2)
    (tmp_path / "cut.gguf").write_bytes(mmproj.read_bytes()[:-1000])
    with pytest.raises(lmstate.ModelError, match="damaged or incomplete"):
        lmstate.load(path, mmproj=tmp_path / "cut.gguf")


def test_a_wrong_tower_is_refused_before_a_model_loads(
    llava: tuple[Any, Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path, _, _ = llava
    monkeypatch.setattr("lmstate.models.families.build", lambda opened: pytest.fail("the model was loaded"))
    with pytest.raises(lmstate.ModelError, match="is a model of architecture 'llama'"):
        lmstate.load(path, mmproj=path)
    with pytest.raises(FileNotFoundError, match="no model called"):
        lmstate.load(path, mmproj=path.with_name("none.gguf"))


def test_a_text_model_without_axes_or_tokens(llava: tuple[Any, Path, Path, Path], tmp_path: Path) -> None:
    _, path, _, _ = llava
    theirs = saved("qwen2_vl", tmp_path)
    tower = write_mmproj(tmp_path / "tower.gguf", "qwen2_vl", theirs, tmp_path)
    with pytest.raises(lmstate.ModelError, match="positions of several axes"):
        lmstate.load(path, mmproj=tower)
    theirs = saved("gemma3", tmp_path)
    tower = write_mmproj(tmp_path / "other.gguf", "gemma3", theirs, tmp_path)
    with pytest.raises(lmstate.ModelError, match="that has the token <image_soft_token>"):
        lmstate.load(path, mmproj=tower)


def test_matrices_that_old_converters_exchanged(llava: tuple[Any, Path, Path, Path], tmp_path: Path) -> None:
    theirs, _, mmproj, folder = llava
    given = {f"v.blk.0.ffn_{part}.{ending}": None for part in ("up", "down") for ending in ("weight", "bias")}
    vision = theirs.model.vision_tower.encoder.layers[0].mlp
    for name, layer in (("down", vision.fc1), ("up", vision.fc2)):
        given[f"v.blk.0.ffn_{name}.weight"] = layer.weight.detach().numpy()
        given[f"v.blk.0.ffn_{name}.bias"] = layer.bias.detach().numpy()
    old = Mmproj.open(write_mmproj(tmp_path / "old.gguf", "llava", theirs, folder, **given)).tower(IMAGE)
    new = Mmproj.open(mmproj).tower(IMAGE)
    for tile in new.tiles(pictures("llava")[0]):
        torch.testing.assert_close(old.embed(tile), new.embed(tile), atol=1e-5, rtol=1e-5)


def test_the_command_line_takes_a_tower(
    llava: tuple[Any, Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    _, path, mmproj, _ = llava
    (tmp_path / "picture.png").write_bytes(png(20, 20))
    given = [str(path), "--mmproj", str(mmproj)]

    def run(*command: str) -> str:
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.stderr
        return result.stdout

    told = run("generate", *given, "--image", str(tmp_path / "picture.png"), "--json", "-n", "3", "what")
    prompt = lmstate.load(path, mmproj=mmproj).encode(said(png(20, 20), "what"))
    assert len(prompt.media) == 1 and json.loads(told)["usage"]["prompt"] == len(prompt)
    assert f"llava in {mmproj.name}: 1 blocks" in run("inspect", *given)
    for name in ("text.gguf", "mmproj-text.gguf", "text-MMPROJ-F16.gguf"):
        (tmp_path / name).write_bytes(b"")
    assert models_in(tmp_path) == [str(tmp_path / "text.gguf")]
