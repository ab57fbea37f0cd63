"""The whole cluster's figures at one moment, as a gateway gathers them: GET /status, the page and `distserve monitor`.

Seconds, tokens, bytes and shares of 1. A rate is of the last `interval_s` seconds; a share, a mean or a quantile of the
last `window_s`, since a second has seen too little for one; or as the field says. None: nothing happened to measure it
by. Fields are added at will and never change their meaning.
"""

from __future__ import annotations

import msgspec


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Unknown fields are ignored: the server may be newer."""


class Quantiles(Part, frozen=True):
    """Seconds, over the last window_s."""

    count: int = 0
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class ClassStatus(Part, frozen=True):
    """Requests of one priority that ended in the last window_s."""

    num_requests: int = 0
    num_promised: int = 0  # of those, how many had been promised anything
    num_attained: int = 0  # of the promised, how many got all that was
    num_refused: int = 0  # answered 429, 503

    @property
    def attainment(self) -> float | None:
        return self.num_attained / self.num_promised if self.num_promised else None


class Second(Part, frozen=True):
    """One second of a gateway, also a line of telemetry.audit_file. Quantiles of the first tokens that came in it."""

    at_unix_s: float  # its end
    num_started: int = 0  # requests received
    num_ended: int = 0
    num_failed: int = 0
    num_first_tokens: int = 0
    num_tokens: int = 0
    ttft_p50_s: float | None = None
    ttft_p90_s: float | None = None
    ttft_p99_s: float | None = None
    ttft_max_s: float | None = None
    itl_p50_s: float | None = None
    itl_p99_s: float | None = None
    num_live: int = 0  # at its end


class GatewayStatus(Part, frozen=True):
    """The gateway that answers; the others are in `services` only."""

    id: str
    status: str  # as in /health
    reasons: list[str] = []
    uptime_s: float = 0.0
    window_s: float = 60.0
    num_live: int = 0  # sequences
    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0
    good_requests_per_s: float = 0.0  # that ended well and within every promise
    failed_per_s: float = 0.0
    ttft: Quantiles = Quantiles()
    itl: Quantiles = Quantiles()
    tpot: Quantiles = Quantiles()
    e2e: Quantiles = Quantiles()
    queue: Quantiles = Quantiles()  # where the time of requests went
    prefill: Quantiles = Quantiles()
    transfer: Quantiles = Quantiles()
    decode: Quantiles = Quantiles()
    classes: dict[str, ClassStatus] = {}  # by priority
    routes_per_s: dict[str, float] = {}  # by kind of route
    needs_key: bool = False  # requests need an API key
    breaker: str = "off"  # off | closed | open | half_open
    bus_connected: bool = True
    bus_reconnects: int = 0
    bus_drops: int = 0


class ServiceStatus(Part, frozen=True):
    """One entry of the registry, with what its own /metrics say; `reached` is False while it does not answer."""

    id: str
    role: str  # gateway | prefill | decode | kvstore
    status: str  # warming | ok | degraded | draining
    reasons: list[str] = []
    reached: bool = True
    model: str = ""
    version: str = ""
    host: str = ""
    transports_in_use: list[str] = []
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    total_blocks: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0  # of the free ones, those that still hold a prefix
    tokens_per_s: float = 0.0  # that passes have computed, of prompts and of outputs
    step_s: float | None = None  # decode: mean time of a step
    mean_batch: float | None = None  # sequences in a pass; of decode, in a step
    prompt_pass_s: float | None = None  # decode: what prefill takes, by its own fit, for a pass of mean_batch tokens
    kv_hit_rate: float | None = None  # of prompt tokens, those that were not computed; of a store node, of blocks
    num_prompt_tokens: int = 0  # that kv_hit_rate is of; of a store node, blocks
    preemptions_per_s: float = 0.0
    gpu_util: float | None = None


class TierStatus(Part, frozen=True):
    """A tier of the KV store, over all nodes; `hbm` is the workers' own pools."""

    tier: str
    num_blocks: int = 0
    num_bytes: int = 0
    capacity_bytes: int = 0  # 0: no limit
    hit_share: float | None = None  # of the blocks looked for, those found here
    read_bytes_per_s: float = 0.0
    written_bytes_per_s: float = 0.0


class FlowStatus(Part, frozen=True):
    """KV between services, by transport and class."""

    transport: str
    traffic_class: str
    dscp: int
    num_bytes: int = 0
    bytes_per_s: float = 0.0
    leases_per_s: float = 0.0
    retransmitted_share: float | None = None  # of the transport's packets or segments, whatever their class; None: not
    # known of this transport, or too few


class Trouble(Part, frozen=True):
    """A request that failed, or a service that left without a word."""

    at_unix_s: float
    service: str
    code: str
    message: str


class Warning(Part, frozen=True):
    """What a rule found, and what to do about it."""

    rule: str  # add_decode | hit_rate | retransmissions | degraded | breaker | slo
    message: str


class ClusterStatus(Part, frozen=True, kw_only=True):
    at_unix_s: float
    interval_s: float  # since the gathering before; 0.0: there was none, so there are no rates yet
    window_s: float = 0.0  # since the oldest gathering that is compared with, a minute ago at most where somebody looks
    model: str
    version: str
    gateway: GatewayStatus
    services: list[ServiceStatus] = []
    tiers: list[TierStatus] = []
    flows: list[FlowStatus] = []
    history: list[Second] = []  # of this gateway, the oldest first, at most 120
    troubles: list[Trouble] = []  # of this gateway, the newest first, at most 20
    warnings: list[Warning] = []
