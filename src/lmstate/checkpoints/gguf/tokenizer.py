"""The tokenizer inside a GGUF file, as a tokenizer.json: vocabulary, merges, and the splitting rules named by `pre`.

Where files in the wild are wrong or say too little, it is read as llama.cpp reads it, and a note says so.
"""

from __future__ import annotations

import base64
import json
from typing import Any, TypeVar

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.gguf.special_ids import special_id
from lmstate.checkpoints.gguf.splitting import WITHOUT_BYTES, splitting_of
from lmstate.checkpoints.longest_match import TEMPLATE as WORLD_TEMPLATE
from lmstate.checkpoints.longest_match import longest_match, unescaped
from lmstate.checkpoints.tokenizer_json import added_token, all_splits, byte_level, document, surrounding
from lmstate.errors import ModelError
from lmstate.text.endings import CONTROL_NAME, ENDINGS, end_ids
from lmstate.text.tokenizer import TokenizerFiles

T = TypeVar("T")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # values of tokenizer.ggml.token_type
MOST_TOKENS = 2**22
POOLINGS = {1: "mean", 2: "cls", 3: "last", 4: "rank"}  # llama.cpp's enum llama_pooling_type
# Settings of generation_config.json, and what llama.cpp calls them in a file's metadata.
SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}

NONE = ("none", "no_vocab")  # kinds of tokenizer of files that have none


def tokenizer_of(metadata: Config, notes: list[str] | None = None) -> TokenizerFiles | None:
    """The tokenizer that a GGUF file carries, None if it carries none. `ModelError` for kinds that are not known.

    `notes`: gets a line for each thing that the file leaves out or has wrong, and that was guessed.
    """
    notes = [] if notes is None else notes
    model = metadata.str("tokenizer.ggml.model", default=NONE[0])
    if model in NONE:
        return None
    tokens = metadata.strs("tokenizer.ggml.tokens")
    if not 1 <= len(tokens) <= MOST_TOKENS:
        raise ModelError(f"{metadata.where} has a vocabulary of {len(tokens)} tokens")
    vocabulary = _vocabulary(tokens)
    types = _types(metadata, tokens, vocabulary)
    pre = "gemma4" if model == "gemma4" else metadata.str("tokenizer.ggml.pre", default="")
    if model == "gpt2" and pre not in WITHOUT_BYTES:
        made = _byte_level(metadata, vocabulary, notes)
    elif model in ("gpt2", "gemma4"):
        made = _sentencepiece(metadata, tokens, vocabulary, _listed_merges(metadata, vocabulary, notes), False)
    elif model == "llama":
        made = _sentencepiece(metadata, tokens, vocabulary, _scored_merges(metadata, vocabulary, notes), True)
    elif model == "t5":
        made = _unigram(metadata, tokens, types)
    elif model == "rwkv":
        made = _longest_match(metadata, tokens, types, vocabulary)
    else:
        raise ModelError(
            f"{metadata.where} has a tokenizer of kind {model[:80]!r}; lmstate reads gpt2 (byte-level BPE), llama, "
            f"gemma4 (SentencePiece BPE), t5 (SentencePiece unigrams) and rwkv (the longest token at each place). Use "
            f"the model's Hugging Face directory, which has a tokenizer.json"
        )
    made["added_tokens"] = [
        added_token(index, tokens[index], kind in (CONTROL, UNKNOWN))
        for index, kind in enumerate(types)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and tokens[index]
    ]
    settings = _settings(metadata, tokens, notes)
    begins = metadata.bool("tokenizer.ggml.add_bos_token", default=made.pop("begins"))
    if pre == "gemma4" and not begins:
        notes.append("the file says that texts begin without a begin token; Gemma 4 needs one, and gets it")
        begins = True
    ends = metadata.bool("tokenizer.ggml.add_eos_token", default=model == "t5")
    begin, end = settings.get("bos_token") if begins else None, settings.get("eos_token") if ends else None
    if begin is not None or end is not None:
        made["post_processor"] = surrounding(begin, end, vocabulary)
    elif model == "gpt2":
        made["post_processor"] = byte_level(True) | {"add_prefix_space": True, "trim_offsets": False}
    return TokenizerFiles(json.dumps(made, ensure_ascii=False), settings)


def generation_of(metadata: Config, vocab_size: int) -> dict[str, Any]:
    """The generation config of the file: the ids that begin and end a text, and the sampling that is suggested."""
    tokens = _vocabulary(metadata.strs("tokenizer.ggml.tokens", default=()))
    ids = {name: special_id(metadata, name, vocab_size) for name in ("bos", "eos", "eot", "eom")}
    bos = ids.pop("bos")
    ends = end_ids({id for id in ids.values() if id is not None}, tokens.get)
    defaults: dict[str, Any] = {"eos_token_id": sorted(ends)}
    if bos is not None:
        defaults["bos_token_id"] = bos
    pooling = metadata.int(f"{metadata.str('general.architecture', default='')}.pooling_type", default=0)
    if pooling:
        defaults["pooling"] = POOLINGS.get(pooling, f"type {pooling}")
    said = {ours: metadata.get(f"general.sampling.{theirs}") for ours, theirs in SAMPLING.items()}
    given = {name: value for name, value in said.items() if value is not None}
    draws = bool(given.keys() - {"repetition_penalty"})
    return defaults | given | ({"do_sample": True} if draws else {})


def _settings(metadata: Config, tokens: tuple[str, ...], notes: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = special_id(metadata, theirs, len(tokens), notes)
        if index is not None:
            settings[f"{ours}_token"] = tokens[index]
    template = metadata.str("tokenizer.chat_template", default=None)
    tool_use = metadata.str("tokenizer.chat_template.tool_use", default=None)
    if template == "rwkv-world":  # a name, of what llama.cpp writes itself
        template = WORLD_TEMPLATE
    if template is not None:
        settings["chat_template"] = template
    if tool_use is not None:
        names = {"default": template, "tool_use": tool_use}
        settings["chat_template"] = [{"name": name, "template": text} for name, text in names.items()]
    return settings


def _types(metadata: Config, tokens: tuple[str, ...], vocabulary: dict[str, int]) -> list[int]:
    """The type of each token. Tokens that end a turn, or look like control tokens, count as control tokens.

    In a file without types, so are the special tokens that it names.
    """
    given = metadata.ints("tokenizer.ggml.token_type", low=-(2**31), default=None)
    types = [NORMAL] * len(tokens) if given is None else list(_for_each(given, tokens, "token_type", metadata))
    if given is None:
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
            index = special_id(metadata, name, len(tokens))
            if index is not None:
                types[index] = CONTROL
    ends = end_ids(set(), vocabulary.get)
    for token, index in vocabulary.items():
        ending = token in ENDINGS and (token != "</s>" or index in ends)
        if (ending and types[index] != UNKNOWN) or (types[index] == NORMAL and CONTROL_NAME.fullmatch(token)):
            types[index] = CONTROL
    return types


def _for_each(values: tuple[T, ...], tokens: tuple[str, ...], name: str, metadata: Config) -> tuple[T, ...]:
    """A value for each token, of a list that may be longer. Raises `ModelError` for one that is shorter."""
    if len(values) < len(tokens):
        raise ModelError(
            f"{metadata.where} has {len(values)} values in 'tokenizer.ggml.{name}' for {len(tokens)} tokens"
        )
    return values[: len(tokens)]


def _vocabulary(tokens: tuple[str, ...]) -> dict[str, int]:
    """Token -> id. Of a token that stands twice the first counts; the second is padding of the vocabulary."""
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocabulary.setdefault(token, index)
    return vocabulary


def _byte_level(metadata: Config, vocabulary: dict[str, int], notes: list[str]) -> dict[str, Any]:
    rules = splitting_of(metadata, notes)
    if metadata.get("tokenizer.ggml.pre") == "kimi-k2" and not metadata.given("tokenizer.ggml.merges"):
        merges = all_splits(vocabulary, {})
    else:
        merges = _listed_merges(metadata, vocabulary, notes)
    made = document(vocabulary, merges, ignore_merges=rules.whole_words)
    made["normalizer"] = rules.normalizer()
    made["pre_tokenizer"] = rules.pre_tokenizer()
    made["decoder"] = byte_level(True)
    made["begins"] = rules.begins
    return made


def _listed_merges(metadata: Config, vocabulary: dict[str, int], notes: list[str]) -> list[tuple[str, str]]:
    """The merges of the file, without those of pieces that the vocabulary does not have."""
    merges, unknown = [], 0
    for merge in metadata.strs("tokenizer.ggml.merges"):
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if cut > 0 and left in vocabulary and right in vocabulary and left + right in vocabulary:
            merges.append((left, right))
        else:
            unknown += 1
    if unknown:
        notes.append(f"{unknown} merges of the vocabulary join unknown tokens; they are ignored")
    return merges


def _sentencepiece(
    metadata: Config, tokens: tuple[str, ...], vocabulary: dict[str, int], merges: list[tuple[str, str]], prefix: bool
) -> dict[str, Any]:
    """`prefix`: whether a text begins with a space unless the file says otherwise."""
    unknown = special_id(metadata, "unknown", len(tokens))
    made = document(
        vocabulary,
        merges,
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    prefix = metadata.bool("tokenizer.ggml.add_space_prefix", default=prefix)
    blank: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    begin: list[dict[str, Any]] = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    made["normalizer"] = {"type": "Sequence", "normalizers": [*begin, blank]}
    made["pre_tokenizer"] = None
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    made["decoder"] = {"type": "Sequence", "decoders": steps}
    made["begins"] = True
    return made


def _longest_match(
    metadata: Config, tokens: tuple[str, ...], types: list[int], vocabulary: dict[str, int]
) -> dict[str, Any]:
    texts = {index: unescaped(token) for index, token in enumerate(tokens) if types[index] == NORMAL}
    others = {token: index for token, index in vocabulary.items() if types[index] != NORMAL}
    return longest_match(texts, metadata.where, others) | {"begins": False}


def _unigram(metadata: Config, tokens: tuple[str, ...], types: list[int]) -> dict[str, Any]:
    """SentencePiece's unigrams: a text is the pieces with the highest sum of scores."""
    scores = _for_each(metadata.floats("tokenizer.ggml.scores"), tokens, "scores", metadata)
    made = document({}, [])
    made["model"] = {
        "type": "Unigram",
        "unk_id": special_id(metadata, "unknown", len(tokens)),
        "vocab": [[token, score] for token, score in zip(tokens, scores)],
        "byte_fallback": BYTE in types,
    }
    steps: list[dict[str, Any]] = []
    if table := metadata.ints("tokenizer.ggml.precompiled_charsmap", low=-128, high=255, default=()):  # signed or not
        table_bytes = bytes(byte & 255 for byte in table)
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table_bytes).decode()})
    if metadata.bool("tokenizer.ggml.remove_extra_whitespaces", default=True):
        outer, inner = {"Regex": "^ +| +$"}, {"Regex": " {2,}"}
        steps.append({"type": "Replace", "pattern": outer, "content": ""})
        steps.append({"type": "Replace", "pattern": inner, "content": " "})
    prefix = metadata.bool("tokenizer.ggml.add_space_prefix", default=True)
    if prefix:
        steps.append({"type": "Prepend", "prepend": "▁"})
    blank = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": True}
    made["normalizer"] = {"type": "Sequence", "normalizers": steps}
    made["pre_tokenizer"] = blank
    spoken = blank | {"prepend_scheme": "always" if prefix else "never"}
    made["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, spoken]}
    made["begins"] = False
    return made


def _scored_merges(metadata: Config, vocabulary: dict[str, int], notes: list[str]) -> list[tuple[str, str]]:
    """The merges that the scores of the pieces stand for. A file without scores may list merges, which are followed."""
    scores = metadata.floats("tokenizer.ggml.scores", default=None)
    if scores is not None:
        scores = _for_each(scores, metadata.strs("tokenizer.ggml.tokens"), "scores", metadata)
        return all_splits(vocabulary, dict(enumerate(scores)))
    listed = metadata.given("tokenizer.ggml.merges")
    notes.append(
        "the file gives no scores of its pieces; they are joined "
        + ("as its merges say" if listed else "in the order of the vocabulary, and answers may be worse")
    )
    return _listed_merges(metadata, vocabulary, notes) if listed else all_splits(vocabulary, {})
