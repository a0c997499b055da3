"""JSON from outside: a name given twice is found in time that grows with the file and not with its square."""

from __future__ import annotations

import json

import pytest

from lmstate.errors import ModelError
from lmstate.files.json_object import parse_object


def test_many_keys_are_read_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({f"key {i}": i for i in range(40_000)})
    assert len(parse_object(text, "it")) == 40_000
    twice = text[:-1] + ', "key 39999": 0}'
    compared = 0

    class Key(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)  # type: ignore[arg-type]

    loads = json.loads

    def counted(text: str, object_pairs_hook):  # type: ignore[no-untyped-def]
        return loads(text, object_pairs_hook=lambda pairs: object_pairs_hook([(Key(k), v) for k, v in pairs]))

    monkeypatch.setattr("lmstate.files.json_object.json.loads", counted)
    with pytest.raises(ModelError, match="'key 39999' twice"):
        parse_object(twice, "it")
    assert compared < 400_000
