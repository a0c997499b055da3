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
from lmstate.state.validate import whole_number

# Top-p looks among this many best tokens first: sorting the whole vocabulary costs as much as a decode step.
HEAD = 1024


@dataclass(frozen=True)
class Candidates:
    """Distribution of the next token: `probabilities` [R, k] float64 (rows sum to 1, zeros allowed) of `ids` [R, k]."""

    probabilities: Tensor
    ids: Tensor


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
    logit_bias          (token, what is added to its logit); also when greedy
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0 <= self.temperature < math.inf, "0 (greedy) or more")
        top_k = None if self.top_k is None else whole_number(self.top_k, "top_k")
        _check("top_k", top_k, top_k is None or top_k >= 1, "at least 1, or None for all tokens")
        _check("top_p", self.top_p, self.top_p is None or 0.0 < self.top_p <= 1.0, "above 0 and at most 1")
        _check("min_p", self.min_p, self.min_p is None or 0.0 <= self.min_p <= 1.0, "between 0 and 1")
        penalty = self.repetition_penalty
        _check("repetition_penalty", penalty, 0.0 < penalty < math.inf, "above 0 (1.0 changes nothing)")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(name, value := getattr(self, name), math.isfinite(value), "a finite number (0.0 changes nothing)")
        for token, value in self.logit_bias:
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
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def counts_answer(self) -> bool:
        """Whether what is picked depends on how often the answer holds each token."""
        return bool(self.presence_penalty or self.frequency_penalty)

    @property
    def plain(self) -> bool:
        """Whether the most likely token is taken, whatever came before."""
        return self.greedy and not (self.counts_answer or self.logit_bias or self.repetition_penalty != 1.0)

    def penalized(self, logits: Tensor, seen: Tensor) -> Tensor:
        """`logits` [R, V] with the repetition penalty on the tokens where `seen` [R, V] bool is true."""
        penalty = self.repetition_penalty
        return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)

    def candidates(self, logits: Tensor) -> Candidates:
        """The distribution after temperature and filters. logits [R, V] float32, already penalized; temperature > 0."""
        rows, vocab = logits.shape
        # Relative to the best token, so that a tiny temperature cannot overflow.
        scores = (logits - logits.amax(-1, keepdim=True)).double() / self.temperature  # [R, V]
        ids = torch.arange(vocab, device=logits.device).expand(rows, vocab)
        if self.top_k is not None and self.top_k < vocab:
            scores, ids = scores.topk(self.top_k)  # [R, k], best first
        if self.top_p is not None and self.top_p < 1.0:
            scores, ids = _nucleus(scores, ids, self.top_p)
        if self.min_p is not None and self.min_p > 0.0:
            scores = scores.masked_fill(scores < math.log(self.min_p), -math.inf)  # the best token has score 0
        return Candidates(scores.softmax(-1), ids)


class TokenPicker:
    """Picks the next token of every row: a `Sampler` plus what it must remember (random streams, tokens seen)."""

    def __init__(self, sampler: Sampler, rows: int, first: int = 0) -> None:
        """`first`: the number of row 0's random stream, where the rows of one seed are picked by several pickers."""
        self.sampler = sampler
        seed = sampler.seed if sampler.seed is not None else int(torch.randint(2**62, ()))
        # Host generators: one number per token is drawn, and it is the same whatever the device of the logits.
        self._streams = [random.Random(f"lmstate:{seed}:{first + row}") for row in range(rows)]
        self._counts: list[Counter[int]] = [Counter() for _ in range(rows)]  # of the tokens of the answers
        self._held: list[list[int]] = [[] for _ in range(rows)]  # seen, not yet in the mask
        self._mask: Tensor | None = None  # [R, V] bool, built with the first logits

    def see(self, row: int, ids: Iterable[int]) -> None:
        """Tell that `row` holds these tokens (for the repetition penalty). Picked tokens count by themselves."""
        if self.sampler.repetition_penalty != 1.0:
            self._held[row].extend(ids)

    def pick(self, logits: Tensor, rows: Sequence[int]) -> list[int]:
        """The next token of each of `rows`. logits [len(rows), V] float32, in the order of `rows`."""
        logits = self._adjusted(logits, rows)
        if self.sampler.greedy:
            best, ids = ops.argmax(logits)
            _check_numbers(best)
            picked: list[int] = ids.tolist()
        else:
            picked = self._draw(self.sampler.candidates(logits), rows)
        for row, token in zip(rows, picked):
            self.take(row, token)
        return picked

    def distribution(self, logits: Tensor, row: int) -> Tensor:
        """The distribution that `pick` draws from: float64 [V], from logits [V]."""
        logits = self._adjusted(logits[None], [row])
        dense = torch.zeros(logits.shape[-1], dtype=torch.float64, device=logits.device)
        if self.sampler.greedy:
            dense[ops.argmax(logits)[1]] = 1.0
            return dense
        candidates = self.sampler.candidates(logits)
        return dense.scatter_(0, candidates.ids[0], candidates.probabilities[0])

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

    def _adjusted(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """`logits` with bias and penalties: itself if there are none, else a copy."""
        sampler = self.sampler
        if sampler.logit_bias:
            ids, values = zip(*sampler.logit_bias)
            logits = logits.clone()
            logits[:, list(ids)] += torch.tensor(values, dtype=logits.dtype, device=logits.device)
        if sampler.repetition_penalty != 1.0:
            logits = sampler.penalized(logits, self._seen(logits, rows))
        if sampler.counts_answer and any(self._counts[row] for row in rows):
            logits = logits.clone()
            for index, row in enumerate(rows):
                held = torch.tensor(list(self._counts[row]), dtype=torch.int64, device=logits.device)
                often = torch.tensor(list(self._counts[row].values()), dtype=logits.dtype, device=logits.device)
                logits[index, held] -= sampler.presence_penalty + sampler.frequency_penalty * often
        return logits

    def _draw(self, candidates: Candidates, rows: Sequence[int]) -> list[int]:
        """Inverse of the cumulative distribution at one uniform number per row."""
        cumulative = candidates.probabilities.cumsum(-1)  # [R, k]
        total = cumulative[:, -1:]
        _check_numbers(total)
        uniform = torch.tensor([[self._streams[row].random()] for row in rows], dtype=torch.float64)
        # Strictly below the total, so that rounding never falls past the last token that has any probability.
        point = torch.minimum(uniform.to(total.device) * total, torch.nextafter(total, torch.zeros_like(total)))
        index = torch.searchsorted(cumulative, point, right=True)  # [R, 1]: first whose cumulative exceeds the point
        picked: list[int] = candidates.ids.gather(-1, index)[:, 0].tolist()
        return picked

    def _seen(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """The mask [len(rows), V] of tokens that each row holds, brought up to date."""
        if self._mask is None:
            self._mask = torch.zeros(len(self._streams), logits.shape[-1], dtype=torch.bool, device=logits.device)
        for row in rows:
            if self._held[row]:
                self._mask[row, torch.tensor(self._held[row], device=logits.device)] = True
                self._held[row].clear()
        return self._mask[list(rows)]


def _nucleus(scores: Tensor, ids: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The most likely tokens, best first, until their probability reaches `top_p`; others -inf. scores, ids [R, k]."""
    total = scores.logsumexp(-1, keepdim=True)
    ordered, order = scores.topk(min(HEAD, scores.shape[-1]))
    if ordered.shape[-1] < scores.shape[-1] and bool(((ordered - total).exp().sum(-1) < top_p).any()):
        ordered, order = scores.sort(-1, descending=True)
    probability = (ordered - total).exp()
    before = probability.cumsum(-1) - probability  # what the better tokens hold together: 0 for the best one
    return ordered.masked_fill(before >= top_p, -math.inf), ids.gather(-1, order)


def _check(name: str, value: float | None, right: bool, range_: str) -> None:
    if not right:
        raise ValueError(f"{name} is {value!r}; it must be {range_}")


def _check_numbers(values: Tensor) -> None:
    if bool(values.isnan().any()):
        raise ModelError(
            "the logits are not numbers: the row has no tokens yet, or the model's weights or storage type overflow "
            "(try weights='float32')"
        )
