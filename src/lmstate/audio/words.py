"""Times of the words of a transcript, from the attention of its tokens to a sound (dynamic time warping).

Each token of an answer attends most to where it is said. The cheapest path through these weights that goes on in both
the tokens and the sound tells at which position each token ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

WITHOUT_SPACES = ("zh", "ja", "th", "lo", "my", "yue")  # languages whose words are not told apart by spaces
MARKS = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
BEFORE_WORDS, AFTER_WORDS = "\"'“¡¿([{-", "\"'.。,，!！?？:：”)]}、"  # noqa: RUF001
UNFINISHED = "\ufffd"  # of a character whose bytes are in the next tokens
LEAST_SPREAD = 1e-12


def token_ends(weights: Tensor, median: int) -> list[int]:
    """The position where each token ends, from weights float32 `[A, T, S]` of A heads.

    Weights of a head are compared with those of other tokens at the same position, and smoothed by a median over
    `median` positions.
    """
    if not weights.shape[1] or not weights.shape[2]:
        return [0] * weights.shape[1]
    spread, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    compared = (weights - mean) / spread.clamp_min(LEAST_SPREAD)
    smooth = torch.stack([_smoothed(head, median) for head in compared])  # of all at once it takes 3 * `median` times
    return _path(-smooth.mean(0).double().cpu().numpy())


def _smoothed(x: Tensor, median: int) -> Tensor:
    """The median of each number `[..., S]` and its neighbors, with the ends mirrored."""
    if x.shape[-1] <= median // 2:
        return x
    return pad(x, (median // 2,) * 2, mode="reflect").unfold(-1, median, 1).sort()[0][..., median // 2]


def _path(costs: np.ndarray) -> list[int]:
    """The column where each row of `[T, S]` begins, on the cheapest path through all rows and columns.

    Cells are computed by diagonals, which depend on the two before alone.
    """
    rows, columns = costs.shape
    steps = np.full((rows + 1, columns + 1), 2, np.int8)  # 0: from both before, 1: from the row, 2: from the column
    steps[:, 0] = 1
    steps[0] = 2
    before = np.full(rows + 1, np.inf, np.float32)  # by row, of the diagonal two before
    last = before.copy()
    before[0] = 0
    for diagonal in range(2, rows + columns + 1):
        row = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        both, up, left = before[row - 1], last[row - 1], last[row]
        step = np.where((both < up) & (both < left), 0, np.where((up < both) & (up < left), 1, 2))
        steps[row, diagonal - row] = step
        now = np.full(rows + 1, np.inf, np.float32)
        now[row] = costs[row - 1, diagonal - row - 1] + np.choose(step, (both, up, left))
        before, last = last, now
    starts, row, column = [0] * rows, rows, columns
    while row > 0 and column > 0:
        starts[row - 1] = int(column) - 1
        step = steps[row, column]
        row, column = row - (step != 2), column - (step != 1)
    return starts


def words_of(
    tokens: Sequence[int], decode: Callable[[Sequence[int]], str], language: str | None
) -> Iterator[tuple[str, range]]:
    """The words of a text, with spaces and marks as they are written, and the places of their tokens."""
    groups = list(_characters(tokens, decode))
    if language not in WITHOUT_SPACES:
        groups = _joined(groups)
    yield from _with_marks(groups)


def _characters(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> Iterator[tuple[str, range]]:
    """The shortest runs of tokens that are whole characters."""
    begin, whole, at = 0, decode(tokens), 0
    for stop in range(1, len(tokens) + 1):
        text = decode(tokens[begin:stop])
        unfinished = text.find(UNFINISHED)
        same = at + unfinished >= len(whole) or whole[at + unfinished] == UNFINISHED  # it is so in the text as well
        if unfinished < 0 or same or stop == len(tokens):
            yield text, range(begin, stop)
            begin, at = stop, at + len(text)


def _joined(groups: Sequence[tuple[str, range]]) -> list[tuple[str, range]]:
    """Runs that a space or a mark begins."""
    made: list[tuple[str, range]] = []
    for text, places in groups:
        if not made or text.startswith(" ") or text.strip() in MARKS:
            made.append((text, places))
        else:
            made[-1] = _both(made[-1], (text, places))
    return made


def _with_marks(groups: Sequence[tuple[str, range]]) -> list[tuple[str, range]]:
    """Marks in front of a word and after it belong to it."""
    opened: list[tuple[str, range]] = []
    for group in reversed(groups):
        if opened and group[0].startswith(" ") and group[0].strip() in BEFORE_WORDS:
            opened[-1] = _both(group, opened[-1])
        else:
            opened.append(group)
    made: list[tuple[str, range]] = []
    for group in reversed(opened):
        if made and not made[-1][0].endswith(" ") and group[0] in AFTER_WORDS:
            made[-1] = _both(made[-1], group)
        else:
            made.append(group)
    return made


def _both(first: tuple[str, range], second: tuple[str, range]) -> tuple[str, range]:
    return first[0] + second[0], range(first[1].start, second[1].stop)
