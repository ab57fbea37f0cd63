"""One suite over every bus: a Fabric is whatever carries the messages of several buses."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from distserve.bus.base import Bus
from distserve.bus.embedded import EmbeddedNats
from distserve.bus.memory import MemoryBus, MemoryHub
from distserve.bus.nats import NatsBus

TTL_S = 1.0


class Fabric(ABC):
    """`bus()` is one more connection, as of one more service. All of a fabric's are closed with it."""

    ttl_s = TTL_S

    def __init__(self) -> None:
        self.stack = AsyncExitStack()

    @abstractmethod
    async def bus(self, name: str = "test") -> Bus: ...

    @abstractmethod
    async def go_down(self) -> None:
        """Every bus is cut off, and the registry's entries are lost."""

    @abstractmethod
    async def come_back(self) -> None: ...


class MemoryFabric(Fabric):
    def __init__(self) -> None:
        super().__init__()
        self.hub = MemoryHub()
        self.buses: list[MemoryBus] = []

    async def bus(self, name: str = "test") -> Bus:
        bus = await self.stack.enter_async_context(MemoryBus(self.hub, name=name, registry_ttl_s=self.ttl_s))
        self.buses.append(bus)
        return bus

    async def go_down(self) -> None:
        for bus in self.buses:
            self.hub.cut(bus)
        self.hub.forget()

    async def come_back(self) -> None:
        for bus in self.buses:
            self.hub.heal(bus)


class NatsFabric(Fabric):
    def __init__(self) -> None:
        super().__init__()
        self.server = EmbeddedNats()
        self.server.start()
        self.stack.callback(lambda: self.server.stop())
        self.port = self.server.port

    async def bus(self, name: str = "test") -> Bus:
        return await self.stack.enter_async_context(
            await NatsBus.connect(self.server.url, name=name, registry_ttl_s=self.ttl_s)
        )

    async def go_down(self) -> None:
        self.server.kill()

    async def come_back(self) -> None:
        self.server = EmbeddedNats(port=self.port)
        self.server.start()


@pytest.fixture(params=["memory", "nats"])
async def fabric(request: pytest.FixtureRequest) -> AsyncIterator[Fabric]:
    made = MemoryFabric() if request.param == "memory" else NatsFabric()
    async with made.stack:
        yield made


@pytest.fixture
async def buses(fabric: Fabric) -> tuple[Bus, Bus]:
    return await fabric.bus("one"), await fabric.bus("other")
