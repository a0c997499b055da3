"""Pre-tokenizers of byte-level vocabularies: what each name in `tokenizer.ggml.pre` means.

GGUF keeps no pre-tokenizer, only a name for it. The names and their rules are those of llama.cpp (llama-vocab.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.tokenizer_json import byte_level, split

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LINES = r"|\s*[\r\n]+"
TAIL = LINES + r"|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Splitting:
    """Pre-tokenizer of byte-pair merging: patterns in turn, then bytes (with GPT-2's own pattern or without)."""

    patterns: tuple[str, ...] = ()
    single_digits: bool = False
    gpt2_pattern: bool = False
    compose: bool = False  # Unicode NFC first
    whole_words: bool = False  # a piece that is a token as it stands is not merged
    begins: bool = False  # a text begins with the bos token unless the file says otherwise

    def normalizer(self) -> dict[str, Any] | None:
        """The normalizer of a tokenizer.json."""
        return {"type": "NFC"} if self.compose else None

    def pre_tokenizer(self) -> dict[str, Any]:
        """The pre-tokenizer of a tokenizer.json."""
        steps: list[dict[str, Any]] = [split(pattern) for pattern in self.patterns]
        if self.single_digits:
            steps.append({"type": "Digits", "individual_digits": True})
        return {"type": "Sequence", "pretokenizers": [*steps, byte_level(self.gpt2_pattern)]}


def _words(letters: str, digits: str, symbols: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*", tail: str = TAIL) -> str:
    return rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}|{symbols}{tail}"


def _cased(suffix: str, digits: str, without: str = "") -> str:
    """Words that a capital begins: letters other than lower case, then letters other than upper case."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    begin = r"[^\r\n\p{L}\p{N}]?"
    return rf"{begin}{upper}*{lower}+{suffix}|{begin}{upper}+{lower}*{suffix}|{digits}"


GPT2 = Splitting(gpt2_pattern=True)
DIGITS = Splitting(single_digits=True, gpt2_pattern=True)
# The splitting that llama.cpp takes for a file that names none.
DEFAULT = Splitting(
    (
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        "[0-9][0-9][0-9]",
    )
)
_LLAMA3 = _words(r"\p{L}+", r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{L}+", r"\p{N}")
_SEED = _words(r"\p{L}+", r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+")
_QWEN35 = _words(r"[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*")
_EXAONE_MOE = _words(
    r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]?", r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BAILING = _QWEN2.replace(LINES, r"|\s*[\r\n]")
_RUNS = "".join(rf"|\s{{{run}}}(?!\S)" for run in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + r"|\s{1}"
_JAIS2 = _words(r"\p{L}+", r"\p{N}{1,3}", tail=LINES + _RUNS)
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + TAIL
_GPT4O = _cased(CONTRACTIONS + "?", r"\p{N}{1,3}") + _SYMBOLS
_GPT4O_DIGITS = _cased(CONTRACTIONS + "?", r"\p{N}") + _SYMBOLS
_TEKKEN = _cased("", r"\p{N}") + _SYMBOLS
_KIMI = r"\p{Han}+|" + _cased(CONTRACTIONS + "?", r"\p{N}{1,3}", r"&&[^\p{Han}]") + _SYMBOLS.replace("/]", "]")
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_HANGUL_CJK = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    "\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + _CJK
)
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
_DEEPSEEK3 = _DEEPSEEK_WORDS + r"[\r\n]*" + TAIL
_SPARK = _DEEPSEEK_WORDS + r"|[\r\n]|\s+(?!\S)|\s+"
_OLD_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _OLD_CJK)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _OLD_CJK,
    r"\p{N}+",
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_THOUSANDS = r"\d{1,3}(?=(?:\d{3})*\b)"  # digits by threes, from the right

SPLITTINGS = {
    "default": DEFAULT,
    **dict.fromkeys(
        (
            *("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "roberta-bpe", "exaone4"),
            *("gigachat", "a.x-4.0", "mellum", "modern-bert", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de"),
            *("jina-v1-en", "jina-v2-code"),
        ),
        GPT2,
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), DIGITS
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        Splitting((_LLAMA3,), whole_words=True, begins=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Splitting((_LLAMA3,))),
    "minicpm5": Splitting((r"\p{N}{1,3}", _words(r"\p{L}+", r"\p{N}+")), whole_words=True),
    "jais-2": Splitting((_JAIS2,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2"), Splitting((_QWEN2,), compose=True)),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), Splitting((_QWEN2,))),
    "ufakzeka": Splitting((_QWEN2.removeprefix(CONTRACTIONS + "|"),)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), Splitting((_BAILING,))),
    "laguna": Splitting((r"[^\n]+|[\n]+", _QWEN2)),
    "qwen35": Splitting((_QWEN35,), compose=True),
    "exaone-moe": Splitting((_EXAONE_MOE,)),
    "seed-coder": Splitting((_SEED,)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "inkling"), Splitting((_GPT4O,))),
    "granite-embed-multi-97m": Splitting((_GPT4O,), whole_words=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), Splitting((_THOUSANDS, _GPT4O_DIGITS))),
    "superbpe": Splitting((r"\p{N}+", _THOUSANDS)),
    "youtu": Splitting((_HANGUL_CJK, _GPT4O_DIGITS), whole_words=True),
    "tekken": Splitting((_TEKKEN,), whole_words=True, begins=True),
    "kimi-k2": Splitting((_KIMI,), whole_words=True),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), Splitting((r"\p{N}{1,3}", _CJK, _DEEPSEEK3))
    ),
    "spark2_5": Splitting((r"\p{N}{1,3}", _CJK, _SPARK, r"\p{N}")),
    "afmoe": Splitting((r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _ASIAN, _DEEPSEEK3)),
    "deepseek-coder": Splitting(_DEEPSEEK_CODER, single_digits=True),
    "deepseek-llm": Splitting(_DEEPSEEK_LLM),
    "falcon": Splitting((r"[\p{P}\$\+<=>\^~\|`]+", DEFAULT.patterns[1], "[0-9][0-9][0-9]")),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), Splitting((_BLOOM,))),
    "viking": Splitting((_BLOOM, r"\p{N}")),
}
# Names of splittings that do not work on bytes: spaces are U+2581, and merges are listed.
WITHOUT_BYTES = ("gemma4", "sarvam-moe", "granite-embed-multi-311m")


def splitting_of(metadata: Config, notes: list[str]) -> Splitting:
    """The splitting that a byte-level file names. Without one, or with an unknown one, llama.cpp's default, noted."""
    pre = metadata.str("tokenizer.ggml.pre", default="")
    if pre in SPLITTINGS:
        return SPLITTINGS[pre]
    said = f"names the pre-tokenizer {pre[:80]!r}, which is unknown" if pre else "names no pre-tokenizer"
    notes.append(
        f"the file {said}; text is split by default rules, and answers may be worse. Convert the model again with a "
        "newer converter, or use its Hugging Face directory"
    )
    return DEFAULT
