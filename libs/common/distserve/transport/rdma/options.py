"""What can be set on the rdma transport."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from distserve.errors import ConfigError
from distserve.messages import TrafficClass
from distserve.transport.options import DSCP, StreamOptions, require_positive


@dataclass(frozen=True, slots=True)
class ClassOptions:
    """How packets of one traffic class are marked."""

    dscp: int  # 0..63; the traffic class octet is this << 2
    service_level: int = 0  # 0..15


def _classes() -> dict[TrafficClass, ClassOptions]:
    return {name: ClassOptions(DSCP[name]) for name in get_args(TrafficClass)}


@dataclass(frozen=True, slots=True)
class RdmaOptions:
    """Times in seconds. `common` has the times that every transport has: connect, peer and abort timeouts, back-off."""

    common: StreamOptions = field(default_factory=StreamOptions)
    devices: tuple[str, ...] = ()  # "mlx5_0" or "mlx5_0:1" (port); none: chosen by topology
    near_pci: str = ""  # the topology's centre: PCI address of the GPU with the pool; empty: where this process runs
    subnet: str = ""  # CIDR that the GID must be in; empty: any RoCE v2 GID
    classes: Mapping[TrafficClass, ClassOptions] = field(default_factory=_classes)
    depth: int = 256  # work requests in flight on a pair
    ack_timeout: int = 14  # 4.096 us * 2**14 = 67 ms, and ...
    retry: int = 6  # ... so many times again: a dead peer is noticed in about 0.5 s. Soft-RoCE takes 7 as for ever
    stop_timeout_s: float = 0.2  # for a writer to confirm that it has stopped; then its windows are invalidated
    ping_s: float = 1.0  # a peer with open leases is asked for a sign of life after so much silence
    progress_s: float = 0.1  # a writer reports progress no more often than this
    stripe_blocks: int = 8  # with several devices: this many blocks of a lease go by one, the next by another
    use_windows: bool = True  # memory windows where the device has them
    use_dmabuf: bool = True  # for a pool in GPU memory, where GPU and network card can; else it is staged
    stage_slots: int = 4  # staging: a sender's slots of pinned memory, at least 2 ...
    stage_slot_bytes: int = 16 << 20  # ... and their size; on a GPU below 16 MiB it is slower (docs/gpu-memory.md)
    landing_bytes: int = 1 << 30  # staging: a receiver's pinned memory; bounds the KV of leases that are being written
    store_timeout_s: float = 5.0  # for the GPU to take the blocks of one lease out of it
    poll_cpu: int | None = None  # a core on which completions are polled without sleeping; none: by event

    def __post_init__(self) -> None:
        require_positive(self, "stop_timeout_s", "ping_s", "progress_s", "depth", "stripe_blocks")
        require_positive(self, "stage_slots", "stage_slot_bytes", "landing_bytes", "store_timeout_s")
        for traffic_class, marks in self.classes.items():
            if not 0 <= marks.dscp <= 63 or not 0 <= marks.service_level <= 15:
                raise ConfigError(
                    f"class {traffic_class} has dscp {marks.dscp} and service level {marks.service_level}, must be "
                    "0..63 and 0..15",
                    key="classes",
                    value=traffic_class,
                    expected="dscp 0..63, service level 0..15",
                )
