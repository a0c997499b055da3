"""One batch's speculation: asks a drafter, cuts what it proposes to the depth that pays, and learns from what came."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import mul
from time import perf_counter

from lmstate.speculation.depth import CREDIT, CREDIT_STEP, DOWN, UP, Acceptance, StepCosts, best_depths
from lmstate.speculation.drafter import Draft, Drafter, ForgettingDrafter, as_draft
from lmstate.state.validate import whole_number

MOST_TOKENS = 64
"""Tokens of a step with drafts, padding included: there are logits of as many."""

CHEAP = 0.002  # of a plain step, for each token: a drafter that costs less is asked for as much as there is room for
ALLOWANCE = 0.25  # plain steps that a drafter may take more than its drafts promise, before it is left in peace
FIRST_REST, LONGEST_REST = 16, 256  # steps until it is tried again, twice as many each time


def widest_draft(rows: int) -> int:
    """Most tokens that are drafted for each of the rows of a state."""
    return max(0, MOST_TOKENS // rows - 1)


@dataclass(frozen=True)
class DraftReport:
    """Speculation statistics. Rates are by depth: `verified[j]` tokens stood at place j of a draft, `held[j]` held."""

    drafted: int = 0  # tokens that were verified
    accepted: int = 0  # of them, those that held
    verified: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    drafting_seconds: float = 0.0
    seconds_saved: float = 0.0  # plain steps for the accepted tokens, less what drafting and wider steps took

    @property
    def drafts(self) -> int:
        """Drafts that were verified."""
        return self.verified[0] if self.verified else 0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a step with a draft gave its row, the model's own included; 1.0 where there was none."""
        return 1.0 + self.accepted / max(1, self.drafts)


class Speculator:
    """Drafts for the rows of one batch, at depths that choose themselves.

    A caller runs: `observe` with what each row holds, then for every step `propose`, a step of the model over the last
    token and the draft of each row, `verified`, `observe` with the new tokens, `measured` with the step's seconds.
    """

    def __init__(self, drafter: Drafter, vocab_size: int, rows: int, depth: int | None = None) -> None:
        """`rows`: of the state, idle ones too, since its logits have as many.

        `depth`: draft always so deep (where a drafter has as many tokens), instead of what pays most. Raises ValueError
        for one below 0.
        """
        depth = None if depth is None else whole_number(depth, "depth")
        if depth is not None and depth < 0:
            raise ValueError(f"depth is {depth}; it must be 0 or more, or None for what pays most")
        self.drafter = drafter
        self.acceptance = Acceptance()
        self._by_row: dict[int, Acceptance] = {}
        self._costs: dict[int, StepCosts] = {}  # by the rows of the state
        self.resize(rows)
        self._credit: dict[int, float] = {}  # plain steps that a row may still lose, see `best_depths`
        self._fixed = depth
        self._accepted: dict[int, int] = {}  # of the drafts of the latest step
        self._vocab_size = vocab_size
        self._proposed: dict[int, Draft] = {}  # in full, to compare with what comes
        self._verified = [0] * MOST_TOKENS
        self._held = [0] * MOST_TOKENS
        self._drafting = 0.0
        self._saved = 0.0
        self._latest = 0.0  # seconds that the last proposal took
        self._per_token: float | None = None  # seconds of drafting one token deeper; None: not known
        self._places = Acceptance()  # by place in the draft alone: known before anything is drafted
        self._asked = 0  # proposals so far
        self._allowance = ALLOWANCE
        self._rest, self._resting = FIRST_REST, 0  # steps of the next rest, and those left of this one

    def resize(self, rows: int) -> None:
        """Note that the state has `rows` rows from now on."""
        self.costs = self._costs.setdefault(rows, StepCosts())
        self.most = widest_draft(rows)

    def observe(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """Rows go on with these tokens: at first with all that they hold."""
        for row, actual in tokens.items():
            if (draft := self._proposed.pop(row, None)) is not None:
                self.acceptance.compare(draft, actual)
                self._of(row).compare(draft, actual)
                self._places.compare(Draft(draft.tokens), actual)
        if tokens:
            self.drafter.observe(list(tokens), list(tokens.values()))

    def forget(self, row: int) -> None:
        """A row has ended: later tokens under its number are another text."""
        self._proposed.pop(row, None)
        self._credit.pop(row, None)
        self._by_row.pop(row, None)
        if isinstance(self.drafter, ForgettingDrafter):
            self.drafter.forget(row)

    def propose(
        self, room: Mapping[int, int], admitted: Callable[[int, Draft], Draft] | None = None
    ) -> dict[int, Draft]:
        """Drafts for the rows in `room`, each of at most `room[row]` tokens; a draft can be empty.

        `admitted(row, draft)`: what of a draft can come at all, and what must, by a row's grammar.
        """
        self._latest = 0.0
        self._proposed.clear()
        most = min(self.most, max(room.values(), default=0))
        depth = self._depth_to_ask(most, len(room))
        if not depth:
            return {row: Draft() for row in room}
        begin = perf_counter()
        answers = self.drafter.propose(list(room), depth)
        answers = list(answers) if isinstance(answers, Iterable) else []
        if len(answers) != len(room):
            raise ValueError(
                f"a drafter gave {len(answers)} drafts for {len(room)} rows; give one for each, maybe empty"
            )
        drafts = {
            row: as_draft(answer, self._vocab_size, min(depth, most))
            for (row, most), answer in zip(room.items(), answers)
        }
        if admitted is not None:
            drafts = {row: admitted(row, draft).cut(min(depth, room[row])) for row, draft in drafts.items()}
        cuts = self._cuts(drafts, depth)
        self._latest = perf_counter() - begin
        self._drafting += self._latest
        self._asked += 1
        if self._asked > 1 and any(map(len, drafts.values())):  # the first one, and empty ones, read long texts
            each = self._latest / depth
            known = each if self._per_token is None else self._per_token
            self._per_token = known + (DOWN if each < known else UP) * (each - known)
        self._proposed = dict(drafts)
        drafts = {row: draft.cut(cut) for (row, draft), cut in zip(drafts.items(), cuts)}
        self._weigh(depth, drafts)
        return drafts

    def verified(self, drafts: Mapping[int, Draft], accepted: Mapping[int, int]) -> None:
        """Record the outcome of a step's drafts, one for each row of it; some may be empty."""
        self._accepted = dict(accepted)
        for row, draft in drafts.items():
            for at in range(min(len(draft), accepted[row] + 1)):
                self._verified[at] += 1
                self._held[at] += at < accepted[row]

    def measured(self, tokens: int, seconds: float, rows: int, gained: int) -> None:
        """Note that a step of `tokens` tokens over `rows` rows took `seconds` and accepted `gained` drafted tokens."""
        self.costs.measured(tokens, seconds)
        lost = 0.0
        if rows in self.costs:
            plain = self.costs(rows, rows)  # gives a token to each row
            lost = self.costs(tokens, rows) / plain - 1
            self._saved += gained * plain / rows - self._latest - (seconds - plain if tokens > rows else 0.0)
        for row, accepted in self._accepted.items():
            self._credit[row] = self._credit.get(row, CREDIT) + CREDIT_STEP + accepted - lost
        self._accepted.clear()

    def report(self) -> DraftReport:
        deepest = max((at + 1 for at, count in enumerate(self._verified) if count), default=0)
        verified, held = tuple(self._verified[:deepest]), tuple(self._held[:deepest])
        return DraftReport(sum(verified), sum(held), verified, held, self._drafting, self._saved)

    def _depth_to_ask(self, most: int, rows: int) -> int:
        """Depth to ask of the drafter, before its drafts are known."""
        if self._fixed is not None:
            return min(most, self._fixed)
        if not self.costs.current(rows) or most <= 0:
            return 0
        if self._per_token is None:
            return min(most, 4)
        if self._resting:
            self._resting -= 1
            return 0
        if self._per_token <= CHEAP * self.costs(rows, rows):
            return most
        # As if all rows were alike, and went as deep as each other: then one stands for all.
        rates = self._places.rates(Draft((0,) * most))
        drafting = partial(mul, self._per_token)
        (depth,) = best_depths([rates], lambda tokens: self.costs(rows * tokens, rows), drafting)
        if not depth:
            self._pause()
        return depth or min(most, 2)

    def _pause(self) -> None:
        """Ask for no drafts for a while."""
        self._allowance = ALLOWANCE
        self._resting, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)

    def _weigh(self, depth: int, drafts: Mapping[int, Draft]) -> None:
        """Set what these drafts promise against what it took to get them; pause where that goes on not to pay."""
        if self._fixed is not None or self._per_token is None or self._resting:
            return
        rows = len(drafts)
        plain, tokens = self.costs(rows, rows), rows + sum(map(len, drafts.values()))
        promised = sum(sum(accumulate(self._of(row).rates(draft), mul)) for row, draft in drafts.items())
        gain = promised / rows - (self.costs(tokens, rows) + self._per_token * depth) / plain + 1
        if gain > 0:
            self._rest = FIRST_REST
        self._allowance = min(ALLOWANCE, self._allowance + gain)
        if self._allowance < 0:
            self._pause()

    def _cuts(self, drafts: Mapping[int, Draft], depth: int) -> list[int]:
        """The depth of each draft that pays to verify."""
        if self._fixed is not None or any(draft.drawn_from for draft in drafts.values()):
            # A token drawn at random is verified or not whatever it turned out to be: a choice among them by their
            # confidence, or by that of the tokens after them, would not leave the model's distribution as it is.
            return [depth] * len(drafts)
        if not any(map(len, drafts.values())):
            return [0] * len(drafts)
        rates = [self._of(row).rates(draft) for row, draft in drafts.items()]
        credit = [self._credit.get(row, CREDIT) for row in drafts]
        return best_depths(rates, partial(self.costs, plain=len(drafts)), credit=credit)

    def _of(self, row: int) -> Acceptance:
        return self._by_row.setdefault(row, Acceptance(self.acceptance))
