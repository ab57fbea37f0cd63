"""What services tell each other so that people can see them: figures, health, and which traces are kept."""

from distserve.messages.base import Message


class ReportRequest(Message, frozen=True):
    """To any worker or store node: its /metrics and /health, over the bus, since its HTTP port may be out of reach."""


class ReportReply(Message, frozen=True):
    """`exposition`: Prometheus's text format; `health`: JSON, as /health has it."""

    exposition: bytes
    health: bytes


class TracesKept(Message, frozen=True):
    """Published by gateways on subjects.traces(): these requests, not in the ratio, failed or missed a promise. Whoever
    holds spans of them exports those now, and what comes yet."""

    trace_ids: list[bytes]  # 16 bytes each
