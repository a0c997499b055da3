"""`lmstate doctor`: what runs here, and why: what a bug report should begin with."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from lmstate.cli.output import table

LIBRARIES = ("torch", "numpy", "safetensors", "tokenizers", "huggingface-hub", "gguf", "jinja2", "transformers")


def doctor() -> None:
    """Show versions, the processor and the native operations.

    Include its output in a bug report.

    \b
    Examples:
      lmstate doctor
    """
    import torch

    from lmstate import __version__
    from lmstate.ops.cuda.device import reason
    from lmstate.ops.dispatch import gpu_info, info

    rows = [
        ("lmstate", __version__),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        *((name, _version(name)) for name in LIBRARIES),
        ("processor", f"{processor()}, {torch.get_num_threads()} of {os.cpu_count()} threads"),
        ("instructions", torch.backends.cpu.get_cpu_capability()),
        ("gpu", torch.cuda.get_device_name() if torch.cuda.is_available() else "none that torch can use"),
        ("gpu operations", reason(0) if reason(0) else "Triton; LMSTATE_OPS=reference forces the references"),
    ]
    table("lmstate doctor", ("", ""), rows)
    print()
    table("Operations", ("operation", "runs on", "why"), [(op["op"], op["body"], op["why"]) for op in info()])
    if on_gpu := gpu_info():
        print()
        table(
            "Operations on the GPU",
            ("operation", "runs on", "why"),
            [(op["op"], op["body"], op["why"]) for op in on_gpu],
        )


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def processor() -> str:
    """The processor's name, where the system tells."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
