"""One application for Ray Serve: engines by rank, and fronts that answer HTTP behind Serve's proxies.

`serve run lmstate.cluster:app model=smollm2 store=redis://localhost`, or the `RayService` of `lmstate cluster yaml`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from lmstate.cluster.cluster import Cluster
from lmstate.cluster.handle import ReplicaLost
from lmstate.cluster.ray_channel import RayChannel
from lmstate.cluster.replica import ReplicaSpec
from lmstate.cluster.scaling import ENGINE

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from lmstate.serve import Settings

LOOK = 1.0  # seconds between two looks at which ranks run
UPSCALE, DOWNSCALE = 10.0, 600.0  # seconds that a wish for more, or fewer, replicas has to last


class AppSpec(ReplicaSpec, frozen=True, forbid_unknown_fields=True):
    """Options of the application: those of its replicas, and of its fronts."""

    replicas: int = 2
    max_replicas: int | None = None  # the most that autoscaling may run; None: it is off
    fronts: int = 1
    host: str = "0.0.0.0"  # where Serve's proxies listen: others than loopback need an API key
    api_key_file: str | None = None  # on the nodes; LMSTATE_API_KEY there counts too
    max_tokens: int = 4096

    @staticmethod
    def of(options: Mapping[str, Any]) -> AppSpec:
        """Options as `serve run` and configurations give them. Raises ValueError for wrong ones."""
        given = dict(options)
        if given.get("store") is None and int(given.get("replicas", 2)) > 1:
            raise ValueError(
                "several replicas were asked for without a store, so that sessions would be lost with their replica: "
                'give the URL of a store that all share, or "none" as the store for no sessions'
            )
        if given.get("store") == "none":
            given["store"] = None
        spec = msgspec.convert(given, AppSpec, strict=False)
        spec.check()
        return spec

    @property
    def ranks(self) -> int:
        """Deployments of engines, running or not."""
        return self.max_replicas or self.replicas

    def check(self) -> None:
        super().check()
        if self.replicas < 1 or self.fronts < 1 or self.ranks < self.replicas:
            raise ValueError(
                f"replicas={self.replicas}, max_replicas={self.max_replicas} and fronts={self.fronts} were asked for; "
                "replicas and fronts are at least 1, max_replicas is at least replicas"
            )

    def engines(self) -> ReplicaSpec:
        """The part of it that engines take."""
        return ReplicaSpec(**{name: getattr(self, name) for name in ReplicaSpec.__struct_fields__})

    def settings(self) -> Settings:
        """The fronts' settings, with the API keys that are here. Raises ValueError without a key beyond loopback."""
        from lmstate.checkpoints.hub import served_name
        from lmstate.serve import Settings, read_keys

        keys = read_keys(None if self.api_key_file is None else Path(self.api_key_file))
        settings = Settings(
            served_name(self.model), self.host, api_keys=keys, given_name=self.model, max_new_tokens=self.max_tokens
        )
        settings.check()
        return settings


class RunningRanks:
    """The deployments of this application that have a replica, as Serve's controller tells."""

    def __init__(self, app: str) -> None:
        self._app, self._looked = app, -LOOK
        self._names: frozenset[str] = frozenset()

    async def has(self, name: str) -> bool:
        if monotonic() - self._looked > LOOK:
            self._looked = monotonic()
            self._names = await asyncio.to_thread(self._look)
        return name in self._names

    def _look(self) -> frozenset[str]:
        from ray import serve

        found = serve.status().applications.get(self._app)
        deployments = {} if found is None else found.deployments
        return frozenset(name for name, one in deployments.items() if one.replica_states.get("RUNNING"))


class SpareChannel(RayChannel):
    """The deployment of a rank that need not run. It is not called then: Serve would start a replica for the call."""

    def __init__(self, handle: Any, name: str, running: RunningRanks) -> None:
        super().__init__(handle)
        self._name, self._running = name, running

    async def call(self, method: str, told: bytes) -> bytes:
        await self._refuse_stopped()
        return await super().call(method, told)

    async def stream(self, method: str, told: bytes) -> AsyncGenerator[bytes]:
        await self._refuse_stopped()
        async for data in super().stream(method, told):
            yield data

    async def _refuse_stopped(self) -> None:
        if not await self._running.has(self._name):
            raise ReplicaLost(f"{self._name} does not run now")


class FrontReplica:
    """A front as a deployment, for `serve.ingress`. `handles`: of the engines, by rank."""

    def __init__(self, spec: bytes, handles: Sequence[Any]) -> None:
        self._spec, self._handles = msgspec.json.decode(spec, type=AppSpec), list(handles)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Wait for the engines, and make the application. It closes the front at its end."""
        from ray import serve

        from lmstate.cluster.serving import FrontFiles
        from lmstate.engine.options import refuse_sources
        from lmstate.serve import create_app

        told = self._spec
        settings = told.settings()
        running = RunningRanks(serve.get_replica_context().app_name)
        channels = [
            RayChannel(handle) if rank < told.replicas else SpareChannel(handle, f"{ENGINE}{rank}", running)
            for rank, handle in enumerate(self._handles)
        ]
        files = await asyncio.to_thread(FrontFiles.of, told.model, told.mmproj)
        cluster = await asyncio.to_thread(Cluster, channels, files, told.store, least=told.replicas)
        refuse_sources(cluster.front.model)
        return create_app(cluster.front, settings)


def app(args: dict[str, Any]) -> Any:
    """Build the application, for `serve run lmstate.cluster:app` and configurations. `args`: see `AppSpec`.

    Raises ValueError for wrong options, and without an API key where `host` lets the network in.
    """
    spec = AppSpec.of(args)
    spec.settings()
    from ray import serve

    from lmstate.cluster.on_ray import engine_deployment
    from lmstate.cluster.ray_cluster import MESSAGES

    engines, told = spec.engines(), msgspec.json.encode(spec.engines())
    bound = []
    for rank in range(spec.ranks):
        deployment = engine_deployment(engines).options(name=f"{ENGINE}{rank}")
        if spec.max_replicas is not None:
            deployment = deployment.options(num_replicas=None, autoscaling_config=rank_scaling(rank < spec.replicas))
        bound.append(deployment.bind(rank, told))
    front = serve.deployment(
        name="front",
        num_replicas=spec.fronts,
        max_ongoing_requests=1000,
        graceful_shutdown_timeout_s=120,
        ray_actor_options={"runtime_env": {"env_vars": dict(MESSAGES)}},
    )(serve.ingress()(FrontReplica))
    return front.bind(msgspec.json.encode(spec), bound)


def rank_scaling(always: bool) -> dict[str, Any]:
    """The autoscaling of a rank, which has one replica or none."""
    least = int(always)
    return {
        "min_replicas": least,
        "initial_replicas": least,
        "max_replicas": 1,
        "upscale_delay_s": UPSCALE,
        "downscale_delay_s": DOWNSCALE,
    }


def run_app(spec: AppSpec, address: str, port: int, name: str) -> str:
    """Run the application on the Ray cluster at `address`, and leave it there. Returns the URL of its proxies."""
    from lmstate.cluster.ray_cluster import RayCluster

    ray = RayCluster(address)
    try:
        from ray import serve

        serve.start(proxy_location="EveryNode", http_options={"host": spec.host, "port": port})
        serve.run(app({**msgspec.to_builtins(spec), "store": spec.store or "none"}), name=name)
    finally:
        ray.close()
    host = "127.0.0.1" if spec.host in ("0.0.0.0", "::") else spec.host
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
