"""Parsed tables of TOML and JSON as dataclasses, with every key and type checked."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from anysize.errors import ConfigError

T = TypeVar("T")


def from_table(cls: type[T], table: Mapping[str, Any], source: str, prefix: str = "") -> T:
    """Builds a dataclass of settings from a parsed TOML or JSON table.

    Raises:
        ConfigError: An unknown or missing key, or a value of the wrong type; names `source`.
    """
    return _build(cls, table, prefix, source)


def _build(cls: type[T], table: Mapping[str, Any], prefix: str, source: str) -> T:
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(typing.cast("Any", cls))}
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            suggestion = f" Did you mean `{prefix}{near[0]}`?" if near else ""
            raise ConfigError(
                f"Unknown key `{prefix}{key}` ({source}).{suggestion} Known: {', '.join(known)}."
            )
    values: dict[str, Any] = {}
    for name, spec in known.items():
        hint = hints[name]
        if name in table:
            if dataclasses.is_dataclass(hint):
                if not isinstance(table[name], Mapping):
                    raise ConfigError(f"`{name}` must be a section ({source}).")
                values[name] = _build(
                    typing.cast("type[Any]", hint), table[name], f"{name}.", source
                )
            else:
                values[name] = _convert(table[name], hint, prefix + name, source)
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            raise ConfigError(f"`{prefix}{name}` is missing ({source}). Add it.")
    return cls(**values)


def _convert(value: object, hint: Any, key: str, source: str) -> object:  # noqa: ANN401
    origin = typing.get_origin(hint)
    if origin is Literal:
        if value not in typing.get_args(hint) or isinstance(value, bool):
            options = ", ".join(str(a) for a in typing.get_args(hint))
            raise ConfigError(f"`{key}` is {value!r}; it must be one of {options} ({source}).")
        return value
    if origin is tuple:
        item = typing.get_args(hint)[0]
        if not isinstance(value, list):
            raise ConfigError(f"`{key}` is {value!r}; it must be a list ({source}).")
        return tuple(_convert(v, item, key, source) for v in typing.cast("list[object]", value))
    if origin is Mapping:
        if not isinstance(value, dict) or not all(
            isinstance(v, str) for v in typing.cast("dict[str, object]", value).values()
        ):
            raise ConfigError(f'`{key}` is {value!r}; it must be like {{0 = "ignore"}} ({source}).')
        return dict(typing.cast("dict[str, str]", value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and type(value) is hint:
        return value
    name = getattr(hint, "__name__", str(hint))
    raise ConfigError(f"`{key}` is {value!r}; it must be of type {name} ({source}).")
