"""Replicas on Ray Serve, and a front over them in this process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import msgspec

from lmstate.checkpoints.hub import served_name
from lmstate.cluster.cluster import Cluster
from lmstate.cluster.ray_channel import RayChannel
from lmstate.cluster.ray_cluster import MESSAGES, RayCluster, check_ray
from lmstate.cluster.replica import EngineReplica, ReplicaSpec
from lmstate.cluster.serving import FrontFiles

NAME = "lmstate"
DRAIN = 120.0  # seconds that running answers have when Ray stops a replica
HEALTH = 2.0  # seconds between two checks of a replica: Ray replaces it after three that fail
ONGOING = 100_000  # requests at a replica: the engine has the queue, and its bound


class RayReplicas(Cluster):
    """A cluster on Ray Serve, whose applications are `NAME-0`, `NAME-1`, ..."""

    def __init__(self, ray: RayCluster, spec: ReplicaSpec, replicas: int, name: str, keep: bool) -> None:
        """`keep`: the replicas go on when it is closed."""
        self._ray, self._apps, self._keep = ray, [f"{name}-{rank}" for rank in range(replicas)], keep
        channels = run_replicas(spec, self._apps)
        super().__init__(channels, FrontFiles.of(spec.model, spec.mmproj), spec.store)

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
    port: int | None = None,
    **options: Any,
) -> Cluster:
    """Run replicas of a model on Ray Serve: on a Ray of this machine, or on the cluster at `address`.

    store    URL of the store that all share, for sessions, and for going on from each other's states; None: there are
             no sessions, and each replica computes what it has not
    name     of the applications on Ray Serve: `NAME-0`, `NAME-1`, ...
    port     of an HTTP server on this machine's loopback, whose address is `Cluster.url`; 0 takes a free one, None
             starts none. API keys are those of the environment
    options  those of `ReplicaSpec`

    Raises ValueError for options that are unknown or out of range, ImportError without Ray.
    """
    check_ray()
    if replicas < 1:
        raise ValueError(f"replicas={replicas} was asked for; give 1 or more")
    spec = msgspec.convert({"model": model, "store": store, **options}, ReplicaSpec)
    spec.check()
    ray = RayCluster(address, cpus=replicas * spec.processors)
    try:
        cluster = RayReplicas(ray, spec, replicas, name, keep=address is not None)
    except BaseException:
        ray.close()
        raise
    if port is not None:
        from lmstate.serve import Settings, read_keys

        try:
            cluster.serve(Settings(served_name(model), port=port, api_keys=read_keys(None), given_name=model))
        except BaseException:
            cluster.close()
            raise
    return cluster


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
        health_check_period_s=HEALTH,
        health_check_timeout_s=15,
        max_constructor_retry_count=3,
        ray_actor_options={
            "num_cpus": spec.processors,
            "num_gpus": gpus,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": threads, **MESSAGES, **carried()}},
        },
    )(EngineReplica)


def carried() -> dict[str, str]:
    """Settings of lmstate that its replicas need as well."""
    return {name: value for name, value in os.environ.items() if name.startswith("LMSTATE_") and "KEY" not in name}
