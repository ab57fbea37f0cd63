"""What the keys of a soft device open: memory that is registered with it, and windows onto that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.contracts.transport.soft_nic import SoftNic
    from tests.contracts.transport.soft_pair import SoftPair


@dataclass(eq=False)
class SoftRegion:
    nic: SoftNic
    address: int  # in work requests
    length: int
    remote_write: bool
    lkey: int
    rkey: int
    at: int  # where that is in this process
    takes_windows: bool = True
    keep: object = None

    def close(self) -> None:
        self.nic.forget("regions", self)
        self.nic.keys.pop(self.rkey, None)

    def has(self, address: int, length: int) -> bool:
        return self.address <= address and address + length <= self.address + self.length

    def pointer(self, address: int) -> int:
        return self.at + address - self.address

    def allows(self, pair: SoftPair, address: int, length: int) -> bool:
        return self.remote_write and self.has(address, length)


@dataclass(eq=False)
class SoftWindow:
    nic: SoftNic
    rkey: int
    pair: SoftPair | None = None
    region: SoftRegion | None = None
    address: int = 0
    length: int = 0
    is_valid: bool = False
    keep: object = None

    def close(self) -> None:
        if self.is_valid and self.pair is not None and self.pair.is_alive and not self.pair.is_broken:
            raise OSError(16, "a window that is bound on a live pair was deallocated")
        self.nic.forget("windows", self)
        self.nic.keys.pop(self.rkey, None)

    def pointer(self, address: int) -> int:
        assert self.region is not None
        return self.region.pointer(address)

    def allows(self, pair: SoftPair, address: int, length: int) -> bool:
        inside = self.address <= address and address + length <= self.address + self.length
        return self.is_valid and pair is self.pair and inside
