"""A tokenizer of bytes with some special tokens: any text, no weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from lmstate.text.tokenizer import Tokenizer, TokenizerFiles

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
START, END = "<|im_start|>", "<|im_end|>"


def save_tokenizer(folder: Path, special: Sequence[str] = (), template: str = TEMPLATE) -> dict[str, str]:
    """Write tokenizer.json: 256 bytes, then `<|im_start|>`, `<|im_end|>` (which ends a text) and `special`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([START, END, *special])
    inner.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": template, "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return settings


def byte_tokenizer(folder: Path, special: Sequence[str] = (), template: str = TEMPLATE) -> Tokenizer:
    settings = save_tokenizer(folder, special, template)
    return Tokenizer(TokenizerFiles(folder / "tokenizer.json", settings))
