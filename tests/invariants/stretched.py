"""Models of the zoo with a rope that changes with the length of the text, whatever their layers remember."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import lmstate
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.parallel_hybrid import ParallelHybrid
from lmstate.models.layers.rope import Rope
from tests.zoo import ours

NATIVE = 64


@lru_cache(maxsize=16)
def stretched(case: str, continuous: bool = False) -> lmstate.Model:
    """A model of the zoo whose frequencies are lower past `NATIVE` tokens: once (longrope), or ever more (dynamic)."""

    def of(mixer: Mixer) -> Mixer:
        if isinstance(mixer, ParallelHybrid):
            return replace(mixer, attention=of(mixer.attention))
        if not isinstance(mixer, Attention) or mixer.rope is None:
            return mixer
        return replace(mixer, rope=stretch(mixer.rope, continuous))

    model = ours(case)
    blocks = [replace(block, mixer=of(block.mixer)) for block in model.blocks]
    made = replace(model, network=replace(model.network, blocks=tuple(blocks)), _fingerprint=None)
    assert made.network.dynamic_ropes, "no layer of it has a rope"
    return made


def stretch(rope: Rope, continuous: bool) -> Rope:
    base = rope.frequencies
    return replace(
        rope,
        original_max_positions=NATIVE,
        long_frequencies=lambda horizon: base * (NATIVE / horizon if continuous else 0.3),
        continuous=continuous,
    )
