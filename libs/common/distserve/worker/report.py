"""What a worker says of itself over HTTP: a picture taken on its event loop, put into words elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distserve.messages import WorkerInfo, WorkerStatus
from distserve.transport.meter import Flow, Tally
from distserve.transport.packets import PacketCounts
from distserve.worker.gpu import Gpu, GpuSample

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Holds nothing that the worker goes on changing, but its GPU and its packets, which are asked for when this is put
    into words: not on the event loop."""

    info: WorkerInfo
    bus_connected: bool
    in_use: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # peer -> kind -> reason
    pool_access: Mapping[str, str] = field(default_factory=dict)  # kind -> "host: ", "dmabuf: " or "staged: ", and why
    flows: Mapping[Flow, Tally] = field(default_factory=dict)
    num_fallbacks: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (peer, kind that failed) -> times
    isolation: Mapping[str, Any] = field(default_factory=dict)  # what it got of its host: isolation.Isolation
    kv_cache_hit_rate: float | None = None  # of its prompts' tokens; None before there were any
    gpu: Gpu | None = None
    packets: PacketCounts | None = None
    also: "tuple[Metric, ...]" = ()  # what else is measured: WorkerFigures, and what only this role has

    @property
    def ready(self) -> bool:
        """It takes work: registered, reachable and not about to leave."""
        return self.bus_connected and self.info.status in ("ok", "degraded")

    @property
    def status(self) -> WorkerStatus:
        """A worker that was cut off is degraded until it is back."""
        return "degraded" if self.info.status == "ok" and not self.bus_connected else self.info.status

    def gpu_sample(self) -> GpuSample | None:
        return None if self.gpu is None else self.gpu.sample()


def health(report: Report) -> dict[str, Any]:
    """The body of /health."""
    info, gpu = report.info, report.gpu_sample()
    lost = [] if report.bus_connected else ["not connected to the bus"]
    return {
        "status": report.status,
        "ready": report.ready,
        "role": info.role,
        "worker": info.worker_id,
        "model": info.model,
        "version": info.version,
        "gpu_util": None if gpu is None else gpu.utilization,
        "kv_cache_hit_rate": report.kv_cache_hit_rate,
        "transport": info.transports_in_use or info.transports,
        "transports": {
            "usable": info.transports,
            "in_use": {peer: dict(kinds) for peer, kinds in report.in_use.items()},
            "pool_access": dict(report.pool_access),
        },
        "isolation": dict(report.isolation),
        "reasons": lost + info.reasons,
    }
