"""What else wants seats and blocks of a decode worker, for who grants leases."""

from typing import Protocol

from distserve.messages import LeaseRequest


class Beside(Protocol):
    """What there is beside the leases of hand-overs (turns.py)."""

    def growth(self, request: LeaseRequest) -> int:
        """Blocks that its sequence is expected to take beyond its prompt."""

    def spare(self, request: LeaseRequest, growth: int) -> int | None:
        """Blocks that must stay free beside its lease's, if it is to grow by `growth` more than that holds. None:
        another goes first."""

    def granted(self) -> None:
        """A lease was."""


class Alone:
    """Nothing else."""

    def growth(self, request: LeaseRequest) -> int:
        return 0

    def spare(self, request: LeaseRequest, growth: int) -> int | None:
        return 0

    def granted(self) -> None: ...
