"""One segment: a file, and which of its records are whose."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

SUFFIX = ".seg"
NOWHERE = -1


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}{SUFFIX}"


@dataclass(slots=True, eq=False)
class Segment:
    """What changes of it belongs to the tier's lock."""

    number: int
    salt: int
    path: Path
    place_of: npt.NDArray[np.int32]  # [slots]; NOWHERE: the record is dead
    num_records: int = 0  # written, dead or alive; their slots are the first ones
    num_live: int = 0
    file_bytes: int = 0  # as it lies on the disk
    num_forgotten: int = 0  # dead records that must leave the disk soon
    damage: str = ""  # why its file is kept aside once its good blocks are out of it
    removed: bool = False
    dead: array[int] = field(default_factory=lambda: array("Q"))  # serials of the dead; other copies may live elsewhere

    @property
    def num_slots(self) -> int:
        return len(self.place_of)

    @property
    def num_dead(self) -> int:
        return self.num_records - self.num_live

    def adopt(self, first_slot: int, places: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Records that were just written from first_slot on are of these places."""
        self.place_of[first_slot : first_slot + len(places)] = places
        self.num_records = first_slot + len(places)
        self.num_live += len(places)

    def close(self, file_bytes: int) -> None:
        """Nothing will be written to it any more."""
        self.place_of = self.place_of[: self.num_records].copy()
        self.file_bytes = file_bytes

    def bury(self, slot: int, serial: int) -> None:
        """A live record is dead from now on."""
        self.place_of[slot] = NOWHERE
        self.num_live -= 1
        self.dead.append(serial)
