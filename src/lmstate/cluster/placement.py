"""Routing by state: a request goes to the replica that is estimated to give its first token soonest.

Deterministic: no clock, no random numbers, and nothing but the standard library.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmstate.cluster.key import RouteKey

MARGIN = 0.2  # seconds by which another replica must be faster than the home of a key
PART = 0.2  # the same as a part of the home's seconds: no backlog grows beyond 1 / (1 - PART) of the smallest
NEARLY = 0.8  # part of the longest known beginning that makes a replica a home of its text
MASK = 2**64 - 1


@dataclass(frozen=True)
class RouteCosts:
    """Seconds of what a request needs."""

    read: float = 5e-4  # of a token of a prompt
    fetch: float | None = None  # of one look into the shared store; None: there is none
    fetched: float = 2e-5  # of a token that comes from the store
    row: float = 0.02  # that one running answer adds to the others


@dataclass(frozen=True)
class ReplicaView:
    """A replica, as far as is known. Replicas of one namespace can go on from each other's states."""

    id: str  # of the process: another one after a restart
    rank: int  # its place among the replicas, which one that replaces it takes over
    namespace: str  # of the model, its data type and KV policy
    wait: float = 0.0  # estimated seconds until a prompt that comes now is begun
    answering: int = 0
    room: int | None = None  # tokens that its rows have room for; None: unknown
    takes: bool = True  # whether it takes requests: not while it drains, or its queue is full
    resident: Sequence[str] | None = None  # digests of beginnings in its memory; None: as before


@dataclass
class _Home:
    """The replicas that a named state was at."""

    id: str
    rank: int
    tokens: dict[str, int] = field(default_factory=dict)  # of the state, by replica


@dataclass
class _Known:
    """Knowledge of a replica beside its view."""

    salt: int = 0
    pending: float = 0.0  # seconds of reading that were sent there since the last view, and are not begun
    requests: int = 0  # as many requests are those
    published: frozenset[str] = frozenset()
    sent: OrderedDict[str, None] = field(default_factory=OrderedDict)  # beginnings of texts that were sent there


class Placement:
    """Chooses replicas. Remembers where states are: of the last `keys` names, and `digests` beginnings a replica."""

    def __init__(self, costs: RouteCosts | None = None, *, keys: int = 100_000, digests: int = 10_000) -> None:
        self.costs = costs or RouteCosts()
        self._keys, self._digests = keys, digests
        self._views: dict[str, ReplicaView] = {}  # by rank, then id: the order in which they are told changes nothing
        self._known: dict[str, _Known] = {}
        self._homes: OrderedDict[str, _Home] = OrderedDict()
        self._where: dict[str, set[str]] = {}  # replicas by the beginnings that they have
        self._count = 0  # requests that were sent

    def observe(self, views: Collection[ReplicaView]) -> None:
        """Take these for the replicas that there are. Their numbers count what was sent to them before."""
        self._views = {view.id: view for view in sorted(views, key=lambda view: (view.rank, view.id))}
        for id in self._known.keys() - self._views.keys():
            self._forget(id, self._known.pop(id))
        for id, view in self._views.items():
            known = self._known.setdefault(id, _Known())
            known.salt, known.pending, known.requests = _mixed(view.rank + 1), 0.0, 0
            if view.resident is not None:
                self._forget(id, known)
                known.published = frozenset(view.resident)
                known.sent.clear()
                for digest in known.published:
                    self._where.setdefault(digest, set()).add(id)

    def choose(self, key: RouteKey, namespace: str) -> list[str]:
        """The ids of the replicas to try, best first. Empty if none of this namespace takes requests."""
        taking = [view for view in self._views.values() if view.takes and view.namespace == namespace]
        views = [view for view in taking if view.room is None or view.room >= key.tokens] or taking
        if not views:
            return []
        home, held = self._held(key)
        stored = max(held.values(), default=0)  # what was computed anywhere is in the store as well, if there is one
        seconds = {
            view.id: self._wait(view) + self._reading(key.tokens, held.get(view.id, 0), stored) for view in views
        }
        name = int(key.name[:16], 16)
        first = self._home(name, views, home, held, seconds)
        most = seconds[first] - max(MARGIN, PART * seconds[first])
        if faster := [view.id for view in views if seconds[view.id] < most]:
            first, dice = faster[0], _mixed(name ^ self._count)
            if len(faster) > 1:  # the better of two: several fronts that know the same do not all choose the best
                one, step = dice % len(faster), 1 + (dice >> 32) % (len(faster) - 1)
                first = min(faster[one], faster[(one + step) % len(faster)], key=seconds.__getitem__)
        return [first, *sorted(seconds.keys() - {first}, key=lambda id: (seconds[id], self._views[id].rank, id))]

    def sent(self, key: RouteKey, id: str) -> float:
        """Note that a request goes to this replica. Returns the seconds to give to `begun`."""
        if (known := self._known.get(id)) is None:
            return 0.0
        home, held = self._held(key)
        seconds = self._reading(key.tokens, held.get(id, 0), max(held.values(), default=0))
        self._count += 1
        known.pending += seconds
        known.requests += 1
        for _, digest in key.beginnings:
            known.sent[digest] = None
            known.sent.move_to_end(digest)
            self._where.setdefault(digest, set()).add(id)
        while len(known.sent) > self._digests:
            if (oldest := known.sent.popitem(last=False)[0]) not in known.published:
                self._without(id, oldest)
        if key.named:
            if home is None:
                home = self._homes[key.name] = _Home(id, 0)
                if len(self._homes) > self._keys:
                    self._homes.popitem(last=False)
            home.id, home.rank, home.tokens[id] = id, self._views[id].rank, key.tokens
            home.tokens = {id: tokens for id, tokens in home.tokens.items() if id in self._views}
            self._homes.move_to_end(key.name)
        return seconds

    def begun(self, id: str, seconds: float) -> None:
        """Note that a request has its first token. `seconds`: from `sent`."""
        if (known := self._known.get(id)) is not None and known.requests:
            known.pending, known.requests = max(0.0, known.pending - seconds), known.requests - 1

    def home(self, key: RouteKey) -> str | None:
        """The replica that a named state was last at."""
        return None if (home := self._homes.get(key.name)) is None else home.id

    def states(self) -> Counter[str]:
        """Number of named states by the replica that they were last at."""
        return Counter(home.id for home in list(self._homes.values()))

    # ---- the parts of it

    def _held(self, key: RouteKey) -> tuple[_Home | None, dict[str, int]]:
        """(the home of a named state, the tokens of the prompt whose state each replica has)."""
        home = self._homes.get(key.name) if key.named else None
        held = {} if home is None else {id: min(tokens, key.tokens) for id, tokens in home.tokens.items()}
        for tokens, digest in reversed(key.beginnings):
            for id in self._where.get(digest, ()):
                if tokens > held.get(id, 0):
                    held[id] = tokens
        return home, held

    def _wait(self, view: ReplicaView) -> float:
        """Estimated seconds until a request that is sent now is begun."""
        known = self._known[view.id]
        return view.wait + known.pending + self.costs.row * (view.answering + known.requests)

    def _reading(self, tokens: int, held: int, stored: int) -> float:
        """Seconds to read a prompt of `tokens` tokens; the replica has `held` of them, and the store has `stored`."""
        costs = self.costs
        seconds = costs.read * (tokens - held)
        if costs.fetch is not None and stored > held:
            seconds = min(seconds, costs.fetch + costs.fetched * (stored - held) + costs.read * (tokens - stored))
        return seconds

    def _home(
        self, name: int, views: list[ReplicaView], home: _Home | None, held: dict[str, int], seconds: dict[str, float]
    ) -> str:
        """The replica that a request stays at, unless another one is much faster."""
        if home is not None:
            if home.id in seconds:
                return home.id
            if same := [view.id for view in views if view.rank == home.rank]:
                return same[-1]
        best = max((held.get(view.id, 0) for view in views), default=0)
        if homes := [view.id for view in views if best and held.get(view.id, 0) >= NEARLY * best]:
            return min(homes, key=lambda id: (seconds[id], _mixed(name ^ self._known[id].salt)))
        # Rendezvous hashing: a replica that comes or goes moves the keys that it wins, and no others.
        return max(seconds, key=lambda id: _mixed(name ^ self._known[id].salt))

    def _forget(self, id: str, known: _Known) -> None:
        for digest in known.published.union(known.sent):
            self._without(id, digest)

    def _without(self, id: str, digest: str) -> None:
        if (there := self._where.get(digest)) is not None:
            there.discard(id)
            if not there:
                del self._where[digest]


def _mixed(number: int) -> int:
    """A number of 64 bits that looks random (splitmix64)."""
    number = (number + 0x9E3779B97F4A7C15) & MASK
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & MASK
    return number ^ number >> 31
