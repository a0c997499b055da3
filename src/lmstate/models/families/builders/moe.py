"""Mixtures of experts that several families have, with the routers that choose for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader, transpose
from lmstate.models.families.builders.decoder import W1_W3_W2
from lmstate.models.families.builders.dims import MAX_SIZE, Dims
from lmstate.models.families.builders.mlp import GATE_UP_DOWN, activation, fused_mlp, mlp
from lmstate.models.layers.mlp import MLP, FeedForward
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.ops import FloatWeight, Weight


def router_weight(w: WeightLoader, name: str, count: int, hidden: int) -> Weight:
    """A router's matrix, which stays float32."""
    return FloatWeight(w.tensor(name, (count, hidden)))


def top_k(config: Config, count: int, name: str = "num_experts_per_tok") -> int:
    """Number of experts that a token goes to, of `count`."""
    return config.int(name, low=1, high=count)


def expert_width(config: Config) -> int:
    return config.int("moe_intermediate_size", low=1, high=MAX_SIZE)


def sparse_layers(config: Config, layers: int) -> Sequence[bool]:
    """Layers with experts: those of `mlp_layer_types`, or all after the first dense ones."""
    kinds = config.strs("mlp_layer_types", layers, allowed=("dense", "sparse"), default=None)
    if kinds is not None:
        return [kind == "sparse" for kind in kinds]
    if isinstance(config.get("moe_layer_freq"), list):  # MiMo's says it of each layer
        return [number == 1 for number in config.ints("moe_layer_freq", layers, high=1)]
    dense = config.int("first_k_dense_replace", default=0)
    every = config.int("moe_layer_freq", low=1, default=1)
    return [index >= dense and index % every == 0 for index in range(layers)]


def softmax_mixture(w: WeightLoader, prefix: str, shape: Dims, inner: int, *, normalize: bool) -> MixtureOfExperts:
    """Experts chosen by the softmax of `gate`, without more."""
    count = expert_count(w.config)
    router = Router(
        router_weight(w, f"{prefix}.gate.weight", count, shape.hidden), top_k(w.config, count), normalize=normalize
    )
    return MixtureOfExperts(router, experts(w, f"{prefix}.experts", count, shape.hidden, inner, activation(w.config)))


def qwen_feed_forward(w: WeightLoader, index: int, prefix: str, shape: Dims, *, normalize: bool) -> FeedForward:
    """Dense or sparse; experts may be beside one that every token goes through, weighed by a gate of its own.

    `normalize`: the weights of the chosen, where the config does not say. Of a layer past the last, a prediction
    head's, the tensors say whether it is sparse.
    """
    config, hidden, act = w.config, shape.hidden, activation(w.config)
    every = config.int("decoder_sparse_step", low=1, default=1)
    dense = config.ints("mlp_only_layers", default=()) or ()
    sparse = index not in dense and (index + 1) % every == 0
    if index >= shape.layers:
        sparse = w.has(f"{prefix}.gate.weight")
    if not expert_count(config) or not sparse:
        return mlp(w, prefix, hidden, config.int("intermediate_size", low=1, high=MAX_SIZE), act)
    mixture = softmax_mixture(
        w, prefix, shape, expert_width(config), normalize=config.bool("norm_topk_prob", default=normalize)
    )
    common = config.int("shared_expert_intermediate_size", high=MAX_SIZE, default=0)
    if not common:
        return mixture
    gate = f"{prefix}.shared_expert_gate.weight"  # a vector in GGUF
    size = (1, hidden) if len(w.shape(gate)) == 2 else (hidden,)
    return MixtureOfExperts(
        mixture.router,
        mixture.experts,
        mlp(w, f"{prefix}.shared_expert", hidden, common, act),
        FloatWeight(w.tensor(gate, size).view(1, hidden)),
    )


def corrected_router(
    w: WeightLoader, gate: str, e_score_correction_bias: str, hidden: int, *, scale: float | None = None
) -> Router:  # fmt: skip
    """DeepSeek-V3's router: sigmoids, corrected for the choice, which is made inside the best groups.

    `gate`, `e_score_correction_bias`: the names of its tensors. `scale`: of the weights, instead of the config's.
    """
    config, count = w.config, expert_count(w.config)
    groups = config.int("n_group", low=1, high=count, default=1)
    return Router(
        router_weight(w, gate, count, hidden),
        top_k(config, count),
        "sigmoid",
        normalize=config.bool("norm_topk_prob", default=True),
        scale=config.float("routed_scaling_factor", default=1.0) if scale is None else scale,
        e_score_correction_bias=w.tensor(e_score_correction_bias, (count,)),
        groups=groups,
        topk_groups=config.int("topk_group", low=1, high=groups, default=1),
        group_score="top2",
    )


def deepseek_mixture(
    w: WeightLoader, prefix: str, shape: Dims, router: Router | None = None, *, shared: int | None = None
) -> MixtureOfExperts:
    """Experts beside `shared` ones that every token goes through, which are one feed-forward part.

    `router`: None for DeepSeek-V3's. `shared`: how many, None for what the config says.
    """
    config, act, inner = w.config, activation(w.config), expert_width(w.config)
    if router is None:
        gate = f"{prefix}.gate"
        router = corrected_router(w, f"{gate}.weight", f"{gate}.e_score_correction_bias", shape.hidden)
    if shared is None:
        shared = config.int("n_shared_experts", high=MAX_SIZE, default=0)
    return MixtureOfExperts(
        router,
        experts(w, f"{prefix}.experts", expert_count(config), shape.hidden, inner, act),
        mlp(w, f"{prefix}.shared_experts", shape.hidden, inner * shared, act) if shared else None,
    )


def deepseek_feed_forward(w: WeightLoader, shape: Dims) -> Callable[[int, str], FeedForward]:
    """A layer's feed-forward part, of its number and its tensors' prefix: DeepSeek-V3's experts, or a dense one.

    Of a layer past the last, a prediction head's, the tensors say which.
    """
    config, sparse = w.config, sparse_layers(w.config, shape.layers)

    def feed_forward(index: int, prefix: str) -> FeedForward:
        if sparse[index] if index < shape.layers else w.has(f"{prefix}.gate.weight"):
            return deepseek_mixture(w, prefix, shape)
        return mlp(w, prefix, shape.hidden, config.int("intermediate_size", low=1, high=MAX_SIZE), activation(config))

    return feed_forward


def experts(
    w: WeightLoader,
    prefix: str,
    count: int,
    hidden: int,
    inner: int,
    act: str,
    names: tuple[str, str, str] | None = None,
) -> list[MLP]:
    """Gated experts: one tensor for all under `gate_up_proj` and `down_proj`, or a block of their own each.

    `names`: of the matrices of an expert that is stored by itself; None: whichever the checkpoint has.
    """
    if names is None:
        names = W1_W3_W2 if w.has(f"{prefix}.0.w1.weight") else GATE_UP_DOWN
    if w.has(f"{prefix}.gate_up_proj"):
        return [
            MLP(
                _of_all(w, f"{prefix}.gate_up_proj", index, (count, 2 * inner, hidden)),
                _of_all(w, f"{prefix}.down_proj", index, (count, hidden, inner)),
                act,
            )
            for index in range(count)
        ]
    if w.has(f"{prefix}.0.gate_up_proj.weight"):
        return [fused_mlp(w, f"{prefix}.{index}", hidden, inner, act) for index in range(count)]
    return [mlp(w, f"{prefix}.{index}", hidden, inner, act, names) for index in range(count)]


def _of_all(w: WeightLoader, name: str, index: int, shape: tuple[int, int, int]) -> Weight:
    """One expert's matrix of a tensor `[experts, N, K]`; some checkpoints hold `[experts, K, N]`."""
    count, height, width = shape
    if height == width or w.shape(name) != (count, width, height):
        return w.stacked(name, index, shape=shape)
    return w.derived(f"{name}[{index}]", name, make=transpose, shape=(height, width), of=index)


def expert_count(config: Config) -> int:
    """Experts of each mixture, under whichever of its names the config has it; 0 if none."""
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return next((config.int(name, low=0, high=MAX_SIZE) for name in names if config.get(name) is not None), 0)
