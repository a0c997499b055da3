"""A replica's process: it loads the model and owns the engine. Ray makes it from a rank and a text."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from lmstate.cluster.scaling import OCCUPIED, WAITING
from lmstate.cluster.served import ServedEngine
from lmstate.engine.engine import Engine


class ReplicaSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of all replicas, as `lmstate.load` and `Engine` take them."""

    model: str
    store: str | None = None
    weights: str = "auto"
    activations: int | str = "auto"
    adapter: str | None = None
    mmproj: str | None = None
    context_size: int | None = None
    device: str | None = None
    parallel: int = 1
    parallel_mode: Literal["exact", "sum"] = "exact"
    draft: str = "auto"
    kv_bits: int | None = None
    carries: int = 32
    rows: int | None = None
    queue: int = 256
    memory: int | str = "4GiB"
    max_itl: float | None = None
    stall: float | None = None
    threads: int = 1

    @property
    def processors(self) -> int:
        """Processors that a replica needs: each of its processes computes on one or more."""
        return max(self.threads, self.parallel)

    def check(self) -> None:
        """Refuse what a replica could not start with: its errors are seen late. Raises ValueError and OSError."""
        from lmstate.checkpoints.hub import check_name
        from lmstate.engine.options import as_bytes
        from lmstate.engine.pace import Pace
        from lmstate.engine.tiers import check_store

        check_name(self.model)
        if self.mmproj is not None:
            check_name(self.mmproj)
        as_bytes(self.memory)
        Pace.bounded(self.max_itl, self.stall)
        if self.parallel < 1 or self.threads < 1:
            raise ValueError(f"parallel={self.parallel}, threads={self.threads} were asked for; both are at least 1")
        if self.carries not in (32, 16, 8):
            raise ValueError(f"carries={self.carries} was asked for; carries are stored in 32, 16 or 8 bits")
        elsewhere = self.device not in (None, "cpu")
        if self.parallel > 1 and (self.adapter or self.mmproj or elsewhere):
            raise ValueError(
                f"parallel={self.parallel} was asked for with an adapter, mmproj or a device: a model over several "
                "processes has none of these, and is on the CPU"
            )
        if self.draft not in (drafts := ("auto", "text", "heads", "none")):
            raise ValueError(f"unknown draft={self.draft!r}; with replicas it is one of {', '.join(drafts)}")
        if self.store is not None:
            if "://" not in self.store:
                raise ValueError(
                    f"store={self.store!r} was asked for, a folder, which one process has; replicas share a URL: "
                    "redis://HOST, s3://BUCKET/PATH, or file:///PATH on one machine"
                )
            check_store(self.store)

    def engine(self) -> Engine:
        """Load the model, and make an engine of it."""
        import lmstate
        from lmstate.engine.options import default_rows
        from lmstate.kv import Quantized

        lmstate.set_threads(self.threads)
        options: dict[str, Any] = {"activations": self.activations, "heads": self.draft == "heads"}
        model = lmstate.load(
            self.model,
            self.weights,
            device=self.device,
            parallel=self.parallel,
            parallel_mode=self.parallel_mode,
            adapter=self.adapter,
            mmproj=self.mmproj,
            context_size=self.context_size,
            **options,
        )
        return Engine(
            model,
            rows=self.rows or default_rows(model.device),
            memory=self.memory,
            store=self.store,
            kv=None if self.kv_bits is None else Quantized(self.kv_bits),
            carries=self.carries,
            draft=None if self.draft == "none" else self.draft,
            queue=self.queue,
            max_itl=self.max_itl,
            stall=self.stall,
        )


class EngineReplica(ServedEngine):
    """The class of a Ray Serve deployment."""

    def __init__(self, rank: int, spec: bytes) -> None:
        super().__init__(msgspec.json.decode(spec, type=ReplicaSpec).engine(), rank)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The numbers that `scaling` decides by, which Ray asks for."""
        load = self.engine.load()
        rows = load.waiting + load.reading + load.answering
        return {WAITING: load.first_token or 0.0, OCCUPIED: min(1.0, rows / self.engine.rows)}

    def __del__(self) -> None:
        if (engine := self.__dict__.get("engine")) is not None:  # loading it may have failed
            engine.close()
