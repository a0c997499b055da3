import contextlib
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmstate.checkpoints.config import Config
from lmstate.errors import ModelError
from lmstate.files.json_object import parse_object

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(ANYTHING)
def test_a_value_is_as_typed_or_refused(value):
    fields = Config({"x": value})
    for read, right in [
        (lambda: fields.int("x", 1, 100), lambda got: type(got) is int and 1 <= got <= 100),
        (lambda: fields.float("x", 0.0, 1.0), lambda got: type(got) is float and 0 <= got <= 1),
        (lambda: fields.bool("x"), lambda got: type(got) is bool),
        (lambda: fields.str("x"), lambda got: type(got) is str),
        (lambda: fields.ints("x", low=-5), lambda got: all(type(item) is int and item >= -5 for item in got)),
        (lambda: fields.floats("x", 2), lambda got: len(got) == 2 and all(math.isfinite(item) for item in got)),
        (lambda: fields.strs("x", allowed=("a", "b")), lambda got: set(got) <= {"a", "b"}),
    ]:
        with contextlib.suppress(ModelError):
            assert right(read())


def test_absent_and_null_take_the_default_and_without_one_are_errors():
    fields = Config({"null": None, "whole": 4.0}, "config.json")
    assert fields.int("null", default=None) is None and fields.int("absent", default=7) == 7
    assert fields.bool("null", default=True) is False and fields.bool("absent", default=True) is True
    assert fields.int("whole") == 4
    assert fields.fields("absent") is None
    with pytest.raises(ModelError, match=r"config.json lacks 'absent'.*from 1 to 9"):
        fields.int("absent", 1, 9)


@pytest.mark.parametrize("value", [10**5000, float("nan"), float("inf"), -1, True, "3", 2.5, [3]], ids=range(8))
def test_what_only_looks_like_a_size_is_refused(value):
    with pytest.raises(ModelError, match="hidden_size"):
        Config({"hidden_size": value}).int("hidden_size", 1, 2**20)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', "[1]", "{", "[" * 100_000, b"\xff\xfe", '{"a": ' * 50_000])
def test_broken_json_is_refused(text):
    with pytest.raises(ModelError, match="somewhere"):
        parse_object(text, "somewhere")


def test_good_json_is_read():
    assert parse_object(json.dumps({"a": [1, {"b": None}]}), "x") == {"a": [1, {"b": None}]}
