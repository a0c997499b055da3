"""Tokens of a model that writes what it hears (Whisper, 2212.04356): languages, tasks and times among its words."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lmstate.checkpoints.config import Config
from lmstate.errors import ModelError
from lmstate.files.json_object import read_object

if TYPE_CHECKING:
    from lmstate.text.tokenizer import Tokenizer

Task = Literal["transcribe", "translate"]
FILE = "generation_config.json"
START = "<|startoftranscript|>"


@dataclass(frozen=True)
class SpeechTokens:
    """The ids of all but words. `first_time`: of 0.00 seconds; each id after it is one step later.

    `languages` and `tasks`: by name ("en", "transcribe"); empty in a model of English alone. `never`: ids that never
    come in an answer; `never_first`: that do not begin one. `latest_start`: steps that the first time may be at.
    `alignment`: layers of the decoder, and a head of each, that attend to where words are said; empty where the files
    name none. `median`: positions of the encoder that smooth this attention.
    """

    vocab_size: int
    start: int
    end: int
    previous: int | None
    no_speech: int | None
    no_times: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    never: tuple[int, ...]
    never_first: tuple[int, ...]
    latest_start: int | None
    alignment: tuple[tuple[int, int], ...]
    median: int

    @staticmethod
    def open(path: Path, tokenizer: Tokenizer, vocab_size: int) -> SpeechTokens:
        """Of a checkpoint folder. Raises `ModelError` where its tokenizer or its generation_config.json lack them."""
        config = Config(read_object(path / FILE) if (path / FILE).is_file() else {}, FILE)

        def known(*names: str) -> int | None:
            return next((id for name in names if (id := tokenizer.id_of(name)) is not None and id < vocab_size), None)

        start, no_times, end = known(START), known("<|notimestamps|>"), min(tokenizer.eos_ids, default=None)
        if start is None or no_times is None or end is None:
            raise ModelError(f"{path} has no tokens {START} and <|notimestamps|>, which a transcript is written with")
        languages, tasks = _named(config, "lang_to_id", vocab_size), _named(config, "task_to_id", vocab_size)
        if not languages and config.bool("is_multilingual", default=vocab_size >= 51_865):  # as OpenAI's files tell it
            tasks = {task: id for task in ("transcribe", "translate") if (id := known(f"<|{task}|>")) is not None}
            names = [name for name in tokenizer.vocabulary if name.startswith("<|") and len(name) in (6, 7)]
            languages = {name[2:-2]: id for name in names if start < (id := tokenizer.vocabulary[name]) < no_times}
        return SpeechTokens(
            vocab_size, start, end, known("<|startofprev|>"), known("<|nospeech|>", "<|nocaptions|>"), no_times,
            languages, tasks if languages else {}, config.ints("suppress_tokens", high=vocab_size - 1, default=()),
            config.ints("begin_suppress_tokens", high=vocab_size - 1, default=()),
            config.int("max_initial_timestamp_index", default=None), _heads(config),
            Config(read_object(path / "config.json"), "config.json").int("median_filter_width", 1, 99, default=7) | 1,
        )  # fmt: skip

    @property
    def first_time(self) -> int:
        return self.no_times + 1

    def is_time(self, token: int) -> bool:
        return token >= self.first_time

    def begin(self, language: int | None, task: Task, times: bool) -> list[int]:
        """The tokens that a transcript begins with. `times`: whether it tells when things are said."""
        told = [] if language is None else [language]
        told += [self.tasks[task]] if task in self.tasks else []
        return [self.start, *told, *([] if times else [self.no_times])]

    def words(self, tokens: Sequence[int]) -> list[int]:
        """Those of the tokens that are of the text."""
        return [token for token in tokens if token < self.end]


class SpeechGrammar:
    """A transcript as the tokens of a `Grammar`: which may come next, up to the token that ends it.

    With times they come in pairs, the end of a piece and the beginning of the next, and never go back.
    """

    def __init__(self, speech: SpeechTokens, times: bool, tokens: Sequence[int] = ()) -> None:
        self._speech, self.times, self._tokens = speech, times, list(tokens)
        self._open = torch.ones(speech.vocab_size, dtype=torch.bool)
        self._open[list(speech.never)] = False
        if times:
            self._open[speech.no_times] = False

    @property
    def complete(self) -> bool:
        return self.ended

    @property
    def ended(self) -> bool:
        return self._tokens[-1:] == [self._speech.end]

    def allowed(self) -> Tensor:
        speech, open = self._speech, self._open.clone()
        if not self._tokens:
            open[list(speech.never_first)] = False
        if not self.times:
            return open
        first, tokens = speech.first_time, self._tokens
        if not tokens:
            open[:first] = False
            if speech.latest_start is not None:
                open[first + speech.latest_start + 1 :] = False
            return open
        timed = speech.is_time(tokens[-1])
        before = len(tokens) < 2 or speech.is_time(tokens[-2])
        if timed:
            if before:
                open[first:] = False
            else:
                open[: speech.end] = False
        if (latest := next((token for token in reversed(tokens) if speech.is_time(token)), None)) is not None:
            open[first : latest if timed and not before else latest + 1] = False
        return open

    def accept(self, token: int) -> None:
        self._tokens.append(token)

    def rollback(self, count: int) -> None:
        del self._tokens[len(self._tokens) - count :]

    def forced(self) -> Sequence[int]:
        return ()

    def copy(self) -> SpeechGrammar:
        return SpeechGrammar(self._speech, self.times, self._tokens)


class OneOf:
    """A `Grammar` of one token, which is one of some."""

    def __init__(self, vocab_size: int, ids: Collection[int], taken: int = 0) -> None:
        self._vocab_size, self.ids, self._taken = vocab_size, tuple(ids), taken

    @property
    def complete(self) -> bool:
        return bool(self._taken)

    @property
    def ended(self) -> bool:
        return bool(self._taken)

    def allowed(self) -> Tensor:
        open = torch.zeros(self._vocab_size, dtype=torch.bool)
        open[list(self.ids)] = True
        return open

    def accept(self, token: int) -> None:
        self._taken += 1

    def rollback(self, count: int) -> None:
        self._taken -= count

    def forced(self) -> Sequence[int]:
        return ()

    def copy(self) -> OneOf:
        return OneOf(self._vocab_size, self.ids, self._taken)


@dataclass(frozen=True)
class SpokenPiece:
    """Tokens of a transcript between two times, in steps from the beginning of what was heard."""

    start: int
    end: int
    tokens: tuple[int, ...]


def pieces_of(speech: SpeechTokens, tokens: Sequence[int], steps: int) -> tuple[list[SpokenPiece], int]:
    """The pieces, with times, of an answer to a sound of `steps` steps, and the step where the next part begins.

    Behind the last pair of times an answer may be cut short by the end of what was heard: it is left out, and heard
    again.
    """
    timed = [speech.is_time(token) for token in tokens]
    cuts = [at for at in range(1, len(tokens)) if timed[at - 1] and timed[at]]
    alone = timed[-2:] == [False, True]  # nothing is said after the last time
    if not cuts:
        last = next((token for token in reversed(tokens) if speech.is_time(token)), speech.first_time)
        end = steps if last == speech.first_time else last - speech.first_time
        return [SpokenPiece(0, end, tuple(tokens))], steps
    found = list(_between(speech, tokens, [*cuts, *([len(tokens)] if alone else [])]))
    return found, steps if alone else found[-1].end


def _between(speech: SpeechTokens, tokens: Sequence[int], cuts: Sequence[int]) -> Iterator[SpokenPiece]:
    begin = 0
    for cut in cuts:
        start, end = (tokens[at] - speech.first_time for at in (begin, cut - 1))
        yield SpokenPiece(start, end, tuple(tokens[begin:cut]))
        begin = cut


def _heads(config: Config) -> tuple[tuple[int, int], ...]:
    """Pairs of a layer and a head. Raises `ModelError` for anything else."""
    given = config.get("alignment_heads") or []
    if not isinstance(given, list):
        raise ModelError(f"{FILE} has alignment_heads {given!r:.80}; expected pairs of a layer and a head")
    pairs = Config({str(at): pair for at, pair in enumerate(given)}, f"alignment_heads of {FILE}")
    checked = (pairs.ints(at, length=2) for at in pairs)
    return tuple((layer, head) for layer, head in checked)


def _named(config: Config, name: str, vocab_size: int) -> dict[str, int]:
    """Ids by what they name, without the signs around it: `<|en|>` and en are both "en"."""
    fields = config.fields(name) or Config({})
    return {key.removeprefix("<|").removesuffix("|>"): fields.int(key, high=vocab_size - 1) for key in fields}
