"""The command's options, checked: what is wrong with one is said with its name and what would do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from distserve.api_keys import is_sendable
from distserve.bench.body import Endpoint
from distserve.bench.client import Address, parse_url
from distserve.bench.drive import Limits
from distserve.bench.errors import BadOption
from distserve.bench.lengths import Lengths, parse_lengths
from distserve.bench.slo import parse_slo, promise_fields
from distserve.bench.trace import read_trace
from distserve.bench.traffic import INPUT, OUTPUT, Arrival, Traffic
from distserve.bench.units import parse_amount, parse_seconds

DURATION_S = 30.0
MIN_SLICES = 2
HIDDEN = "(given)"
TOKENIZER_FILE = "tokenizer.json"
_SENDABLE = "Latin-1 without control characters"


@dataclass(frozen=True, slots=True)
class Raw:
    """As they were given; None or empty: not."""

    url: str
    compare: str = ""
    rate: float | None = None
    constant: bool = False
    concurrency: int | None = None
    trace: Path | None = None
    speed: float = 1.0
    requests: int | None = None
    duration: str = ""
    warmup: str = ""
    input: str = ""
    output: str = ""
    seed: int = 0
    endpoint: str = "chat"
    model: str = ""
    tokenizer: Path | None = None
    api_key: str = ""
    header: Sequence[str] = ()
    body: Sequence[str] = ()
    promise: str = ""
    slo: str = ""
    deadline: str = "120s"
    fresh: bool = False
    floor: bool = True
    slices: int = 6
    json: Path | None = None
    html: Path | None = None


@dataclass(frozen=True, slots=True)
class Options:
    addresses: tuple[Address, ...]
    traffic: Traffic
    limits: Limits
    endpoint: Endpoint
    model: str
    headers: dict[str, str]
    extra: dict[str, Any]
    promise: dict[str, float]
    slo: dict[str, float]
    raw: Raw
    shown: dict[str, Any] = field(default_factory=dict)  # for reports: without secrets


def check(raw: Raw) -> Options:
    """Raises BadOption."""
    addresses = [parse_url("URL", raw.url)]
    if raw.compare:
        addresses.append(parse_url("--compare", raw.compare))
        if raw.slices < MIN_SLICES:
            raise BadOption("--slices", raw.slices, f"at least {MIN_SLICES}")
    if raw.endpoint not in get_args(Endpoint):
        raise BadOption("--endpoint", raw.endpoint, f"it is one of {', '.join(get_args(Endpoint))}")
    if raw.tokenizer is not None and not (raw.tokenizer / TOKENIZER_FILE).is_file():
        raise BadOption("--tokenizer", raw.tokenizer, f"it is a folder with a {TOKENIZER_FILE}")
    promise = parse_slo("--promise", raw.promise)
    extra: dict[str, Any] = {}
    for text in raw.body:
        extra |= _field(text)
    headers = dict(_header(text) for text in raw.header)
    api_key = raw.api_key.rstrip("\r\n")  # as `$(cat file)` would have it
    if api_key and "authorization" not in map(str.lower, headers):
        if not is_sendable(api_key):
            raise BadOption("--api-key", HIDDEN, f"no HTTP header can carry it: {_SENDABLE}")
        headers["Authorization"] = f"Bearer {api_key}"
    traffic = _traffic(raw)
    return Options(
        addresses=tuple(addresses),
        traffic=traffic,
        limits=_limits(raw, traffic),
        endpoint="chat" if raw.endpoint == "chat" else "completions",
        model=raw.model,
        headers=headers,
        extra=extra,
        promise=promise_fields(promise),
        slo=parse_slo("--slo", raw.slo) or promise,
        raw=raw,
        shown=_shown(raw),
    )


def _traffic(raw: Raw) -> Traffic:
    given = {"--rate": raw.rate, "--concurrency": raw.concurrency, "--trace": raw.trace}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise BadOption(named[1], given[named[1]], f"goes without {named[0]}: a load is of one kind")
    if raw.constant and raw.rate is None:
        raise BadOption("--constant", True, "goes with --rate")
    if raw.rate is not None and not 0 < raw.rate <= 100_000:
        raise BadOption("--rate", raw.rate, "requests a second, above 0 and up to 100000")
    if raw.concurrency is not None and not 1 <= raw.concurrency <= 100_000:
        raise BadOption("--concurrency", raw.concurrency, "requests at once, 1 to 100000")
    if not 0 < raw.speed <= 1_000_000:
        raise BadOption("--speed", raw.speed, "how many times faster than recorded, above 0")
    if raw.trace is None:
        if raw.speed != 1:
            raise BadOption("--speed", raw.speed, "goes with --trace")
        inputs = parse_lengths("--input", raw.input) if raw.input else INPUT
        outputs = parse_lengths("--output", raw.output) if raw.output else OUTPUT
        return _drawn(raw, inputs, outputs)
    for name, text in (("--input", raw.input), ("--output", raw.output)):
        if text:
            raise BadOption(name, text, "goes without --trace, which says how long each is")
    entries = read_trace("--trace", raw.trace)
    if raw.compare and len(entries) < raw.slices:
        raise BadOption("--slices", raw.slices, f"the trace has only {len(entries)} requests")
    return Traffic("trace", raw.seed, trace=tuple(entries), speed=raw.speed)


def _drawn(raw: Raw, inputs: Lengths, outputs: Lengths) -> Traffic:
    if raw.rate is not None:
        arrival: Arrival = "constant" if raw.constant else "poisson"
        return Traffic(arrival, raw.seed, rate_hz=raw.rate, input=inputs, output=outputs)
    return Traffic("closed", raw.seed, concurrency=raw.concurrency or 1, input=inputs, output=outputs)


def _limits(raw: Raw, traffic: Traffic) -> Limits:
    duration_s = parse_seconds("--duration", raw.duration) if raw.duration else None
    if raw.requests is not None and raw.requests < 1:
        raise BadOption("--requests", raw.requests, "at least 1")
    if raw.compare and raw.requests is not None and raw.requests < raw.slices:
        raise BadOption("--requests", raw.requests, f"at least one for each of {raw.slices} slices")
    if duration_s is None and raw.requests is None and traffic.arrival != "trace":
        duration_s = DURATION_S
    if raw.warmup:
        warm_requests, warm_s = parse_amount("--warmup", raw.warmup)
    elif traffic.arrival == "trace":
        warm_requests, warm_s = 0, 0.0
    elif duration_s is not None:
        warm_requests, warm_s = 0, min(5.0, duration_s / 6)
    else:
        warm_requests, warm_s = max(4, traffic.concurrency), 0.0
    return Limits(raw.requests, duration_s, warm_requests, warm_s, parse_seconds("--deadline", raw.deadline))


def _field(text: str) -> dict[str, Any]:
    """`name=value` with a value of JSON, or a text."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise BadOption("--body", text, "it is name=value, e.g. temperature=0.7 or stop='[\"\\n\"]'")
    try:
        return {name.strip(): json.loads(value)}
    except json.JSONDecodeError:
        return {name.strip(): value}


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or not is_sendable(name):
        raise BadOption("--header", HIDDEN, "it is 'Name: value'")  # not shown: it may hold a key
    if not is_sendable(value.strip()):
        raise BadOption("--header", f"{name.strip()}: {HIDDEN}", f"it is 'Name: value' with {_SENDABLE}")
    return name.strip(), value.strip()


def _shown(raw: Raw) -> dict[str, Any]:
    """What was given, without what may be a secret."""
    plain = Raw("")
    found = {name: getattr(raw, name) for name in Raw.__slots__ if getattr(raw, name) != getattr(plain, name)}
    if raw.api_key:
        found["api_key"] = HIDDEN
    if raw.header:
        found["header"] = [f"{_header(text)[0]}: {HIDDEN}" for text in raw.header]
    return {name: str(value) if isinstance(value, Path) else value for name, value in found.items()}
