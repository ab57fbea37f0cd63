"""What an offer says, checked and cut into pieces. Plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distserve.errors import KVError, MalformedMessage
from distserve.kv.hashing import HASH_BYTES
from distserve.messages import ChainRun, Priority
from distserve.messages.store import MAX_DEPTH
from distserve_kvstore.disk.format import check_names


@dataclass(frozen=True, slots=True)
class Piece:
    """Wanted blocks that follow one another in a chain, `blocks[i]` the row of the i-th hash."""

    parent: bytes
    start: int
    hashes: bytes  # packed
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose the blocks of an offer are."""

    tenant: str = ""
    conversation: str = ""
    priority: Priority = "normal"

    def is_of(self, tenant: str, conversation: str) -> bool:
        """Of this conversation; without one, of this tenant."""
        return self.tenant == tenant and conversation in ("", self.conversation)


def require_short(tenant: str, conversation: str) -> None:
    """Raises MalformedMessage for names that a stored block has no room for."""
    try:
        check_names(tenant, conversation)
    except KVError as e:
        raise MalformedMessage(str(e), **e.fields) from None


def checked(run: ChainRun) -> bytes:
    """The run's packed hashes. Raises MalformedMessage unless it can be stored: whole hashes, and the one before."""
    if len(run.hashes) % HASH_BYTES or len(run.parent) != HASH_BYTES:
        raise MalformedMessage(
            f"an offered run has {len(run.hashes)} bytes of hashes and a parent of {len(run.parent)}, must have a "
            f"multiple of {HASH_BYTES} and {HASH_BYTES}",
            field="runs",
        )
    if run.start > MAX_DEPTH - len(run.hashes) // HASH_BYTES:
        raise MalformedMessage(
            f"an offered run of {len(run.hashes) // HASH_BYTES} blocks starts at depth {run.start}, must end at "
            f"{MAX_DEPTH} or before",
            field="runs",
        )
    return run.hashes


def pieces(
    runs: Sequence[ChainRun], hashes: Sequence[list[bytes]], wanted: Sequence[int], blocks: Sequence[int]
) -> list[Piece]:
    """The wanted blocks of the runs together (wanted ascending, blocks[k] the row of wanted[k]), cut where one run ends
    or one is left out."""
    found: list[Piece] = []
    k, first = 0, 0
    for run, names in zip(runs, hashes, strict=True):
        stop = first + len(names)
        while k < len(wanted) and wanted[k] < stop:
            n = 1
            while k + n < len(wanted) and wanted[k + n] == wanted[k] + n < stop:
                n += 1
            i = wanted[k] - first
            found.append(
                Piece(
                    parent=names[i - 1] if i else run.parent,
                    start=run.start + i,
                    hashes=b"".join(names[i : i + n]),
                    blocks=list(blocks[k : k + n]),
                )
            )
            k += n
        first = stop
    return found
