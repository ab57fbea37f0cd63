"""What a request is promised and may use: its body's fields, else its headers, else its API key's, else `slo.*`."""

import re

from distserve.api_keys import PRIORITIES, ApiKey
from distserve.config import SloConfig
from distserve.errors import Forbidden, InvalidRequest
from distserve.messages import Priority
from distserve_gateway.calls import Terms
from distserve_gateway.envelope import HEADERS, Envelope
from distserve_gateway.params import RANGES
from distserve_gateway.schema import SampledBody

_NUMBER = re.compile(r"[0-9]{1,15}(\.[0-9]{1,15})?")


def terms_of(body: SampledBody, envelope: Envelope, key: ApiKey, slo: SloConfig) -> Terms:
    """Raises InvalidRequest naming field or header, Forbidden for a priority that the key may not use."""
    defaults = {"ttft_slo_ms": slo.ttft_ms, "tpot_slo_ms": slo.tpot_ms, "deadline_ms": slo.deadline_ms}

    def seconds(name: str) -> float | None:
        given = _given_ms(name, body, envelope)
        if given is None:
            given = getattr(key, name)
        ms = given if given is not None else defaults[name]
        return ms / 1000 if ms else None

    return Terms(
        priority=_priority(body, envelope, key),
        ttft_s=seconds("ttft_slo_ms"),
        tpot_s=seconds("tpot_slo_ms"),
        deadline_s=seconds("deadline_ms"),
        tenant=key.name,
    )


def _given_ms(name: str, body: SampledBody, envelope: Envelope) -> float | None:
    value: float | None = getattr(body, name)
    if value is not None:
        RANGES[name].check(name, value)
        return value
    text = getattr(envelope, name).strip()
    if not text:
        return None
    header = HEADERS[name]
    if not _NUMBER.fullmatch(text):
        expected = f"a number of milliseconds {RANGES[name].words}"
        raise InvalidRequest(
            f"{header} is {text[:60]!r}, must be {expected}", param=header, value=text[:60], expected=expected
        )
    RANGES[name].check(header, float(text))
    return float(text)


def _priority(body: SampledBody, envelope: Envelope, key: ApiKey) -> Priority:
    param, given = "priority", body.priority
    if given is None or (type(given) is int and given == 0):  # 0 is vLLM's default, and says as little
        param, given = HEADERS["priority"], envelope.priority.strip() or None
    if given is None:
        return key.default_priority
    value = given.lower() if isinstance(given, str) else str(given)
    shown = given[:60] if isinstance(given, str) else value[:60]
    if value not in PRIORITIES:
        expected = f"one of {', '.join(PRIORITIES)}"
        raise InvalidRequest(f"{param} is {shown!r}, must be {expected}", param=param, value=shown, expected=expected)
    if value not in key.allowed:
        may = ", ".join(key.allowed)
        raise Forbidden(
            f"{param} is {shown!r}, which API key {key.name!r} may not use: it may use {may}",
            param=param,
            value=shown,
            expected=may,
        )
    return value
