"""The configuration: one frozen struct a section, each field with its range and what it means. A section may hold
others: `transport.rdma.depth`.

Sizes of 0 and empty names are worked out at start (sizing.py) and printed. Units are in the names: `_s` seconds,
`_bytes` bytes, `_tokens` tokens.
"""

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from distserve.config.fields import (
    MIB,
    Cpus,
    DrainSeconds,
    Dscp,
    Isolation,
    MaxWaiting,
    MemoryLimit,
    MetricsPort,
    MpsPercentage,
    NumaNode,
    RdmaDevice,
    Realtime,
    Section,
    ServiceLevel,
    Threads,
    WorkerId,
)
from distserve.config.serving import BreakerConfig, SloConfig
from distserve.config.store import KVStoreConfig
from distserve.config.telemetry import TelemetryConfig


class ModelConfig(Section, frozen=True):
    path: Annotated[
        str, Meta(min_length=1, description="Catalogue name (`smollm2`), folder, `.gguf` file or hub id.")
    ] = "smollm2"
    name: Annotated[str, Meta(max_length=200, description="Name it is served by; empty: from the path.")] = ""
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32", "float16"],
        Meta(description="Type of weights and KV; auto: the model's."),
    ] = "auto"
    max_model_len: Annotated[
        int, Meta(ge=0, le=10_000_000, description="Longest sequence, prompt and output, in tokens; 0: the model's.")
    ] = 0
    device: Annotated[
        str,
        Meta(
            pattern=r"^(auto|cpu|cuda(:\d+)?)$",
            description="`cpu`; `auto` means the same for now. `cuda` or `cuda:N` (not yet measured): with "
            "`decode.colocated`, or with KV by rdma (not yet run on a network card), the only kind that reaches a GPU.",
        ),
    ] = "auto"

    compiled: Annotated[
        Literal["auto", "off"],
        Meta(
            description="`auto`: passes run in compiled code where there is a C++ compiler (on a GPU: Triton), the "
            "model is of a kind it knows and both agree; until then, and else, in the model's own (docs/compiled.md, "
            "docs/gpu.md)."
        ),
    ] = "auto"
    attention: Annotated[
        Literal["auto", "sdpa", "triton"],
        Meta(description="Kernels of attention: torch's, or on a GPU ours (docs/gpu.md); `auto`: the best there is."),
    ] = "auto"

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def served_name(self) -> str:
        """The name clients use: `name`, else the path's last part (a hub id stays whole)."""
        if self.name:
            return self.name
        if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", self.path) and not self.path.endswith(".gguf"):
            return self.path
        last = self.path.rstrip("/").rsplit("/", 1)[-1]
        return last.removesuffix(".gguf") or self.path


class GatewayConfig(Section, frozen=True):
    id: WorkerId = ""
    cpus: Cpus = ""
    host: Annotated[str, Meta(min_length=1, description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port of the HTTP API; 0: any free one.")] = 8000
    max_body_bytes: Annotated[int, Meta(ge=1024, le=1024 * MIB, description="Largest request body; above it 413.")] = (
        8 * MIB
    )
    silence_s: Annotated[
        float, Meta(ge=0.05, le=60, description="A stream silent for this long is asked after at its worker.")
    ] = 0.5
    request_timeout_s: Annotated[float, Meta(gt=0, le=86_400, description="Longest life of a request.")] = 600.0
    submit_timeout_s: Annotated[
        float, Meta(gt=0, le=600, description="How long to look for a worker that accepts before 503.")
    ] = 5.0
    drain_s: DrainSeconds = 10.0
    max_concurrent: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Sequences in flight through this gateway; more are refused.")
    ] = 1024
    keys_file: Annotated[
        str, Meta(description="YAML file of API keys, hashed, with their classes and limits; empty: open to everybody.")
    ] = ""


class PrefillConfig(Section, frozen=True):
    id: WorkerId = ""
    num_threads: Threads = 0
    cpus: Cpus = ""
    numa_node: NumaNode = "auto"
    memory_limit_bytes: MemoryLimit = 0
    realtime: Realtime = "off"
    mps_percentage: MpsPercentage = 0
    isolation: Isolation = "wanted"
    keep_hidden: Annotated[
        bool, Meta(description="Send the last hidden state with the KV (needed by `decode.sample_first_token`).")
    ] = True
    max_batch_tokens: Annotated[
        int, Meta(ge=0, le=10_000_000, description="Tokens in one forward pass; 0: from memory and model.")
    ] = 0
    chunk_tokens: Annotated[
        int, Meta(ge=0, le=1_000_000, description="Longest piece of a prompt in one pass; 0: prompts are not cut.")
    ] = 512
    max_waiting: MaxWaiting = 256
    lease_wait_s: Annotated[
        float, Meta(gt=0, le=3600, description="How long decode may hold a request for room before it refuses.")
    ] = 30.0
    metrics_port: MetricsPort = 0
    drain_s: DrainSeconds = 10.0


class DecodeConfig(Section, frozen=True):
    id: WorkerId = ""
    num_threads: Threads = 0
    cpus: Cpus = ""
    numa_node: NumaNode = "auto"
    memory_limit_bytes: MemoryLimit = 0
    realtime: Realtime = "off"
    mps_percentage: MpsPercentage = 0
    isolation: Isolation = "wanted"
    colocated: Annotated[bool, Meta(description="Do all prefill here too, in chunks, without prefill workers.")] = False
    sample_first_token: Annotated[
        bool,
        Meta(
            description="Draw the first token here, from the hidden state, instead of in prefill. Prefill reads it too."
        ),
    ] = False
    max_num_seqs: Annotated[
        int, Meta(ge=0, le=65_536, description="Sequences in one step; 0: from the pool and the model.")
    ] = 0
    chunk_tokens: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Prompt tokens a step when it prefills itself.")
    ] = 256
    max_local_prefill_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000,
            description="A prompt of which it lacks at most so many tokens it prefills itself, if it holds most of it "
            "or prefill is behind; 0: never. Without prefill workers it prefills any.",
        ),
    ] = 256
    max_waiting: MaxWaiting = 256
    metrics_port: MetricsPort = 0
    drain_s: DrainSeconds = 10.0
    forget_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="A finished sequence nobody acknowledged is kept this long. Prefill reads it too.",
        ),
    ] = 60.0


class KVConfig(Section, frozen=True):
    block_size: Annotated[int, Meta(ge=8, le=256, description="Tokens in a block: a power of two.")] = 16
    num_blocks: Annotated[int, Meta(ge=0, le=100_000_000, description="Blocks in the pool; 0: from free memory.")] = 0
    memory_fraction: Annotated[
        float,
        Meta(gt=0, le=0.95, description="Part of the free memory for KV pools, shared among the machine's workers."),
    ] = 0.5
    workers_per_host: Annotated[
        int, Meta(ge=1, le=1024, description="Workers that share this machine's memory and cores; `up` sets it.")
    ] = 1
    lease_ttl_s: Annotated[float, Meta(ge=0.5, le=3600, description="A lease dies after this long without a byte.")] = (
        10.0
    )
    growth_blocks: Annotated[
        int, Meta(ge=0, le=1024, description="Blocks that a lease holds beyond the prompt, for the first output.")
    ] = 2
    prefix_cache: Annotated[
        bool,
        Meta(
            description="Keep full blocks after their sequence has ended, until their place is needed, and compute no "
            "prefix twice."
        ),
    ] = True


class TrafficClassConfig(Section, frozen=True):
    """How the packets of one class are marked."""

    dscp: Dscp = 0
    service_level: ServiceLevel = 0


class ClassesConfig(Section, frozen=True):
    """The traffic classes, messages.TrafficClass. Their marks are RFC 2474's: CS6, AF41 (RFC 2597), best effort."""

    decode: TrafficClassConfig = TrafficClassConfig(dscp=48)
    prefill: TrafficClassConfig = TrafficClassConfig(dscp=34)
    background: TrafficClassConfig = TrafficClassConfig(dscp=0)


class RdmaConfig(Section, frozen=True):
    """transport/rdma/options.py says more of each."""

    devices: Annotated[
        tuple[RdmaDevice, ...],
        Meta(description="Devices to use, `dev` or `dev:port`, e.g. `mlx5_0,mlx5_1:1`; none: the nearest one."),
    ] = ()
    subnet: Annotated[
        str, Meta(description="IP subnet that the GID must be in, e.g. `10.0.0.0/16`; empty: any RoCE v2 GID.")
    ] = ""
    depth: Annotated[int, Meta(ge=16, le=32_768, description="Work requests in flight on a queue pair.")] = 256
    ack_timeout: Annotated[
        int, Meta(ge=1, le=31, description="A packet not acknowledged for 4.096 us x 2^this is sent again (14: 67 ms).")
    ] = 14
    retry: Annotated[
        int, Meta(ge=0, le=7, description="So many times; then the peer is lost. Soft-RoCE takes 7 as for ever.")
    ] = 6
    stop_timeout_s: Annotated[
        float, Meta(ge=0.01, le=60, description="For a writer to confirm that it has stopped; then it is cut off.")
    ] = 0.2
    ping_s: Annotated[
        float,
        Meta(
            ge=0.05,
            le=60,
            description="A peer that is silent for this long while it has leases is asked for a sign of life.",
        ),
    ] = 1.0
    stripe_blocks: Annotated[
        int,
        Meta(
            ge=1,
            le=65_536,
            description="With several devices: so many blocks of a lease go by one, the next by another.",
        ),
    ] = 8
    use_windows: Annotated[
        bool, Meta(description="Expose only leased blocks, by memory windows, where the device has them.")
    ] = True
    use_dmabuf: Annotated[
        bool,
        Meta(
            description="A pool in GPU memory: let the device reach it as a dma-buf, without memory windows, where "
            "both can. Else, or with false, KV is staged in host memory."
        ),
    ] = True
    stage_slots: Annotated[
        int, Meta(ge=2, le=1024, description="Staged: slots of pinned memory that a prefill worker's KV leaves by.")
    ] = 4
    stage_slot_bytes: Annotated[
        int,
        Meta(
            ge=4096,
            le=1024 * MIB,
            description="Staged: bytes of one slot, or a layer of one block if that is more; slower below 16 MiB.",
        ),
    ] = 16 * MIB
    landing_bytes: Annotated[
        int,
        Meta(
            ge=4096,
            le=1024 * 1024 * MIB,
            description="Staged: bytes of pinned memory that KV arrives in at a decode worker, for all leases that are "
            "being written at once; one lease that needs more is refused.",
        ),
    ] = 1024 * MIB
    store_timeout_s: Annotated[
        float, Meta(ge=0.01, le=600, description="Staged: for the GPU to take one lease's blocks out of that memory.")
    ] = 5.0
    poll_cpu: Annotated[
        int,
        Meta(
            ge=-1,
            le=65_535,
            description="Core on which completions are polled without sleeping; -1: by event. Every worker on the host "
            "with this value spins on that one core: give each its own, by `--set` or its environment.",
        ),
    ] = -1


class TransportConfig(Section, frozen=True):
    kind: Annotated[
        Literal["auto", "cuda_ipc", "shm", "tcp", "rdma"],
        Meta(description="auto: the best one for each pair of workers. Or force one."),
    ] = "auto"
    allow_fallback: Annotated[
        bool,
        Meta(
            description="Where the forced kind can't be used, take what auto would, and be degraded. "
            "Else that is an error."
        ),
    ] = False
    zero_copy_threshold_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=1024 * 1024 * MIB,
            description="auto on one host: larger leases go by rdma, which costs no core a copy, the others by shm; "
            "0: all by shm.",
        ),
    ] = 64 * MIB
    host: Annotated[
        str, Meta(description="Address that peers reach; empty: loopback, or that of the route to NATS.")
    ] = ""
    port: Annotated[int, Meta(ge=0, le=65535, description="Port of the KV data plane; 0: any free one.")] = 0
    connect_timeout_s: Annotated[float, Meta(gt=0, le=600, description="To connect to a peer.")] = 5.0
    commit_timeout_s: Annotated[
        float, Meta(gt=0, le=3600, description="To send what is left and have it verified.")
    ] = 30.0
    span_bytes: Annotated[
        int, Meta(ge=4096, le=1024 * MIB, description="Bytes in one write, about: layers are grouped up to it.")
    ] = MIB
    classes: ClassesConfig = ClassesConfig()
    rdma: RdmaConfig = RdmaConfig()


class BusConfig(Section, frozen=True):
    url: Annotated[
        str, Meta(description="NATS server, e.g. `nats://10.0.0.1:4222`; empty: `distserve up` starts its own.")
    ] = ""
    connect_timeout_s: Annotated[float, Meta(gt=0, le=600, description="To reach the server at start.")] = 10.0
    request_timeout_s: Annotated[
        float, Meta(gt=0, le=600, description="How long a gateway waits for one worker's answer before the next.")
    ] = 2.0
    beat_s: Annotated[float, Meta(ge=0.05, le=60, description="Between two heartbeats.")] = 1.0
    ttl_s: Annotated[
        float, Meta(ge=0.1, le=600, description="A worker silent for this long is gone; over two beats.")
    ] = 2.5


class SchedulerConfig(Section, frozen=True):
    policy: Annotated[
        Literal["slo", "fcfs"],
        Meta(
            description="Order of the queues. `slo`: by when first tokens and next tokens are due, with fair shares. "
            "`fcfs`: first come, first served."
        ),
    ] = "slo"


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole tree. Made by load_config(), which checks it; `Config()` is all defaults."""

    model: ModelConfig = ModelConfig()
    gateway: GatewayConfig = GatewayConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    kv: KVConfig = KVConfig()
    kvstore: KVStoreConfig = KVStoreConfig()
    transport: TransportConfig = TransportConfig()
    bus: BusConfig = BusConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    slo: SloConfig = SloConfig()
    breaker: BreakerConfig = BreakerConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
