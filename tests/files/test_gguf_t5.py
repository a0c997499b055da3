"""T5 and its kin in GGUF: encodings and logits of transformers, ids of the tokenizers library."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import models, normalizers, pre_tokenizers

import lmstate
from lmstate.checkpoints.config import Config
from lmstate.checkpoints.gguf.tokenizer import tokenizer_of
from lmstate.errors import ModelError
from lmstate.text.tokenizer import Tokenizer
from tests.files.ggufs import write
from tests.zoo import ENCODERS, randomize, read, source, text

CASES = {"t5": "t5", "t5-gated": "t5", "mt5": "t5", "umt5": "umt5"}


def original(case: str) -> Any:
    """A random model. One whose head is not the embedding does not scale what the head reads."""
    import transformers

    config = ENCODERS[case]()
    config.relative_attention_max_distance = 128  # which files leave out
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{case.partition('-')[0].upper()}ForConditionalGeneration")(config)
    randomize(theirs.eval())
    if not getattr(config, "scale_decoder_outputs", False):
        theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.detach().flip(0))
    return theirs


def save(path: Path, theirs: Any, **more: Any) -> Path:
    config, tensors = theirs.config, {}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5, max(config.num_layers, config.num_decoder_layers))
    for name, tensor in theirs.state_dict().items():
        tied = name == "lm_head.weight" and torch.equal(tensor, theirs.shared.weight)
        if not tied and not name.endswith("embed_tokens.weight"):
            found = names.get_name(name, (".weight",))
            assert found is not None, name
            tensors[found] = np.ascontiguousarray(tensor.numpy())
    values = {
        "block_count": config.num_layers, "decoder_block_count": config.num_decoder_layers,
        "embedding_length": config.d_model, "feed_forward_length": config.d_ff,
        "attention.head_count": config.num_heads,
        "attention.key_length": config.d_kv, "attention.value_length": config.d_kv,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "attention.relative_buckets_count": config.relative_attention_num_buckets,
        "decoder_start_token_id": config.decoder_start_token_id,
    }  # fmt: skip
    return write(
        path, "t5", {f"t5.{name}": value for name, value in values.items()} | more, tensors, {"kv_heads": None}
    )


@pytest.mark.parametrize("case", CASES)
def test_a_converted_model_gives_the_encodings_and_logits_of_the_original(case: str, tmp_path: Path) -> None:
    theirs = original(case)
    model = lmstate.load(save(tmp_path / "model.gguf", theirs), weights="float32")
    assert model.config.family == CASES[case] and model.encoder is not None
    ids, state, given = text(60, rows=1), model.new_state(), source(model, 170, seed=1)
    with torch.no_grad():
        expected = theirs.get_encoder()(**read(given)).last_hidden_state
        logits = theirs(**read(given), decoder_input_ids=ids).logits
    torch.testing.assert_close(model.encoder(given), expected, atol=1e-4, rtol=1e-4)
    state.condition(0, given)
    torch.testing.assert_close(model(ids, state, logits="all"), logits, atol=1e-4, rtol=1e-4)


# ---- the tokenizer

WORDS = ["▁", "a", "b", "c", "A", "▁a", "ab", "▁ab", "abc", "▁b", "bc", "▁▁", "<user>"]
TOKENS = ["<pad>", "</s>", "<unk>", *WORDS, "[PAD16]"]
TYPES = [3, 3, 2, *[1] * (len(WORDS) - 1), 4, 5]
SCORES = [0.0, 0.0, 0.0, *(-2.0 - index % 5 for index in range(len(WORDS))), -10000.0]
TEXTS = ["abc", "a  b c", " ab ", "\uff21bc é éé b", "</s>a<user>b", "", " ", "a   b", "zz a"]


def charsmap(key: str, value: str) -> bytes:
    """SentencePiece's table of characters that maps one text onto another: a double array, and what it points to."""
    raw = key.encode()
    units = [0] * 256 * (len(raw) + 2)
    at, base = 0, 256
    for index, byte in enumerate((0, *raw)):
        leaf = (1 << 8) if index == len(raw) else 0
        place, at = (0, 0) if index == 0 else (at ^ byte, at ^ byte)
        offset = place ^ base
        units[place] = (offset << 10 | leaf | byte) & 0xFFFFFFFF
        at, base = base, base + 256
    return struct.pack(f"<I{len(units)}I", 4 * len(units), *units) + value.encode() + b"\0"


def metadata(**changes: Any) -> Config:
    values = {"model": "t5", "pre": "default", "tokens": TOKENS, "token_type": TYPES, "scores": SCORES}
    return Config({f"tokenizer.ggml.{name}": value for name, value in (values | changes).items()}, "x.gguf")


def oracle(spaces: bool, prefix: bool, table: bytes | None) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.Unigram(list(zip(TOKENS, SCORES)), unk_id=2))
    steps = [] if table is None else [normalizers.Precompiled(table)]
    if not spaces:
        steps += [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(r"\s+"), " ")]
    elif prefix:  # also where a text begins with a space
        steps += [normalizers.Prepend("▁")]
    made.normalizer = normalizers.Sequence(steps)
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if prefix else "never")
    if prefix and not spaces:  # as in the published files of T5
        made.normalizer = normalizers.Sequence(steps[:-2])
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), made.pre_tokenizer])
    made.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in TOKENS[:3]])
    made.add_tokens([tokenizers.AddedToken("<user>", normalized=False)])
    return made


@pytest.mark.parametrize("spaces", [False, True])
@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
def test_ids_are_those_of_the_tokenizers_library(spaces: bool, prefix: bool, mapped: bool) -> None:
    table = charsmap("\uff21", "ab") if mapped else None
    more = {"precompiled_charsmap": list(table)} if table else {}
    told = metadata(add_space_prefix=prefix, remove_extra_whitespaces=not spaces, **more)
    ours, theirs = Tokenizer(tokenizer_of(told)), oracle(spaces, prefix, table)
    for each in TEXTS:
        expected = theirs.encode(each, add_special_tokens=False).ids
        assert ours.encode(each, add_special_tokens=False) == expected
        assert ours.encode(each) == [*expected, 1]
    plain = ours.encode("\uff21", add_special_tokens=False)
    assert plain == ours.encode("ab", add_special_tokens=False) if mapped else 2 in plain
    assert ours.decode(ours.encode("abc b")) == "abc b"


def test_a_table_of_characters_may_be_written_in_signed_bytes() -> None:
    signed = [byte - 256 if byte > 127 else byte for byte in charsmap("\uff21", "ab")]
    tokenizer = Tokenizer(tokenizer_of(metadata(precompiled_charsmap=signed)))
    assert tokenizer.encode("\uff21") == tokenizer.encode("ab")


def test_characters_without_a_piece_are_bytes_where_there_are_pieces_for_them() -> None:
    told = metadata(
        tokens=[*TOKENS, *(f"<0x{byte:02X}>" for byte in range(256))], token_type=[*TYPES, *[6] * 256],
        scores=[*SCORES, *[-9.0] * 256],
    )  # fmt: skip
    tokenizer = Tokenizer(tokenizer_of(told))
    ids = tokenizer.encode("aé b")
    assert len(TOKENS) + 0xC3 in ids and tokenizer.decode(ids) == "aé b"


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("scores", {"scores": None}),
        ("3 values", {"scores": [0.0] * 3}),
        ("precompiled_charsmap", {"precompiled_charsmap": [256]}),
        ("as long", {"precompiled_charsmap": list(charsmap("\uff21", "ab" * 200))}),
        ("damaged or of a newer kind", {"precompiled_charsmap": [255, 255, 255, 255, 1]}),
    ],
)
def test_a_damaged_vocabulary_is_refused(message: str, changes: dict[str, Any]) -> None:
    told = metadata(**changes)
    with pytest.raises(ModelError, match=message):
        Tokenizer(tokenizer_of(Config({name: value for name, value in told.items() if value is not None}, "x.gguf")))


def test_a_whole_file_answers_from_a_source_of_text(tmp_path: Path) -> None:
    tokens = [*TOKENS, *(f"[PAD{index}]" for index in range(len(TOKENS), 99))]
    more = {"model": "t5", "tokens": tokens, "scores": [*SCORES, *[-10000.0] * (99 - len(SCORES))]}
    more["token_type"] = [*TYPES, *[5] * (99 - len(TYPES))]
    path = save(
        tmp_path / "model.gguf", original("t5"), **{f"tokenizer.ggml.{name}": value for name, value in more.items()}
    )
    model = lmstate.load(path, weights="float32")
    assert model.eos_ids == {1} and model.tokenizer.encode("ab") == [TOKENS.index("▁ab"), 1]
    assert model.generate(source="abc ab", max_new_tokens=4) is not None
