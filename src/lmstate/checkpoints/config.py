"""Typed reading of a checkpoint's config: every value that a family takes out of a file is checked here, once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias, TypeVar, overload

from lmstate.errors import ModelError

T = TypeVar("T")
# Inside `Config` the names `int`, `float`, `bool` and `str` are its methods; its signatures use these.
Whole: TypeAlias = int
Real: TypeAlias = float
Truth: TypeAlias = bool
Text: TypeAlias = str


class _Required:
    """The default of a field that has none: absence is an error."""


REQUIRED = _Required()


class Config(Mapping[str, Any]):
    """A config dict that hands out checked values; `where` names it in the messages ("config.json", "rope_scaling").

    A field that is absent or null takes its default (but a null `bool` is false); without a default it is an error. All
    errors are `ModelError`. Bounds are inclusive. As a `Mapping` it also gives the raw values (`fields.get(name)`),
    unchecked.
    """

    def __init__(self, values: Mapping[Text, Any], where: Text = "config") -> None:
        if not isinstance(values, Mapping):
            raise ModelError(f"{where} must be an object of named values, and is {_shown(values)}")
        self._values = dict(values)
        self.where = where

    def __getitem__(self, name: Text) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[Text]:
        return iter(self._values)

    def __len__(self) -> Whole:
        return len(self._values)

    def __repr__(self) -> Text:
        return f"Config({self._values!r}, where={self.where!r})"

    def given(self, name: Text) -> Truth:
        """Whether the field is there and not null."""
        return self._values.get(name) is not None

    @overload
    def int(self, name: Text, low: Whole = 0, high: Whole = 2**31 - 1) -> Whole: ...
    @overload
    def int(self, name: Text, low: Whole = 0, high: Whole = 2**31 - 1, *, default: T) -> Whole | T: ...
    def int(self, name: Text, low: Whole = 0, high: Whole = 2**31 - 1, *, default: Any = REQUIRED) -> Any:
        """A whole number in `low..high` (a float without a fraction counts as whole; a bool does not)."""
        value = self._take(name, default, f"a whole number from {low} to {high}")
        return default if value is None else self._whole(name, value, low, high)

    @overload
    def float(self, name: Text, low: Real = -math.inf, high: Real = math.inf) -> Real: ...
    @overload
    def float(self, name: Text, low: Real = -math.inf, high: Real = math.inf, *, default: T) -> Real | T: ...
    def float(self, name: Text, low: Real = -math.inf, high: Real = math.inf, *, default: Any = REQUIRED) -> Any:
        """A finite number in `low..high`."""
        value = self._take(name, default, f"a finite number from {low} to {high}")
        return default if value is None else self._real(name, value, low, high)

    @overload
    def bool(self, name: Text) -> Truth: ...
    @overload
    def bool(self, name: Text, *, default: T) -> Truth | T: ...
    def bool(self, name: Text, *, default: Any = REQUIRED) -> Any:
        """True or false, and nothing that merely looks like them, but for null, which is false as in Python."""
        value = self._take(name, default, "true or false")
        if value is None:
            return False if name in self._values else default
        if not isinstance(value, bool):
            raise self._bad(name, value, "true or false")
        return value

    @overload
    def str(self, name: Text, allowed: tuple[Text, ...] = ()) -> Text: ...
    @overload
    def str(self, name: Text, allowed: tuple[Text, ...] = (), *, default: T) -> Text | T: ...
    def str(self, name: Text, allowed: tuple[Text, ...] = (), *, default: Any = REQUIRED) -> Any:
        """A string; one of `allowed` where those are given."""
        expected = "one of " + ", ".join(allowed) if allowed else "a string"
        value = self._take(name, default, expected)
        if value is None:
            return default
        if not isinstance(value, str) or (allowed and value not in allowed):
            raise self._bad(name, value, expected)
        return value

    @overload
    def ints(
        self, name: Text, length: Whole | None = None, low: Whole = 0, high: Whole = 2**31 - 1
    ) -> tuple[Whole, ...]: ...
    @overload
    def ints(
        self, name: Text, length: Whole | None = None, low: Whole = 0, high: Whole = 2**31 - 1, *, default: T
    ) -> tuple[Whole, ...] | T: ...
    def ints(
        self, name: Text, length: Any = None, low: Any = 0, high: Any = 2**31 - 1, *, default: Any = REQUIRED
    ) -> Any:
        """A list of whole numbers in `low..high`, `length` of them where that is given."""
        items = self._list(name, length, f"whole numbers from {low} to {high}", default)
        return default if items is None else tuple(self._whole(name, item, low, high) for item in items)

    @overload
    def floats(
        self, name: Text, length: Whole | None = None, low: Real = -math.inf, high: Real = math.inf
    ) -> tuple[Real, ...]: ...
    @overload
    def floats(
        self, name: Text, length: Whole | None = None, low: Real = -math.inf, high: Real = math.inf, *, default: T
    ) -> tuple[Real, ...] | T: ...
    def floats(
        self, name: Text, length: Any = None, low: Any = -math.inf, high: Any = math.inf, *, default: Any = REQUIRED
    ) -> Any:
        """A list of finite numbers in `low..high`, `length` of them where that is given."""
        items = self._list(name, length, f"finite numbers from {low} to {high}", default)
        return default if items is None else tuple(self._real(name, item, low, high) for item in items)

    @overload
    def strs(self, name: Text, length: Whole | None = None, allowed: tuple[Text, ...] = ()) -> tuple[Text, ...]: ...
    @overload
    def strs(
        self, name: Text, length: Whole | None = None, allowed: tuple[Text, ...] = (), *, default: T
    ) -> tuple[Text, ...] | T: ...
    def strs(self, name: Text, length: Any = None, allowed: Any = (), *, default: Any = REQUIRED) -> Any:
        """A list of strings, each one of `allowed` where those are given (layer types, say)."""
        expected = "strings out of " + ", ".join(allowed) if allowed else "strings"
        items = self._list(name, length, expected, default)
        if items is None:
            return default
        for item in items:
            if not isinstance(item, str) or (allowed and item not in allowed):
                raise self._bad(name, item, expected)
        return tuple(items)

    def fields(self, name: Text, default: Config | None = None) -> Config | None:
        """A nested object (`rope_scaling`, `text_config`), itself as `Config`; `default` where it is absent or null."""
        value = self._values.get(name)
        return default if value is None else Config(value, f"{self.where}: {name}")

    def _take(self, name: Text, default: Any, expected: Text) -> Any:
        """The raw value, or None where the default applies."""
        value = self._values.get(name)
        if value is None and default is REQUIRED:
            raise ModelError(f"{self.where} lacks {name!r}, which must be {expected}")
        return value

    def _list(self, name: Text, length: Whole | None, of: Text, default: Any) -> list[Any] | None:
        expected = f"a list of {of}" if length is None else f"a list of {length} {of}"
        value = self._take(name, default, expected)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or (length is not None and len(value) != length):
            raise self._bad(name, value, expected)
        return list(value)

    def _whole(self, name: Text, value: Any, low: Whole, high: Whole) -> Whole:
        # Some writers save whole numbers as floats (1e6); a fraction, an infinity or a bool is a mistake.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._bad(name, value, f"a whole number from {low} to {high}")
        return value

    def _real(self, name: Text, value: Any, low: Real, high: Real) -> Real:
        expected = f"a finite number from {low} to {high}"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._bad(name, value, expected)
        # A whole number beyond the range of a float is as unusable as an infinity.
        number = float(value) if abs(value) < 1e300 else math.inf
        if not math.isfinite(number) or not low <= number <= high:
            raise self._bad(name, value, expected)
        return number

    def _bad(self, name: Text, value: Any, expected: Text) -> ModelError:
        return ModelError(f"{self.where} has {name!r} = {_shown(value)}, and it must be {expected}")


def _shown(value: Any) -> str:
    """A value as a message shows it: never longer than a line. A huge whole number cannot even be printed by Python."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"a whole number of {value.bit_length()} bits"
    if isinstance(value, (list, tuple, dict)) and len(value) > 16:
        return f"a {type(value).__name__} of {len(value)} items"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
