"""The gateway, composed: what it owns, in the order in which it starts; it ends the other way round."""

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import distserve
from distserve.api_keys import ApiKey
from distserve.bus import subjects
from distserve.bus.base import Bus, Subscription
from distserve.config import BreakerConfig, SloConfig
from distserve.errors import Draining
from distserve.messages import Load, TrafficClass, WorkerInfo, WorkerStatus
from distserve.transport.options import DSCP
from distserve.worker.membership import Membership
from distserve.worker.traces import following_kept_traces
from distserve_gateway import health, routing
from distserve_gateway.admission import Admission
from distserve_gateway.affinity import Affinity
from distserve_gateway.askers import Askers
from distserve_gateway.breaker import Policy
from distserve_gateway.breaker_metrics import BreakerMetrics
from distserve_gateway.chat_template import ChatTemplate
from distserve_gateway.cluster_view import ClusterView
from distserve_gateway.dispatch import Dispatch
from distserve_gateway.fallback import Fallback, Limits
from distserve_gateway.families import index_families
from distserve_gateway.intake import Intake
from distserve_gateway.keys import Keys
from distserve_gateway.kv_follower import KVFollower
from distserve_gateway.kv_index import KVIndex
from distserve_gateway.measuring import open_measures
from distserve_gateway.metrics import Metrics
from distserve_gateway.nats_door import NatsDoor
from distserve_gateway.own_status import OwnStatus
from distserve_gateway.peer_door import PeerDoor
from distserve_gateway.permits import Permits
from distserve_gateway.pipeline import Pipeline
from distserve_gateway.placement import Placement
from distserve_gateway.prefixes import Prefixes
from distserve_gateway.running import Running
from distserve_gateway.silence import SilenceWatch
from distserve_gateway.stopping import Stopping
from distserve_gateway.streams import Streams
from distserve_gateway.submission import Submission
from distserve_gateway.tokenizing import ModelTokenizer
from distserve_gateway.traces import Traces
from distserve_gateway.trials import Trials
from distserve_gateway.windows import Windows
from distserve_gateway.workers import Workers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """`model` is the served name; `context_length` what to assume while no worker says (tokens)."""

    gateway_id: str
    model: str
    context_length: int
    max_body_bytes: int = 8 * 1024 * 1024
    silence_s: float = 0.5
    request_timeout_s: float = 600.0
    submit_timeout_s: float = 5.0
    reply_timeout_s: float = 2.0
    max_concurrent: int = 1024
    max_local_prefill_tokens: int = 256
    beat_s: float = 1.0
    ttl_s: float = 2.5
    slo: SloConfig = field(default_factory=SloConfig)
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    fallback_limits: Limits = field(default_factory=Limits)
    keys: tuple[ApiKey, ...] = ()  # none: open to everybody
    dscp: Mapping[TrafficClass, int] = field(default_factory=lambda: DSCP)  # marks on the network, for people
    vllm_metric_names: bool = False
    audit_file: str = ""

    @property
    def answer_limit_s(self) -> float:
        """For a whole answer: a sequence past its deadline has ended with an error before."""
        return self.request_timeout_s + 5.0


class Gateway:
    """`async with` it to serve; the HTTP application is `app.build_app(gateway)`."""

    pipeline: Pipeline
    metrics: Metrics
    windows: Windows
    fallback: Fallback | None

    def __init__(
        self, bus: Bus, tokenizer: ModelTokenizer, template: ChatTemplate | None, options: GatewayOptions
    ) -> None:
        self.options = options
        self.created = int(time.time())
        self._bus = bus
        self._tokenizer = tokenizer
        self._template = template
        self._admission = Admission(options.max_concurrent)
        self.keys = Keys(options.keys)
        self.permits = Permits(options.keys)
        self.running = Running()
        self._stack = AsyncExitStack()
        self._door: Subscription | None = None
        self._was_ready = False

    async def __aenter__(self) -> Self:
        options = self.options
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(following_kept_traces(self._bus))
            self.traces = await stack.enter_async_context(Traces(self._bus, options.model))
            watch = await stack.enter_async_context(self._bus.registry().watch())
            self.watch = watch
            self.workers = Workers(watch, options.model)
            self.streams = await stack.enter_async_context(
                Streams(self._bus, options.gateway_id, self.workers, silence_s=options.silence_s)
            )
            index = KVIndex()
            self.kv = await stack.enter_async_context(KVFollower(self._bus, watch, options.model, index))
            silence = SilenceWatch(self._bus, self.streams, ttl_s=options.ttl_s)
            stack.callback(asyncio.create_task(silence.run(), name="silence").cancel)
            self.metrics, self.windows = await open_measures(
                stack,
                options,
                self._bus,
                watch,
                self.workers,
                num_live=lambda: len(self.streams),
                each_second=self._note_readiness,
            )
            self.metrics.show(lambda: index_families(options.model, index, self.kv.num_snapshots))
            affinity = Affinity()
            dispatch = Dispatch(
                self._bus,
                self.streams,
                affinity,
                submit_timeout_s=options.submit_timeout_s,
                reply_timeout_s=options.reply_timeout_s,
                max_local_prefill_tokens=options.max_local_prefill_tokens,
                on_route=self.metrics.routed,
                on_late=self.metrics.refused_for_slo,
                on_retry=self.metrics.retried,
            )
            submission = Submission(
                self.streams,
                dispatch,
                self._admission,
                prefixes=Prefixes(index, self.workers),
                affinity=affinity,
                request_timeout_s=options.request_timeout_s,
            )
            placement = await self._placement(stack, submission)
            behind = self._tokenizer, submission, placement, self.metrics, self.running, self.keys, self.permits
            self.pipeline = Pipeline(self._intake(), *behind)
            from_nats = Pipeline(self._intake(stream_by_default=True), *behind)
            self.stopping = Stopping(
                self._bus,
                self.running,
                self.workers,
                options.gateway_id,
                tenant_of=lambda authorization: self.keys.of(authorization).name,
            )
            await stack.enter_async_context(await self.stopping.open())
            askers = Askers(self._bus, options.gateway_id)
            await stack.enter_async_context(await askers.open())
            door = NatsDoor(self._bus, from_nats, askers, limit_s=options.answer_limit_s, traces=self.traces)
            self._door = await stack.enter_async_context(await door.open())
            own = OwnStatus(self, self._bus)
            self.cluster_view = await stack.enter_async_context(
                ClusterView(
                    self._bus, watch, own, gateway_id=options.gateway_id, model=options.model, dscp=options.dscp
                )
            )
            peers = await self._bus.serve(
                subjects.worker("gateway", options.gateway_id), PeerDoor(self.stopping, own.report)
            )
            await stack.enter_async_context(peers)
            stack.callback(self.windows.close)
            stack.callback(asyncio.create_task(self.windows.run(), name="windows").cancel)
            self._membership = await stack.enter_async_context(
                Membership(self._bus.registry(), self._info, beat_s=options.beat_s)
            )
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _placement(self, stack: AsyncExitStack, submission: Submission) -> Placement:
        """The breaker, and the fallback server if there is one."""
        options, metrics = self.options, BreakerMetrics()
        self.fallback = None
        if options.breaker.fallback_url:
            fallback = Fallback(options.breaker, options.model, self._admission, options.fallback_limits)
            self.fallback = await stack.enter_async_context(fallback)
        self.trials = Trials(Policy.of(options.breaker), on_change=metrics.changed)
        self.metrics.show(lambda: metrics.families(options.model, self.trials))
        stack.callback(asyncio.create_task(self.trials.run(), name="breaker").cancel)
        placement = Placement(self._tokenizer, submission, self.metrics, self.trials, metrics, self.fallback)
        stack.callback(placement.close)
        return placement

    def _intake(self, *, stream_by_default: bool = False) -> Intake:
        return Intake(
            self.options.model,
            self._tokenizer,
            self._template,
            self._admission,
            self.context_length,
            lambda: self._bus.max_payload_bytes,
            slo=self.options.slo,
            stream_by_default=stream_by_default,
        )

    def context_length(self) -> int:
        return routing.context_length(self.workers.snapshot, self.options.model, self.options.context_length)

    def health(self) -> tuple[bool, dict[str, Any]]:
        breaker, metrics = self.trials.breaker, self.metrics
        num_tokens = metrics.num_looked_up_tokens
        ready, report = health.report(
            self.workers,
            bus_connected=self._bus.connected,
            draining=self._admission.draining,
            breaker=breaker.describe(),
            fallback_serves=breaker.falls_back,
            was_ready=self._was_ready,
            kv_cache_hit_rate=metrics.num_cached_tokens / num_tokens if num_tokens else None,
        )
        self._was_ready = self._was_ready or ready
        return ready, report

    def _note_readiness(self) -> None:
        """One that was ready and is no more is not warming, whether anybody has asked meanwhile or not."""
        if not self._was_ready:
            self.health()

    async def drain(self, grace_s: float) -> bool:
        """Take nothing new, let streams finish within grace_s, end the rest with an error. True if none was ended."""
        self._admission.draining = True
        if self._door is not None:
            await self._door.close()
        await self._membership.beat()
        give_up = time.monotonic() + grace_s
        gone = Draining("the gateway went away before the answer was complete", retry_after_s=1.0)
        done = await self.streams.wait_empty(grace_s)
        if not done:
            log.warning("%d sequences did not finish in %.1f s and are ended", len(self.streams), grace_s)
            self.streams.fail_all(gone)
        if self.fallback is not None:
            done = await self.fallback.drain(give_up - time.monotonic(), gone) and done
        return done

    def _info(self) -> WorkerInfo:
        status: WorkerStatus = "draining" if self._admission.draining else "ok"
        return WorkerInfo(
            worker_id=self.options.gateway_id,
            role="gateway",
            model=self.options.model,
            status=status,
            version=distserve.__version__,
            pid=os.getpid(),
            load=Load(num_running=len(self.streams)),
        )
