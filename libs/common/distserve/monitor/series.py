"""One figure, a line each time: a dotted name of ClusterStatus, or a sample of the cluster's Prometheus metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from typer import BadParameter

from distserve.monitor.leaves import ROOTS, Leaf, leaves, near
from distserve.monitor.lines import Say
from distserve.monitor.pace import Pace
from distserve.monitor.samples import Sample, samples, selector
from distserve.monitor.source import Source

Look = Callable[[bool], tuple[float, Leaf]]  # (is it the first time) -> Unix seconds, value

_MOST_NAMED = 6  # series, by an error


def series(source: Source, name: str, pace: Pace, say: Say) -> None:
    """`time value` a line: Unix seconds, and the value as it is, `nan` if there is none. Raises BadParameter for a name
    that the first answer does not have, or has several of; later either is nan, and so is all while the server is
    away."""
    look = _figure(source, name) if _is_figure(name) else _sample(source, name)
    first = True
    for _ in pace:
        found = pace.tried(lambda: look(first))  # noqa: B023  called at once
        if found is not None:
            first = False
            say(f"{found[0]:.3f} {_plain(found[1])}")
        elif not first:
            say(f"{time.time():.3f} nan")


def _is_figure(name: str) -> bool:
    """Of a ClusterStatus: such names have dots, those of Prometheus none outside of their labels."""
    return "." in name.partition("{")[0] or name in ROOTS


def _figure(source: Source, name: str) -> Look:
    def look(first: bool) -> tuple[float, Leaf]:
        status = source.status()
        found = leaves(status)
        if first and name not in found:
            raise _unknown(name, list(found))
        return status.at_unix_s, found.get(name)

    return look


def _sample(source: Source, name: str) -> Look:
    try:
        wanted = selector(name)
    except ValueError as e:
        raise BadParameter(f"--metric {e}") from None

    def look(first: bool) -> tuple[float, Leaf]:
        known = list(samples(source.metrics()))
        found = wanted.of(known)
        if first and not found:
            alike = [str(s) for s in known if s.name == wanted.name]
            raise _unknown(name, alike or list({s.name for s in known}))
        if first and len(found) > 1:
            raise _several(name, found)
        return time.time(), found[0].value if len(found) == 1 else None

    return look


def _unknown(name: str, known: Sequence[str]) -> BadParameter:
    alike = near(name, known)
    return BadParameter(
        f"--metric {name!r} is not known: " + (f"there is {', '.join(alike)}" if alike else "nothing there is like it")
    )


def _several(name: str, found: Sequence[Sample]) -> BadParameter:
    named = ", ".join(map(str, found[:_MOST_NAMED]))
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return BadParameter(f"--metric {name!r} is {len(found)} series, name one by its labels: {named}{more}")


def _plain(value: Leaf) -> str:
    match value:
        case None:
            return "nan"
        case float():
            return f"{value:.9g}" if math.isfinite(value) else str(value)
    return str(value).replace("\n", " ")
