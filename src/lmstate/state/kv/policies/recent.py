"""Attention sinks and the most recent tokens (StreamingLLM; Xiao et al. 2023, 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass

from lmstate.state.kv.policies.base import Budget


@dataclass(frozen=True)
class Recent(Budget):
    """Keeps the first `sinks` positions and the last `budget - sinks`, however the tokens came.

    Keys keep the rotation of the position that they had in the text.
    """
