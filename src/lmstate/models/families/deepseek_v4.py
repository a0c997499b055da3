"""DeepSeek-V4: wide residual streams, attention to a window and to compressed entries, and experts chosen by a hash.

s = [embed(tokens)] * N                         # N streams
s = mixed(s) + w * attention(norm(mix(s)))
s = mixed(s) + w' * experts(norm(mix'(s)))      # beside shared ones
logits = head(norm(mix''(s)))

A layer attends to the last tokens alone, to all entries of 128 tokens each (HCA), or to those of 4 tokens that an index
chooses (CSA). Experts of the first layers follow from the token itself, by a table. It drafts with a prediction head on
the streams, or with DSpark.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn.functional import softplus

from lmstate import ops
from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.renamed import Renamed
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.heads.block_head import Chained
from lmstate.models.heads.dspark import LatentSpark
from lmstate.models.heads.head import DraftHead
from lmstate.models.heads.wide_head import WideHead
from lmstate.models.layers.compressed_attention import CompressedAttention, Compressor, EntryIndex
from lmstate.models.layers.hyper_connection import HyperBlock, RepeatedTokens
from lmstate.models.layers.mlp import ClampedMLP
from lmstate.models.layers.moe import MixtureOfExperts
from lmstate.models.layers.rope import Rope, make_rope
from lmstate.models.model import Block, Model
from lmstate.ops import Weight
from lmstate.state import Step

DEFAULTS: b.Defaults = {
    "deepseek_v4": {
        "vocab_size": 129_280,
        "hidden_size": 4096,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "q_lora_rank": 1024,
        "num_experts_per_tok": 6,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "o_groups": 8,
        "o_lora_rank": 1024,
    }
}
WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
BY_RATIO = {0: WINDOW, 4: SPARSE, 128: HEAVY}
RATES = {SPARSE: 4, HEAVY: 128}
HASHED, ROUTED = "hash_moe", "moe"
MOST_STAGES, MOST_BLOCK = 64, 256
# How parts are called in files, and here.
PARTS = (
    (r"^(model\.)?embed\.", "model.embed_tokens."),
    (r"^layers\.", "model.layers."),
    (r"^norm\.", "model.norm."),
    (r"^(model\.)?hc_head_(fn|base|scale)$", r"model.hc_head.hc_\2"),
    (r"^(model\.)?hc_head\.", "model.hc_head."),
    (r"^(mtp\.\d+)\.hc_head_(fn|base|scale)$", r"\1.hc_head.hc_\2"),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"\.attn_sink$", ".sinks"),
    (r"\.self_attn\.indexer\.compressor\.", ".self_attn.compressor.indexer."),
    (r"\.self_attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (r"\.self_attn\.indexer\.wq_b\.", ".self_attn.compressor.indexer.q_b_proj."),
    (r"\.(self_attn|compressor|indexer)\.norm\.", r".\1.kv_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.wq_a\.", ".q_a_proj."),
    (r"\.wq_b\.", ".q_b_proj."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.wo_(a|b)\.", r".o_\1_proj."),
    (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.w3\.", ".up_proj."),
)


@dataclass(frozen=True, eq=False)
class RootRouter:
    """Router whose scores are the roots of softplus: `sqrt(log(1 + exp(logit)))`; chosen ones are weighed by theirs.

    `correction`: added to the scores for the choice.
    """

    weight: Weight  # [N, E], which stays float32
    top_k: int
    scale: float
    correction: Tensor | None = None  # float32 [N]

    @property
    def per_token(self) -> int:
        return self.top_k

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x float32 `[M, E]` -> (weights float32 `[M, top_k]`, expert numbers int64 `[M, top_k]`)."""
        scores = self._scores(x)
        choice = scores if self.correction is None else scores + self.correction
        return self.weighed(scores, choice.topk(self.top_k, dim=-1).indices)

    def of_table(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The same for experts `[M, top_k]` that are known beforehand."""
        return self.weighed(self._scores(x), chosen)

    def weighed(self, scores: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        weights = scores.gather(-1, chosen)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scale, chosen

    def _scores(self, x: Tensor) -> Tensor:
        return softplus(ops.linear(x, self.weight).double()).sqrt().float()  # in float64 and back, as `ops.sigmoid` is


@dataclass(frozen=True, eq=False, kw_only=True)
class HashedBlock(HyperBlock):
    """A block whose experts follow from the token."""

    experts_of_token: Tensor  # int64 [V, top_k]

    def fed(self, x: Tensor, step: Step) -> Tensor:
        mixture, norm = self.mlp, self.mlp_norm
        assert isinstance(mixture, MixtureOfExperts) and isinstance(mixture.router, RootRouter)
        assert norm is not None and mixture.shared is not None
        x = ops.norm(x, norm)
        flat, chosen = x.flatten(0, -2), self.experts_of_token[step.extras["tokens"].flatten()]
        return mixture.routed(flat, *mixture.router.of_table(flat, chosen)).view_as(x) + mixture.shared(x)


def build(w: WeightLoader) -> Model:
    w = w.over(Renamed(w.source, [(_plain(name), name) for name in w.source.names()], w.source.config))
    w.config = config = b.completed(w.config, DEFAULTS["deepseek_v4"])
    config.str("scoring_func", allowed=("sqrtsoftplus",), default="sqrtsoftplus")
    shape = b.Dims.of(config)
    inner, act = b.expert_width(config), b.activation(config)
    kinds, mixtures = _kinds(config, shape.layers), _mixtures(config, shape.layers)
    ropes = {name: rope.to(w.device) for name, rope in _ropes(config, shape.head_dim).items()}
    limit = config.float("swiglu_limit", low=1e-6, default=10.0)
    normed, count = b.rms_norms(w, shape), b.expert_count(config)
    streams = b.Streams(
        config.int("hc_mult", low=1, high=64, default=4),
        config.float("hc_eps", low=0.0, default=1e-6),
        balancings=config.int("hc_sinkhorn_iters", low=1, high=1000, default=20),
    )
    top_k = b.top_k(config, count)

    def mixture(prefix: str, hashed: bool) -> MixtureOfExperts:
        gate = f"{prefix}.gate"
        correction = None if hashed else w.tensor(f"{gate}.e_score_correction_bias", (count,))
        matrix = b.router_weight(w, f"{gate}.weight", count, shape.hidden)
        router = RootRouter(matrix, top_k, config.float("routed_scaling_factor", default=1.5), correction)
        routed = b.experts(w, f"{prefix}.experts", count, shape.hidden, inner, act)
        shared = b.mlp(w, f"{prefix}.shared_experts", shape.hidden, inner, act)
        return MixtureOfExperts(router, [ClampedMLP(each, limit) for each in routed], ClampedMLP(shared, limit))

    def plain(layer: str, kind: str, experts: MixtureOfExperts) -> HyperBlock:
        return HyperBlock(
            _attention(w, f"{layer}.self_attn", shape, kind, ropes),
            experts,
            normed(f"{layer}.input_layernorm"),
            normed(f"{layer}.post_attention_layernorm"),
            around_mixer=b.hyper_connection(w, f"{layer}.attn_hc", shape, streams),
            around_mlp=b.hyper_connection(w, f"{layer}.ffn_hc", shape, streams),
        )

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        hashed = mixtures[index] == HASHED
        made = plain(layer, kinds[index], mixture(f"{layer}.mlp", hashed))
        if not hashed:
            return made
        table = w.tensor(f"{layer}.mlp.gate.tid2eid", (shape.vocab, top_k)).long()
        if not table.is_meta and (int(table.min()) < 0 or int(table.max()) >= count):
            raise ModelError(f"{w.source.path}: the table of {layer}.mlp names experts that are not in 0..{count - 1}")
        return HashedBlock(**vars(made), experts_of_token=table)

    def drafters(embed: Weight, head: Weight, head_bias: Tensor | None) -> tuple[DraftHead, ...]:
        found = tuple(
            predictor(index, embed, head) for index in range(MOST_STAGES) if w.has(f"mtp.{index}.e_proj.weight")
        )
        return found or spark(embed, head)

    def predictor(index: int, embed: Weight, head: Weight) -> WideHead:
        prefix, square = f"mtp.{index}", (shape.hidden, shape.hidden)
        return WideHead(
            index + 1,
            (shape.layers,),
            normed(f"{prefix}.enorm"),
            normed(f"{prefix}.hnorm"),
            w.linear(f"{prefix}.e_proj.weight", shape=square),
            w.linear(f"{prefix}.h_proj.weight", shape=square),
            (plain(prefix, WINDOW, mixture(f"{prefix}.mlp", False)),),
            b.hyper_head(w, f"{prefix}.hc_head", shape, streams),
            normed(f"{prefix}.norm"),
            embed,
            head,
        )

    def spark(embed: Weight, head: Weight) -> tuple[LatentSpark, ...]:
        count = next((at for at in range(MOST_STAGES) if not w.has(f"mtp.{at}.self_attn.kv_proj.weight")), MOST_STAGES)
        if not count or not config.given("dspark_target_layer_ids"):
            return ()
        stages = [f"mtp.{index}" for index in range(count)]
        taps = tuple(index + 1 for index in config.ints("dspark_target_layer_ids", high=shape.layers - 1))
        last, rank = stages[-1], config.int("dspark_markov_rank", low=1, high=b.MAX_SIZE, default=256)
        if not taps or sorted(set(taps)) != list(taps):
            raise ModelError(f"config: dspark_target_layer_ids are {[tap - 1 for tap in taps]}; they must rise")
        before, after = (
            w.linear(f"{last}.markov_head.markov_w{at}.weight", shape=(shape.vocab, rank)) for at in (1, 2)
        )
        sure = w.linear(f"{last}.confidence_head.proj.weight", shape=(1, shape.hidden + rank))
        return (
            LatentSpark(
                taps,
                w.linear(f"{stages[0]}.main_proj.weight", shape=(shape.hidden, len(taps) * shape.hidden)),
                normed(f"{stages[0]}.main_norm"),
                tuple(plain(stage, WINDOW, mixture(f"{stage}.mlp", False)) for stage in stages),
                b.hyper_head(w, f"{last}.hc_head", shape, streams),
                normed(f"{last}.norm"),
                embed,
                head,
                config.int("dspark_block_size", low=1, high=MOST_BLOCK),
                config.int("dspark_noise_token_id", high=shape.vocab - 1),
                Chained(before, after, sure),
            ),
        )

    return b.decoder(
        w,
        shape,
        block,
        entry=RepeatedTokens(streams.count),
        heads=drafters,
        exit=b.hyper_head(w, "model.hc_head", shape, streams),
        ignore=("mtp.*", "model.mtp.*"),
    )


def _attention(w: WeightLoader, prefix: str, shape: b.Dims, kind: str, ropes: dict[str, Rope]) -> CompressedAttention:
    config, dim = w.config, shape.head_dim
    latent = config.int("q_lora_rank", low=1, high=b.MAX_SIZE)
    groups = config.int("o_groups", low=1, high=shape.heads)
    rank = config.int("o_lora_rank", low=1, high=b.MAX_SIZE)
    if shape.heads % groups or shape.kv_heads != 1:
        raise ModelError(f"{shape.heads} heads over {shape.kv_heads} kv heads do not lie in {groups} groups over one")
    each = shape.heads * dim // groups
    out_groups = w.tensor(f"{prefix}.o_a_proj.weight", (groups * rank, each)).view(groups, rank, each)
    made = CompressedAttention(
        w.linear(f"{prefix}.q_a_proj.weight", f"{prefix}.kv_proj.weight", shape=([latent, dim], shape.hidden)),
        b.norm(w, f"{prefix}.q_a_norm.weight", latent, shape.eps),
        w.linear(f"{prefix}.q_b_proj.weight", shape=(shape.heads * dim, latent)),
        b.plain_norm(w, dim, shape.eps),
        b.norm(w, f"{prefix}.kv_norm.weight", dim, shape.eps),
        w.tensor(f"{prefix}.sinks", (shape.heads,)),
        out_groups.mT.contiguous().to(w.dtype),
        w.linear(f"{prefix}.o_b_proj.weight", shape=(shape.hidden, groups * rank)),
        config.int("sliding_window", low=1, default=128),
        ropes["main" if kind == WINDOW else "compress"],
    )
    if kind == WINDOW:
        return made
    rates = config.fields("compress_rates") or Config({})
    rate = rates.int(kind, low=1, high=2**16, default=RATES[kind])
    compressor = f"{prefix}.compressor"
    entries = _compressor(w, compressor, dim, rate, ropes["compress"], kind == SPARSE, shape.eps)
    names, heights = _inputs(compressor, dim, kind == SPARSE)
    if kind == HEAVY:
        return replace(made, inputs=w.linear(*names, shape=(heights, shape.hidden)), compressor=entries)
    inside, width = f"{compressor}.indexer", config.int("index_head_dim", low=1, high=b.MAX_SIZE, default=128)
    heads = config.int("index_n_heads", low=1, high=b.MAX_SIZE, default=64)
    more, wider = _inputs(inside, width, True)
    return replace(
        made,
        inputs=w.linear(*names, *more, shape=([*heights, *wider], shape.hidden)),
        compressor=entries,
        index=EntryIndex(
            _compressor(w, inside, width, rate, ropes["compress"], True, shape.eps),
            w.linear(f"{inside}.q_b_proj.weight", shape=(heads * width, latent)),
            b.router_weight(w, f"{inside}.scorer.weights_proj.weight", heads, shape.hidden),
            config.int("index_topk", low=1, default=512),
        ),
    )


def _inputs(prefix: str, width: int, overlaps: bool) -> tuple[list[str], list[int]]:
    """Names of the projections to values and logits, and how wide these are."""
    return [f"{prefix}.kv_proj.weight", f"{prefix}.gate_proj.weight"], [width * (1 + overlaps)] * 2


def _compressor(
    w: WeightLoader, prefix: str, width: int, rate: int, rope: Rope, overlaps: bool, eps: float
) -> Compressor:
    bias = w.tensor(f"{prefix}.position_bias", (rate, width * (1 + overlaps)))
    return Compressor(rate, b.norm(w, f"{prefix}.kv_norm.weight", width, eps), bias, rope, overlaps)


def _kinds(config: Config, layers: int) -> Sequence[str]:
    """The kind of each layer's attention."""
    kinds = config.strs("layer_types", layers, allowed=(WINDOW, SPARSE, HEAVY), default=None)
    if kinds is not None:
        return kinds
    if config.given("compress_ratios"):
        ratios = config.ints("compress_ratios")[:layers]
        if len(ratios) != layers or not set(ratios) <= set(BY_RATIO):
            raise ModelError(f"config: compress_ratios are {list(ratios)}; expected 0, 4 or 128 for {layers} layers")
        return [BY_RATIO[ratio] for ratio in ratios]
    return [HEAVY if index < 2 or index % 2 == 0 else SPARSE for index in range(layers)]


def _mixtures(config: Config, layers: int) -> Sequence[str]:
    """The way in which the experts of each layer are chosen."""
    kinds = config.strs("mlp_layer_types", layers, allowed=(HASHED, ROUTED), default=None)
    hashed = config.int("num_hash_layers", default=3)
    return kinds or [HASHED if index < hashed else ROUTED for index in range(layers)]


def _ropes(config: Config, head_dim: int) -> dict[str, Rope]:
    """Ropes of layers with a window alone, and of those with entries, which are stretched where the config says so."""
    given: Mapping[str, Any] = config.fields("rope_parameters") or config.fields("rope_scaling") or {}
    fraction = config.float("partial_rotary_factor", low=0.0, high=1.0, default=None)
    if fraction is None:
        fraction = config.int("qk_rope_head_dim", low=2, default=64) / head_dim
    if not isinstance(given.get("main"), dict) or not isinstance(given.get("compress"), dict):
        main = {"rope_type": "default", "rope_theta": config.float("rope_theta", low=1.0, default=10_000.0)}
        theta = config.float("compress_rope_theta", low=1.0, default=160_000.0)
        compress = {"attention_factor": 1.0, **given, "rope_theta": theta}
        given = {"main": main, "compress": compress}
    made = {}
    for name in ("main", "compress"):
        fields = Config({**config, "rope_scaling": None, "rope_parameters": given[name]}, config.where)
        made[name] = make_rope(fields, head_dim, interleaved=True, fraction=fraction)
    return made


def _plain(name: str) -> str:
    for there, here in PARTS:
        name = re.sub(there, here, name)
    return name
