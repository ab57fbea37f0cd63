"""Keeping a process to its part of the host, before anything else runs in it.

All of this comes before torch is imported and before there is a second thread: OpenMP and CUDA read the environment
once, and threads inherit cores and memory policy from who starts them. isolation.py is the rest.
"""

import os
from collections.abc import Collection

from distserve.config import Config, DecodeConfig, PrefillConfig, get, parse_cpus
from distserve.errors import ConfigError
from distserve.machine import usable_cores
from distserve.sizing import num_threads
from distserve.transport.rdma.ports import numa_of
from distserve.worker import mps, numa, realtime
from distserve.worker.realtime import EngineRole


def keep_to_cores(role: str, cpus: str) -> None:
    """Keep this thread, and those that it starts, of a process of any role, on its cores; empty: anywhere. Raises
    ConfigError for cores that it can't have."""
    if not cpus:
        return
    try:
        os.sched_setaffinity(0, parse_cpus(cpus))
    except OSError as e:
        usable = ",".join(map(str, usable_cores()))
        raise ConfigError(
            f"{role}.cpus is {cpus!r}, must be among the usable cores {usable} ({e.strerror})",
            key=f"{role}.cpus",
            value=cpus,
            expected=f"cores among {usable}",
        ) from e


def enter(role: str, config: Config) -> None:
    """Keep the process of a service to its part of the host. Raises ConfigError for what is not there."""
    for engine_role in realtime.ROLES:
        if role == engine_role:
            enter_worker(engine_role, config)
            return
    keep_to_cores(role, get(config, f"{role}.cpus"))


def enter_worker(role: EngineRole, config: Config) -> None:
    """Keep a worker's process to its cores and its node, OpenMP to its threads, CUDA to its part of the GPU.

    Cores of a real-time worker are for its threads that compute alone: its others, this one first, go elsewhere. On one
    core with them a real-time thread would keep the event loop waiting for a whole pass.
    What can't be had is told later, by isolation.EngineBounds.
    """
    section, everywhere = section_of(role, config), affinity()
    keep_to_cores(role, section.cpus)
    _set_environment(
        num_threads(section.num_threads, section.cpus, len(usable_cores()), config.kv.workers_per_host),
        forced=bool(section.num_threads or section.cpus),
    )
    cpus = parse_cpus(section.cpus)
    node = numa.node_for(section.numa_node, cpus, f"{role}.numa_node")
    if node >= 0:
        numa.prefer(node)
    mps.ask(os.environ, section.mps_percentage, can_wait=role == "prefill")
    if priority := priority_of(role, config):
        left = other_cores(config, everywhere, cpus, node)
        if left and not realtime.refusal(role, priority):
            os.sched_setaffinity(0, left)


def affinity(thread: int = 0) -> set[int]:
    """Cores that a thread may run on, by its id; 0: this one."""
    return set(os.sched_getaffinity(thread) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def section_of(role: EngineRole, config: Config) -> PrefillConfig | DecodeConfig:
    """The settings of one role's workers."""
    return config.prefill if role == "prefill" else config.decode


def priority_of(role: EngineRole, config: Config) -> int:
    """0: an ordinary thread. Raises ConfigError for a priority without cores that it would be on."""
    section = section_of(role, config)
    if section.realtime == "off":
        return 0
    if not section.cpus:
        raise ConfigError(
            f"{role}.realtime is {section.realtime}, must be off without {role}.cpus: real-time threads on any core "
            "could keep everybody else from all of them",
            key=f"{role}.realtime",
            value=section.realtime,
            expected=f"off, or {role}.cpus with it",
        )
    return int(section.realtime)


def other_cores(config: Config, everywhere: Collection[int], cpus: Collection[int], node: int) -> set[int]:
    """Where threads of a real-time worker go that don't compute, of the cores `everywhere`; empty if nowhere: off its
    `cpus`, off those of the other role's real-time workers if that leaves any, on `node` (-1: any) if that has any."""
    left = set(everywhere).difference(cpus)
    for role in realtime.ROLES:
        section = section_of(role, config)
        if section.realtime != "off":
            left = left.difference(parse_cpus(section.cpus)) or left
    near = {cpu for cpu in left if numa_of([cpu]) == node}
    return near or left


def in_ranges(cpus: Collection[int]) -> str:
    """{0, 1, 2, 3, 6} -> `0-3,6`, as parse_cpus() reads it."""
    runs: list[tuple[int, int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1] = (runs[-1][0], cpu)
        else:
            runs.append((cpu, cpu))
    return ",".join(f"{first}-{last}" if first < last else str(first) for first, last in runs)


def _set_environment(threads: int, *, forced: bool) -> None:
    """OpenMP's. forced: whatever the environment says of threads."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if forced:
            os.environ[name] = str(threads)
        else:
            os.environ.setdefault(name, str(threads))
    # A waiting OpenMP thread spins by default and takes the core from whoever works. GNU's does not at all with
    # `passive` (its GOMP_SPINCOUNT is 0 then); Intel's and LLVM's are told by the other one.
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
