"""Where a sequence goes."""

from dataclasses import dataclass, field
from typing import Literal

# pair: prefill, then decode. The others have no prefill worker: decode computes the prompt itself, since it holds most
# of it (local), or prefill is behind (spill), or there is none (alone), or it is meant to (colocated).
Kind = Literal["pair", "local", "spill", "alone", "colocated"]


@dataclass(frozen=True, slots=True)
class Route:
    """`holder`: a decode worker that prefill may fetch a prefix from, or empty. `reason`: in words, for people."""

    prefill_worker: str | None  # None: the decode worker does both phases
    decode_worker: str
    holder: str = ""
    kind: Kind = field(default="pair", compare=False)
    num_uncached: int = field(default=0, compare=False)  # prompt tokens to compute, as far as is known
    reason: str = field(default="", compare=False)
    late_s: float = field(default=0.0, compare=False)  # than promised, as predicted; 0: in time, or nobody knows

    @property
    def first_worker(self) -> str:
        """Who is asked."""
        return self.prefill_worker or self.decode_worker

    @property
    def is_local(self) -> bool:
        """A decode worker does what is prefill's part elsewhere."""
        return self.kind in ("local", "spill", "alone")

    @property
    def is_favour(self) -> bool:
        """The decode worker may say no: a prefill worker is there for it."""
        return self.kind in ("local", "spill")
