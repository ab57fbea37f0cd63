"""What sections are made of: their base, and the fields that several have."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MIB = 1024 * 1024


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section."""


WorkerId = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9_-]*$", max_length=64, description="Name of this process; empty: generated.")
]
Threads = Annotated[
    int, Meta(ge=0, le=1024, description="Torch threads; 0: the cores of the machine shared among its workers.")
]
Cpus = Annotated[str, Meta(description="Cores to stay on, e.g. `0-3,6`; empty: any.")]
NumaNode = Annotated[
    str,
    Meta(
        pattern=r"^(auto|-1|\d{1,4})$",
        description="Node that its memory comes from while that has some: `auto`, that of `cpus`; -1: the nearest.",
    ),
]
MemoryLimit = Annotated[
    int,
    Meta(
        ge=0,
        le=64 * 1024**4,
        description="Most host memory of the process, its KV pool in full; 0: no limit of its own.",
    ),
]
Realtime = Annotated[
    str,
    Meta(
        pattern=r"^(off|[1-9]\d?)$",
        description="Real-time priority, 1 to 99, of the threads that compute (prefill SCHED_FIFO, decode SCHED_RR); "
        "needs `cpus` that no other role computes on; `off`: none.",
    ),
]
MpsPercentage = Annotated[
    int,
    Meta(ge=0, le=100, description="Part of a shared GPU's multiprocessors that it may use, by NVIDIA MPS; 0: all."),
]
Isolation = Annotated[
    Literal["wanted", "required"],
    Meta(
        description="Where `numa_node`, `memory_limit_bytes`, `realtime` or `mps_percentage` can't be had: `wanted` "
        "warns and is degraded, `required` does not start."
    ),
]
DrainSeconds = Annotated[
    float, Meta(ge=0, le=3600, description="Grace time on SIGTERM: what runs may finish, nothing new starts.")
]
MaxWaiting = Annotated[int, Meta(ge=1, le=1_000_000, description="Sequences that may wait; more are refused as busy.")]
Dscp = Annotated[int, Meta(ge=0, le=63, description="DSCP of its packets: the traffic class octet is four times it.")]
ServiceLevel = Annotated[int, Meta(ge=0, le=15, description="Service level of its queue pairs (rdma).")]
RdmaDevice = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]+(:[1-9]\d*)?$")]
MetricsPort = Annotated[
    int, Meta(ge=0, le=65535, description="Port of `/metrics` and `/health` of this worker; 0: any free one.")
]
