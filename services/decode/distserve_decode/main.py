"""`distserve decode`: everything a decode worker is made of, composed in one place."""

import functools
import logging
import os
from contextlib import AsyncExitStack

from distserve import __version__
from distserve.bus import subjects
from distserve.bus.base import Bus, RegistryEvent
from distserve.config import Config
from distserve.errors import InvalidRequest, MalformedMessage
from distserve.kv.layout import block_bytes
from distserve.lifecycle import Shutdown, new_id, run_service
from distserve.messages import LeaseRelease, LeaseRequest, Message, WorkerInfo
from distserve.sizing import max_num_seqs
from distserve.transport.select import choose, host_key
from distserve.worker import bus_metrics, reporting
from distserve.worker.boot import EngineParts, build_engine
from distserve.worker.data_plane import check_forced
from distserve.worker.door import Door
from distserve.worker.engine_thread import EngineThread
from distserve.worker.fetching import Fetching
from distserve.worker.figures import WorkerFigures
from distserve.worker.outbox import Outbox
from distserve.worker.prefix_metrics import families, hit_rate
from distserve.worker.prefixes import Prefixes
from distserve.worker.report import Report
from distserve.worker.service import advertise_until_drained, connect
from distserve.worker.side_door import reachable, side_door
from distserve.worker.store import metrics as store_metrics
from distserve.worker.store.opening import Store
from distserve.worker.store.sharing import Sharing
from distserve.worker.tasks import background
from distserve.worker.traces import following_kept_traces, traced
from distserve_decode import metrics
from distserve_decode.limits import Limits
from distserve_decode.record import Record
from distserve_decode.reservations import Reservations
from distserve_decode.scheduler import Scheduler
from distserve_decode.sharing import open_sharing
from distserve_decode.turns import Turns
from distserve_decode.worker import DecodeWorker

log = logging.getLogger(__name__)


def main(config: Config) -> None:
    if not config.decode.colocated:
        check_forced(config)
    worker_id = config.decode.id or new_id("decode")
    with traced("decode", worker_id, config.telemetry):
        run_service(lambda shutdown: serve(config, worker_id, shutdown), grace_s=config.decode.drain_s)


async def serve(config: Config, worker_id: str, shutdown: Shutdown) -> None:
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(await connect(config.bus, worker_id))
        await stack.enter_async_context(following_kept_traces(bus))
        engine = EngineThread()
        stack.callback(engine.close)
        parts = await engine.run(
            build_engine,
            config,
            role="decode",
            max_num_seqs=config.decode.max_num_seqs,
            keep_hidden=False,
        )
        watch = await stack.enter_async_context(bus.registry().watch())
        sharing = await stack.enter_async_context(
            open_sharing(
                config,
                worker_id,
                bus,
                watch,
                parts,
                on_commit=lambda commit: worker.on_commit(commit),
                on_lost=lambda *lost: worker.on_lost(*lost),
                on_freed=lambda: worker.on_freed(),
            )
        )
        plane, store = sharing.plane, sharing.store
        figures = WorkerFigures("decode", config.model.served_name, parts.pool)
        worker, outbox = compose(config, worker_id, bus, parts, engine, sharing, figures)

        def describe(http_url: str = "") -> WorkerInfo:
            reasons = [*parts.isolation.reasons, *plane.reasons]
            return WorkerInfo(
                worker_id=worker_id,
                role="decode",
                model=config.model.served_name,
                status="degraded" if reasons and worker.status == "ok" else worker.status,
                reasons=reasons,
                version=__version__,
                host_key=host_key(),
                pid=os.getpid(),
                layout=parts.model.layout,
                endpoints=[r.endpoint for r in sharing.receivers.values()],
                transports=list(sharing.receivers),
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
                isolation=parts.isolation.as_dict(),
                kv_cache_hit_rate=hit_rate(worker.prefixes),
                gpu=parts.gpu,
                packets=plane.meter.packets,
                also=figures.families()
                + families(worker.prefixes, "decode")
                + store_metrics.families(store.client, "decode")
                + metrics.families(worker.scheduler, worker.offering, config.model.served_name)
                + bus_metrics.families(bus, {"role": "decode", "model": config.model.served_name})
                + (bus_metrics.build_info("decode"),),
            )

        def on_registry(event: RegistryEvent) -> None:
            worker.on_registry(event)
            if event.kind == "gone":
                plane.meter.forget(event.worker_id)

        watch.on_event(on_registry)
        await stack.enter_async_context(background(worker.run(), worker.reap()))
        also = functools.partial(answer, worker, store, colocated=config.decode.colocated)
        door = Door(worker, outbox, also, report=lambda: reporting.reply(report, bus))
        await stack.enter_async_context(await bus.serve(subjects.worker("decode", worker_id), door))
        url = await stack.enter_async_context(
            side_door(config.telemetry.metrics_host, config.decode.metrics_port, "decode.metrics_port", report)
        )
        await advertise_until_drained(
            bus, worker, functools.partial(describe, reachable(url, config)), shutdown, beat_s=config.bus.beat_s
        )


async def answer(worker: DecodeWorker, store: Store, message: Message, *, colocated: bool) -> Message | None:
    """What only workers say, and store nodes."""
    if isinstance(message, Store.ANSWERS):
        return await store.answer(message)
    if colocated and isinstance(message, LeaseRequest):
        raise InvalidRequest("this decode worker is colocated: it takes no hand-overs", param="decode_worker")
    return await leases(worker, message)


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
    config: Config,
    worker_id: str,
    bus: Bus,
    parts: EngineParts,
    engine: EngineThread,
    sharing: Sharing,
    figures: WorkerFigures,
) -> tuple[DecodeWorker, Outbox]:
    """The worker with its collaborators, not yet running."""
    plane, store = sharing.plane, sharing.store
    num_seqs = max_num_seqs(config.decode, parts.size)
    log.info("up to %d sequences in a step", num_seqs)
    layout = parts.model.layout
    outbox = Outbox(bus, worker_id, forget_s=config.decode.forget_s)
    prefixes = Prefixes(parts.pool, layout, keep=config.kv.prefix_cache)
    scheduler = Scheduler(
        parts.pool,
        prefixes,
        block_size=layout.block_size,
        max_num_seqs=num_seqs,
        chunk_tokens=max(layout.block_size, config.decode.chunk_tokens),
        policy=config.scheduler.policy,
    )
    turns = Turns(scheduler, by_class=scheduler.by_due)
    reservations = Reservations(
        parts.pool,
        sharing.leases,
        sharing.receivers,
        layout,
        choose=functools.partial(
            choose,
            forced=plane.forced,
            zero_copy_threshold_bytes=config.transport.zero_copy_threshold_bytes,
            may_fall_back=plane.may_fall_back,
        ),
        in_use=plane.in_use,
        growth_blocks=config.kv.growth_blocks,
        ttl_s=config.kv.lease_ttl_s,
        may_grant=lambda: worker.may_grant(),
        on_freed=lambda: worker.on_freed(),
        beside=turns,
        policy=config.scheduler.policy,
        max_waiting=config.decode.max_waiting,
    )
    turns.first_lease = lambda: reservations.first_waiting
    scheduler.may_begin = turns.may_begin
    worker = DecodeWorker(
        runner=parts.runner,
        engine=engine,
        pool=parts.pool,
        scheduler=scheduler,
        prefixes=prefixes,
        fetching=Fetching(
            parts.pool,
            prefixes,
            store.client,
            min_blocks=config.kvstore.min_fetch_blocks,
            timeout_s=config.kvstore.fetch_timeout_s,
            num_spoken_for=lambda: scheduler.num_spoken_for,
        ),
        store=store,
        reservations=reservations,
        outbox=outbox,
        record=Record(figures, worker_id),
        limits=Limits(
            eos_token_ids=parts.model.eos_token_ids,
            max_model_len=parts.size.max_model_len,
            max_waiting=config.decode.max_waiting,
            block_size=layout.block_size,
            colocated=config.decode.colocated,
            max_local_prefill_tokens=config.decode.max_local_prefill_tokens,
            block_bytes=block_bytes(layout),
        ),
    )
    return worker, outbox
