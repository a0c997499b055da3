"""Calls over a handle of Ray Serve. MessagePack in, MessagePack out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from lmstate.cluster.handle import ReplicaLost, Unreached


class RayChannel:
    """The deployment of one rank, which has one replica. `handle`: a `DeploymentHandle`. For one event loop."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    @cached_property
    def _plain(self) -> Any:
        """The handle, which sends and receives on the running loop: another thread would wake it for each message."""
        if not self._handle.is_initialized:
            self._handle._init(_run_router_in_separate_loop=False)
        return self._handle.options(request_serialization="msgpack", response_serialization="msgpack")

    async def call(self, method: str, told: bytes) -> bytes:
        with _lost():
            response = self._plain.options(method_name=method).remote(told)
            try:
                found: bytes = await response
            except asyncio.CancelledError:
                response.cancel()
                raise
            return found

    async def stream(self, method: str, told: bytes) -> AsyncGenerator[bytes]:
        with _lost():
            response = self._plain.options(method_name=method, stream=True).remote(told)
            try:
                async for data in response:
                    yield data
            finally:
                response.cancel()  # harmless if it has ended


@contextmanager
def _lost() -> Iterator[None]:
    """Every error of Ray is one of the replica or the way to it: our methods raise nothing."""
    from grpc import RpcError
    from ray.exceptions import RayError
    from ray.serve.exceptions import DeploymentUnavailableError, RayServeException

    try:
        yield
    except DeploymentUnavailableError as error:
        raise Unreached("Ray has no such replica now") from error
    except (RayError, RayServeException, RpcError) as error:
        raise ReplicaLost(f"Ray could not reach a replica: {type(error).__name__}") from error
