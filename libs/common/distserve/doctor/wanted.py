"""What the configuration asks of this host: by it a finding is a failure, a warning, or of no interest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from distserve.config import Config, parse_cpus
from distserve.doctor.finding import Status
from distserve.messages import TrafficClass
from distserve.transport.options import DSCP


@dataclass(frozen=True, slots=True)
class Wanted:
    """`kind` is transport.kind; `devices` and `subnet` those of the rdma transport; `dscp` its classes' marks;
    `pool_bytes` about what a worker's KV pool will be, None if only the model can tell; `may_fall_back` is
    transport.allow_fallback; `cpus` are the cores that each role's workers stay on, none for any."""

    kind: str = "auto"
    devices: tuple[str, ...] = ()
    subnet: str = ""
    dscp: Mapping[TrafficClass, int] = field(default_factory=lambda: dict(DSCP))
    pool_bytes: int | None = None
    may_fall_back: bool = False
    cpus: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config, available_bytes: int) -> Wanted:
        t, kv = config.transport, config.kv
        return cls(
            kind=t.kind,
            may_fall_back=t.allow_fallback,
            devices=tuple(t.rdma.devices),
            subnet=t.rdma.subnet,
            dscp={name: getattr(t.classes, name).dscp for name in DSCP},
            pool_bytes=None if kv.num_blocks else int(available_bytes * kv.memory_fraction / kv.workers_per_host),
            cpus={"prefill": parse_cpus(config.prefill.cpus), "decode": parse_cpus(config.decode.cpus)},
        )

    @property
    def rdma(self) -> bool:
        """Whether RDMA would be used if it were there."""
        return self.kind in ("auto", "rdma")

    @property
    def severity(self) -> Status:
        """Of what keeps RDMA from being used: a failure if it was asked for by name and nothing else will do."""
        return "fail" if self.kind == "rdma" and not self.may_fall_back else "warn"

    @property
    def lossless_dscp(self) -> tuple[int, ...]:
        """The marks of KV in bulk, whose priorities alone want PFC."""
        return (self.dscp["prefill"],)
