"""Open a model over several processes of this machine."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from dataclasses import fields
from pathlib import Path

import torch

from lmstate.checkpoints.hub import cache_dir
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_cached
from lmstate.distributed.cuts import LayerCuts
from lmstate.distributed.matrices import ParallelMode
from lmstate.distributed.model import ParallelModel
from lmstate.distributed.ranks import LOADING, Collectives, Ranks
from lmstate.distributed.split import Splitter, layer_cuts
from lmstate.errors import RanksError
from lmstate.models.families import build
from lmstate.models.heads.published import with_head_at
from lmstate.models.model import Model

LOG = logging.getLogger(__name__)


def open_parallel(
    opened: WeightLoader, ranks: Ranks, mode: ParallelMode = "exact", drafter: tuple[Path, str] | None = None
) -> ParallelModel:
    """The model of an open checkpoint over the ranks, each of which opens it too.

    drafter: where a head is that was published apart, and the storage of its matrices.

    Raises `ModelError` where a rank cannot load it.
    """
    try:
        part, cuts = _opened(opened, ranks, mode, drafter)
    except BaseException as error:
        ranks.leave(f"rank 0 could not load the model: {error}")
        raise
    _tell_of(part, cuts)
    values = {each.name: getattr(part, each.name) for each in fields(part) if each.init}
    return ParallelModel(**values, ranks=ranks, cuts=cuts, mode=mode)


def _opened(
    opened: WeightLoader, ranks: Ranks, mode: ParallelMode, drafter: tuple[Path, str] | None
) -> tuple[Model, LayerCuts]:
    """The part of rank 0, once all have theirs."""
    with ranks.turn():
        model = _built(opened, drafter)
        dtype = str(opened.dtype).removeprefix("torch.")
        # After rank 0 has converted what is to be converted: the others find it in the cache.
        ranks.tell(
            "load", str(opened.source.path), opened.kind, dtype, opened.activations, opened.context_size, mode,
            opened.heads, None if drafter is None else [str(drafter[0]), drafter[1]],
        )  # fmt: skip
        cuts = layer_cuts(model.network, ranks.count)
        part = Splitter(ranks.group, ranks.count, mode)(model, cuts)
        for _, fingerprint in ranks.hear(LOADING):
            if fingerprint != part.fingerprint:
                raise ranks.fail(RanksError("a rank loaded another model: the files changed meanwhile"))
    return part, cuts


def open_part(
    group: Collectives,
    path: str,
    weights: str,
    dtype: str,
    activations: int | str,
    context_size: int | None,
    mode: ParallelMode,
    heads: bool,
    drafter: list[str] | None,
) -> tuple[Model, LayerCuts]:
    """The part of another rank of the model that rank 0 opens."""
    cache = cache_dir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rank 0 warns
        opened = WeightLoader(
            open_cached(Path(path), cache), weights, getattr(torch, dtype), None, cache, False, heads, activations,
            context_size,
        )  # fmt: skip
        model = _built(opened, None if drafter is None else (Path(drafter[0]), drafter[1]))
    cuts = layer_cuts(model.network, group.ranks)
    return Splitter(group, group.ranks, mode)(model, cuts), cuts


def _built(opened: WeightLoader, drafter: tuple[Path, str] | None) -> Model:
    opened.splits = True
    model = build(opened)
    return model if drafter is None else with_head_at(model, *drafter)


def _tell_of(part: Model, cuts: LayerCuts) -> None:
    """Log the layers whose state every rank holds whole."""
    whole = Counter(block.mixer.kind for block, own in zip(part.blocks, cuts) if not own and block.mixer.kind != "none")
    if whole:
        told = ", ".join(f"{count} {kind}" for kind, count in whole.items())
        LOG.warning("the state of these layers is not split by heads, every process holds it whole: %s", told)
