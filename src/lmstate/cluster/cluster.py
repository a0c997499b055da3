"""A cluster: replicas of one model, the front over them, and HTTP in front of it if it is wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, Queue
from threading import Event, Thread
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING

from lmstate.cluster.remote import CallLoop, Channel, RemoteReplica, watch
from lmstate.cluster.serving import FrontFiles, ServingFront
from lmstate.engine.options import refuse_sources

if TYPE_CHECKING:
    from lmstate.engine.results import ReplicaStatus
    from lmstate.serve import Settings

START = 600.0  # seconds that all replicas may take to load their model


class Cluster:
    """Replicas of one model, and a `front` over them. Close it, or use `with`: it ends what it started."""

    def __init__(
        self,
        channels: Sequence[Channel],
        files: FrontFiles,
        store: str | None,
        *,
        seconds: float | None = None,
        least: int | None = None,
    ) -> None:
        """Wait until `least` replicas answer (default: all), at most `seconds` (10 minutes). Raises TimeoutError."""
        seconds = START if seconds is None else seconds
        wanted = len(channels) if least is None else least
        self._http: FrontServer | None = None
        self._loop = CallLoop()
        try:
            found: Queue[RemoteReplica] = Queue()
            self._add: Callable[[RemoteReplica], object] = found.put  # until there is a front
            for channel in channels:
                self._loop.begin(watch(channel, self._loop, lambda replica: self._add(replica)))
            until, replicas = monotonic() + seconds, list[RemoteReplica]()
            while len(replicas) < wanted:
                try:
                    replicas.append(found.get(timeout=max(0.0, until - monotonic())))
                except Empty:
                    told = f"{len(replicas)} of {wanted} replicas answered within {seconds:.0f} seconds"
                    raise TimeoutError(f"{told}; Ray's logs say why") from None
            self.front = ServingFront(replicas, files, store, loop=self._loop)
            self._add = self.front.add
        except BaseException:
            self._loop.close()
            raise

    @property
    def url(self) -> str | None:
        """Address of its HTTP server; None if there is none."""
        return None if self._http is None else self._http.url

    def serve(self, settings: Settings) -> str:
        """Serve HTTP on a thread of this process until the cluster is closed, and return the address.

        Raises ValueError for settings that let the network in without a key, UnsupportedError for a model whose tokens
        read a source, OSError where it cannot listen, and RuntimeError if it serves already.
        """
        if self._http is not None:
            raise RuntimeError(f"the cluster serves HTTP at {self._http.url} already")
        settings.check()
        refuse_sources(self.front.model)
        self._http = FrontServer(self.front, settings)
        return self._http.url

    def status(self) -> list[ReplicaStatus]:
        """The replicas: rank, id and process, whether they take requests, sessions, hit rate and load."""
        return self.front.replica_statuses()

    def drain(self, rank: int, seconds: float = 0.0) -> bool:
        """Have the replica of a rank end its answers within `seconds`, or go on elsewhere; Ray replaces it then.

        Returns whether the store took all that was computed. Raises ValueError for a rank that is not there.
        """
        return self.front.drain_rank(rank, seconds)

    def close(self) -> None:
        """Close the HTTP server, if there is one, and the front. Harmless if it was closed."""
        if self._http is not None:
            self._http.close()
        self.front.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class FrontServer:
    """The HTTP server of a front, on a thread."""

    def __init__(self, front: ServingFront, settings: Settings) -> None:
        """Wait until it listens. Raises OSError if it cannot."""
        from lmstate.serve import make_server

        listens, port = Event(), list[int]()

        def ready(taken: int) -> None:
            port.append(taken)
            listens.set()

        def run() -> None:
            with suppress(SystemExit):  # uvicorn's, where it could not start
                self._server.run()
            listens.set()

        self._server = make_server(front, settings, close_engine=False)
        self._server.ready = ready
        self._thread = Thread(target=run, name="lmstate-http", daemon=True)
        self._thread.start()
        listens.wait()
        if not port:
            raise OSError(f"cannot serve on {settings.host}:{settings.port}")
        host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port[0]}"

    def close(self) -> None:
        """End its answers within the settings' `drain`, and the thread."""
        self._server.should_exit = True
        self._thread.join()
