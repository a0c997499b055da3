"""Recurrences, token by token: the carry stays in registers, and one kernel serves prompts, drafts and decode.

A token's numbers do not depend on where a call begins or ends: the carry between two tokens is float32 in registers as
in memory. A slice of the values is a program of its own, and no sum runs over values. The programs of a matrix have one
warp each. They read the inputs of a token while they compute the one before it, so that no token waits for memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lmstate.ops.cuda.kernels.functions import activated, one_minus_exp, sigmoid, softplus


@triton.jit
def _delta_inputs(
    q, k, v, g, beta, token, real, key_head, head, a, b,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BY_CHANNEL: tl.constexpr,
    CORRECTS: tl.constexpr,
):  # fmt: skip
    """q, k, v, g and beta of one token of `gated_delta_rule`; zeros unless it is real."""
    keys = (a < DK) & real
    q_t = tl.load(q + (token * KEY_HEADS + key_head) * DK + a, mask=keys, other=0.0)
    k_t = tl.load(k + (token * KEY_HEADS + key_head) * DK + a, mask=keys, other=0.0)
    v_t = tl.load(v + (token * HEADS + head) * DV + b, mask=(b < DV) & real, other=0.0)
    if BY_CHANNEL:
        g_t = tl.load(g + (token * HEADS + head) * DK + a, mask=keys, other=0.0)
    else:
        g_t = tl.load(g + token * HEADS + head, mask=real, other=0.0)
    beta_t = tl.load(beta + token * HEADS + head, mask=real, other=0.0) if CORRECTS else 0.0
    return q_t, k_t, v_t, g_t, beta_t


@triton.jit(do_not_specialize=["width"])
def gated_delta_rule(
    q, k, v, g, beta, carry, counts, out, new_carry, width, scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr, DV: tl.constexpr,
    SLICE: tl.constexpr, BY_CHANNEL: tl.constexpr, NORMALIZE: tl.constexpr, CORRECTS: tl.constexpr,
):  # fmt: skip
    """S <- diag(exp g) S; S <- S + k (beta (v - k^T S))^T; o = scale * q^T S. Grid: (rows * heads, slices of DV).

    q, k: float32 [R, T, KEY_HEADS, DK]; v: [R, T, HEADS, DV]; g: [R, T, HEADS] or [R, T, HEADS, DK]; beta:
    [R, T, HEADS]; carry, new_carry: [R, HEADS, DK, DV]; out: [R, T, HEADS, DV], left alone at padding. Without CORRECTS
    it is linear attention: S <- diag(exp g) S + k v^T.
    """
    row = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    key_head = head // (HEADS // KEY_HEADS)
    a = tl.arange(0, DKP)
    b = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    keys = a < DK
    values = b < DV
    at = (tl.program_id(0).to(tl.int64) * DK + a[:, None]) * DV + b[None, :]
    inside = keys[:, None] & values[None, :]
    state = tl.load(carry + at, mask=inside, other=0.0)
    count = tl.load(counts + row)
    first = row.to(tl.int64) * width
    q_next, k_next, v_next, g_next, beta_next = _delta_inputs(
        q, k, v, g, beta, first, count > 0, key_head, head, a, b, KEY_HEADS, HEADS, DK, DV, BY_CHANNEL, CORRECTS
    )
    for t in range(0, count):
        token = first + t
        q_t, k_t, v_t, g_t, beta_t = q_next, k_next, v_next, g_next, beta_next
        q_next, k_next, v_next, g_next, beta_next = _delta_inputs(
            q, k, v, g, beta, token + 1, t + 1 < count, key_head, head, a, b, KEY_HEADS, HEADS, DK, DV, BY_CHANNEL,
            CORRECTS,
        )  # fmt: skip
        if NORMALIZE:
            k_t = k_t * tl.rsqrt(tl.sum(k_t * k_t, 0) + 1e-6)
            q_t = q_t * tl.rsqrt(tl.sum(q_t * q_t, 0) + 1e-6)
        if BY_CHANNEL:
            state = state * tl.exp(g_t)[:, None]
        else:
            state = state * tl.exp(g_t)
        delta = v_t
        if CORRECTS:
            delta = beta_t * (v_t - tl.sum(state * k_t[:, None], 0))
        state = state + k_t[:, None] * delta[None, :]
        y = tl.sum(state * q_t[:, None], 0) * scale
        tl.store(out + (token * HEADS + head) * DV + b, y, mask=values)
    tl.store(new_carry + at, state, mask=inside)


@triton.jit
def _ssd_inputs(
    x, dt, B, C, token, real, group, head, p, n,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """x, dt, B and C of one token of `ssd`; zeros unless it is real."""
    x_t = tl.load(x + (token * HEADS + head) * P + p, mask=(p < P) & real, other=0.0)
    dt_t = tl.load(dt + token * HEADS + head, mask=real, other=0.0)
    b_t = tl.load(B + (token * GROUPS + group) * N + n, mask=(n < N) & real, other=0.0)
    c_t = tl.load(C + (token * GROUPS + group) * N + n, mask=(n < N) & real, other=0.0)
    return x_t, dt_t, b_t, c_t


@triton.jit(do_not_specialize=["width"])
def ssd(
    x, dt, dt_bias, A, B, C, D, carry, counts, out, new_carry, width, least, most,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, P: tl.constexpr, SLICE: tl.constexpr, N: tl.constexpr,
    NP: tl.constexpr, HAS_D: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """h <- exp(dt A) h + dt x B^T; y = h C + D x (Mamba-2). Grid: (rows * heads, slices of P).

    x: float32 [R, T, HEADS, P]; dt: [R, T, HEADS], before softplus and the limits `least` and `most`; dt_bias, A, D:
    [HEADS]; B, C: [R, T, GROUPS, N]; carry: [R, HEADS, P, N]; out: as x, left alone at padding.
    """
    row = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    group = head // (HEADS // GROUPS)
    p = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    n = tl.arange(0, NP)
    lines = p < P
    columns = n < N
    at = (tl.program_id(0).to(tl.int64) * P + p[:, None]) * N + n[None, :]
    inside = lines[:, None] & columns[None, :]
    state = tl.load(carry + at, mask=inside, other=0.0)
    a = tl.load(A + head)
    count = tl.load(counts + row)
    first = row.to(tl.int64) * width
    x_next, dt_next, b_next, c_next = _ssd_inputs(
        x, dt, B, C, first, count > 0, group, head, p, n, GROUPS, HEADS, P, N
    )  # fmt: skip
    for t in range(0, count):
        token = first + t
        x_t, step, b_t, c_t = x_next, dt_next, b_next, c_next
        x_next, dt_next, b_next, c_next = _ssd_inputs(
            x, dt, B, C, token + 1, t + 1 < count, group, head, p, n, GROUPS, HEADS, P, N
        )  # fmt: skip
        if HAS_BIAS:
            step = step + tl.load(dt_bias + head)
        step = tl.minimum(tl.maximum(softplus(step), least), most)
        state = state * tl.exp(step * a) + (step * x_t)[:, None] * b_t[None, :]
        y = tl.sum(state * c_t[None, :], 1)
        if HAS_D:
            y = y + x_t * tl.load(D + head)
        tl.store(out + (token * HEADS + head) * P + p, y, mask=lines)
    tl.store(new_carry + at, state, mask=inside)


@triton.jit(do_not_specialize=["width"])
def causal_conv(x, tail, weight, bias, counts, out, new_tail, width, channels, TAPS: tl.constexpr, SLICE: tl.constexpr,
                HAS_BIAS: tl.constexpr, SILU: tl.constexpr):  # fmt: skip
    """A causal convolution of each channel. Grid: (rows, slices of channels).

    x, out: float32 [R, T, C]; tail, new_tail: [R, TAPS - 1, C], the inputs before the first token, the oldest first;
    weight: [C, TAPS]; bias: [C]. out is left alone at padding.
    """
    row = tl.program_id(0)
    c = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    inside = c < channels
    count = tl.load(counts + row)
    base = tail + row.to(tl.int64) * (TAPS - 1) * channels + c
    for t in range(0, count):
        total = tl.zeros([SLICE], tl.float32)
        for tap in tl.static_range(0, TAPS):
            at = t + tap - (TAPS - 1)  # the token that this tap reads; before 0 it is in the tail
            token = (row * width + tl.maximum(at, 0)).to(tl.int64)
            new = tl.load(x + token * channels + c, mask=inside & (at >= 0), other=0.0)
            old = tl.load(base + tl.minimum(t + tap, TAPS - 2) * channels, mask=inside & (at < 0), other=0.0)
            total = total + tl.where(at >= 0, new, old) * tl.load(weight + c * TAPS + tap, mask=inside, other=0.0)
        if HAS_BIAS:
            total = total + tl.load(bias + c, mask=inside, other=0.0)
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        tl.store(out + (row * width + t).to(tl.int64) * channels + c, total, mask=inside)
    for tap in tl.static_range(0, TAPS - 1):
        at = count + tap - (TAPS - 1)
        token = (row * width + tl.maximum(at, 0)).to(tl.int64)
        new = tl.load(x + token * channels + c, mask=inside & (at >= 0), other=0.0)
        old = tl.load(base + tl.minimum(count + tap, TAPS - 2) * channels, mask=inside & (at < 0), other=0.0)
        place = new_tail + (row.to(tl.int64) * (TAPS - 1) + tap) * channels + c
        tl.store(place, tl.where(at >= 0, new, old), mask=inside)


@triton.jit(do_not_specialize=["width"])
def selective_scan(
    x, dt, A, B, C, D, gate, carry, counts, out, new_carry, width, channels,
    N: tl.constexpr, NP: tl.constexpr, SLICE: tl.constexpr, HAS_D: tl.constexpr, HAS_GATE: tl.constexpr,
    SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """h <- exp(dt A) h + dt x B; y = (h C + D x) silu(gate) (Mamba-1). Grid: (rows, slices of channels).

    x, dt, gate: float32 [R, T, F]; A: [F, N]; B, C: [R, T, N]; D: [F]; carry: [R, F, N]; out: as x, left alone at
    padding.
    """
    row = tl.program_id(0)
    f = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    n = tl.arange(0, NP)
    lines = f < channels
    columns = n < N
    inside = lines[:, None] & columns[None, :]
    at = (row.to(tl.int64) * channels + f[:, None]) * N + n[None, :]
    state = tl.load(carry + at, mask=inside, other=0.0)
    a = tl.load(A + f[:, None] * N + n[None, :], mask=inside, other=0.0)
    for t in range(0, tl.load(counts + row)):
        token = (row * width + t).to(tl.int64)
        step = tl.load(dt + token * channels + f, mask=lines, other=0.0)
        if SOFTPLUS:
            step = softplus(step)
        x_t = tl.load(x + token * channels + f, mask=lines, other=0.0)
        b_t = tl.load(B + token * N + n, mask=columns, other=0.0)
        c_t = tl.load(C + token * N + n, mask=columns, other=0.0)
        state = state * tl.exp(step[:, None] * a) + (step * x_t)[:, None] * b_t[None, :]
        y = tl.sum(state * c_t[None, :], 1)
        if HAS_D:
            y = y + x_t * tl.load(D + f, mask=lines, other=0.0)
        if HAS_GATE:
            y = y * activated(tl.load(gate + token * channels + f, mask=lines, other=0.0), "silu")
        tl.store(out + token * channels + f, y, mask=lines)
    tl.store(new_carry + at, state, mask=inside)


@triton.jit(do_not_specialize=["width"])
def rg_lru(x, input_gate, recurrence_gate, param, carry, seen, counts, out, new_carry, new_seen, width, channels,
           SLICE: tl.constexpr):  # fmt: skip
    """h <- a h + sqrt(1 - a^2) sigmoid(input gate) x (Griffin). Grid: (rows, slices of channels).

    x, gates, out: float32 [R, T, F]; param: [F]; carry: [R, F]; seen: [R]. out is left alone at padding.
    """
    row = tl.program_id(0)
    f = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    inside = f < channels
    count = tl.load(counts + row)
    was = tl.load(seen + row)
    rate = -8.0 * softplus(tl.load(param + f, mask=inside, other=0.0))
    state = tl.load(carry + row.to(tl.int64) * channels + f, mask=inside, other=0.0)
    for t in range(0, count):
        at = (row * width + t).to(tl.int64) * channels + f
        log_decay = rate * sigmoid(tl.load(recurrence_gate + at, mask=inside, other=0.0))
        first = (was == 0.0) & (t == 0)
        size = tl.where(first, 1.0, tl.sqrt(one_minus_exp(2.0 * log_decay)))
        opened = sigmoid(tl.load(input_gate + at, mask=inside, other=0.0))
        state = tl.exp(log_decay) * state + size * opened * tl.load(x + at, mask=inside, other=0.0)
        tl.store(out + at, state, mask=inside)
    tl.store(new_carry + row.to(tl.int64) * channels + f, state, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(new_seen + row, tl.where(count > 0, tl.maximum(was, 1.0), was))


@triton.jit(do_not_specialize=["width"])
def wkv(k, v, decay, bonus, num, den, peak, counts, out, new_num, new_den, new_peak, width, channels, nothing,
        SLICE: tl.constexpr):  # fmt: skip
    """The averages of RWKV-4; see `ops.recurrent.wkv`. Grid: (rows, slices of channels).

    k, v, out: float32 [R, T, F]; decay, bonus: [F]; num, den, peak: [R, F]. out is left alone at padding.
    """
    row = tl.program_id(0)
    f = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    inside = f < channels
    count = tl.load(counts + row)
    own = row.to(tl.int64) * channels + f
    w = tl.load(decay + f, mask=inside, other=0.0)
    u = tl.load(bonus + f, mask=inside, other=0.0)
    a = tl.load(num + own, mask=inside, other=0.0)
    b = tl.load(den + own, mask=inside, other=0.0)
    was = tl.load(peak + own, mask=inside, other=0.0)
    p = tl.where(b > 0.0, was, nothing)
    for t in range(0, count):
        at = (row * width + t).to(tl.int64) * channels + f
        k_t = tl.load(k + at, mask=inside, other=0.0)
        v_t = tl.load(v + at, mask=inside, other=0.0)
        top = tl.maximum(p, k_t + u)
        past = tl.exp(p - top)
        now = tl.exp(k_t + u - top)
        tl.store(out + at, (past * a + now * v_t) / (past * b + now), mask=inside)
        top = tl.maximum(p + w, k_t)
        kept = tl.exp(p + w - top)
        added = tl.exp(k_t - top)
        a = kept * a + added * v_t
        b = kept * b + added
        p = top
    tl.store(new_num + own, a, mask=inside)
    tl.store(new_den + own, b, mask=inside)
    tl.store(new_peak + own, tl.where(count > 0, p, was), mask=inside)


@triton.jit(do_not_specialize=["width"])
def running_peaks(kept, added, peak, out, width, channels, SLICE: tl.constexpr):
    """p <- max(kept + p, added), rounded to float32 after each token. Grid: (rows, slices of channels).

    kept, added, out: float64 [R, T, C]; peak: float32 [R, C].
    """
    row = tl.program_id(0)
    c = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    inside = c < channels
    p = tl.load(peak + row.to(tl.int64) * channels + c, mask=inside, other=0.0).to(tl.float64)
    for t in range(0, width):
        at = (row * width + t).to(tl.int64) * channels + c
        grown = tl.load(kept + at, mask=inside, other=0.0) + p
        p = tl.maximum(grown, tl.load(added + at, mask=inside, other=0.0)).to(tl.float32).to(tl.float64)
        tl.store(out + at, p, mask=inside)


@triton.jit
def gated_norm(y, gate, weight, out, width, groups, weights, eps, ACT: tl.constexpr, NORMS: tl.constexpr,
               GATE_LAST: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """A group of one token normalized and gated, or gated alone. Grid: (tokens, groups).

    y, gate, out: float32 [tokens, groups * width]; weight: float32 [weights * width], of each group (`weights` =
    groups) or of all alike (1).
    """
    e = tl.arange(0, WIDTH)
    inside = e < width
    group = tl.program_id(1)
    at = (tl.program_id(0).to(tl.int64) * groups + group) * width + e
    values = tl.load(y + at, mask=inside, other=0.0)
    opened = activated(tl.load(gate + at, mask=inside, other=0.0), ACT)
    if not GATE_LAST:
        values = values * opened
    if NORMS:
        mean = tl.sum(values * values, 0) / width
        scaled = tl.load(weight + tl.where(weights == 1, 0, group) * width + e, mask=inside, other=0.0)
        values = values * tl.rsqrt(mean + eps) * scaled
    if GATE_LAST:
        values = values * opened
    tl.store(out + at, values, mask=inside)
