"""Numbers as short text, and as pictures of one line. What is None was not measured: a dash."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from distserve.sizing import in_words

NONE = "-"
_LEVELS = "▁▂▃▄▅▆▇█"
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0}
SHORTEST_S, LONGEST_S = 0.1, 3600.0


def seconds(value: float | None) -> str:
    """Three digits and a unit: `412 us`, `4.12 ms`, `41.2 ms`, `1.23 s`, `205 s`."""
    if value is None or not math.isfinite(value):
        return NONE
    for unit, size in (("us", 1e-6), ("ms", 1e-3)):
        if abs(value) < 999.5 * size:
            return f"{_three(value / size)} {unit}"
    return f"{_three(value)} s"


def rate(value: float | None) -> str:
    """Of whatever it counts, a second."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:,.0f}" if value >= 99.95 or value == 0 else _three(value)


def share(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return NONE
    percent = 100 * value
    return f"{percent:.2g} %" if 0 < percent < 0.95 else f"{percent:.0f} %" if percent >= 99.95 else f"{percent:.1f} %"


def size(num_bytes: float | None) -> str:
    return NONE if num_bytes is None else in_words(num_bytes)


def age(value_s: float) -> str:
    """`8 s`, `4 min`, `3 h`, `2 d`: the largest unit that is whole."""
    left = max(0.0, value_s)
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if left >= length:
            return f"{int(left // length)} {unit}"
    return f"{int(left)} s"


def clean(text: str) -> str:
    """Text of others without what a terminal would obey."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The last `width` values, one character each, from 0 up to the largest; a blank where nothing was measured."""
    shown = [*values][-width:] if width > 0 else []
    most = max((v for v in shown if v is not None and math.isfinite(v)), default=0.0)
    return "".join(_level(v, most) for v in shown).rjust(max(width, 0))


def _level(value: float | None, most: float) -> str:
    if value is None or not math.isfinite(value):
        return " "
    if most <= 0:
        return _LEVELS[0]
    return _LEVELS[min(len(_LEVELS) - 1, max(0, math.ceil(value / most * len(_LEVELS)) - 1))]


def cells(width: int, *shares: float) -> list[int]:
    """How many of `width` characters each share of 1 gets: rounded at the ends of the parts, so that the sum is never
    more than the whole. A share that is not 0 gets one, while there is room."""
    ends, end = [0], 0.0
    for part in shares:
        end = min(1.0, end + max(0.0, part))
        least = ends[-1] + (1 if part > 0 else 0)
        ends.append(min(width, max(least, round(end * width))))
    return [b - a for a, b in pairwise(ends)]


def interval(text: str) -> float:
    """`500ms`, `1s`, `2m` as seconds. Raises ValueError that says what would do."""
    stripped = text.strip().lower()
    unit = next((u for u in ("ms", "s", "m") if stripped.endswith(u)), "")
    try:
        found = float(stripped.removesuffix(unit)) * _UNITS[unit]
    except (KeyError, ValueError):
        found = math.nan
    if not SHORTEST_S <= found <= LONGEST_S:
        raise ValueError(f"{text!r} must be a time from 100ms to 60m, such as 500ms, 1s or 2m")
    return found


def _three(value: float) -> str:
    """Three digits, never an exponent."""
    magnitude = abs(value)
    return f"{value:.2f}" if magnitude < 9.995 else f"{value:.1f}" if magnitude < 99.95 else f"{value:.0f}"
