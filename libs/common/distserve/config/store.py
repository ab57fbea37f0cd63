"""The section of the KV store."""

from typing import Annotated, Literal

from msgspec import Meta

from distserve.config.fields import MIB, Cpus, DrainSeconds, MetricsPort, Section, WorkerId


class KVStoreConfig(Section, frozen=True):
    """A store node, and how workers use the store."""

    id: WorkerId = ""
    cpus: Cpus = ""
    dram_bytes: Annotated[
        int, Meta(ge=0, le=64 * 1024**4, description="Memory for blocks; 0: a quarter of what is free at start.")
    ] = 0
    folder: Annotated[
        str, Meta(description="Where blocks lie on disk; empty: in the cache folder, under the node's id or the model.")
    ] = ""
    disk_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=1024**5,
            description="Space for blocks on disk; 0: no disk tier. Never more than leaves a twentieth of the file "
            "system free.",
        ),
    ] = 8 * 1024 * MIB
    segment_bytes: Annotated[int, Meta(ge=MIB, le=64 * 1024 * MIB, description="Size of a file of blocks.")] = 256 * MIB
    direct_io: Annotated[
        Literal["auto", "off"], Meta(description="auto: past the kernel's cache, where the file system can.")
    ] = "auto"
    write_through: Annotated[
        bool,
        Meta(
            description="Write blocks to disk soon after they came, so that they outlive a crash; else when memory is "
            "short and at a clean stop."
        ),
    ] = True
    object_url: Annotated[
        str,
        Meta(
            description="Object store for conversations that leave the disk: `file:///path`, `s3://bucket/prefix`, "
            "`gs://…`, `az://…`; empty: none."
        ),
    ] = ""
    object_timeout_s: Annotated[float, Meta(gt=0, le=600, description="For one object.")] = 10.0
    eviction: Annotated[
        Literal["lfu", "lru"], Meta(description="lfu: W-TinyLFU, frequency with ageing; lru: least recently used.")
    ] = "lfu"
    high_watermark: Annotated[
        float,
        Meta(gt=0, le=1, description="A tier fuller than this is emptied in the background, down to `low_watermark`."),
    ] = 0.95
    low_watermark: Annotated[
        float, Meta(gt=0, le=1, description="How full a tier is left when it has been emptied.")
    ] = 0.85
    vip_quota: Annotated[
        float, Meta(ge=0, le=0.9, description="Part of each tier's blocks that pinned conversations may hold, in all.")
    ] = 0.25
    lease_ttl_s: Annotated[
        float, Meta(ge=0.5, le=3600, description="An offer dies after this long without a byte.")
    ] = 10.0
    max_leases: Annotated[int, Meta(ge=1, le=65_536, description="Offers under way at once; more are refused.")] = 64
    gc_interval_ms: Annotated[
        int, Meta(ge=10, le=60_000, description="How often pins and leases that have run out are collected.")
    ] = 500
    max_stale_slots: Annotated[
        int,
        Meta(ge=0, le=4096, description="Blocks of offers that broke are kept for the writer's retry, of so many."),
    ] = 16
    replicas: Annotated[
        int, Meta(ge=1, le=16, description="Nodes that hold a hot or pinned segment; 1: no copies.")
    ] = 2
    hot_lookups_per_s: Annotated[
        float,
        Meta(
            gt=0, le=1_000_000, description="A segment asked for more often than this is hot: copied to further nodes."
        ),
    ] = 50.0
    metrics_port: MetricsPort = 0
    drain_s: DrainSeconds = 10.0

    use: Annotated[bool, Meta(description="Workers ask the store's nodes and give them blocks, if there are any.")] = (
        True
    )
    lookup_timeout_s: Annotated[
        float, Meta(gt=0, le=10, description="A node that answers later is a miss; a prefill waits no longer.")
    ] = 0.25
    fetch_timeout_s: Annotated[float, Meta(gt=0, le=600, description="For the blocks of one prompt to come.")] = 5.0
    min_fetch_blocks: Annotated[
        int, Meta(ge=1, le=65_536, description="Fewer than this are computed rather than fetched.")
    ] = 2
    offer_blocks: Annotated[
        int, Meta(ge=0, le=1_000_000, description="Blocks that a worker holds for offers under way; 0: offers nothing.")
    ] = 1024
