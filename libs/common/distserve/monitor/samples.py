"""One series out of Prometheus's text: `name` or `name{label="value",...}`, labels that are left out being any."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_SAMPLE = re.compile(rf"({_NAME})(?:\{{(.*)\}})?\s+(\S+)(?:\s+-?\d+)?\s*$")
_SELECTOR = re.compile(rf"\s*({_NAME})\s*(?:\{{(.*)\}})?\s*$")
_ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: Mapping[str, str]
    value: float

    def __str__(self) -> str:
        inside = ",".join(f'{key}="{value}"' for key, value in self.labels.items())
        return f"{self.name}{{{inside}}}" if inside else self.name


@dataclass(frozen=True, slots=True)
class Selector:
    name: str
    labels: Mapping[str, str]

    def of(self, samples: list[Sample]) -> list[Sample]:
        return [s for s in samples if s.name == self.name and self.labels.items() <= s.labels.items()]


def selector(text: str) -> Selector:
    """Raises ValueError if it is none."""
    found = _SELECTOR.match(text)
    labels = found and _labels(found[2] or "")
    if not found or labels is None:
        raise ValueError(f'{text!r} is neither a name nor a name with labels, such as name{{role="decode"}}')
    return Selector(found[1], labels)


def samples(text: str) -> Iterator[Sample]:
    """Lines that are none are left out."""
    for line in text.splitlines():
        if line.startswith("#") or not (found := _SAMPLE.match(line)):
            continue
        labels = _labels(found[2] or "")
        try:
            value = float(found[3])
        except ValueError:
            continue
        if labels is not None:
            yield Sample(found[1], labels, value)


def _labels(text: str) -> dict[str, str] | None:
    """None: not well formed."""
    labels: dict[str, str] = {}
    at = 0
    while text[at:].strip():
        found = _LABEL.match(text, at)
        if not found:
            return None
        labels[found[1]] = _ESCAPED.sub(lambda m: "\n" if m[1] == "n" else m[1], found[2])
        at = found.end()
    return labels
