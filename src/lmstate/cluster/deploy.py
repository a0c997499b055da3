"""Replicas on Ray Serve, and a front over them in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from queue import Empty, Queue
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from lmstate.cluster.ray_channel import RayChannel
from lmstate.cluster.ray_cluster import RayCluster, check_ray
from lmstate.cluster.remote import CallLoop, Channel, RemoteReplica, watch
from lmstate.cluster.replica import EngineReplica, ReplicaSpec
from lmstate.cluster.serving import ServingFront

if TYPE_CHECKING:
    from lmstate.text.tokenizer import Tokenizer

NAME = "lmstate"
START = 600.0  # seconds that all replicas may take to load their model
DRAIN = 120.0  # seconds that running answers have when Ray stops a replica
ONGOING = 100_000  # requests at a replica: the engine has the queue, and its bound


class Cluster:
    """Replicas of one model, and a `front` over them. Close it, or use `with`: it ends what it started."""

    def __init__(self, channels: Sequence[Channel], tokenizer: Tokenizer | None, store: str | None) -> None:
        """Wait until all replicas answer. Raises TimeoutError."""
        self._loop = CallLoop()
        try:
            found: Queue[RemoteReplica] = Queue()
            self._add: Callable[[RemoteReplica], object] = found.put  # until there is a front
            for channel in channels:
                self._loop.begin(watch(channel, self._loop, lambda replica: self._add(replica)))
            until, replicas = monotonic() + START, list[RemoteReplica]()
            while len(replicas) < len(channels):
                try:
                    replicas.append(found.get(timeout=max(0.0, until - monotonic())))
                except Empty:
                    told = f"{len(replicas)} of {len(channels)} replicas answered within {START:.0f} seconds"
                    raise TimeoutError(f"{told}; Ray's logs say why") from None
            self.front = ServingFront(replicas, tokenizer, store, at_close=self._loop.close)
            self._add = self.front.add
        except BaseException:
            self._loop.close()
            raise

    def status(self) -> list[dict[str, Any]]:
        """Each replica's rank, id and process, its load, and whether it takes requests."""
        return [
            {
                "rank": replica.rank,
                "id": replica.id,
                "pid": replica.facts.pid,
                "takes": replica.takes,
                **msgspec.to_builtins(replica.load()),
            }
            for replica in sorted(self.front.remote(), key=lambda replica: replica.rank)
        ]

    def drain(self, rank: int, seconds: float = 0.0) -> bool:
        """Have the replica of a rank end its answers within `seconds`, or go on elsewhere; Ray replaces it then.

        Returns whether the store took all that was computed. Raises ValueError for a rank that is not there.
        """
        replicas = {replica.rank: replica for replica in self.front.replicas}
        if rank not in replicas:
            raise ValueError(f"there is no replica of rank {rank}; expected one of {sorted(replicas)}")
        return self.front.drain_replica(replicas[rank].id, seconds)

    def close(self) -> None:
        """Close the front. Harmless if it was closed."""
        self.front.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RayReplicas(Cluster):
    """A cluster on Ray Serve, whose applications are `NAME-0`, `NAME-1`, ..."""

    def __init__(self, ray: RayCluster, spec: ReplicaSpec, replicas: int, name: str, keep: bool) -> None:
        """`keep`: the replicas go on when it is closed."""
        self._ray, self._apps, self._keep = ray, [f"{name}-{rank}" for rank in range(replicas)], keep
        channels = run_replicas(spec, self._apps)
        super().__init__(channels, read_tokenizer(spec.model), spec.store)

    def close(self) -> None:
        super().close()
        if not self._keep:
            from ray import serve

            for app in self._apps:
                serve.delete(app, _blocking=False)
        self._ray.close()


def deploy(
    model: str,
    replicas: int = 2,
    store: str | None = None,
    *,
    address: str | None = None,
    name: str = NAME,
    **options: Any,
) -> Cluster:
    """Run replicas of a model on Ray Serve: on a Ray of this machine, or on the cluster at `address`.

    store    URL of the store that all share, for sessions, and for going on from each other's states; None: there are
             no sessions, and each replica computes what it has not
    options  those of `ReplicaSpec`

    Raises ValueError for options that are unknown or out of range, ImportError without Ray.
    """
    check_ray()
    if replicas < 1:
        raise ValueError(f"replicas={replicas} was asked for; give 1 or more")
    spec = msgspec.convert({"model": model, "store": store, **options}, ReplicaSpec)
    spec.check()
    ray = RayCluster(address, cpus=replicas * spec.threads)
    try:
        return RayReplicas(ray, spec, replicas, name, keep=address is not None)
    except BaseException:
        ray.close()
        raise


def run_replicas(spec: ReplicaSpec, apps: Sequence[str]) -> list[RayChannel]:
    """Deploy an application of each name, with a replica of its rank, and wait until they run."""
    from ray import serve

    serve.start(proxy_location="Disabled")
    targets = [
        serve.RunTarget(engine_deployment(spec).bind(rank, msgspec.json.encode(spec)), name=app, route_prefix=None)
        for rank, app in enumerate(apps)
    ]
    return [RayChannel(handle) for handle in serve.run_many(targets)]


def engine_deployment(spec: ReplicaSpec) -> Any:
    """The deployment of one rank."""
    from ray import serve

    threads = str(spec.threads)
    gpus = 0 if spec.device is None or spec.device == "cpu" else 1
    return serve.deployment(
        num_replicas=1,
        max_ongoing_requests=ONGOING,
        graceful_shutdown_timeout_s=DRAIN,
        health_check_period_s=5,
        health_check_timeout_s=15,
        max_constructor_retry_count=3,
        ray_actor_options={
            "num_cpus": spec.threads,
            "num_gpus": gpus,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": threads, **carried()}},
        },
    )(EngineReplica)


def carried() -> dict[str, str]:
    """Settings of lmstate that its replicas need as well."""
    return {name: value for name, value in os.environ.items() if name.startswith("LMSTATE_") and "KEY" not in name}


def read_tokenizer(model: str) -> Tokenizer | None:
    from lmstate.checkpoints.open import open_checkpoint

    return open_checkpoint(model, progress=False)[1]
