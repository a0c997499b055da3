"""A step of a model as one program that owns its state, for `torch.export`: no Python, and no host, is left in it.

step = ExportedStep(model, rows=1, capacity=4096)
torch.export.save(step.export(), "step.pt2")

program = torch.export.load("step.pt2").module()        # where lmstate need not be installed
logits = program(tokens, counts)
"""

from __future__ import annotations

from functools import partial
from itertools import repeat

import torch
from torch import Tensor, nn

from lmstate.errors import UnsupportedError
from lmstate.models.block import new_layers
from lmstate.models.compiled import check_static, device_logits, traceable
from lmstate.models.fingerprint import weights_in
from lmstate.models.model import Model
from lmstate.models.network import in_blocks
from lmstate.ops import FloatWeight, Weight
from lmstate.state import Layout
from lmstate.state.step import DeviceStep

POSITIONS = "positions"


class ExportedStep(nn.Module):
    """`step(tokens int64 [R, T], counts int64 [R]) -> float32 [R, V]`: the logits at each row's last token.

    Every call makes its tokens real: the first `counts[r]` of row r, where the rest is padding of any ids. The state is
    the module's buffers, changed in place, and its `state_dict()`; an empty row is all zeros. Two steps of different T
    share a state if they have the same rows, capacity and `longest`:

        decode.load_state_dict(prompt.state_dict())

    A row whose tokens would pass the capacity is left alone, and its logits are NaN; so are those of an idle row, whose
    count is 0. Of layers with a window only the window is kept: where all layers have one, capacity costs nothing.
    """

    positions: Tensor

    def __init__(self, model: Model, rows: int = 1, capacity: int = 2048, tokens: int = 1, longest: int | None = None):
        """`tokens`: T. `longest`: the largest T of the steps that will share the state; None: this one's.

        Raises `UnsupportedError` for weights that are not float, and for models whose rotary frequencies change within
        `capacity`; `StateError` where T does not fit.
        """
        super().__init__()
        network = traceable(model.network)
        check_static(
            capacity,
            devices=network.devices,
            offloads=bool(network.offloaded),
            max_positions=network.max_positions,
            dynamic_ropes=network.dynamic_ropes,
        )
        longest = tokens if longest is None else longest
        if not 1 <= tokens <= longest <= capacity or rows < 1:
            raise UnsupportedError(
                f"a step of {tokens} tokens and {rows} rows was asked for, the longest {longest}, in a capacity of "
                f"{capacity}; there must be a row, and the three numbers must not decrease, from 1"
            )
        for path, weight in weights_in(network):
            if isinstance(weight, Weight) and not isinstance(weight, FloatWeight):
                raise UnsupportedError(
                    f"a program cannot hold {weight.kind} weights yet ({path.strip('.')}); load the model with "
                    'weights="float32" or "bfloat16"'
                )
        self.network, self.rows, self.capacity, self.tokens = network, rows, capacity, tokens
        layout = Layout(rows, network.device, model.dtype, capacity, rewind=0, chunk=longest, static=True)
        self.layers = new_layers(network.blocks, repeat(layout))
        # Which buffers each layer has: layer -> the layer's own name -> the module's.
        self._names = [
            {name: f"layer{i}_{name.replace('.', '_')}" for name in layer.static_tensors()}
            for i, layer in enumerate(self.layers)
        ]
        for layer, names in zip(self.layers, self._names):
            for name, tensor in layer.static_tensors().items():
                self.register_buffer(names[name], tensor)
        self.register_buffer(POSITIONS, torch.zeros(rows, dtype=torch.int64, device=network.device))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        for layer, names in zip(self.layers, self._names):
            layer.rebind({name: self.get_buffer(own) for name, own in names.items()})
        room = self.positions + counts <= self.capacity
        counts = torch.where(room, counts, 0)
        step = DeviceStep.at(self.positions, counts, self.tokens)
        hidden = self.network.stream(tokens, step, self.layers)
        logits = device_logits(hidden, partial(in_blocks, self.network.logits), step, room, "last")
        for layer in self.layers:
            layer.commit_on_device()
        self.positions.add_(counts)
        return logits

    def export(self) -> torch.export.ExportedProgram:
        """The program, with the state that the module has now. For `torch.export.save`, or a compiler of its own."""
        tokens = torch.zeros(self.rows, self.tokens, dtype=torch.int64, device=self.positions.device)
        with torch.no_grad():
            return torch.export.export(self, (tokens, torch.ones_like(self.positions)))
