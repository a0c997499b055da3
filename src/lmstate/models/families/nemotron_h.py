"""Nemotron-H and Nemotron 3: a pattern of blocks of one part: Mamba-2, attention, feed-forward or experts.

x = embed(tokens)
x = x + part(norm(x))    # one of Mamba-2, attention, an MLP and experts
logits = head(norm(x))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from lmstate import ops
from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.layers.identity import Identity
from lmstate.models.layers.mlp import MLP, FeedForward
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.models.model import Block, Model
from lmstate.ops import FloatWeight, Norm, Residual, Weight

DEFAULTS: b.Defaults = {}

MOST_BLOCKS = 64  # of a prediction head
LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


@dataclass(eq=False)
class LatentExperts:
    """Experts of a width less than the model's: the token is brought down to it, what they give is brought up again."""

    experts: MixtureOfExperts
    down: Weight  # [latent, E]
    up: Weight  # [E, latent]
    down_bias: Tensor | None = None
    up_bias: Tensor | None = None

    def __call__(self, x: Tensor, norm: Norm | None = None, residual: Residual | None = None) -> Tensor:
        if norm is not None:
            x = ops.norm(x, norm)
        tokens = x.flatten(0, -2)  # [M, E]
        latent = ops.linear(tokens, self.down, self.down_bias)
        mixed = self.experts.routed(latent, *self.experts.router(tokens))
        assert self.experts.shared is not None
        out = ops.linear(
            mixed.view(*x.shape[:-1], -1), self.up, self.up_bias, residual=Residual(self.experts.shared(x))
        )
        return out if residual is None else ops.add_residual(residual, out)


def build(w: WeightLoader) -> Model:
    kinds = _pattern(w.config)
    config = Config(
        {
            **w.config,
            "num_hidden_layers": len(kinds),
            "head_dim": w.config.get("head_dim", w.config.get("attention_head_dim")),
            "rms_norm_eps": w.config.float("layer_norm_epsilon", low=0.0, high=1.0, default=1e-5),
        },
        w.config.where,
    )
    shape, act = b.Dims.of(config), b.activation(config, "mlp_hidden_act", "relu2")
    b.only_silu(config, "mamba_hidden_act")
    sizes = b.Mamba2Shape(
        config.int("mamba_num_heads", low=1, high=b.MAX_SIZE),
        config.int("mamba_head_dim", low=1, high=b.MAX_SIZE),
        config.int("ssm_state_size", low=1, high=b.MAX_SIZE),
        config.int("n_groups", low=1, high=b.MAX_SIZE),
        config.int("conv_kernel", low=1, high=b.MAX_SIZE),
        shape.eps,
        (config.float("time_step_min", low=0.0, default=0.001), float("inf")),
    )

    def plain(prefix: str, width: int, inner: int) -> MLP:
        return MLP(
            w.linear(f"{prefix}.up_proj.weight", shape=(inner, width)),
            w.linear(f"{prefix}.down_proj.weight", shape=(width, inner)),
            act,
            gated=False,
            up_bias=w.tensor(f"{prefix}.up_proj.bias", (inner,), optional=True),
            down_bias=w.tensor(f"{prefix}.down_proj.bias", (width,), optional=True),
        )

    def experts(prefix: str) -> FeedForward:
        count = config.int("n_routed_experts", low=1, high=b.MAX_SIZE)
        latent = config.int("moe_latent_size", low=1, high=b.MAX_SIZE, default=None)
        inner = config.int("moe_intermediate_size", low=1, high=b.MAX_SIZE)
        common = config.int("moe_shared_expert_intermediate_size", low=1, high=b.MAX_SIZE)
        mixture = MixtureOfExperts(
            Router(
                FloatWeight(w.tensor(f"{prefix}.gate.weight", (count, shape.hidden))),
                config.int("num_experts_per_tok", low=1, high=count),
                scoring="sigmoid",
                normalize=config.bool("norm_topk_prob", default=True),
                scale=config.float("routed_scaling_factor", default=1.0),
                e_score_correction_bias=w.tensor(f"{prefix}.gate.e_score_correction_bias", (count,)),
                groups=config.int("n_group", low=1, high=count, default=1),
                topk_groups=config.int("topk_group", low=1, high=count, default=1),
                group_score="top2",
            ),
            [plain(f"{prefix}.experts.{index}", latent or shape.hidden, inner) for index in range(count)],
            plain(f"{prefix}.shared_experts", shape.hidden, common),
        )
        if latent is None:
            return mixture
        down, up = f"{prefix}.fc1_latent_proj", f"{prefix}.fc2_latent_proj"
        return LatentExperts(
            mixture,
            w.linear(f"{down}.weight", shape=(latent, shape.hidden)),
            w.linear(f"{up}.weight", shape=(shape.hidden, latent)),
            w.tensor(f"{down}.bias", (latent,), optional=True),
            w.tensor(f"{up}.bias", (shape.hidden,), optional=True),
        )

    def block(index: int) -> Block:
        return of_kind(kinds[index], f"backbone.layers.{index}")

    def of_kind(kind: str, layer: str) -> Block:
        before = b.norm(w, f"{layer}.norm.weight", shape.hidden, shape.eps)
        if kind == "mamba":
            gated = b.gated_norm(w, f"{layer}.mixer.norm.weight", sizes)
            return Block(b.mamba2(w, f"{layer}.mixer", sizes, shape.hidden, norm=gated), None, before)
        if kind == "attention":
            return Block(b.attention(w, f"{layer}.mixer", shape, None), None, before)
        if kind == "moe":
            return Block(Identity(), experts(f"{layer}.mixer"), mlp_norm=before)
        inner = config.int("intermediate_size", low=1, high=b.MAX_SIZE)
        return Block(Identity(), plain(f"{layer}.mixer", shape.hidden, inner), mlp_norm=before)

    normed = b.rms_norms(w, shape)
    heads = b.prediction_heads(w, shape, normed, _head_names(w), lambda layers: _head_blocks(config, layers, of_kind))
    return b.decoder(
        w,
        shape,
        block,
        embed="backbone.embeddings",
        final_norm=normed("backbone.norm_f"),
        heads=heads,
        ignore=("backbone.mtp.*",),
    )


def _head_kinds(config: Config) -> tuple[str, ...]:
    """The kind of each block of the head."""
    kinds = config.strs("mtp_layers_block_type", default=None)
    if kinds is None:
        letters = config.str("mtp_hybrid_override_pattern", default="*E")
        kinds = tuple(LETTERS.get(letter, letter) for letter in letters)
    return tuple("attention" if kind == "full_attention" else kind for kind in kinds)


def _head_names(w: WeightLoader) -> Iterator[b.HeadNames]:
    """One head of several blocks: what comes in front is in the first one, the last norm in the last one."""
    first = "mtp.layers.0"
    last = next((at for at in range(MOST_BLOCKS) if w.has(f"mtp.layers.{at}.final_layernorm.weight")), 0)
    if w.has(f"{first}.eh_proj.weight"):
        norm = f"mtp.layers.{last}.final_layernorm"
        yield b.HeadNames("mtp.layers", f"{first}.enorm", f"{first}.hnorm", f"{first}.eh_proj", norm)


def _head_blocks(config: Config, layers: str, block: Callable[[str, str], Block]) -> tuple[Block, ...]:
    kinds = _head_kinds(config)
    if not 0 < len(kinds) <= MOST_BLOCKS or not set(kinds) <= set(LETTERS.values()):
        raise ModelError(
            f"{config.where} asks for a prediction head of the blocks {', '.join(kinds)[:80]}; it has 1 to "
            f"{MOST_BLOCKS}, each one of {', '.join(LETTERS.values())}"
        )
    return tuple(block(kind, f"{layers}.{index}") for index, kind in enumerate(kinds))


def _pattern(config: Config) -> tuple[str, ...]:
    """The kind of each block, from a list, or from the string of letters that published configs have."""
    kinds = b.layer_kinds(config, ("layers_block_type", "layer_types"), None)
    if kinds is None:
        letters = config.str("hybrid_override_pattern")
        kinds = tuple(LETTERS.get(letter, letter) for letter in letters)
    unknown = set(kinds) - set(LETTERS.values())
    if unknown or not 0 < len(kinds) <= 4096:
        raise ModelError(
            f"{config.where} asks for {len(kinds)} blocks, of kinds {', '.join(sorted(set(kinds)))[:80]}; "
            f"a pattern has 1 to 4096 blocks, each one of {', '.join(LETTERS.values())}"
        )
    return kinds
