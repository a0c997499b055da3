"""llama.cpp's files of vision towers, type by type: transformers' config, processor and tensor names of each.

The names are those of llama.cpp's tools/mtmd/clip-impl.h; the conversions undone are those of its conversion/ folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.gguf.reader import TensorPlace
from lmstate.errors import ModelError

MOST_SIDE, MOST_PATCHES = 2**14, 512  # pixels of a side of a picture; patches beside each other
MOST_BLOCKS, MOST_WIDTH = 4096, 2**20
NEWLINE = "model.image_newline"  # a tensor of files of LLaVA 1.6
MLP_OF_TILES = "mlp with tiles"  # which call their projector "mlp" too
Names = dict[str, str | tuple[str, ...]]


class TowerSizes:
    """The part that is the same in all such files. `merged`: patches that become one position, along each side."""

    def __init__(self, fields: Config, tensors: Mapping[str, TensorPlace], merged: str, default: int) -> None:
        self.fields, self.tensors = fields, tensors
        self.width = self.number("embedding_length", 1, MOST_WIDTH)
        self.text_width = self.number("projection_dim", 1, MOST_WIDTH)
        self.blocks = self.number("block_count", 1, MOST_BLOCKS)
        self.heads = self.number("attention.head_count", 1, self.width)
        self.side, self.patch = self.number("image_size", 1, MOST_SIDE), self.number("patch_size", 1, MOST_SIDE)
        self.eps = fields.float("clip.vision.attention.layer_norm_epsilon", 0.0, 1.0)
        self.merged = self.number(merged, 1, MOST_PATCHES, default=default)
        self.patches = self.side // self.patch
        where = fields.where
        if f"v.blk.{self.blocks - 1}.ln1.weight" not in tensors:
            raise ModelError(f"{where} says that its tower has {self.blocks} blocks, and holds fewer; it is damaged")
        if self.width % (2 * self.heads) or not self.merged <= self.patches <= MOST_PATCHES:
            raise ModelError(
                f"{where} is damaged: its tower has {self.heads} heads for a width of {self.width}, and {self.patches} "
                f"patches of {self.patch} pixels on a side, of which {self.merged} become one position"
            )
        self.normal = {name: list(fields.floats(f"clip.vision.{name}", 3)) for name in ("image_mean", "image_std")}
        if min(self.normal["image_std"]) <= 0:
            raise ModelError(f"{where} is damaged: it divides colors by {self.normal['image_std']}")

    def number(self, name: str, low: int, high: int, **default: Any) -> Any:
        return self.fields.int(f"clip.vision.{name}", low, high, **default)

    @property
    def positions(self) -> int:
        """Of a picture, or of a tile, of the side that the tower was made for."""
        return (self.patches // self.merged) ** 2

    def act(self, gelu: str) -> str:
        """The activation of the feed-forward parts; `gelu` is the kind that the file's flag stands for."""
        if self.fields.bool("clip.use_silu", default=False):
            return "silu"
        return gelu if self.fields.bool("clip.use_gelu", default=False) else "quick_gelu"

    @property
    def square(self) -> dict[str, int]:
        return {"height": self.side, "width": self.side}

    @property
    def plain(self) -> dict[str, Any]:
        """The vision config of towers in the manner of CLIP and SigLIP."""
        return {
            "hidden_size": self.width, "num_hidden_layers": self.blocks, "num_attention_heads": self.heads,
            "image_size": self.side, "patch_size": self.patch, "layer_norm_eps": self.eps,
        }  # fmt: skip


@dataclass(frozen=True)
class Described:
    """A tower as transformers' files describe it: config.json, preprocessor_config.json and processor_config.json.

    `processor` is None where pictures are not in tiles.
    """

    config: dict[str, Any]
    pixels: dict[str, Any]
    processor: dict[str, Any] | None = None


@dataclass(frozen=True)
class Projector:
    """One value of `clip.projector_type`.

    `family`: transformers' wrapper. `places`: tokens of which the text model's vocabulary has one, for the positions of
    pictures. `names`: a tensor of transformers without its ending -> the file's, or the parts of it that the file has
    one after the other; `{n}` is a block's number. `tokens`: the attributes of transformers' tokenizer that the
    processor asks for. `merged`: the key of the number of patches that become one position along each side, and its
    default. `swapped`: old converters exchanged the names of the two feed-forward matrices. `paired`: rows of q and k
    are in neighboring pairs. `one_more`: the weights of norms that the converter added 1 to. `unused`: beginnings of
    the names of transformers' tensors that pictures do not need.
    """

    family: str
    places: tuple[str, ...]
    describe: Callable[[TowerSizes], Described]
    names: Names
    tokens: dict[str, str] = field(default_factory=dict)
    merged: tuple[str, int] = ("projector.scale_factor", 1)
    swapped: bool = True
    paired: bool = False
    one_more: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


def _siglip(tower: str) -> Names:
    layer = f"{tower}.encoder.layers.{{n}}"
    return {
        f"{tower}.embeddings.patch_embedding": "v.patch_embd",
        f"{tower}.embeddings.position_embedding": "v.position_embd",
        f"{tower}.post_layernorm": "v.post_ln",
        f"{layer}.layer_norm1": "v.blk.{n}.ln1",
        f"{layer}.layer_norm2": "v.blk.{n}.ln2",
        **{f"{layer}.self_attn.{part}_proj": f"v.blk.{{n}}.attn_{part}" for part in ("q", "k", "v", "out")},
        f"{layer}.mlp.fc1": "v.blk.{n}.ffn_up",
        f"{layer}.mlp.fc2": "v.blk.{n}.ffn_down",
    }


def _qwen(norm: str, first: str, second: str, feed_forward: dict[str, str]) -> Names:
    block = "model.visual.blocks.{n}"
    return {
        "model.visual.patch_embed.proj.weight": ("v.patch_embd.weight", "v.patch_embd.weight.1"),
        "model.visual.patch_embed.proj": "v.patch_embd",
        "model.visual.pos_embed": "v.position_embd",
        f"{block}.norm1": "v.blk.{n}.ln1",
        f"{block}.norm2": "v.blk.{n}.ln2",
        f"{block}.attn.qkv": ("v.blk.{n}.attn_q", "v.blk.{n}.attn_k", "v.blk.{n}.attn_v"),
        f"{block}.attn.proj": "v.blk.{n}.attn_out",
        **{f"{block}.mlp.{theirs}": f"v.blk.{{n}}.{ours}" for theirs, ours in feed_forward.items()},
        f"model.visual.merger.{norm}": "v.post_ln",
        f"model.visual.merger.{first}": "mm.0",
        f"model.visual.merger.{second}": "mm.2",
    }


def _gridded(sizes: TowerSizes, family: str, limits: tuple[int, int], vision: dict[str, Any]) -> Described:
    own = {
        "depth": sizes.blocks, "num_heads": sizes.heads, "patch_size": sizes.patch,
        "spatial_merge_size": sizes.merged, "temporal_patch_size": 2,
    }  # fmt: skip
    pixels = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": sizes.patch, "temporal_patch_size": 2,
        "merge_size": sizes.merged, "size": dict(zip(("shortest_edge", "longest_edge"), limits)),
    }  # fmt: skip
    return Described({"model_type": family, "vision_config": {**own, **vision}}, pixels)


def _qwen2(sizes: TowerSizes) -> Described:
    vision = {"embed_dim": sizes.width, "hidden_size": sizes.text_width, "hidden_act": sizes.act("gelu")}
    return _gridded(sizes, "qwen2_vl", (56 * 56, 28 * 28 * 16384), vision)


def _qwen2_5(sizes: TowerSizes) -> Described:
    pattern = sizes.number("n_wa_pattern", 1, MOST_BLOCKS)
    vision = {
        "hidden_size": sizes.width, "out_hidden_size": sizes.text_width, "hidden_act": "silu",
        "fullatt_block_indexes": list(range(pattern - 1, sizes.blocks, pattern)),
        "window_size": sizes.number("window_size", sizes.patch * sizes.merged, MOST_SIDE, default=112),
    }  # fmt: skip
    return _gridded(sizes, "qwen2_5_vl", (56 * 56, 28 * 28 * 16384), vision)


def deepened_blocks(fields: Config, blocks: int) -> list[int]:
    """The blocks after which Qwen3-VL takes embeddings that go to the text model's first blocks."""
    name = "clip.vision.is_deepstack_layers"
    flags = fields.get(name) or [False] * blocks
    if not isinstance(flags, list) or len(flags) != blocks or not all(isinstance(flag, bool) for flag in flags):
        raise ModelError(f"{fields.where} must have {blocks} flags in {name!r}, one a block; it is damaged")
    return [block for block, flag in enumerate(flags) if flag]


def _qwen3(sizes: TowerSizes) -> Described:
    vision = {
        "hidden_size": sizes.width, "out_hidden_size": sizes.text_width, "hidden_act": sizes.act("gelu_pytorch_tanh"),
        "num_position_embeddings": sizes.patches**2,
        "deepstack_visual_indexes": deepened_blocks(sizes.fields, sizes.blocks),
    }  # fmt: skip
    return _gridded(sizes, "qwen3_vl", (256 * 256, 4096 * 4096), vision)


def _gemma3(sizes: TowerSizes) -> Described:
    vision = {**sizes.plain, "hidden_act": sizes.act("gelu_pytorch_tanh"), "vision_use_head": False}
    return Described(
        {"model_type": "gemma3", "vision_config": vision, "mm_tokens_per_image": sizes.positions},
        {"image_processor_type": "Gemma3ImageProcessor", "size": sizes.square},
        {"processor_class": "Gemma3Processor", "image_seq_length": sizes.positions},
    )


def _gemma4(sizes: TowerSizes) -> Described:
    shapes = {name: sizes.tensors[name].shape for name in sizes.tensors}
    table, q, k = (shapes.get(f"v.{name}.weight", ()) for name in ("position_embd", "blk.0.attn_q", "blk.0.attn_k"))
    if len(table) != 3 or len(q) != 2 or len(k) != 2 or q[0] % sizes.heads or k[0] % max(1, q[0] // sizes.heads):
        raise ModelError(f"{sizes.fields.where} is damaged: its heads and positions have the shapes {q}, {k}, {table}")
    head_dim = q[0] // sizes.heads
    vision = {
        "model_type": "gemma4_vision", "hidden_size": sizes.width, "num_hidden_layers": sizes.blocks,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": k[0] // head_dim, "head_dim": head_dim, "patch_size": sizes.patch,
        "rms_norm_eps": sizes.eps, "pooling_kernel_size": sizes.merged, "position_embedding_size": table[1],
        "standardize": "v.std_bias" in shapes, "use_clipped_linears": "v.blk.0.attn_q.input_max" in shapes,
    }  # fmt: skip
    pixels = {"patch_size": sizes.patch, "pooling_kernel_size": sizes.merged}
    return Described(
        {"model_type": "gemma4", "vision_config": vision, "audio_config": None},
        {"image_processor_type": "Gemma4ImageProcessor", **pixels},
        {
            "processor_class": "Gemma4Processor",
            "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
            "image_processor": {"image_processor_type": "Gemma4ImageProcessor", **pixels, **sizes.normal},
            "video_processor": {"video_processor_type": "Gemma4VideoProcessor", **pixels},
        },
    )


def _idefics3(sizes: TowerSizes) -> Described:
    longest = sizes.number("preproc_image_size", 1, MOST_SIDE, default=4 * sizes.side)
    vision = {**sizes.plain, "hidden_act": sizes.act("gelu_pytorch_tanh")}
    return Described(
        {"model_type": "idefics3", "vision_config": vision, "scale_factor": sizes.merged},
        {
            "image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": longest},
            "max_image_size": {"longest_edge": sizes.side},
        },
        {"processor_class": "Idefics3Processor", "image_seq_len": sizes.positions},
    )  # fmt: skip


def _mistral3(sizes: TowerSizes) -> Described:
    if "mm.patch_merger.weight" not in sizes.tensors:
        raise ModelError(
            f"{sizes.fields.where} is the tower of Pixtral, whose patches are not merged; lmstate reads mistral3's"
        )
    vision = {
        "model_type": "pixtral", "hidden_size": sizes.width, "num_hidden_layers": sizes.blocks,
        "num_attention_heads": sizes.heads, "image_size": sizes.side, "patch_size": sizes.patch,
        "hidden_act": sizes.act("gelu"),
    }  # fmt: skip
    return Described(
        {
            "model_type": "mistral3", "vision_config": vision, "spatial_merge_size": sizes.merged,
            "multimodal_projector_bias": "mm.1.bias" in sizes.tensors,
        },
        {
            "image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": sizes.side},
            "patch_size": sizes.patch,
        },
        {
            "processor_class": "PixtralProcessor", "patch_size": sizes.patch, "spatial_merge_size": sizes.merged,
            "image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]",
        },
    )  # fmt: skip


def _internvl(sizes: TowerSizes) -> Described:
    vision = {
        **sizes.plain, "hidden_act": sizes.act("gelu"), "attention_bias": "v.blk.0.attn_q.bias" in sizes.tensors,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in sizes.tensors,
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in sizes.tensors else "rms_norm",
        "image_size": [sizes.side] * 2, "patch_size": [sizes.patch] * 2,
    }  # fmt: skip
    tiles = [
        sizes.number(f"preproc_{kind}_tiles", 1, 64, default=default) for kind, default in (("min", 1), ("max", 12))
    ]
    return Described(
        {
            "model_type": "internvl", "vision_config": vision, "downsample_ratio": 1 / sizes.merged,
            "image_seq_length": sizes.positions,
        },
        {
            "image_processor_type": "GotOcr2ImageProcessor", "size": sizes.square, "crop_to_patches": True,
            "min_patches": min(tiles), "max_patches": max(tiles),
        },
        {"processor_class": "InternVLProcessor", "image_seq_length": sizes.positions},
    )  # fmt: skip


def _llava(sizes: TowerSizes) -> Described:
    if "v.image_newline" in sizes.tensors or "mm.3.weight" in sizes.tensors:
        raise ModelError(
            f"{sizes.fields.where} is the tower of a LLaVA with another projector: load that model from its folder"
        )
    layers = sizes.fields.ints("clip.vision.feature_layer", low=1, high=sizes.blocks, default=(sizes.blocks,))
    if len(layers) != 1:
        raise ModelError(f"{sizes.fields.where} takes what {len(layers)} blocks of its tower make; lmstate takes one's")
    vision = {"model_type": "clip_vision_model", **sizes.plain, "hidden_act": sizes.act("gelu")}
    return Described(
        {"model_type": "llava", "vision_config": vision, "vision_feature_layer": layers[0] - sizes.blocks - 1},
        {
            "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": sizes.side},
            "crop_size": sizes.square,
        },
    )  # fmt: skip


def _llava_next(sizes: TowerSizes) -> Described:
    """LLaVA 1.6, which sees tiles of a picture beside the whole of it, each row of them with an embedding behind it."""
    whole, flat = _llava(sizes), sizes.fields.ints("clip.vision.image_grid_pinpoints", low=1, high=MOST_SIDE)
    if not flat or len(flat) % 2 or len(flat) > 2 * MOST_PATCHES:
        raise ModelError(f"{sizes.fields.where} has a grid of {len(flat)} numbers; its tiles need pairs of sides")
    grid = [list(flat[at : at + 2]) for at in range(0, len(flat), 2)]
    pixels = {**whole.pixels, "image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": grid}
    return Described({**whole.config, "model_type": "llava_next", "image_grid_pinpoints": grid}, pixels)


_CLIP: Names = {
    **_siglip("model.vision_tower"),
    "model.vision_tower.embeddings.class_embedding": "v.class_embd",
    "model.vision_tower.pre_layrnorm": "v.pre_ln",
    "model.multi_modal_projector.linear_1": "mm.0",
    "model.multi_modal_projector.linear_2": "mm.2",
}
_PIXTRAL_LAYER = "model.vision_tower.transformer.layers.{n}"
_GEMMA4_LAYER = "model.vision_tower.encoder.layers.{n}"
_INTERNVL_LAYER = "model.vision_tower.encoder.layer.{n}"
_MERGED = ("spatial_merge_size", 2)

PROJECTORS: dict[str, Projector] = {
    "gemma3": Projector(
        "gemma3",
        ("<image_soft_token>",),
        _gemma3,
        {
            **_siglip("model.vision_tower"),
            "model.multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
            "model.multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
        },
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        ("projector.scale_factor", 4),
        one_more=("mm.soft_emb_norm.weight",),
    ),
    "gemma4v": Projector(
        "gemma4",
        ("<|image|>",),
        _gemma4,
        {
            "model.vision_tower.patch_embedder.input_proj": "v.patch_embd",
            "model.vision_tower.patch_embedder.position_embedding_table": "v.position_embd.weight",
            **{f"model.vision_tower.std_{part}": f"v.std_{part}" for part in ("bias", "scale")},
            **{
                f"{_GEMMA4_LAYER}.{theirs}_proj{linear}": f"v.blk.{{n}}.{ours}"
                for theirs, ours in {
                    **{f"self_attn.{part}": f"attn_{part}" for part in ("q", "k", "v")}, "self_attn.o": "attn_out",
                    **{f"mlp.{part}": f"ffn_{part}" for part in ("gate", "up", "down")},
                }.items()
                for linear in ("", ".linear")  # the weight, and the bounds of what goes in and comes out
            },
            **{f"{_GEMMA4_LAYER}.self_attn.{part}_norm": f"v.blk.{{n}}.attn_{part}_norm" for part in ("q", "k")},
            f"{_GEMMA4_LAYER}.input_layernorm": "v.blk.{n}.ln1",
            f"{_GEMMA4_LAYER}.post_attention_layernorm": "v.blk.{n}.attn_post_norm",
            f"{_GEMMA4_LAYER}.pre_feedforward_layernorm": "v.blk.{n}.ln2",
            f"{_GEMMA4_LAYER}.post_feedforward_layernorm": "v.blk.{n}.ffn_post_norm",
            "model.embed_vision.embedding_projection": "mm.input_projection",
        },
        {
            "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>", "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        ("projector.scale_factor", 3),
        swapped=False,
    ),
    "idefics3": Projector(
        "idefics3",
        ("<image>",),
        _idefics3,
        {**_siglip("model.vision_model"), "model.connector.modality_projection.proj": "mm.model.fc"},
    ),
    "internvl": Projector(
        "internvl",
        ("<IMG_CONTEXT>",),
        _internvl,
        {
            "model.vision_tower.embeddings.cls_token": "v.class_embd",
            "model.vision_tower.embeddings.position_embeddings": "v.position_embd.weight",
            "model.vision_tower.embeddings.patch_embeddings.projection": "v.patch_embd",
            f"{_INTERNVL_LAYER}.lambda_1": "v.blk.{n}.ls1.weight",
            f"{_INTERNVL_LAYER}.lambda_2": "v.blk.{n}.ls2.weight",
            f"{_INTERNVL_LAYER}.layernorm_before": "v.blk.{n}.ln1",
            f"{_INTERNVL_LAYER}.layernorm_after": "v.blk.{n}.ln2",
            **{f"{_INTERNVL_LAYER}.attention.{part}_proj": f"v.blk.{{n}}.attn_{part}" for part in ("q", "k", "v")},
            **{f"{_INTERNVL_LAYER}.attention.{part}_norm": f"v.blk.{{n}}.attn_{part}_norm" for part in ("q", "k")},
            f"{_INTERNVL_LAYER}.attention.projection_layer": "v.blk.{n}.attn_out",
            f"{_INTERNVL_LAYER}.mlp.fc1": "v.blk.{n}.ffn_up",
            f"{_INTERNVL_LAYER}.mlp.fc2": "v.blk.{n}.ffn_down",
            "model.multi_modal_projector.layer_norm": "mm.model.mlp.0",
            "model.multi_modal_projector.linear_1": "mm.model.mlp.1",
            "model.multi_modal_projector.linear_2": "mm.model.mlp.3",
        },
        {
            "start_image_token": "<img>", "end_image_token": "</img>",
            **dict.fromkeys(("context_image_token", "video_token"), "<IMG_CONTEXT>"),
        },
        swapped=False,
    ),
    # Texts of LLaVA 1.5 that were converted from its first checkpoints have no token for pictures.
    "mlp": Projector("llava", ("<image>", "<unk>"), _llava, _CLIP, unused=("model.vision_tower.post_layernorm.",)),
    MLP_OF_TILES: Projector(
        "llava_next", ("<image>", "<unk>"), _llava_next, {**_CLIP, "model.image_newline": NEWLINE},
        unused=("model.vision_tower.post_layernorm.",),
    ),
    "pixtral": Projector(
        "mistral3",
        ("[IMG]",),
        _mistral3,
        {
            "model.vision_tower.patch_conv": "v.patch_embd",
            "model.vision_tower.ln_pre": "v.pre_ln",
            f"{_PIXTRAL_LAYER}.attention_norm": "v.blk.{n}.ln1",
            f"{_PIXTRAL_LAYER}.ffn_norm": "v.blk.{n}.ln2",
            **{f"{_PIXTRAL_LAYER}.attention.{part}_proj": f"v.blk.{{n}}.attn_{part}" for part in ("q", "k", "v")},
            f"{_PIXTRAL_LAYER}.attention.o_proj": "v.blk.{n}.attn_out",
            **{
                f"{_PIXTRAL_LAYER}.feed_forward.{part}_proj": f"v.blk.{{n}}.ffn_{part}"
                for part in ("gate", "up", "down")
            },
            "model.multi_modal_projector.norm": "mm.input_norm",
            "model.multi_modal_projector.patch_merger.merging_layer": "mm.patch_merger",
            "model.multi_modal_projector.linear_1": "mm.1",
            "model.multi_modal_projector.linear_2": "mm.2",
        },
        merged=("spatial_merge_size", 1),
        swapped=False,
        paired=True,
    ),
    "qwen2.5vl_merger": Projector(
        "qwen2_5_vl",
        ("<|image_pad|>",),
        _qwen2_5,
        _qwen(
            "ln_q", "mlp.0", "mlp.2",
            {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"},
        ),
        merged=_MERGED,
    ),
    "qwen2vl_merger": Projector(
        "qwen2_vl",
        ("<|image_pad|>",),
        _qwen2,
        _qwen("ln_q", "mlp.0", "mlp.2", {"fc1": "ffn_up", "fc2": "ffn_down"}),
        merged=_MERGED,
    ),
    "qwen3vl_merger": Projector(
        "qwen3_vl",
        ("<|image_pad|>",),
        _qwen3,
        _qwen("norm", "linear_fc1", "linear_fc2", {"linear_fc1": "ffn_up", "linear_fc2": "ffn_down"}),
        merged=_MERGED,
        swapped=False,
    ),
}  # fmt: skip
