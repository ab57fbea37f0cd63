"""What a worker is kept to on its host, once its engine's thread is there: cores, a NUMA node, real-time priority,
memory, its part of a GPU. process.py has been before."""

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distserve.config import Config, DecodeConfig, PrefillConfig, parse_cpus
from distserve.errors import ConfigError
from distserve.machine import online_cores, usable_cores
from distserve.sizing import in_words, num_threads
from distserve.worker import memory_limit, mps, numa, realtime
from distserve.worker.process import affinity, in_ranges, keep_to_cores, priority_of, section_of
from distserve.worker.realtime import EngineRole

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """What a worker got, for /health. `cores` are those of the threads that compute, `other_cores` of all others.
    `reasons`: what was asked for and could not be had, and what would help."""

    cores: str = ""
    other_cores: str = ""
    num_threads: int = 0
    scheduling: str = "normal"  # or "fifo 10", "rr 10"
    numa_node: int = -1
    memory_limit_bytes: int = 0
    memory_limit_by: str = ""
    mps_percentage: int = 0
    reasons: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Without the reasons, which /health has for all things together."""
        return {name: value for name, value in asdict(self).items() if name != "reasons"}

    def __str__(self) -> str:
        parts = [
            f"computes on cores {self.cores}, {self.num_threads} thread{'s' * (self.num_threads > 1)}",
            f"all else on {self.other_cores}" if self.other_cores != self.cores else "",
            f"scheduling {self.scheduling}",
            f"memory of NUMA node {self.numa_node}" if self.numa_node >= 0 else "",
            f"at most {in_words(self.memory_limit_bytes)} (by {self.memory_limit_by})" if self.memory_limit_by else "",
            f"{self.mps_percentage} % of the GPU" if self.mps_percentage else "",
        ]
        return "; ".join(filter(None, parts))


@dataclass(slots=True)
class EngineBounds:
    """Made and used on the engine's thread: enter() before it computes, close() once the model has run, for only then
    all threads that compute are there and the memory is taken."""

    role: EngineRole
    config: Config
    num_threads: int = 0
    _node: int = -1
    _mps_percentage: int = 0
    _reasons: list[str] = field(default_factory=list)

    @property
    def section(self) -> PrefillConfig | DecodeConfig:
        return section_of(self.role, self.config)

    @property
    def limit(self) -> int:
        return self.section.memory_limit_bytes

    def enter(self) -> None:
        """Keep this thread, and those that it starts, to its cores and node. Raises ConfigError for what is not
        there."""
        section, role = self.section, self.role
        keep_to_cores(role, section.cpus)
        realtime.name_this_thread(role)  # by which other workers look where it computes
        self.num_threads = num_threads(
            section.num_threads, section.cpus, len(usable_cores()), self.config.kv.workers_per_host
        )
        node = numa.node_for(section.numa_node, parse_cpus(section.cpus), f"{role}.numa_node")
        if node >= 0:
            if not (why := numa.prefer(node)):
                self._node = node
            elif section.numa_node == "auto":  # nobody asked for it, and many containers forbid it
                log.info("memory of NUMA node %d can't be had, the kernel takes the nearest: %s", node, why)
            else:
                self._reasons.append(f"{role}.numa_node {node} can't be had: {why}")
        if section.mps_percentage:
            if why := mps.problem(os.environ):
                self._reasons.append(f"{role}.mps_percentage {section.mps_percentage} has no effect: {why}")
            else:
                self._mps_percentage = section.mps_percentage

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Threads that are started in here go where those go that don't compute."""
        own, others = affinity(), affinity(os.getpid())
        if own == others:
            yield
            return
        os.sched_setaffinity(0, others)
        try:
            yield
        finally:
            os.sched_setaffinity(0, own)

    def left_bytes(self, available: int) -> int:
        """Of the bytes that are free now, what a pool worked out from them may count on. Workers of a host share what
        is free, but each has its limit for itself."""
        if not self.limit:
            return available
        left = max(0, self.limit - memory_limit.private_bytes())
        return min(available, left * self.config.kv.workers_per_host)

    def require_room_for_model(self, model: Path) -> None:
        """Before it is loaded. Raises ConfigError where its files alone are more than the memory limit."""
        if self.limit:
            self._require_room(the_weights=memory_limit.weight_bytes(model))

    def require_room_for_pool(self, pool_bytes: int) -> None:
        """Once the model is loaded. Raises ConfigError where both are more than the memory limit."""
        if self.limit:
            self._require_room(the_KV_pool=pool_bytes, weights_and_all_else=memory_limit.private_bytes())

    def close(self, pool_bytes: int) -> Isolation:
        """The rest. pool_bytes: of a pool in host memory, else 0. Logs what the worker got, and a warning for each
        thing that it did not. Raises ConfigError for a limit that is too low, and for that thing if it was required."""
        section, role = self.section, self.role
        limited_by, scheduling = self._limit_memory(pool_bytes), self._schedule()
        got = Isolation(
            cores=in_ranges(affinity()),
            other_cores=in_ranges(affinity(os.getpid())),
            num_threads=self.num_threads,
            scheduling=scheduling,
            numa_node=self._node,
            memory_limit_bytes=self.limit if limited_by else 0,
            memory_limit_by=limited_by,
            mps_percentage=self._mps_percentage,
            reasons=tuple(self._reasons),
        )
        if got.reasons and section.isolation == "required":
            raise ConfigError(
                f"{'; '.join(got.reasons)}; {role}.isolation is required: with wanted it starts without",
                key=f"{role}.isolation",
                value="required",
                expected="wanted",
            )
        log.info("%s", got)
        for reason in got.reasons:
            log.warning("%s", reason)
        return got

    def _limit_memory(self, pool_bytes: int) -> str:
        if not self.limit:
            return ""
        self._require_room(the_KV_pool=pool_bytes, all_else_after_a_first_pass=memory_limit.private_bytes())
        by, why = memory_limit.bind(self.limit, pool_bytes)
        if why:
            self._reasons.append(f"{self.role}.memory_limit_bytes {self.limit} can't be had: {why}")
        return by

    def _require_room(self, **needed_bytes: int) -> None:
        memory_limit.require_room(self.limit, f"{self.role}.memory_limit_bytes", needed_bytes)

    def _schedule(self) -> str:
        role, priority = self.role, priority_of(self.role, self.config)
        if not priority:
            return "normal"
        why = realtime.refusal(role, priority) or self._in_the_way() or realtime.schedule(role, priority)
        # Looked at again: one that started at the same time was an ordinary one a moment ago.
        why = why or self._in_the_way()
        if not why:
            return f"{realtime.policy_name(role)} {priority}"
        realtime.schedule(role, 0)
        self._gather()
        self._reasons.append(f"{role}.realtime {priority} can't be had: {why}")
        return "normal"

    def _in_the_way(self) -> str:
        cpus, loop = parse_cpus(self.section.cpus), affinity(os.getpid())
        return realtime.conflict(self.role, cpus, loop, realtime.neighbours(), online_cores())

    def _gather(self) -> None:
        """Every thread back on the cores that the worker was given."""
        for tid in os.listdir("/proc/self/task"):
            try:
                os.sched_setaffinity(int(tid), parse_cpus(self.section.cpus))
            except ProcessLookupError:
                continue
