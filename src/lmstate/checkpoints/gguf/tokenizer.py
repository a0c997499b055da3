"""The tokenizer inside a GGUF file, as a tokenizer.json: vocabulary, merges, and the splitting rules named by `pre`.

GGUF keeps no normalizer and no pre-tokenizer, only a name for them; the table says what each name means.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from lmstate.checkpoints.config import Config
from lmstate.errors import ModelError
from lmstate.text.tokenizer import TokenizerFiles

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type
MOST_TOKENS = 2**22
LONGEST_PIECE = 256  # characters; a longer SentencePiece piece is never the result of a merge
# Control tokens that end a turn or a text whatever the file calls its end-of-sequence token.
ENDINGS = {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endofturn|>", "<|return|>"}
ENDINGS |= {"<|endoftext|>", "<|end_of_text|>", "<EOT>", "<turn|>"}
# Settings of generation_config.json, and what llama.cpp calls them in a file's metadata.
SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Splitting:
    """Pre-tokenizer of byte-pair merging: patterns in turn, then bytes (with GPT-2's own pattern or without)."""

    patterns: tuple[str, ...] = ()
    single_digits: bool = False
    gpt2_pattern: bool = False
    compose: bool = False  # Unicode NFC first
    whole_words: bool = False  # a piece that is a token as it stands is not merged
    begins: bool = False  # a text begins with the bos token unless the file says otherwise


GPT2 = Splitting(gpt2_pattern=True)
DIGITS = Splitting(single_digits=True, gpt2_pattern=True)
_LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + TAIL
_QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + TAIL
_SEED = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+" + TAIL
_QWEN35 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{0}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{0}}"
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + TAIL
_GPT4O = _CASED.replace("{0}", CONTRACTIONS + "?") + r"|\p{N}{1,3}" + _SYMBOLS
_TEKKEN = _CASED.replace("{0}", "") + r"|\p{N}" + _SYMBOLS
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + TAIL
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+")

SPLITTINGS = {
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "roberta-bpe", "exaone4"), GPT2
    ),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), DIGITS),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        Splitting((_LLAMA3,), whole_words=True, begins=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Splitting((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), Splitting((_QWEN2,), compose=True)),
    **dict.fromkeys(("stablelm2", "hunyuan"), Splitting((_QWEN2,))),
    "qwen35": Splitting((_QWEN35,), compose=True),
    "seed-coder": Splitting((_SEED,)),
    "gpt-4o": Splitting((_GPT4O,)),
    "tekken": Splitting((_TEKKEN,), whole_words=True, begins=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), Splitting((r"\p{N}{1,3}", _CJK, _DEEPSEEK3))),
    "deepseek-coder": Splitting(_DEEPSEEK_CODER, single_digits=True),
}


def tokenizer_of(metadata: Config) -> TokenizerFiles | None:
    """The tokenizer that a GGUF file carries, None if it carries none. `ModelError` for kinds that are not known."""
    if not metadata.given("tokenizer.ggml.model"):
        return None
    model = metadata.str("tokenizer.ggml.model")
    tokens = metadata.strs("tokenizer.ggml.tokens")
    if not 1 <= len(tokens) <= MOST_TOKENS:
        raise ModelError(f"{metadata.where} has a vocabulary of {len(tokens)} tokens")
    types = metadata.ints("tokenizer.ggml.token_type", len(tokens), default=None) or (1,) * len(tokens)
    if model == "gpt2":
        document = _byte_level(metadata, tokens)
    elif model in ("llama", "gemma4"):
        document = _sentencepiece(metadata, tokens)
    else:
        raise ModelError(
            f"{metadata.where} has a tokenizer of kind {model[:80]!r}; lmstate reads gpt2 (byte-level BPE), llama "
            f"and gemma4 (SentencePiece BPE). Use the model's Hugging Face directory, which has a tokenizer.json"
        )
    document["added_tokens"] = [
        {
            "id": index,
            "content": tokens[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind in (CONTROL, UNKNOWN),
        }
        for index, kind in enumerate(types)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and tokens[index]
    ]
    settings = _settings(metadata, tokens)
    begins = metadata.bool("tokenizer.ggml.add_bos_token", default=document.pop("begins"))
    ends = metadata.bool("tokenizer.ggml.add_eos_token", default=False)
    document["post_processor"] = _surround(
        settings.get("bos_token") if begins else None, settings.get("eos_token") if ends else None, tokens, model
    )
    return TokenizerFiles(json.dumps(document, ensure_ascii=False), settings)


def generation_of(metadata: Config, vocab_size: int) -> dict[str, Any]:
    """The generation config of the file: the ids that begin and end a text, and the sampling that is suggested."""
    tokens = metadata.strs("tokenizer.ggml.tokens", default=())
    types = metadata.ints("tokenizer.ggml.token_type", default=())
    ends = {
        metadata.int(f"tokenizer.ggml.{name}_token_id", 0, vocab_size - 1, default=None)
        for name in ("eos", "eot", "eom")
    }
    ends |= {index for index, (token, kind) in enumerate(zip(tokens, types)) if kind == CONTROL and token in ENDINGS}
    defaults: dict[str, Any] = {"eos_token_id": sorted(end for end in ends if end is not None)}
    bos = metadata.int("tokenizer.ggml.bos_token_id", 0, vocab_size - 1, default=None)
    if bos is not None:
        defaults["bos_token_id"] = bos
    said = {ours: metadata.get(f"general.sampling.{theirs}") for ours, theirs in SAMPLING.items()}
    given = {name: value for name, value in said.items() if value is not None}
    draws = bool(given.keys() - {"repetition_penalty"})
    return defaults | given | ({"do_sample": True} if draws else {})


def _settings(metadata: Config, tokens: tuple[str, ...]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata.int(f"tokenizer.ggml.{theirs}_token_id", 0, len(tokens) - 1, default=None)
        if index is not None:
            settings[f"{ours}_token"] = tokens[index]
    template = metadata.str("tokenizer.chat_template", default=None)
    if template is not None:
        settings["chat_template"] = template
    return settings


def _document(model: dict[str, Any]) -> dict[str, Any]:
    return {"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "model": model}


def _vocabulary(tokens: tuple[str, ...]) -> dict[str, int]:
    """Token -> id. Of a token that stands twice the first counts; the second is padding of the vocabulary."""
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocabulary.setdefault(token, index)
    return vocabulary


def _byte_level(metadata: Config, tokens: tuple[str, ...]) -> dict[str, Any]:
    pre = metadata.str("tokenizer.ggml.pre", default="gpt-2")
    if pre not in SPLITTINGS:
        raise ModelError(
            f"{metadata.where} names the pre-tokenizer {pre[:80]!r}, whose splitting rules lmstate does not know; it "
            f"knows {', '.join(sorted(SPLITTINGS))}. Use the model's Hugging Face directory, which has a tokenizer.json"
        )
    rules = SPLITTINGS[pre]
    document = _document(
        {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": rules.whole_words,
            "vocab": _vocabulary(tokens),
            "merges": _listed_merges(metadata),
        }
    )
    if rules.compose:
        document["normalizer"] = {"type": "NFC"}
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in rules.patterns
    ]
    if rules.single_digits:
        steps.append({"type": "Digits", "individual_digits": True})
    steps.append(_bytes(rules.gpt2_pattern))
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    document["decoder"] = _bytes(True)
    document["begins"] = rules.begins
    return document


def _listed_merges(metadata: Config) -> list[tuple[str, str]]:
    merges = []
    for merge in metadata.strs("tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise ModelError(f"{metadata.where} has {merge[:80]!r} among its merges, which is no pair of pieces")
        merges.append((left, right))
    return merges


def _bytes(gpt2_pattern: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": gpt2_pattern}


def _sentencepiece(metadata: Config, tokens: tuple[str, ...]) -> dict[str, Any]:
    vocabulary = _vocabulary(tokens)
    if metadata.str("tokenizer.ggml.model") == "gemma4":
        merges = _listed_merges(metadata)
    else:  # there may be a list, which nobody follows
        merges = _merges(vocabulary, metadata.floats("tokenizer.ggml.scores", len(tokens)))
    unknown = metadata.int("tokenizer.ggml.unknown_token_id", 0, len(tokens) - 1, default=None)
    document = _document(
        {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None else tokens[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        }
    )
    prefix = metadata.bool("tokenizer.ggml.add_space_prefix", default=True)
    blank: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    begin: list[dict[str, Any]] = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    document["normalizer"] = {"type": "Sequence", "normalizers": [*begin, blank]}
    document["pre_tokenizer"] = None
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    document["decoder"] = {"type": "Sequence", "decoders": steps}
    document["begins"] = True
    return document


def _merges(vocabulary: dict[str, int], scores: tuple[float, ...]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbors whose joint piece scores best: every split of every piece, best first."""
    ranked = sorted(vocabulary.items(), key=lambda item: (-scores[item[1]], item[1]))
    return [
        (piece[:cut], piece[cut:])
        for piece, _ in ranked
        if len(piece) <= LONGEST_PIECE
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]


def _surround(begin: str | None, end: str | None, tokens: tuple[str, ...], model: str) -> dict[str, Any] | None:
    """The post-processor that puts the begin and end tokens around a text."""
    offsets = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    if begin is None and end is None:
        return offsets if model == "gpt2" else None
    text: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    first: list[dict[str, Any]] = [] if begin is None else [{"SpecialToken": {"id": begin, "type_id": 0}}]
    last: list[dict[str, Any]] = [] if end is None else [{"SpecialToken": {"id": end, "type_id": 0}}]
    specials = {
        token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]}
        for token in (begin, end)
        if token is not None
    }
    pair = [*first, *text, *last, {"Sequence": {"id": "B", "type_id": 0}}, *last]
    return {"type": "TemplateProcessing", "single": [*first, *text, *last], "pair": pair, "special_tokens": specials}
