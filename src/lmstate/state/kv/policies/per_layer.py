"""A policy for each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from lmstate.errors import StateError, UnsupportedError
from lmstate.state.kv.policies.base import Budget, Evicting
from lmstate.state.kv.policies.storage import Dense
from lmstate.state.layers.base import Policy


@dataclass(frozen=True)
class PerLayer:
    """`policies[layer]` for the layers named, `default` for the others. Layers count from 0, of every kind."""

    policies: Mapping[int, Policy]
    default: Policy = field(default=Dense())

    def __call__(self, layer: int) -> Policy:
        return self.policies.get(layer, self.default)


Policies = Policy | PerLayer | Callable[[int], Policy]
"""One policy for every layer, or what gives a layer's by its number."""


def pyramid(policy: Budget, layers: int, ratio: float = 4.0) -> PerLayer:
    """`policy` with budgets that fall evenly from the first of `layers` to the last, `ratio` times smaller.

    They add up to about `layers * policy.budget`; deeper layers need fewer tokens (PyramidKV, 2406.02069).
    """
    if not isinstance(policy, Budget):
        raise StateError(f"pyramid was given {policy!r:.80}; it takes a policy with a budget, kv.Recent(2048), say")
    if layers < 1 or ratio < 1:
        raise StateError(f"pyramid(layers={layers}, ratio={ratio}) was asked for; both are at least 1")
    least = max(1, policy.sinks + policy.recent)
    last = 2 * policy.budget / (1 + ratio)
    steps = [ratio + (1 - ratio) * layer / max(layers - 1, 1) for layer in range(layers)]
    return PerLayer({
        layer: replace(policy, budget=max(least, round(last * step))) for layer, step in enumerate(steps)
    })  # fmt: skip


def policies_of(kv: Policies, layers: int) -> list[Policy]:
    """The policy of each of `layers` layers. Raises `StateError` for anything but a policy, and for a layer that the
    model does not have."""
    if isinstance(kv, PerLayer) and (others := [layer for layer in kv.policies if layer not in range(layers)]):
        named = ", ".join(repr(layer) for layer in others[:3]) + (", ..." if len(others) > 3 else "")
        raise StateError(f"PerLayer has a policy for layer {named}; the model has the layers 0 to {layers - 1}")
    return [_policy_of(kv, layer) for layer in range(layers)]


def guarded(policy: Policy, count: int) -> Policy:
    """The policy for rows that begin with `count` positions which are never evicted, beside what it keeps of a text.

    Raises `UnsupportedError` for a policy that may evict any position.
    """
    if not count or not isinstance(policy, Evicting):
        return policy
    if not isinstance(policy, Budget) or type(policy).evict is not Budget.evict:
        raise UnsupportedError(
            f"{policy} was given for a model with learned positions in front of each row, and may evict them: give a "
            "policy with a budget, which keeps its sinks"
        )
    return replace(policy, budget=policy.budget + count, sinks=policy.sinks + count)


def _policy_of(kv: Policies, layer: int) -> Policy:
    # A class is not a function of a layer: it would take the layer's number for its first field.
    policy = kv if isinstance(kv, Policy | type) or not callable(kv) else kv(layer)
    if not isinstance(policy, Policy):
        raise StateError(
            f"kv={policy!r} was given for layer {layer}; it is a policy of lmstate.kv (kv.Quantized(8), say), "
            f"or PerLayer, or a function that gives a policy for a layer"
        )
    return policy
