"""Numbers with units, read and written."""

from __future__ import annotations

import math
import re

from distserve.bench.errors import BadOption

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_FORM = re.compile(r"([0-9.]+)\s*([a-z]+)")


def parse_seconds(option: str, text: str) -> float:
    """`300ms`, `2s`, `1m`. A unit is needed. Raises BadOption."""
    match = _FORM.fullmatch(text.strip())
    try:
        assert match is not None
        value = float(match[1]) * _SECONDS[match[2]]
    except (AssertionError, KeyError, ValueError):
        raise BadOption(option, text, "a time is a number with a unit: 300ms, 2s, 1m") from None
    if not 0 < value < math.inf:
        raise BadOption(option, text, "a time is above 0")
    return value


def parse_amount(option: str, text: str) -> tuple[int, float]:
    """`20` or `5s` -> (requests, seconds), one of them 0. Raises BadOption."""
    if text.strip().isdigit():
        return int(text), 0.0
    try:
        return 0, parse_seconds(option, text)
    except BadOption:
        raise BadOption(option, text, "it is a number of requests, e.g. 20, or a time with a unit, e.g. 5s") from None


def in_ms(seconds: float) -> str:
    return plain(1000 * seconds)


def plain(value: float) -> str:
    """Three digits that count, three behind the point at most: 0.123, 12.3, 1,234."""
    if math.isnan(value):
        return "-"
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{min(3, digits)}f}"
