"""Experts of a mixture on a GPU: their choice, and products grouped by expert, whose groups the GPU alone knows."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from lmstate.ops.cuda import configs, dense
from lmstate.ops.cuda.device import launch, padded
from lmstate.ops.types.sublayers import Expert, RouterParams
from lmstate.ops.types.weight import Weight

MOST_EXPERTS = 1024
"""The most experts that one program chooses from."""


class ExpertTable:
    """Addresses of the weights and biases of a mixture's experts, on their device. Changes in place are seen."""

    def __init__(self, experts: tuple[Expert, ...]) -> None:
        """experts: those that `fits` holds for."""
        self.experts = experts
        self.up = _addresses([each.up.storage for each in experts])
        self.down = _addresses([each.down.storage for each in experts])
        self.up_bias = _bias_addresses([each.up_bias for each in experts])
        self.down_bias = _bias_addresses([each.down_bias for each in experts])

    def __deepcopy__(self, memo: dict[int, object]) -> ExpertTable:
        return ExpertTable(copy.deepcopy(self.experts, memo))

    @staticmethod
    def fits(experts: tuple[Expert, ...]) -> bool:
        """Whether experts have kernels, and all have weights of the same shape and kind."""
        first = experts[0]
        alike = {
            (each.up.shape, each.up.kind, each.down.shape, each.down.kind, each.act, each.up_bias is None,
             each.down_bias is None)
            for each in experts
        }  # fmt: skip
        biases = [bias for each in experts for bias in (each.up_bias, each.down_bias) if bias is not None]
        readable = all(bias.dtype == torch.float32 and bias.is_contiguous() for bias in biases)
        aligned = all(weight.storage.data_ptr() % 16 == 0 for each in experts for weight in (each.up, each.down))
        known = aligned and dense.can_multiply(first.up) and dense.can_multiply(first.down) and first.act in dense.GATES
        return known and readable and len(alike) == 1


def _addresses(tensors: list[Tensor]) -> Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64).to(tensors[0].device)


def _bias_addresses(biases: list[Tensor | None]) -> Tensor | None:
    given = [bias for bias in biases if bias is not None]
    return _addresses(given) if given else None


def choose_experts(logits: Tensor, router: RouterParams) -> tuple[Tensor, Tensor]:
    """`ops.choose_experts` of float32 `[M, N]`, N at most `MOST_EXPERTS`."""
    from lmstate.ops.cuda.kernels import routing as kernels

    tokens, count = logits.shape
    correction, top_k = router.e_score_correction_bias, router.top_k
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    if tokens:
        launch(
            kernels.choose_experts, (tokens,), logits.contiguous(), weights if correction is None else correction,
            weights, chosen, router.scale, router.floor, COUNT=count, COUNT_P=padded(count), TOP_K=top_k,
            TOP_K_P=padded(top_k, 1), SIGMOID=router.scoring == "sigmoid", HAS_CORRECTION=correction is not None,
            NORMALIZE=router.normalize, GROUPS=router.groups, GROUPS_P=padded(router.groups, 1),
            KEPT=router.topk_groups, TOP2=router.group_score == "top2",
        )  # fmt: skip
    return weights, chosen


def experts(x: Tensor, weights: Tensor, chosen: Tensor, table: ExpertTable, scale_input: bool) -> Tensor:
    """`ops.routed_experts`; the arguments are those there."""
    from lmstate.ops.cuda.kernels import dense as kernels

    tokens, top_k = chosen.shape
    chosen, at = chosen.sort(-1)  # a token's outputs are added in the order of the experts
    weights = weights.gather(-1, at)
    groups = _Groups(chosen.flatten(), len(table.experts))
    up, down = table.experts[0].up, table.experts[0].down
    if scale_input:
        x = (x[:, None] * weights[..., None]).flatten(0, 1)
    hidden = groups.product(x, up, table.up, table.up_bias, 1 if scale_input else top_k)
    y = groups.product(dense.glu(hidden, table.experts[0].act), down, table.down, table.down_bias, 1)
    width = y.shape[1]
    out = torch.empty(tokens, width, dtype=torch.float32, device=x.device)
    if out.numel():
        size = min(padded(width), dense.PART)
        launch(
            kernels.weigh, (tokens, -(-width // size)), y, weights.contiguous(), out, width, TOP_K=top_k,
            WEIGHS=not scale_input, WIDTH=size,
        )  # fmt: skip
    return out


class _Groups:
    """Routes by their experts, in tiles; no number of them comes to the host."""

    def __init__(self, chosen: Tensor, count: int) -> None:
        """chosen: int64 `[routes]`, the expert of each, of `count` experts."""
        routes, device = len(chosen), chosen.device
        self.rows = configs.row_tile(max(1, routes // count))
        self.order = chosen.argsort(stable=True)
        sizes = torch.zeros(count + 1, dtype=torch.int64, device=device)
        sizes = sizes.scatter_add(0, chosen, torch.ones_like(chosen))
        ends = sizes.cumsum(0)
        tile_ends = ((sizes + self.rows - 1) // self.rows).cumsum(0)
        held = min(count, routes)  # experts with routes, at most
        self.tiles = min(routes, (routes + held * (self.rows - 1)) // self.rows)
        tile = torch.arange(self.tiles, device=device)
        self.experts = torch.searchsorted(tile_ends[:count], tile, right=True)
        begins = torch.where(self.experts > 0, tile_ends[(self.experts - 1).clamp(min=0)], 0)
        self.firsts = (ends - sizes)[self.experts] + (tile - begins) * self.rows
        self.ends = ends

    def product(self, x: Tensor, weight: Weight, addresses: Tensor, biases: Tensor | None, share: int) -> Tensor:
        """Each route's product with the weight of its expert, float32 `[routes, N]`; `weight`: one of them.

        x: float32 `[routes / share, K]`.
        """
        from lmstate.ops.cuda.kernels import dense as kernels

        outputs, inputs = weight.shape
        dtype = dense.multiplied_dtype(weight)
        shape = configs.product_of_tiles(self.rows, self.tiles, outputs, dtype.itemsize)
        out = torch.empty(len(self.order), outputs, dtype=torch.float32, device=x.device)
        if out.numel():
            launch(
                kernels.expert_product, (-(-outputs // shape.outputs), self.tiles), x.contiguous(), addresses,
                addresses if biases is None else biases, self.order, self.experts, self.firsts, self.ends, out, outputs,
                inputs, inputs // 32, SHARE=share, KIND=dense.layout(weight), HAS_BIAS=biases is not None,
                **dense.constants(dtype, shape),
            )  # fmt: skip
        return out
