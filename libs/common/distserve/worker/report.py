"""What a worker says of itself over HTTP: a picture taken on its event loop, put into words elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distserve.messages import WorkerInfo
from distserve.transport.meter import Flow, Tally

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Holds nothing that the worker goes on changing."""

    info: WorkerInfo
    bus_connected: bool
    in_use: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # peer -> kind -> reason
    pool_access: Mapping[str, str] = field(default_factory=dict)  # kind -> "host: ", "dmabuf: " or "staged: ", and why
    flows: Mapping[Flow, Tally] = field(default_factory=dict)
    num_fallbacks: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (peer, kind that failed) -> times
    isolation: Mapping[str, Any] = field(default_factory=dict)  # what it got of its host: isolation.Isolation
    also: "tuple[Metric, ...]" = ()  # what only this role measures

    @property
    def ready(self) -> bool:
        """It takes work: registered, reachable and not about to leave."""
        return self.bus_connected and self.info.status in ("ok", "degraded")


def health(report: Report) -> dict[str, Any]:
    """The body of /health."""
    info = report.info
    lost = [] if report.bus_connected else ["not connected to the bus"]
    return {
        "status": "unavailable" if lost else info.status,
        "role": info.role,
        "worker": info.worker_id,
        "model": info.model,
        "version": info.version,
        "transports": {
            "usable": info.transports,
            "in_use": {peer: dict(kinds) for peer, kinds in report.in_use.items()},
            "pool_access": dict(report.pool_access),
        },
        "isolation": dict(report.isolation),
        "reasons": lost + info.reasons,
    }
