"""Kimi's tiktoken.model: the ids of a text, with the tiktoken library as the oracle where it is installed."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lmstate
from lmstate.checkpoints.huggingface.directory import tokenizer_files
from lmstate.checkpoints.huggingface.tiktoken import RESERVED
from lmstate.text.tokenizer import Tokenizer

PIECES = [
    "  ",
    "he",
    "ll",
    "aa",
    " w",
    "or",
    "hell",
    "hello",
    "aaa",
    " wor",
    "ld",
    "é",
    " world",
    "日",
    "日本",
    "12",
    "'s",
]
BASE = 256 + len(PIECES)
NAMES = {BASE: "[BOS]", BASE + 1: "[EOS]", BASE + 2: "<|im_end|>", BASE + 3: "<|im_user|>"}
CASED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join([  # as published beside Kimi K2
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{CASED[0]}*{CASED[1]}+{SHORT}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{CASED[0]}+{CASED[1]}*{SHORT}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
])  # fmt: skip


def ranks() -> dict[bytes, int]:
    data = [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in PIECES]
    return {piece: rank for rank, piece in enumerate(data)}


def written(folder: Path, lines: list[str] | None = None, **changes: Any) -> Path:
    told = [f"{base64.b64encode(piece).decode()} {rank}" for piece, rank in ranks().items()]
    (folder / "tiktoken.model").write_text("\n".join(told if lines is None else lines) + "\n")
    added = {str(id): {"content": name, "special": "user" not in name} for id, name in NAMES.items()}
    config = {"added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]", "chat_template": "hello"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | changes))
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_linear"}))
    return folder


def test_ids_come_from_ranks_and_special_tokens_follow(tmp_path: Path) -> None:
    files = tokenizer_files(written(tmp_path))
    assert files is not None
    tokenizer = Tokenizer(files)
    assert tokenizer.encode("hello world") == [256 + PIECES.index("hello"), 256 + PIECES.index(" world")]
    assert tokenizer.encode("[EOS]x") == [BASE + 1, ord("x")]
    assert tokenizer.id_of(f"<|reserved_token_{BASE + 9}|>") == BASE + 9
    assert tokenizer.decode([BASE + 1, BASE + 3]) == "<|im_user|>", "the file calls it no special token"
    assert tokenizer.vocab_size == BASE + RESERVED and tokenizer.eos_ids == {BASE + 1, BASE + 2}
    assert tokenizer.chat_text([{"role": "user", "content": "Hi"}]) == "hello"


def test_ids_are_those_of_tiktoken(tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken", reason="pip install tiktoken")
    files = tokenizer_files(written(tmp_path))
    assert files is not None
    ours = Tokenizer(files)
    theirs = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks(), special_tokens={})

    @settings(max_examples=1000)
    @given(st.lists(st.sampled_from([*"heloaw rd日本é1A/\n\r\t", *PIECES]), max_size=20).map("".join))
    def check(text: str) -> None:
        ids = ours.encode(text)
        assert ids == theirs.encode(text) and ours.decode(ids) == text

    check()


def test_another_checkpoint_has_other_rules(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert tokenizer_files(tmp_path) is None


@pytest.mark.parametrize(
    ("lines", "changes", "why"),
    [
        (["AA== 0", "AQ== 2"], {}, "rank 1 on line 2"),
        (["AA=="], {}, "rank 0"),
        (["AA== 0", "AA== 1"], {}, "twice"),
        (["?? 0"], {}, "base64"),
        (["AA== 0", "AQ== 1"], {}, "no token for the byte 2"),
        (None, {"added_tokens_decoder": {"5": {"content": "[BOS]"}}}, "expected ids from"),
        (None, {"added_tokens_decoder": {str(10**9): {"content": "[BOS]"}}}, "expected ids from"),
        (None, {"added_tokens_decoder": {f"0{BASE}": {"content": "[BOS]"}}}, "expected ids from"),
        (None, {"added_tokens_decoder": {"9" * 5000: {"content": "[BOS]"}}}, "expected ids from"),
        (None, {"added_tokens_decoder": {str(BASE): "[BOS]"}}, "with a content"),
        (None, {"added_tokens_decoder": {str(BASE): {"content": "he"}}}, "twice"),
    ],
)
def test_damaged_files_are_refused(lines: Any, changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(lmstate.ModelError, match=why):
        tokenizer_files(written(tmp_path, lines, **changes))
