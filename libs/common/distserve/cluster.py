"""A whole deployment on one machine: model, NATS, gateway, prefill, decode and the KV store's nodes, each its own
process. What `distserve up` and `distserve demo` share."""

import asyncio
import contextlib
import http.client
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from distserve.bus.base import Watch
from distserve.bus.nats import NatsBus
from distserve.bus.subjects import slug
from distserve.config import RESERVED_VARIABLES, Config, as_environment, parse_cpus
from distserve.errors import ConfigError, DeadlineExceeded
from distserve.machine import available_bytes, cache_folder, usable_cores
from distserve.messages import WorkerInfo
from distserve.models.resolve import resolve
from distserve.own_mps import OwnMps
from distserve.own_nats import OwnNats
from distserve.sizing import STORE_SHARE, Placement, place
from distserve.supervisor import Emit, Spec, Supervisor, service_command

STOP_ORDER = ("gateway", "prefill", "decode", "kvstore")  # streams end first, then what feeds them
_UNWIND_S = 10.0  # to leave the registry and unload, beyond a service's own grace time; then SIGKILL

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Shape:
    """How many workers of each role. Colocated decode workers need no prefill workers."""

    num_prefill: int = 1
    num_decode: int = 1
    num_kvstore: int = 0  # nodes of the KV store

    def names(self) -> dict[str, str]:
        """Every process's name -> its role."""
        workers = {f"prefill-{i}": "prefill" for i in range(self.num_prefill)}
        workers |= {f"decode-{i}": "decode" for i in range(self.num_decode)}
        workers |= {f"kvstore-{i}": "kvstore" for i in range(self.num_kvstore)}
        return {"gateway": "gateway"} | workers


@dataclass(slots=True)
class Cluster:
    """One that runs. `config` is what its services were started with."""

    config: Config
    shape: Shape
    placement: Placement
    supervisor: Supervisor
    watch: Watch
    nats: OwnNats | None
    mps: OwnMps
    seconds_to_ready: float = 0.0
    workers: dict[str, WorkerInfo] = field(default_factory=dict)  # by process name

    @property
    def address(self) -> tuple[str, int]:
        """Host and port at which this machine reaches the gateway."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.config.gateway.host)
        return host or self.config.gateway.host, self.config.gateway.port

    @property
    def url(self) -> str:
        host, port = self.address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def pids(self) -> list[int]:
        others = (self.nats.pid if self.nats else None, self.mps.pid)
        return self.supervisor.pids() + [pid for pid in others if pid]

    def missing(self) -> list[str]:
        """Processes that are not ready yet, by name; [] when the cluster can answer."""
        infos = self.watch.snapshot
        self.workers = {n: infos[c.id] for n, c in self.supervisor.children.items() if c.id in infos}
        ready = {n for n, info in self.workers.items() if info.status in ("ok", "degraded")}
        return [n for n in self.shape.names() if n not in ready]

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns when every worker is in the registry with status ok and the gateway says it is ready.

        Raises ConfigError when a service refused its configuration or model, DeadlineExceeded with what is missing.
        """
        began = time.monotonic()
        answer = "no answer yet"
        while True:
            if refused := self.supervisor.refused:
                raise ConfigError(f"{', '.join(refused)} refused to start: see the message above", value=refused[0])
            missing = self.missing()
            if not missing:
                status, answer = await asyncio.to_thread(_get, self.address, "/health/ready")
                if status == 200:
                    self.seconds_to_ready = time.monotonic() - began
                    return
            if time.monotonic() - began > timeout_s:
                waiting = ", ".join(missing) if missing else f"the gateway ({answer})"
                raise DeadlineExceeded(f"not ready after {timeout_s:g} s: waiting for {waiting}", timeout_s=timeout_s)
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def run_cluster(config: Config, shape: Shape, *, emit: Emit) -> AsyncIterator[Cluster]:
    """Start everything that settle() has prepared; on leaving, stop it in order: gateway, prefill, decode, kvstore,
    NATS.

    Leaving by an exception (a second Ctrl-C, say) kills what still runs. Not ready yet when entered: wait_ready().
    """
    placement = placement_of(config, shape)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(_kept_to(placement.others))
        nats = None
        if not config.bus.url:
            nats = await stack.enter_async_context(OwnNats(emit))
            config = _replace(config, bus={"url": nats.url})
        wanted = bool(config.prefill.mps_percentage or config.decode.mps_percentage)
        own_mps = await stack.enter_async_context(OwnMps(emit, wanted=wanted))
        bus = await stack.enter_async_context(
            await NatsBus.connect(
                config.bus.url,
                name="distserve-up",
                registry_ttl_s=config.bus.ttl_s,
                connect_timeout_s=config.bus.connect_timeout_s,
            )
        )
        watch = await stack.enter_async_context(bus.registry().watch())
        supervisor = await stack.enter_async_context(Supervisor(emit))
        for spec in specs(config, shape, placement, os.environ | own_mps.env):
            supervisor.start(spec)
        yield Cluster(config, shape, placement, supervisor=supervisor, watch=watch, nats=nats, mps=own_mps)
        await supervisor.stop(STOP_ORDER)


def specs(config: Config, shape: Shape, placement: Placement, env: Mapping[str, str]) -> list[Spec]:
    """The processes of a cluster, workers first: they take longest."""
    base = {k: v for k, v in env.items() if not k.startswith("DISTSERVE_") or k == "DISTSERVE_CACHE"}
    assert "DISTSERVE_CACHE" in RESERVED_VARIABLES
    base |= {"PYTHONUNBUFFERED": "1"}
    cores = {"prefill": iter(placement.prefill), "decode": iter(placement.decode)}
    found = []
    for name, role in sorted(shape.names().items(), key=lambda item: item[1] == "gateway"):
        own = config
        if role == "kvstore":
            own = _replace(config, kvstore=_store_shares(config, shape, name))
        if role in cores and (cpus := next(cores[role])) and not getattr(config, role).cpus:
            own = _replace(config, **{role: {"cpus": ",".join(map(str, cpus))}})
        found.append(
            Spec(
                name=name,
                role=role,
                command=service_command(role),
                env=base | as_environment(own),
                id_variable=f"DISTSERVE_{role.upper()}_ID",
                grace_s=getattr(config, role).drain_s + _UNWIND_S,
            )
        )
    return found


def placement_of(config: Config, shape: Shape) -> Placement:
    """Who gets which of the cores that this process may use; with the model on a GPU workers float unless set."""
    num = (shape.num_prefill, shape.num_decode)
    return place(config.prefill, config.decode, usable_cores(), *num, deal=not config.model.on_gpu)


@contextlib.contextmanager
def _kept_to(cores: tuple[int, ...]) -> Iterator[None]:
    """Keep this thread, and the processes that it starts, to these cores while inside: NATS, the gateway, store nodes
    and workers without cores of their own stay off those of real-time workers."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(cores)
    if before <= set(cores):
        yield
        return
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _store_shares(config: Config, shape: Shape, name: str) -> dict[str, Any]:
    """What one of several nodes of the KV store gets: a folder of its own, by the process's name, so that the next life
    of it (with another id) finds its blocks again; and its part of the memory, where that is not set."""
    folder = Path(config.kvstore.folder or cache_folder() / "kvstore" / slug(config.model.served_name))
    shares: dict[str, Any] = {}
    if not config.kvstore.folder or shape.num_kvstore > 1:
        shares["folder"] = str(folder / name)
    if not config.kvstore.dram_bytes and shape.num_kvstore > 1:
        shares["dram_bytes"] = int(STORE_SHARE * available_bytes()) // shape.num_kvstore
    return shares


def settle(config: Config, shape: Shape, say: Say) -> Config:
    """The configuration with all that must be the same in every service: the model's folder (fetched if it must be,
    which takes a while: `say` tells) and name, the port, the sharing. Raises ConfigError."""
    if shape.num_decode < 1 or (shape.num_prefill < 1 and not config.decode.colocated):
        raise ConfigError(
            f"{shape.num_prefill} prefill and {shape.num_decode} decode workers can't answer: at least one of each, "
            "or --colocated with decode workers only",
            expected="at least 1 of each",
        )
    if shape.num_prefill and config.decode.colocated:
        raise ConfigError(
            f"--prefill is {shape.num_prefill}, must be 0 or left out with --colocated (decode.colocated): colocated "
            "decode workers do all prefill, and nothing would be sent to prefill workers",
            value=shape.num_prefill,
            expected="0 with --colocated",
        )
    _require_realtime_apart(config, shape)
    path = resolve(config.model.path, report=say)
    port = _free_port(config.gateway.host, config.gateway.port)
    return _replace(
        config,
        model={"path": str(path), "name": config.model.served_name},
        gateway={"port": port},
        kv={"workers_per_host": max(config.kv.workers_per_host, shape.num_prefill + shape.num_decode)},
    )


def _require_realtime_apart(config: Config, shape: Shape) -> None:
    """Raises ConfigError where cores of a real-time role are the other's too: under `up` both are of one machine."""
    if not (shape.num_prefill and shape.num_decode) or config.prefill.realtime == config.decode.realtime == "off":
        return
    if shared := set(parse_cpus(config.prefill.cpus)) & set(parse_cpus(config.decode.cpus)):
        names = ", ".join(map(str, sorted(shared)))
        raise ConfigError(
            f"decode.cpus is {config.decode.cpus!r}, must have none of prefill.cpus, {config.prefill.cpus!r}, where a "
            f"role is real-time: core {names} is in both",
            key="decode.cpus",
            value=config.decode.cpus,
            expected="cores that are not in prefill.cpus",
        )


def _replace(config: Config, **sections: dict[str, Any]) -> Config:
    parts = {name: msgspec.structs.replace(getattr(config, name), **values) for name, values in sections.items()}
    return msgspec.structs.replace(config, **parts)


def _free_port(host: str, port: int) -> int:
    """`port`, or for 0 one that is free. Raises ConfigError if it is taken, before anything was started."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as e:
        raise ConfigError(
            f"gateway.port is {port}, but {host}:{port} can't be listened on ({e.strerror or e}): take another one, "
            "or --port 0 for any that is free",
            key="gateway.port",
            value=port,
            expected="a free port",
        ) from e


def _get(address: tuple[str, int], path: str) -> tuple[int, str]:
    """Status and body's beginning of a GET; (0, why) without an answer."""
    connection = http.client.HTTPConnection(*address, timeout=2.0)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read(2000).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as e:
        return 0, str(e) or type(e).__name__
    finally:
        connection.close()


def example(cluster: Cluster) -> str:
    """A first request to paste into a shell."""
    body = {
        "model": cluster.config.model.name,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    return f"curl {cluster.url}/v1/chat/completions -H 'content-type: application/json' -d '{json.dumps(body)}'"
