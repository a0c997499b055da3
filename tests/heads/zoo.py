"""Small random models with multi-token prediction heads, made by `transformers` and saved under published names."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lmstate
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.models.families import build
from tests.zoo import CASES, auto, randomize

Rename = Callable[[str, int], str]


def past_the_last(name: str, layers: int) -> str:
    """DeepSeek-V3's: a layer behind the last."""
    _, index, rest = name.split(".", 2)
    rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
    return f"model.layers.{layers + int(index)}.{rest}"


def one_past_the_last(name: str, layers: int) -> str:
    """The same, of a head that `MtpModel` cannot be made of."""
    return past_the_last(name.replace("layers.", "layers.0.", 1).replace("0.blocks.0.layer.", "0."), layers)


def mtp_part(name: str, layers: int) -> str:
    """Qwen3-Next's: norms and projection stand beside the layer."""
    _, index, rest = name.split(".", 2)
    if rest.startswith("mtp_block."):
        return f"mtp.layers.{index}.{rest.removeprefix('mtp_block.')}"
    names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
    return f"mtp.{names[rest.removesuffix('.weight')]}.weight"


def in_model_mtp(name: str, layers: int) -> str:
    """MiMo-V2-Flash's."""
    rest = name.replace("mtp_block.", "").replace("post_norm.", "final_layernorm.")
    return f"model.mtp.{rest}".replace("post_attention_layernorm", "pre_mlp_layernorm")


def mimo(name: str, layers: int) -> str:
    """MiMo-7B's."""
    names = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj"}
    _, index, rest = name.split(".", 2)
    rest = rest.removeprefix("mtp_block.").replace("post_norm.", "final_layernorm.")
    for there, here in names.items():
        rest = rest.replace(f"{there}.", f"{here}.")
    return f"model.mtp_layers.{index}.{rest}"


def ernie(name: str, layers: int) -> str:
    """ERNIE 4.5's; its heads end in the model's own norm."""
    names = {"enorm": "mtp_emb_norm", "hnorm": "mtp_hidden_norm", "eh_proj": "mtp_linear_proj"}
    _, index, rest = name.split(".", 2)
    part, _, inside = rest.partition(".")
    return f"model.{names.get(part, part)}.{index}.{inside}"


def nemotron_h(name: str, layers: int) -> str:
    """Nemotron 3's: blocks of one part, of which the first has the projection and the last the norm."""
    rest = name.removeprefix("layers.")
    if rest.startswith("blocks."):
        return f"mtp.layers.{rest.removeprefix('blocks.')}"
    return "mtp.layers.1.final_layernorm.weight" if rest == "post_norm.weight" else f"mtp.layers.0.{rest}"


def longcat_flash(name: str, layers: int) -> str:
    """LongCat-Flash's: a dense layer."""
    rest = name.removeprefix("layers.").removeprefix("blocks.0.")
    rest = rest.replace("norm.weight", "norm.m.weight") if rest in ("enorm.weight", "hnorm.weight") else rest
    if rest == "post_norm.weight":
        return "model.mtp.norm.weight"
    return f"model.mtp.layers.0.{rest.replace('mlp.', 'transformer_layer.mlp.')}"


V4_NAMES = {
    "self_attn.q_a_proj": "attn.wq_a", "self_attn.q_a_norm": "attn.q_norm", "self_attn.q_b_proj": "attn.wq_b",
    "self_attn.kv_proj": "attn.wkv", "self_attn.kv_norm": "attn.kv_norm", "self_attn.o_a_proj": "attn.wo_a",
    "self_attn.o_b_proj": "attn.wo_b", "self_attn.sinks": "attn.attn_sink", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "hc_head.hc_": "hc_head_", "attn_hc.": "hc_attn_", "ffn_hc.": "hc_ffn_",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias", "mlp.": "ffn.", "gate_proj": "w1", "down_proj": "w2",
    "up_proj": "w3",
}  # fmt: skip


def v4_name(name: str) -> str:
    """DeepSeek-V4's published name of a tensor."""
    for there, here in V4_NAMES.items():
        name = re.sub(rf"\.{re.escape(there)}", f".{here}", name)
    return name


def deepseek_v4(name: str, layers: int) -> str:
    return v4_name("mtp.0." + name.removeprefix("layers.").removeprefix("blocks.0.layer."))


def glm5(name: str, layers: int) -> str:
    """GLM-5.3's: a layer behind the last, in the text part of a wrapper."""
    name = one_past_the_last(name.replace("blocks.0.", "blocks.0.layer."), layers)
    return name.replace("model.", "model.language_model.", 1)


def minimax_m3(name: str, layers: int) -> str:
    """MiniMax-M3's."""
    rest = name.removeprefix("layers.").replace("blocks.0.layer.", "transformer_layer.")
    return f"model.mtp.layers.0.{rest.replace('post_norm', 'final_layernorm')}"


def qwen4(name: str, layers: int) -> str:
    """Qwen4-Exp's: norms and projections stand beside the layer."""
    return "mtp." + name.removeprefix("layers.").replace("blocks.0.layer.", "layers.0.")


@dataclass(frozen=True)
class Case:
    """zoo: the case of `tests.zoo` that the model is. head: config values of the head's layers. rename: of its tensors,
    from those of `transformers.modeling_layers.MtpModel`."""

    zoo: str
    rename: Rename
    head: dict[str, Any] = field(default_factory=dict)
    heads: int = 1
    saved: dict[str, Any] = field(default_factory=dict)  # values of the saved config
    own_norm: bool = True  # of each head; else the model's last
    hidden_first: bool = False
    blocks: Callable[[Any], list[torch.nn.Module]] | None = None  # of one head that `MtpModel` cannot be made of
    streams: str = ""  # of a head on several streams: what mixes those of the model


def nemotron_blocks(theirs: Any) -> list[torch.nn.Module]:
    config = copy.deepcopy(theirs.config)
    config.layers_block_type = ["full_attention", "moe"]
    return [type(theirs.model.layers[0])(config, index) for index in range(2)]


def indexed_blocks(theirs: Any) -> list[torch.nn.Module]:
    return [Indexed(theirs)]


def windowed_blocks(theirs: Any) -> list[torch.nn.Module]:
    return [Windowed(theirs)]


def glm5_blocks(theirs: Any) -> list[torch.nn.Module]:
    from transformers.models.glm5_next import modeling_glm5_next as glm5

    return [IndexedLatent(theirs, glm5)]


class IndexedLatent(torch.nn.Module):
    """A latent attention with an index of its own and experts, on one stream."""

    def __init__(self, theirs: Any, classes: Any) -> None:
        super().__init__()
        config = copy.deepcopy(theirs.config.text_config)
        config.layer_types, config.mlp_layer_types, config.indexer_types = ["indexed_attention"], ["sparse"], ["full"]
        self.self_attn = classes.Glm5NextTextAttention(config, 0)
        self.mlp = classes.Glm5NextTextMoE(config)
        self.input_layernorm, self.post_attention_layernorm = (
            classes.Glm5NextTextRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        mask = torch.ones(x.shape[:2], dtype=torch.bool)
        x = x + self.self_attn(self.input_layernorm(x), attention_mask=mask, position_ids=position_ids)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


def longcat_blocks(theirs: Any) -> list[torch.nn.Module]:
    from transformers.models.longcat_flash import modeling_longcat_flash as longcat

    return [DenseLatent(theirs, longcat)]


class DenseLatent(torch.nn.Module):
    """A latent attention and a dense part, each with a norm before it."""

    def __init__(self, theirs: Any, classes: Any) -> None:
        super().__init__()
        config, width = theirs.config, theirs.config.hidden_size
        self.self_attn = classes.LongcatFlashMLA(config, 0)
        self.mlp = classes.LongcatFlashMLP(config, config.ffn_hidden_size)
        self.input_layernorm = classes.LongcatFlashRMSNorm(width, config.rms_norm_eps)
        self.post_attention_layernorm = classes.LongcatFlashRMSNorm(width, config.rms_norm_eps)
        self.rope = [theirs.model.rotary_emb]  # no module of this one

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)[None, None]
        turned = self.rope[0](x, position_ids)
        x = x + self.self_attn(self.input_layernorm(x), position_embeddings=turned, attention_mask=mask)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


class Indexed(torch.nn.Module):
    """A layer that attends to positions which its own index chooses."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        config = copy.deepcopy(theirs.config)
        config.mlp_layer_types, config.indexer_types = ["sparse"], ["full"]
        config.layer_types, config.ple_layer_ids = (config.layer_types or [])[-1:] or None, []
        self.layer = type(theirs.model.layers[0])(config, 0)
        self.rope = [theirs.model.rotary_emb]  # no module of this one

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        mask = torch.full((len(x), 1, x.shape[1], x.shape[1]), float("-inf")).triu(1)
        position_ids = position_ids - position_ids[:, :1]  # they number stored keys too, and only distances count
        turned = self.rope[0](x, position_ids)
        made = self.layer(x, attention_mask=mask, position_ids=position_ids, position_embeddings=turned)
        return made if isinstance(made, Tensor) else made[0]


class Windowed(torch.nn.Module):
    """A layer of DeepSeek-V4 that attends to a window alone."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        config = copy.deepcopy(theirs.config)
        config.layer_types, config.mlp_layer_types = ["sliding_attention"], ["moe"]
        self.layer, self.window = type(theirs.model.layers[0])(config, 0), config.sliding_window
        self.layer.apply(theirs._init_weights)  # sinks are unwritten memory until then
        self.rope = [theirs.model.rotary_emb]  # no module of this one

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        ago = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        mask = torch.zeros(ago.shape).masked_fill((ago < 0) | (ago >= self.window), float("-inf"))[None, None]
        turned = {"main": self.rope[0](x[:, :, 0], position_ids=position_ids, layer_type="main")}
        made: Tensor = self.layer(x, attention_mask=mask, position_ids=position_ids, position_embeddings=turned)
        return made


class OneHead(torch.nn.Module):
    """A head as the papers have it, of blocks that are given: what `MtpModel` is for most models."""

    def __init__(self, theirs: Any, blocks: list[torch.nn.Module]) -> None:
        super().__init__()
        first = text_of(theirs).layers[0].get_submodule(first_norm(theirs))
        width, norm = theirs.get_input_embeddings().embedding_dim, type(first)
        eps = first.eps if hasattr(first, "eps") else first.variance_epsilon
        self.layers = torch.nn.Module()
        self.layers.enorm, self.layers.hnorm, self.layers.post_norm = (norm(width, eps) for _ in range(3))
        self.layers.eh_proj = torch.nn.Linear(2 * width, width, bias=False)
        self.layers.blocks = torch.nn.ModuleList(blocks)
        self.embed = [theirs.get_input_embeddings()]
        self.shared_head = theirs.lm_head

    def forward_layer(self, index: int, hidden: Tensor, positions: Tensor, cache: None, input_ids: Tensor) -> Tensor:
        parts = self.layers
        pair = [parts.enorm(self.embed[0](input_ids)), parts.hnorm(hidden)]
        x = parts.eh_proj(torch.cat(pair, dim=-1))
        for block in parts.blocks:
            x = block(x, position_ids=positions)
        return parts.post_norm(x)


class OneWideHead(OneHead):
    """A head that reads each stream of a model and hands its own on, as vLLM has it for DeepSeek-V4."""

    def __init__(self, theirs: Any, blocks: list[torch.nn.Module]) -> None:
        super().__init__(theirs, blocks)
        width = theirs.config.hidden_size
        self.layers.norm = self.layers.post_norm
        del self.layers.post_norm, self.layers.eh_proj
        self.layers.e_proj, self.layers.h_proj = (torch.nn.Linear(width, width, bias=False) for _ in range(2))
        self.layers.hc_head = copy.deepcopy(theirs.model.hc_head)

    def forward_layer(self, index: int, hidden: Tensor, positions: Tensor, cache: None, input_ids: Tensor) -> Tensor:
        parts = self.layers
        x = parts.h_proj(parts.hnorm(hidden)) + parts.e_proj(parts.enorm(self.embed[0](input_ids)))[:, :, None]
        for block in parts.blocks:
            x = block(x, position_ids=positions)
        return x

    def last(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.layers.norm(self.layers.hc_head(hidden))
        return mixed


class OneHeadBesideStreams(OneHead):
    """The same as vLLM has it for Qwen4-Exp: the streams lie side by side, and are normed together."""

    def __init__(self, theirs: Any, blocks: list[torch.nn.Module]) -> None:
        torch.nn.Module.__init__(self)
        mixer, width = theirs.model.hyper_connection_mixer, theirs.config.hidden_size
        norm = type(mixer.hc_norm)
        self.layers = torch.nn.Module()
        self.layers.pre_fc_norm_embedding, self.layers.pre_fc_norm_hidden = norm(width), norm(width * mixer.hc_count)
        self.layers.fc_embedding, self.layers.fc_hidden = (torch.nn.Linear(width, width, bias=False) for _ in range(2))
        self.layers.blocks = torch.nn.ModuleList(blocks)
        self.layers.hyper_connection_mixer = copy.deepcopy(mixer)
        self.embed, self.shared_head = [theirs.get_input_embeddings()], theirs.lm_head

    def forward_layer(self, index: int, hidden: Tensor, positions: Tensor, cache: None, input_ids: Tensor) -> Tensor:
        parts = self.layers
        embedded = parts.fc_embedding(parts.pre_fc_norm_embedding(self.embed[0](input_ids)))
        streams = parts.pre_fc_norm_hidden(hidden).unflatten(-1, (-1, embedded.shape[-1]))
        x = (parts.fc_hidden(streams) + embedded[:, :, None]).flatten(-2)
        for block in parts.blocks:
            x = block(x, position_ids=positions)
        return x

    def last(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.layers.hyper_connection_mixer(hidden)
        return mixed


ONE_HEAD = {"": OneHead, "hc_head": OneWideHead, "hyper_connection_mixer": OneHeadBesideStreams}


def text_of(theirs: Any) -> Any:
    """The text model of a wrapper, or of a model of text."""
    return getattr(theirs.model, "language_model", theirs.model)


def first_norm(theirs: Any) -> str:
    names = dict(text_of(theirs).layers[0].named_modules())
    return next(name for name in ("norm", "input_layernorm.0", "input_layernorm") if name in names)


FULL, SLIDES = ["full_attention"], ["sliding_attention"]
HEADS = {
    "deepseek_v3": Case("deepseek_v3", past_the_last),
    "deepseek_v3-two": Case("deepseek_v3-yarn", past_the_last, heads=2),
    "deepseek_v32": Case("deepseek_v32", one_past_the_last, blocks=indexed_blocks),
    "glm_moe_dsa": Case("glm_moe_dsa-shared", one_past_the_last, blocks=indexed_blocks),
    "glm5_next": Case("glm5_next", glm5, blocks=glm5_blocks),
    "minimax_m3": Case("minimax_m3", minimax_m3, blocks=indexed_blocks),
    "qwen4_exp": Case("qwen4_exp", qwen4, blocks=indexed_blocks, streams="hyper_connection_mixer"),
    "glm4_moe": Case("glm4_moe", past_the_last),
    "bailing_hybrid": Case(
        "bailing_hybrid", past_the_last, {"mtp_layer_types": FULL, "mtp_mlp_layer_types": ["sparse"]}
    ),
    "mellum": Case("mellum", mtp_part, {"mtp_layer_types": SLIDES, "mtp_mlp_layer_types": ["sparse"]}),
    "qwen3_next": Case("qwen3_next", mtp_part, {"mtp_layer_types": FULL}),
    "qwen3_5": Case("qwen3_5", mtp_part, {"mtp_layer_types": FULL}),
    "qwen3_5_moe": Case("qwen3_5_moe", mtp_part, {"mtp_layer_types": FULL}),
    "exaone_moe": Case("exaone_moe", mtp_part, {"mtp_layer_types": SLIDES, "mtp_mlp_layer_types": ["dense"]}),
    "mimo_v2_flash": Case(
        "mimo_v2_flash", in_model_mtp, {"mtp_layer_types": SLIDES * 3, "mtp_mlp_layer_types": ["dense"] * 3}, heads=3
    ),
    "mimo": Case("qwen2", mimo, {"mtp_layer_types": FULL}, saved={"model_type": "mimo"}, hidden_first=True),
    "nemotron_h": Case("nemotron_h-moe", nemotron_h, blocks=nemotron_blocks),
    "longcat_flash": Case("longcat_flash", longcat_flash, blocks=longcat_blocks),
    "deepseek_v4": Case("deepseek_v4", deepseek_v4, blocks=windowed_blocks, streams="hc_head"),
    "ernie4_5_moe": Case("ernie4_5_moe", ernie, {"moe_layer_start_index": 10}, own_norm=False),
}


@dataclass(frozen=True)
class Pair:
    """The model of `transformers` with its heads, and the same weights in lmstate."""

    case: Case
    theirs: Any
    mtp: Any  # transformers.modeling_layers.MtpModel
    ours: lmstate.Model

    def logits(self, ids: Tensor) -> list[Tensor]:
        """Of each head, float32 `[R, n - depth, V]`: after the tokens from `depth` on."""
        return self._forward(ids, ids.shape[1])

    def hidden(self, ids: Tensor) -> Tensor:
        """What the model hands to the first head, float32 `[R, n, E]`; streams `[R, n, N, E]`, or side by side."""
        if self.case.own_norm and not self.case.streams:
            return self.theirs.model(ids).last_hidden_state
        last = self.theirs.model.get_submodule(self.case.streams or "norm")  # what this reads
        return captured(last, lambda: self.theirs.model(ids))

    def last(self, hidden: Tensor) -> Tensor:
        if self.case.streams:
            return self.mtp.last(hidden)
        return hidden if self.case.own_norm else self.theirs.model.norm(hidden)

    def _forward(self, ids: Tensor, known: int) -> list[Tensor]:
        """The heads one after the other, where the model has read the first `known` tokens."""
        found = []
        with torch.no_grad():
            hidden = self.hidden(ids[:, :known])
            for depth in range(1, self.case.heads + 1):
                tokens = ids[:, depth : depth + hidden.shape[1]]
                hidden = hidden[:, : tokens.shape[1]]
                positions = torch.arange(depth, depth + tokens.shape[1])[None].expand(len(ids), -1)
                hidden = self.mtp.forward_layer(depth - 1, hidden, positions, None, input_ids=tokens)
                found.append(self.mtp.shared_head(self.last(hidden)))
        return found

    def ahead(self, ids: list[int], drafted: int) -> Tensor:
        """Logits `[V]` after a text whose last `drafted` tokens are drafts, of which the model has read nothing.

        The one head reads what itself made of the token before, where that is a draft; of several each one reads the
        head before it.
        """
        whole = torch.tensor([ids])
        if self.case.heads > 1:
            return self._forward(whole, len(ids) - 1 - drafted)[drafted][0, -1]
        # The model has read all but the last token given and the drafts; the head stands in for it from there on.
        with torch.no_grad():
            hidden = self.hidden(whole[:, : len(ids) - 1 - drafted])
            for _ in range(drafted + 1):
                tokens = whole[:, 1 : hidden.shape[1] + 1]
                positions = torch.arange(1, tokens.shape[1] + 1)[None]
                made = self.mtp.forward_layer(0, hidden, positions, None, input_ids=tokens)
                hidden = torch.cat([hidden, made[:, -1:]], dim=1)
            return self.mtp.shared_head(self.last(made))[0, -1]


def captured(module: torch.nn.Module, run: Callable[[], Any]) -> Tensor:
    """What a module reads while `run` runs."""
    seen: list[Tensor] = []
    handle = module.register_forward_hook(lambda _, args, __: seen.append(args[0]))
    run()
    handle.remove()
    return seen[0]


@lru_cache(maxsize=3)
def pair(name: str) -> Pair:
    case = HEADS[name]
    config = CASES[case.zoo]()
    torch.manual_seed(0)
    theirs = auto(config).from_config(config, dtype=torch.float32).eval()
    randomize(theirs)
    mtp = heads_of(theirs, case)
    with tempfile.TemporaryDirectory() as folder:
        save(theirs, mtp, case, Path(folder))
        ours = build(WeightLoader(open_source(Path(folder)), "float32", heads=True))
    return Pair(case, theirs, mtp, ours)


def heads_of(theirs: Any, case: Case) -> Any:
    """Random heads for a model, by the class of its last layer."""
    if case.blocks is not None:
        one = ONE_HEAD[case.streams](theirs, case.blocks(theirs)).float().eval()
        randomize(one.layers, seed=1)
        return one
    from transformers.modeling_layers import MtpModel

    whole = theirs.config
    theirs.config = changed = copy.deepcopy(whole)
    changed.num_mtp_layers = case.heads
    changed.mtp_hidden_states_first = case.hidden_first
    if not case.own_norm:
        changed.chain_hidden_post_norm = False
    for key, value in case.head.items():
        setattr(changed, key, value)
    mtp = MtpModel(theirs, case.heads).float().eval()
    mtp.layers.apply(theirs._init_weights)  # which `MtpModel` leaves to loading: sinks are unwritten memory until then
    theirs.config = whole
    randomize(mtp.layers, seed=1)
    return mtp


def stored(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor as checkpoints have it: of ungated experts and of DeepSeek-V4's, one each."""
    if ".ffn.experts." in name:
        whole = zip(("w1", "w3"), tensor.chunk(2, 1)) if name.endswith("gate_up_proj") else [("w2", tensor)]
        stem = name.rpartition(".")[0]
        return {
            f"{stem}.{index}.{part}.weight": each.clone() for part, many in whole for index, each in enumerate(many)
        }
    if not name.endswith((".mixer.experts.up_proj", ".mixer.experts.down_proj")):
        return {name: tensor}
    stem, _, part = name.rpartition(".")
    return {f"{stem}.{index}.{part}.weight": each.clone() for index, each in enumerate(tensor)}


def save(theirs: Any, mtp: Any, case: Case, folder: Path) -> None:
    import json

    theirs.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    layers = len(text_of(theirs).layers)
    for name, tensor in mtp.layers.state_dict().items():
        if not re.search(r"rotary_emb|inv_freq", name):
            tensors |= stored(case.rename(f"layers.{name}", layers), tensor.clone())
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_nextn_predict_layers": case.heads, **case.saved}
    if "text_config" in config:
        config["text_config"] |= {"num_nextn_predict_layers": case.heads}
    config |= {key: value for key, value in case.head.items() if key == "mtp_layer_types"}
    (folder / "config.json").write_text(json.dumps(config))
