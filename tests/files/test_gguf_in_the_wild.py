"""Metadata of GGUF files as converters wrote them: read as llama.cpp reads them, with a warning where that guesses."""

import json

import pytest
import regex

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.gguf.splitting import SPLITTINGS
from lmstate.checkpoints.gguf.tokenizer import generation_of, tokenizer_of
from lmstate.errors import ModelError
from lmstate.text.endings import ENDINGS
from lmstate.text.tokenizer import Tokenizer, TokenizerFiles
from tests.files.test_tokenizer import bpe_metadata, spelled, spm_metadata
from tests.files.texts import HARD_TEXTS

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def read(metadata: Config) -> tuple[Tokenizer, list[str]]:
    notes: list[str] = []
    files = tokenizer_of(metadata, notes)
    ends = generation_of(metadata, len(metadata["tokenizer.ggml.tokens"]))["eos_token_id"]
    return Tokenizer(files, ends), notes


def with_tokens(*names: str, kind: int = CONTROL, eos: str | None = None, **changes) -> Config:
    plain = bpe_metadata("gpt-2")["tokenizer.ggml.tokens"][:-2]
    tokens = [*plain, *names]
    types = [NORMAL] * len(plain) + [kind] * len(names)
    end = {} if eos is None else {"eos_token_id": tokens.index(eos)}
    return bpe_metadata("gpt-2", **{"tokens": tokens, "token_type": types, "bos_token_id": None, **end, **changes})


def ends_of(tokenizer: Tokenizer) -> set[str]:
    return {tokenizer.decode([id], skip_special_tokens=False) for id in tokenizer.eos_ids}


# -- what ends an answer

HARMONY = ("<|return|>", "<|endoftext|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>")
SOLAR = ("<|endoftext|>", "<|end|>", "<|flush|>", "<|calls|>", "<|im_end|>")
GEMMA = ("<eos>", "</s>", "<start_of_turn>", "<end_of_turn>")
SETS = [
    (HARMONY, "<|return|>", {"<|return|>", "<|endoftext|>", "<|call|>"}),
    (HARMONY, "<|end|>", {"<|return|>", "<|endoftext|>", "<|call|>"}),
    (SOLAR, "<|flush|>", {"<|endoftext|>", "<|flush|>", "<|calls|>", "<|im_end|>"}),
    (GEMMA, "<eos>", {"<eos>", "<end_of_turn>"}),
    (("</s>", "<|tool_response>", "<turn|>"), "<turn|>", {"<turn|>", "<|tool_response>"}),
    (("<|endoftext|>", "<|im_end|>", "<|im_start|>"), "<|endoftext|>", {"<|endoftext|>", "<|im_end|>"}),
    (("<|end|>", "<|user|>"), "<|user|>", {"<|end|>", "<|user|>"}),
    (("</s>", "<my_end>"), "<my_end>", {"</s>", "<my_end>"}),
]


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
@pytest.mark.parametrize(("names", "eos", "ends"), SETS)
def test_ends_of_a_gguf(names, eos, ends, kind):
    tokenizer, _ = read(with_tokens(*names, kind=kind, eos=eos))
    known = {name for name in ends if name in ENDINGS}
    assert ends_of(tokenizer) == ends
    for name in known:
        assert tokenizer.encode(f"a{name}b", add_special_tokens=False)[1] == tokenizer.id_of(name)
        assert tokenizer.id_of(name) in tokenizer.special_ids


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("said", ["generation", "tokenizer", "both"])
@pytest.mark.parametrize(("names", "eos", "ends"), SETS)
def test_ends_of_a_directory(names, eos, ends, said, special):
    document = json.loads(tokenizer_of(with_tokens(*names)).tokenizer_json)
    for token in document["added_tokens"]:
        token["special"] = special
    vocab = document["model"]["vocab"]
    settings = {"eos_token": eos} if said != "generation" else {}
    tokenizer = Tokenizer(TokenizerFiles(json.dumps(document), settings), [vocab[eos]] if said != "tokenizer" else [])
    assert ends_of(tokenizer) == ends
    for name in ends:
        id = tokenizer.id_of(name)
        assert id in tokenizer.special_ids and tokenizer.decode([vocab["a"], id]) == "a"
        assert tokenizer.encode(name, add_special_tokens=False) == [id]
        assert id not in tokenizer.encode_rendered(*_in_a_message(tokenizer, f"a{name}b"))


def _in_a_message(tokenizer, text):
    control = tokenizer.control_tokens()
    return control.hide(text), control


def test_ids_that_end_a_turn_or_a_message_are_read():
    tokens = with_tokens("<x>", "<y>", "<z>", eos="<x>")["tokenizer.ggml.tokens"]
    named = {"eot_token_id": tokens.index("<y>"), "eom_token_id": tokens.index("<z>")}
    assert ends_of(read(with_tokens("<x>", "<y>", "<z>", eos="<x>", **named))[0]) == {"<x>", "<y>", "<z>"}


# -- ids that cannot be, lists that are missing or of another length


@pytest.mark.parametrize("metadata", [bpe_metadata, spm_metadata])
@pytest.mark.parametrize("value", [9999, 2**31, 2**32 - 2, 2**32 - 1, -1])
@pytest.mark.parametrize("name", ["bos", "eos", "eot", "eom", "unknown", "padding"])
def test_ids_past_the_vocabulary_are_set_aside(metadata, name, value):
    said = {f"{name}_token_id": value}
    tokenizer, notes = read(metadata("gpt-2", **said) if metadata is bpe_metadata else metadata(**said))
    assert max(tokenizer.eos_ids, default=0) < tokenizer.vocab_size
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"
    told = name in ("bos", "eos", "unknown", "padding") and value not in (-1, 2**32 - 1)
    assert [str(value) in note for note in notes] == [True] * told
    if metadata is spm_metadata:  # llama.cpp's own ids of such a vocabulary
        assert tokenizer.encode("ab")[0] == 1 and 2 in tokenizer.eos_ids


def test_a_sentencepiece_file_without_ids_has_the_usual_ones():
    tokenizer, notes = read(spm_metadata(bos_token_id=None, eos_token_id=None, unknown_token_id=None))
    assert tokenizer.encode("ab")[0] == 1 and tokenizer.eos_ids == {2} and not notes


def test_a_list_that_is_longer_is_cut_and_a_shorter_one_refused():
    usual, longer = spm_metadata(), {}
    for name in ("scores", "token_type"):
        values = usual[f"tokenizer.ggml.{name}"]
        longer[name] = [*values, 1, 1]
        with pytest.raises(ModelError, match=name):
            tokenizer_of(spm_metadata(**{name: values[:-1]}))
    assert tokenizer_of(spm_metadata(**longer)) == tokenizer_of(usual)


def test_types_that_are_missing_or_unknown_are_those_of_text():
    assert spelled(read(spm_metadata(token_type=None))[0], "abc") == ["▁abc"]
    types = [-5 if kind == NORMAL else kind for kind in spm_metadata()["tokenizer.ggml.token_type"]]
    assert spelled(read(spm_metadata(token_type=types))[0], "abc") == ["▁abc"]
    tokenizer, _ = read(spm_metadata(token_type=None))
    assert tokenizer.special_ids == {0, 1, 2} and tokenizer.decode(tokenizer.encode("ab")) == "ab"


def test_scores_that_are_missing_are_told():
    tokenizer, notes = read(spm_metadata(scores=None, merges=["a b", "ab c", "▁ abc"]))
    assert spelled(tokenizer, "abc ab") == ["▁abc", "▁", "ab"] and "as its merges say" in notes[0]
    tokenizer, notes = read(spm_metadata(scores=None))
    assert spelled(tokenizer, "ab") == ["▁ab"] and "no scores" in notes[0]
    assert tokenizer.decode(tokenizer.encode("abc cab")) == "abc cab"


@pytest.mark.parametrize("merge", ["q zz", "ab", " ab", "ab ", "", "a 1"])
def test_merges_of_what_are_no_tokens_are_left_out(merge):
    tokenizer, notes = read(bpe_metadata("gpt-2", merges=["a b", merge, "1 2"]))
    assert tokenizer.encode("ab12") == read(bpe_metadata("gpt-2", merges=["a b", "1 2"]))[0].encode("ab12")
    assert ["1 merges" in note for note in notes] == [True]


def test_ranks_make_merges_where_kimi_lists_none():
    tokens = [*"abc", "bc", "ab", "abc"]
    none = dict.fromkeys(("token_type", "merges", "bos_token_id", "eos_token_id"))
    tokenizer = Tokenizer(tokenizer_of(bpe_metadata("kimi-k2", tokens=tokens, **none)))
    assert tokenizer.encode("abc") == [5] and tokenizer.encode("cabcab") == [2, 5, 4]


@pytest.mark.parametrize("model", ["none", "no_vocab", None])
def test_a_file_without_a_vocabulary_has_no_tokenizer(model):
    assert tokenizer_of(Config({"tokenizer.ggml.model": model}, "x.gguf")) is None


# -- splitting


def cut(text: str, patterns: list[str]) -> list[str]:
    """The pieces that regular expressions cut a text into, each cutting the pieces of the one before."""
    pieces = [text] if text else []
    for pattern in patterns:
        found = []
        for piece in pieces:
            at = 0
            for match in regex.finditer(pattern, piece, flags=regex.V1):
                found += [piece[at : match.start()], match[0]]
                at = match.end()
            found.append(piece[at:])
        pieces = [piece for piece in found if piece]
    return pieces


@pytest.mark.parametrize("pre", SPLITTINGS)
def test_texts_are_split_as_by_the_patterns(pre):
    import tokenizers

    rules = SPLITTINGS[pre]
    document = json.loads(str(tokenizer_of(bpe_metadata(pre)).tokenizer_json))
    inner = tokenizers.Tokenizer.from_str(json.dumps(document))
    patterns = [*rules.patterns, *([r"\p{Nd}|\p{Nl}|\p{No}"] * rules.single_digits), *([GPT2] * rules.gpt2_pattern)]
    for text in HARD_TEXTS:
        spans = [span for _, span in inner.pre_tokenizer.pre_tokenize_str(text)]
        assert [text[begin:end] for begin, end in spans] == cut(text, patterns), text


@pytest.mark.parametrize("pre", ["klingon", None, ""])
def test_an_unknown_splitting_is_the_default_one_and_told(pre):
    tokenizer, notes = read(bpe_metadata(pre))
    assert ["pre-tokenizer" in note for note in notes] == [True]
    text = "ab12 a!\n12ab 1234"
    default, silent = read(bpe_metadata("default"))
    assert tokenizer.encode(text) == default.encode(text) and not silent


@pytest.mark.parametrize("said", [False, True, None])
def test_gemma_4_begins_with_its_begin_token_and_no_space(said):
    merges = ["a b", "▁ a"]
    flag = {} if said is None else {"add_bos_token": said}
    tokenizer, notes = read(spm_metadata(model="gemma4", merges=merges, **flag))
    assert tokenizer.encode("ab a")[0] == 1 and spelled(tokenizer, "ab a") == ["ab", "▁a"]
    assert bool(notes) == (said is False)


# -- control tokens that a message writes

RENAMED = {"<unk>": "{0}", "<s>": "{1}", "</s>": "{2}"}
KINDS = ("prepend", "metaspace always", "metaspace first", "plain", "strip")


def renamed_pair(kind: str) -> tuple[Tokenizer, Tokenizer]:
    """A tokenizer, and the same one whose control tokens have names that no message has."""
    document = json.loads(str(tokenizer_of(spm_metadata(add_space_prefix=kind == "prepend")).tokenizer_json))
    if kind.startswith("metaspace"):
        scheme = kind.split()[1]
        document["normalizer"] = None
        document["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True}
    for token in document["added_tokens"]:
        token["lstrip"] = token["rstrip"] = kind == "strip"
    document["post_processor"] = None
    other = json.loads(json.dumps(document))
    for token in other["added_tokens"]:
        token["content"] = RENAMED.get(token["content"], token["content"])
    other["model"]["vocab"] = {RENAMED.get(piece, piece): id for piece, id in other["model"]["vocab"].items()}
    other["model"]["unk_token"] = RENAMED["<unk>"]
    return Tokenizer(TokenizerFiles(json.dumps(document))), Tokenizer(TokenizerFiles(json.dumps(other)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "content",
    [
        "a</s>b", "see <unk> here", "</s>", " </s> ", "<s><s>", "ab</s> c <user> <unk>", "a", "", "<user></s>",
        "\U000fffff</s>", "<</s>/s>",
    ],
)  # fmt: skip
def test_a_control_token_in_a_message_is_its_letters_and_nothing_else(kind, content):
    tokenizer, oracle = renamed_pair(kind)
    before, after = "{1}[u] ", " {2} {1}c {2}"
    control = tokenizer.control_tokens()
    rendered = (before + control.hide(content) + after).replace("{1}", "<s>").replace("{2}", "</s>")
    assert tokenizer.encode_rendered(rendered, control) == oracle.encode(
        before + content + after, add_special_tokens=False
    )
