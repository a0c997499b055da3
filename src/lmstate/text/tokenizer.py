"""Text to token ids and back, and conversations to text: the tokenizer that comes with a checkpoint."""

from __future__ import annotations

import base64
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from lmstate.errors import ModelError
from lmstate.files.json_object import MOST_BYTES
from lmstate.text.control_tokens import ControlTokens, control_pattern
from lmstate.text.endings import end_ids
from lmstate.text.literal import LiteralTokenizer
from lmstate.text.nesting import refuse_deep

if TYPE_CHECKING:
    import tokenizers

    from lmstate.text.chat_template import ChatTemplate

BROKEN = "\ufffd"  # in decoded text, in place of bytes that are not UTF-8, or not yet
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
LONG = 2**14  # characters or ids that take so long that other threads are to run meanwhile
VERY_LONG = 2**18  # characters of a text that is encoded by itself: it takes up to a hundred bytes of memory for each
_ENCODING = Lock()
MOST_IDS = 2**22  # an id past this is of no vocabulary
MOST_GROWTH, MOST_STEPS = 256, 1000  # of a normalizer or a decoder: how much longer it makes a text; its parts

Message = Mapping[str, Any]


class Tokenizer:
    """The tokenizer of one checkpoint.

    `eos_ids` are the ids that end a text, as generation_config.json or the GGUF file gives them. The tokenizer's own
    end token ends one too, and so do tokens with the name of an end (`ENDINGS`). Raises `ModelError` for files that
    make no tokenizer.
    """

    def __init__(self, files: TokenizerFiles, eos_ids: Iterable[int] = ()) -> None:
        self._settings = files.settings
        self._inner = _build(files.tokenizer_json)
        self._special = {
            name: text for name in files.settings if name.endswith("_token") and (text := self._token_text(name))
        }
        own = self.id_of(self._special["eos_token"]) if "eos_token" in self._special else None
        self.eos_ids = end_ids({*eos_ids, *(() if own is None else (own,))}, self.id_of)
        self._templates: dict[bool, ChatTemplate] = {}  # for conversations without tools, and with them
        self._mark_special()
        self.bos_id = self.id_of(self._special["bos_token"]) if "bos_token" in self._special else None

    def _mark_special(self) -> None:
        """Make what ends a text a control token, also where the files call it text that was added."""
        added = self._inner.get_added_tokens_decoder()
        plain = [token for id, token in added.items() if id in self.eos_ids and not token.special]
        for token in plain:
            token.special = True
        self._inner.add_special_tokens(plain)

    def __repr__(self) -> str:
        ends = ", ".join(self._inner.id_to_token(id) or str(id) for id in sorted(self.eos_ids))
        template = "a chat template" if self.has_chat_template else "no chat template"
        return f"Tokenizer({self.vocab_size:,} tokens, ends {ends or 'none'}, {template})"

    @property
    def vocab_size(self) -> int:
        """Tokens that have a text, added ones included. A model's logits may be padded to more."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of every token by its text in the vocabulary, added ones included."""
        return self._inner.get_vocab(with_added_tokens=True)

    def to_json(self) -> str:
        """The tokenizer.json of this tokenizer: what other programs that know the format need of it."""
        return self._inner.to_str()

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of tokens that have no text of their own, which `decode` leaves out."""
        added = self._inner.get_added_tokens_decoder()
        return frozenset(id for id, token in added.items() if token.special or id in self.eos_ids)

    def id_of(self, token: str) -> int | None:
        """The id of a token given by its text in the vocabulary (`<|im_end|>`), None if there is none."""
        return self._inner.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, with the begin and end tokens that the model expects around it unless told otherwise.

        A special token written in the text becomes that token; in the messages of `chat` it does not.
        Raises ValueError for anything but a text.
        """
        if not isinstance(text, str):
            raise ValueError(f"encode takes a text; it was given {text!r:.80} ({type(text).__name__})")
        return _ids(self._inner, text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids. Those past the vocabulary have none: logits may be padded.

        Raises ValueError for anything but whole numbers, for negative ids and for those past any vocabulary.
        """
        try:
            ids = [operator.index(token) for token in ids]
        except TypeError:
            raise ValueError(f"decode takes a list of token ids; {ids!r:.80} was given") from None
        if ids and (min(ids) < 0 or max(ids) >= max(MOST_IDS, 2 * self.vocab_size)):
            raise ValueError(
                f"token ids are whole numbers from 0 to {self.vocab_size - 1}; got {min(ids)} to {max(ids)}"
            )
        return self._decoded(ids, skip_special_tokens)

    def _decoded(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """`decode` without its checks, as for the ids that a model chose."""
        with _told("decode"):
            if len(ids) < LONG:
                return self._inner.decode(ids, skip_special_tokens=skip_special_tokens)
            (text,) = self._inner.decode_batch([ids], skip_special_tokens=skip_special_tokens)  # see `_ids`
            return text

    def chat_text(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        """A conversation as the text that the model was trained on: `[{"role": "user", "content": "..."}, ...]`.

        `variables` are those that some templates know (`tools`, `enable_thinking`, ...). Raises `ModelError` if the
        model has no chat template, or the template refuses the conversation or writes nothing for it.
        """
        text = self._chat_template(bool(variables.get("tools"))).render(
            messages, add_generation_prompt=add_generation_prompt, **{"tools": None, **self._special, **variables}
        )
        if messages and not text:
            raise ModelError(
                "the model's chat template is empty, or writes nothing for this conversation; "
                "give the model a plain prompt instead"
            )
        return text

    def chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        control_tokens: bool = False,
        **variables: Any,
    ) -> list[int]:
        """The ids of `chat_text`: a template writes its own begin tokens.

        A control token (`<|im_end|>`, say) that is written in the content of a message is plain text there: it neither
        ends a turn nor begins one. With `control_tokens=True` it becomes that token. Raises ValueError for anything but
        messages, and for messages that are nested too deep.
        """
        if not isinstance(messages, Iterable) or not all(isinstance(message, Mapping) for message in messages):
            raise ValueError(f'chat takes messages, [{{"role": "user", "content": "..."}}]; {messages!r:.80} was given')
        refuse_deep(messages)
        if control_tokens:
            return self.encode(self.chat_text(messages, add_generation_prompt, **variables), add_special_tokens=False)
        control = self.control_tokens()
        messages = control.hide(messages)
        return self.encode_rendered(self.chat_text(messages, add_generation_prompt, **variables), control)

    def control_tokens(self) -> ControlTokens:
        """An empty set of hidden control tokens, for the texts of one conversation and `encode_rendered`."""
        return ControlTokens(self._control_pattern)

    def encode_rendered(self, text: str, control: ControlTokens) -> list[int]:
        """The ids of a template's text; what `control` hid in the messages is plain text. Raises ValueError."""
        pieces = list(control.pieces(control.rendered(text)))
        if not any(literal for _, literal in pieces):
            return self.encode("".join(piece for piece, _ in pieces), add_special_tokens=False)
        return self._literal.ids(_ids(self._literal.inner, self._literal.text(pieces), add_special_tokens=False))

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        return control_pattern(token for id in self.special_ids if (token := self._inner.id_to_token(id)) is not None)

    @cached_property
    def _literal(self) -> LiteralTokenizer:
        """Another tokenizer: threads share the first."""
        return LiteralTokenizer(self._inner, self._control_pattern)

    @property
    def has_chat_template(self) -> bool:
        return self.template_source is not None

    @property
    def template_source(self) -> str | None:
        """The chat template that came with the checkpoint, as Jinja; None if it has none."""
        return self.template_for(tools=False)

    def template_for(self, tools: bool) -> str | None:
        """The chat template, of several the one named `tool_use` for conversations with tools, else `default`."""
        value = self._settings.get("chat_template")
        if isinstance(value, list):  # several, by name
            named = {item.get("name"): item.get("template") for item in value if _is_named(item)}
            value = (named.get("tool_use") if tools else None) or named.get("default")
        if value is not None and not isinstance(value, str):
            raise ModelError(f"the tokenizer's chat_template is a {type(value).__name__}; it must be a text")
        return value

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """A decoder for ids that come one by one."""
        silent = self.special_ids if skip_special_tokens else frozenset()
        return TextStream(lambda ids: self._decoded(ids, skip_special_tokens), self._byte_ids, silent)

    @cached_property
    def _byte_ids(self) -> frozenset[int]:
        """The ids of tokens `<0x..>` that the decoder joins to runs of bytes; empty if it does not."""
        decoder = self._inner.decoder
        if decoder is None or b'"ByteFallback"' not in decoder.__getstate__():
            return frozenset()
        return frozenset(id for token, id in self.vocabulary.items() if BYTE_TOKEN.fullmatch(token))

    def _chat_template(self, tools: bool) -> ChatTemplate:
        from lmstate.text.chat_template import ChatTemplate

        if tools in self._templates:
            return self._templates[tools]
        source = self.template_for(tools)
        if source is None:
            raise ModelError(
                "this model has no chat template (it may be a base model, not one tuned for chat); "
                "give it a plain prompt instead"
            )
        self._templates[tools] = ChatTemplate(source)
        return self._templates[tools]

    def _token_text(self, name: str) -> str | None:
        """The text of `bos_token` and the like, which files give as a string or as an object with its properties."""
        value = self._settings[name]
        if isinstance(value, dict):
            value = value.get("content")
        return value if isinstance(value, str) else None


class TextStream:
    """Text of ids that come one by one: never half a character, never a lost space.

    The pieces joined are what `decode` gives for all ids. A token's text can depend on its left neighbors (a leading
    space is dropped at the beginning only), so the tokens since the last piece are decoded again with those of that
    piece. Text that a later token can change is held back:

    - A run of byte tokens (SentencePiece's byte fallback) is decoded as one, and one bad byte breaks every character of
      it. So the run is held until a token with a text of its own ends it; tokens that are left out do not.
    - Elsewhere only the last broken character can still become a whole one.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        byte_ids: frozenset[int] = frozenset(),
        silent_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`byte_ids`: of tokens that are one byte of a run; `silent_ids`: of those that `decode` leaves out."""
        self._decode, self._bytes, self._silent = decode, byte_ids, silent_ids
        self._window: list[int] = []  # the tokens of the last piece given out, and those since
        self._given = ""  # the text of the window that was given out already
        self._fresh = 0  # tokens of the window since the last piece

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        if token in self._silent:
            return ""
        self._window.append(token)
        self._fresh += 1
        if token in self._bytes:
            return ""
        text = self._decode(self._window)
        if text.endswith(BROKEN):
            return self._give(text[:-1])
        piece = self._give(text)
        if piece:
            # The window shrinks to the tokens of this piece: enough to decode what follows in its context.
            self._window = self._window[-self._fresh :]
            self._given = self._decode(self._window)
            self._fresh = 0
        return piece

    def follow(self, tokens: Iterable[int]) -> None:
        """Go on after these tokens. Their text is not returned, but for an unfinished character at their end."""
        for token in tokens:
            self.push(token)
        self._given = self._decode(self._window).rstrip(BROKEN)

    def flush(self) -> str:
        """Return the text still held back, as it is if no more tokens come: broken characters are U+FFFD."""
        text = self._decode(self._window)
        piece = self._give(text)
        # Any further text goes on after whole characters.
        self._window = [] if text.endswith(BROKEN) else self._window[-self._fresh :]
        self._given, self._fresh = self._decode(self._window), 0
        return piece

    def _give(self, text: str) -> str:
        """Text of the window that was not returned yet."""
        piece = text[len(self._given) :]
        self._given = text if piece else self._given
        return piece


def _ids(inner: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has half a surrogate pair at character {error.start}, which is not Unicode"
        ) from error
    with _told("encode"):
        if len(text) < LONG:
            return list(inner.encode(text, add_special_tokens=add_special_tokens).ids)
        # Other threads run while a batch is encoded, and wait while a text is: more than a second for a megabyte.
        alone: AbstractContextManager[Any] = _ENCODING if len(text) >= VERY_LONG else nullcontext()
        with alone:
            (encoding,) = inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(encoding.ids)


def _build(source: Path | str) -> tokenizers.Tokenizer:
    import tokenizers

    if isinstance(source, Path):
        if source.stat().st_size > MOST_BYTES:
            raise ModelError(f"{source} has {source.stat().st_size} bytes; a tokenizer has at most {MOST_BYTES}")
        where = str(source)
    else:
        where = "the tokenizer made from the checkpoint"
    try:
        if isinstance(source, Path):
            inner = tokenizers.Tokenizer.from_file(where)
        else:
            inner = tokenizers.Tokenizer.from_str(source)
        inner.no_truncation()
        inner.no_padding()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library raises bare Exception, and its panics are not even that
        raise ModelError(f"{where} is damaged or of a newer kind: {str(error)[:200]}") from error
    for part in (inner.normalizer, inner.pre_tokenizer, inner.decoder):
        if part is not None:
            _check_growth(json.loads(part.__getstate__()), where)
    return inner


def _check_growth(step: Any, where: str) -> None:
    """Raise `ModelError` for steps that write far more than they read: the library ends the process without memory."""
    growth, waiting, count = 1.0, [step], 0
    while waiting:
        step, count = waiting.pop(), count + 1
        for value in step.values():
            waiting += [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, dict)]
        if step.get("type") == "Replace":
            pattern = step["pattern"]
            least = len(pattern["String"].encode()) if "String" in pattern else 1  # of a text that the pattern fits
            if not least:
                raise ModelError(f"{where} replaces an empty text; the file is damaged")
            growth *= max(1.0, len(step["content"].encode()) / least)
        elif step.get("type") == "Prepend" and not step["prepend"]:
            raise ModelError(f"{where} prepends an empty text; the file is damaged")
        elif step.get("type") == "Precompiled":
            growth *= _longest_replacement(base64.b64decode(step["precompiled_charsmap"]))
        if growth > MOST_GROWTH or count > MOST_STEPS:
            raise ModelError(f"{where} has steps that make a text more than {MOST_GROWTH} times as long; it is damaged")


def _longest_replacement(table: bytes) -> int:
    """Bytes of the longest text that SentencePiece's table of characters writes for one character, at least 1.

    The texts end with a zero each. They come after the double array, whose size in bytes is the first number.
    """
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max(1, *map(len, texts.split(b"\0")))


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Turn what the library raises into `ModelError`: bare Exception, and panics, which are not even that."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError, OverflowError, ValueError):
        raise
    except BaseException as error:
        raise ModelError(f"the model's tokenizer cannot {what} this: {str(error)[:200]}") from error


def _is_named(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("name"), str)


@dataclass(frozen=True)
class TokenizerFiles:
    """Files of a tokenizer: tokenizer.json (its path or its text), and the settings that are beside it.

    `settings` are those of tokenizer_config.json: `bos_token`, `eos_token`, `add_bos_token`, `chat_template`, ...
    """

    tokenizer_json: Path | str
    settings: dict[str, Any] = field(default_factory=dict)
