"""A small model with a tokenizer: characters, a few pairs of them, and a chat template."""

from __future__ import annotations

import string
from dataclasses import replace
from functools import cache

import lmstate
from lmstate.text.tokenizer import Tokenizer, TokenizerFiles
from tests.zoo import VOCAB, ours

END = 2
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
THINKING = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}!</think> "
    "{% endif %}{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}[assistant]<think>{% endif %}"
)
MERGES = ["a b", "c d", "e f", "0 1", "2 3", "ab cd"]


def tokenizer(template: str = TEMPLATE) -> Tokenizer:
    import tokenizers
    from tokenizers import decoders, models

    pairs = [merge.replace(" ", "") for merge in MERGES]
    characters = [*string.ascii_letters, *string.digits, *" .,!?[]<>()-+*/=:"]
    vocab = {token: index for index, token in enumerate(["<pad>", "<s>", "<end>", *pairs, *characters][:VOCAB])}
    inner = tokenizers.Tokenizer(models.BPE(vocab, [tuple(merge.split()) for merge in MERGES]))
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(["<pad>", "<s>", "<end>"])
    settings = {"chat_template": template, "eos_token": "<end>", "bos_token": "<s>"}
    return Tokenizer(TokenizerFiles(inner.to_str(), settings))


@cache
def thinking(case: str = "llama") -> lmstate.Model:
    """A model whose template opens a thinking section, and ends one with "!</think> "."""
    return replace(ours(case), _tokenizer=tokenizer(THINKING), eos_ids=frozenset({END}))


@cache
def chatting(case: str = "llama") -> lmstate.Model:
    return replace(ours(case), _tokenizer=tokenizer(), eos_ids=frozenset({END}))
