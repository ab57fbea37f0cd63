"""`distserve up` and `distserve demo`: a cluster in the foreground of a terminal."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from distserve.cluster import STOP_ORDER, Cluster, Shape, example, run_cluster, settle
from distserve.config import Config, TransportConfig
from distserve.console import Console
from distserve.demo import run_demo
from distserve.errors import ConfigError, DistServeError, ModelUnsupported
from distserve.leftovers import Holdings
from distserve.lifecycle import Shutdown, run_service
from distserve.sizing import Placement, in_words
from distserve.supervisor import REFUSED
from distserve.telemetry import setup_logging
from distserve.worker.process import in_ranges

READY_S = 300.0  # a large model loads for minutes

Use = Callable[[Cluster, Console, Shutdown], Awaitable[bool]]


def run_up(config: Config, shape: Shape) -> int:
    """Run until asked to stop. Returns the exit status: REFUSED if a service refuses its configuration or model."""
    return _run(config, shape, _stay)


def run_demonstration(config: Config, shape: Shape) -> int:
    """Run, ask, stop. Returns the exit status: 0 only if every answer came and nothing was left behind,
    REFUSED as run_up()."""
    return _run(config, shape, _ask)


async def _stay(cluster: Cluster, console: Console, shutdown: Shutdown) -> bool:
    console.say()
    console.say("Ctrl-C stops everything.")
    console.say()
    await shutdown.wait()
    return True


async def _ask(cluster: Cluster, console: Console, shutdown: Shutdown) -> bool:
    console.say()
    work = asyncio.to_thread(run_demo, cluster.address, cluster.config.model.name, console)
    return await shutdown.run_until_requested(work)


def _run(config: Config, shape: Shape, use: Use) -> int:
    setup_logging("", level=config.telemetry.log_level, fmt=config.telemetry.log_format)
    console = Console(shape.names())
    config = settle(config, shape, console.say)  # before the event loop: Ctrl-C ends a download as it ends any program
    status = 1

    async def serve(shutdown: Shutdown) -> None:
        nonlocal status
        loop = asyncio.get_running_loop()
        console.on_closed = lambda: loop.call_soon_threadsafe(shutdown.request)
        held = Holdings()
        finished = refused = False
        async with run_cluster(config, shape, emit=console.emit) as cluster:
            try:
                console.say(f"starting {_plural(cluster)} …")
                if await shutdown.run_until_requested(cluster.wait_ready(READY_S)):
                    for line in banner(cluster):
                        console.say(line)
                    finished = await use(cluster, console, shutdown)
            except DistServeError as e:
                console.say(f"distserve: {e}")
                refused = isinstance(e, ConfigError | ModelUnsupported)
            held = await asyncio.to_thread(Holdings.of, cluster.pids())
            console.say(f"stopping: {', '.join(r for r in STOP_ORDER if r in shape.names().values())}, NATS …")
        left = await asyncio.to_thread(held.left)
        for line in left:
            console.say(f"distserve: left behind: {line}")
        if not left:
            console.say(
                f"stopped: {len(held.processes)} processes and {len(held.segments)} shared-memory segments are gone"
            )
        status = REFUSED if refused else 0 if finished and not left else 1

    # The event loop of the standard library: uvloop starts no process in a group of its own.
    run_service(serve, grace_s=_longest_grace_s(config), fast_loop=False)
    return status


def banner(cluster: Cluster) -> list[str]:
    """Where it is, what it serves, how large."""
    config, workers = cluster.config, cluster.workers
    decode = next(info for name, info in workers.items() if info.role == "decode")
    lengths = [info.max_model_len for info in workers.values() if info.max_model_len]
    dtype = f", {decode.layout.dtype}" if decode.layout else ""
    prefills = [info.transports for info in workers.values() if info.role == "prefill"]
    kinds = [e.kind for e in decode.endpoints if all(e.kind in known for known in prefills)]
    mode = "colocated" if config.decode.colocated else f"KV by {moved_by(config.transport, kinds)}"
    lines = [
        f"ready in {cluster.seconds_to_ready:.1f} s",
        f"  API       {cluster.url}/v1",
        f"  page      {cluster.url}/",
        f"  model     {config.model.name} ({min(lengths, default=0):,} tokens{dtype})",
        f"  workers   {_plural(cluster)}; {mode}",
    ]
    for name, info in sorted(workers.items()):
        if info.layout and info.load.total_blocks:
            size = info.layout.block_size
            tokens = info.load.total_blocks * size
            lines.append(f"  {name:<9} {info.load.total_blocks:,} KV blocks of {size} tokens = {tokens:,} tokens")
    lines.append(f"  cores     {cores_in_words(cluster.placement)}")
    nats = f"{config.bus.url}{'' if cluster.nats is None else f' (embedded, pid {cluster.nats.pid})'}"
    return [*lines, f"  NATS      {nats}", "", f"  {example(cluster)}"]


def cores_in_words(placement: Placement) -> str:
    """Who computes where, and where all else is."""
    roles = {"prefill": placement.prefill, "decode": placement.decode}
    said = [f"{role}-{i} on {in_ranges(cpus)}" for role, sets in roles.items() for i, cpus in enumerate(sets) if cpus]
    floating = f"all else floats on {in_ranges(placement.others)}"
    return "; ".join([*said, floating if said else f"nobody has cores of its own: {floating}"])


def moved_by(transport: TransportConfig, kinds: Sequence[str]) -> str:
    """What carries KV between workers of one machine that share these kinds, as transport/select.py chooses."""
    if transport.kind in kinds:
        return transport.kind
    if "shm" not in kinds:
        return ", ".join(kinds)
    limit = transport.zero_copy_threshold_bytes
    return f"shm (rdma above {in_words(limit).replace('.0 ', ' ')})" if "rdma" in kinds and limit else "shm"


def _plural(cluster: Cluster) -> str:
    shape = cluster.shape
    parts = ["1 gateway", f"{shape.num_prefill} prefill" if shape.num_prefill else "", f"{shape.num_decode} decode"]
    parts.append(f"{shape.num_kvstore} kvstore" if shape.num_kvstore else "")
    return ", ".join(filter(None, parts))


def _longest_grace_s(config: Config) -> float:
    return config.gateway.drain_s + config.prefill.drain_s + config.decode.drain_s + config.kvstore.drain_s
