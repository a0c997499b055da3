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
from lmstate.models.model import Model

LOG = logging.getLogger(__name__)


def open_parallel(opened: WeightLoader, ranks: Ranks, mode: ParallelMode = "exact") -> ParallelModel:
    """The model of an open checkpoint over the ranks, each of which opens it too.

    Raises `ModelError` where a rank cannot load it.
    """
    try:
        part, cuts = _opened(opened, ranks, mode)
    except BaseException as error:
        ranks.leave(f"rank 0 could not load the model: {error}")
        raise
    _tell_of(part, cuts)
    values = {each.name: getattr(part, each.name) for each in fields(part) if each.init}
    return ParallelModel(**values, ranks=ranks, cuts=cuts, mode=mode)


def _opened(opened: WeightLoader, ranks: Ranks, mode: ParallelMode) -> tuple[Model, LayerCuts]:
    """The part of rank 0, once all have theirs."""
    with ranks.turn():
        opened.splits = True
        model = build(opened)
        dtype = str(opened.dtype).removeprefix("torch.")
        # After rank 0 has converted what is to be converted: the others find it in the cache.
        ranks.tell(
            "load", str(opened.source.path), opened.kind, dtype, opened.activations, opened.context_size, mode
        )  # fmt: skip
        cuts = layer_cuts(model.blocks, ranks.count)
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
) -> tuple[Model, LayerCuts]:
    """The part of another rank of the model that rank 0 opens."""
    cache = cache_dir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rank 0 warns
        opened = WeightLoader(
            open_cached(Path(path), cache), weights, getattr(torch, dtype), None, cache, False, False, activations,
            context_size,
        )  # fmt: skip
        opened.splits = True
        model = build(opened)
    cuts = layer_cuts(model.blocks, group.ranks)
    return Splitter(group, group.ranks, mode)(model, cuts), cuts


def _tell_of(part: Model, cuts: LayerCuts) -> None:
    """Log the layers whose state every rank holds whole."""
    whole = Counter(block.mixer.kind for block, own in zip(part.blocks, cuts) if not own and block.mixer.kind != "none")
    if whole:
        told = ", ".join(f"{count} {kind}" for kind, count in whole.items())
        LOG.warning("the state of these layers is not split by heads, every process holds it whole: %s", told)
