"""Builds the native operations, one library for each variant of the processor; everything else is in pyproject.toml.

The libraries are loaded with ctypes and need no Python headers. Where one cannot be built (no compiler, another
architecture), the install goes on without it and the package runs on its references in torch.

LMSTATE_VARIANTS: `all`, as in every wheel by default; `native`, those that this processor runs, as in an editable
install by default; or names, comma-separated. LMSTATE_CFLAGS: more flags to compile and link with.
"""

from __future__ import annotations

import os
import platform
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CompileError, LinkError
from setuptools.modified import newer_group

FOLDER = Path("src/lmstate/ops/cpu/csrc")
SOURCES = sorted(path.as_posix() for path in FOLDER.rglob("*.c"))
HEADERS = sorted(path.as_posix() for path in FOLDER.rglob("*.h"))
DIGEST = runpy.run_path(str(FOLDER.with_name("sources.py")))["digest"](FOLDER)
# No -ffast-math, no contraction: a row's result must not depend on what stands beside it.
FLAGS = ["-O3", "-g0", "-std=c11", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", f"-DLMSTATE_SOURCES={DIGEST}u"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"]
VARIANTS = {
    "portable": [],
    "avx2": ["-DLMSTATE_AVX2", *AVX2],
    "avxvnni": ["-DLMSTATE_AVX2", "-DLMSTATE_AVXVNNI", *AVX2, "-mavxvnni"],
    "avx512": ["-DLMSTATE_AVX512", *AVX512],
}
EXTRA = os.environ.get("LMSTATE_CFLAGS", "").split()
SLOWEST = ("linear_panel.c", "linear.c", "attend.c")  # to compile: they go first, so that none is left alone at the end


def supported() -> list[str]:
    """The variants that this processor runs, by what the kernel reports; all where it reports nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return list(VARIANTS)
    found = next((set(line.split()) for line in lines if line.startswith("flags")), None)
    if found is None:
        return list(VARIANTS)
    needed = {name: {flag[2:] for flag in flags if flag.startswith("-m")} for name, flags in VARIANTS.items()}
    # gcc writes avx512vnni where the kernel writes avx512_vnni.
    have = {flag.replace("_", "") for flag in found}
    return [name for name, flags in needed.items() if flags <= have]


def selected(default: str) -> list[str]:
    """The variants to build, always with `portable`, whose library says what the processor runs."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ["portable"]
    asked = os.environ.get("LMSTATE_VARIANTS", "").strip().lower() or default
    if asked in ("all", "native"):
        return list(VARIANTS) if asked == "all" else supported()
    names = {name.strip() for name in asked.split(",")} - {""}
    if unknown := names - set(VARIANTS):
        raise SystemExit(f"LMSTATE_VARIANTS={asked}: no variant is {min(unknown)}; use all, native or {[*VARIANTS]}")
    return [name for name in VARIANTS if name == "portable" or name in names]


def native(variant: str) -> Extension:
    return Extension(
        f"lmstate.ops.cpu.native_{variant}",
        SOURCES,
        depends=HEADERS,
        include_dirs=[str(FOLDER)],
        extra_compile_args=[*FLAGS, *VARIANTS[variant], *EXTRA],
        extra_link_args=["-fopenmp", "-lm", *EXTRA],
        optional=True,
    )


class BuildNative(build_ext):
    """Plain shared libraries, without Python's suffix and entry point; files of all variants compile in one pool."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def build_extensions(self) -> None:
        wanted = {native(name).name for name in selected("native" if self.inplace or self.editable_mode else "all")}
        self.extensions = [ext for ext in self.extensions if ext.name in wanted]
        outdated = [
            ext for ext in self.extensions
            if self.force or newer_group([*ext.sources, *ext.depends], self.get_ext_fullpath(ext.name), "newer")
        ]  # fmt: skip
        sources = sorted(SOURCES, key=lambda source: not source.endswith(SLOWEST))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = {
                (ext.name, source): pool.submit(self._compile, ext, source) for source in sources for ext in outdated
            }
        for ext in outdated:
            try:
                self._link(ext, [path for source in SOURCES for path in jobs[ext.name, source].result()])
            except (BaseError, CompileError, LinkError) as error:
                self.warn(f"the native variant {ext.name} was not built: {error}")

    def _compile(self, ext: Extension, source: str) -> list[str]:
        return self.compiler.compile(
            [source],
            output_dir=str(Path(self.build_temp, ext.name)),  # apart: each variant has its own flags
            include_dirs=ext.include_dirs,
            extra_postargs=ext.extra_compile_args,
        )

    def _link(self, ext: Extension, objects: list[str]) -> None:
        self.compiler.link_shared_object(objects, self.get_ext_fullpath(ext.name), extra_postargs=ext.extra_link_args)


class PlatformWheel(bdist_wheel):
    """A wheel for every Python of its platform: the libraries are loaded with ctypes and need no Python headers."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[] if sys.platform == "win32" else [native(name) for name in VARIANTS],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
)
