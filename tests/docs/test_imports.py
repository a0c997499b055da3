"""Imports run one way and in no circle, those for type checking included; see docs/architecture.md."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
FLOORS: dict[str, list[set[str]]] = {
    # From the ground up: a module imports from its own room, and from those on the floors below.
    "lmstate": [
        {"errors"},
        {"files"},
        {"ops"},
        {"state", "text"},
        {"checkpoints", "language_model", "threads"},
        {"vision"},
        {"audio", "speculation"},
        {"generation"},
        {"models", "kv"},
        {"training", "engine", "integrations", "distributed"},
        {"loading", "converting", "serve"},
        {"cluster"},
        {"cli"},
        {"__main__"},
    ],
    "lmstate.ops": [
        {"fork", "memory", "processor", "ragged"},
        {"types"},
        {"cpu", "cuda"},
        {"dispatch"},
        {"weights"},
        {"dense"},
        {"attention", "recurrent", "fused"},
    ],
    "lmstate.serve": [
        {"wire"},
        {"settings", "tools"},
        {"answer"},
        {"openai", "openapi", "guard"},
        {"anthropic", "sessions"},
        {"ollama", "replicas"},
        {"conversations"},
        {"app"},
        {"run"},
    ],
    "lmstate.serve.openai": [
        {"fields", "tools", "models", "token_places"},
        {"chat", "completions"},
        {"responses", "embeddings", "rerank", "tokens", "transcriptions"},
    ],
    "lmstate.cluster": [
        {"key", "scaling", "rolling", "parts"},
        {"placement", "handle", "ray_cluster", "pictures"},
        {"moving", "wire", "ray_channel"},
        {"feed"},
        {"front", "remote", "served"},
        {"serving", "replica"},
        {"cluster"},
        {"on_ray"},
        {"application"},
        {"manifest"},
    ],
    "lmstate.state": [
        {"blocks", "changes", "gradients", "inference_mode", "sources", "validate"},
        {"media"},
        {"step", "rows", "tree"},
        {"layer_file", "opening", "pending"},
        {"snapshot"},
        {"snapshot_folder"},
        {"layers"},
        {"drop", "kv", "device", "memory", "rewind"},
        {"held"},
        {"stepping"},
        {"state"},
    ],
}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    paths = sorted((SOURCE / "lmstate").rglob("*.py"))
    names = [".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return dict(zip(names, paths))


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of the package that one module names in an import, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {one if one in known else str(node.module) for one in whole}
    return {one for one in found if one in known and one != name}


KNOWN = modules()
GRAPH = {name: imports(name, path, KNOWN) for name, path in KNOWN.items()}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for name in graph:
        if name not in index:
            visit(name)
    return found


def test_no_import_circles() -> None:
    assert not circles(GRAPH)


@pytest.mark.parametrize("package", FLOORS)
def test_imports_point_down(package: str) -> None:
    floor = {f"{package}.{room}": level for level, rooms in enumerate(FLOORS[package]) for room in rooms}

    def room_of(name: str) -> str | None:
        parts = name.split(".")[: package.count(".") + 2]
        return ".".join(parts) if len(parts) == package.count(".") + 2 and name.startswith(package + ".") else None

    unknown = {room for name in KNOWN if (room := room_of(name)) is not None and room not in floor}
    assert not unknown, f"rooms without a floor: {sorted(unknown)}"
    upward = [
        f"{name} -> {other}"
        for name, others in GRAPH.items()
        if (here := room_of(name)) is not None
        for other in sorted(others)
        if (there := room_of(other)) is not None and there != here and floor[there] >= floor[here]
    ]
    assert not upward


def test_value_types_of_ops_import_torch_alone() -> None:
    for name, path in KNOWN.items():
        if not name.startswith("lmstate.ops.types."):
            continue
        assert all(other.startswith("lmstate.ops.types") for other in GRAPH[name]), name
        assert "ctypes" not in path.read_text(encoding="utf-8"), name


def test_no_class_name_twice() -> None:
    homes: dict[str, list[str]] = {}
    for name, path in KNOWN.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(name)
    assert not {name: found for name, found in homes.items() if len(found) > 1}
