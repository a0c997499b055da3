"""Compile every kernel for NVIDIA's architectures, without a GPU.

`python -m tests.interpreted.compile_kernels ARCH` prints JSON: of each kernel its registers, the bytes of its stack and
of its shared memory, the instructions of the matrix unit that it uses, whether additions are contracted, and the groups
of copies that may be under way where one is waited for.
`... write` puts that of all architectures in `resources.json`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, TypeAlias

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lmstate.ops.cuda import configs
from lmstate.ops.cuda.device import OPTIONS
from lmstate.ops.cuda.kernels import attention, chosen, dense, recurrent, routing, sampling

ARCHITECTURES = (80, 90, 100, 120)
RESOURCES = Path(__file__).with_name("resources.json")
LOADS = {"16 bytes": r"ld\.global\.v4\.b32|cp\.async\.\w+\.shared\.global.*, 0x10", "1 or 2": r"ld\.global\.b(?:8|16) "}
"""Instructions that load so many bytes."""
USUAL = configs.KernelShape(0, 4)
"""What `device.launch` takes where nothing else is said."""
F, B, I64 = "*fp32", "*u8", "*i64"
ATTEND: dict[str, Any] = {
    "HAS_SOFTCAP": False, "HAS_SINKS": False, "HAS_SLOPES": False, "LATENT": False, "LISTED": False, "BITS": 0,
    "SPLIT": 512, "HEADS": 32, "GROUP": 4, "ROWS": 16, "D": 128, "DP": 128, "DV": 128, "DVP": 128, "DR": 0, "DRP": 16,
    "ELEMENT": tl.bfloat16, "PRECISION": "tf32",
}  # fmt: skip
HEADS: dict[str, Any] = {"ELEMENT": tl.bfloat16, "STEP": 64, "PRECISION": "tf32"}
PLAIN = HEADS | {"HAS_BIAS": False}
PRODUCT = PLAIN | {"HAS_STREAM": True}
TYPES = {
    "attend": [F, F, I64, I64, I64, I64, I64, F, F, F, F, I64, I64, F, F, *["i32"] * 4, "fp32", "fp32", "i32", "i32"],
    "merge": [F, F, F, F, I64, I64, F, *["i32"] * 3],
    "append": [F, I64, I64, I64, "i32", "i32"],
    "hadamard": [F, F, "i32"],
    "append_codes": [F, I64, I64, I64, I64, "i32", "i32"],
    "encode_blocks": [I64, I64, I64, I64, I64, "i32"],
    "ranks": [F, F, I64, I64, I64, I64, "i32", "i32"],
    "rope": [F, F, F, F, "i32"],
    "product": [F, "*bf16", F, F, F, *["i32"] * 4, "fp32"],
    "product_glu": [F, "*bf16", F, F, *["i32"] * 4],
    "expert_product": [F, I64, I64, I64, I64, I64, I64, F, "i32", "i32", "i32"],
    "weigh": [F, F, F, "i32"],
    "argmax_parts": [F, F, I64, "i32", "i32"],
    "argmax_merged": [F, I64, F, I64, "i32"],
    "weigh_parts": [F, F, I64, I64, "i32", "i32", "fp32", "fp32", "fp32"],
    "draw": [F, F, I64, I64, "*fp64", I64, "i32", "i32", "fp32", "fp32", "fp32"],
    "norm": [F, F, F, F, "i32", "i32", "fp32"],
    "per_head_product": [F, "*bf16", F, *["i32"] * 4],
    "choose_experts": [F, F, F, I64, "fp32", "fp32"],
    "glu": [F, F, "i32"],
    "gated_delta_rule": [F, F, F, F, F, F, I64, F, F, "i32", "fp32"],
    "ssd": [F, F, F, F, F, F, F, F, I64, F, F, "i32", "fp32", "fp32"],
    "causal_conv": [F, F, F, F, I64, F, F, "i32", "i32"],
    "selective_scan": [*[F] * 8, I64, F, F, "i32", "i32"],
    "rg_lru": [*[F] * 6, I64, F, F, F, "i32", "i32"],
    "wkv": [*[F] * 7, I64, *[F] * 4, "i32", "i32", "fp32"],
    "running_peaks": ["*fp64", "*fp64", F, "*fp64", "i32", "i32"],
    "gated_norm": [F, F, F, F, "i32", "i32", "i32", "fp32"],
}
MERGE = {name: ATTEND[name] for name in ("HAS_SINKS", "SPLIT", "HEADS", "GROUP", "ROWS", "DV", "DVP")}
DELTA = {
    "KEY_HEADS": 16, "HEADS": 32, "DK": 128, "DKP": 128, "DV": 128, "SLICE": configs.GATED_DELTA.rows,
    "BY_CHANNEL": False, "NORMALIZE": True, "CORRECTS": True,
}  # fmt: skip
SSD = {
    "GROUPS": 1,
    "HEADS": 24,
    "P": 64,
    "SLICE": configs.SSD.rows,
    "N": 128,
    "NP": 128,
    "HAS_D": True,
    "HAS_BIAS": True,
}
SCAN = {"N": 16, "NP": 16, "SLICE": 64, "HAS_D": True, "HAS_GATE": True, "SOFTPLUS": True}
FEW, MANY = configs.attention(4, 128), configs.attention(4096, 128)
WIDE, CODED = configs.attention(4096, 256), configs.attention(4096, 128, 8)
ONE, WIDER, HEAD = (configs.product(1, outputs, 2) for outputs in (4096, 12288, 49152))
SOME, ROWS = configs.product(32, 4096, 2), configs.product(64, 4096, 2)
MANY_ROWS, GATED_ROWS = configs.product(4096, 4096, 2), configs.product(4096, 4096, 2, sums=2)
assert len({ONE, WIDER, HEAD, SOME, ROWS, MANY_ROWS, GATED_ROWS}) == 7, "each shape that a product may have"
CHOICE = {
    "COUNT": 256, "COUNT_P": 256, "TOP_K": 8, "TOP_K_P": 8, "SIGMOID": True, "HAS_CORRECTION": True, "NORMALIZE": True,
    "GROUPS": 8, "GROUPS_P": 8, "KEPT": 4, "TOP2": True,
}  # fmt: skip
WIDEST = {"D": 256, "DP": 256, "DV": 256, "DVP": 256}
EXACT = {"ELEMENT": tl.float32, "PRECISION": "ieee"}
LATENTS = {
    "LATENT": True, "HEADS": 16, "GROUP": 16, "D": 512, "DP": 512, "DV": 512, "DVP": 512, "DR": 64, "DRP": 64,
}  # fmt: skip
RANKS = {"HEADS": 64, "ROWS": MANY.rows, "D": 128, "DP": 128, "ELEMENT": tl.bfloat16, "PRECISION": "tf32"}
Case: TypeAlias = tuple[Any, dict[str, Any]] | tuple[Any, dict[str, Any], configs.KernelShape]
CASES: dict[str, Case] = {
    "attend": (attention.attend, ATTEND | {"WHOLE": False, "ROWS": FEW.rows}, FEW),
    "attend, prompt": (attention.attend, ATTEND | {"WHOLE": True, "ROWS": MANY.rows, "HAS_SLOPES": True}, MANY),
    "attend, prompt of 256": (
        attention.attend,
        ATTEND | WIDEST | {"WHOLE": True, "ROWS": WIDE.rows},
        WIDE,
    ),
    "attend, latents": (attention.attend, ATTEND | LATENTS | {"WHOLE": True, "ROWS": WIDE.rows}, WIDE),
    "attend, codes": (attention.attend, ATTEND | {"WHOLE": False, "ROWS": FEW.rows, "BITS": 8}, FEW),
    "attend, codes, prompt": (attention.attend, ATTEND | {"WHOLE": True, "ROWS": CODED.rows, "BITS": 8}, CODED),
    "attend, 4 bits": (attention.attend, ATTEND | {"WHOLE": False, "ROWS": FEW.rows, "BITS": 4}, FEW),
    "attend, 4 bits, prompt": (attention.attend, ATTEND | {"WHOLE": True, "ROWS": CODED.rows, "BITS": 4}, CODED),
    "attend, 3 bits": (attention.attend, ATTEND | {"WHOLE": False, "ROWS": FEW.rows, "BITS": 3}, FEW),
    "attend, 4 bits of 256": (attention.attend, ATTEND | WIDEST | {"WHOLE": True, "ROWS": WIDE.rows, "BITS": 4}, WIDE),
    "attend, codes of 256": (attention.attend, ATTEND | WIDEST | {"WHOLE": False, "ROWS": FEW.rows, "BITS": 8}, WIDE),
    "attend, 2 bits": (attention.attend, ATTEND | {"WHOLE": False, "ROWS": FEW.rows, "BITS": 2}, FEW),
    "attend, chosen latents": (
        attention.attend,
        ATTEND | LATENTS | {"LISTED": True, "WHOLE": False, "ROWS": FEW.rows},
        WIDE,
    ),
    "attend, float32": (attention.attend, ATTEND | WIDEST | EXACT | {"WHOLE": True, "ROWS": WIDE.rows}, WIDE),
    "attend, float32 latents": (attention.attend, ATTEND | LATENTS | EXACT | {"WHOLE": True, "ROWS": WIDE.rows}, WIDE),
    "attend, chosen blocks": (
        attention.attend,
        ATTEND | {"LISTED": True, "WHOLE": False, "HEADS": 16, "GROUP": 16, "ROWS": FEW.rows},
        FEW,
    ),
    "hadamard": (attention.hadamard, {"LINES": 16, "D": 128, "LOG_D": 7}),
    "append_codes": (attention.append_codes, {"K": 8, "KP": 8, "D": 128, "LOG_D": 7, "BITS": 8}),
    "append_codes, 4 bits": (attention.append_codes, {"K": 8, "KP": 8, "D": 128, "LOG_D": 7, "BITS": 4}),
    "append_codes, 3 bits": (attention.append_codes, {"K": 8, "KP": 8, "D": 128, "LOG_D": 7, "BITS": 3}),
    "encode_blocks": (attention.encode_blocks, {"K": 8, "D": 128, "BITS": 2, "ELEMENT": tl.bfloat16}),
    "encode_blocks, 3 bits": (attention.encode_blocks, {"K": 8, "D": 128, "BITS": 3, "ELEMENT": tl.bfloat16}),
    "ranks": (chosen.ranks, RANKS, MANY),
    "merge": (attention.merge, MERGE),
    "append": (attention.append, {"K": 8, "D": 128, "DP": 1024, "ELEMENT": tl.bfloat16}),
    "rope": (attention.rope, {"D": 128, "DP": 128, "HALF": 64, "INTERLEAVED": False}),
    "product": (dense.product, PRODUCT | {"KIND": "float"}, ONE),
    "product, 32 outputs": (dense.product, PRODUCT | {"KIND": "float"}, WIDER),
    "product, head": (dense.product, PRODUCT | {"KIND": "float"}, HEAD),
    "product, 32 rows": (dense.product, PRODUCT | {"KIND": "float"}, SOME),
    "product, 64 rows": (dense.product, PRODUCT | {"KIND": "float"}, ROWS),
    "product, 128 rows": (dense.product, PRODUCT | {"KIND": "float"}, MANY_ROWS),
    "product, int4": (dense.product, PRODUCT | {"KIND": "int4"}, ONE),
    "product, int4, head": (dense.product, PRODUCT | {"KIND": "int4"}, HEAD),
    "product, int8": (dense.product, PRODUCT | {"KIND": "int8"}, ONE),
    "product, int8, 128 rows": (dense.product, PRODUCT | {"KIND": "int8"}, MANY_ROWS),
    "product, int4, 64 rows": (dense.product, PRODUCT | {"KIND": "int4"}, ROWS),
    "product, int4, 128 rows": (dense.product, PRODUCT | {"KIND": "int4"}, MANY_ROWS),
    "product, float32": (dense.product, PRODUCT | EXACT | {"KIND": "float"}, configs.product(64, 4096, 4)),
    "product_glu": (dense.product_glu, PLAIN | {"KIND": "float", "ACT": "silu"}, ONE),
    "product_glu, 128 rows": (dense.product_glu, PLAIN | {"KIND": "float", "ACT": "silu"}, GATED_ROWS),
    "product_glu, int4, 128 rows": (dense.product_glu, PLAIN | {"KIND": "int4", "ACT": "gelu"}, GATED_ROWS),
    "expert_product, int4": (dense.expert_product, PLAIN | {"KIND": "int4", "SHARE": 8}, ONE),
    "expert_product, 64 rows": (dense.expert_product, PLAIN | {"KIND": "float", "SHARE": 8}, ROWS),
    "weigh": (dense.weigh, {"TOP_K": 8, "WEIGHS": True, "WIDTH": 1024}),
    "argmax_parts": (dense.argmax_parts, {"WIDTH": 4096}),
    "argmax_merged": (dense.argmax_merged, {"PARTS": 64}),
    "weigh_parts": (sampling.weigh_parts, {"WIDTH": 1024}),
    "draw": (sampling.draw, {"WIDTH": 1024, "PARTS": 256}),
    "norm": (dense.norm, {"LAYER": False, "HAS_BIAS": False, "WIDTH": 4096}),
    "norm, layer": (dense.norm, {"LAYER": True, "HAS_BIAS": True, "WIDTH": 4096}),
    "per_head_product": (dense.per_head_product, HEADS, ONE),
    "per_head_product, 64 rows": (dense.per_head_product, HEADS, ROWS),
    "choose_experts": (routing.choose_experts, CHOICE | {"SIGMOID": False, "GROUPS": 1, "GROUPS_P": 1, "KEPT": 1}),
    "choose_experts, groups": (routing.choose_experts, CHOICE),
    "glu": (dense.glu, {"ACT": "silu", "WIDTH": 1024}),
    "gated_delta_rule": (recurrent.gated_delta_rule, DELTA, configs.GATED_DELTA),
    "ssd": (recurrent.ssd, SSD, configs.SSD),
    "causal_conv": (recurrent.causal_conv, {"TAPS": 4, "SLICE": 128, "HAS_BIAS": True, "SILU": True}),
    "selective_scan": (recurrent.selective_scan, SCAN),
    "rg_lru": (recurrent.rg_lru, {"SLICE": 128}),
    "wkv": (recurrent.wkv, {"SLICE": 128}),
    "running_peaks": (recurrent.running_peaks, {"SLICE": 128}),
    "gated_norm": (recurrent.gated_norm, {"ACT": "silu", "NORMS": True, "GATE_LAST": True, "WIDTH": 4096}),
}


def compile_kernel(
    arch: int, kernel: Any, constants: dict[str, Any], config: configs.KernelShape = USUAL
) -> dict[str, Any]:
    types = list(TYPES[kernel.fn.__name__])
    if "STEP" in constants:  # a product
        constants = constants | {"ROWS": config.rows, "OUTPUTS": config.outputs}
        if config.rows == configs.LARGE:
            types[0] = "*bf16"
        if constants.get("KIND", "float") != "float" and kernel is not dense.expert_product:
            types[1] = B
        elif constants["ELEMENT"] == tl.float32:
            types[1] = F
    names = [name for name in kernel.arg_names if name not in constants]
    assert len(names) == len(types), (kernel.fn.__name__, names)
    signature = {**dict(zip(names, types)), **dict.fromkeys(constants, "constexpr")}
    # As Triton finds at a launch: tensors begin at multiples of 16, and so do the lines of a model's matrices.
    aligned = [name for name, kind in signature.items() if str(kind)[0] == "*" or name in ("inputs", "outputs")]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, constants, attributes)
    options = OPTIONS | {"num_warps": config.warps, "num_stages": config.stages}
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = made.asm["ptx"]
    units = [unit for unit in ("mma.sync", "wgmma", "tcgen05.mma") if unit in ptx]
    registers, stack = resources(made.asm["cubin"])
    ahead = max((int(n) for n in re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)), default=0)
    loads = {name: len(re.findall(pattern, ptx)) for name, pattern in LOADS.items()}
    return {
        "registers": registers, "stack": stack, "shared": made.metadata.shared, "units": units,
        "contracted": "fma.rn.f32" in ptx, "loads": loads, "ahead": ahead,
    }  # fmt: skip


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, to which registers are spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(knobs.nvidia.cuobjdump.path), "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found is not None, told
    return int(found[1]), int(found[2])


def rows(value: Any) -> str:
    """A version, or a table with a line for each kernel, as JSON."""
    if isinstance(value, str):
        return json.dumps(value)
    return "{\n" + ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n  }"


def table(arch: int) -> dict[str, dict[str, Any]]:
    return {label: compile_kernel(arch, *case) for label, case in CASES.items()}


if __name__ == "__main__":
    if sys.argv[1] == "write":
        told = {"triton": triton.__version__, **{str(arch): table(arch) for arch in ARCHITECTURES}}
        lines = (f"  {json.dumps(name)}: {rows(value)}" for name, value in told.items())
        RESOURCES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    else:
        print(json.dumps(table(int(sys.argv[1]))))
