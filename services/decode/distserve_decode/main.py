"""`distserve decode`: everything a decode worker is made of, composed in one place."""

import functools
import logging
import os
from contextlib import AsyncExitStack

from distserve import __version__
from distserve.bus import subjects
from distserve.bus.base import Bus, RegistryEvent
from distserve.config import Config
from distserve.errors import MalformedMessage
from distserve.kv.lease import LeaseTable, first_epoch
from distserve.lifecycle import Shutdown, new_id, run_service
from distserve.messages import LeaseRelease, LeaseRequest, Message, WorkerInfo
from distserve.sizing import max_num_seqs
from distserve.transport.base import Receiver
from distserve.transport.select import choose, host_key
from distserve.worker.boot import EngineParts, build_engine
from distserve.worker.data_plane import DataPlane, check_forced, plan, receivers
from distserve.worker.door import Door
from distserve.worker.engine_thread import EngineThread
from distserve.worker.outbox import Outbox
from distserve.worker.report import Report
from distserve.worker.service import advertise_until_drained, connect
from distserve.worker.side_door import reachable, side_door
from distserve.worker.tasks import background
from distserve_decode.reservations import Reservations
from distserve_decode.scheduler import Scheduler
from distserve_decode.worker import DecodeWorker, Limits

log = logging.getLogger(__name__)


def main(config: Config) -> None:
    if not config.decode.colocated:
        check_forced(config)
    worker_id = config.decode.id or new_id("decode")
    run_service(lambda shutdown: serve(config, worker_id, shutdown), grace_s=config.decode.drain_s)


async def serve(config: Config, worker_id: str, shutdown: Shutdown) -> None:
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(await connect(config.bus, worker_id))
        engine = EngineThread()
        stack.callback(engine.close)
        parts = await engine.run(
            build_engine,
            config,
            threads=config.decode.num_threads,
            cpus=config.decode.cpus,
            max_num_seqs=config.decode.max_num_seqs,
            keep_hidden=False,
        )
        worker, outbox = compose(config, worker_id, bus, parts, engine)
        kv_receivers: dict[str, Receiver] = {}
        plane = DataPlane([], "auto", may_fall_back=False)
        if not config.decode.colocated:
            plane = plan(config, parts.memory)
            kv_receivers = await receivers(
                config,
                plane,
                parts.memory,
                worker_id,
                bus,
                on_commit=worker.on_commit,
                on_lost=worker.on_lost,
                stack=stack,
            )
            worker.reservations = Reservations(
                parts.pool,
                LeaseTable(first_epoch()),
                kv_receivers,
                parts.model.layout,
                choose=functools.partial(
                    choose,
                    forced=plane.forced,
                    zero_copy_threshold_bytes=config.transport.zero_copy_threshold_bytes,
                    may_fall_back=plane.may_fall_back,
                ),
                in_use=plane.in_use,
                growth_blocks=config.kv.growth_blocks,
                ttl_s=config.kv.lease_ttl_s,
                may_grant=worker.may_grant,
                on_freed=worker.on_freed,
                max_waiting=config.decode.max_waiting,
            )

        def describe(http_url: str = "") -> WorkerInfo:
            return WorkerInfo(
                worker_id=worker_id,
                role="decode",
                model=config.model.served_name,
                status="degraded" if plane.reasons and worker.status == "ok" else worker.status,
                reasons=plane.reasons,
                version=__version__,
                host_key=host_key(),
                pid=os.getpid(),
                layout=parts.model.layout,
                endpoints=[r.endpoint for r in kv_receivers.values()],
                transports=list(kv_receivers),
                transports_in_use=plane.in_use.kinds,
                http_url=http_url,
                max_model_len=parts.size.max_model_len,
                eos_token_ids=list(parts.model.eos_token_ids),
                colocated=config.decode.colocated,
                load=worker.load(),
            )

        def report() -> Report:
            return Report(
                info=describe(),
                bus_connected=bus.connected,
                in_use=plane.in_use.snapshot(),
                pool_access=dict(plane.pool_access),
                flows=plane.meter.snapshot(),
            )

        def on_registry(event: RegistryEvent) -> None:
            worker.on_registry(event)
            if event.kind == "gone":
                plane.in_use.forget(event.worker_id)
                plane.meter.forget(event.worker_id)

        watch = await stack.enter_async_context(bus.registry().watch())
        watch.on_event(on_registry)
        await stack.enter_async_context(background(worker.run(), worker.reap()))
        door = Door(worker, outbox, also=lambda message: leases(worker, message))
        await stack.enter_async_context(await bus.serve(subjects.worker("decode", worker_id), door))
        url = await stack.enter_async_context(
            side_door(config.telemetry.metrics_host, config.decode.metrics_port, "decode.metrics_port", report)
        )
        await advertise_until_drained(
            bus, worker, functools.partial(describe, reachable(url, config)), shutdown, beat_s=config.bus.beat_s
        )


async def leases(worker: DecodeWorker, message: Message) -> Message | None:
    """What only prefill workers say."""
    match message:
        case LeaseRequest():
            return await worker.lease(message)
        case LeaseRelease():
            worker.release_lease(message)
            return None
    raise MalformedMessage(f"a decode worker has no answer to {type(message).__name__}", kind=type(message).__name__)


def compose(
    config: Config, worker_id: str, bus: Bus, parts: EngineParts, engine: EngineThread
) -> tuple[DecodeWorker, Outbox]:
    """The worker with its collaborators, not yet running and without reservations."""
    num_seqs = max_num_seqs(config.decode, parts.size)
    log.info("up to %d sequences in a step", num_seqs)
    block_size = parts.model.layout.block_size
    outbox = Outbox(bus, worker_id, forget_s=config.decode.forget_s)
    worker = DecodeWorker(
        runner=parts.runner,
        engine=engine,
        pool=parts.pool,
        scheduler=Scheduler(
            parts.pool,
            block_size=block_size,
            max_num_seqs=num_seqs,
            chunk_tokens=max(block_size, config.decode.chunk_tokens),
        ),
        outbox=outbox,
        limits=Limits(
            eos_token_ids=parts.model.eos_token_ids,
            max_model_len=parts.size.max_model_len,
            max_waiting=config.decode.max_waiting,
            block_size=block_size,
            colocated=config.decode.colocated,
        ),
    )
    return worker, outbox
