"""RWKV-7 from the formulas of its paper (2503.14456), token by token in float64; its layers as flash-linear-attention
names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

Weights = dict[str, Tensor]
CONFIG: dict[str, Any] = {
    "model_type": "rwkv7", "architectures": ["RWKV7ForCausalLM"], "vocab_size": 99, "hidden_size": 48, "head_dim": 16,
    "num_hidden_layers": 3, "intermediate_size": 80, "norm_eps": 1e-5, "hidden_act": "sqrelu", "norm_first": True,
    "norm_bias": True, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "attn": None,
    "decay_low_rank_dim": 8, "a_low_rank_dim": 12, "v_low_rank_dim": 6, "gate_low_rank_dim": 10,
}  # fmt: skip
RANKS = {"w": "decay_low_rank_dim", "a": "a_low_rank_dim", "v": "v_low_rank_dim", "g": "gate_low_rank_dim"}


def weights(config: dict[str, Any], seed: int = 0) -> Weights:
    """Random weights, large enough that every part of a layer changes the logits."""
    generator = torch.Generator().manual_seed(seed)
    wide, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = wide // config["head_dim"]

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, generator=generator)

    def matrix(rows: int, columns: int) -> Tensor:
        return normal(rows, columns, scale=1.5 * columns**-0.5)

    made = {"model.embeddings.weight": normal(vocab, wide), "lm_head.weight": matrix(vocab, wide)}
    norms = ["model.norm", "model.layers.0.pre_norm"]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        norms += [f"{name}.attn_norm", f"{name}.ffn_norm", f"{name}.attn.g_norm"]
        for part in "rwkvag":
            made[f"{name}.attn.x_{part}"] = torch.rand(1, 1, wide, generator=generator)
        for part in "rkvo":
            made[f"{name}.attn.{part}_proj.weight"] = matrix(wide, wide)
        for part in "wavg" if layer else "wag":
            rank = config[RANKS[part]]
            made[f"{name}.attn.{part}_lora.lora.0.weight"] = matrix(rank, wide)
            made[f"{name}.attn.{part}_lora.lora.2.weight"] = matrix(wide, rank)
            if part != "g":
                made[f"{name}.attn.{part}_lora.lora.2.bias"] = normal(wide)
        made[f"{name}.attn.k_k"], made[f"{name}.attn.k_a"] = 0.7 + normal(wide, scale=0.2), normal(wide, scale=0.5)
        made[f"{name}.attn.r_k"] = normal(heads, config["head_dim"], scale=0.3)
        made[f"{name}.ffn.x_k"] = torch.rand(wide, generator=generator)
        made[f"{name}.ffn.key.weight"], made[f"{name}.ffn.value.weight"] = matrix(inner, wide), matrix(wide, inner)
    for name in norms:
        made[f"{name}.weight"], made[f"{name}.bias"] = 1.0 + normal(wide, scale=0.1), normal(wide, scale=0.1)
    return made


def save(folder: Path, config: dict[str, Any], made: Weights) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(made, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def logits(config: dict[str, Any], made: Weights, ids: list[int]) -> Tensor:
    """Of one text, float64 `[T, V]`."""
    w = {name: tensor.double() for name, tensor in made.items()}
    wide, dim, eps = config["hidden_size"], config["head_dim"], config["norm_eps"]
    layers = range(config["num_hidden_layers"])
    before = {(layer, part): torch.zeros(wide).double() for layer in layers for part in ("attn", "ffn")}
    memory = [torch.zeros(wide // dim, dim, dim).double() for _ in layers]  # [H, values, keys]
    out = []

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (wide,), w[f"{name}.weight"], w[f"{name}.bias"], eps)

    def low_rank(name: str, x: Tensor, act: Any = lambda x: x) -> Tensor:
        up = w[f"{name}.lora.2.weight"] @ act(w[f"{name}.lora.0.weight"] @ x)
        return up + w.get(f"{name}.lora.2.bias", torch.zeros(wide).double())

    for token in ids:
        x = norm(w["model.embeddings.weight"][token], "model.layers.0.pre_norm")
        first = torch.empty(0)
        for layer in layers:
            name = f"model.layers.{layer}.attn"
            here, last = norm(x, f"{name}_norm"), before[layer, "attn"]
            before[layer, "attn"] = here
            r, d, k, v, a, g = (here + (last - here) * w[f"{name}.x_{part}"].view(-1) for part in "rwkvag")
            r, k, own = w[f"{name}.r_proj.weight"] @ r, w[f"{name}.k_proj.weight"] @ k, w[f"{name}.v_proj.weight"] @ v
            if layer == 0:
                first = v = own
            else:
                v = own + (first - own) * low_rank(f"{name}.v_lora", v).sigmoid()
            decay = torch.exp(
                -torch.exp(torch.tensor(-0.5).double()) * low_rank(f"{name}.w_lora", d, torch.tanh).sigmoid()
            )
            a, g = low_rank(f"{name}.a_lora", a).sigmoid(), low_rank(f"{name}.g_lora", g, torch.sigmoid)
            removal = (k * w[f"{name}.k_k"]).view(-1, dim)
            removal = removal / removal.norm(dim=-1, keepdim=True)
            k = k * (1 + (a - 1) * w[f"{name}.k_a"])
            r, k, v, a, decay = (each.view(-1, dim) for each in (r, k, v, a, decay))
            for head in range(wide // dim):
                S = memory[layer][head]
                step = torch.diag(decay[head]) - torch.outer(removal[head], a[head] * removal[head])
                memory[layer][head] = S @ step + torch.outer(v[head], k[head])
            y = torch.stack([memory[layer][head] @ r[head] for head in range(wide // dim)])
            scale, shift = (w[f"{name}.g_norm.{part}"].view(-1, dim) for part in ("weight", "bias"))
            y = F.layer_norm(y, (dim,), eps=dim * eps) * scale + shift
            y = y + (r * k * w[f"{name}.r_k"]).sum(-1, keepdim=True) * v
            x = x + w[f"{name}.o_proj.weight"] @ (y.view(-1) * g)
            name = f"model.layers.{layer}.ffn"
            here, last = norm(x, f"{name}_norm"), before[layer, "ffn"]
            before[layer, "ffn"] = here
            mixture = here + (last - here) * w[f"{name}.x_k"]
            x = x + w[f"{name}.value.weight"] @ (w[f"{name}.key.weight"] @ mixture).relu() ** 2
        out.append(w["lm_head.weight"] @ norm(x, "model.norm"))
    return torch.stack(out)
