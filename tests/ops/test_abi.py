"""Argument structures of `abi` and of the C sources: the same fields; a library of others is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from lmstate import ops
from lmstate.ops import dispatch
from lmstate.ops.cpu import NativeError, abi, open_library
from lmstate.ops.cpu import __file__ as package

SOURCES = re.sub(
    r"/\*.*?\*/", " ",
    "\n".join(path.read_text(encoding="utf-8") for path in sorted(Path(package).parent.glob("csrc/**/*.[ch]"))),
    flags=re.S,
)  # fmt: skip


def c_fields(structure: str) -> list[tuple[str, str]]:
    """Letter and name of each field; those of an array as often as it is long, those of a structure within in line."""
    found = re.search(r"typedef struct \{([^{}]*)\} " + structure + ";", SOURCES)
    assert found, structure
    fields = []
    for declaration in filter(None, (" ".join(line.split()) for line in found[1].split(";"))):
        kind, names = re.fullmatch(r"(?:const )?(\w+) ?(.*)", declaration).groups()  # type: ignore[union-attr]
        for name in names.split(","):
            base, _, count = name.replace("const ", "").strip("* ]").partition("[")
            if name.endswith("[]"):
                continue
            times = {"": 1, "ARRAYS": abi.SLOT_ARRAYS}.get(count) or int(count)
            if "*" in name:
                fields += [("P", base)] * times
            elif kind in ("int64_t", "double"):
                fields += [("q" if kind == "int64_t" else "d", base)] * times
            else:
                fields += c_fields(kind) * times
    return fields


@pytest.mark.parametrize("layout", abi.LAYOUTS, ids=lambda layout: layout.name)
def test_a_layout_has_the_fields_of_its_structure(layout: abi.CStruct) -> None:
    assert list(zip(layout.letters, layout.fields, strict=True)) == c_fields(layout.name)


@pytest.mark.parametrize("kinds", [abi.Kind, abi.GateKind, abi.SublayerKind], ids=lambda kinds: kinds.__name__)
def test_kinds_are_those_of_the_sources(kinds: type[abi.Kind]) -> None:
    in_c: dict[str, int] = {}
    for body in re.findall(r"enum \{([^{}]*)\};", SOURCES):
        members = [member.strip().partition(" = ") for member in body.split(",")]
        if {name for name, _, _ in members} & set(kinds.__members__):
            in_c |= {name: int(value or index) for index, (name, _, value) in enumerate(members)}
    assert {kind.name: in_c.get(kind.name) for kind in kinds} == {kind.name: kind.value for kind in kinds}


def test_a_library_of_another_layout_is_refused(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(abi.SIZES, "linear_args", abi.LINEAR.size + 8)
    monkeypatch.setitem(abi.SIZES, "unheard_of", 8)
    with pytest.raises(NativeError, match=r"linear_args \(\d+ bytes there, \d+ here\), unheard_of \(none there"):
        open_library(variant)


@pytest.mark.parametrize(("start", "count"), [(-1, 1), (0, -1), (0, 3)])
def test_new_keys_that_do_not_fit_are_refused(variant: str, start: int, count: int) -> None:
    k, v, new = torch.zeros(1, 1, 8, 32), torch.zeros(1, 1, 8, 32), torch.ones(1, 2, 1, 32)
    starts, counts = torch.tensor([start]), torch.tensor([count])
    with pytest.raises(ValueError, match="row 0 starts at"):
        ops.append(new, new, k, v, starts, counts)
    rotation = ops.RopeTables(torch.ones(1, 2, 16), torch.zeros(1, 2, 16))
    with pytest.raises(ValueError, match="row 0 starts at"):
        ops.rotate_attend(new, new, new, rotation, k, v, starts, counts, ops.AttentionParams(1.0))
    assert not k.any() and not v.any()  # nothing was stored


def test_halves_where_floats_are_read_are_refused(variant: str) -> None:
    library = dispatch.choice().library
    assert library is not None
    x, weight = torch.ones(1, 32, dtype=torch.bfloat16), ops.FloatWeight(torch.ones(4, 32))
    with pytest.raises(ValueError, match="x is float32"):
        library.dense.linear(x, weight, None, None, 0, None)
    with pytest.raises(ValueError, match="takes float32"):
        library.dense.rms_norm(x, torch.ones(32), 1e-6)
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        library.dense.glu(x.half(), "silu")
