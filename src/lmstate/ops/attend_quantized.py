"""Attention over keys and values that are stored in few bits, ring or not: rotating, storing, attending.

8 bits: every position is codes, one scale a vector; keys and values are turned by a Hadamard matrix first, so that no
channel stands out (QuaRot, 2404.00456). 4 and 2 bits: the same where tokens do not stay together (slots that a policy
evicts from), with a lowest value too; else keys have a scale for each channel of a block of positions
(KIVI, 2402.02750), and are codes only once their block is whole; the newest positions are also floats, in a ring. A
query at position p sees as codes the blocks that end at `p - lag` or before, as floats the others: by its position
alone, however the tokens came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lmstate.ops import dispatch, kv_codes
from lmstate.ops.append import append_reference
from lmstate.ops.attend import MOST, attend_reference, attend_span, unroll
from lmstate.ops.attend_slots import OBSERVED, Columns, attend_slots
from lmstate.ops.kv_codes import BLOCK
from lmstate.ops.rope import rope
from lmstate.ops.rotate_attend import Rotation
from lmstate.ops.scoring import EVERYTHING, Scoring, Sight

if TYPE_CHECKING:
    from lmstate.ops.cpu.codes import Codes

WHOLE = 256
"""Numbers of a vector that share a scale, at most: a head's."""


class Held(NamedTuple):
    """Codes `[R, K, S, bytes]` and float16 scales `[R, K, S, n]`, position p in slot p % S.

    8 bits, or without a tail: those of `kv_codes.encode(..., WHOLE)`, of turned vectors. Else keys are those of
    `kv_codes.encode_blocks`, and S is a multiple of `BLOCK`.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor


class Tail(NamedTuple):
    """The newest positions as floats: rings `[R, K, S', D]` and `[R, K, S', Dv]` of the same dtype, values turned."""

    k: Tensor
    v: Tensor
    lag: int

    @property
    def reads(self) -> int:
        """How many positions before its own a query may see as floats."""
        return self.lag - 1 + BLOCK - 1


def attend_quantized(
    q: Tensor,
    new: tuple[Tensor, Tensor] | None,
    rotation: Rotation | None,
    held: Held,
    tail: Tail | None,
    starts: Tensor,
    counts: Tensor,
    scoring: Scoring,
    sight: Sight = EVERYTHING,
    *,
    bits: int,
    dtype: torch.dtype = torch.float32,
    columns: Columns | None = None,
) -> Tensor:
    """Store new keys and values `[R, T, K, D]`, and attend: q float32 `[R, T, H, D]` -> float32 `[R, T, H, Dv]`.

    `rotation` turns q and the new keys first. The other arguments are those of `ops.attend`. A tail holds the step and
    `reads` positions before it; without one every vector has scales of its own. The reference expands what it reads in
    `dtype`. Adds what each slot receives to `columns`, of a ring that has not wrapped. Reads starts and counts on the
    host.
    """
    body = _native(q, new, held, tail, bits, scoring.sinks)
    most = MOST if columns is None else OBSERVED
    if body is not None and q.shape[1] <= most:
        out = body.attend(q, new, rotation, held, tail, starts, counts, bits, scoring, sight, columns)
        assert out is not None
        return out
    if rotation is not None:
        q = rope(q, *rotation)
        new = None if new is None else (rope(new[0], *rotation), new[1])
    if new is not None:
        if body is not None:
            body.attend(q, new, None, held, tail, starts, counts, bits, scoring, sight, stores_only=True)
        elif tail is None:
            _store_vectors(new, held, starts, counts, bits)
        else:
            _store_blocks(new, held, tail, starts, counts, bits)
    if body is not None and columns is not None:
        blocks = []
        for first, block in zip(range(0, q.shape[1], most), q.split(most, dim=1)):
            some = (counts - first).clamp(0, most)
            out = body.attend(block, None, None, held, tail, starts + first, some, bits, scoring, sight, columns)
            assert out is not None
            blocks.append(out)
        return torch.cat(blocks, dim=1)
    if tail is None:
        end = min(held.k.shape[2], int((starts + counts).max()))  # position p < end lies in slot p, or the ring is full
        k, v = (
            kv_codes.decode(codes[:, :, :end], scales[:, :, :end], bits, dtype)
            for codes, scales in ((held.k, held.k_scale), (held.v, held.v_scale))
        )
        if columns is None:
            seen = attend_reference(kv_codes.turned(q), k, v, starts, counts, scoring, sight)
        else:
            slots, observed = torch.arange(end, device=k.device), columns._replace(sums=columns.sums[..., :end])
            where = slots.expand(k.shape[:3])
            seen = attend_slots(kv_codes.turned(q), k, v, where, starts, counts, scoring, sight, observed)
    else:
        seen = _attend_blocks(q, held, tail, starts, counts, bits, dtype, scoring, sight)
    return kv_codes.turned(seen)


def _native(
    q: Tensor, new: tuple[Tensor, Tensor] | None, held: Held, tail: Tail | None, bits: int, sinks: Tensor | None
) -> Codes | None:
    library = dispatch.native(q, *(new or ()), held.k, sinks)
    if library is None:
        return None
    from lmstate.ops.cpu.codes import codes

    body = codes(library.variant)
    return body if body.can(q, held, tail, bits) else None


def _store_vectors(new: tuple[Tensor, Tensor], held: Held, starts: Tensor, counts: Tensor, bits: int) -> None:
    coded = [kv_codes.encode(kv_codes.turned(x), bits, WHOLE) for x in new]
    append_reference(coded[0][0], coded[1][0], held.k, held.v, starts, counts)
    append_reference(coded[0][1], coded[1][1], held.k_scale, held.v_scale, starts, counts)


def _store_blocks(
    new: tuple[Tensor, Tensor], held: Held, tail: Tail, starts: Tensor, counts: Tensor, bits: int
) -> None:
    """The new tokens into the ring, and each block that they make whole into codes."""
    append_reference(new[0], kv_codes.turned(new[1]), tail.k, tail.v, starts, counts)
    for r, (start, count) in enumerate(zip(starts.tolist(), counts.tolist())):
        first, whole = start // BLOCK * BLOCK, (start + count) // BLOCK * BLOCK
        if whole > first:
            k, v = (unroll(ring[r : r + 1], first, whole)[0] for ring in (tail.k, tail.v))
            where = torch.arange(first, whole, device=k.device) % held.k.shape[2]
            held.k[r, :, where], held.k_scale[r, :, where] = kv_codes.encode_blocks(k, bits)
            held.v[r, :, where], held.v_scale[r, :, where] = kv_codes.encode(v, bits, WHOLE)


def _coded_until(position: int, lag: int) -> int:
    """The positions before this one are in blocks that a query at `position` sees as codes."""
    return max(0, position + 1 - lag) // BLOCK * BLOCK


def _attend_blocks(
    q: Tensor,
    held: Held,
    tail: Tail,
    starts: Tensor,
    counts: Tensor,
    bits: int,
    dtype: torch.dtype,
    scoring: Scoring,
    sight: Sight,
) -> Tensor:
    """One stretch of queries after another that see the same blocks as codes; values stay turned."""
    rows, tokens, heads, _ = q.shape
    dim_v = held.v.shape[3] * 8 // bits
    out = []
    for r, (start, count) in enumerate(zip(starts.tolist(), counts.tolist())):
        first, low = _coded_until(start, tail.lag), sight.low(start) // BLOCK * BLOCK
        coded = _coded_until(start + count - 1, tail.lag)
        floats = [unroll(ring[r : r + 1], first, start + count) for ring in (tail.k, tail.v)]  # [1, K, end - first, D]
        k, k_scale, v, v_scale = (
            unroll(x[r : r + 1], low, max(low, coded)) for x in (held.k, held.k_scale, held.v, held.v_scale)
        )  # [1, K, coded - low, ...]
        keys, values = kv_codes.decode_blocks(k, k_scale, bits, dtype), kv_codes.decode(v, v_scale, bits, dtype)
        pieces, position = [], start
        while position < start + count:
            split = _coded_until(position, tail.lag)
            stop = min(start + count, split + BLOCK + tail.lag - 1)
            a, b = sight.low(position), max(sight.low(position), split)
            k, v = (
                torch.cat([old[:, :, a - low : b - low], new[:, :, b - first : stop - first].to(dtype)], dim=2)
                for old, new in zip((keys, values), floats)
            )
            pieces.append(attend_span(q[r : r + 1, position - start : stop - start], k, v, position, a, scoring, sight))
            position = stop
        out.append(torch.cat([*pieces, q.new_zeros(1, tokens - count, heads, dim_v)], dim=1))
    return torch.cat(out) if rows else q.new_zeros(0, tokens, heads, dim_v)
