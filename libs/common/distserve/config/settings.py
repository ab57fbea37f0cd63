"""One `Setting` for each key of the configuration, read off the structs: its type in words, text -> value and back."""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import inspect

from distserve.config.sections import Config
from distserve.errors import ConfigError

ENV_PREFIX = "DISTSERVE_"

_SIZES = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True, slots=True)
class Setting:
    """A key. `expected` says in words what it takes."""

    section: str  # of a section within another: "transport.rdma"
    name: str
    type: Any  # as annotated, for msgspec.convert
    default: Any
    expected: str
    description: str

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.key.replace(".", "_").upper()

    def value(self, raw: object, origin: str) -> Any:
        """The checked value of `raw` (text is read by the field's type). Raises ConfigError naming the origin."""
        try:
            return msgspec.convert(self._from_text(raw) if isinstance(raw, str) else raw, self.type)
        except (msgspec.ValidationError, ValueError):
            raise self.refusal(raw, origin) from None

    @property
    def is_list(self) -> bool:
        return isinstance(self.default, tuple)

    def text(self, value: object) -> str:
        """What value() reads as this value."""
        if isinstance(value, tuple):
            return ",".join(str(part) for part in value)
        return str(value).lower() if isinstance(value, bool) else str(value)

    def refusal(self, raw: object, origin: str, expected: str = "") -> ConfigError:
        expected = expected or self.expected
        shown = raw if isinstance(raw, str | int | float | bool) else str(raw)
        return ConfigError(
            f"{self.key} is {raw!r} ({origin}), must be {expected}", key=self.key, value=shown, expected=expected
        )

    def _from_text(self, text: str) -> object:
        kind = type(self.default)
        if kind is str:
            return text
        if kind is tuple:
            return [part.strip() for part in text.split(",")] if text.strip() else []
        text = text.strip()
        if kind is bool:
            return _BOOLS.get(text.lower(), text)
        if kind is int:
            if self.name.endswith("_bytes") and (m := re.fullmatch(r"([\d.]+)\s*([a-z]+)", text, re.IGNORECASE)):
                size = float(m[1]) * _SIZES[m[2].lower()] if m[2].lower() in _SIZES else text
                return int(size) if isinstance(size, float) and size.is_integer() else text
            return int(text)
        number = float(text)
        if number != number or number in (float("inf"), float("-inf")):
            return text  # not a length of time that anything could wait
        return number


def _words(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata(type=inner):
            return _words(inner)
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType(values=values):
            return (
                str(values[0]) if len(values) == 1 else "one of " + ", ".join(str(v) for v in sorted(values, key=str))
            )
        case inspect.IntType() | inspect.FloatType():
            noun = "an integer" if isinstance(kind, inspect.IntType) else "a number"
            return (
                f"{noun} from {kind.ge:,} to {kind.le:,}" if kind.gt is None else f"{noun} over 0, at most {kind.le:,}"
            )
        case inspect.VarTupleType(item_type=item):
            return f"a list, with commas between, each {_words(item)}"
        case inspect.StrType():
            limits = [
                "that is not empty" if kind.min_length else "",
                f"of at most {kind.max_length} characters" if kind.max_length else "",
                f"that matches {kind.pattern}" if kind.pattern else "",
            ]
            return " ".join(["text", *filter(None, limits)])
        case _:
            raise TypeError(f"no words for {kind}")


@functools.cache
def settings() -> dict[str, Setting]:
    """Every setting by key (`section.name`), in the order of the sections."""
    tree = inspect.type_info(Config)
    assert isinstance(tree, inspect.StructType)
    return {setting.key: setting for setting in _settings_of(tree, "", Config())}


def _settings_of(section: inspect.StructType, path: str, defaults: object) -> Iterator[Setting]:
    # Defaults are taken from the instance: one section's may differ from those of its type (the traffic classes).
    hints = msgspec.structs.fields(section.cls)
    for field, struct_field in zip(section.fields, hints, strict=True):
        default = getattr(defaults, field.name)
        if isinstance(field.type, inspect.StructType):
            yield from _settings_of(field.type, f"{path}.{field.name}".removeprefix("."), default)
            continue
        extra = (field.type.extra_json_schema or {}) if isinstance(field.type, inspect.Metadata) else {}
        yield Setting(
            section=path,
            name=field.name,
            type=struct_field.type,
            default=default,
            expected=_words(field.type),
            description=extra.get("description", ""),
        )
