"""Inkling 2 (Thinking Machines): layers read mixtures of what blocks of layers gave, and may be looped through.

s = [norm(embed(tokens))]                                   # parts, one for each block of layers, the last one growing
q, k, v = norm(mix(s)), norm(mix'(s)), norm(mix''(s))       # one mixture for all, where attention has a window
s = s + conv(gate(q) * attention(q, k, v))                  # in a new part at the first layer of a block
s = s + conv(sum over chosen e: g_e * expert_e(norm(mix(s))))
logits = softcap(head(norm(mix(s))))

Keys and values are convolved, in full attention by taps of the token too. Vectors of queries and keys are clipped. In a
loop, layers run several times, each time with keys and values of its own. Their inputs are then mixed with messages of
the time before, `(1 - f) x + g message`. Published files have names of their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.renamed import Renamed
from lmstate.checkpoints.source import floats
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.families.inkling import MAX_EXTENT, NAMES, SLIDING, experts, layer_kinds
from lmstate.models.layers.block_residual import BlockMixer, MessageGate, MixedParts, PartsLayer, PassMessages
from lmstate.models.layers.clipped_attention import ClippedAttention, LengthClip, SoftcappedMLP, TokenTaps
from lmstate.models.layers.embedding import NormedEmbedding
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.models.layers.relative_attention import LogTemperature, ShortTaps
from lmstate.models.model import Block, Model
from lmstate.ops import FloatWeight, Weight

_BOTH = {
    "vocab_size": 201_024,
    "unpadded_vocab_size": 200_058,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 128,
    "sliding_window_size": 1024,
    "d_rel": 16,
    "rel_extent": 1024,
    "log_scaling_alpha": 0.1,
    "rms_norm_eps": 1e-6,
    "conv_kernel_size": 4,
    "num_experts_per_tok": 8,
    "route_scale": 8.0,
    "qk_l2_clip_threshold": 22.627416997969522,
    "rel_l2_clip_threshold": 8.0,
    "n_layers_per_attn_res_block": 6,
    "mlp_gate_softcap": 4.0,
    "mlp_up_softcap": 25.0,
    "final_logit_softcapping": 30.0,
}
DEFAULTS: b.Defaults = {
    "inkling2_text": {
        **_BOTH,
        "hidden_size": 4608,
        "num_hidden_layers": 48,
        "num_attention_heads": 48,
        "swa_num_attention_heads": 48,
        "log_scaling_n_floor": 128_000,
        "moe_intermediate_size": 2304,
        "n_routed_experts": 384,
    },
    "inkling2_loop_text": {
        **_BOTH,
        "hidden_size": 2304,
        "num_hidden_layers": 24,
        "num_attention_heads": 24,
        "swa_num_attention_heads": 24,
        "log_scaling_n_floor": 8192,
        "moe_intermediate_size": 1152,
        "n_routed_experts": 128,
        "loop_layer_index_start": 6,
        "loop_layer_index_end": 18,
        "loop_num_passes": 3,
        "loop_gate_rank": 64,
    },
}
LOOP_NAMES = {
    "core_start": "loop_layer_index_start", "core_end": "loop_layer_index_end", "num_passes": "loop_num_passes",
    "gate_rank": "loop_gate_rank",
}  # fmt: skip
MIXER_EPS = 1e-6  # of parts of the stream, whatever the config says
MOST_PASSES = 64
# Parts of names in published files -> those in memory, in this order.
PUBLISHED = (
    (r"^model\.llm\.", "model."),
    (r"^model\.embed\.", "model.embed_tokens."),
    (r"^model\.embed_norm\.", "model.embed_tokens.embed_norm."),
    (r"\.controllers\.attn\.", ".q_message_gate."),
    (r"\.controllers\.(k|v|mlp)\.", r".\1_message_gate."),
    (r"_message_gate\.down_weight$", "_message_gate.down_proj.weight"),
    (r"_message_gate\.gain_weight$", "_message_gate.message_gate_proj.weight"),
    (r"_message_gate\.forget_weight$", "_message_gate.forget_gate_proj.weight"),
    (r"\.attn\.", ".self_attn."),
    (r"\.w([qkv])_d[uv]\.", r".\1_proj.linear."),
    (r"\.([kv])_sconv\.", r".\1_proj.sconv."),
    (r"\.rel_logits_proj\.", ".relative_position_bias."),
    (r"\.wr_du\.", ".relative_position_bias.linear."),
    (r"\.q_l2_clip\.", ".q_proj.norm."),
    (r"\.rel_l2_clip\.", ".relative_position_bias.norm."),
    (r"\.wo_ud\.", ".o_proj.linear."),
    (r"\.gate_attn\.", ".o_proj.gate_proj."),
    (r"\.attn_sink_proj\.", ".sink_proj."),
    (r"\.attn_sconv\.", ".post_attention_convolution."),
    (r"\.mlp_sconv\.", ".post_mlp_convolution."),
    (r"(convolution|sconv)\.weight$", r"\1.conv1d.weight"),
    (r"\.static_w$", ".static_weight"),
    (r"sconv\.weight_proj$", "sconv.weight_proj.weight"),
    (r"\.mlp_norm\.", ".post_attention_layernorm."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.([qkv])_input_norm\.", r".\1_input_layernorm."),
    (r"^model\.attn_res\.mlp_queries\.(\d+)$", r"model.layers.\1.mlp_input.query"),
    (r"^model\.attn_res\.output_query$", "model.final_input.query"),
    (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.experts\.w2_weight$", ".experts.down_proj"),
)
QUERY_OF_NEXT = re.compile(r"^model\.attn_res\.attn_queries\.(\d{1,4})$")  # of the layer after the one of its number
MESSAGE_QUERIES = ("model.middle_cycle_cross_pass_queries", "model.middle_cycle_cross_pass_kv_queries")
"""In published files: of the queries and the experts of each layer, and of its keys and its values."""
FURTHER_PASSES = ("*_message_gate.*", "model.message_input.query", *MESSAGE_QUERIES)


@dataclass(frozen=True)
class Loop:
    """The layers from `start` up to `end` run `passes` times."""

    start: int
    end: int
    passes: int
    rank: int

    @classmethod
    def of(cls, config: Config, layers: int, span: int) -> Loop | None:
        """The loop of a config, `span` layers in a block; None if it has none."""
        if not config.given("loop_num_passes"):
            return None
        start = config.int("loop_layer_index_start", low=1, high=layers - 1)
        end = config.int("loop_layer_index_end", low=start + 1, high=layers)
        if start % span or end % span:
            raise ModelError(f"{config.where} loops through layers {start} to {end - 1}; blocks have {span} layers")
        passes = config.int("loop_num_passes", low=1, high=MOST_PASSES)
        return cls(start, end, passes, config.int("loop_gate_rank", low=1, high=b.MAX_SIZE))

    def order(self, layers: int) -> list[tuple[int, int]]:
        """(number of a layer, pass that it is in) of all that run, in their order."""
        looped = [(index, at) for at in range(self.passes) for index in range(self.start, self.end)]
        return [(index, 0) for index in range(self.start)] + looped + [(index, 0) for index in range(self.end, layers)]


def build(w: WeightLoader) -> Model:
    w = w.over(Renamed(w.source, [(_plain(name), name) for name in w.source.names()], w.source.config))
    config = b.with_usual_names(w.config, NAMES)
    if (given := config.fields("loop_config")) is not None:  # as in published files
        config = Config(
            {**config, **{LOOP_NAMES[name]: given[name] for name in LOOP_NAMES if name in given}}, config.where
        )
    w.config = config = b.completed(config, DEFAULTS[config.str("model_type")])
    config.str("scoring_func", allowed=("sigmoid",), default="sigmoid")
    b.only_silu(config, "hidden_act")
    shape, kinds = b.Dims.of(config), layer_kinds(config)
    span, normed = config.int("n_layers_per_attn_res_block", low=1, high=4096), b.rms_norms(w, shape)
    loop = Loop.of(config, shape.layers, span)
    order = [(index, 0) for index in range(shape.layers)] if loop is None else loop.order(shape.layers)
    passed = (loop.end - loop.start) // span if loop is not None and loop.passes > 1 else 0
    parts_norm = b.plain_norm(w, shape.hidden, MIXER_EPS)

    def mixer(name: str, count: int) -> BlockMixer:
        queries = w.tensor(f"{name}.query", (shape.hidden,) if count == 1 else (count, shape.hidden))
        return BlockMixer(FloatWeight(queries.view(count, shape.hidden)), parts_norm)

    def block(at: int) -> Block:
        index, turn = order[at]
        layer, slides = f"model.layers.{index}", kinds[index] == SLIDING
        names = ["input_layernorm"] * 3 if slides else [f"{part}_input_layernorm" for part in "qkv"]
        first, second, third = (normed(f"{layer}.{name}") for name in names)
        return Block(
            PartsLayer(
                _attention(w, f"{layer}.self_attn", shape, slides),
                (first, second, third),
                _taps(w, f"{layer}.post_attention_convolution", shape.hidden),
                _mixture(w, f"{layer}.mlp", shape),
                normed(f"{layer}.post_attention_layernorm"),
                _taps(w, f"{layer}.post_mlp_convolution", shape.hidden),
                index % span == 0,
                mixer(f"{layer}.attention_input", 1 if slides else 3) if index else None,
                mixer(f"{layer}.mlp_input", 1),
                messages(index) if loop is not None and turn else None,
                passed if loop is not None and index == loop.end else 0,
            ),
            None,
        )

    def messages(index: int) -> PassMessages:
        assert loop is not None
        rows = slice(index - loop.start, index - loop.start + 1)
        gates = [
            _gate(w, f"model.layers.{index}.{part}_message_gate", shape, loop.rank) for part in ("q", "k", "v", "mlp")
        ]
        queries = FloatWeight(_message_queries(w, loop.end - loop.start, shape.hidden)[rows].flatten(0, 1).contiguous())
        before = -(-loop.start // span) + 1 if index == loop.start else 0
        return PassMessages(BlockMixer(queries, parts_norm), (gates[0], gates[1], gates[2], gates[3]), passed, before)

    answered = config.int("unpadded_vocab_size", low=1, high=shape.vocab, default=shape.vocab)
    head = None
    if w.shape("lm_head.weight")[:1] != (answered,):  # rows of no token
        label = "lm_head.weight, without padding"
        w.expect("lm_head.weight", (shape.vocab, shape.hidden))
        head = w.derived(
            label, "lm_head.weight", make=lambda rows: floats(rows)[:answered], shape=(answered, shape.hidden)
        )
    return b.decoder(
        w,
        replace(shape, vocab=answered, layers=len(order)),
        block,
        head=head,
        marks=shape.vocab - answered,
        logit_softcap=config.float("final_logit_softcapping", low=1e-6, high=1e6),
        entry=NormedEmbedding(normed("model.embed_tokens.embed_norm")),
        exit=MixedParts(mixer("model.final_input", 1), passed if loop is not None and loop.end == shape.layers else 0),
        ignore=FURTHER_PASSES if loop is not None and loop.passes == 1 else (),
    )


def _plain(name: str) -> str:
    """The name in memory of a tensor."""
    for published, own in PUBLISHED:
        name = re.sub(published, own, name)
    found = QUERY_OF_NEXT.match(name)
    return name if found is None else f"model.layers.{int(found[1]) + 1}.attention_input.query"


def _taps(w: WeightLoader, name: str, width: int) -> ShortTaps:
    """A convolution that adds its input, and brings the sum back to its size."""
    kernel = w.config.int("conv_kernel_size", low=1, high=256)
    taps = b.convolution(w, f"{name}.conv1d.weight", width, kernel).clone()
    taps[:, -1] += 1.0
    return ShortTaps(taps / (kernel + 1) ** 0.5)


def _token_taps(w: WeightLoader, prefix: str, width: int, kernel: int, heads: int) -> TokenTaps:
    """The same of keys and values, whose taps each token adds to. In files the first tap is that of the token."""
    taps = [w.tensor(f"{prefix}.{part}_proj.sconv.static_weight", (kernel, width)).T.flip(-1) for part in "kv"]
    both = torch.cat(taps)
    both[:, -1] += 1.0
    return TokenTaps(ShortTaps(both), 2 * heads, (2 * kernel + 1) ** -0.5)


def _attention(w: WeightLoader, prefix: str, shape: b.Dims, slides: bool) -> ClippedAttention:
    config, of = w.config, "swa_" if slides else ""
    heads, kv_heads, dim = (
        config.int(f"{of}{name}", low=1, high=b.MAX_SIZE)
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    if heads % kv_heads:
        raise ModelError(f"{config.where}: {heads} heads cannot share {kv_heads} heads of keys evenly")
    window = config.int("sliding_window_size", low=1, high=MAX_EXTENT) if slides else None
    extent = window or config.int("rel_extent", low=1, high=MAX_EXTENT)
    relative, kv_width = config.int("d_rel", low=1, high=b.MAX_SIZE), kv_heads * dim
    kernel, bias = config.int("conv_kernel_size", low=1, high=256), f"{prefix}.relative_position_bias"
    floor = config.int("log_scaling_n_floor", low=1)
    bank = w.tensor(f"{bias}.proj", (relative, extent)).T
    names = [f"{prefix}.q_proj.linear", f"{prefix}.o_proj.gate_proj", f"{bias}.linear", f"{prefix}.sink_proj"]

    def clip(name: str, width: int, scale: str | None) -> LengthClip:
        ones = FloatWeight(torch.ones(1, width, dtype=torch.float32, device=w.device))
        most = config.float(f"{name}_l2_clip_threshold", low=1e-6, high=1e9)
        return LengthClip(most, ones, None if scale is None else w.tensor(f"{scale}.norm.scale", (heads, width)))

    def stored(part: str) -> Weight:
        """The projection to keys or values, and to the taps of each of their heads."""
        name = f"{prefix}.{part}_proj"
        if slides:
            return w.linear(f"{name}.linear.weight", shape=(kv_width, shape.hidden))
        both = (f"{name}.linear.weight", f"{name}.sconv.weight_proj.weight")
        return w.linear(*both, shape=((kv_width, kv_heads * kernel), shape.hidden))

    static = [] if not slides else [_taps(w, f"{prefix}.{part}_proj.sconv", kv_width).taps for part in "kv"]
    return ClippedAttention(
        w.linear(
            *(f"{name}.weight" for name in names),
            shape=((heads * dim, heads * dim, heads * relative, heads), shape.hidden),
        ),
        stored("k"),
        stored("v"),
        w.linear(f"{prefix}.o_proj.linear.weight", shape=(shape.hidden, heads * dim)),
        heads,
        kv_heads,
        dim,
        clip("qk", dim, f"{prefix}.q_proj"),
        clip("qk", dim, None),
        clip("rel", relative, bias),
        b.plain_norm(w, dim, shape.eps),
        FloatWeight(torch.cat([bank, bank.new_zeros(1, relative)])),
        ShortTaps(torch.cat(static)) if slides else _token_taps(w, prefix, kv_width, kernel, kv_heads),
        torch.zeros(heads, dtype=torch.float32, device=w.device),
        window,
        None if slides else LogTemperature(floor, config.float("log_scaling_alpha", default=0.1)),
    )


def _mixture(w: WeightLoader, prefix: str, shape: b.Dims) -> MixtureOfExperts:
    config, count, inner = w.config, b.expert_count(w.config), b.expert_width(w.config)
    caps = [config.float(f"mlp_{part}_softcap", low=1e-6, high=1e6) for part in ("gate", "up")]
    router = Router(
        b.router_weight(w, f"{prefix}.gate.weight", count, shape.hidden),
        b.top_k(config, count),
        "sigmoid",
        True,
        config.float("route_scale", low=0.0),
        e_score_correction_bias=w.tensor(f"{prefix}.gate.e_score_correction_bias", (count,)),
    )
    routed = experts(w, f"{prefix}.experts", "w13_weight", count, shape.hidden, inner, "silu")
    return MixtureOfExperts(router, [SoftcappedMLP(each, *caps) for each in routed])


def _gate(w: WeightLoader, name: str, shape: b.Dims, rank: int) -> MessageGate:
    return MessageGate(
        b.plain_norm(w, shape.hidden, shape.eps),
        w.linear(f"{name}.down_proj.weight", shape=(rank, 2 * shape.hidden)),
        *(w.linear(f"{name}.{part}_gate_proj.weight", shape=(shape.hidden, rank)) for part in ("forget", "message")),
    )


def _message_queries(w: WeightLoader, layers: int, hidden: int) -> Tensor:
    """Of each looped layer, for what its queries, keys, values and experts read: float32 `[layers, 4, E]`."""
    if not w.has(MESSAGE_QUERIES[0]):
        return w.tensor("model.message_input.query", (layers, 4, hidden))
    first, between = (w.tensor(name, (2 * layers, hidden)).view(layers, 2, hidden) for name in MESSAGE_QUERIES)
    return torch.cat([first[:, :1], between, first[:, 1:]], dim=1)
