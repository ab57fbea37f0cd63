"""What a request is to keep to, and whether it did."""

from __future__ import annotations

from collections.abc import Mapping

from distserve.bench.answers import Result
from distserve.bench.errors import BadOption
from distserve.bench.units import parse_seconds

KEYS = ("ttft", "tpot", "e2e")
Slo = Mapping[str, float]  # one of KEYS -> s
_PROMISES = {"ttft": "ttft_slo_ms", "tpot": "tpot_slo_ms", "e2e": "deadline_ms"}  # fields of DistServe's own requests


def parse_slo(option: str, text: str) -> dict[str, float]:
    """`ttft=300ms,tpot=50ms`. Raises BadOption."""
    found = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name.strip() not in KEYS:
            raise BadOption(option, text, f"{name.strip()!r} is none of {', '.join(KEYS)}; e.g. ttft=300ms,tpot=50ms")
        found[name.strip()] = parse_seconds(option, value)
    return found


def promise_fields(slo: Slo) -> dict[str, float]:
    """As fields of a request, in ms, that DistServe takes as promises."""
    return {_PROMISES[name]: 1000 * seconds for name, seconds in slo.items()}


def is_good(result: Result, slo: Slo) -> bool:
    """It ended well, within all of them. An answer of one token has no TPOT to miss."""
    if not result.ok:
        return False
    measured = {"ttft": result.ttft_s(), "tpot": result.tpot_s, "e2e": result.e2e_s}
    return all((value := measured[name]) is None or value <= limit for name, limit in slo.items())
