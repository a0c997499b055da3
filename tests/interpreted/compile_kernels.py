"""Compile every kernel for NVIDIA's architectures, without a GPU: `python -m tests.interpreted.compile_kernels ARCH`.

Prints a line of JSON per kernel: its name, the instructions of the matrix unit that it uses, and contracted additions.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lmstate.ops.cuda.device import OPTIONS
from lmstate.ops.cuda.kernels import attention, dense, recurrent

F, B, I64 = "*fp32", "*u8", "*i64"
ATTEND: dict[str, Any] = {
    "HAS_SOFTCAP": False, "HAS_SINKS": False, "HAS_SLOPES": False, "LATENT": False, "SPLIT": 512, "HEADS": 32,
    "GROUP": 4, "ROWS": 16,
    "D": 128, "DP": 128, "DV": 128, "DVP": 128, "DR": 1, "DRP": 16, "ELEMENT": tl.bfloat16, "PRECISION": "tf32",
}  # fmt: skip
PRODUCT: dict[str, Any] = {
    "HAS_BIAS": False, "HAS_STREAM": True, "ELEMENT": tl.bfloat16, "ROWS": 16, "OUTPUTS": 64, "STEP": 64,
    "PRECISION": "tf32",
}  # fmt: skip
TYPES = {
    "attend": [F, F, I64, I64, I64, F, F, F, F, I64, I64, F, F, *["i32"] * 3, "fp32", "fp32", "i32", "i32"],
    "merge": [F, F, F, F, I64, I64, F, "i32", "i32"],
    "append": [F, I64, I64, I64, "i32", "i32"],
    "rope": [F, F, F, F, "i32"],
    "product": [F, "*bf16", F, F, F, *["i32"] * 4, "fp32"],
    "rms_norm": [F, F, F, "i32", "fp32"],
    "glu": [F, F, "i32"],
    "gated_delta_rule": [F, F, F, F, F, F, I64, F, F, "i32", "fp32"],
    "ssd": [F, F, F, F, F, F, F, F, I64, F, F, "i32", "fp32", "fp32"],
    "causal_conv": [F, F, F, F, I64, F, F, "i32", "i32"],
}
MERGE = {name: ATTEND[name] for name in ("HAS_SINKS", "SPLIT", "HEADS", "GROUP", "ROWS", "DV", "DVP")}
DELTA = {
    "KEY_HEADS": 16, "HEADS": 32, "DK": 128, "DKP": 128, "DV": 128, "SLICE": 32, "BY_CHANNEL": False, "NORMALIZE": True,
    "CORRECTS": True,
}  # fmt: skip
SSD = {"GROUPS": 1, "HEADS": 24, "P": 64, "SLICE": 32, "N": 128, "NP": 128, "HAS_D": True, "HAS_BIAS": True}
CASES: list[tuple[Any, dict[str, Any]]] = [
    (attention.attend, ATTEND | {"WHOLE": False}),
    (attention.attend, ATTEND | {"WHOLE": True, "ROWS": 64, "HAS_SLOPES": True}),
    (attention.merge, MERGE),
    (attention.append, {"K": 8, "D": 128, "DP": 1024, "ELEMENT": tl.bfloat16}),
    (attention.rope, {"D": 128, "DP": 128, "HALF": 64, "INTERLEAVED": False}),
    (dense.product, PRODUCT | {"KIND": "float"}),
    (dense.product, PRODUCT | {"KIND": "float", "ROWS": 64}),
    (dense.product, PRODUCT | {"KIND": "int4"}),
    (dense.product, PRODUCT | {"KIND": "int8"}),
    (dense.rms_norm, {"WIDTH": 4096}),
    (dense.glu, {"ACT": "silu", "WIDTH": 1024}),
    (recurrent.gated_delta_rule, DELTA),
    (recurrent.ssd, SSD),
    (recurrent.causal_conv, {"TAPS": 4, "SLICE": 128, "HAS_BIAS": True, "SILU": True}),
]


def compile_kernel(kernel: Any, constants: dict[str, Any], arch: int) -> dict[str, Any]:
    types = list(TYPES[kernel.fn.__name__])
    if constants.get("KIND", "float") != "float":
        types[1] = B
    names = [name for name in kernel.arg_names if name not in constants]
    assert len(names) == len(types), (kernel.fn.__name__, names)
    signature = {**dict(zip(names, types)), **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, constants)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=OPTIONS)
    ptx = made.asm["ptx"]
    units = [unit for unit in ("mma.sync", "wgmma", "tcgen05.mma") if unit in ptx]
    return {"kernel": kernel.fn.__name__, "bytes": len(made.asm["cubin"]), "units": units, "fused": "fma.rn.f32" in ptx}


if __name__ == "__main__":
    for kernel, constants in CASES:
        print(json.dumps(compile_kernel(kernel, constants, int(sys.argv[1]))), flush=True)
