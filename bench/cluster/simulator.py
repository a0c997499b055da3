"""N engines as a discrete-event simulation: what they keep, what they compute, and when."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from statistics import quantiles
from typing import Protocol

from bench.cluster.work import Client, Segment, behind
from lmstate.cluster.key import RouteKey, route_key
from lmstate.cluster.placement import ReplicaView, RouteCosts

SPACE = "simulated"


@dataclass(frozen=True)
class Machine:
    """A simulated replica's size and speed, and how the fleet is run."""

    rows: int = 8
    memory: int = 200_000  # tokens of states that are kept
    costs: RouteCosts = field(default_factory=RouteCosts)
    token: float = 0.02  # seconds of a token of an answer
    restart: float = 5.0  # seconds until a killed replica is replaced
    stats: float = 1.0  # seconds between two views of a router
    resident: int = 10  # views between two lists of digests


@dataclass
class Asked:
    """A request on its way."""

    client: Client
    key: RouteKey
    prompt: tuple[Segment, ...]
    answer: int
    at: float
    told: int = 0  # tokens of the answer that were sent, at any replica
    first: float | None = None
    begun: float = 0.0  # when the first token of this replica came
    expected: float = 0.0  # the router's seconds of reading
    moves: int = 0


class Replica:
    """One engine: reads one prompt at a time, answers as many as it has rows."""

    def __init__(self, id: str, rank: int, machine: Machine) -> None:
        self.id, self.rank, self.machine = id, rank, machine
        self.waiting: deque[Asked] = deque()
        self.reading: Asked | None = None
        self.read = (0.0, 0.0, 0)  # when it began to be read, when it is, tokens to compute
        self.answering: list[Asked] = []
        self.kept: OrderedDict[str, Segment] = OrderedDict()  # the last used last
        self.size = 0

    @property
    def requests(self) -> list[Asked]:
        return [*self.waiting, *([] if self.reading is None else [self.reading]), *self.answering]

    def held(self, text: tuple[Segment, ...]) -> int:
        """Tokens of a text whose state is kept."""
        known = 0
        for segment in text:
            if segment.chain not in self.kept:
                break
            known = segment.end
        return known

    def keep(self, text: tuple[Segment, ...]) -> None:
        for segment in reversed(text):  # a beginning is never older than what follows it
            if segment.chain not in self.kept:
                self.size += segment.tokens
            self.kept[segment.chain] = segment
            self.kept.move_to_end(segment.chain)
        while self.size > self.machine.memory:
            self.size -= self.kept.popitem(last=False)[1].tokens

    def view(self, resident: bool) -> ReplicaView:
        """The numbers that a router is told."""
        waiting = [*self.waiting, *([] if self.reading is None else [self.reading])]
        unread = sum(asked.key.tokens - self.held(asked.prompt) for asked in waiting)
        digests = None
        if resident:
            found: list[str] = []
            for segment in reversed(self.kept.values()):
                found += [digest for _, digest in segment.beginnings()]
                if len(found) > 1000:
                    break
            digests = found[:1000]
        wait = self.machine.costs.read * unread
        return ReplicaView(self.id, self.rank, SPACE, wait, len(self.answering), resident=digests)


class Router(Protocol):
    """A policy: told of the replicas now and then, and asked for each request."""

    name: str

    def observe(self, replicas: list[Replica], resident: bool) -> None: ...

    def choose(self, asked: Asked, replicas: list[Replica]) -> Replica: ...

    def begun(self, asked: Asked, replica: Replica) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """Counts and simulated seconds of a run."""

    policy: str
    requests: int
    prompt_tokens: int
    new: int  # that no replica had computed before
    computed: int
    fetched: int
    moved: int  # answers that went on elsewhere
    lost: int  # tokens of answers that were not sent exactly once
    seconds: float
    ttft: tuple[float, float, float]  # p50, p90, p99
    balance: float  # work of the busiest replica over the mean

    @property
    def ratio(self) -> float:
        return self.computed / self.new

    @property
    def hit_rate(self) -> float:
        return 1 - self.computed / self.prompt_tokens


def simulate(
    router: Router, clients: Iterable[Client], replicas: int, machine: Machine, *, kill_every: int = 0
) -> Outcome:
    """Run all clients to their ends. `kill_every`: after so many turns one replica loses all, each in its turn."""
    return _Run(router, list(clients), replicas, machine, kill_every).outcome()


class _Run:
    def __init__(self, router: Router, clients: list[Client], replicas: int, machine: Machine, kill_every: int) -> None:
        self.router, self.machine, self.kill_every = router, machine, kill_every
        self.replicas = [Replica(f"0-{rank}", rank, machine) for rank in range(replicas)]
        self.work = [0.0] * replicas
        self.events: list[tuple[float, int, str, object]] = []
        self.order, self.generation = count(), count(1)
        self.known: set[str] = set()  # segments that anybody computed
        self.stored: set[str] = set()
        self.told: dict[int, int] = {}
        self.ttft: list[float] = []
        self.now = 0.0
        self.prompt_tokens = self.new = self.computed = self.fetched = self.moved = self.lost = self.ended = 0
        self.left = sum(len(client.turns) for client in clients)
        self.views = 0
        self.homeless: list[Asked] = []
        for client in clients:
            self._at(client.begin, "turn", client)
        self._at(0.0, "stats", None)

    def _at(self, when: float, what: str, whom: object) -> None:
        heapq.heappush(self.events, (when, next(self.order), what, whom))

    def outcome(self) -> Outcome:
        while self.left:
            self.now, _, what, whom = heapq.heappop(self.events)
            getattr(self, f"_{what}")(whom)
        cuts = quantiles(self.ttft, n=100, method="inclusive") if len(self.ttft) > 1 else self.ttft * 99
        mean = sum(self.work) / len(self.work)
        return Outcome(
            self.router.name, self.ended, self.prompt_tokens, self.new, self.computed, self.fetched, self.moved,
            self.lost, self.now, (cuts[49], cuts[89], cuts[98]), max(self.work) / mean if mean else 1.0,
        )  # fmt: skip

    def _stats(self, _: object) -> None:
        self.router.observe(self.replicas, self.views % self.machine.resident == 0)
        self.views += 1
        self._at(self.now + self.machine.stats, "stats", None)

    def _turn(self, client: Client) -> None:
        exchange = client.turns[client.done]
        prompt = behind(client.text, f"{client.number}.{client.done}", exchange.new)
        digests = tuple(one for segment in prompt for one in segment.beginnings())
        named = route_key([], session=client.name) if client.name else None
        name = named.name if named else digests[0][1].partition(":")[0] if digests else prompt[0].chain
        key = RouteKey(name, named is not None, prompt[-1].end, digests)
        self.prompt_tokens += key.tokens
        self.new += sum(segment.tokens for segment in prompt if segment.chain not in self.known)
        self.known.update(segment.chain for segment in prompt)
        self._send(Asked(client, key, prompt, exchange.answer, self.now))

    def _send(self, asked: Asked) -> None:
        if not self.replicas:
            self.homeless.append(asked)
            return
        replica = self.router.choose(asked, self.replicas)
        replica.waiting.append(asked)
        self._begin(replica)

    def _begin(self, replica: Replica) -> None:
        """Read the next prompt if nothing is read and a row is free."""
        if replica.reading or not replica.waiting or len(replica.answering) >= self.machine.rows:
            return
        asked, costs = replica.waiting.popleft(), self.machine.costs
        replica.reading = asked
        here, tokens = replica.held(asked.prompt), asked.key.tokens
        unread, seconds = tokens - here, costs.read * (tokens - here)
        there = 0
        for segment in asked.prompt:
            if segment.chain not in self.stored:
                break
            there = segment.end
        if costs.fetch is not None and there > here:
            fetching = costs.fetch + costs.fetched * (there - here) + costs.read * (tokens - there)
            if fetching < seconds:
                seconds, unread = fetching, tokens - there
                self.fetched += there - here
        seconds += costs.read * asked.told  # what was answered elsewhere is read again
        unread += asked.told
        self.computed += unread
        self.work[replica.rank] += seconds
        replica.read = self.now, self.now + seconds, unread
        self._at(self.now + seconds, "read", (replica, asked))

    def _read(self, whom: tuple[Replica, Asked]) -> None:
        replica, asked = whom
        if replica not in self.replicas:
            return
        self.router.begun(asked, replica)
        replica.reading = None
        replica.answering.append(asked)
        replica.keep(asked.prompt)
        asked.begun = self.now
        if asked.first is None:
            asked.first = self.now
            self.ttft.append(self.now - asked.at)
        self.work[replica.rank] += self.machine.token * (asked.answer - asked.told) / self.machine.rows
        self._at(self.now + self.machine.token * (asked.answer - asked.told), "end", (replica, asked, asked.moves))
        self._begin(replica)

    def _end(self, whom: tuple[Replica, Asked, int]) -> None:
        replica, asked, moves = whom
        if replica not in self.replicas or moves != asked.moves:
            return
        replica.answering.remove(asked)
        client = asked.client
        client.text = behind(asked.prompt, f"answer {client.done}", asked.answer)
        self.known.add(client.text[-1].chain)
        self.stored.update(segment.chain for segment in client.text)
        replica.keep(client.text)
        sent = asked.told + round((self.now - asked.begun) / self.machine.token)
        self.lost += abs(sent - asked.answer)
        client.done += 1
        self.ended += 1
        self.left -= 1
        if client.done < len(client.turns):
            self._at(self.now + client.turns[client.done].think, "turn", client)
        if self.kill_every and self.ended % self.kill_every == 0 and self.left:
            self._kill(self.replicas[self.ended // self.kill_every % len(self.replicas)])
        self._begin(replica)

    def _kill(self, replica: Replica) -> None:
        """Its memory is gone, its requests go on elsewhere, and a new one takes its rank a little later."""
        self.replicas.remove(replica)
        self._at(self.now + self.machine.restart, "restart", replica.rank)
        self.router.observe(self.replicas, False)
        if replica.reading is not None:  # the rest of it was never computed here
            begun, ends, unread = replica.read
            self.computed -= round(unread * (ends - self.now) / max(ends - begun, 1e-9))
        for asked in replica.requests:
            if asked in replica.answering:
                asked.told += int((self.now - asked.begun) / self.machine.token)
            asked.moves += 1
            self.moved += 1
            self._send(asked)

    def _restart(self, rank: int) -> None:
        self.replicas.append(Replica(f"{next(self.generation)}-{rank}", rank, self.machine))
        self.replicas.sort(key=lambda replica: replica.rank)
        self.router.observe(self.replicas, False)
        waiting, self.homeless = self.homeless, []
        for asked in waiting:
            self._send(asked)
