"""What can be set on the stream transports (shm, tcp)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from distserve.errors import ConfigError
from distserve.messages import TrafficClass

# DSCP code points: CS6 for what decode waits for, AF41 for KV that hides behind arithmetic, best effort for the rest.
DSCP: Mapping[TrafficClass, int] = {"decode": 48, "prefill": 34, "background": 0}


def require_positive(options: object, *names: str) -> None:
    """Raises ConfigError naming the first that is not above 0."""
    for name in names:
        if (value := getattr(options, name)) <= 0:
            raise ConfigError(f"{name} is {value}, must be above 0", key=name, value=value, expected=">0")


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Times in seconds, sizes in bytes; all but loop_bytes must be positive."""

    connect_timeout_s: float = 5.0  # to reach a peer and exchange layouts
    peer_timeout_s: float = 5.0  # a peer that takes or acknowledges nothing for this long is lost
    abort_timeout_s: float = 5.0  # for the receiver's word that it has let go; then the connection is cut
    backoff_s: float = 0.05  # wait after a failed connect, doubled each time ...
    max_backoff_s: float = 2.0  # ... up to this
    frame_bytes: int = 1 << 20  # KV in one frame of tcp, about
    copy_bytes: int = 256 << 10  # KV in one copy of shm, about: how long a fence can be held, and summed while in cache
    loop_bytes: int = 1 << 20  # KV of a WRITE that the event loop moves itself, piece by piece; more: a thread
    max_frame_meta_bytes: int = 64 << 20  # a frame's head, ids, checksums and state; more is refused
    dscp: Mapping[TrafficClass, int] = field(default_factory=lambda: dict(DSCP))

    def __post_init__(self) -> None:
        require_positive(self, "connect_timeout_s", "peer_timeout_s", "abort_timeout_s", "backoff_s", "max_backoff_s")
        for name in ("frame_bytes", "copy_bytes", "max_frame_meta_bytes"):
            if getattr(self, name) < 4096:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, must be at least 4096",
                    key=name,
                    value=getattr(self, name),
                    expected=">=4096",
                )
        for traffic_class, value in self.dscp.items():
            if not 0 <= value <= 63:
                raise ConfigError(
                    f"dscp of {traffic_class} is {value}, must be 0..63", key="dscp", value=value, expected="0..63"
                )
