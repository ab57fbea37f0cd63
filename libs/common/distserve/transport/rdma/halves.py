"""A side's devices, its pool registered with each, and its halves of the pairs of one link."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from distserve.errors import TransportUnavailable
from distserve.messages import PairOffer, RailOffer, RailPairs
from distserve.transport.base import PoolMemory
from distserve.transport.rdma import ports
from distserve.transport.rdma.connect import CLASSES
from distserve.transport.rdma.device import Nic, Pair, PairOptions, Region
from distserve.transport.rdma.lanes import Counts
from distserve.transport.rdma.options import RdmaOptions
from distserve.transport.rdma.pool_access import PoolAccess, get_at, uses_windows

log = logging.getLogger(__name__)

OpenNics = Callable[[RdmaOptions], Sequence[tuple[Nic, RailOffer]]]


def open_configured(options: RdmaOptions) -> Sequence[tuple[Nic, RailOffer]]:
    """This host's ports as configured, or the one nearest to the pool: to its GPU, else to where this process runs.
    Raises ConfigError, TransportUnavailable, OSError."""
    from distserve.transport.rdma import verbs

    if why := verbs.available():
        raise TransportUnavailable(f"rdma cannot be used: {why}", kind="rdma")
    near = ports.numa_of_pci(options.near_pci) if options.near_pci else ports.numa_of()
    distances = ports.numa_distances(near) if near is not None else None
    chosen = ports.choose_ports(ports.discover(), options.devices, options.subnet, near, distances)
    with ExitStack() as undo:
        opened: list[tuple[Nic, RailOffer]] = []
        for index, port in enumerate(chosen):
            nic = verbs.open_nic(port)
            undo.callback(nic.close)
            opened.append((nic, ports.offer(index, port, nic.mtu, options.subnet)))
        undo.pop_all()
    return opened


@dataclass(slots=True)
class Devices:
    """Owned by the reactor's thread."""

    nics: list[Nic] = field(default_factory=list)
    offers: list[RailOffer] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    _access: PoolAccess | None = None

    def open(self, memory: PoolMemory, options: RdmaOptions, open_nics: OpenNics, *, receives: bool) -> Sequence[Nic]:
        """Opens the devices and registers the pool, all of it, before anything is served. Raises ConfigError,
        TransportUnavailable."""
        if memory.on_device is not None:
            options = replace(options, near_pci=memory.on_device.pci_address())
        try:
            for nic, offer in open_nics(options):
                self.nics.append(nic)
                self.offers.append(offer)
            if not self.nics:
                raise TransportUnavailable("this host has no RDMA device to use", kind="rdma")
            self._access = get_at(memory, self.nics, options, receives=receives)
        except BaseException as e:
            for nic in self.nics:
                nic.close()
            if isinstance(e, OSError):
                raise TransportUnavailable(f"rdma cannot be used: {e}", kind="rdma") from e
            raise
        names = ", ".join(nic.name for nic in self.nics)
        what = "into" if receives else "out of"
        log.info("rdma %s the pool on %s by %s: %s", what, memory.device, names, self._access)
        return self.nics

    @property
    def access(self) -> PoolAccess:
        """Once they are open."""
        if self._access is None:
            raise TransportUnavailable("the rdma devices are not open", kind="rdma")
        return self._access

    @property
    def pools(self) -> list[Region]:
        """Of each nic: what is registered of the pool, or instead of it."""
        return self.access.regions

    def close_access(self) -> None:
        """After the devices are closed. Blocks: not for an event loop."""
        if self._access is not None:
            self._access.close()

    def use_windows(self, index: int, options: RdmaOptions) -> bool:
        return uses_windows(self.nics[index], self.access.memory, options)

    def make_halves(self, options: RdmaOptions) -> Halves:
        """Raises OSError."""
        halves = Halves(self)
        try:
            for nic in self.nics:
                halves.pairs.append([nic.pair(_pair_options(options, i, nic)) for i in range(len(CLASSES))])
        except BaseException:
            halves.close()
            raise
        return halves


@dataclass(slots=True)
class Halves:
    """Pairs by device and class, not yet connected. What is not taken is closed by close()."""

    devices: Devices
    pairs: list[list[Pair]] = field(default_factory=list)

    def offers(self) -> list[RailPairs]:
        return [
            RailPairs(rail=offer, pairs=[PairOffer(qp_num=p.qp_num, psn=p.psn) for p in pairs])
            for offer, pairs in zip(self.devices.offers, self.pairs, strict=True)
        ]

    def take(self, index: int) -> list[Pair]:
        """The pairs of one device: they are the caller's."""
        taken, self.pairs[index] = self.pairs[index], []
        return taken

    def close(self) -> None:
        for pairs in self.pairs:
            for pair in pairs:
                pair.close()
        self.pairs = []


def _pair_options(options: RdmaOptions, class_index: int, nic: Nic) -> PairOptions:
    marks = options.classes[CLASSES[class_index]]
    return PairOptions(
        depth=min(options.depth, nic.max_depth),
        traffic_class=marks.dscp << 2,
        service_level=marks.service_level,
        ack_timeout=options.ack_timeout,
        retry=options.retry,
    )
