"""Sliding layers of the cache with a running compressor beside the window (DeepSeek-V4).

A compressor turns each `compress_rate` tokens into one entry, which attention reads for the rest of the text. Its state
is the tokens of the window that is not full yet, and, where windows overlap, a part of the last full one. Here these
are windows of the cache's own kind, which keep what a rewind needs: nothing is compressed twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmstate.errors import SnapshotError
from lmstate.integrations.transformers.cache.layers.base import Tensors
from lmstate.integrations.transformers.cache.layers.full import FullAttentionLayer
from lmstate.integrations.transformers.cache.layers.sliding import WindowLayer


class CompressedLayer(WindowLayer):
    """A window of keys that are values too, and the entries of a compressor whose windows do not overlap.

    The parts of the compressor `name`: `{name}.tokens` holds projections `[R, 1, n, D]` of tokens and their gates,
    `{name}.entries` what was compressed, `{name}.overlap` what the next window takes of each one before it.
    """

    kind = "compressed"
    layer_type = "heavily_compressed_attention"
    compressors: tuple[str, ...] = ("compressor",)
    overlaps = False

    def __init__(self, config: Any, rewind: int = 16) -> None:
        super().__init__(config.sliding_window, rewind)
        self.compress_rate = rate = config.compress_rates[self.layer_type]
        self._parts: dict[str, WindowLayer | FullAttentionLayer] = {}
        for name in self.compressors:
            self._parts[f"{name}.tokens"] = WindowLayer(rate + 1, rewind)
            self._parts[f"{name}.entries"] = FullAttentionLayer()
            if self.overlaps:
                self._parts[f"{name}.overlap"] = WindowLayer(2, -(-rewind // rate))

    # ---- what the model asks

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        keys, _ = super().update(key_states, key_states[..., :0])
        return keys, keys

    def _hold(self, k: Tensor, v: Tensor) -> None:
        super()._hold(k, k[..., :0])
        self.values = self.keys

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        """Store projections `[R, T, D]`; those of the windows that are full now, and where the first of them starts."""
        tokens = self._parts[f"{name}.tokens"]
        waiting = tokens.get_seq_length() % self.compress_rate
        start = tokens.get_seq_length() - waiting
        held = tokens.update(kv[:, None], gate[:, None])
        first = held[0].shape[-2] - waiting - kv.shape[1]
        stop = first + (waiting + kv.shape[1]) // self.compress_rate * self.compress_rate
        kv, gate = (part[:, 0, first:stop] for part in held)
        return kv, gate, start

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Store new entries `[R, W, D]`; all that are stored."""
        entries = compressed[:, None]
        return self._parts[f"{name}.entries"].update(entries, entries[..., :0])[0][:, 0]

    def update_overlap_state(
        self, name: str, chunk_kv: Tensor, chunk_gate: Tensor, head_dim: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Store the first `head_dim` columns of windows `[R, W, rate, 2D]`; those of the window before them."""
        overlap = self._parts[f"{name}.overlap"]
        first = overlap.get_seq_length() == 0
        both = torch.cat([part[..., :head_dim].flatten(2) for part in (chunk_kv, chunk_gate)], dim=-1)[:, None]
        held = overlap.update(both, both[..., :0])[0]
        if first:
            return None, None
        before = held[:, 0, -chunk_kv.shape[1] - 1].unflatten(-1, (2, self.compress_rate, head_dim))
        return before[:, 0], before[:, 1]

    # ---- RewindableLayer, and what transformers asks of a layer

    def reach(self, length: int) -> int:
        reached = [super().reach(length)]
        for name, part in self._parts.items():
            reached.append(part.reach(part.get_seq_length()) * self._tokens_of(name))
        return max(reached)

    def cut(self, length: int, to: int) -> None:
        super().cut(length, to)
        self._cut_parts(to)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self._cut_parts(self.cumulative_length)
        for part in self._parts.values():
            part.crop(0)

    def activate_past_recording(self) -> None:
        super().activate_past_recording()
        for part in self._parts.values():
            if isinstance(part, WindowLayer):
                part.activate_past_recording()

    def reset(self) -> None:
        super().reset()
        for part in self._parts.values():
            part.reset()

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        for part in self._parts.values():
            part.select(rows)

    def capture(self) -> Tensors:
        captured = super().capture()
        for name, part in self._parts.items():
            captured |= {f"{name}.{key}": tensor for key, tensor in part.capture().items()}
        return captured

    def check(self, length: int, tensors: Tensors) -> None:
        own, parts = self._divided(tensors)
        super().check(length, own)
        for name, part in self._parts.items():
            held = length // self._tokens_of(name)
            part.check(held, parts[name])
            if own and held and not parts[name]:
                raise SnapshotError(f"the snapshot of a {self.kind} layer lacks {name}: the file was changed")

    def put(self, length: int, tensors: Tensors) -> None:
        own, parts = self._divided(tensors)
        super().put(length, own)
        for name, part in self._parts.items():
            part.put(length // self._tokens_of(name), parts[name])

    def nbytes(self) -> int:
        return super().nbytes() + sum(part.nbytes() for part in self._parts.values())

    # ---- inside

    def _tokens_of(self, name: str) -> int:
        """Tokens that one position of a part stands for."""
        return 1 if name.endswith(".tokens") else self.compress_rate

    def _cut_parts(self, to: int) -> None:
        """Cut what goes beyond `to` tokens: of a call that failed, not every part has all of its tokens."""
        for name, part in self._parts.items():
            held = part.get_seq_length()
            part.cut(held, min(held, to // self._tokens_of(name)))

    def _divided(self, tensors: Tensors) -> tuple[Tensors, dict[str, Tensors]]:
        """The captured tensors of the window, and those of each part."""
        parts: dict[str, Tensors] = {name: {} for name in self._parts}
        own: Tensors = {}
        for name, tensor in tensors.items():
            part, _, key = name.rpartition(".")
            parts.get(part, own)[key if part in parts else name] = tensor
        return own, parts


class SparseCompressedLayer(CompressedLayer):
    """A window, a compressor and an indexer that chooses among its entries; the windows of both overlap."""

    kind = "compressed-sparse"
    layer_type = "compressed_sparse_attention"
    compressors = ("compressor", "indexer")
    overlaps = True
