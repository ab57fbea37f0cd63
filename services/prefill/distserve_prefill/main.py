"""`distserve prefill`: everything a prefill worker is made of, composed in one place."""

import asyncio
import functools
import logging
import os
from collections.abc import Callable
from contextlib import AsyncExitStack

from distserve import __version__
from distserve.bus import subjects
from distserve.bus.base import Bus, RegistryEvent, Watch
from distserve.config import Config
from distserve.kv.hashing import pack
from distserve.lifecycle import Shutdown, new_id, run_service
from distserve.machine import available_bytes
from distserve.messages import KVLayout, LeaseRequest, WorkerInfo
from distserve.sizing import activation_bytes, max_batch_tokens
from distserve.transport.base import Sender
from distserve.transport.select import host_key
from distserve.worker import bus_metrics, reporting
from distserve.worker.boot import EngineParts, build_engine
from distserve.worker.data_plane import DataPlane, check_forced, plan, senders, span_bytes
from distserve.worker.door import Door
from distserve.worker.engine_thread import EngineThread
from distserve.worker.fetching import Fetching
from distserve.worker.figures import WorkerFigures
from distserve.worker.outbox import Outbox
from distserve.worker.pass_model import PassModel
from distserve.worker.prefix_metrics import families, hit_rate
from distserve.worker.prefixes import Prefixes
from distserve.worker.report import Report
from distserve.worker.service import advertise_until_drained, connect
from distserve.worker.side_door import reachable, side_door
from distserve.worker.store import metrics as store_metrics
from distserve.worker.store.opening import Store
from distserve.worker.tasks import background
from distserve.worker.traces import following_kept_traces, traced
from distserve_prefill.attempts import Attempts
from distserve_prefill.candidates import decode_candidates
from distserve_prefill.fallbacks import Fallbacks
from distserve_prefill.handoff import Handoff
from distserve_prefill.job import Job
from distserve_prefill.limits import Limits
from distserve_prefill.own_store import prefix_store
from distserve_prefill.recorder import Recorder
from distserve_prefill.scheduler import Scheduler
from distserve_prefill.worker import PrefillWorker

log = logging.getLogger(__name__)

LEASE_PARTS = 3  # of a hand-over's lease, one of which may go by without a chunk: decode ends it after all


def main(config: Config) -> None:
    check_forced(config)
    worker_id = config.prefill.id or new_id("prefill")
    with traced("prefill", worker_id, config.telemetry):
        run_service(lambda shutdown: serve(config, worker_id, shutdown), grace_s=config.prefill.drain_s)


async def serve(config: Config, worker_id: str, shutdown: Shutdown) -> None:
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(await connect(config.bus, worker_id))
        await stack.enter_async_context(following_kept_traces(bus))
        engine = EngineThread()
        stack.callback(engine.close)
        parts = await engine.run(
            build_engine,
            config,
            role="prefill",
            max_num_seqs=0,
            keep_hidden=config.prefill.keep_hidden,
        )
        plane = plan(config, parts.memory)
        # On a thread: registering the pool with a device pins every page of it, which takes seconds for a large one.
        kv_senders = await asyncio.to_thread(senders, config, plane, parts.memory, worker_id, bus)
        for sender in kv_senders.values():
            stack.push_async_callback(sender.stop)
        watch = await stack.enter_async_context(bus.registry().watch())
        sharing = await stack.enter_async_context(
            prefix_store(config, worker_id, bus, watch, parts, plane, kv_senders, lambda: worker.look_again())
        )
        store = sharing.store
        fallbacks = Fallbacks(
            plane.kinds,
            plane.forced,
            may_fall_back=plane.may_fall_back,
            trial_s=2 * config.transport.connect_timeout_s,
        )
        figures = WorkerFigures("prefill", config.model.served_name, parts.pool)
        worker, outbox = compose(
            config, worker_id, bus, watch, parts, engine, plane, kv_senders, fallbacks, store, figures
        )

        def describe(http_url: str = "") -> WorkerInfo:
            reasons = [*parts.isolation.reasons, *plane.reasons, *fallbacks.reasons(watch.snapshot)]
            return WorkerInfo(
                worker_id=worker_id,
                role="prefill",
                model=config.model.served_name,
                status="degraded" if reasons and worker.status == "ok" else worker.status,
                reasons=reasons,
                version=__version__,
                host_key=host_key(),
                pid=os.getpid(),
                layout=parts.model.layout,
                transports=plane.kinds,
                transports_in_use=plane.in_use.kinds,
                http_url=http_url,
                max_model_len=parts.size.max_model_len,
                eos_token_ids=list(parts.model.eos_token_ids),
                load=worker.load(),
            )

        def report() -> Report:
            return Report(
                info=describe(),
                bus_connected=bus.connected,
                in_use=plane.in_use.snapshot(),
                pool_access=dict(plane.pool_access),
                flows=plane.meter.snapshot(),
                num_fallbacks=dict(fallbacks.counts),
                isolation=parts.isolation.as_dict(),
                kv_cache_hit_rate=hit_rate(worker.prefixes),
                gpu=parts.gpu,
                packets=plane.meter.packets,
                also=figures.families()
                + families(worker.prefixes, "prefill")
                + store_metrics.families(store.client, "prefill")
                + bus_metrics.families(bus, {"role": "prefill", "model": config.model.served_name})
                + (bus_metrics.build_info("prefill"),),
            )

        def on_registry(event: RegistryEvent) -> None:
            worker.on_registry(event)
            if event.kind == "gone":
                fallbacks.forget(event.worker_id)
                plane.meter.forget(event.worker_id)

        watch.on_event(on_registry)
        await stack.enter_async_context(background(worker.run(), worker.reap()))
        await stack.enter_async_context(
            # Before it is advertised.
            await bus.serve(
                subjects.worker("prefill", worker_id),
                Door(worker, outbox, store.answer, report=lambda: reporting.reply(report, bus)),
            )
        )
        url = await stack.enter_async_context(
            side_door(config.telemetry.metrics_host, config.prefill.metrics_port, "prefill.metrics_port", report)
        )
        await advertise_until_drained(
            bus, worker, functools.partial(describe, reachable(url, config)), shutdown, beat_s=config.bus.beat_s
        )


def compose(
    config: Config,
    worker_id: str,
    bus: Bus,
    watch: Watch,
    parts: EngineParts,
    engine: EngineThread,
    plane: DataPlane,
    kv_senders: dict[str, Sender],
    fallbacks: Fallbacks,
    store: Store,
    figures: WorkerFigures,
) -> tuple[PrefillWorker, Outbox]:
    """The worker with its collaborators, not yet running."""
    layout = parts.model.layout
    text = parts.model.model.config.get_text_config(decoder=True)
    pass_tokens = max_batch_tokens(
        config.prefill,
        parts.size,
        activation_bytes_per_token=activation_bytes(
            parts.model.hidden_size, int(getattr(text, "intermediate_size", 4 * parts.model.hidden_size)), 4
        ),
        available_bytes=available_bytes(),
        device=str(parts.model.device),
    )
    log.info("up to %d tokens in a pass, %s of one prompt", pass_tokens, config.prefill.chunk_tokens or "all")
    outbox = Outbox(bus, worker_id, forget_s=config.decode.forget_s)
    prefixes = Prefixes(parts.pool, layout, keep=config.kv.prefix_cache)
    scheduler = Scheduler(
        parts.pool,
        prefixes,
        block_size=layout.block_size,
        max_batch_tokens=pass_tokens,
        chunk_tokens=config.prefill.chunk_tokens,
        policy=config.scheduler.policy,
        weights={"vip": config.slo.vip_weight, "normal": config.slo.normal_weight, "batch": config.slo.batch_weight},
        model=PassModel(),
        longest_pause_s=config.kv.lease_ttl_s / LEASE_PARTS,
    )
    worker = PrefillWorker(
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
        outbox=outbox,
        recorder=Recorder(figures, worker_id),
        layout=layout,
        limits=Limits(
            eos_token_ids=parts.model.eos_token_ids,
            max_model_len=parts.size.max_model_len,
            max_waiting=config.prefill.max_waiting,
            span_bytes=span_bytes(config, parts.memory),
            sample_on_decode=config.decode.sample_first_token,
            hidden_dtype=parts.model.dtype,
        ),
        make_handoff=handoff_factory(config, worker_id, bus, watch, layout, plane, kv_senders, fallbacks, figures),
    )
    return worker, outbox


def handoff_factory(
    config: Config,
    worker_id: str,
    bus: Bus,
    watch: Watch,
    layout: KVLayout,
    plane: DataPlane,
    kv_senders: dict[str, Sender],
    fallbacks: Fallbacks,
    figures: WorkerFigures,
) -> Callable[[Job], Handoff]:
    def make(job: Job) -> Handoff:
        request, chain = job.request, job.sequence.chain
        ask = LeaseRequest(
            key=request.key,
            prefill_worker=worker_id,
            num_tokens=len(request.token_ids),
            layout=layout,
            transports=[],
            host_key=host_key(),
            traffic_class=request.traffic_class,
            wait_s=config.prefill.lease_wait_s,
            slo=job.slo,
            max_new_tokens=request.sampling.max_tokens - job.sequence.num_output_tokens,
            hashes=b"" if chain is None else pack(chain.hashes),
        )
        return Handoff(
            bus,
            ask,
            lambda tried: decode_candidates(watch.snapshot, request, layout, tried),
            kv_senders.__getitem__,
            fallbacks,
            plane.in_use,
            connect_timeout_s=config.transport.connect_timeout_s,
            commit_timeout_s=config.transport.commit_timeout_s,
            give_up_s=config.prefill.lease_wait_s,
            deadline=job.deadline,
            attempts=Attempts(job.span, figures.fault),
        )

    return make
