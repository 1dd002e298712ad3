"""Parsed tables of TOML and JSON as dataclasses: every key, type and range is checked.

A range stands in the type of a field: `Annotated[int, Within(1, 64)]`. A number that is not finite
is always refused.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union

from anysize.errors import AnysizeError, ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Within:
    """A range from `low` to `high`, with its ends unless `is_open`."""

    low: float
    high: float
    is_open: bool = False

    def refusal(self, value: float) -> str:
        """What a value must be, where it lies outside; else nothing."""
        if value < self.low or (self.is_open and value == self.low):
            return f"{'above' if self.is_open else 'at least'} {self.low}"
        if value > self.high or (self.is_open and value == self.high):
            return f"{'below' if self.is_open else 'at most'} {self.high}"
        return ""


Count = Annotated[int, Within(1, 1_000_000_000)]
Index = Annotated[int, Within(0, 1_000_000_000)]
Share = Annotated[float, Within(0, 1, is_open=True)]
Positive = Annotated[float, Within(0, 1e9, is_open=True)]
NotNegative = Annotated[float, Within(0, 1e9)]


def from_table(
    cls: type[T],
    table: object,
    source: str,
    prefix: str = "",
    error: type[AnysizeError] = ConfigError,
) -> T:
    """Builds a dataclass or a named tuple from a parsed TOML or JSON table.

    Args:
        cls: Its fields are texts, numbers, truth values, literals, tuples, mappings of texts, and
            other such classes. A key that Python reserves has an underscore behind it: `class_`.
        table: As the parser gave it.
        source: The file, for messages.
        prefix: What stands before a key in messages, such as "geometry.".
        error: To be raised.

    Raises:
        AnysizeError: Of class `error`: not a table, an unknown or missing key, a value of the wrong
            type or out of range; names the key and `source`.
    """
    return _Reader(source, error).build(cls, table, prefix)


@dataclass(frozen=True, slots=True)
class _Reader:
    source: str
    error: type[AnysizeError]

    def fail(self, message: str, advice: str = "") -> typing.NoReturn:
        raise self.error(f"{message} ({self.source}). {advice}".rstrip())

    def build(self, kind: Any, table: object, prefix: str) -> Any:  # noqa: ANN401
        fields = typing.get_type_hints(kind, include_extras=True)
        names = {name.rstrip("_"): name for name in fields}
        if not isinstance(table, Mapping):
            what = f"`{prefix[:-1]}`" if prefix else "It"
            self.fail(f"{what} must be a section with the keys {', '.join(names)}")
        given = typing.cast("Mapping[str, object]", table)
        for key in given:
            if key not in names:
                near = difflib.get_close_matches(key, names, n=1)
                suggestion = f"Did you mean `{prefix}{near[0]}`? " if near else ""
                self.fail(f"Unknown key `{prefix}{key}`", f"{suggestion}Known: {', '.join(names)}.")
        for name in _required(kind):
            if name.rstrip("_") not in given:
                self.fail(f"`{prefix}{name.rstrip('_')}` is missing", "Add it.")
        values = {
            names[key]: self.convert(value, fields[names[key]], prefix + key)
            for key, value in given.items()
        }
        return kind(**values)

    def convert(self, value: object, hint: Any, key: str) -> object:  # noqa: ANN401
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is Annotated:
            number = typing.cast("float", self.convert(value, arguments[0], key))
            if wanted := arguments[1].refusal(number):
                self.fail(f"`{key}` is {_short(value)}; it must be {wanted}")
            return number
        if origin is Literal:
            if value not in arguments or isinstance(value, bool):
                options = ", ".join(map(str, arguments))
                self.fail(f"`{key}` is {_short(value)}; it must be one of {options}")
            return value
        if origin in (Union, UnionType):  # A list, or a word in its place.
            items, word = arguments
            return self.convert(value, word if isinstance(value, str) else items, key)
        if origin is tuple:
            return self.items(value, arguments, key)
        if origin is Mapping:
            if not isinstance(value, dict):
                self.fail(f'`{key}` is {_short(value)}; it must be like {{0 = "ignore"}}')
            entries = typing.cast("dict[str, object]", value).items()
            return {name: self.convert(v, arguments[1], f"{key}.{name}") for name, v in entries}
        if dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
            return self.build(hint, value, f"{key}.")
        if hint is Any:
            return self.toml(value, key)
        return value if hint is object else self.plain(value, hint, key)

    def items(self, value: object, kinds: tuple[Any, ...], key: str) -> tuple[object, ...]:
        any_length = kinds[-1] is Ellipsis
        items = typing.cast("list[object]", value)
        if type(value) is not list or not (any_length or len(items) == len(kinds)):
            length = "" if any_length else f" of {len(kinds)} values"
            self.fail(f"`{key}` is {_short(items)}; it must be a list{length}")
        each = [kinds[0]] * len(items) if any_length else kinds
        pairs = enumerate(zip(items, each, strict=True))
        return tuple(self.convert(item, kind, f"{key}[{i}]") for i, (item, kind) in pairs)

    def toml(self, value: object, key: str) -> object:
        """A value that TOML and JSON both have, so that it is read back as it was."""
        if isinstance(value, dict):
            entries = typing.cast("dict[str, object]", value).items()
            return {name: self.toml(v, f"{key}.{name}") for name, v in entries}
        if isinstance(value, list):
            items = typing.cast("list[object]", value)
            return [self.toml(v, f"{key}[{i}]") for i, v in enumerate(items)]
        if type(value) not in (str, int, float, bool):
            self.fail(f"`{key}` is {_short(value)}; it must be text, a number, a list or a table")
        return self.plain(value, type(value), key)

    def plain(self, value: object, kind: type, key: str) -> object:
        if kind is float and type(value) is int and abs(value) < 1 << 63:
            value = float(value)
        if type(value) is not kind:
            self.fail(f"`{key}` is {_short(value)}; it must be of type {kind.__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            self.fail(f"`{key}` is {value}; it must be a finite number")
        if isinstance(value, str) and "\0" in value:
            self.fail(f"`{key}` is {value!r}; it must not contain the character NUL")
        return value


def toml_text(value: str) -> str:
    """A string as TOML writes it.

    Raises:
        ConfigError: It is part of a path that is not UTF-8, which TOML cannot hold.
    """
    if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        raise ConfigError(f"{value} is not valid UTF-8, as TOML files are. Rename the folder.")
    # JSON's escapes are among TOML's, which also demands one for DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _required(kind: Any) -> list[str]:  # noqa: ANN401
    if hasattr(kind, "_fields"):
        return [name for name in kind._fields if name not in kind._field_defaults]
    missing = dataclasses.MISSING
    return [
        spec.name
        for spec in dataclasses.fields(kind)
        if spec.default is missing and spec.default_factory is missing
    ]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def to_toml(config: Any) -> str:  # noqa: ANN401
    """Sections and their keys as TOML, all written out, in the order of the dataclasses."""
    lines: list[str] = []
    for section in dataclasses.fields(config):
        lines.append(f"[{section.name}]")
        values = getattr(config, section.name)
        lines.extend(
            f"{key.name} = {_toml_value(getattr(values, key.name))}"
            for key in dataclasses.fields(values)
        )
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        items = typing.cast("Sequence[object]", value)
        return "[" + ", ".join(map(_toml_value, items)) + "]"
    if isinstance(value, dict):
        entries = typing.cast("dict[str, object]", value).items()
        inside = ", ".join(f"{_toml_value(k)} = {_toml_value(v)}" for k, v in entries)
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, str):
        return toml_text(value)
    return repr(value)
