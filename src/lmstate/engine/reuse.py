"""Beginning a request with what was computed before, and keeping what it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from lmstate.engine.job import Job
from lmstate.engine.pace import Pace
from lmstate.engine.prefix import Match, PrefixStore
from lmstate.engine.prefix.parts import ANYWHERE, Split
from lmstate.engine.request import Request
from lmstate.engine.results import Reuse
from lmstate.engine.tiers import Tier
from lmstate.engine.tiers.fetch import SILENCE, Fetch, Lookup
from lmstate.errors import RanksError, StateError
from lmstate.state import Snapshot, State
from lmstate.state.media import before_picture
from lmstate.vision.reader import PicturePrompt

if TYPE_CHECKING:
    from lmstate.models.model import Model

LEAST_PATIENCE = 1.0  # seconds that a tier may take for what would be computed faster than that
UNMEASURED = 1e-3  # seconds in which a token is computed, as far as nothing was measured since the start
WORTH_ASKING = 64  # tokens that are not known here, for which a tier is asked
ASKING = 0.25, 1.0  # seconds that it may take: at least, at most
MOST_LOOKUPS = 4  # at a time
MOST_FETCHES = 4  # at a time: each has threads of its own, and holds all that it has read until it is taken
LADDER = 256, 4096  # tokens of a prompt between two carries, where nothing else asks for one: at least, at most
HEADROOM = 8  # an eighth of the memory is left to rows that grow, or as much as they have
TURNS = 2  # ends of turns in a prompt that get a carry in any case: before and after the last message of its user


class PrefixReuse:
    """The prefix store as the engine's thread uses it. `memory`: bytes of the store and of the rows together."""

    def __init__(
        self,
        model: Model,
        new_state: Callable[[int], State],
        memory: int,
        tier: Tier | None,
        pace: Pace,
        wake: Callable[[], None],
    ) -> None:
        self.tier = tier
        self.prefixes = PrefixStore(Split.of(new_state(1)), model.fingerprint, memory, tier, model.opening_numbers)
        self.memory = memory
        self._ladder = LADDER[1]
        self._lookups: list[Lookup] = []  # of which nothing is learned yet
        self._fetches: WeakKeyDictionary[Fetch, Request] = WeakKeyDictionary()  # and whom each reads for
        self._silent_until = 0.0
        self._model, self._new_state, self._pace, self._wake = model, new_state, pace, wake

    # ---- beginning

    def fetching(self, job: Job) -> bool:
        """Whether something is read from a tier for a request; begins it, and takes what came of it."""
        if self.tier is None or job.params.prompt_logprobs is not None:
            return False
        if self._looking_up(job):
            return True
        match = self.match(job.text, job.pictured, job.salt)
        if job.fetch is None:
            if not (wanted := self.prefixes.missing(match)):
                return False
            if len(others := self._fetching()) >= MOST_FETCHES:
                return any(fetch.ended or not fetch.over for fetch in others)  # else the tier hangs: it does without
            known = self._pace.seconds(match.length)
            patience = max(LEAST_PATIENCE, 2 * (UNMEASURED * match.length if known is None else known))
            job.fetch = Fetch(self.tier, wanted, patience, self._wake)
            self._fetches[job.fetch] = job.request
        if not job.fetch.over:
            return True
        if not job.fetch.taken:
            job.fetch.taken = True
            job.fetch.stop()
            self.prefixes.forget_stored(job.fetch.failed)
            self.prefixes.fill(match, dict(job.fetch.made))
            job.fetch.made = {}
        return False

    def _fetching(self) -> list[Fetch]:
        """The fetches that read, and those whose entries were not taken yet."""
        for fetch, request in [*self._fetches.items()]:
            if request.done:
                fetch.stop()
            if fetch.ended and (fetch.taken or request.done):
                del self._fetches[fetch]
        return [*self._fetches]

    def _looking_up(self, job: Job) -> bool:
        """Whether a tier is being asked for more of a prompt than is known; begins it, and takes what came of it.

        A tier that does not answer in time is not asked again for a while.
        """
        assert self.tier is not None
        if job.lookup is not None and not job.lookup.over:
            return True
        # Those that were too late, or whose request is gone, count too: a tier tells of each entry once.
        for lookup in [lookup for lookup in self._lookups if lookup.ended]:
            self._lookups.remove(lookup)
            self.prefixes.learn(lookup.found)
        now = perf_counter()
        if job.lookup is None:
            quiet = now < self._silent_until or len(self._lookups) >= MOST_LOOKUPS
            if not self.tier.looks_up or quiet:
                return False
            unknown = len(job.prompt) - self.match(job.text, job.pictured, job.salt).length
            if unknown < WORTH_ASKING:
                return False
            patience = min(max(2 * (self._pace.seconds(unknown) or 0.0), ASKING[0]), ASKING[1])
            job.lookup = Lookup(self.tier, self.prefixes.whole(job.text), job.salt, patience, self._wake)
            self._lookups.append(job.lookup)
            return True
        if not job.lookup.ended:
            self._silent_until = now + SILENCE
        return False

    def begin(self, job: Job) -> State:
        """A state of one row for a request's prompt, with as much of it as need not be computed."""
        if job.params.prompt_logprobs is not None:
            return self._fresh(job.pictured)  # all of it is computed
        match = self.match(job.text, job.pictured, job.salt)
        if self.prefixes.missing(match):
            match = self.match(job.text, job.pictured, job.salt, only_memory=True)
        if (restored := self._restored(match, job.pictured)) is None:
            return self.begin(job)  # with less
        state, reused = restored
        job.request.computed = state.lengths[0]
        if job.fetch is not None and match.tier is not None and self.tier is not None:
            match = replace(match, tier=self.tier.name)
        job.reuse = self.told(job.prompt, match, reused)
        job.cuts |= self._worth_keeping(job.pictured, match)
        return state

    def resume(self, prompt: PicturePrompt, salt: str, most: int | None = None) -> State:
        """A state of one row with the part of a text that memory holds, at most `most` tokens of it."""
        match = self.match(prompt.identities, prompt, salt, logits=False, only_memory=True, most=most)
        restored = self._restored(match, prompt)
        return self.resume(prompt, salt, most) if restored is None else restored[0]

    def match(
        self,
        text: Sequence[int],
        prompt: PicturePrompt,
        salt: str,
        logits: bool = True,
        only_memory: bool = False,
        most: int | None = None,
    ) -> Match:
        """The longest part of a text that is stored already, at most `most` tokens of it.

        `text`: the identities of a prompt. A part ends inside no picture that is computed as one piece.
        """
        key, network = self._model.network.frequency_key(len(text)), self._model.network
        whole = match = self.prefixes.match(text, logits, only_memory, key, salt)
        while True:
            stop = match.length if most is None else min(match.length, most)
            stop = before_picture(prompt.media, stop) if network.whole_pictures else stop
            if stop == match.length:
                return replace(match, matched=whole.matched)
            match = self.prefixes.match(text[:stop], False, only_memory, key, salt)

    def _fresh(self, prompt: PicturePrompt) -> State:
        """A state of one row that a text and its pictures are to be read in."""
        state = self._new_state(1)
        prompt.place(state)
        state.expect(0, len(prompt.tokens))
        return state

    def _restored(self, match: Match, prompt: PicturePrompt) -> tuple[State, int] | None:
        """(a state of one row with what is stored of a match, how many of its tokens need not be computed).

        `prompt`: the whole text.

        None where it is of no such state, as a file that was made by someone else may be: it is forgotten.
        """
        if (stored := self.prefixes.snapshot(match)) is None:
            return self._fresh(prompt), 0
        state = self._new_state(1)
        try:
            state.restore(0, _of_text(stored, match.length, prompt))
            state.rewind(0, match.length)
            state.expect(0, len(prompt.tokens))
            reused = match.length - state.rewind_cost(0, match.length)
        except RanksError:  # not of what is stored
            raise
        except (StateError, RuntimeError, IndexError):
            self.prefixes.discard(match)
            return None
        for span in prompt.media:
            if span.end > reused:
                state.place(0, span.at, span.media)
        return state, reused

    def explain(self, prompt: PicturePrompt, salt: str) -> Reuse:
        """Tokens of a prompt that would be reused now."""
        match = self.match(prompt.identities, prompt, salt)
        return self.told(prompt.tokens, match, match.length)

    def told(self, prompt: list[int], match: Match, reused: int) -> Reuse:
        differs = prompt[match.matched] if match.matched < len(prompt) else None
        return Reuse(
            reused,
            len(prompt) - reused,
            match.tier,
            match.matched,
            None if differs is None else match.matched,
            self._model.tokenizer.decode([differs], False) if differs is not None and self._model.has_tokenizer else "",
            self.prefixes.split.forced_by if match.length < min(match.matched, len(prompt) - 1) else None,
        )

    def _worth_keeping(self, pictured: PicturePrompt, match: Match) -> set[int]:
        """Positions to cut a prompt at and store carries of: later requests may continue from each."""
        split = self.prefixes.split
        if not split.needs_carry or split.slack == ANYWHERE:
            return set()
        prompt = pictured.tokens
        new = enumerate(prompt[match.length :], match.length + 1)
        ends = [at for at, token in new if token in self._model.eos_ids]
        wanted = {match.matched, *_thinned(ends, len(prompt)), *range(self._ladder, len(prompt), self._ladder)}
        ahead = len(self.prefixes.opening)
        wanted = {at - (ahead + at) % split.interval for at in wanted}
        if self._model.network.whole_pictures:
            wanted = {before_picture(pictured.media, at) for at in wanted}
        return {at for at in wanted if match.length < at < len(prompt)}

    # ---- keeping

    def bound(self, row_bytes: int) -> None:
        """Have the store leave the rows their bytes, and some to grow by."""
        self.prefixes.shrink(max(0, self.memory - row_bytes - min(row_bytes, self.memory // HEADROOM)))

    def keep(self, snapshot: Snapshot, row_bytes: int, salt: str) -> None:
        """Have the store keep it, if there is room beside the rows. A snapshot that cannot be kept is not an error."""
        if not snapshot.cached:
            return  # nothing was computed
        self.prefixes.shrink(max(0, self.memory - row_bytes))
        self.prefixes.seconds_per_token = self._pace.seconds(1) or 1e-3
        self.prefixes.put(snapshot, salt)
        # Carries are to take no more than the keys and values between them.
        carry, tokens = self.prefixes.split.sizes(snapshot)
        self._ladder = min(max(int(carry / max(tokens, 1)), LADDER[0]), LADDER[1])


def _of_text(stored: Snapshot, length: int, prompt: PicturePrompt) -> Snapshot:
    """A snapshot of the store, which has numbers where pictures stand, with the tokens and pictures of a text.

    They agree in the first `length`; those of the store after them are to be rewound, and any stand for them.
    """
    count = len(stored.tokens)
    tokens = (*prompt.tokens[:count], *[0] * (count - len(prompt.tokens)))
    media = tuple(span for span in prompt.media if span.at < length)
    return replace(stored, tokens=tokens, media=media, source=prompt.source)


def _thinned(ends: list[int], length: int) -> list[int]:
    """Of the ends of turns in a text the last ones, and before them each that is twice as far from the text's end."""
    kept = ends[-TURNS:][::-1]
    for at in reversed(ends[:-TURNS]):
        if length - at >= 2 * (length - kept[-1]):
            kept.append(at)
    return kept
