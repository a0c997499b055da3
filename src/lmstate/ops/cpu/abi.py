"""The argument structures and kinds of `csrc`, field for field; `Library` compares their sizes when it opens."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from enum import IntEnum
from struct import Struct

import torch

from lmstate.ops.types.weight import Weight


class Kind(IntEnum):
    """Storage kinds of floats and weights: `simd.h` and `linear_args.h`."""

    F32 = 0
    BF16 = 1
    F16 = 2
    INT8 = 3
    INT4 = 4
    BFLOAT12 = 5
    INT8_BY_BYTES = 6
    INT4_BY_BYTES = 7


class GateKind(IntEnum):
    """The activation of a gate: `prologue.h`."""

    NO_GATE = 0
    SILU = 1
    GELU_TANH = 2
    RELU = 3
    RELU2 = 4
    SWIGLUOAI = 5


class SublayerKind(IntEnum):
    """The member of `sublayer_args` that is meant: `fused.h`."""

    ATTENTION = 0
    MLP = 1
    GATED_DELTA = 2
    MAMBA2 = 3
    MOE = 4
    SHORT_CONV = 5


KINDS = {torch.float32: Kind.F32, torch.bfloat16: Kind.BF16, torch.float16: Kind.F16}
WEIGHT_KINDS = {
    "float32": Kind.F32, "bfloat16": Kind.BF16, "float16": Kind.F16, "int8": Kind.INT8, "int4": Kind.INT4,
    "bfloat16 in 12 bits": Kind.BFLOAT12,
}  # fmt: skip
_BY_BYTES = {"int8": Kind.INT8_BY_BYTES, "int4": Kind.INT4_BY_BYTES}


def product_kind(weight: Weight) -> Kind:
    """Storage of a weight, and of the activations that it multiplies."""
    return (_BY_BYTES if weight.activations == 8 else WEIGHT_KINDS)[weight.kind]


GATES = {
    "silu": GateKind.SILU, "gelu_tanh": GateKind.GELU_TANH, "relu": GateKind.RELU, "relu2": GateKind.RELU2,
    "swigluoai": GateKind.SWIGLUOAI,
}  # fmt: skip

MAX_HEAD_DIM = 512
SLOT_ARRAYS = 8


class CStruct:
    """A C structure, or a part of one: groups of a letter (P: pointer, q: int64, d: double) and its fields.

    `name[n]` is an array, which `pack` takes as a tuple; a pair is a structure within, which it takes as its bytes:
    zeros follow where they are fewer.
    """

    def __init__(self, name: str, *groups: str | tuple[str, CStruct]) -> None:
        self.name = name
        self.letters, self.fields = "", list[str]()
        self._zeros = dict[str, float | bytes | tuple[int, ...]]()
        format = ""
        for group in groups:
            letter, *names = group.split() if isinstance(group, str) else ("s", group[0])
            for declared in names:
                field, _, length = declared.rstrip("]").partition("[")
                count = int(length or 1)
                if isinstance(group, tuple):
                    self.letters += group[1].letters * count
                    self.fields += group[1].fields * count
                    format += f"{count * group[1].size}s"
                    self._zeros[field] = b""
                else:
                    self.letters += letter * count
                    self.fields += [field] * count
                    format += letter * count
                    self._zeros[field] = (0,) * count if length else 0
        self.size: int = Struct(format).size
        self.pack = _packer(Struct(format), self._zeros)
        """The structure's bytes, from all of its fields by name."""

    def pack_some(self, **fields: float | bytes | tuple[int, ...]) -> bytes:
        """The same, with zeros for the fields that are left out."""
        return self.pack(**{**self._zeros, **fields})


def _packer(struct: Struct, fields: Mapping[str, object]) -> Callable[..., bytes]:
    """A function of the fields by name, as fast as one by position: Python binds the names."""
    ordered = ", ".join(f"*{name}" if isinstance(value, tuple) else name for name, value in fields.items())
    packer: Callable[..., bytes] = eval(f"lambda *, {', '.join(fields)}: pack({ordered})", {"pack": struct.pack})
    return packer


ROPE = CStruct("rope_args", "P x cos sin y", "q rows tokens heads dim half interleaved x_row x_token x_head threads")
APPEND = CStruct(
    "append_args", "P source[2] to[2] starts counts tables[2]", "q rows tokens kv_heads slots kind threads",
    "q table_row block dim[2]",
    "q source_row[2] source_token[2] source_head[2] to_row[2] to_head[2] to_slot[2]",
)  # fmt: skip
ATTEND = CStruct(
    "attend_args", "P q k v starts counts sinks slopes biases out columns ends k_table v_table",
    "q rows tokens heads kv_heads slots dim dim_v q_row q_token q_head k_row k_head k_slot v_row v_head v_slot",
    "q table_row block planes kind window chunk threads distances bias_token",
    "d scale softcap",
)  # fmt: skip
ROTATE_ATTEND = CStruct("rotate_attend_args", ("q", ROPE), ("k", ROPE), ("append", APPEND), ("attend", ATTEND))
CODES = CStruct(
    "codes_args", "P k v k_scale v_scale k_table v_table k_scale_table v_scale_table", "q bits tail table_row block"
)
ATTEND_QUANTIZED = CStruct(
    "attend_quantized_args", ("q", ROPE), ("k", ROPE),
    "P source[2]", "q source_row[2] source_token[2] source_head[2] rotates store_threads",
    ("codes", CODES), ("attend", ATTEND),
)  # fmt: skip
ATTEND_LATENT = CStruct(
    "attend_latent_args", "P q q_rope latent rope starts counts out latent_table rope_table columns ends"
    " sinks", "q rows tokens heads slots dim rope_dim planes",
    "q q_row q_token q_head qr_row qr_token qr_head latent_row latent_slot rope_row rope_slot table_row block",
    "q kind window threads",
    "d scale",
)  # fmt: skip
CHOOSE = CStruct(
    "choose_args", "P q weights keys starts counts table scores chosen", "q rows tokens heads dim slots budget",
    "q q_row q_token q_head w_row w_token key_row key_slot table_row block kind threads rate size local",
)  # fmt: skip
GATHER = CStruct(
    "gather_args", "P source table chosen to", "q rows count bytes slots row slot table_row block threads head"
)  # fmt: skip
PER_HEAD_MATMUL = CStruct("per_head_matmul_args", "P x w y", "q rows heads inputs outputs kind threads x_row x_head")
SLOT_ARRAY = CStruct("slot_array", "P stored undo_log", "q bytes")
SLOT_COMMIT = CStruct(
    "slot_commit", (f"arrays[{SLOT_ARRAYS}]", SLOT_ARRAY),
    "P positions scores evicted_at slot filled undo_head columns evicted queries ring",
    "q kv_heads slots undo_slots count history planes wide lowest budget batch sinks newest by_scores",
    "q tokens query_width ring_size",
)  # fmt: skip
COMMIT_SLOTS = CStruct("commit_slots_args", "P starts counts accepted", "q layers rows threads")

LINEAR = CStruct(
    "linear_args", "P x weight bias norm residual after y", "q rows outputs inputs kind gate threads",
    "d eps after_eps scale", "P factors", "q begin end glu y_row", "P rest", "q rest_begin rest_row",
)  # fmt: skip
ROWS = CStruct("rows_args", "P x weight y", "q rows width gate x_kind y_kind threads", "d eps")
ARGMAX = CStruct("argmax_args", "P x largest where", "q rows width threads")
SAMPLE = CStruct("sample_args", "P x uniform picked", "q rows width top_k threads", "d temperature top_p min_p")
DEQUANTIZE = CStruct("dequantize_args", "P packed ids out", "q first count outputs inputs stored kind threads")
TO_BFLOAT12 = CStruct("to_bfloat12_args", "P matrix packed", "q outputs inputs threads")
COUNT = CStruct("count_args", "P matrix seen", "q count threads")

CAUSAL_CONV = CStruct(
    "causal_conv_args", "P x tail taps bias counts begins y next",
    "q rows tokens width kernel silu threads x_row x_token tail_row", "P marks marked",
)  # fmt: skip
GATED_NORM = CStruct(
    "gated_norm_args", "P y gate weight out counts",
    "q rows tokens groups width weights silu gate_last threads gate_row gate_token", "d eps",
)  # fmt: skip
GATED_DELTA_RULE = CStruct(
    "gated_delta_rule_args", "P q k v g beta carry counts begins y next",
    "q rows tokens key_heads heads key_dim value_dim by_channel normalize threads q_row q_token q_head",
    "q k_row k_token k_head v_row v_token v_head g_row g_token g_head beta_row beta_token beta_head carry_row",
    "d scale", "P A bias", "d beta_scale", "P norm marks marked conv",
)  # fmt: skip
SSD = CStruct(
    "ssd_args", "P x dt A B C D bias carry counts begins y next", "q rows tokens heads head_dim groups states threads",
    "q x_row x_token x_head dt_row dt_token dt_head B_row B_token B_group C_row C_token C_group carry_row",
    "d low high", "P marks marked",
)  # fmt: skip
SELECTIVE_SCAN = CStruct(
    "selective_scan_args", "P x dt gate A B C D carry counts y next", "q rows tokens channels states softplus threads",
    "q x_row x_token gate_row gate_token dt_row dt_token B_row B_token C_row C_token carry_row",
)  # fmt: skip
RG_LRU = CStruct(
    "rg_lru_args", "P x input_gate recurrence_gate parameter h seen counts y next next_seen",
    "q rows tokens width threads x_row x_token input_row input_token recurrence_row recurrence_token",
)  # fmt: skip

SCAN = CStruct(
    "scan_args", "P x z tail carry counts begins y next_tail next marks marked_tail marked",
    "q rows tokens threads x_row x_token z_row z_token",
)  # fmt: skip
GATED_DELTA_PARTS = CStruct(
    "gated_delta_parts", "P taps A bias norm", "q key_heads heads key_dim value_dim kernel by_channel silu",
    "d beta_scale eps",
)  # fmt: skip
MAMBA2_PARTS = CStruct(
    "mamba2_parts", "P taps conv_bias A D dt_bias norm",
    "q heads head_dim groups states kernel norm_groups norm_weights gate_last", "d low high eps",
)  # fmt: skip
GATED_CONV_PARTS = CStruct("gated_conv_parts", "P taps bias", "q kernel")

FUSED = CStruct("fused_args", "P x residual y starts counts keep", "q rows tokens count threads kept")
# The arguments of attention: what stays from step to step, and three parts that may be others in each.
ATTENTION_WEIGHTS = CStruct(
    "", "P norm qkv qkv_bias q_norm k_norm v_norm sinks out out_bias after",
    "q inputs outputs heads kv_heads dim gated q_norm_width k_norm_width qkv_kind out_kind reads gates",
    "d norm_eps q_eps k_eps v_eps scale softcap after_eps residual_scale",
)  # fmt: skip
STARTS = CStruct("", "P starts")
KV_VIEW = CStruct(
    "",
    "P k v columns queries k_table v_table",
    "q slots k_row k_head k_slot v_row v_head v_slot table_row block",
    "q planes kind window chunk",
    ("codes", CODES),
)
ROTATION = CStruct("", "P cos sin", "q half interleaved positions")
ATTENTION = CStruct(
    "attention_args", ("weights", ATTENTION_WEIGHTS), ("starts", STARTS), ("view", KV_VIEW), ("rotation", ROTATION)
)
MLP = CStruct(
    "mlp_args", "P norm up up_bias down down_bias after factors",
    "q inputs hidden outputs up_kind down_kind gate parallel", "d eps after_eps residual_scale",
)  # fmt: skip
EXPERT = CStruct("expert", "P up down up_bias down_bias", "q hidden up_kind down_kind")
MOE = CStruct(
    "moe_args", "P norm router bias correction experts shared_gate after",
    "q inputs outputs router_kind shared_gate_kind count top_k shared gate sigmoid normalize groups topk_groups",
    "q top2 scale_input", "d norm_eps after_eps residual_scale scale floor",
)  # fmt: skip
CHOOSE_EXPERTS = CStruct("choose_experts_args", "P of scores weights chosen room", "q tokens")
PROJECTIONS = CStruct(
    "", "P norm project bias gates out out_bias after factors",
    "q inputs projected outputs project_kind gates_kind out_kind parallel", "d norm_eps after_eps residual_scale",
)  # fmt: skip
MIXER_BYTES = max(each.size for each in (GATED_DELTA_PARTS, MAMBA2_PARTS, GATED_CONV_PARTS))
CARRY = CStruct(
    "", "P tail carry next_tail next kept unscanned unscanned_counts unscanned_begins marks marked_tail marked",
    "q unscanned_tokens",
)  # fmt: skip

_KIND = Struct("q")
SUBLAYER_BYTES = _KIND.size + ATTENTION.size  # the longest of them
LAYOUTS = [each for each in list(globals().values()) if isinstance(each, CStruct) and each.name]
SIZES = {each.name: each.size for each in LAYOUTS} | {
    "gated_delta_mixer_args": SCAN.size + GATED_DELTA_PARTS.size,
    "mamba2_mixer_args": SCAN.size + MAMBA2_PARTS.size,
    "recurrent_args": PROJECTIONS.size + MIXER_BYTES + CARRY.size,
    "sublayer_args": SUBLAYER_BYTES,
}


def sublayer(kind: SublayerKind, *parts: bytes) -> bytes:
    """The arguments of a sublayer, but for the padding after them."""
    return b"".join([_KIND.pack(kind), *parts])


def differing(library: ctypes.CDLL) -> list[str]:
    """The structures that a library lays out otherwise, or does not know."""
    found = []
    for name, size in SIZES.items():
        try:
            theirs = f"{ctypes.c_int64.in_dll(library, f'lmstate_sizeof_{name}').value} bytes"
        except ValueError:
            theirs = "none"
        if theirs != f"{size} bytes":
            found.append(f"{name} ({theirs} there, {size} here)")
    return found
