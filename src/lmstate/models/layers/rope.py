"""Rotary frequencies: the default ones (Su et al. 2021), and the ways to stretch them to longer texts."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from lmstate import ops
from lmstate.checkpoints.config import Config
from lmstate.errors import ModelError
from lmstate.state import Step
from lmstate.state.step import DeviceStep

PIECE, TABLED = 1024, 2**16
"""Positions whose tables are made together, and of how many they are kept."""


@dataclass(frozen=True, eq=False)
class Rope:
    """One set of rotary frequencies; layers that share one share its tables in a step.

    `frequencies` float32 `[rot / 2]` in radians a token. Two kinds depend on the length of the text: past
    `original_max_positions` theirs are `long_frequencies(length)`, and `frequency_key` tells lengths apart that rotate
    differently. `scale` multiplies cosines and sines (yarn and longrope call it the attention factor); past
    `original_max_positions` that is `long_scale` where there is one. `axes`: for each frequency, the axis of a
    picture's positions (time, height, width) that it turns by; None where positions have one axis (M-RoPE, 2409.12191).
    """

    frequencies: Tensor
    scale: float = 1.0
    interleaved: bool = False
    original_max_positions: int | None = None
    long_frequencies: Callable[[int], Tensor] | None = field(default=None, repr=False)
    continuous: bool = False  # `long_frequencies` differs from each length to the next
    long_scale: float | None = None
    axes: tuple[int, ...] | None = None

    def frequency_key(self, length: int) -> int:
        """A number that two lengths share if the frequencies are the same for both."""
        if self.original_max_positions is None or length <= self.original_max_positions:
            return 0
        return length if self.continuous else 1

    def at(self, length: int) -> Tensor:
        if self.long_frequencies is None or not self.frequency_key(length):
            return self.frequencies
        return self.long_frequencies(length)

    def rotation(self, step: Step) -> ops.RopeTables:
        """Cosines and sines of a step's positions; one table a step."""
        return step.cached(self, lambda: self._rotation(step))

    def fused_rotation(self, step: Step) -> ops.RopeTables:
        """The same for a fused sublayer: of all positions from 0 on, where the length of the text makes no difference.

        They are computed once, not in each step, and for the positions that some step has come to.
        """
        if self.original_max_positions is not None or isinstance(step, DeviceStep) or step.longest > TABLED:
            return self.rotation(step)
        if self.axes is not None and step.axis_positions is not None:
            return self.rotation(step)
        # The same ones in all of a step: another thread may have dropped them meanwhile.
        return step.cached((self, "all positions"), lambda: self._tabled(step))

    def _tabled(self, step: Step) -> ops.RopeTables:
        """Tables of all positions, filled where the step's tokens stand; zeros elsewhere, which take no memory."""
        if not self._kept:
            cos, sin = self.frequencies.new_zeros(2, TABLED, self.frequencies.shape[-1])
            self._kept["tables"] = ops.RopeTables(cos, sin, self.interleaved), set()
        tables, filled = self._kept["tables"]
        for start, end in zip(step.starts, step.ends):
            for piece in range(start // PIECE, -(-end // PIECE)):
                if piece not in filled:
                    first = piece * PIECE
                    positions = torch.arange(first, first + PIECE, device=tables.cos.device)
                    turned = self._turned(positions[:, None], self.frequencies, self.scale)
                    tables.cos[first : first + PIECE], tables.sin[first : first + PIECE] = turned.cos, turned.sin
                    filled.add(piece)
        return tables

    @cached_property  # not a field: torch.compile takes the hash of a frozen dataclass from all of its fields
    def _kept(self) -> dict[str, tuple[ops.RopeTables, set[int]]]:
        """The tables, and which of their pieces are filled."""
        return {}

    def _rotation(self, step: Step) -> ops.RopeTables:
        frequencies: Tensor = self.frequencies
        scale: float | Tensor = self.scale
        if self.original_max_positions is not None:
            frequencies = torch.stack([self.at(length) for length in step.rope_lengths])[:, None]  # [R, 1, rot / 2]
            if self.long_scale is not None:
                scales = [self.long_scale if self.frequency_key(length) else self.scale for length in step.rope_lengths]
                scale = torch.tensor(scales, dtype=torch.float32, device=frequencies.device)[:, None, None]
        if self.axes is None or step.media == () or step.axis_positions is None:
            return self._turned(step.positions[..., None], frequencies, scale)
        positions = step.axis_positions[list(self.axes)].movedim(0, -1).contiguous()  # [R, T, rot / 2]
        return self._turned(positions, frequencies, scale)

    def tables(self, positions: Tensor) -> ops.RopeTables:
        """Tables of positions `[R, T]` that are not those of a step, of a rope that no length of a text changes."""
        return self._turned(positions[..., None], self.frequencies, self.scale)

    def _turned(self, positions: Tensor, frequencies: Tensor, scale: float | Tensor) -> ops.RopeTables:
        """Tables `[.., rot / 2]` of positions `[.., 1]`, or of one for each frequency."""
        angles = positions.float() * frequencies
        cos, sin = angles.cos(), angles.sin()
        if isinstance(scale, Tensor) or scale != 1.0:
            cos, sin = cos * scale, sin * scale
        return ops.RopeTables(cos, sin, self.interleaved)

    def rotate_by(self, keys: Tensor, delta: int) -> Tensor:
        """Rotate keys `[K, S, D]` as if each had stood `delta` positions farther on; float32."""
        angles = (self.frequencies * delta)[None, None]  # [1, 1, rot / 2]: a row of one token, its heads the slots
        rotated = ops.rope(keys.float().reshape(1, 1, -1, keys.shape[-1]), angles.cos(), angles.sin(), self.interleaved)
        return rotated.view(keys.shape)

    @property
    def device(self) -> torch.device:
        return self.frequencies.device

    def to(self, device: torch.device) -> Rope:
        return self._with(lambda frequencies: frequencies.to(device))

    def inverse(self) -> Rope:
        """Tables that rotate in the other direction."""
        return self._with(torch.neg)

    def __deepcopy__(self, memo: dict[int, object]) -> Rope:
        # Without the tables: they have room for all positions, which a copy would write.
        return replace(self, frequencies=copy.deepcopy(self.frequencies, memo))

    def _with(self, change: Callable[[Tensor], Tensor]) -> Rope:
        given = self.long_frequencies
        changed = None if given is None else lambda length: change(given(length))
        return replace(self, frequencies=change(self.frequencies), long_frequencies=changed)


def rope_fields(config: Config, kind: str | None = None) -> Config:
    """The rope settings of a config, old layout (`rope_theta`, `rope_scaling`) or new (`rope_parameters`).

    `kind` picks among several in one config, those of `sliding_attention` layers, say.
    """
    given = config.fields("rope_parameters") or config.fields("rope_scaling") or Config({}, "config.rope_scaling")
    if kind is not None and isinstance(given.get(kind), dict):
        given = given.fields(kind) or given
    values = dict(given)
    for name in ("rope_theta", "partial_rotary_factor"):
        if values.get(name) is None and config.get(name) is not None:
            values[name] = config[name]
    if config.given("original_max_position_embeddings"):  # outside it goes before the one inside
        values["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    values.setdefault("rope_type", values.get("type", "default"))
    if values["rope_type"] == "mrope":  # of positions on several axes, which in a text are all the same
        values["rope_type"] = "default"
    return Config(values, "config.rope_parameters")


def stretched(config: Config, tokens: int) -> Config:
    """The config for texts of `tokens`: past those that the model was made for, its full attention rotates by YaRN.

    That is `rope_scaling = {"rope_type": "yarn", "factor": tokens / made for}` of transformers and vLLM. Raises
    `ModelError` for a config that stretches its positions already.
    """
    made_for = config.int("max_position_embeddings", low=1, default=None)
    if made_for is None or tokens <= made_for:
        return config
    kind = "full_attention"
    own = rope_fields(config, kind)
    if (name := own.str("rope_type")) != "default":
        raise ModelError(
            f"context_size={tokens} was asked for, and the model was made for {made_for} tokens, with a rope that is "
            f"stretched to them already ({name}): use context_size={made_for} or less"
        )
    factor = tokens / made_for
    yarn = {**own, "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": made_for}
    yarn.pop("type", None)
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    by_kind = {**given, kind: yarn} if isinstance(given.get(kind), dict) else yarn
    without = {"rope_scaling": None, "original_max_position_embeddings": None}
    return Config({**config, **without, "rope_parameters": by_kind}, config.where)


def make_rope(
    config: Config, head_dim: int, *, theta: float = 10_000.0, kind: str | None = None, interleaved: bool = False,
    fraction: float = 1.0,
) -> Rope:  # fmt: skip
    """The rope that a config asks for. Raises `ModelError` if it asks for one that is not known or not complete.

    `theta` and `fraction` (of the head's features that rotate) are used where the config names none.
    """
    rope = rope_fields(config, kind)
    theta = rope.float("rope_theta", low=1.0, high=1e12, default=theta)
    fraction = rope.float("partial_rotary_factor", low=0.0, high=1.0, default=fraction)
    rot = int(head_dim * fraction)
    if rot < 2 or rot % 2:
        raise ModelError(f"{rot} of {head_dim} head features would rotate; rotary positions need an even number")
    name = rope.str("rope_type")
    exponents = torch.arange(0, rot, 2, dtype=torch.float32) / rot
    base = 1.0 / theta**exponents
    if name == "default":
        return Rope(base, interleaved=interleaved)
    if name == "linear":
        return Rope(base / rope.float("factor", low=1e-6), interleaved=interleaved)
    if name == "llama3":
        return Rope(_llama3(base, rope, config), interleaved=interleaved)
    if name == "yarn" and not rope.given("short_factor"):  # Phi-3 calls its longrope so, too
        try:
            frequencies, scale = _yarn(base, theta, rot, rope, config)
        except ArithmeticError as error:
            raise ModelError(f"{rope.where}: no yarn comes out of theta {theta} and these factors: {error}") from error
        return Rope(frequencies, scale, interleaved)
    if name == "proportional":
        whole = 1.0 / theta ** (torch.arange(0, rot, 2, dtype=torch.float32) / head_dim)
        still = torch.zeros((head_dim - rot) // 2, dtype=torch.float32)
        return Rope(torch.cat([whole, still]) / rope.float("factor", low=1e-6, default=1.0), interleaved=interleaved)
    most = config.int("max_position_embeddings", low=1)
    if name == "dynamic":
        if rot == 2:
            raise ModelError(f"{rope.where}: a dynamic rope of 2 features has nothing to stretch")
        factor = rope.float("factor", low=1.0)

        def ntk(length: int) -> Tensor:
            grown = theta * ((factor * length / most) - (factor - 1)) ** (rot / (rot - 2))
            return 1.0 / grown**exponents

        return Rope(base, interleaved=interleaved, original_max_positions=most, long_frequencies=ntk, continuous=True)
    if name in ("longrope", "su", "yarn"):
        return _longrope(base, rope, most, rot, interleaved)
    raise ModelError(
        f"rope type {name!r} is not known; known are default, linear, dynamic, llama3, yarn, longrope, proportional"
    )


def position_axes(
    config: Config, pairs: int, default: tuple[int, ...], *, interleaved: bool = False
) -> tuple[int, ...] | None:
    """For each of a rope's `pairs` of features, the axis that turns it: in sections, or by turns as long as each lasts.

    `default`: pairs of each axis where the config does not say. None where they are not as many as there are.
    """
    sections = rope_fields(config).ints("mrope_section", len(default), default=default)
    if sum(sections) != pairs:
        return None
    if not interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    turns = ((pair, pair % len(sections)) for pair in range(pairs))
    return tuple(axis if pair < len(sections) * sections[axis] else 0 for pair, axis in turns)


def ropes_by_kind(
    config: Config, head_dim: int, *, theta: float, local_theta: float | None = None
) -> tuple[Rope, Rope]:
    """The ropes of full and of sliding layers. Configs of the old layout stretch those of full layers alone."""
    full = make_rope(config, head_dim, theta=theta, kind="full_attention")
    if (config.get("rope_parameters") or config.get("rope_scaling") or {}).get("sliding_attention"):
        return full, make_rope(config, head_dim, theta=local_theta or theta, kind="sliding_attention")
    base = config.float("rope_local_base_freq", low=1.0, default=local_theta)
    base = base or rope_fields(config, "full_attention").float("rope_theta", low=1.0, default=theta)
    plain = {**config, "rope_parameters": None, "rope_scaling": None, "rope_theta": base}
    return full, make_rope(Config(plain, config.where), head_dim)


def _llama3(base: Tensor, rope: Config, config: Config) -> Tensor:
    """Slow frequencies divided by `factor`, fast ones kept, those between blended (Llama 3.1)."""
    factor = rope.float("factor", low=1e-6)
    low, high = rope.float("low_freq_factor", low=1e-6), rope.float("high_freq_factor", low=1e-6)
    native = rope.int("original_max_position_embeddings", low=1, default=None)
    native = native or config.int("max_position_embeddings", low=1)
    wavelength = 2 * math.pi / base
    blend = (native / wavelength - low) / (high - low)
    middle = (1 - blend) * base / factor + blend * base
    slow = wavelength > native / low
    fast = wavelength < native / high
    return torch.where(fast, base, torch.where(slow, base / factor, middle))


def _yarn(base: Tensor, theta: float, rot: int, rope: Config, config: Config) -> tuple[Tensor, float]:
    """Interpolate slow dimensions, keep fast ones, ramp between (Peng et al. 2023); and the factor on cos and sin."""
    native = rope.int("original_max_position_embeddings", low=1, default=None)
    native = native or config.int("max_position_embeddings", low=1)
    factor = rope.float("factor", low=1e-6, default=None)
    if factor is None:
        factor = config.int("max_position_embeddings", low=1) / native

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    scale = rope.float("attention_factor", low=1e-6, high=1e6, default=None)
    if scale is None:
        mscale, over = rope.float("mscale", default=None), rope.float("mscale_all_dim", default=None)
        scale = temperature(mscale) / temperature(over) if mscale and over else temperature(1.0)

    def dimension(rotations: float) -> float:
        """The pair of features that turns `rotations` times over the native length."""
        return rot * math.log(native / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(rope.float("beta_fast", low=0.0, default=0.0) or 32.0)
    high = dimension(rope.float("beta_slow", low=0.0, default=0.0) or 1.0)
    if rope.bool("truncate", default=True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rot - 1)
    ramp = ((torch.arange(rot // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return (base / factor) * ramp + base * (1 - ramp), scale


def _longrope(base: Tensor, rope: Config, most: int, rot: int, interleaved: bool) -> Rope:
    """One factor a dimension, a set for short texts and a set for long ones (Ding et al. 2024)."""
    native = rope.int("original_max_position_embeddings", low=2, default=None) or most
    short, long = (
        torch.tensor(rope.floats(name, rot // 2, low=1e-6, high=1e6), dtype=torch.float32)
        for name in ("short_factor", "long_factor")
    )
    factor = rope.float("factor", low=1e-6, default=None) or most / native
    scale = rope.float("attention_factor", low=1e-6, high=1e6, default=None)
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(native))
    at_length = base / long
    return Rope(
        base / short, scale, interleaved, original_max_positions=native, long_frequencies=lambda length: at_length
    )
