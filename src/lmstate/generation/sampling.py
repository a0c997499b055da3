"""From logits to the next token: bias, penalties, temperature, top-k, top-p, min-p, and one draw per row.

The filters come in the order of transformers (bias, penalties, temperature, top-k, top-p, min-p), each on what the
one before left over. A row draws from a random stream of its own, made from the seed and the row's number: what the
other rows of the batch hold, or when they end, changes nothing for it.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmstate import ops
from lmstate.errors import ModelError
from lmstate.state.validate import real_number, whole_number

FILTERS = ("top_k", "top_p", "min_p")
"""Fields of `Sampler` that leave out tokens before one is drawn."""


@dataclass(frozen=True)
class Sampler:
    """Sampling parameters. Immutable; the random streams are in `TokenPicker`.

    temperature         0.0 takes the most likely token (greedy); the filters below then change nothing
    top_k               only the k most likely tokens (None: all)
    top_p               the smallest set of most likely tokens that holds this much probability (None: all)
    min_p               only tokens at least this probable relative to the most likely one (None: all)
    repetition_penalty  > 1 makes tokens that the row holds less likely (CTRL, arXiv 1909.05858); also when greedy
    seed                None takes one from torch's global generator, so that `torch.manual_seed` reproduces too
    presence_penalty    taken off the logits of tokens that the answer holds (OpenAI); also when greedy
    frequency_penalty   the same, times how often it holds them
    logit_bias          what is added to the logits of tokens, by token; also when greedy. Kept as pairs
    times_from          the ids from this one on count together: where they are likelier than each other token, one of
                        them comes. Whisper's times, which share what is one decision; also when greedy
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = ()
    times_from: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        for name in ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            object.__setattr__(self, name, real_number(getattr(self, name), name))
        for name in ("top_p", "min_p"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, real_number(given, name))
        if self.seed is not None:
            object.__setattr__(self, "seed", whole_number(self.seed, "seed"))
        if self.times_from is not None:
            _check("times_from", self.times_from, whole_number(self.times_from, "times_from") >= 0, "a token id")
        _check("temperature", self.temperature, 0.0 <= self.temperature < math.inf, "0 (greedy) or more")
        top_k = None if self.top_k is None else whole_number(self.top_k, "top_k")
        _check("top_k", top_k, top_k is None or top_k >= 1, "at least 1, or None for all tokens")
        _check("top_p", self.top_p, self.top_p is None or 0.0 < self.top_p <= 1.0, "above 0 and at most 1")
        _check("min_p", self.min_p, self.min_p is None or 0.0 <= self.min_p <= 1.0, "between 0 and 1")
        penalty = self.repetition_penalty
        _check("repetition_penalty", penalty, 0.0 < penalty < math.inf, "above 0 (1.0 changes nothing)")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(name, value := getattr(self, name), math.isfinite(value), "a finite number (0.0 changes nothing)")
        for token, value in self.biases:
            _check(f"the logit_bias of token {token}", value, -math.inf <= value < math.inf, "a number, or -inf")

    @classmethod
    def suggested(cls, defaults: Mapping[str, Any]) -> Sampler:
        """Sampling parameters that a checkpoint suggests (`model.defaults`), read as transformers reads them.

        Without `do_sample` that is greedy; with it, a temperature of 1 and the 50 most likely tokens unless they say
        otherwise. A `top_k` of 0 or less, and a `top_p` of 0, are how some say "all".
        """
        penalty = defaults.get("repetition_penalty", 1.0)
        if not defaults.get("do_sample", False):
            return cls(repetition_penalty=penalty)
        top_k = defaults.get("top_k", 50)
        return cls(
            temperature=defaults.get("temperature", 1.0),
            top_k=top_k if top_k > 0 else None,
            top_p=defaults.get("top_p") or None,
            min_p=defaults.get("min_p"),
            repetition_penalty=penalty,
        )

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs of a token and what is added to its logit."""
        return _bias(self.logit_bias)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def counts_answer(self) -> bool:
        """Whether what is picked depends on how often the answer holds each token."""
        return bool(self.presence_penalty or self.frequency_penalty)

    @property
    def plain(self) -> bool:
        """Whether the most likely token is taken, whatever came before."""
        return self.greedy and not self.adjusts

    @property
    def adjusts(self) -> bool:
        """Whether it changes logits before the temperature."""
        changes = self.counts_answer or self.logit_bias or self.repetition_penalty != 1.0
        return bool(changes) or self.times_from is not None

    def penalized(self, logits: Tensor) -> Tensor:
        """Logits, of any shape, of tokens that their row holds, with the repetition penalty."""
        return torch.where(logits < 0, logits * self.repetition_penalty, logits / self.repetition_penalty)

    def bar_words(self, logits: Tensor) -> None:
        """Leave out the words, in logits `[V]`, where `times_from` has a time come."""
        if (first := self.times_from) is not None:
            words, times = logits[:first], logits[first:].double()
            if len(words) and len(times) and bool(times.logsumexp(0) > words.max()):
                words.fill_(-math.inf)

    @property
    def filters(self) -> tuple[float, int | None, float | None, float | None]:
        """Temperature, top-k, top-p and min-p, in the order in which `ops.candidates` takes them."""
        return self.temperature, self.top_k, self.top_p, self.min_p

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """`ops.candidates` of logits [R, V] float32, already penalized; temperature > 0."""
        return ops.candidates(logits, *self.filters)


class TokenPicker:
    """Picks the next token of every row: a `Sampler` plus what it must remember (random streams, tokens seen)."""

    def __init__(self, sampler: Sampler, rows: int, first: int = 0) -> None:
        """`first`: the number of row 0's random stream, where the rows of one seed are picked by several pickers."""
        self.sampler = sampler
        seed = sampler.seed if sampler.seed is not None else int(torch.randint(2**62, ()))
        # Host generators: one number per token is drawn, and it is the same whatever the device of the logits.
        self._streams = [random.Random(f"lmstate:{seed}:{first + row}") for row in range(rows)]
        self._counts: list[Counter[int]] = [Counter() for _ in range(rows)]  # of the tokens of the answers
        self._held: list[set[int]] = [set() for _ in range(rows)]  # tokens that each row holds
        self._new: list[list[int]] = [[] for _ in range(rows)]  # of them, those that are not yet in the tensor
        self._ids = [torch.empty(0, dtype=torch.int64) for _ in range(rows)]

    def see(self, row: int, ids: Iterable[int]) -> None:
        """Tell that `row` holds these tokens (for the repetition penalty). Picked tokens count by themselves."""
        if self.sampler.repetition_penalty != 1.0:
            fresh = set(ids) - self._held[row]
            self._held[row] |= fresh
            self._new[row] += fresh

    def pick(self, logits: Tensor, rows: Sequence[int]) -> list[int]:
        """The next token of each of `rows`. logits [len(rows), V] float32, in the order of `rows`."""
        logits = self.adjusted(logits, rows)
        if self.sampler.greedy:
            best, ids = ops.argmax(logits)
            check_numbers(bool((best > -math.inf).all()))
            picked: list[int] = ids.tolist()
        else:
            uniform = torch.tensor([self.uniform(row) for row in rows], dtype=torch.float64)
            picked = ops.sample(logits, uniform, *self.sampler.filters).tolist()
            check_numbers(-1 not in picked)
        for row, token in zip(rows, picked):
            self.take(row, token)
        return picked

    def distribution(self, logits: Tensor, row: int) -> Tensor:
        """The distribution that `pick` draws from: float64 [V], from logits [V]."""
        logits = self.adjusted(logits[None], [row])
        dense = torch.zeros(logits.shape[-1], dtype=torch.float64, device=logits.device)
        if self.sampler.greedy:
            dense[ops.argmax(logits)[1]] = 1.0
            return dense
        probabilities, ids = self.sampler.candidates(logits)
        return dense.scatter_(0, ids[0], probabilities[0])

    def uniform(self, row: int) -> float:
        """A number in 0..1 from the row's random stream."""
        return self._streams[row].random()

    def take(self, row: int, token: int) -> None:
        """Tell that a row's answer holds this token, which was not picked here."""
        self.see(row, (token,))
        if self.sampler.counts_answer:
            self._counts[row][token] += 1

    def take_forced(self, row: int, token: int) -> None:
        """`take` of a token that could be no other: it uses up the random number that a draw would have."""
        if not self.sampler.greedy:
            self.uniform(row)
        self.take(row, token)

    def adjusted(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Logits `[len(rows), V]` with bias and penalties: themselves if there are none, else a copy."""
        sampler = self.sampler
        if not sampler.adjusts:
            return logits
        logits = logits.clone()
        if sampler.logit_bias:
            ids, values = zip(*sampler.biases)
            logits[:, list(ids)] += torch.tensor(values, dtype=logits.dtype, device=logits.device)
        for index, row in enumerate(rows):
            if sampler.repetition_penalty != 1.0:
                held = self._seen(row, logits)
                logits[index, held] = sampler.penalized(logits[index, held])
            if self._counts[row]:
                held = torch.tensor(list(self._counts[row]), dtype=torch.int64, device=logits.device)
                often = torch.tensor(list(self._counts[row].values()), dtype=logits.dtype, device=logits.device)
                logits[index, held] -= sampler.presence_penalty + sampler.frequency_penalty * often
            sampler.bar_words(logits[index])
        return logits

    def _seen(self, row: int, logits: Tensor) -> Tensor:
        """The tokens that a row holds, int64 `[n]`, each once; without marks of pictures, which have no logits."""
        device = logits.device
        if self._new[row] or self._ids[row].device != device:
            ids = [token for token in self._new[row] if token < logits.shape[-1]]
            new = torch.tensor(ids, dtype=torch.int64, device=device)
            self._ids[row] = torch.cat([self._ids[row].to(device), new])
            self._new[row].clear()
        return self._ids[row]


def _bias(given: Mapping[int, float] | tuple[tuple[int, float], ...] | None) -> tuple[tuple[int, float], ...]:
    if isinstance(given, tuple):
        return given
    if not isinstance(given, Mapping | None):
        raise ValueError(f"logit_bias is {given!r:.80}; it must be a dict of what is added to each token's logit")
    return tuple(
        (whole_number(token, "a token of logit_bias"), real_number(value, f"the logit_bias of token {token}"))
        for token, value in (given or {}).items()
    )


def _check(name: str, value: float | None, right: bool, range_: str) -> None:
    if not right:
        raise ValueError(f"{name} is {value!r}; it must be {range_}")


def check_numbers(right: bool) -> None:
    """Raise ModelError unless it is `right` that logits are numbers, of which one is not minus infinity."""
    if not right:
        raise ModelError(
            "the logits are not numbers: the row has no tokens yet, or the model's weights or storage type overflow "
            "(try weights='float32'), or a logit_bias of -inf rules out all that may come"
        )
