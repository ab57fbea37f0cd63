"""What comes beside a request's body: headers of HTTP, or of a NATS message."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distserve_gateway.request_trace import NO_TRACE, RequestTrace


@dataclass(frozen=True, slots=True)
class Envelope:
    """As it was written; empty: absent. `authorization` holds a secret. `trace`: what its door has made of it."""

    request_id: str = ""  # the asker's own name for it
    session_id: str = ""
    authorization: str = ""
    priority: str = ""
    ttft_slo_ms: str = ""
    tpot_slo_ms: str = ""
    deadline_ms: str = ""
    first_token: str = ""
    trace: RequestTrace = NO_TRACE

    def __repr__(self) -> str:
        return f"Envelope({self.request_id!r})"


NONE = Envelope()

HEADERS = {
    "request_id": "x-request-id",
    "session_id": "x-session-id",
    "authorization": "authorization",
    "priority": "x-priority",
    "ttft_slo_ms": "x-ttft-slo-ms",
    "tpot_slo_ms": "x-tpot-slo-ms",
    "deadline_ms": "x-deadline-ms",
    "first_token": "x-first-token",
}


def envelope(get: Callable[[str], str | None]) -> Envelope:
    """get(name): the header of a name in lower case; None if it is absent."""
    given: dict[str, Any] = {field: get(header) or "" for field, header in HEADERS.items()}
    return Envelope(**given)
