"""RWKV's World tokenizer, and RWKV-7 from GGUF: both against what llama.cpp's converter writes and reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lmstate
from lmstate.checkpoints.config import Config
from lmstate.checkpoints.gguf.tokenizer import tokenizer_of
from lmstate.checkpoints.huggingface.directory import tokenizer_files
from lmstate.checkpoints.longest_match import NAME
from lmstate.errors import ModelError
from lmstate.text.tokenizer import Tokenizer
from tests.files import ggufs
from tests.models import rwkv7_model as reference

WORDS = [
    "the",
    " the",
    "there",
    "\n\n",
    "\t\r",
    "it's",
    '"\\',
    "a.b",
    "(?:",
    "[x]",
    "é",
    "世界",
    "||",
    "User",
    " " * 70,
]
TOKENS = [*(bytes([byte]) for byte in range(256)), *(word.encode() for word in WORDS), "世".encode()[:2], b"\xff\xfe"]
IDS = {token: index for index, token in enumerate(TOKENS, 1)}


def greedy(data: bytes) -> list[int]:
    """The longest token at each place."""
    ids = []
    while data:
        length = max(n for n in range(1, 80) if data[:n] in IDS)
        ids.append(IDS[data[:length]])
        data = data[length:]
    return ids


def metadata(**changes: Any) -> dict[str, Any]:
    """As the converter writes a vocabulary: each token as the inside of Python's literal of its bytes."""
    padding = ["[PAD0]", "[PAD1]"]
    texts = ["<s>", *(repr(token)[2:-1] for token in TOKENS), *padding]
    types = [3, *[1] * len(TOKENS), *[5] * len(padding)]
    ids = {f"tokenizer.ggml.{name}_token_id": 0 for name in ("bos", "eos", "unknown")}
    return {
        "tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": types,
        "tokenizer.chat_template": "rwkv-world", **ids, **changes,
    }  # fmt: skip


def of_gguf(**changes: Any) -> Tokenizer:
    files = tokenizer_of(Config(metadata(**changes), "a file"))
    assert files is not None
    return Tokenizer(files)


def vocabulary(folder: Path, tokens: list[bytes] = TOKENS) -> Path:
    lines = []
    for index, token in enumerate(tokens, 1):
        try:
            text = repr(token.decode())
        except UnicodeDecodeError:
            text = repr(token)
        lines.append(f"{index} {text} {len(token)}\n")
    (folder / NAME).write_text("".join(lines), encoding="utf-8")
    return folder


def of_folder(folder: Path) -> Tokenizer:
    files = tokenizer_files(folder)
    assert files is not None
    return Tokenizer(files)


@pytest.fixture(scope="module", params=["gguf", "folder"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return of_gguf() if request.param == "gguf" else of_folder(vocabulary(tmp_path_factory.mktemp("world")))


TEXTS = st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=8).map("".join)


@settings(max_examples=60, deadline=None)
@given(text=TEXTS.filter(lambda text: "<s>" not in text))
def test_the_longest_token_is_taken_at_each_place(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == greedy(text.encode())
    assert tokenizer.decode(ids) == text


def test_parts_of_characters_are_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("世") == [IDS["世".encode()[:2]], IDS["世".encode()[2:]]]
    assert tokenizer.decode([*tokenizer.encode("世"), *tokenizer.encode("界")]) == "世界"
    assert tokenizer.bos_id == 0 and tokenizer.eos_ids == {0}
    assert tokenizer.decode([0, IDS[b"the"]]) == "the"


def test_the_conversation_that_a_file_names() -> None:
    messages = [{"role": "system", "content": "Be. "}, {"role": "user", "content": "Hi"}]
    assert of_gguf().chat_text(messages) == "System: Be.\n\nUser: Hi\n\nAssistant:"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("258 'a' 1\n", "token 257"),
        ("257 'ab' 1\n", "token 257"),
        ("257 [] 0\n", "token 257"),
        ("257 {[]:1} 1\n", "token 257"),
        ("257 ''' 1\n", "token 257"),
        (f"257 {'(' * 5000} 1\n", "token 257"),
        ("257 '' 0\n", "has 0 bytes"),
        (f"257 {'a' * 600!r} 600\n", "has 600 bytes"),
    ],
)
def test_damaged_vocabularies_are_refused(tmp_path: Path, line: str, message: str) -> None:
    folder = vocabulary(tmp_path, TOKENS[:256])
    with (folder / NAME).open("a", encoding="utf-8") as file:
        file.write(line)
    with pytest.raises(ModelError, match=message):
        tokenizer_files(folder)


def test_a_vocabulary_without_a_byte_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no token for the byte 255"):
        tokenizer_files(vocabulary(tmp_path, TOKENS[:255]))


# ---- the model

LORA = {"lora.0.weight": 1, "lora.2.weight": 2, "lora.2.bias": 0}
INSIDE = {
    "attn_norm": "attn_norm", "ffn_norm": "attn_norm_2", "attn.g_norm": "time_mix_ln", "ffn.x_k": "channel_mix_lerp_k",
    "ffn.key": "channel_mix_key", "ffn.value": "channel_mix_value", "attn.r_proj": "time_mix_receptance",
    "attn.k_proj": "time_mix_key", "attn.v_proj": "time_mix_value", "attn.o_proj": "time_mix_output",
    **{f"attn.{name}": f"time_mix_{name}" for name in ("k_k", "k_a", "r_k")},
}  # fmt: skip
OUTSIDE = {
    "model.embeddings": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "model.layers.0.pre_norm": "token_embd_norm",
}  # fmt: skip


def converted(made: reference.Weights, layers: int) -> dict[str, np.ndarray]:
    """The tensors as llama.cpp's converter writes them."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in made.items():
        stem, _, end = name.rpartition(".")
        stem, end = (stem, end) if end in ("weight", "bias") else (name, "weight")
        if stem in OUTSIDE:
            out[f"{OUTSIDE[stem]}.{end}"] = tensor
            continue
        _, _, layer, inside = stem.split(".", 3)
        if "_lora" in inside:
            part, _, rest = f"{inside}.{end}".removeprefix("attn.").partition("_lora.")
            out[f"blk.{layer}.time_mix_{part}{LORA[rest]}.weight"] = tensor
            if layer == "0" and part == "a":  # of values, which nothing reads there
                out[f"blk.{layer}.time_mix_v{LORA[rest]}.weight"] = tensor
        elif not inside.startswith("attn.x_"):
            out[f"blk.{layer}.{INSIDE[inside]}.{end}"] = tensor.flatten() if inside.endswith("r_k") else tensor
    for layer in range(layers):
        shares = [made[f"model.layers.{layer}.attn.x_{part}"] for part in "rwkvag"]
        out[f"blk.{layer}.time_mix_lerp_fused.weight"] = torch.stack(shares)
    return {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in out.items()}


def write(path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], tokenizer: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "rwkv7")
    writer.add_context_length(1048576)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_layer_norm_eps(config["norm_eps"])
    writer.add_wkv_head_size(config["head_dim"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(0)
    ggufs.finish(writer, tokenizer, tensors)
    return path


def test_rwkv7_from_gguf_gives_the_bits_of_its_checkpoint(tmp_path: Path) -> None:
    config = {**reference.CONFIG, "vocab_size": len(TOKENS) + 3}
    made = reference.weights(config)
    tensors = converted(made, config["num_hidden_layers"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.RWKV7, config["num_hidden_layers"]).mapping.values()
    known = {name for _, name in names}
    plain = {name.removesuffix(".weight").removesuffix(".bias") for name in tensors}
    assert {name for name in plain if not name.endswith("_fused")} <= known  # the converter makes those itself
    path = write(tmp_path / "model.gguf", config, tensors, metadata())
    ours = lmstate.load(path, weights="float32")
    text = ours.tokenizer.encode("User: there\n\n世界 it's the end")
    wanted = lmstate.load(reference.save(tmp_path / "folder", config, made), weights="float32")([text])
    assert torch.equal(ours([text]), wanted)
    torch.testing.assert_close(wanted[0].double(), reference.logits(config, made, text), atol=1e-4, rtol=1e-4)


def test_rwkv7_without_gates_is_refused(tmp_path: Path) -> None:
    config = {**reference.CONFIG, "vocab_size": len(TOKENS) + 3}
    tensors = converted(reference.weights(config), 3)
    del tensors["blk.0.time_mix_g1.weight"]
    with pytest.raises(ModelError, match="without gates"):
        lmstate.load(write(tmp_path / "model.gguf", config, tensors, metadata()), weights="float32")
