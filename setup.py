"""Builds the native operations, one library for each variant of the processor; everything else is in pyproject.toml.

The libraries are loaded with ctypes and need no Python headers. Where one cannot be built (no compiler, another
architecture), the install goes on without it and the package runs on its references in torch.
"""

from __future__ import annotations

import platform
import runpy
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = "src/lmstate/ops/cpu"
SOURCES = sorted(str(path) for path in Path(FOLDER).glob("*.c"))
HEADERS = sorted(str(path) for path in Path(FOLDER).glob("*.h"))
DIGEST = runpy.run_path(f"{FOLDER}/sources.py")["digest"](Path(FOLDER))
# No -ffast-math, no contraction: a row's result must not depend on what stands beside it.
FLAGS = ["-O3", "-g0", "-std=c11", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", f"-DLMSTATE_SOURCES={DIGEST}u"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"]


def native(variant: str, *flags: str) -> Extension:
    return Extension(
        f"lmstate.ops.cpu.native_{variant}",
        SOURCES,
        depends=HEADERS,
        extra_compile_args=[*FLAGS, *flags],
        extra_link_args=["-fopenmp", "-lm"],
        optional=True,
    )


class BuildNative(build_ext):
    """Plain shared libraries: without Python's suffix and its entry point, each compiled apart with its own flags."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def build_extension(self, ext: Extension) -> None:
        shared, self.build_temp = self.build_temp, str(Path(self.build_temp, ext.name))
        try:
            super().build_extension(ext)
        finally:
            self.build_temp = shared


variants = [native("portable")]
if platform.machine().lower() in ("x86_64", "amd64"):
    variants += [native("avx2", "-DLMSTATE_AVX2", *AVX2), native("avx512", "-DLMSTATE_AVX512", *AVX512)]
setup(ext_modules=[] if sys.platform == "win32" else variants, cmdclass={"build_ext": BuildNative})
